"""Acceptance statistics against hand-made examples, loops and the normal approximation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from firesteel.evaluation.acceptance import acceptance_length, by_domain, compare_drafters, finish_reasons, position_rates, select, select_greedy
from firesteel.evaluation.intervals import bootstrap_sums, percentile_interval, wilson_interval
from firesteel.evaluation.records import RequestRecord, RoundRecord


def request(rounds: list[tuple[int, int]], *, prompt: str = "p", drafter: str = "dspark", domain: str = "qa", temperature: float = 0.0) -> RequestRecord:
    tokens = 1 + sum(a + 1 for _, a in rounds)
    return RequestRecord(domain, prompt, drafter, temperature, tokens, "stop", [RoundRecord(d, a, None) for d, a in rounds])


def test_both_definitions_by_hand() -> None:
    long, short = request([(4, 4), (4, 2), (4, 0), (4, 0)]), request([(4, 3)], prompt="q")
    found = acceptance_length([long, short, request([], prompt="one token")], resamples=200, seed=0)
    assert found is not None
    assert found.pooled == 1 + 9 / 5
    assert found.mean_of_requests == (1 + 6 / 4 + 1 + 3) / 2
    assert (found.requests, found.rounds, found.drafted, found.accepted, found.draft_length) == (2, 5, 20, 9, 4)


def test_nothing_to_measure_is_absent() -> None:
    assert acceptance_length([], resamples=100, seed=0) is None
    assert acceptance_length([request([])], resamples=100, seed=0) is None


def test_one_request_has_no_interval() -> None:
    found = acceptance_length([request([(4, 1), (4, 2)])], resamples=100, seed=0)
    assert found is not None
    assert found.interval is None
    assert found.interval_mean_of_requests is None


def test_interval_is_that_of_independent_requests_not_rounds() -> None:
    # Requests of equal rounds, all rounds of one alike: the standard error is that of request means; rounds taken as
    # independent would give an interval sqrt(20) times too narrow.
    rng = np.random.default_rng(0)
    accepted = rng.integers(0, 5, size=150)
    found = acceptance_length([request([(4, int(a))] * 20, prompt=str(i)) for i, a in enumerate(accepted)], resamples=4000, seed=1)
    assert found is not None
    assert found.interval is not None
    half = 1.96 * accepted.std() / math.sqrt(len(accepted))
    assert found.interval[0] == pytest.approx(found.pooled - half, abs=0.1 * half)
    assert found.interval[1] == pytest.approx(found.pooled + half, abs=0.1 * half)
    assert found.interval_mean_of_requests == pytest.approx(found.interval)


def test_equal_seeds_give_equal_intervals() -> None:
    requests = [request([(4, i % 5)] * (i + 1), prompt=str(i)) for i in range(12)]
    one, again, other = (acceptance_length(requests, resamples=300, seed=s) for s in (3, 3, 4))
    assert one == again
    assert one is not None
    assert other is not None
    assert one.interval != other.interval
    assert one.pooled == other.pooled


def test_bootstrap_sums_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(0).random((7, 3))
    whole = bootstrap_sums(columns, resamples=50, seed=9)
    monkeypatch.setattr("firesteel.evaluation.intervals._CELLS", 4 * 7 * 3)
    assert np.array_equal(bootstrap_sums(columns, resamples=50, seed=9), whole)
    assert whole.shape == (50, 3)
    # Rows stay together: a column and its double stay so in every resample.
    paired = bootstrap_sums(np.stack([columns[:, 0], 2 * columns[:, 0]], axis=1), resamples=50, seed=9)
    assert np.allclose(2 * paired[:, 0], paired[:, 1])


def test_position_rates_by_hand() -> None:
    # Drafted 3, 3, 1, 2; a round cut to one draft says nothing of positions 2 and 3.
    found = position_rates([request([(3, 3), (3, 1)]), request([(1, 1), (2, 0)])])
    assert [(p.position, p.accepted, p.of) for p in found.unconditional] == [(1, 3, 4), (2, 1, 3), (3, 1, 2)]
    assert [(p.accepted, p.of) for p in found.conditional] == [(3, 4), (1, 2), (1, 1)]
    assert found.unconditional[1].rate == pytest.approx(1 / 3)
    assert found.conditional[1].rate == 0.5


def test_position_rates_by_loops() -> None:
    rng = np.random.default_rng(2)
    rounds = [(int(d), int(rng.integers(0, d + 1))) for d in rng.integers(0, 7, size=200)]
    found = position_rates([request(rounds[:90]), request(rounds[90:])])
    for k, (u, c) in enumerate(zip(found.unconditional, found.conditional, strict=True), start=1):
        reach = [a for d, a in rounds if d >= k]
        assert (u.accepted, u.of) == (len([a for a in reach if a >= k]), len(reach))
        assert (c.accepted, c.of) == (len([a for a in reach if a >= k]), len([a for a in reach if a >= k - 1]))
    product = np.cumprod([c.rate for c in position_rates([request([(6, a) for d, a in rounds if d == 6])]).conditional])
    full = [a for d, a in rounds if d == 6]
    assert np.allclose(product, [np.mean([a >= k for a in full]) for k in range(1, 7)])


def test_unreached_positions_have_no_conditional_rate() -> None:
    found = position_rates([request([(3, 0), (3, 0)])])
    assert [p.rate for p in found.unconditional] == [0, 0, 0]
    assert [p.rate for p in found.conditional] == [0, None, None]
    assert position_rates([]).unconditional == []


def test_comparison_is_paired() -> None:
    # Prompts differ wildly, the second drafter is always one accepted token worse: pairing must see that clearly.
    rng = np.random.default_rng(3)
    hard = rng.integers(1, 8, size=40)
    first = [request([(8, int(h))] * 10, prompt=str(i)) for i, h in enumerate(hard)]
    second = [request([(8, int(h) - 1)] * 10, prompt=str(i), drafter="dflash") for i, h in enumerate(hard)]
    found = compare_drafters(first, second, resamples=1000, seed=0)
    assert found is not None
    assert found.ratio == pytest.approx((1 + hard.mean()) / hard.mean())
    assert found.interval is not None
    assert found.interval[0] > 1
    alone = acceptance_length(first, resamples=1000, seed=0)
    assert alone is not None
    assert alone.interval is not None
    assert (found.interval[1] - found.interval[0]) / found.ratio < 0.5 * (alone.interval[1] - alone.interval[0]) / alone.pooled
    assert (found.first, found.second) == ("dspark", "dflash")


def test_comparison_uses_shared_prompts_only() -> None:
    first = [request([(4, 4)], prompt="a"), request([(4, 0)], prompt="b"), request([(4, 2)], prompt="a", domain="code")]
    second = [request([(4, 1), (4, 2)], prompt="a", drafter="dflash"), request([(4, 3)], prompt="c", drafter="dflash")]
    found = compare_drafters(first, second, resamples=100, seed=0)
    assert found is not None
    assert (found.first_pooled, found.second_pooled, found.ratio) == (5, 2.5, 2)
    assert (found.prompts, found.unpaired, found.interval) == (1, 3, None)
    assert compare_drafters(first, [request([(4, 3)], prompt="z")], resamples=100, seed=0) is None


def test_equal_ids_of_two_sources_are_two_prompts() -> None:
    def keyed(key: str, accepted: int, drafter: str) -> RequestRecord:
        return replace(request([(4, accepted)], prompt="row-1", drafter=drafter), prompt_key=key)

    first = [keyed("a", 4, "dspark"), keyed("b", 0, "dspark")]
    second = [keyed("b", 2, "dflash"), keyed("c", 1, "dflash")]
    found = compare_drafters(first, second, resamples=100, seed=0)
    assert found is not None
    assert (found.first_pooled, found.second_pooled, found.prompts, found.unpaired) == (1, 3, 1, 2)


def test_a_drafter_against_itself_is_exactly_equal() -> None:
    rows = [request([(4, i % 5)] * (1 + i % 3), prompt=str(i)) for i in range(20)]
    found = compare_drafters(rows, rows, resamples=200, seed=0)
    assert found is not None
    assert found.ratio == 1
    assert found.interval == (1, 1)


def test_groups_and_selection() -> None:
    rows = [request([(1, 1)], domain="b"), request([(1, 0)], domain="a"), request([(1, 0)], domain="b", drafter="dflash", temperature=1.0)]
    assert {k: len(v) for k, v in by_domain(rows).items()} == {"b": 2, "a": 1}
    assert select(rows, drafter="dflash", temperature=1.0) == [rows[2]]
    assert select(rows, drafter="dspark", temperature=1.0) == []
    assert finish_reasons(rows) == {"stop": 3}


def test_greedy_requests_and_others_only_where_there_are_none() -> None:
    warm, cold = (request([(4, a)], temperature=t) for a, t in ((1, 1.0), (3, 0.0)))
    other = request([(4, 0)], drafter="dflash", temperature=1.0)
    assert select_greedy([warm, cold, other], drafter="dspark", otherwise=1.0) == [cold]
    assert select_greedy([warm, cold, other], drafter="dflash", otherwise=1.0) == [other]


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (3, 10), (50, 60), (7, 7)])
def test_wilson_interval_solves_its_equation(successes: int, n: int) -> None:
    # Its ends are the p for which the observed rate lies exactly 1.96 standard errors away (or 0 / 1).
    found = wilson_interval(successes, n)
    assert found is not None
    for p in found:
        if 0 < p < 1:
            assert abs(successes / n - p) == pytest.approx(1.959963984540054 * math.sqrt(p * (1 - p) / n))
    assert found[0] <= successes / n <= found[1]
    assert wilson_interval(0, 0) is None


def test_percentiles_of_a_known_sample() -> None:
    assert percentile_interval(np.arange(1001.0), 5) == (25, 975)
