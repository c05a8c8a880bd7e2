"""The charts of a load test, as PNG bytes: the frontier, the verification budget, the time to the first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from firesteel.evaluation.bench_merge import frontier_of
from firesteel.evaluation.bench_schema import Bench, Point, Spread
from firesteel.evaluation.canvas import DASHES, DPI, MARKERS, Theme, canvas, grid, legend, page_style, png_bytes, words


def render_charts(bench: Bench, domain: str, theme: Theme) -> dict[str, bytes]:
    """PNG bytes by chart name, for the measurements of one domain; a chart without numbers is missing."""
    drawn: dict[str, bytes] = {}
    with mpl.rc_context(page_style(theme)):
        for name, draw in CHARTS.items():
            series = {server: [p for p in bench.points if (p.server, p.domain) == (server, domain)] for server in bench.servers}
            figure = draw(series, theme)
            if figure is not None:
                drawn[name] = png_bytes(figure, DPI)
    return drawn


def _frontier(series: dict[str, list[Point]], theme: Theme) -> Figure | None:
    shown = {name: [p for p in points if p.tokens_per_second and p.tokens_per_second_per_user] for name, points in series.items()}
    if not any(shown.values()):
        return None
    figure, axes = canvas("Throughput against interactivity", height=4.1)
    for i, (name, points) in enumerate(shown.items()):
        color, marker = theme.series[i % 6], MARKERS[i % 6]
        line = frontier_of(points)
        axes.plot([x for x, _, _ in line], [y for _, y, _ in line], color=color, linestyle=DASHES[i % 4], marker="", label="_", zorder=2)
        axes.plot([], [], color=color, linestyle=DASHES[i % 4], marker=marker, label=words(name))
        for p in points:
            user, total = p.tokens_per_second_per_user, p.tokens_per_second
            assert user is not None
            assert total is not None
            axes.plot([user.low, user.high], [total.median] * 2, color=color, linewidth=1.2, alpha=0.6)
            axes.plot([user.median] * 2, [total.low, total.high], color=color, linewidth=1.2, alpha=0.6)
            face = color if p.on_frontier else theme.paper  # hollow: another level is better in both, or requests failed
            axes.plot([user.median], [total.median], color=color, marker="X" if p.failed else marker, markerfacecolor=face, linestyle="", zorder=3)
            axes.annotate(str(p.concurrency), (user.median, total.median), xytext=(5, 4), textcoords="offset points", fontsize=8.5, color=theme.ink)
    axes.set(xlabel="tokens/s per user (numbers: concurrency)", ylabel="output tokens/s, all users")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    grid(axes, "both")
    legend(axes, columns=3)
    return figure


def _budget(series: dict[str, list[Point]], theme: Theme) -> Figure | None:
    shown = {name: points for name, points in series.items() if any(p.drafted_per_step for p in points)}
    if not shown:
        return None
    figure, axes = canvas("Verification budget over concurrency")
    for i, (name, points) in enumerate(series.items()):
        if name not in shown:
            continue
        color, marker = theme.series[i % 6], MARKERS[i % 6]
        _over_concurrency(axes, points, lambda p: p.drafted_per_step, f"{words(name)}: verified", color, marker, "-")
        _over_concurrency(axes, points, lambda p: p.accepted_per_step, f"{words(name)}: accepted", color, marker, ":")
    axes.set(ylabel="drafts per request and step")
    axes.set_ylim(bottom=0)
    _levels(axes, [p.concurrency for points in shown.values() for p in points])
    legend(axes, columns=2)
    return figure


def _first_token(series: dict[str, list[Point]], theme: Theme) -> Figure | None:
    if not any(p.ttft_ms for points in series.values() for p in points):
        return None
    figure, axes = canvas("Time to the first token")
    for i, (name, points) in enumerate(series.items()):
        color, marker = theme.series[i % 6], MARKERS[i % 6]
        _over_concurrency(axes, points, lambda p: p.ttft_ms, f"{words(name)}: median", color, marker, "-")
        _over_concurrency(axes, points, lambda p: p.ttft_p90_ms, f"{words(name)}: p90", color, marker, ":")
    axes.set(ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    _levels(axes, [p.concurrency for points in series.values() for p in points])
    legend(axes, columns=2)
    return figure


CHARTS: dict[str, Callable[[dict[str, list[Point]], Theme], Figure | None]] = {"frontier": _frontier, "budget": _budget, "first_token": _first_token}


def _over_concurrency(axes: Any, points: Sequence[Point], pick: Callable[[Point], Spread | None], label: str, color: str, marker: str, dash: str) -> None:
    told = [(p.concurrency, s) for p in points if (s := pick(p)) is not None]
    axes.plot([c for c, _ in told], [s.median for _, s in told], color=color, marker=marker, linestyle=dash, label=label)
    for c, s in told:
        axes.plot([c, c], [s.low, s.high], color=color, linewidth=1.2, alpha=0.6)


def _levels(axes: Any, levels: Sequence[int]) -> None:
    """Each level gets the same room: they are powers of two as a rule."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(set(levels)), [str(c) for c in sorted(set(levels))])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="concurrency")
