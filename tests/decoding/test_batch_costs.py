"""What is timed for the batched engine's profile: steps of the sizes that it makes, and drafts as they are made between steps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, random_table
from torch import Tensor

from firesteel.decoding.batched.blocks import BlockPool
from firesteel.decoding.batched.costs import CONTEXT, measure_batch_profile
from firesteel.decoding.batched.sessions import SessionDrafter, SessionTarget
from firesteel.drafters.rows import Draft, Want
from firesteel.errors import ResourceError
from firesteel.kernels.spans import Span

REQUESTS, DRAFTS = 4, 3
USUAL = 2  # of three drafts at most


class Target(SessionTarget):
    """Its short steps leave fewer threads behind, as a `PagedTarget` with a spare one does."""

    def __init__(self) -> None:
        super().__init__(lambda: ToyTarget(random_table(3, 0), max_length=CONTEXT + 40))
        self.steps: list[int] = []

    @property
    def threads(self) -> int:
        return 1 if self.steps[-1] <= 6 else 2

    def forward(self, tokens: Tensor, spans: Sequence[Span], keep: Sequence[int]) -> tuple[Tensor, Tensor]:
        self.steps.append(len(tokens))
        return super().forward(tokens, spans, keep)


class Drafter(SessionDrafter):
    def __init__(self, target: Target) -> None:
        super().__init__(lambda: ToyDrafter(random_table(3, 1), Enumerated([]), deterministic=True), DRAFTS)
        self.target = target
        self.drafts: list[tuple[int, int, int]] = []  # for so many requests, on so many threads, after a step of so many tokens

    def draft(self, wants: Sequence[Want]) -> list[Draft]:
        self.drafts.append((len(wants), self.target.threads, self.target.steps[-1]))
        return super().draft(wants)


def test_a_draft_is_timed_behind_a_step_of_its_requests() -> None:
    target, pool = Target(), BlockPool(300, 4, share=False)
    drafter = Drafter(target)
    profile = measure_batch_profile(target, drafter, pool, requests=REQUESTS, draft_tokens=DRAFTS, vocab_size=3, repeats=2)
    assert profile.step.sizes == (1, 2, 3, 4, 5, 6, 8, 9, 12, 16)
    assert profile.draft is not None
    assert profile.draft.sizes == (1, 2, 3, 4)
    assert set(drafter.drafts) == {(n, 1 if n <= 2 else 2, n * (USUAL + 1)) for n in (1, 2, 3, 4)}
    assert pool.used == 0
    assert torch.is_tensor(target.forward(torch.tensor([1]), [Span(0, [], 0, 1)], [1])[0]), "the sessions are free again"


def test_a_cache_too_small_for_it_is_named() -> None:
    pool = BlockPool(8, 4, share=False)
    with pytest.raises(ResourceError, match="does not hold 4 requests"):
        measure_batch_profile(Target(), None, pool, requests=REQUESTS, draft_tokens=DRAFTS, vocab_size=3, repeats=1)
    assert pool.used == 0
