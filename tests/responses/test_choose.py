"""Sampling among many tokens: frequencies against the definition written out, with and without a nucleus that is cut short."""

from __future__ import annotations

import pytest
import torch

from firesteel.responses.generate import Sampling, choose

ROWS = 20_000


def wanted(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    """Top-k, then the smallest set of likeliest tokens with mass top_p, by sorting everything."""
    probs = (logits / s.temperature).softmax(-1)
    order = probs.argsort(descending=True)[: s.top_k]
    kept = probs[order] / probs[order].sum()
    kept = torch.where(kept.cumsum(0) - kept < s.top_p, kept, 0)
    return torch.zeros_like(probs).scatter(0, order, kept / kept.sum())


@pytest.mark.parametrize(
    ("vocab", "spread", "sampling"),
    [
        (8, 2.0, Sampling(1, 0.7, 0.8)),
        (8, 2.0, Sampling(1, 1.0)),
        (8, 2.0, Sampling(1, 1.0, 1.0, 3)),
        (8, 2.0, Sampling(1, 1.3, 0.9, 5)),
        (600, 0.1, Sampling(1, 1.0, 0.97)),  # flat: the nucleus is larger than what is looked at first
    ],
)
def test_frequencies(vocab: int, spread: float, sampling: Sampling) -> None:
    torch.manual_seed(0)
    logits = spread * torch.randn(vocab)
    generators = [torch.Generator().manual_seed(i) for i in range(ROWS)]
    found = torch.bincount(choose(logits.expand(ROWS, -1), sampling, generators), minlength=vocab) / ROWS
    truth = wanted(logits, sampling)
    assert bool((found[truth == 0] == 0).all())
    # Five standard errors of each frequency.
    assert bool(((found - truth).abs() <= 5 * (truth * (1 - truth) / ROWS).sqrt() + 1e-6).all())


def test_the_draw_depends_on_the_rows_own_generator_only() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 700)
    together = choose(logits, Sampling(1, 1.0, 0.9), [torch.Generator().manual_seed(i) for i in range(6)])
    alone = [int(choose(logits[i : i + 1], Sampling(1, 1.0, 0.9), [torch.Generator().manual_seed(i)])) for i in range(6)]
    assert together.tolist() == alone
