"""From logits to distributions, and the only place where decoding draws a random choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from firesteel.errors import RecipeError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: `temperature` 0 is greedy; `top_k` None, `top_p` 1 and `min_p` 0 keep every token."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise RecipeError(f"temperature={self.temperature} is negative", mend="0 is greedy, 1 samples the target's own distribution")
        if self.top_k is not None and self.top_k < 1:
            raise RecipeError(f"top_k={self.top_k} keeps no token", mend="give 1 or more, or leave it empty")
        if not 0 < self.top_p <= 1:
            raise RecipeError(f"top_p={self.top_p} is outside (0, 1]", mend="1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise RecipeError(f"min_p={self.min_p} is outside [0, 1]", mend="0 keeps every token")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


class Chance(Protocol):
    """Where random choices come from. The engine makes no other: a test that enumerates them enumerates all outcomes."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""
        ...

    def pick(self, probabilities: Tensor) -> int:
        """An index of `[V]`, each with its probability (a positive sum, not necessarily 1)."""
        ...


class RandomChance:
    """Draws from a generator; None is PyTorch's global one. Random numbers are made on the CPU, so outcomes do not depend on the device's generator."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def accept(self, probability: float) -> bool:
        return self._uniform() < probability

    def pick(self, probabilities: Tensor) -> int:
        # By the inverse of the cumulative distribution, in float64: float32 sums over 10^5 tokens would bias the tail.
        cumulative = probabilities.double().cumsum(-1)
        total = cumulative[-1:]
        found = int(torch.searchsorted(cumulative, self._uniform() * total, right=True))
        # Rounding may put the draw on the total itself; the last token with any probability is then meant.
        return min(found, int(torch.searchsorted(cumulative, total)))

    def _uniform(self) -> float:
        return float(torch.rand((), dtype=torch.float64, generator=self.generator))


def distributions(logits: Tensor, sampling: Sampling) -> Tensor:
    """`[..., V]` logits -> `[..., V]` probabilities that sampling draws from, in the logits' dtype.

    Greedy gives one-hot rows. Otherwise logits are divided by the temperature, cut to tokens at least `min_p` times as likely
    as the likeliest (arXiv 2407.01082) and to the `top_k` largest, softmaxed, and cut to the smallest set of tokens whose
    probability reaches `top_p`; what is left is renormalised. This is vLLM's order. Where tokens tie at the edge of `top_k` or
    `top_p`, those with the lower id stay; at the edge of `min_p` all of them do.
    """
    if sampling.greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if sampling.min_p > 0:
        # p / p_max >= min_p, in logits, so that no softmax over the whole vocabulary is needed for it.
        scaled = scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + math.log(sampling.min_p), -torch.inf)
    if sampling.top_k is None and sampling.top_p == 1:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(stable=True, dim=-1, descending=True)
    if sampling.top_k is not None:
        ordered[..., sampling.top_k :] = -torch.inf
    kept = ordered.softmax(-1)
    # A token stays while the tokens before it do not reach top_p yet; the first one always does.
    before = kept.cumsum(-1) - kept
    kept = kept.masked_fill(before >= sampling.top_p, 0.0) if sampling.top_p < 1 else kept
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(scaled).scatter_(-1, order, kept)
