"""Calibration: do confidences mean what they say?

The confidence head gives, for drafted token k, a logit whose sigmoid is the probability that the token survives given that its
prefix did. What a scheduler uses is the product: the probability that the whole prefix of length k survives. Sequential
temperature scaling (DSpark, arXiv 2607.05147) divides the logit of position k by a temperature T_k, found for k = 1..g in order,
so that the product has the smallest expected calibration error against "the prefix of length k survived".
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from firesteel.errors import DataError
from firesteel.evaluation.intervals import wilson_interval
from firesteel.evaluation.records import RequestRecord
from firesteel.evaluation.schema import Calibration, CalibrationPosition, Confidence, ConfidencePosition, ReliabilityPoint, SweepRow

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Candidate temperatures, evenly spaced in log. 1 is among them, so that on the rounds fitted on, scaling is never worse than none.
TEMPERATURE_GRID: Floats = np.geomspace(0.1, 10.0, 201)
_ONE = 100  # index of temperature 1
_CERTAIN = 1e-6  # probabilities nearer than this to 0 or 1 have no usable logit


def calibration_arrays(requests: Sequence[RequestRecord]) -> tuple[Floats, Bools, Bools]:
    """Rounds as arrays for `fit_temperatures` and `measure_calibration`.

    The last round of every request is left out: if the answer's end cut it, what would have become of the drafts behind the
    cut is unknown. So are rounds without confidences.

    Returns:
        confidence logits `[R, g]`, prefix survival `[R, g]` (column k - 1: the first k drafts were all accepted) and
        mask `[R, g]` (True where a token was drafted).
    """
    rounds = [r for q in requests for r in q.rounds[:-1] if r.confidences is not None]
    width = max((r.drafted for r in rounds), default=0)
    logits = np.zeros((len(rounds), width))
    survived, mask = np.zeros((len(rounds), width), dtype=bool), np.zeros((len(rounds), width), dtype=bool)
    for i, r in enumerate(rounds):
        p = np.clip(np.array(r.confidences, dtype=np.float64), _CERTAIN, 1 - _CERTAIN)
        logits[i, : r.drafted] = np.log(p) - np.log1p(-p)
        survived[i, : r.accepted] = True
        mask[i, : r.drafted] = True
    return logits, survived, mask


def prefix_survival(logits: Floats, temperatures: Sequence[float]) -> Floats:
    """`[R, g]` logits -> `[R, g]` predicted probability that the prefix up to and including each position survives."""
    return np.asarray(np.cumprod(_sigmoid(logits / np.asarray(temperatures, dtype=np.float64)), axis=1), dtype=np.float64)


def fit_temperatures(logits: Floats, survived: Bools, mask: Bools, *, bins: int) -> list[float]:
    """Sequential temperature scaling: one temperature per position, by grid search, earlier ones fixed.

    The calibration error alone cannot tell good temperatures from predictions that have collapsed to the base rate, and with few
    rounds its minimum is noise. So of all temperatures whose error is within sampling noise of the smallest (and not above that
    of T = 1) the likeliest is taken, under a weak prior, log T ~ N(0, 1), that matters only at positions few rounds reach.
    A position without rounds keeps 1.

    Args:
        logits: `[R, g]` confidence logits.
        survived: `[R, g]` prefix survival, hence non-increasing along a row.
        mask: `[R, g]`, True where a token was drafted; a row's True entries come first.
        bins: equal-width bins of the calibration error.

    Raises:
        DataError: shapes differ, or survival is not that of prefixes.
    """
    _check(logits, survived, mask)
    prefix = np.ones(logits.shape[0])
    temperatures: list[float] = []
    for k in range(logits.shape[1]):
        rows = mask[:, k]
        best = _best_temperature(prefix[rows], logits[rows, k], survived[rows, k], bins) if rows.any() else 1.0
        temperatures.append(best)
        prefix = prefix * _sigmoid(logits[:, k] / best)
    return temperatures


def expected_calibration_error(predicted: Floats, outcome: Bools, *, bins: int) -> float | None:
    """ECE: mean over observations of |mean prediction - observed rate| of the equal-width bin they fall into (1 falls into the last).

    Args:
        predicted: `[n]` probabilities.
        outcome: `[n]`, what happened.

    Returns:
        None without observations.
    """
    if predicted.size == 0:
        return None
    return _gap(predicted, outcome, _bin(predicted, bins), bins)


def area_under_curve(predicted: Floats, outcome: Bools) -> float | None:
    """AUC: the probability that a random success was given a higher prediction than a random failure, ties counting half.

    By mean ranks (Mann-Whitney). None if successes or failures are missing.
    """
    successes = int(outcome.sum())
    failures = outcome.size - successes
    if successes == 0 or failures == 0:
        return None
    _, inverse, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2  # ranks from 1; equal predictions share the mean of theirs
    ranks = mean_rank[inverse.reshape(-1)]
    return float((ranks[outcome].sum() - successes * (successes + 1) / 2) / (successes * failures))


def reliability_curve(predicted: Floats, outcome: Bools, *, bins: int) -> list[ReliabilityPoint]:
    """Points of the reliability diagram, one per non-empty equal-width bin, with Wilson's 95% interval of the observed rate."""
    index = _bin(predicted, bins)
    points = []
    for b in np.unique(index):
        here = index == b
        count, hits = int(here.sum()), int(outcome[here].sum())
        points.append(
            ReliabilityPoint(
                low=float(b / bins),
                high=float((b + 1) / bins),
                count=count,
                predicted=float(predicted[here].mean()),
                observed=hits / count,
                interval=wilson_interval(hits, count),
            )
        )
    return points


