"""From single requests and the server's counters to the figures of a measurement, and from repeats to points."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from firesteel.evaluation.bench_schema import Answer, Drafting, Load, Measurement, Point, Quantiles, Served, Spread
from firesteel.evaluation.frontier import pareto


def merge(server: str, domain: str, concurrency: int, repeat: int, load: Load, served: Served) -> Measurement:
    """The figures of one measurement.

    Throughput is that of the time in which all users were busy (`busy_tokens_per_second`); `tokens_per_second_whole` counts the
    end, too, where fewer and fewer are. Time per output token, and with it tokens/s per user, counts from the first token on.
    """
    answers = load.answers
    seconds = max(a.end for a in answers) - min(a.start for a in answers) if answers else 0.0
    tokens = sum(a.tokens for a in answers)
    tpot = [(a.last - a.first) / (a.tokens - 1) for a in answers if a.tokens > 1]
    tpot = [t for t in tpot if t > 0]  # all in one chunk: it took no time that could be seen
    drafting = served.drafting
    steps = 0 if drafting is None else decoding_steps(drafting, tokens if served.tokens is None else served.tokens, len(answers))
    return Measurement(
        server=server,
        domain=domain,
        concurrency=concurrency,
        repeat=repeat,
        completed=len(answers),
        failed=sum(load.failures.values()),
        failures=load.failures,
        seconds=seconds,
        prompt_tokens=sum(a.prompt_tokens for a in answers),
        output_tokens=tokens,
        tokens_per_second=busy_tokens_per_second(answers, concurrency),
        tokens_per_second_whole=tokens / seconds if seconds > 0 else None,
        tokens_per_second_per_user=float(np.median([1 / t for t in tpot])) if tpot else None,
        ttft_ms=_quantiles([1000 * (a.first - a.start) for a in answers]),
        tpot_ms=_quantiles([1000 * t for t in tpot]),
        chunk_gap_ms=_quantiles([1000 * (a.last - a.first) / (a.chunks - 1) for a in answers if a.chunks > 1]),
        latency_s=_quantiles([a.end - a.start for a in answers]),
        # Without a round there is no length to tell of, though the server has a drafter.
        acceptance_length=1 + drafting.accepted / drafting.rounds if drafting is not None and drafting.rounds else None,
        drafted_per_step=drafting.drafted / steps if drafting is not None and steps else None,
        accepted_per_step=drafting.accepted / steps if drafting is not None and steps else None,
        served=served,
    )


def busy_tokens_per_second(answers: Sequence[Answer], concurrency: int) -> float | None:
    """Output tokens per second while `concurrency` requests were under way.

    From the first start until the first end after the last start: then a user is left without work, and what follows says more about
    the number of requests than about the server. Of an answer that is cut by that moment the tokens up to it count, evenly spaced
    between its first and its last. With fewer answers than users (failures) it is the whole time.

    Returns:
        None without answers or without time.
    """
    if not answers:
        return None
    begin, last_start = min(a.start for a in answers), max(a.start for a in answers)
    ends = [a.end for a in answers]
    end = min((e for e in ends if e >= last_start), default=max(ends)) if len(answers) >= concurrency else max(ends)
    if end <= begin:
        return None
    return sum(_tokens_until(a, end) for a in answers) / (end - begin)


def decoding_steps(drafting: Drafting, tokens: int, answers: int) -> int:
    """Steps of single requests after their prompts, those without any draft included.

    Servers count a round only where something was drafted. But each step of a request writes one token of the target's own beside the
    accepted drafts, and the first token of an answer comes with the prompt. Drafts that were accepted behind the end of an answer make
    this a little low, so it is never less than the rounds.
    """
    return max(drafting.rounds, tokens - answers - drafting.accepted)


def combine(measurements: Sequence[Measurement]) -> list[Point]:
    """One point per server, domain and concurrency, in the order in which they first come; the frontier is of medians.

    A point with failed requests is not on the frontier: the server had less to do than at that concurrency.
    """
    groups: dict[tuple[str, str, int], list[Measurement]] = {}
    for m in measurements:
        groups.setdefault((m.server, m.domain, m.concurrency), []).append(m)
    points = [_point(group) for group in groups.values()]
    found = []
    for point in points:
        mine = [p for p in points if (p.server, p.domain) == (point.server, point.domain)]
        found.append(point.model_copy(update={"on_frontier": point.concurrency in {c for _, _, c in frontier_of(mine)}}))
    return found


def frontier_of(points: Sequence[Point]) -> list[tuple[float, float, int]]:
    """The frontier of one server's points: tokens/s per user ascending, tokens/s, concurrency."""
    return pareto([(*xy, p.concurrency) for p in points if (xy := place(p)) is not None])


def place(point: Point) -> tuple[float, float] | None:
    """Where a point lies: tokens/s per user and tokens/s; None with failed requests or without figures."""
    user, total = point.tokens_per_second_per_user, point.tokens_per_second
    return None if point.failed or user is None or total is None else (user.median, total.median)


def spread(values: Iterable[float | None]) -> Spread | None:
    """Median, lowest and highest of what was measured; None without any."""
    told = [v for v in values if v is not None]
    return Spread(median=float(np.median(told)), low=min(told), high=max(told), n=len(told)) if told else None


def _point(group: Sequence[Measurement]) -> Point:
    failures: dict[str, int] = {}
    for m in group:
        for what, count in m.failures.items():
            failures[what] = failures.get(what, 0) + count

    def over(pick: Callable[[Measurement], float | None]) -> Spread | None:
        return spread(pick(m) for m in group)

    def quantile(pick: Callable[[Measurement], Quantiles | None], which: str) -> Spread | None:
        return spread(None if (q := pick(m)) is None else getattr(q, which) for m in group)

    return Point(
        server=group[0].server,
        domain=group[0].domain,
        concurrency=group[0].concurrency,
        completed=sum(m.completed for m in group),
        failed=sum(m.failed for m in group),
        failures=failures,
        on_frontier=False,
        tokens_per_second=over(lambda m: m.tokens_per_second),
        tokens_per_second_per_user=over(lambda m: m.tokens_per_second_per_user),
        ttft_ms=quantile(lambda m: m.ttft_ms, "median"),
        ttft_p90_ms=quantile(lambda m: m.ttft_ms, "p90"),
        ttft_p99_ms=quantile(lambda m: m.ttft_ms, "p99"),
        tpot_ms=quantile(lambda m: m.tpot_ms, "median"),
        tpot_p90_ms=quantile(lambda m: m.tpot_ms, "p90"),
        tpot_p99_ms=quantile(lambda m: m.tpot_ms, "p99"),
        chunk_gap_ms=quantile(lambda m: m.chunk_gap_ms, "median"),
        latency_s=quantile(lambda m: m.latency_s, "median"),
        latency_p90_s=quantile(lambda m: m.latency_s, "p90"),
        latency_p99_s=quantile(lambda m: m.latency_s, "p99"),
        acceptance_length=over(lambda m: m.acceptance_length),
        drafted_per_step=over(lambda m: m.drafted_per_step),
        accepted_per_step=over(lambda m: m.accepted_per_step),
        cached_share=over(lambda m: m.served.cached_share),
    )


def _tokens_until(answer: Answer, moment: float) -> float:
    if moment >= answer.last:
        return float(answer.tokens)
    if moment < answer.first:
        return 0.0
    return 1 + (answer.tokens - 1) * (moment - answer.first) / (answer.last - answer.first)


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    if not values:
        return None
    median, p90, p99 = np.quantile(values, [0.5, 0.9, 0.99])
    return Quantiles(median=float(median), p90=float(p90), p99=float(p99))
