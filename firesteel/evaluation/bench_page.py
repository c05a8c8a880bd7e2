"""A load test as one HTML file that needs nothing else, and its charts as PNG files."""

from __future__ import annotations

from pathlib import Path

from firesteel.artifact import write_atomic
from firesteel.evaluation.bench import bench_headline
from firesteel.evaluation.bench_plots import render_charts
from firesteel.evaluation.bench_schema import MIXED, Bench
from firesteel.evaluation.canvas import DARK, LIGHT
from firesteel.evaluation.html import page_template, picture

_ALTERNATIVES = {
    "frontier": "Output tokens per second of all users against tokens per second per user, by server and concurrency. The numbers are in the table below.",
    "budget": "Drafted tokens verified and accepted per request and step, over concurrency. The numbers are in the table below.",
    "first_token": "Milliseconds to the first token over concurrency, median and 90th percentile. The numbers are in the table below.",
}


def render_bench_html(bench: Bench) -> str:
    """The page of a load test; what was not told or not reached is said to be so."""
    domains = list(dict.fromkeys(p.domain for p in bench.points))
    charts = {}
    for domain in domains:
        dark = render_charts(bench, domain, DARK)
        charts[domain] = {name: picture(png, dark[name], _ALTERNATIVES[name]) for name, png in render_charts(bench, domain, LIGHT).items()}
    return page_template("bench_template.html").render(b=bench, headline=bench_headline(bench), domains=domains, charts=charts, mixed=MIXED)


def write_bench_html(bench: Bench, path: Path) -> None:
    """Render a load test into one file."""
    write_atomic(path, render_bench_html(bench))


def write_charts(bench: Bench, folder: Path) -> list[Path]:
    """Write the charts, in light colours, as `folder/NAME.png`; those of a domain measured by itself as `NAME-DOMAIN.png`."""
    paths = []
    for domain in dict.fromkeys(p.domain for p in bench.points):
        for name, png in render_charts(bench, domain, LIGHT).items():
            safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in domain)
            paths.append(folder / (f"{name}.png" if domain == MIXED else f"{name}-{safe}.png"))
            write_atomic(paths[-1], png)
    return paths
