"""Speed statistics by hand and against the truth of a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from firesteel.evaluation.records import PLAIN, SpeedRecord
from firesteel.evaluation.schema import Cost, PositionRate, Positions
from firesteel.evaluation.speed import expected_speedups, speed, speed_by_length, speed_of_domain


def timed(prompt: str, arm: str, length: int, tokens: int, decode: float, *, prefill: float = 0.5, repeat: int = 0, domain: str = "qa") -> SpeedRecord:
    return SpeedRecord(prompt, domain, arm, repeat, length, tokens, prefill, decode)


def test_pooled_by_hand() -> None:
    records = [
        timed("a", PLAIN, 0, 11, 2.0),
        timed("a", "dspark", 4, 11, 1.0, prefill=0.75),
        timed("b", PLAIN, 0, 31, 3.0),
        timed("b", PLAIN, 0, 31, 5.0, repeat=1),
        timed("b", "dspark", 4, 41, 2.0),
        # Left out: another length, another drafter, a prompt of one arm, an answer of one token.
        timed("a", "dspark", 8, 11, 9.0),
        timed("a", "dflash", 4, 11, 9.0),
        timed("c", PLAIN, 0, 11, 9.0),
        timed("d", PLAIN, 0, 1, 0.0),
        timed("d", "dspark", 4, 1, 0.0),
    ]
    found = speed(records, drafter="dspark", draft_length=4, resamples=200, seed=0)
    assert found is not None
    assert found.prompts == 2
    assert found.plain_tokens_per_second == pytest.approx(70 / 10)
    assert found.drafted_tokens_per_second == pytest.approx(50 / 3)
    assert found.pooled == pytest.approx((10 / 70) / (3 / 50))
    assert found.pooled_with_prefill == pytest.approx((11.5 / 73) / (4.25 / 52))
    assert found.interval is not None


def test_absent_where_no_prompt_has_both_arms() -> None:
    records = [timed("a", PLAIN, 0, 11, 2.0), timed("b", "dspark", 4, 11, 1.0)]
    assert speed(records, drafter="dspark", draft_length=4, resamples=100, seed=0) is None
    assert speed_by_length(records, drafter="dspark", resamples=100, seed=0) == []


def test_one_prompt_has_no_interval() -> None:
    found = speed([timed("a", PLAIN, 0, 11, 2.0), timed("a", "dspark", 4, 11, 1.0)], drafter="dspark", draft_length=4, resamples=100, seed=0)
    assert found is not None
    assert found.pooled == 2
    assert found.interval is None
    assert found.interval_with_prefill is None


def test_prompts_of_unequal_length_cancel_out_by_pairing() -> None:
    # Prompts differ tenfold in cost; the ratio is 1.5 everywhere. Pairs must keep the interval at 1.5.
    rng = np.random.default_rng(0)
    records = []
    for i in range(30):
        tokens, cost = int(rng.integers(2, 100)), float(rng.uniform(0.01, 0.1))
        records += [timed(str(i), PLAIN, 0, tokens, cost * (tokens - 1)), timed(str(i), "dspark", 4, tokens, cost * (tokens - 1) / 1.5)]
    found = speed(records, drafter="dspark", draft_length=4, resamples=300, seed=0)
    assert found is not None
    assert found.pooled == pytest.approx(1.5)
    assert found.interval == pytest.approx((1.5, 1.5))


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for trial in range(100):
        records = []
        for i in range(20):
            gain = rng.normal(1.3, 0.2)
            records += [timed(str(i), PLAIN, 0, 101, 1.0), timed(str(i), "dspark", 4, 101, 1.0 / gain)]
        found = speed(records, drafter="dspark", draft_length=4, resamples=200, seed=trial)
        assert found is not None
        assert found.interval is not None
        # The pooled ratio of many prompts is the harmonic mean of gains: 1 / E[1 / gain].
        hits += found.interval[0] <= 1 / 0.7889 <= found.interval[1]
    assert 0.86 <= hits / 100 <= 0.99


def test_lengths_are_sorted_and_domains_separate() -> None:
    records = [timed("a", PLAIN, 0, 11, 2.0)] + [timed("a", "dspark", n, 11, 1.0 + n) for n in (8, 2, 4)]
    assert [s.draft_length for s in speed_by_length(records, drafter="dspark", resamples=100, seed=0)] == [2, 4, 8]
    other = timed("a", PLAIN, 0, 11, 2.0, domain="code")
    assert speed_of_domain([*records, other], "code") == [other]
    # Equal ids in two domains are two prompts.
    both = [*records, other, timed("a", "dspark", 2, 11, 1.0, domain="code")]
    found = speed(both, drafter="dspark", draft_length=2, resamples=100, seed=0)
    assert found is not None
    assert found.prompts == 2


def test_expected_speedups_by_hand() -> None:
    rates = [PositionRate(position=k, accepted=a, of=10, rate=a / 10) for k, a in [(1, 6), (2, 3)]]
    positions = Positions(unconditional=rates, conditional=[])
    costs = [Cost(length=n, verify_ms=v, draft_ms=d) for n, v, d in [(0, 20.0, None), (1, 22.0, 3.0), (2, 24.0, 4.0), (3, 26.0, 5.0)]]
    assert expected_speedups(costs, positions) == pytest.approx({1: 1.6 * 20 / 25, 2: 1.9 * 20 / 28})  # position 3 was never drafted
    assert expected_speedups(costs[1:], positions) == {}  # no plain step to compare with
    assert expected_speedups([costs[0], costs[1].model_copy(update={"draft_ms": None})], positions) == {}
