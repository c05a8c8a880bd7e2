"""Optimisers and the learning-rate schedule.

Vocabulary tables and one-row heads always go to AdamW: Muon orthogonalises a whole matrix, which makes no sense for a
table of which a step touches few rows, and crashes or diverges on a single row.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from firesteel import recipe as recipes
from firesteel.training.muon import Muon

_TABLES = ("markov_w1", "markov_w2", "lm_head", "embed_tokens", "codebook")


class Optimizers:
    """One or two optimisers that step together; learning rates are set by `set_scale`."""

    def __init__(self, module: nn.Module, settings: recipes.Train) -> None:
        matrices, rest_decayed, rest = split_parameters(module)
        self.peaks: list[tuple[torch.optim.Optimizer, float]] = []
        if settings.optimizer == "muon":
            muon = Muon(matrices, settings.muon_lr, weight_decay=settings.weight_decay, precision=settings.precision)
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

    def state_dict(self) -> list[dict[str, Any]]:
        return [o.state_dict() for o, _ in self.peaks]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for (optimizer, _), state in zip(self.peaks, states, strict=True):
            optimizer.load_state_dict(state)


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
