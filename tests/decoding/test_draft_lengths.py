"""Choosing the verification length from measured costs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest
import torch
from decoding_toys import Enumerated, ToyDrafter, ToyTarget, random_table

from firesteel.decoding.lengths import StepCosts, best_length, measure_costs
from firesteel.errors import RecipeError


def test_best_length_by_hand():
    costs = StepCosts(verify_ms={1: 10, 2: 11, 4: 20}, draft_ms={1: 2, 2: 2, 4: 2}, plain_ms=10)
    # Tokens a round: 1.8, 2.4, 3.1; milliseconds: 12, 13, 22.
    choice = best_length(costs, [0.8, 0.6, 0.4, 0.3])
    assert choice.tokens == 2
    assert choice.speedup == pytest.approx(2.4 * 10 / 13)
    # Where more tokens cost nothing, the longest.
    assert best_length(StepCosts({1: 10, 2: 10, 4: 10}, {1: 1, 2: 1, 4: 1}, 10), [0.8, 0.6, 0.4, 0.3]).tokens == 4
    # Where nothing is accepted, the cheapest, and it is said to be slower than plain decoding.
    hopeless = best_length(costs, [0.0, 0.0, 0.0, 0.0])
    assert (hopeless.tokens, hopeless.speedup) == (1, pytest.approx(10 / 12))


def test_lengths_without_known_acceptance_are_left_out():
    costs = StepCosts(verify_ms={1: 10, 8: 1}, draft_ms={1: 1, 8: 1}, plain_ms=10)
    assert best_length(costs, [0.5]).tokens == 1
    with pytest.raises(RecipeError, match="no length has both"):
        best_length(StepCosts({8: 1.0}, {8: 1.0}, 1.0), [0.5])


@dataclass
class Slow(ToyTarget):
    """A pass costs 2 ms and 1 ms a token."""

    def forward(self, tokens, *, keep=None):
        time.sleep(0.002 + 0.001 * len(tokens))
        return super().forward(tokens, keep=keep)


def test_measured_costs_follow_the_work_and_leave_the_sessions_usable():
    target = Slow(random_table(3, 0))
    drafter = ToyDrafter(random_table(3, 1), Enumerated([]), deterministic=True)
    costs = measure_costs(target, drafter, [0, 1, 2], [1, 8], repeats=5)
    assert costs.plain_ms >= 3
    assert costs.verify_ms[1] >= 4
    assert costs.verify_ms[8] >= 11
    assert costs.verify_ms[8] > costs.verify_ms[1] > costs.plain_ms * 0.9
    assert set(costs.draft_ms) == {1, 8}
    assert min(costs.draft_ms.values()) > 0
    assert target.tokens == [0, 1, 2]
    assert drafter.seen == [0, 1, 2]
    assert torch.equal(target.table((0,)), random_table(3, 0)((0,)))


@pytest.mark.parametrize(("lengths", "repeats"), [([], 1), ([0], 1), ([1], 0)])
def test_nothing_to_measure_is_refused(lengths, repeats):
    with pytest.raises(RecipeError, match="cannot measure"):
        measure_costs(ToyTarget(random_table(3, 0)), ToyDrafter(random_table(3, 1), Enumerated([])), [0], lengths, repeats=repeats)
