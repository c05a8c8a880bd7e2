"""Anchors: where they may stand, how they are shared out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.batches.anchors import eligible_anchors, sample_anchors, seeded, spaced_anchors

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def documents(lengths: list[int]) -> list[torch.Tensor]:
    """Eligible positions that are not 0, 1, 2 ... so that a mix-up of index and position shows."""
    return [torch.arange(n) * 3 + 5 for n in lengths]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.booleans(), max_size=20))
def test_an_anchor_and_its_successor_are_the_targets_own(mask: list[bool]) -> None:
    found = eligible_anchors(torch.tensor(mask, dtype=torch.bool))
    assert found.tolist() == [p for p in range(len(mask) - 1) if mask[p] and mask[p + 1]]


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.integers(1, 100), st.integers(0, 5))
def test_sampling_is_proportional_and_without_replacement(lengths: list[int], budget: int, seed: int) -> None:
    eligible = documents(lengths)
    found = sample_anchors(eligible, budget, seeded(seed))
    assert sum(len(a) for a in found) == min(budget, sum(lengths))
    for a, e in zip(found, eligible, strict=True):
        assert a.tolist() == sorted(set(a.tolist()))
        assert set(a.tolist()) <= set(e.tolist())
        if sum(lengths) > budget:
            assert abs(len(a) - budget * len(e) / sum(lengths)) < 1
    assert all(torch.equal(x, y) for x, y in zip(found, sample_anchors(eligible, budget, seeded(seed)), strict=True))


def test_every_position_is_drawn_about_equally_often() -> None:
    eligible, counts = documents([10, 30]), torch.zeros(2, 100)
    for step in range(400):
        for i, a in enumerate(sample_anchors(eligible, 8, seeded(3, 0, step))):
            counts[i, a] += 1
    drawn = counts[counts > 0]
    assert drawn.shape == (40,)
    # 400 draws with probability 1/5: mean 80, standard deviation 8; six of them for 40 positions.
    assert 32 < float(drawn.min()) <= float(drawn.max()) < 128


@settings(max_examples=80, deadline=None)
@given(LENGTHS, st.none() | st.integers(1, 100))
def test_spaced_anchors_are_even(lengths: list[int], budget: int | None) -> None:
    eligible = documents(lengths)
    found = spaced_anchors(eligible, budget)
    assert sum(len(a) for a in found) == (sum(lengths) if budget is None else min(budget, sum(lengths)))
    for a, e in zip(found, eligible, strict=True):
        index = [e.tolist().index(p) for p in a.tolist()]
        if index:
            steps = [y - x for x, y in zip(index, [*index[1:], len(e)], strict=True)]
            assert index[0] == 0
            assert 1 <= min(steps) <= max(steps) <= min(steps) + 1


def test_a_seed_is_for_one_purpose() -> None:
    first = [torch.randint(0, 2**40, (1,), generator=seeded(*parts)).item() for parts in [(0,), (0, 1), (1, 0), (0, 0), (0, 1)]]
    assert len(set(first)) == 4
    assert first[1] == first[4]
