"""Acceptance: how many drafted tokens survive, overall and position by position.

Two definitions of acceptance length are in use; both are reported, named:
`pooled` = 1 + (all accepted tokens) / (all rounds), and `mean_of_requests` = the mean over requests of the same quotient
within each. Long answers weigh more in the first. Both count the target's own token of every round.
Rounds cut short by the end of an answer count kept tokens only (see `records`).
Intervals are 95%, by resampling requests: the rounds of one answer resemble each other and are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from firesteel.evaluation.intervals import bootstrap_sums, percentile_interval
from firesteel.evaluation.records import RequestRecord
from firesteel.evaluation.schema import AcceptanceLength, Comparison, PositionRate, Positions

PromptKey = tuple[str, str]


def acceptance_length(requests: Sequence[RequestRecord], *, resamples: int, seed: int) -> AcceptanceLength | None:
    """Acceptance length of requests by one drafter at one temperature.

    Requests without a round (answers of one token) say nothing and are left out of `requests`.

    Returns:
        None if no request has a round.
    """
    used = [r for r in requests if r.rounds]
    if not used:
        return None
    accepted = np.array([r.accepted for r in used], dtype=np.float64)
    rounds = np.array([len(r.rounds) for r in used], dtype=np.float64)
    own = 1 + accepted / rounds
    sums = bootstrap_sums(np.stack([accepted, rounds, own], axis=1), resamples=resamples, seed=seed)
    return AcceptanceLength(
        pooled=float(1 + accepted.sum() / rounds.sum()),
        interval=percentile_interval(1 + sums[:, 0] / sums[:, 1], len(used)),
        mean_of_requests=float(own.mean()),
        interval_mean_of_requests=percentile_interval(sums[:, 2] / len(used), len(used)),
        draft_length=max(r.drafted for q in used for r in q.rounds),
        requests=len(used),
        rounds=int(rounds.sum()),
        drafted=sum(r.drafted for q in used for r in q.rounds),
        accepted=int(accepted.sum()),
    )


def by_domain(requests: Iterable[RequestRecord]) -> dict[str, list[RequestRecord]]:
    """Requests grouped by domain, in the order in which domains first appear."""
    groups: dict[str, list[RequestRecord]] = {}
    for r in requests:
        groups.setdefault(r.domain, []).append(r)
    return groups


def select(requests: Iterable[RequestRecord], *, drafter: str, temperature: float) -> list[RequestRecord]:
    """The requests of one drafter at one temperature."""
    return [r for r in requests if r.drafter == drafter and r.temperature == temperature]


def select_greedy(requests: Sequence[RequestRecord], *, drafter: str, otherwise: float) -> list[RequestRecord]:
    """The greedy requests of one drafter; where it answered none greedily, those at temperature `otherwise`."""
    return select(requests, drafter=drafter, temperature=0.0) or select(requests, drafter=drafter, temperature=otherwise)


def finish_reasons(requests: Iterable[RequestRecord]) -> dict[str, int]:
    """How many answers ended for which reason."""
    return dict(sorted(Counter(r.finish_reason for r in requests).items()))


def position_rates(requests: Iterable[RequestRecord]) -> Positions:
    """Acceptance at every position k = 1, 2, ...

    Unconditional: of the rounds that drafted at least k tokens, the share that accepted at least k.
    Conditional: of the rounds that drafted at least k and accepted at least k - 1, the share that accepted at least k;
    None where there is no such round. Rounds that drafted fewer than k tokens are not counted at k.
    """
    rounds = [r for q in requests for r in q.rounds]
    drafted = np.array([r.drafted for r in rounds], dtype=np.int64)
    accepted = np.array([r.accepted for r in rounds], dtype=np.int64)
    unconditional, conditional = [], []
    for k in range(1, int(drafted.max(initial=0)) + 1):
        hits = int((accepted >= k).sum())
        unconditional.append(_rate(k, hits, int((drafted >= k).sum())))
        conditional.append(_rate(k, hits, int(((drafted >= k) & (accepted >= k - 1)).sum())))
    return Positions(unconditional=unconditional, conditional=conditional)


def compare_drafters(first: Sequence[RequestRecord], second: Sequence[RequestRecord], *, resamples: int, seed: int) -> Comparison | None:
    """Ratio of pooled acceptance lengths on the prompts that both answered, interval by resampling those prompts.

    Each side holds requests of one drafter. Prompts are matched by domain and content (without it by id); several answers to a prompt are summed.
    `unpaired` counts the prompts that only one side answered: they are left out.

    Returns:
        None if no prompt is shared.
    """
    one, two = _sums_by_prompt(first), _sums_by_prompt(second)
    shared = [key for key in one if key in two]
    if not shared:
        return None
    columns = np.array([[*one[key], *two[key]] for key in shared], dtype=np.float64)
    resampled = bootstrap_sums(columns, resamples=resamples, seed=seed)
    total = columns.sum(axis=0)
    return Comparison(
        first=first[0].drafter,
        second=second[0].drafter,
        first_pooled=float(1 + total[0] / total[1]),
        second_pooled=float(1 + total[2] / total[3]),
        ratio=float(_ratio(total[None])[0]),
        interval=percentile_interval(_ratio(resampled), len(shared)),
        prompts=len(shared),
        unpaired=len(one.keys() ^ two.keys()),
    )


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """`[n, 4]` accepted and rounds of both sides -> `[n]` ratio of pooled acceptance lengths."""
    ratio: NDArray[np.float64] = (1 + sums[:, 0] / sums[:, 1]) / (1 + sums[:, 2] / sums[:, 3])
    return ratio


def _sums_by_prompt(requests: Iterable[RequestRecord]) -> dict[PromptKey, tuple[int, int]]:
    sums: dict[PromptKey, tuple[int, int]] = {}
    for r in requests:
        if r.rounds:
            accepted, rounds = sums.get(r.prompt, (0, 0))
            sums[r.prompt] = accepted + r.accepted, rounds + len(r.rounds)
    return sums


def _rate(position: int, accepted: int, of: int) -> PositionRate:
    return PositionRate(position=position, accepted=accepted, of=of, rate=accepted / of if of else None)