def measure_calibration(logits: Floats, survived: Bools, mask: Bools, *, temperatures: Sequence[float], bins: int, measured_on: str) -> Calibration:
    """Calibration of prefix survival before (all temperatures 1) and after scaling.

    Args:
        logits, survived, mask: `[R, g]` as in `fit_temperatures`; logits are those *before* scaling. Measure on other rounds
            than those the temperatures were fitted on, or say so in `measured_on`.
        temperatures: g of them, or more (positions that these rounds never reach are not reported).
        measured_on: which rounds these are, for the reader.

    Raises:
        DataError: shapes differ, survival is not that of prefixes, or temperatures are missing.
    """
    _check(logits, survived, mask)
    width = logits.shape[1]
    if len(temperatures) < width:
        raise DataError(f"{len(temperatures)} temperatures for {width} drafted positions", mend="firesteel calibrate RECIPE fits one per position")
    before = prefix_survival(logits, [1.0] * width)
    after = prefix_survival(logits, temperatures[:width])
    positions = [_position(k, before, after, survived, mask, bins) for k in range(width)]
    return Calibration(
        temperatures=[float(t) for t in temperatures],
        bins=bins,
        measured_on=measured_on,
        ece_before=_mean([p.ece_before for p in positions]),
        ece_after=_mean([p.ece_after for p in positions]),
        auc_before=_mean([p.auc_before for p in positions]),
        auc_after=_mean([p.auc_after for p in positions]),
        positions=positions,
        reliability_before=reliability_curve(before[mask], survived[mask], bins=bins),
        reliability_after=reliability_curve(after[mask], survived[mask], bins=bins),
    )


def measure_confidence(requests: Sequence[RequestRecord], *, bins: int) -> Confidence | None:
    """Whether the confidences of answered prompts mean what they say: predicted against observed survival of the prefix, as they were
    decoded with (scaled where the checkpoint carries temperatures), on the rounds of `calibration_arrays`.

    Args:
        requests: of one drafter at one temperature.
        bins: equal-width bins of the calibration error.

    Returns:
        None if no round can be used: no confidences, or single rounds only.
    """
    logits, survived, mask = calibration_arrays(requests)
    if not mask.any():
        return None
    predicted = prefix_survival(logits, [1.0] * logits.shape[1])
    positions = [_confidence_position(k, predicted, survived, mask, bins) for k in range(logits.shape[1])]
    return Confidence(
        bins=bins,
        rounds=logits.shape[0],
        ece=_mean([p.ece for p in positions]),
        auc=_mean([p.auc for p in positions]),
        ece_pooled=expected_calibration_error(predicted[mask], survived[mask], bins=bins),
        auc_pooled=area_under_curve(predicted[mask], survived[mask]),
        positions=positions,
        reliability=reliability_curve(predicted[mask], survived[mask], bins=bins),
    )


