"""Calibration against brute force, and against data whose true temperatures are known."""

from __future__ import annotations

import numpy as np
import pytest

from firesteel.errors import DataError
from firesteel.evaluation.calibration import (
    TEMPERATURE_GRID,
    area_under_curve,
    calibration_arrays,
    expected_calibration_error,
    fit_temperatures,
    measure_calibration,
    measure_confidence,
    prefix_survival,
    reliability_curve,
    threshold_sweep,
)
from firesteel.evaluation.records import RequestRecord, RoundRecord

TRUE = [2.0, 0.5, 1.4]


def miscalibrated(rounds: int, seed: int, spread: float = 1.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token k survives with sigmoid(z_k); the head says z_k * TRUE[k]: dividing by TRUE[k] is perfect."""
    rng = np.random.default_rng(seed)
    z = 0.8 + spread * rng.standard_normal((rounds, len(TRUE)))
    survived = np.cumprod(rng.random(z.shape) < 1 / (1 + np.exp(-z)), axis=1).astype(bool)
    return z * np.array(TRUE), survived, np.ones_like(survived)


def ece_by_loops(p: np.ndarray, y: np.ndarray, bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [i for i, v in enumerate(p) if b / bins <= v < (b + 1) / bins or (b == bins - 1 and v == 1)]
        if inside:
            total += len(inside) / len(p) * abs(sum(p[i] for i in inside) / len(inside) - sum(y[i] for i in inside) / len(inside))
    return total


@pytest.mark.parametrize("bins", [2, 8, 16])  # bin edges that floating point holds exactly
def test_ece_equals_loops(bins: int) -> None:
    rng = np.random.default_rng(bins)
    p = np.concatenate([rng.random(300), [0.0, 1.0, 0.5]])
    y = rng.random(303) < p**2
    assert expected_calibration_error(p, y, bins=bins) == pytest.approx(ece_by_loops(p, y, bins))


def test_ece_by_hand() -> None:
    p, y = np.array([0.1, 0.2, 0.9, 1.0]), np.array([False, True, True, True])
    assert expected_calibration_error(p, y, bins=2) == pytest.approx(0.5 * abs(0.15 - 0.5) + 0.5 * abs(0.95 - 1))
    assert expected_calibration_error(np.array([]), np.array([], dtype=bool), bins=2) is None


@pytest.mark.parametrize("levels", [3, 10, 10_000])  # few levels: many ties
def test_auc_equals_all_pairs(levels: int) -> None:
    rng = np.random.default_rng(levels)
    p = rng.integers(0, levels, size=100) / levels
    y = rng.random(100) < 0.3 + 0.4 * p
    pairs = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
    assert area_under_curve(p, y) == pytest.approx(np.mean(pairs))


def test_auc_of_one_class_is_absent() -> None:
    p = np.array([0.2, 0.4])
    assert area_under_curve(p, np.array([True, True])) is None
    assert area_under_curve(p, np.array([False, False])) is None
    assert area_under_curve(np.array([]), np.array([], dtype=bool)) is None
    assert area_under_curve(np.array([0.1, 0.9]), np.array([False, True])) == 1
    assert area_under_curve(np.array([0.5, 0.5]), np.array([False, True])) == 0.5


def test_true_temperatures_are_recovered() -> None:
    found = fit_temperatures(*miscalibrated(6_000, 0), bins=15)
    assert found == pytest.approx(TRUE, rel=0.15)


def test_temperatures_calibrate_fresh_rounds() -> None:
    temperatures = fit_temperatures(*miscalibrated(4_000, 1), bins=15)
    fresh = measure_calibration(*miscalibrated(20_000, 2), temperatures=temperatures, bins=15, measured_on="fresh rounds")
    assert fresh.ece_before is not None
    assert fresh.ece_after is not None
    assert fresh.ece_after < 0.35 * fresh.ece_before
    assert fresh.ece_after < 0.015
    for p in fresh.positions:
        assert p.auc_before is not None
        assert p.auc_after is not None
        assert p.auc_after >= p.auc_before - 0.01  # scaling must not buy calibration with ranking
    # At position 1 a temperature keeps the order of predictions, hence the AUC.
    assert fresh.positions[0].auc_after == pytest.approx(fresh.positions[0].auc_before)


def test_scaling_is_never_worse_on_the_rounds_it_was_fitted_on() -> None:
    for seed in range(3):
        data = miscalibrated(60, seed)
        found = measure_calibration(*data, temperatures=fit_temperatures(*data, bins=10), bins=10, measured_on="the fit")
        before, after = found.positions[0].ece_before, found.positions[0].ece_after
        assert before is not None
        assert after is not None
        assert after <= before + 1e-12


def test_uninformative_error_does_not_flatten_predictions() -> None:
    # Every token survives half the time on average, so infinite temperature has calibration error 0 as well: it would throw
    # away all knowledge of which token survives. Predictions are perfect as they are.
    rng = np.random.default_rng(4)
    z = 2 * rng.standard_normal((2_000, 3))
    survived = np.cumprod(rng.random(z.shape) < 1 / (1 + np.exp(-z)), axis=1).astype(bool)
    assert fit_temperatures(z, survived, np.ones_like(survived), bins=15) == pytest.approx([1, 1, 1], rel=0.2)


def test_masked_positions_take_no_part() -> None:
    logits, survived, mask = miscalibrated(1_200, 3)
    mask = mask.copy()
    mask[600:, 1:] = False
    garbage = logits.copy()
    garbage[~mask] = 1e3
    dropped = survived & mask
    assert fit_temperatures(garbage, dropped, mask, bins=15) == fit_temperatures(logits, dropped, mask, bins=15)
    mask[:, 2] = False
    assert fit_temperatures(garbage, survived & mask, mask, bins=15)[2] == 1.0
    found = measure_calibration(garbage, survived & mask, mask, temperatures=TRUE, bins=15, measured_on="x")
    assert [p.rounds for p in found.positions] == [1_200, 600, 0]
    assert found.positions[2].ece_before is None
    assert sum(p.count for p in found.reliability_before) == 1_800


def test_grid_holds_one_and_is_even_in_log() -> None:
    assert TEMPERATURE_GRID[100] == 1.0
    assert np.allclose(np.diff(np.log(TEMPERATURE_GRID)), np.log(100) / 200)


def test_prefix_survival_by_hand() -> None:
    logits = np.array([[np.log(3), 2 * np.log(4), 800.0, -800.0]])
    assert prefix_survival(logits, [1, 2, 1, 1]) == pytest.approx(np.array([[0.75, 0.6, 0.6, 0.0]]))


def test_reliability_points() -> None:
    p, y = np.array([0.05, 0.15, 0.95, 0.85, 0.9]), np.array([False, False, True, False, True])
    low, high = reliability_curve(p, y, bins=4)
    assert (low.low, low.high, low.count, low.observed) == (0, 0.25, 2, 0)
    assert (high.low, high.high, high.count) == (0.75, 1, 3)
    assert high.predicted == pytest.approx(0.9)
    assert high.observed == pytest.approx(2 / 3)
    assert high.interval is not None
    assert high.interval[0] < 2 / 3 < high.interval[1]


def request(rounds: list[RoundRecord]) -> RequestRecord:
    return RequestRecord("qa", "p", "dspark", 0.0, 99, "length", rounds)


def test_arrays_from_records() -> None:
    logits, survived, mask = calibration_arrays(
        [
            request([RoundRecord(3, 2, [0.5, 0.8, 0.0]), RoundRecord(1, 0, [0.25]), RoundRecord(3, 1, [0.9, 0.9, 0.9])]),
            request([RoundRecord(2, 2, None), RoundRecord(3, 0, [0.1, 0.1, 0.1])]),
        ]
    )
    # Each request's last round and rounds without confidences are left out.
    assert survived.tolist() == [[True, True, False], [False, False, False]]
    assert mask.tolist() == [[True, True, True], [True, False, False]]
    assert logits[0, :2] == pytest.approx([0, np.log(4)])
    assert logits[1, 0] == pytest.approx(-np.log(3))
    assert np.isfinite(logits).all()
    assert calibration_arrays([])[0].shape == (0, 0)
    assert fit_temperatures(*calibration_arrays([]), bins=5) == []


def test_confidences_of_answers_equal_loops() -> None:
    """ECE and AUC per position and over all positions, with nothing but the records and plain loops."""
    rng = np.random.default_rng(9)
    requests = []
    for number in range(30):
        rounds = []
        for _ in range(rng.integers(1, 6)):
            drafted = int(rng.integers(1, 5))
            rounds.append(RoundRecord(drafted, int(rng.integers(0, drafted + 1)), rng.random(drafted).tolist() if number % 7 else None))
        requests.append(request(rounds))
    seen: dict[int, list[tuple[float, bool]]] = {k: [] for k in range(1, 5)}
    used = 0
    for q in requests:
        for r in q.rounds[:-1]:
            if r.confidences is None:
                continue
            used += 1
            prefix = 1.0
            for k, c in enumerate(r.confidences, start=1):
                prefix *= c
                seen[k].append((prefix, r.accepted >= k))
    found = measure_confidence(requests, bins=8)
    assert found is not None
    assert (found.rounds, found.bins, [p.position for p in found.positions]) == (used, 8, [1, 2, 3, 4])

    def reference(pairs: list[tuple[float, bool]]) -> tuple[float, float]:
        p, y = np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])
        wins = [(a > b) + 0.5 * (a == b) for a in p[y] for b in p[~y]]
        return ece_by_loops(p, y, 8), float(np.mean(wins))

    for p in found.positions:
        ece, auc = reference(seen[p.position])
        assert p.rounds == len(seen[p.position])
        assert p.survived == pytest.approx(np.mean([y for _, y in seen[p.position]]))
        assert p.predicted == pytest.approx(np.mean([c for c, _ in seen[p.position]]))
        assert (p.ece, p.auc) == (pytest.approx(ece), pytest.approx(auc))
    assert found.ece == pytest.approx(np.mean([reference(pairs)[0] for pairs in seen.values()]))
    assert found.auc == pytest.approx(np.mean([reference(pairs)[1] for pairs in seen.values()]))
    everything = [pair for pairs in seen.values() for pair in pairs]
    assert (found.ece_pooled, found.auc_pooled) == (pytest.approx(reference(everything)[0]), pytest.approx(reference(everything)[1]))
    assert sum(p.count for p in found.reliability) == len(everything)
    # Single rounds and drafters without confidences say nothing.
    assert measure_confidence([request([RoundRecord(2, 1, [0.5, 0.5])]), request([RoundRecord(2, 1, None)] * 3)], bins=8) is None


def test_sweep_by_hand() -> None:
    rows = threshold_sweep(
        [request([RoundRecord(3, 2, [0.9, 0.8, 0.5]), RoundRecord(3, 0, [0.6, 0.5, 0.5]), RoundRecord(1, 1, [0.9]), RoundRecord(3, 3, None)])],
        [0.0, 0.4, 0.7, 0.95],
    )
    # Prefix survivals: .9 .72 .36 and .6 .3 .15; the short round and the one without confidences are left out.
    assert [r.rounds for r in rows] == [2] * 4
    assert [r.verified for r in rows] == [3, 1.5, 1, 0]
    assert [r.acceptance_length for r in rows] == [2, 2, 2, 1]
    assert [r.wasted for r in rows] == [2, 0.5, 0, 0]
    assert threshold_sweep([request([RoundRecord(3, 1, None)])], [0.5]) == []


def test_sweep_by_loops() -> None:
    rng = np.random.default_rng(6)
    rounds = [RoundRecord(5, int(rng.integers(0, 6)), rng.random(5).tolist()) for _ in range(80)]
    for row in threshold_sweep([request(rounds)], [0.0, 0.2, 0.6]):
        verified, kept = [], []
        for r in rounds:
            assert r.confidences is not None
            n, survival = 0, 1.0
            while n < 5 and survival * r.confidences[n] >= row.threshold:
                survival *= r.confidences[n]
                n += 1
            verified.append(n)
            kept.append(min(n, r.accepted))
        assert row.verified == pytest.approx(np.mean(verified))
        assert row.acceptance_length == pytest.approx(1 + np.mean(kept))
        assert row.wasted == pytest.approx(np.mean(verified) - np.mean(kept))


def test_bad_arrays_are_refused() -> None:
    logits, survived, mask = miscalibrated(20, 0)
    with pytest.raises(DataError, match="one shape"):
        fit_temperatures(logits, survived[:, :2], mask, bins=5)
    with pytest.raises(DataError, match="prefixes"):
        fit_temperatures(logits, np.tile([False, True, False], (20, 1)), mask, bins=5)
    with pytest.raises(DataError, match="boolean"):
        fit_temperatures(logits, survived.astype(float), mask, bins=5)
    with pytest.raises(DataError, match="finite"):
        fit_temperatures(np.full_like(logits, np.nan), survived, mask, bins=5)
    with pytest.raises(DataError, match="2 temperatures for 3"):
        measure_calibration(logits, survived, mask, temperatures=[1.0, 1.0], bins=5, measured_on="x")
