"""Optimisers and the learning-rate schedule.

Vocabulary tables and one-row heads always go to AdamW: Muon orthogonalises a whole matrix, which makes no sense for a
table of which a step touches few rows, and crashes or diverges on a single row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.training.muon import Muon
from firesteel.training.parallel import ALONE, World

_TABLES = ("markov_w1", "markov_w2", "lm_head", "embed_tokens", "codebook")


class Optimizers:
    """One or two optimisers that step together; learning rates are set by `set_scale`.

    Args:
        world: the processes that train the module; with several, what they share of the work is shared.
    """

    def __init__(self, module: nn.Module, settings: recipes.Train, world: World = ALONE) -> None:
        matrices, rest_decayed, rest = split_parameters(module)
        self.peaks: list[tuple[torch.optim.Optimizer, float]] = []
        if settings.optimizer == "muon":
            muon = Muon(matrices, settings.muon_lr, weight_decay=settings.weight_decay, precision=settings.precision, world=world)
            self.peaks.append((muon, settings.muon_lr))
        else:
            rest_decayed = matrices + rest_decayed
        groups = [{"params": rest_decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=settings.lr, betas=(0.9, settings.beta2), eps=1e-8, fused=True)
        self.peaks.append((adamw, settings.lr))

    def set_scale(self, scale: float) -> None:
        """Every learning rate becomes its peak times `scale`."""
        for optimizer, peak in self.peaks:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale

    def step(self) -> None:
        for optimizer, _ in self.peaks:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer, _ in self.peaks:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self, names: dict[Tensor, str]) -> dict[str, Tensor]:
        """What the optimisers remember, as `KIND/PARAMETER`; empty before the first step.

        Args:
            names: parameter -> its name.
        """
        return {f"{kind}/{names[p]}": value for optimizer, _ in self.peaks for p, state in optimizer.state.items() for kind, value in state.items()}

    def room(self, names: dict[Tensor, str], stored: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Tensor]:
        """Make the optimisers remember zeros of what is stored, to be overwritten; returns those that `tensors` would.

        Args:
            names: parameter -> its name.
            stored: size and dtype of the stored tensors by name, others among them.
        """
        owners = {names[p]: (optimizer, p) for optimizer, _ in self.peaks for group in optimizer.param_groups for p in group["params"]}
        for name, (size, dtype) in stored.items():
            kind, parameter = name.split("/", 1)
            if kind != "drafter" and parameter in owners:
                optimizer, p = owners[parameter]
                # Momenta are laid out as their parameter is; what counts steps is one number.
                optimizer.state[p][kind] = torch.zeros_like(p) if size == p.shape else torch.zeros(size, dtype=dtype, device=p.device)
        return self.tensors(names)


def split_parameters(module: nn.Module) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Trainable parameters as (matrices of layers, vocabulary tables, vectors, stacks of vectors and one-row heads)."""
    matrices: list[Tensor] = []
    tables: list[Tensor] = []
    rest: list[Tensor] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim != 2 or min(parameter.shape) == 1:
            rest.append(parameter)
        elif any(t in name for t in _TABLES):
            tables.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, tables, rest


def lr_scale(progress: float, warmup: float, final: float) -> float:
    """Linear warm-up to 1 over the first `warmup` of training, then a cosine to `final`. `progress` in [0, 1]."""
    if warmup > 0 and progress < warmup:
        return max(progress / warmup, 1e-3)
    done = min(1.0, (progress - warmup) / (1.0 - warmup))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * done))
