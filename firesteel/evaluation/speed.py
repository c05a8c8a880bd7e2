"""Speed: seconds per token with and without a drafter, on the same prompts.

The decoding speed-up is (plain seconds per token) / (drafted seconds per token), each summed over all prompts and repeats
that both arms have; it leaves out the prefill and with it the first token. The variant with prefill counts everything.
Intervals are 95%, by resampling prompts; both arms and all repeats of a prompt move together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from firesteel.evaluation.intervals import bootstrap_sums, percentile_interval
from firesteel.evaluation.records import PLAIN, SpeedRecord
from firesteel.evaluation.schema import Cost, Positions, Speed

# Columns of a prompt's sums: decode seconds, decoded tokens, all seconds, all tokens; four per arm.
_ARM = 4


def speed(records: Sequence[SpeedRecord], *, drafter: str, draft_length: int, resamples: int, seed: int) -> Speed | None:
    """Speed of `drafter` at `draft_length` against plain decoding.

    Prompts that only one arm answered, or whose answer is a single token in either arm, are left out.

    Returns:
        None if no prompt is left.
    """
    plain = _sums_by_prompt(r for r in records if r.arm == PLAIN)
    drafted = _sums_by_prompt(r for r in records if r.arm == drafter and r.draft_length == draft_length)
    shared = [k for k in plain if k in drafted and _usable(plain[k]) and _usable(drafted[k])]
    if not shared:
        return None
    columns = np.array([np.concatenate([plain[k], drafted[k]]) for k in shared])
    resampled = bootstrap_sums(columns, resamples=resamples, seed=seed)
    total = columns.sum(axis=0)
    return Speed(
        draft_length=draft_length,
        prompts=len(shared),
        plain_tokens_per_second=float(total[1] / total[0]),
        drafted_tokens_per_second=float(total[_ARM + 1] / total[_ARM]),
        pooled=float(_ratio(total[None], 0)[0]),
        interval=percentile_interval(_ratio(resampled, 0), len(shared)),
        pooled_with_prefill=float(_ratio(total[None], 2)[0]),
        interval_with_prefill=percentile_interval(_ratio(resampled, 2), len(shared)),
    )


def speed_by_length(records: Sequence[SpeedRecord], *, drafter: str, resamples: int, seed: int) -> list[Speed]:
    """`speed` at every draft length that was timed, shortest first."""
    lengths = sorted({r.draft_length for r in records if r.arm == drafter})
    found = [speed(records, drafter=drafter, draft_length=n, resamples=resamples, seed=seed) for n in lengths]
    return [s for s in found if s is not None]


def speed_of_domain(records: Sequence[SpeedRecord], domain: str) -> list[SpeedRecord]:
    """The records of one domain."""
    return [r for r in records if r.domain == domain]


def expected_speedups(costs: Sequence[Cost], positions: Positions) -> dict[int, float]:
    """What costs and acceptance together promise, by draft length n, one request at a time.

    A round of n drafts adds 1 + sum over k <= n of P(prefix of k accepted) tokens and takes `verify_ms + draft_ms`; a plain step adds
    one token in the `verify_ms` of length 0. Lengths without a cost of drafting, or beyond the positions measured, are left out.
    """
    plain = next((c.verify_ms for c in costs if c.length == 0), None)
    rates = [p.rate for p in positions.unconditional if p.rate is not None]
    if plain is None:
        return {}
    drafting = [(c.length, c.verify_ms + c.draft_ms) for c in costs if c.length > 0 and c.draft_ms is not None]
    return {n: (1 + sum(rates[:n])) * plain / ms for n, ms in drafting if n <= len(rates) and ms > 0}


def _ratio(sums: NDArray[np.float64], at: int) -> NDArray[np.float64]:
    """`[n, 8]` sums -> `[n]` plain seconds per token over drafted ones; `at` is 0 for decoding, 2 with prefill."""
    plain = sums[:, at] / sums[:, at + 1]
    drafted = sums[:, _ARM + at] / sums[:, _ARM + at + 1]
    ratio: NDArray[np.float64] = plain / drafted
    return ratio


def _sums_by_prompt(records: Iterable[SpeedRecord]) -> dict[tuple[str, str], NDArray[np.float64]]:
    sums: dict[tuple[str, str], NDArray[np.float64]] = {}
    for r in records:
        row = np.array([r.seconds_decode, max(r.new_tokens - 1, 0), r.seconds_prefill + r.seconds_decode, r.new_tokens], dtype=np.float64)
        sums[r.prompt] = sums[r.prompt] + row if r.prompt in sums else row
    return sums


def _usable(row: NDArray[np.float64]) -> bool:
    return bool((row > 0).all())
