"""The page and the charts of a load test: complete, escaped, honest about gaps, readable on a phone, in need of nothing from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from html_page import CHROMIUM, Page, look_at
from test_bench_merge import answer, facts, run_facts

from firesteel.evaluation.bench import build
from firesteel.evaluation.bench_merge import merge
from firesteel.evaluation.bench_page import render_bench_html, write_bench_html, write_charts
from firesteel.evaluation.bench_schema import MIXED, Bench, Drafting, Load, Measurement, Served


@pytest.fixture(scope="module", autouse=True)
def coarse_charts() -> Iterator[None]:
    """Fewer pixels: the tests look at everything but sharpness."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firesteel.evaluation.bench_plots.DPI", 40)
        yield


def sweep(server: str, step: float, per_round: int, *, domain: str = MIXED, fails_at: int | None = None) -> list[Measurement]:
    """Two repeats of three levels of a server that slows down with load; `per_round` 0 is a server without a drafter."""
    found = []
    for repeat in range(2):
        for users in (1, 4, 16):
            slow = step * (1 + users / 8) * (1 + 0.05 * repeat)
            answers = [answer(step=slow, chunks=6, tokens=1 + 5 * (1 + per_round)) for _ in range(users)]
            drafting = Drafting(rounds=5 * users, drafted=20 * users, accepted=5 * per_round * users, accepted_by_position=[])
            served = Served(drafting=drafting if per_round else None, tokens=None, cached_share=0.0 if per_round else None)
            failures = {"HTTP 503: <busy>": 2} if users == fails_at else {}
            found.append(merge(server, domain, users, repeat, Load(answers=answers, failures=failures), served))
    return found


@pytest.fixture(scope="module")
def bench() -> Bench:
    return build(run_facts(repeats=2), facts("drafter", "plain"), [*sweep("drafter", 0.1, 2), *sweep("plain", 0.08, 0, fails_at=16)])


@pytest.fixture(scope="module")
def page(bench: Bench) -> str:
    return render_bench_html(bench)


def test_page_shows_figures_and_gaps(page: str, bench: Bench) -> None:
    text = Page(page).text
    for point in bench.points:
        total = point.tokens_per_second
        assert total is not None
        assert f"{total.median:.1f} {total.low:.1f}–{total.high:.1f}" in text
    assert "at matched interactivity" in text
    assert "at matched throughput" in text
    assert "not reached" in text
    assert "not told" in text  # the plain server counts no drafts
    assert "plain at concurrency 16: 4 of 36 requests failed: HTTP 503: <busy> (4)" in text
    assert bench.run.command in text
    for word in ("None", "nan", "Undefined"):
        assert word not in text


def test_page_needs_nothing_from_outside(page: str) -> None:
    found = Page(page)
    assert len(found.addresses) == 6  # three charts in two themes
    assert all(a.startswith("data:image/png;base64,") for a in found.addresses)
    rest = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", page)
    assert not re.search(r"//[a-z]+\.|url\(|@import|<script|<link|<iframe|<busy>", rest)
    assert 'name="viewport" content="width=device-width' in page
    assert "default-src 'none'" in page


def test_charts_are_files_and_equal_results_give_equal_bytes(bench: Bench, page: str, tmp_path: Path) -> None:
    paths = write_charts(bench, tmp_path)
    assert [p.name for p in paths] == ["frontier.png", "budget.png", "first_token.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)
    write_bench_html(bench, tmp_path / "bench.html")
    assert (tmp_path / "bench.html").read_text(encoding="utf-8") == page


def test_domains_have_charts_of_their_own(tmp_path: Path) -> None:
    rows = [m for d in ("math", "c/c++") for m in sweep("plain", 0.1, 0, domain=d)]
    alone = build(run_facts(), facts("plain"), rows)
    assert [p.name for p in write_charts(alone, tmp_path)] == ["frontier-math.png", "first_token-math.png", "frontier-c_c__.png", "first_token-c_c__.png"]
    text = Page(render_bench_html(alone)).text
    assert "against" not in text.split("How this was measured")[0]  # nothing to compare with


def test_a_server_that_answered_nothing_leaves_a_page(tmp_path: Path) -> None:
    dead = [merge("plain", MIXED, 1, 0, Load(answers=[], failures={"HTTP 500": 8}), Served(drafting=None, tokens=None, cached_share=None))]
    text = Page(render_bench_html(build(run_facts(), facts("drafter", "plain"), [*sweep("drafter", 0.1, 2), *dead]))).text
    assert "plain has no level without failed requests" in text


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: the page cannot be looked at")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_does_not_scroll_sideways(page: str, tmp_path: Path, width: int) -> None:
    scroll, window, images, scrolling_tables, sticking_out = look_at(page, tmp_path, width)
    assert window == width
    assert scroll <= window
    assert images == 3
    assert sticking_out == 0
    assert (scrolling_tables > 0) == (width == 390)
