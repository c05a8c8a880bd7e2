"""The feed's bookkeeping: order, bound, no deadlock, uses; over random lengths, watermarks and arrivals."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firesteel.batches.packing import plan_epoch
from firesteel.errors import RecipeError
from firesteel.hidden.window import Slot, Window, watermarks
from firesteel.recipe import Feed


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    batch_tokens=st.integers(8, 60),
    low_extra=st.integers(0, 50),
    high_extra=st.integers(0, 100),
    uses=st.integers(1, 3),
    keep=st.integers(0, 200),
    seed=st.integers(0, 2**20),
)
def test_every_batch_comes_whole_in_order_and_within_the_bound(
    lengths: list[int], batch_tokens: int, low_extra: int, high_extra: int, uses: int, keep: int, seed: int
) -> None:
    epochs = [plan_epoch(lengths, batch_tokens, torch.Generator().manual_seed(e)) for e in range(4)]
    plan = [batch for epoch in epochs for batch in epoch]
    low = max(batch_tokens, *lengths) + low_extra
    window: Window[tuple[int, int]] = Window(lengths, plan.__getitem__, low=low, high=low + high_extra, uses=uses, keep=keep, stop=len(plan))
    chance, flying, copies = random.Random(seed), [], 0
    used: dict[tuple[int, int], int] = {}
    asked: list[int] = []

    def ask() -> None:
        new = window.wanted()
        asked.extend(slot.batch for slot in new)
        flying.extend(slot for slot in new if slot.sample is None)

    for number, documents in enumerate(plan):
        ask()
        while not window.ready(number):
            assert flying, "nothing is under way and the batch is not whole: training would wait for ever"
            slot: Slot[tuple[int, int]] = flying.pop(chance.randrange(len(flying)))
            slot.sample = slot.document, copies
            copies += 1
        samples = window.consume(number)
        assert [document for document, _ in samples] == documents
        for sample in samples:
            used[sample] = used.get(sample, 0) + 1
    assert asked == sorted(asked)
    assert window.peak <= low + high_extra + keep
    assert max(used.values()) <= uses
    assert window.wanted() == []


def test_a_sample_that_fits_is_used_again_in_the_next_epoch() -> None:
    window: Window[str] = Window([5, 5, 5], lambda b: [(b + b // 3) % 3], low=5, high=5, uses=2, keep=15, stop=6)
    fetched = 0
    for number in range(6):
        for slot in window.wanted():
            if slot.sample is None:
                slot.sample, fetched = f"copy {fetched}", fetched + 1
        window.consume(number)
    assert fetched == 3


def test_seeking_gives_up_what_is_under_way_and_goes_on_there() -> None:
    window: Window[str] = Window([4] * 12, lambda b: [b], low=8, high=12)
    first = window.wanted()
    assert [slot.document for slot in first] == [0, 1, 2]
    assert window.seek(7) == first
    assert [slot.document for slot in window.wanted()] == [7, 8, 9]
    assert window.held == 12


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"low_tokens": 99}, ("low_tokens=99", "100 tokens")),
        ({"low_tokens": 200, "high_tokens": 150}, ("high_tokens=150", "low_tokens=200")),
        ({"uses": 2}, ("uses=2", "keep_tokens=0")),
    ],
)
def test_watermarks_that_cannot_hold_a_step_are_refused_with_both_values(changes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as e:
        watermarks(Feed(**changes), 100)  # type: ignore[arg-type]
    assert all(word in str(e.value) for word in words)


def test_watermarks_follow_the_step() -> None:
    assert watermarks(Feed(), 100) == (200, 400)
    assert watermarks(Feed(low_tokens=100), 100) == (100, 200)
