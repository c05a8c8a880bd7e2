"""The report as one HTML file that needs nothing else: inline styles, plots as data URIs, no request to anywhere."""

from __future__ import annotations

import base64
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from firesteel.artifact import write_atomic
from firesteel.evaluation.canvas import DARK, LIGHT
from firesteel.evaluation.plots import render_plots
from firesteel.evaluation.report import headline, parse_report, write_report_json
from firesteel.evaluation.schema import Report
from firesteel.evaluation.speed import expected_speedups

FOLDER = Path(__file__).parent
ABSENT = "not measured"


def render_html(data: Mapping[str, Any]) -> str:
    """The page of a report; what was not measured is said to be so.

    Raises:
        ArtifactError: the report does not follow the schema.
    """
    report = parse_report(data)
    light, dark = render_plots(data, LIGHT), render_plots(data, DARK)
    alternatives = _alternatives(report)
    plots = {name: picture(png, dark[name], alternatives[name]) for name, png in light.items()}
    return page_template("report_template.html").render(
        r=report,
        headline=headline(data),
        plots=plots,
        longest=max(len(d.positions.unconditional) for d in report.drafters.values()),
        expected=expected_speedups(report.costs, report.positions),
    )


def write_html(data: Mapping[str, Any], path: Path) -> None:
    """Render a report into one file."""
    write_atomic(path, render_html(data))


def write_report(data: Mapping[str, Any], folder: Path) -> None:
    """Write `report.json` and `report.html` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_report_json(data, folder / "report.json")
    write_html(data, folder / "report.html")


def page_template(name: str) -> Template:
    """A page of this room, with the filters that pages share; whatever is filled in is escaped."""
    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(number=_number, percent=_percent, count=_count, plain=_plain, big=_big, bytes=_bytes, duration=_duration, words=_words)
    return environment.get_template(name)


def picture(light: bytes, dark: bytes, alternative: str) -> dict[str, Any]:
    """A plot as a page shows it: PNGs for both themes as data URIs, their size, and what they show in words."""
    width, height = struct.unpack(">II", light[16:24])  # the IHDR chunk comes first in every PNG
    return {"light": _data_uri(light), "dark": _data_uri(dark), "width": width, "height": height, "alt": alternative}


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _alternatives(report: Report) -> dict[str, str]:
    """What each plot shows, in words."""
    drafters = " and ".join(report.drafters)
    return {
        "acceptance_by_position": f"Share of drafts accepted at each position, {drafters}. The numbers are in the tables below.",
        "acceptance_by_domain": f"Acceptance length by domain with 95% intervals, {drafters}. The numbers are in the table above.",
        "reliability": "Reliability diagram: observed against predicted survival of the prefix, before and after scaling and on held-out prompts.",
        "threshold_sweep": "Acceptance length, drafts verified and drafts wasted against the confidence threshold. The numbers are in the table below.",
        "training": "Acceptance length on validation documents over the minutes of training.",
        "speed_by_length": f"Speed-up by draft length: measured for {drafters} with 95% intervals, and expected from costs. The numbers are in the tables.",
        "speed_by_domain": "Tokens per second by domain, with and without the drafter. The numbers are in the table above.",
    }


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return ABSENT if value is None else f"{100 * value:.1f}%"


def _count(value: int) -> str:
    return f"{value:,}"


def _plain(value: float) -> str:
    return f"{value:g}"


def _big(value: int | None) -> str:
    if value is None:
        return "not recorded"
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.1f} {name}"
    return str(value)


def _bytes(value: int | None) -> str:
    if value is None:
        return "not recorded"
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 3570:
        return f"{round(seconds / 60)} min"
    whole = round(seconds / 60) * 60
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _words(name: str) -> str:
    return name.replace("_", " ")
