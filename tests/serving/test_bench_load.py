"""guidellm: found or missed, told and heard; counters before and after; a server that is asked before it is measured."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from bench_fake import FakeServer

from firesteel.errors import RecipeError, ResourceError, TargetError, VerificationError
from firesteel.recipe import Bench
from firesteel.serving.load import Generator, LoadPlan, drive, find_generator, parse_report
from firesteel.serving.reach import reach, warm_up
from firesteel.serving.scrape import between, parse_metrics, scrape

needs_guidellm = pytest.mark.skipif(find_spec("guidellm") is None, reason='guidellm is not installed (pip install "firesteel[bench]")')


def python_that(tmp_path: Path, *, prints: str = "", code: int = 0) -> Path:
    """A program in Python's place."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\necho '{prints}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def request_row(**changes: Any) -> dict[str, Any]:
    times = {"request_start": 10.0, "request_end": 11.0, "first_token_iteration": 10.2, "last_token_iteration": 10.9, "token_iterations": 8}
    row = {"info": {"timings": times, "error": None}, "output_metrics": {"text_tokens": 20}, "input_metrics": {"text_tokens": 7}}
    return {**row, **changes}


def report(**requests: Any) -> dict[str, Any]:
    return {"metadata": {"version": 2}, "benchmarks": [{"requests": {"successful": [], "errored": [], "incomplete": None, **requests}}]}


def test_missing_guidellm_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r'pip install "firesteel\[bench\]"'):
        find_generator(Bench(python=str(python_that(tmp_path, code=1))))
    with pytest.raises(RecipeError, match=r"bench\.python=nowhere does not exist"):
        find_generator(Bench(python="nowhere"))
    with pytest.raises(ResourceError, match=r"guidellm 0\.3\.1 .* is not of the series"):
        find_generator(Bench(python=str(python_that(tmp_path, prints="0.3.1"))))
    found = find_generator(Bench(python=str(python_that(tmp_path, prints="0.8.2rc1"))))
    assert found.version == "0.8.2rc1"


def test_report_is_read() -> None:
    loud = "HTTPStatusError: 503\nmore"
    load = parse_report(
        report(
            successful=[request_row(), request_row(output_metrics={"text_tokens": None})],
            errored=[request_row(info={"error": loud}), request_row(info={"error": loud}), request_row(info={"error": "x" * 999})],
            incomplete=[request_row()],
        )
    )
    (answer,) = load.answers
    assert (answer.start, answer.first, answer.last, answer.end, answer.tokens, answer.chunks) == (10.0, 10.2, 10.9, 11.0, 20, 8)
    assert load.failures["HTTPStatusError: 503"] == 2
    assert load.failures["was not answered to the end"] == 1
    assert sum(load.failures.values()) == 5
    assert max(map(len, load.failures)) == 160
    assert any("include_usage" in what for what in load.failures)
    with pytest.raises(ResourceError, match="report of version 3"):
        parse_report({"metadata": {"version": 3}, "benchmarks": [{}]})


def test_guidellm_that_ends_is_heard(tmp_path: Path) -> None:
    plan = LoadPlan("http://127.0.0.1:9", "m", "chat", [[{"role": "user", "content": "hi"}]], 1, 8)
    with pytest.raises(ResourceError, match="ended with code 3 and without a report: no such option"):
        drive(Generator(str(python_that(tmp_path, prints="no such option", code=3)), "0.8.1"), plan)


def test_counters_before_and_after() -> None:
    with FakeServer(drafted=4, accepted=2, cached=0.25) as server:
        before = scrape(server.url, {}, 5)
        warm_up(LoadPlan(server.url, "tiny", "chat", [[{"role": "user", "content": "a"}]] * 3, 2, 13))
        served = between(before, scrape(server.url, {}, 5), "s")
    assert served.drafting is not None
    assert (served.drafting.rounds, served.drafting.drafted, served.drafting.accepted) == (12, 48, 24)  # 12 tokens after the first, 3 a round
    assert served.drafting.accepted_by_position == [12, 12, 0, 0]
    assert served.tokens == 39
    assert served.cached_share == pytest.approx(0.25)
    with pytest.raises(VerificationError, match="counters fell"):
        between(parse_metrics("vllm:generation_tokens_total 9\n"), parse_metrics("vllm:generation_tokens_total 3\n"), "s")


def test_server_without_counters_tells_nothing() -> None:
    with FakeServer(metrics=False) as server:
        page = scrape(server.url, {}, 5)
        assert between(page, page, "s").model_dump() == {"drafting": None, "tokens": None, "cached_share": None}


