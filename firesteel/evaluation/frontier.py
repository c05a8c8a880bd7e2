"""The Pareto frontier of throughput against interactivity, and what one server gains on another's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Spot = tuple[float, float, int]  # tokens/s per user, tokens/s, concurrency


def pareto(spots: Sequence[Spot]) -> list[Spot]:
    """The spots that no other beats in both, by tokens/s per user ascending (tokens/s then descends)."""
    kept: list[Spot] = []
    for spot in sorted(spots, key=lambda s: (-s[0], -s[1])):
        if not kept or spot[1] > kept[-1][1]:
            kept.append(spot)
    return kept[::-1]


def throughput_at(frontier: Sequence[Spot], user: float) -> float | None:
    """Tokens/s where the frontier gives each user this many; straight between its spots, None outside them."""
    return _between([(x, y) for x, y, _ in frontier], user)


def interactivity_at(frontier: Sequence[Spot], total: float) -> float | None:
    """Tokens/s per user where the frontier yields this many in all; None outside its spots."""
    return _between([(y, x) for x, y, _ in reversed(frontier)], total)


def gains(
    baseline: Sequence[Spot], other: Sequence[Spot], repeats: Sequence[tuple[Sequence[Spot], Sequence[Spot]]], *, equal: str
) -> list[tuple[int, float, float, float | None, tuple[float, float] | None]]:
    """The other server against the baseline, at each spot of the baseline's frontier.

    Args:
        baseline, other: frontiers of the medians.
        repeats: both frontiers of each repeat alone; their lowest and highest gain is the interval.
        equal: what is equal: `interactivity` (the gain is in tokens/s) or `throughput` (in tokens/s per user).

    Returns:
        Per spot its concurrency, where it lies on the equal axis, the baseline's value on the other axis, the other server's there
        (None: not reached) and the interval of their ratio (None with fewer than two repeats that reach there).
    """
    read: Callable[[Sequence[Spot], float], float | None] = throughput_at if equal == "interactivity" else interactivity_at
    rows = []
    for user, total, concurrency in baseline:
        at, value = (user, total) if equal == "interactivity" else (total, user)
        ratios = [b / a for first, second in repeats if (a := read(first, at)) is not None and (b := read(second, at)) is not None and a > 0]
        rows.append((concurrency, at, value, read(other, at), (min(ratios), max(ratios)) if len(ratios) > 1 else None))
    return rows


def _between(line: Sequence[tuple[float, float]], at: float) -> float | None:
    """Straight between the points of a line whose first coordinates ascend."""
    for (x, y), (x2, y2) in itertools.pairwise(line):
        if x <= at <= x2:
            return y if x2 == x else y + (y2 - y) * (at - x) / (x2 - x)
    return line[0][1] if line and line[0][0] == at else None
