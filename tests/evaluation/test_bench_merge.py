"""The figures of a load test, against requests and counters whose truth is known by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firesteel.errors import ArtifactError
from firesteel.evaluation.bench import bench_headline, build, read_bench, write_bench
from firesteel.evaluation.bench_merge import busy_tokens_per_second, combine, decoding_steps, merge
from firesteel.evaluation.bench_schema import MIXED, Answer, BenchRun, Drafting, Load, Measurement, Served, ServerFacts
from firesteel.evaluation.frontier import gains, interactivity_at, pareto, throughput_at
from firesteel.evaluation.schema import Machine

UNTOLD = Served(drafting=None, tokens=None, cached_share=None)


def answer(start: float = 0.0, ttft: float = 0.5, step: float = 0.1, chunks: int = 6, tokens: int = 16) -> Answer:
    """First chunk after `ttft`, the others every `step`; the end 0.01 s after the last."""
    last = start + ttft + step * (chunks - 1)
    return Answer(start=start, first=start + ttft, last=last, end=last + 0.01, prompt_tokens=9, tokens=tokens, chunks=chunks)


def measured(server: str, concurrency: int, user: float, total: float, *, repeat: int = 0, failed: int = 0, **served: Any) -> Measurement:
    """A measurement that lies where a test wants it."""
    blank = merge(
        server, MIXED, concurrency, repeat, Load(answers=[], failures={"HTTP 503": failed} if failed else {}), Served(**{**UNTOLD.model_dump(), **served})
    )
    return blank.model_copy(update={"completed": 8, "output_tokens": 800, "tokens_per_second": total, "tokens_per_second_per_user": user})


def run_facts(**changes: Any) -> BenchRun:
    machine = Machine(cpu="a cpu", cores=2, memory_gb=4.0, accelerator=None, system="Linux")
    facts = {
        "recipe": "tiny", "date": "2026-01-01", "command": "firesteel bench tiny", "seed": 0, "salt": "ab", "api": "chat", "concurrency": [1, 4], "repeats": 1,
        "requests": 4, "min_requests": 8, "warmup": 1, "max_new_tokens": 16, "temperature": 0.0, "prompts": {"math": 4}, "baseline": "plain",
        "machine": machine, "versions": {"guidellm": "0.8.1"},
    }  # fmt: skip
    return BenchRun(**{**facts, **changes})


def facts(*names: str) -> dict[str, ServerFacts]:
    return {name: ServerFacts(url="http://x", model="m", software=None, counters=name != "plain") for name in names}


def test_one_user() -> None:
    drafting = Drafting(rounds=10, drafted=40, accepted=20, accepted_by_position=[10, 6, 4, 0])
    answers = [answer(0.0), answer(1.01)]
    found = merge("drafter", MIXED, 1, 0, Load(answers=answers, failures={}), Served(drafting=drafting, tokens=32, cached_share=0.0))
    assert found.ttft_ms is not None
    assert found.ttft_ms.median == pytest.approx(500)
    assert found.tpot_ms is not None
    assert found.tpot_ms.median == pytest.approx(1000 * 0.5 / 15)  # five steps, fifteen tokens after the first
    assert found.tokens_per_second_per_user == pytest.approx(30)
    assert found.chunk_gap_ms is not None
    assert found.chunk_gap_ms.median == pytest.approx(100)
    assert found.latency_s is not None
    assert found.latency_s.p99 == pytest.approx(1.01)
    assert found.tokens_per_second == pytest.approx(32 / 2.02)
    assert (found.acceptance_length, found.drafted_per_step, found.accepted_per_step) == (3.0, 4.0, 2.0)
    assert (found.completed, found.failed, found.output_tokens, found.prompt_tokens) == (2, 0, 32, 18)


def test_quantiles_are_over_requests() -> None:
    found = merge("s", MIXED, 1, 0, Load(answers=[answer(ttft=0.1 * k) for k in range(1, 12)], failures={}), UNTOLD)
    assert found.ttft_ms is not None
    assert (found.ttft_ms.median, found.ttft_ms.p90, found.ttft_ms.p99) == pytest.approx((600, 1000, 1090))


def test_throughput_is_that_of_busy_users() -> None:
    """Two users; the last answer is alone for its second half, which does not count."""
    short, long = answer(0.0, ttft=1.0, step=1.0, chunks=5, tokens=5), answer(0.0, ttft=1.0, step=1.0, chunks=9, tokens=9)
    assert short.end == pytest.approx(5.01)
    assert busy_tokens_per_second([short, long], 2) == pytest.approx((5 + 5.01) / 5.01)
    found = merge("s", MIXED, 2, 0, Load(answers=[short, long], failures={}), UNTOLD)
    assert found.tokens_per_second_whole == pytest.approx(14 / 9.01)
    assert busy_tokens_per_second([short], 2) == pytest.approx(5 / 5.01)  # fewer answers than users: all of the time
    assert busy_tokens_per_second([], 2) is None


def test_what_is_not_told_is_not_invented() -> None:
    none = merge("plain", MIXED, 1, 0, Load(answers=[answer()], failures={}), UNTOLD)
    assert (none.acceptance_length, none.drafted_per_step, none.accepted_per_step) == (None, None, None)
    idle = Drafting(rounds=0, drafted=0, accepted=0, accepted_by_position=[])
    silent = merge("s", MIXED, 1, 0, Load(answers=[answer()], failures={}), UNTOLD.model_copy(update={"drafting": idle}))
    assert (silent.acceptance_length, silent.drafted_per_step, silent.accepted_per_step) == (None, 0.0, 0.0)
    single = merge("s", MIXED, 1, 0, Load(answers=[answer(chunks=1, tokens=1)], failures={}), UNTOLD)
    assert (single.tpot_ms, single.tokens_per_second_per_user, single.chunk_gap_ms) == (None, None, None)
    nothing = merge("s", MIXED, 1, 0, Load(answers=[], failures={"HTTP 500": 3}), UNTOLD)
    assert (nothing.failed, nothing.ttft_ms, nothing.tokens_per_second) == (3, None, None)


def test_steps_without_drafts_lower_the_budget() -> None:
    """Sixteen tokens: the first, three rounds with two of four drafts each, and six steps without."""
    drafting = Drafting(rounds=3, drafted=12, accepted=6, accepted_by_position=[3, 3, 0, 0])
    assert decoding_steps(drafting, 16, 1) == 9
    assert decoding_steps(drafting, 9, 1) == 3  # the end cut the last round: never less than the rounds
    found = merge("s", MIXED, 1, 0, Load(answers=[answer()], failures={}), UNTOLD.model_copy(update={"drafting": drafting}))
    assert found.acceptance_length == 3
    assert found.drafted_per_step == pytest.approx(12 / 9)
    assert found.accepted_per_step == pytest.approx(6 / 9)


def test_spread_and_frontier_of_repeats() -> None:
    rows = [measured("s", 1, user, total, repeat=r) for r, (user, total) in enumerate([(50, 50), (48, 47), (60, 55)])]
    rows += [measured("s", 2, 40, 90), measured("s", 4, 35, 80), measured("s", 8, 20, 100, failed=2)]
    points = {p.concurrency: p for p in combine(rows)}
    one = points[1].tokens_per_second_per_user
    assert one is not None
    assert (one.median, one.low, one.high, one.n) == (50, 48, 60, 3)
    assert [points[c].on_frontier for c in (1, 2, 4, 8)] == [True, True, False, False]  # 4 is worse than 2 in both, 8 had failures
    assert points[8].failures == {"HTTP 503": 2}
    assert points[8].tokens_per_second is not None  # reported all the same


def test_frontier_is_what_no_other_beats() -> None:
    assert pareto([(10, 100, 1), (9, 90, 2), (8, 150, 4), (10, 80, 8), (5, 150, 16)]) == [(8, 150, 4), (10, 100, 1)]
    assert pareto([]) == []
    line = [(5.0, 200.0, 8), (10.0, 100.0, 1)]
    assert throughput_at(line, 7.5) == pytest.approx(150)
    assert interactivity_at(line, 150) == pytest.approx(7.5)
    assert (throughput_at(line, 4.9), throughput_at(line, 10.1)) == (None, None)
    assert (interactivity_at(line, 99), interactivity_at(line, 201)) == (None, None)
    assert (throughput_at(line[:1], 5.0), throughput_at(line[:1], 6.0)) == (200.0, None)


def test_gain_at_matched_axes() -> None:
    plain, fast = [(5.0, 200.0, 8), (10.0, 100.0, 1)], [(8.0, 300.0, 8), (20.0, 120.0, 1)]
    rows = gains(plain, fast, [(plain, fast), (plain, [(8.0, 330.0, 8), (20.0, 150.0, 1)])], equal="interactivity")
    assert rows[0][:4] == (8, 5.0, 200.0, None)
    assert rows[1][3] == pytest.approx(270)
    assert rows[1][4] == pytest.approx((2.7, 3.0))
    rows = gains(plain, fast, [], equal="throughput")
    assert rows[0][3] == pytest.approx(8 + 12 * 100 / 180)
    assert (rows[1][3], rows[1][4]) == (None, None)


def test_comparison_is_paired_by_repeat() -> None:
    rows = [measured("plain", 4, 10, 40, repeat=0), measured("drafter", 4, 20, 80, repeat=0)]
    rows += [measured("plain", 4, 5, 20, repeat=1), measured("drafter", 4, 15, 50, repeat=1)]
    rows += [measured("plain", 8, 5, 60), measured("drafter", 8, 9, 70, failed=1)]
    bench = build(run_facts(), facts("drafter", "plain"), rows)
    (gain,) = bench.gains
    assert (gain.server, gain.baseline) == ("drafter", "plain")
    four, eight = gain.concurrency
    assert four.tokens_per_second is not None
    assert (four.tokens_per_second.low, four.tokens_per_second.high) == (2.0, 2.5)
    assert eight.tokens_per_second is None  # requests failed: nothing to compare
    assert any("drafter at concurrency 8: 1 of 9 requests failed: HTTP 503 (1)" in note for note in bench.notes)


def test_headline_says_what_was_not_reached() -> None:
    rows = [measured("plain", 1, 10, 10), measured("plain", 4, 5, 20), measured("drafter", 1, 40, 40), measured("drafter", 4, 20, 80)]
    assert bench_headline(build(run_facts(), facts("drafter", "plain"), rows)) == [
        "drafter against plain: output throughput at matched interactivity: not reached; tokens/s per user at matched throughput: not reached"
    ]
    alone = build(run_facts(baseline="drafter"), facts("drafter"), rows[2:])
    assert bench_headline(alone) == ["drafter: up to 80.0 output tokens/s, at concurrency 4"]


def test_headline_names_the_lowest_gain_too() -> None:
    rows = [measured("plain", 1, 10, 10), measured("plain", 4, 8, 20), measured("plain", 8, 5, 30)]
    rows += [measured("drafter", 1, 20, 10), measured("drafter", 8, 8, 16)]
    (line,) = bench_headline(build(run_facts(), facts("drafter", "plain"), rows))
    assert line.startswith(
        "drafter against plain: 0.80 to 1.50 times the output throughput at matched interactivity (1 of 3 levels not reached); 2.00 times the"
    )


def test_a_foreign_user_and_a_warm_cache_are_said() -> None:
    rows = [measured("s", 1, 10, 10, tokens=900), measured("s", 2, 10, 20, tokens=801, cached_share=0.4)]
    notes = build(run_facts(baseline="s"), facts("s"), rows).notes
    assert len(notes) == 2
    assert "generated 900 tokens, 800 of them for this test" in notes[0]
    assert "40% of the prompts' tokens came from the server's prefix cache" in notes[1]


def test_file_comes_back(tmp_path: Path) -> None:
    bench = build(run_facts(), facts("drafter", "plain"), [measured("plain", 1, 10, 10), measured("drafter", 1, 40, 40)])
    write_bench(bench, tmp_path / "bench.json")
    assert read_bench(tmp_path / "bench.json") == bench
    (tmp_path / "bench.json").write_text('{"schema_version": 1}')
    with pytest.raises(ArtifactError, match=r"is not a bench\.json"):
        read_bench(tmp_path / "bench.json")
