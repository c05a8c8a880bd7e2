"""Intervals: the bootstrap over independent units, and Wilson's interval of a proportion."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]

_Z95 = 1.959963984540054  # two-sided 95% of the normal distribution
_CELLS = 4_000_000  # resampled values held at a time: bounds memory at 32 MB


def bootstrap_sums(columns: NDArray[np.float64], *, resamples: int, seed: int) -> NDArray[np.float64]:
    """Column sums of resampled rows (Efron's bootstrap).

    Rows are the independent units (requests, prompts): what is inside one is correlated and is resampled as a whole.

    Args:
        columns: `[n, c]`, n >= 1.
        resamples: how many times n rows are drawn with replacement.
        seed: of numpy's generator; equal seeds and n draw equal rows, so paired columns stay paired.

    Returns:
        `[resamples, c]`.
    """
    n = columns.shape[0]
    rng = np.random.default_rng(seed)
    step = max(1, _CELLS // (n * columns.shape[1]))
    parts = [columns[rng.integers(0, n, size=(min(step, resamples - at), n))].sum(axis=1) for at in range(0, resamples, step)]
    return np.concatenate(parts)


def percentile_interval(samples: NDArray[np.float64], units: int) -> Interval | None:
    """The middle 95% of bootstrap samples; None with fewer than two units, from which no spread can be learnt."""
    if units < 2:
        return None
    low, high = np.quantile(samples, [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(successes: int, n: int) -> Interval | None:
    """95% score interval of a proportion (Wilson 1927); None without observations."""
    if n == 0:
        return None
    p, z2 = successes / n, _Z95 * _Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = _Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return max(0.0, middle - half), min(1.0, middle + half)