def threshold_sweep(requests: Sequence[RequestRecord], thresholds: Sequence[float]) -> list[SweepRow]:
    """What verifying only drafts with enough predicted prefix survival would do, round by round.

    At threshold t, drafts 1..n of a round are verified, n the largest k for which the product of the first k confidences is at
    least t (the product never rises, so these are all such k). Kept are min(n, accepted). Only rounds that drafted the full
    length (the longest seen) are used: in others, what longer drafts would have brought is unknown.
    The estimate takes rounds as they were seen; verifying less would make later rounds start elsewhere.

    Returns:
        per threshold the means per round: `verified` drafts, `acceptance_length` (with the target's own token) and
        `wasted` drafts (verified, not kept); empty if no round has confidences.
    """
    with_confidences = [r for q in requests for r in q.rounds if r.confidences]
    full = max((r.drafted for r in with_confidences), default=0)
    rounds = [r for r in with_confidences if r.drafted == full]
    if not rounds:
        return []
    survival = np.cumprod(np.array([r.confidences for r in rounds], dtype=np.float64), axis=1)
    accepted = np.array([r.accepted for r in rounds], dtype=np.int64)
    rows = []
    for t in thresholds:
        verified = (survival >= t).sum(axis=1)
        kept = np.minimum(verified, accepted)
        rows.append(
            SweepRow(
                threshold=float(t),
                rounds=len(rounds),
                verified=float(verified.mean()),
                acceptance_length=float(1 + kept.mean()),
                wasted=float((verified - kept).mean()),
            )
        )
    return rows


def _best_temperature(prefix: Floats, logits: Floats, survived: Bools, bins: int) -> float:
    predictions = [prefix * _sigmoid(logits / t) for t in TEMPERATURE_GRID]
    index = [_bin(p, bins) for p in predictions]
    errors = np.array([_gap(p, survived, b, bins) for p, b in zip(predictions, index, strict=True)])
    least = int(errors.argmin())
    p = predictions[least]
    # A perfectly calibrated forecaster has, in a bin, a gap of standard deviation sqrt(sum p (1 - p)) / n, and E|gap| = sd * sqrt(2 / pi).
    noise = np.sqrt(2 / np.pi * np.bincount(index[least], weights=p * (1 - p))).sum() / p.size
    allowed = np.flatnonzero(errors <= min(errors[least] + noise, errors[_ONE]))
    scores = [_log_likelihood(predictions[i], survived) - np.log(TEMPERATURE_GRID[i]) ** 2 / 2 for i in allowed]
    return float(TEMPERATURE_GRID[allowed[int(np.argmax(scores))]])


def _log_likelihood(predicted: Floats, outcome: Bools) -> float:
    p = np.clip(predicted, _CERTAIN, 1 - _CERTAIN)
    return float(np.where(outcome, np.log(p), np.log1p(-p)).sum())


def _gap(predicted: Floats, outcome: Bools, index: NDArray[np.int64], bins: int) -> float:
    return float(np.abs(np.bincount(index, weights=predicted - outcome, minlength=bins)).sum() / predicted.size)


def _position(k: int, before: Floats, after: Floats, survived: Bools, mask: Bools, bins: int) -> CalibrationPosition:
    first, last = (_confidence_position(k, predicted, survived, mask, bins) for predicted in (before, after))
    return CalibrationPosition(
        position=k + 1,
        rounds=first.rounds,
        survived=first.survived,
        predicted_before=first.predicted,
        predicted_after=last.predicted,
        ece_before=first.ece,
        ece_after=last.ece,
        auc_before=first.auc,
        auc_after=last.auc,
    )


def _confidence_position(k: int, predicted: Floats, survived: Bools, mask: Bools, bins: int) -> ConfidencePosition:
    rows = mask[:, k]
    p, y = predicted[rows, k], survived[rows, k]
    some = bool(rows.any())
    return ConfidencePosition(
        position=k + 1,
        rounds=int(rows.sum()),
        survived=float(y.mean()) if some else None,
        predicted=float(p.mean()) if some else None,
        ece=expected_calibration_error(p, y, bins=bins),
        auc=area_under_curve(p, y),
    )


def _check(logits: Floats, survived: Bools, mask: Bools) -> None:
    if logits.ndim != 2 or logits.shape != survived.shape or logits.shape != mask.shape:
        raise DataError(f"logits {list(logits.shape)}, survival {list(survived.shape)} and mask {list(mask.shape)} must have one shape [rounds, positions]")
    if not np.isfinite(logits[mask]).all():
        raise DataError("confidence logits are not finite")
    if survived.dtype != np.bool_ or mask.dtype != np.bool_:
        raise DataError("survival and mask must be boolean arrays")
    if (survived[:, 1:] & ~survived[:, :-1]).any() or (mask[:, 1:] & ~mask[:, :-1]).any():
        raise DataError("survival must be that of prefixes: once False, False to the end of the row; likewise the mask")


def _sigmoid(x: Floats) -> Floats:
    e = np.exp(-np.abs(x))  # never overflows
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e))


def _bin(predicted: Floats, bins: int) -> NDArray[np.int64]:
    return np.minimum((predicted * bins).astype(np.int64), bins - 1)


def _mean(values: list[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    return sum(present) / len(present) if present else None
