"""The result of a load test: points, gains and what a reader must be told, from the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from firesteel.artifact import write_atomic
from firesteel.errors import ArtifactError
from firesteel.evaluation.bench_merge import combine, frontier_of, spread
from firesteel.evaluation.bench_schema import MIXED, SCHEMA_VERSION, Bench, BenchRun, Gain, Matched, Measurement, Paired, Point, ServerFacts, Spread
from firesteel.evaluation.frontier import Spot, gains

_FOREIGN = 0.02  # share of generated tokens that may be missing in our own count before somebody else is suspected
_CACHED = 0.05  # share of prompt tokens from the prefix cache from which it is not called cold; templates alone stay below


def build(run: BenchRun, servers: dict[str, ServerFacts], measurements: Sequence[Measurement], notes: Sequence[str] = ()) -> Bench:
    """The whole result; every server but the baseline is compared with it."""
    points = combine(measurements)
    domains = list(dict.fromkeys(p.domain for p in points))
    others = [name for name in servers if name != run.baseline]
    found = [_gain(name, run.baseline, domain, points, measurements) for domain in domains for name in others]
    return Bench(
        schema_version=SCHEMA_VERSION,
        run=run,
        servers=servers,
        points=points,
        gains=found,
        measurements=list(measurements),
        notes=[*notes, *_warnings(points, measurements)],
    )


def write_bench(bench: Bench, path: Path) -> None:
    """Write `bench.json`; the same figures give the same bytes."""
    write_atomic(path, json.dumps(bench.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")


def read_bench(path: Path) -> Bench:
    """Read `bench.json`.

    Raises:
        ArtifactError: it is missing or does not follow the schema.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        return Bench.model_validate(data)
    except (OSError, ValueError, ValidationError) as e:
        raise ArtifactError(f"{path} is not a bench.json of schema version {SCHEMA_VERSION}: {e}", mend="measure again: `firesteel bench RECIPE`") from None


def bench_headline(bench: Bench) -> list[str]:
    """What came out, in a line for each comparison, or for each server where there is none."""
    lines = []
    for gain in bench.gains:
        who = f"{gain.server} against {gain.baseline}" + ("" if gain.domain == MIXED else f", {gain.domain}")
        lines.append(f"{who}: {_range(gain.interactivity, 'output throughput', 'interactivity')}; {_range(gain.throughput, 'tokens/s per user', 'throughput')}")
    for name in bench.servers if not bench.gains else ():
        reached = [(p.tokens_per_second.median, p.concurrency) for p in bench.points if p.server == name and p.tokens_per_second is not None]
        if reached:
            lines.append(f"{name}: up to {max(reached)[0]:.1f} output tokens/s, at concurrency {max(reached)[1]}")
    return lines


def _range(rows: Sequence[Matched], what: str, at: str) -> str:
    """A comparison in words: the lowest and the highest gain, never the highest alone."""
    found = sorted(r.gain for r in rows if r.gain is not None)
    if not found:
        return f"{what} at matched {at}: not reached"
    span = f"{found[0]:.2f}" if len(found) == 1 else f"{found[0]:.2f} to {found[-1]:.2f}"
    missing = len(rows) - len(found)
    return f"{span} times the {what} at matched {at}" + (f" ({missing} of {len(rows)} levels not reached)" if missing else "")


def _gain(server: str, baseline: str, domain: str, points: Sequence[Point], measurements: Sequence[Measurement]) -> Gain:
    first, second = ([p for p in points if (p.server, p.domain) == (name, domain)] for name in (baseline, server))
    by_repeat: list[tuple[list[Spot], list[Spot]]] = []
    for repeat in sorted({m.repeat for m in measurements}):
        alone = combine([m for m in measurements if m.repeat == repeat and m.domain == domain])
        by_repeat.append((frontier_of([p for p in alone if p.server == baseline]), frontier_of([p for p in alone if p.server == server])))
    matched = {}
    for equal in ("interactivity", "throughput"):
        rows = gains(frontier_of(first), frontier_of(second), by_repeat, equal=equal)
        matched[equal] = [
            Matched(concurrency=c, at=at, baseline=base, value=value, gain=value / base if value is not None and base > 0 else None, interval=interval)
            for c, at, base, value, interval in rows
        ]
    shared = [p.concurrency for p in first if any(q.concurrency == p.concurrency for q in second)]
    paired = [_paired(c, [m for m in measurements if m.domain == domain and m.concurrency == c], baseline, server) for c in shared]
    return Gain(server=server, baseline=baseline, domain=domain, **matched, concurrency=paired)


def _paired(concurrency: int, measurements: Sequence[Measurement], baseline: str, server: str) -> Paired:
    by = {(m.server, m.repeat): m for m in measurements if not m.failed}

    def ratio(pick: Callable[[Measurement], float | None]) -> Spread | None:
        found = []
        for name, repeat in by:
            if name == server and (baseline, repeat) in by:
                top, bottom = pick(by[server, repeat]), pick(by[baseline, repeat])
                found.append(top / bottom if top is not None and bottom else None)
        return spread(found)

    return Paired(
        concurrency=concurrency,
        tokens_per_second=ratio(lambda m: m.tokens_per_second),
        tokens_per_second_per_user=ratio(lambda m: m.tokens_per_second_per_user),
        ttft_ms=ratio(lambda m: None if m.ttft_ms is None else m.ttft_ms.median),
    )


def _warnings(points: Sequence[Point], measurements: Sequence[Measurement]) -> list[str]:
    found = []
    for p in points:
        if p.failed:
            reasons = "; ".join(f"{what} ({count})" for what, count in p.failures.items())
            found.append(
                f"{_where(p)}: {p.failed} of {p.completed + p.failed} requests failed: {reasons}. The level is shown, and left out of frontier and gains."
            )
    for m in measurements:
        told, own = m.served.tokens, m.output_tokens
        if told is not None and not m.failed and own and told > own * (1 + _FOREIGN):
            found.append(f"{_where(m)}, repeat {m.repeat}: the server generated {told} tokens, {own} of them for this test: somebody else was using it.")
        if m.served.cached_share is not None and m.served.cached_share > _CACHED:
            share = 100 * m.served.cached_share
            found.append(f"{_where(m)}, repeat {m.repeat}: {share:.0f}% of the prompts' tokens came from the server's prefix cache: it was not cold.")
    return found


def _where(what: Point | Measurement) -> str:
    return f"{what.server}{'' if what.domain == MIXED else f' ({what.domain})'} at concurrency {what.concurrency}"