@pytest.mark.parametrize("lost", ["before", "after"])
def test_counters_of_a_lifetime_are_not_those_of_a_measurement(lost: str) -> None:
    """A page that could not be read is not a page on which every counter stands at nothing."""
    with FakeServer(drafted=4, accepted=2, cached=0.25) as server:
        warm_up(LoadPlan(server.url, "tiny", "chat", [[{"role": "user", "content": "a"}]] * 3, 2, 13))
        page, url = scrape(server.url, {}, 5), server.url
    assert page.generated
    none = scrape(url, {}, 1)
    pages = (none, page) if lost == "before" else (page, none)
    assert between(*pages, "s").model_dump() == {"drafting": None, "tokens": None, "cached_share": None}


def test_positions_may_come_later() -> None:
    head = "vllm:spec_decode_num_drafts_total {}\nvllm:spec_decode_num_draft_tokens_total {}\nvllm:spec_decode_num_accepted_tokens_total {}\n"
    place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{}"}} {}\n'
    early, late = head.format(2, 4, 1) + place.format(0, 1), head.format(5, 10, 6) + place.format(0, 4) + place.format(1, 2)
    served = between(parse_metrics(early), parse_metrics(late), "s")
    assert served.drafting is not None
    assert served.drafting.accepted_by_position == [3, 2]


def test_reach_names_setting_and_mend() -> None:
    with FakeServer(model="tiny", key="k") as server:
        found = reach("s", f"{server.url}/v1/", None, "k")
        assert (found.url, found.model, found.software) == (server.url, "tiny", "fake")
        with pytest.raises(RecipeError, match=r"does not serve 'huge'; it serves tiny\n.*bench\.model"):
            reach("s", server.url, "huge", "k")
        with pytest.raises(TargetError, match=r"401(.|\n)*bench\.api_key_variable"):
            reach("s", server.url, None, None)
        url = server.url
    with pytest.raises(TargetError, match=r"server s cannot be reached at (.|\n)*bench\.servers"):
        reach("s", url, None, None)
    with pytest.raises(RecipeError, match=r"bench\.servers: s is at 'localhost:1'"):
        reach("s", "localhost:1", None, None)
    with pytest.raises(RecipeError, match=r"bench\.servers: s is at 'http://localhost:80x', which is no address(.|\n)*--server s="):
        reach("s", "http://localhost:80x", None, None)
    assert not scrape("http://localhost:80x", {}, 1).read


@needs_guidellm
@pytest.mark.parametrize("api", [pytest.param("chat", marks=pytest.mark.slow), "completions"])
def test_real_guidellm_sees_the_known_speed(api: str) -> None:
    """Times may be late where other work runs, never early: bounds from below are tight."""
    texts = [f"[{i}] hello" for i in range(6)]
    requests: list[Any] = [[{"role": "user", "content": t}] for t in texts] if api == "chat" else texts
    with FakeServer(ttft=0.2, step=0.1, drafted=4, accepted=2, most=None) as server:
        load = drive(Generator(sys.executable, "0.8.1"), LoadPlan(server.url, "tiny", api, requests, 2, 13, {"temperature": 0}, timeout=30))
        assert sorted(server.prompts) == sorted(texts)
        assert {(b["model"], b["temperature"], b["stream"], b.get("max_completion_tokens") or b.get("max_tokens")) for b in server.asked} == {
            ("tiny", 0, True, 13)
        }
    assert load.failures == {}
    assert len(load.answers) == 6
    for a in load.answers:
        assert (a.tokens, a.chunks, a.prompt_tokens) == (13, 5, 7)
        assert 0.19 <= a.first - a.start < 1.5
        assert 0.35 <= a.last - a.first < 1.5
        assert a.start < a.first < a.last <= a.end


@needs_guidellm
def test_real_guidellm_counts_failures() -> None:
    requests: list[Any] = [[{"role": "user", "content": str(i)}] for i in range(4)]
    with FakeServer(most=0) as server:
        load = drive(Generator(sys.executable, "0.8.1"), LoadPlan(server.url, "tiny", "chat", requests, 2, 13))
    assert load.answers == []
    assert sum(load.failures.values()) == 4
    assert all("503" in what for what in load.failures)
    with FakeServer(usage=False) as server:
        load = drive(Generator(sys.executable, "0.8.1"), LoadPlan(server.url, "tiny", "chat", requests[:1], 1, 13))
    assert load.answers == []
    assert any("include_usage" in what for what in load.failures)
