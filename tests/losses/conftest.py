"""Small random losses: N blocks of g slots, partially valid, one block wholly invalid, overlapping teacher positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from firesteel.losses.dense import dense_loss
from firesteel.losses.fused import fused_loss
from firesteel.losses.types import Head, LossResult, LossWeights, Piece, Teacher


@dataclass
class Case:
    pieces: list[Piece]
    head: Head
    teacher: Teacher
    labels: Tensor
    weights: Tensor
    slot_target: Tensor
    confidence: Tensor
    denominator: float | None = None
    draft_rows: Tensor | None = None

    @property
    def inputs(self) -> list[Tensor]:
        return [t for piece in self.pieces for t in piece] + [self.confidence]

    def dense(self, mix: LossWeights) -> LossResult:
        return dense_loss(*self._arguments(mix), **self._options())

    def fused(self, mix: LossWeights, *, chunk_rows: int = 8, compile: bool = False) -> LossResult:
        return fused_loss(*self._arguments(mix), **self._options(), chunk_rows=chunk_rows, compile=compile)

    def _arguments(self, mix: LossWeights) -> tuple[Any, ...]:
        return self.pieces, self.head, self.teacher, self.labels, self.weights, self.slot_target, mix, self.confidence

    def _options(self) -> dict[str, Any]:
        return {"denominator": self.denominator, "draft_rows": self.draft_rows}


def gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Gradients, zeros where the loss does not depend on an input."""
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(found, inputs, strict=True)]


def make_case(
    *,
    reduced: bool = False,
    lognorm: bool = False,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
    blocks: int = 7,
    slots: int = 4,
    vocab: int = 23,
    hidden: int = 5,
    rank: int = 3,
    seed: int = 0,
) -> Case:
    torch.manual_seed(seed)
    kept = torch.randperm(vocab)[: vocab // 2] if reduced else torch.arange(vocab)
    size = kept.shape[0]
    valid = torch.rand(blocks, slots) > 0.25
    valid[2] = False
    positions = torch.randint(0, 3 * blocks, (blocks,)).sort().values[:, None] + torch.arange(slots)
    unique, inverse = positions[valid].unique(return_inverse=True)
    slot_target = torch.full((blocks, slots), -1)
    slot_target[valid] = inverse

    head = Head(0.7, softcap)
    weight, states = torch.randn(vocab, hidden, dtype=dtype), torch.randn(unique.shape[0], hidden, dtype=dtype)
    logits = states @ weight.T * head.scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    labels = torch.randint(0, size, (blocks, slots))
    if reduced:
        labels[torch.rand(blocks, slots) < 0.3] = -1
    labels[~valid] = -1
    rows = blocks * slots

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    return Case(
        pieces=[(leaf(rows, hidden), leaf(size, hidden)), (leaf(rows, rank), leaf(size, rank))],
        head=Head(1.3, softcap),
        teacher=Teacher(states, weight[kept], head, logits.logsumexp(-1) if lognorm else None),
        labels=labels,
        weights=(torch.rand(blocks, slots) + 0.1).to(dtype) * valid,
        slot_target=slot_target,
        confidence=leaf(blocks, slots),
    )


@pytest.fixture(name="make_case")
def _make_case() -> Callable[..., Case]:
    return make_case


@pytest.fixture(name="gradients")
def _gradients() -> Callable[[Tensor, list[Tensor]], list[Tensor]]:
    return gradients
