"""The page: complete, escaped, honest about gaps, readable on a phone, and in need of nothing from outside."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from html_page import CHROMIUM, Page, look_at

from firesteel.evaluation.html import render_html, write_report
from firesteel.evaluation.plots import PLOTS, write_plots
from firesteel.evaluation.report import read_report


@pytest.fixture(scope="module", autouse=True)
def coarse_plots() -> Iterator[None]:
    """Fewer pixels: the tests look at everything but sharpness."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("firesteel.evaluation.plots.DPI", 40)
        yield


@pytest.fixture(scope="module")
def full_page(full_report: dict[str, Any]) -> str:
    return render_html(full_report)


@pytest.fixture(scope="module")
def bare_page(bare_report: dict[str, Any]) -> str:
    return render_html(bare_report)


def test_page_shows_the_numbers(full_page: str, full_report: dict[str, Any]) -> None:
    text = Page(full_page).text
    al, fast = full_report["acceptance_length"], full_report["speedup"]
    assert f"Acceptance length {al['pooled']:.2f} 95% interval {al['interval'][0]:.2f}–{al['interval'][1]:.2f}" in text
    assert f"Decoding speed-up {fast['pooled']:.2f}× 95% interval {fast['interval'][0]:.2f}–{fast['interval'][1]:.2f}" in text
    for name, domain in full_report["domains"].items():
        assert f"{name.replace('_', ' ')} {domain['acceptance_length']['pooled']:.2f}" in text
    for number in (full_report["comparisons"][0]["ratio"], full_report["calibration"]["ece_before"], full_report["calibration"]["ece_after"]):
        assert f"{number:.3f}" in text
    met = full_report["confidence"]
    for p in met["positions"]:
        row = f"{p['position']} {p['ece']:.3f} {p['auc']:.3f} {100 * p['predicted']:.1f}% {100 * p['survived']:.1f}% {p['rounds']:,}"
        assert row in text
    assert f"ECE {met['ece_pooled']:.3f}, AUC {met['auc_pooled']:.3f}" in text
    sets = {n.replace("_", " "): d for n, d in full_report["domains"].items()} | full_report["extra"]
    for name, found in sets.items():
        pairs = zip(found["positions"]["unconditional"], found["positions"]["conditional"], strict=True)
        cells = " ".join(f"{100 * u['rate']:.1f}% " + ("none" if c["rate"] is None else f"{100 * c['rate']:.1f}%") for u, c in pairs)
        assert f"{name} {cells} {found['positions']['unconditional'][0]['of']:,}" in text
    for phrase in [*full_report["notes"], full_report["run"]["command"], full_report["run"]["machine"]["cpu"], full_report["run"]["target"]["fingerprint"]]:
        assert phrase in text
    assert "not measured" not in text


def test_page_says_what_is_absent(bare_page: str) -> None:
    text = Page(bare_page).text
    for phrase in (
        "Decoding speed-up not measured",
        "Time of the whole run not recorded",
        "Speed was not measured in this run",
        "Confidences were not calibrated",
        "No summary of training",
    ):
        assert phrase in text
    for word in ("None", "nan", "Undefined", "0.00×", " 0.0 "):
        assert word not in text
    assert "Drafters side by side" not in text


def test_page_needs_nothing_from_outside(full_page: str) -> None:
    page = Page(full_page)
    images = [a for a in page.addresses if a.startswith("data:image/png;base64,")]
    assert images == page.addresses
    assert len(images) == 2 * len(PLOTS)
    rest = re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", full_page)
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<iframe", rest)
    assert "default-src 'none'" in full_page


def test_page_states_themes_and_width(full_page: str) -> None:
    assert "prefers-color-scheme: dark" in full_page
    assert 'name="viewport" content="width=device-width' in full_page


def test_all_text_is_escaped(bare_report: dict[str, Any]) -> None:
    evil = '<script>alert("1")</script>&"\'$x$'
    domain = bare_report["domains"]["qa"]
    run = {**bare_report["run"], "command": evil, "recipe": evil, "target": {**bare_report["run"]["target"], "name": evil}, "versions": {evil: evil}}
    report = {
        **bare_report, "run": run, "notes": [evil], "domains": {evil: domain}, "finish_reasons": {evil: 9}, "stage_seconds": {evil: 1.0},
        "extra": {evil: {"requests": 1, "new_tokens": 5, "finish_reasons": {}, "by_drafter": domain["by_drafter"], "positions": domain["positions"]}},
    }  # fmt: skip
    page = Page(render_html(report))
    assert "script" not in page.tags
    assert page.text.count("alert(") >= 8


def test_plots_fill_their_box_in_both_themes(full_page: str) -> None:
    sizes = re.findall(r'<img src="data:image/png;base64,([^"]+)" width="(\d+)" height="(\d+)" alt="([^"]+)"', full_page)
    dark = re.findall(r'srcset="data:image/png;base64,([^"]+)"', full_page)
    assert len(sizes) == len(dark) == len(PLOTS)
    for (light_png, width, height, alt), dark_png in zip(sizes, dark, strict=True):
        for png in map(base64.b64decode, (light_png, dark_png)):
            assert png.startswith(b"\x89PNG\r\n\x1a\n")
            assert struct.unpack(">II", png[16:24]) == (int(width), int(height))
        assert light_png != dark_png
        assert 0.6 <= int(height) / int(width) <= 1.4
        assert len(alt) > 40


def test_plots_without_numbers_are_not_drawn(bare_report: dict[str, Any], tmp_path: Path) -> None:
    paths = write_plots(bare_report, tmp_path / "plots")
    assert [p.name for p in paths] == ["acceptance_by_position.png", "acceptance_by_domain.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


def test_write_report(bare_report: dict[str, Any], bare_page: str, tmp_path: Path) -> None:
    write_report(bare_report, tmp_path / "new")
    assert read_report(tmp_path / "new" / "report.json") == bare_report
    assert (tmp_path / "new" / "report.html").read_text(encoding="utf-8") == bare_page  # equal reports give equal bytes


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium found: the page cannot be looked at")
@pytest.mark.parametrize("width", [1280, 390])
def test_page_does_not_scroll_sideways(full_page: str, tmp_path: Path, width: int) -> None:
    scroll, window, images, scrolling_tables, sticking_out = look_at(full_page, tmp_path, width)
    assert window == width
    assert scroll <= window
    assert images == len(PLOTS)
    assert sticking_out == 0
    assert (scrolling_tables > 0) == (width == 390)  # on a phone wide tables scroll inside their own box
