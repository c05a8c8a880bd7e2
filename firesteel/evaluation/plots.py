"""Plots of a report, as PNG bytes, for light and dark pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from firesteel.artifact import write_atomic
from firesteel.evaluation.canvas import DASHES, DPI, LIGHT, MARKERS, Theme, canvas, factor, grid, legend, page_style, percent, png_bytes, words
from firesteel.evaluation.report import parse_report
from firesteel.evaluation.schema import AcceptanceLength, Interval, ReliabilityPoint, Report, Speed
from firesteel.evaluation.speed import expected_speedups


def render_plots(data: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """PNG bytes by plot name; a plot whose numbers were not measured is missing."""
    report = parse_report(data)
    drawn: dict[str, bytes] = {}
    with mpl.rc_context(page_style(theme)):
        for name, draw in PLOTS.items():
            figure = draw(report, theme)
            if figure is not None:
                drawn[name] = png_bytes(figure, DPI)
    return drawn


def write_plots(data: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots, in light colours, as `folder/NAME.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, png in render_plots(data, LIGHT).items():
        write_atomic(folder / f"{name}.png", png)
        paths.append(folder / f"{name}.png")
    return paths


def _positions(report: Report, theme: Theme) -> Figure | None:
    drafters = {n: d.positions for n, d in report.drafters.items() if d.positions.unconditional}
    if not drafters:
        return None
    figure, axes = canvas("Drafts that survive, by position")
    for i, (name, positions) in enumerate(drafters.items()):
        style = {"color": theme.series[i % 6], "marker": MARKERS[i % 6], "clip_on": False, "zorder": 3}
        prefix, step = positions.unconditional, [p for p in positions.conditional if p.rate is not None]
        axes.plot([p.position for p in prefix], [p.rate for p in prefix], label=f"{name}: whole prefix", linestyle="-", **style)
        axes.plot([p.position for p in step], [p.rate for p in step], label=f"{name}: given the last", linestyle=":", markerfacecolor=theme.paper, **style)
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1))
    axes.set_xticks(range(1, max(len(p.unconditional) for p in drafters.values()) + 1))
    percent(axes.yaxis)
    legend(axes, columns=1 if len(drafters) == 1 else 2)
    return figure


def _domains(report: Report, theme: Theme) -> Figure | None:
    names = [n for n, d in report.domains.items() if d.by_drafter]
    if not names:
        return None
    names.sort(key=lambda n: _pooled(report.domains[n].acceptance_length))
    drafters = list(report.drafters)
    figure, axes = canvas("Acceptance length by domain", rows=round(len(names) * max(1.0, len(drafters) / 3)))
    for i, drafter in enumerate(drafters):
        offset = (i - (len(drafters) - 1) / 2) * -min(0.28, 0.8 / len(drafters))
        for y, name in enumerate(names):
            al = report.domains[name].by_drafter.get(drafter)
            if al is not None:
                _whisker(axes, al.pooled, y + offset, al.interval, theme.series[i % 6], MARKERS[i % 6])
        overall = report.drafters[drafter].acceptance_length
        label = drafter if overall is None else f"{drafter}: {overall.pooled:.2f} over all"
        axes.plot([], [], linestyle="", marker=MARKERS[i % 6], color=theme.series[i % 6], label=label)
        if overall is not None:
            axes.axvline(overall.pooled, color=theme.series[i % 6], linestyle=DASHES[(i + 1) % 4], linewidth=1, zorder=1)
    axes.set_yticks(range(len(names)), [words(n) for n in names])
    axes.set(xlabel="tokens per target step (lines: 95% interval)")
    axes.set_xlim(left=min(1.0, axes.get_xlim()[0]))
    grid(axes, "x")
    legend(axes, columns=2)
    return figure


def _reliability(report: Report, theme: Theme) -> Figure | None:
    cal, met = report.calibration, report.confidence
    curves = [] if cal is None else [("before scaling", cal.reliability_before, 1), ("after scaling", cal.reliability_after, 0)]
    curves += [] if met is None else [("held-out prompts", met.reliability, 2)]
    if not any(points for _, points, _ in curves):
        return None
    figure, axes = canvas("Do confidences mean what they say?", height=4.1)
    axes.plot([0, 1], [0, 1], color=theme.ink, linewidth=1, linestyle=":", label="perfect")
    for label, points, i in curves:
        _reliability_series(axes, points, label, theme.series[i], MARKERS[i], DASHES[i])
    axes.set(xlabel="predicted: the prefix survives", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
    percent(axes.xaxis)
    percent(axes.yaxis)
    legend(axes, columns=2)
    return figure


def _sweep(report: Report, theme: Theme) -> Figure | None:
    rows = report.sweep
    if len(rows) < 2:
        return None
    figure, axes = canvas("Verifying only confident drafts")
    at = [r.threshold for r in rows]
    for i, (label, values) in enumerate(
        [
            ("acceptance length", [r.acceptance_length for r in rows]),
            ("drafts verified", [r.verified for r in rows]),
            ("drafts wasted", [r.wasted for r in rows]),
        ]
    ):
        axes.plot(at, values, label=label, color=theme.series[i], marker=MARKERS[i], linestyle=DASHES[i])
    axes.set(xlabel="threshold on the prefix's survival", ylabel="tokens per round")
    axes.set_ylim(bottom=0)
    legend(axes, columns=3)
    return figure


def _training(report: Report, theme: Theme) -> Figure | None:
    curves = {n: t.curve for n, t in report.training.items() if t.curve}
    if not curves:
        return None
    figure, axes = canvas("Validation while training")
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(
            [p.seconds / 60 for p in curve],
            [p.acceptance_length for p in curve],
            label=name,
            color=theme.series[i % 6],
            marker=MARKERS[i % 6],
            linestyle=DASHES[i % 4],
        )
    axes.set(xlabel="minutes of training", ylabel="acceptance length (validation)")
    axes.set_xlim(left=0)
    legend(axes, columns=2)
    return figure


def _speed_by_length(report: Report, theme: Theme) -> Figure | None:
    drafters = {n: d.speed_by_length for n, d in report.drafters.items() if d.speed_by_length}
    expected = expected_speedups(report.costs, report.positions)
    lengths = {s.draft_length for speeds in drafters.values() for s in speeds} | expected.keys()
    if len(lengths) < 2:
        return None
    figure, axes = canvas("Speed by draft length")
    axes.axhline(1, color=theme.ink, linewidth=1, linestyle=":", label="without drafter")
    if expected:
        axes.plot(
            list(expected),
            list(expected.values()),
            label=f"{report.run.drafter}, expected from costs",
            color=theme.ink,
            linestyle="-.",
            marker="^",
            markersize=4,
        )
    for i, (name, speeds) in enumerate(drafters.items()):
        color, marker = theme.series[i % 6], MARKERS[i % 6]
        axes.plot([s.draft_length for s in speeds], [s.pooled for s in speeds], label=f"{name}, measured", color=color, marker=marker, linestyle=DASHES[i % 4])
        for s in speeds:
            if s.interval is not None:
                axes.plot([s.draft_length] * 2, s.interval, color=color, linewidth=1.4, alpha=0.55)
    axes.set_xticks(sorted(lengths))
    axes.set(xlabel="drafted tokens per round", ylabel="speed-up (95% interval)")
    factor(axes.yaxis)
    legend(axes, columns=2)
    return figure


def _speed_by_domain(report: Report, theme: Theme) -> Figure | None:
    speeds: dict[str, Speed] = {n: d.speed for n, d in report.domains.items() if d.speed is not None}
    if not speeds:
        return None
    names = sorted(speeds, key=lambda n: speeds[n].pooled)
    figure, axes = canvas("Speed by domain", rows=len(names))
    for i, (label, values) in enumerate(
        [
            (f"with {report.run.drafter}", [speeds[n].drafted_tokens_per_second for n in names]),
            ("without drafter", [speeds[n].plain_tokens_per_second for n in names]),
        ]
    ):
        offset = 0.19 if i == 0 else -0.19
        axes.barh(
            [y + offset for y in range(len(names))],
            values,
            height=0.36,
            label=label,
            color=theme.series[i] if i == 0 else theme.faint,
            edgecolor=theme.series[0] if i == 0 else theme.ink,
            linewidth=0.6,
            hatch=None if i == 0 else "////",
        )
    end = max(max(s.drafted_tokens_per_second, s.plain_tokens_per_second) for s in speeds.values())
    for y, name in enumerate(names):
        axes.text(end * 1.02, y, f"{speeds[name].pooled:.2f}×", va="center", fontsize=9)
    axes.set_xlim(0, end * 1.17)
    axes.set_yticks(range(len(names)), [words(n) for n in names])
    axes.set(xlabel="tokens per second, decoding")
    grid(axes, "x")
    legend(axes, columns=2)
    return figure


PLOTS: dict[str, Callable[[Report, Theme], Figure | None]] = {
    "acceptance_by_position": _positions,
    "acceptance_by_domain": _domains,
    "reliability": _reliability,
    "threshold_sweep": _sweep,
    "training": _training,
    "speed_by_length": _speed_by_length,
    "speed_by_domain": _speed_by_domain,
}


def _whisker(axes: Any, value: float, y: float, interval: Interval | None, color: str, marker: str) -> None:
    if interval is not None:
        axes.plot(interval, [y, y], color=color, linewidth=2, solid_capstyle="butt", alpha=0.6, zorder=2)
    axes.plot([value], [y], color=color, marker=marker, linestyle="", zorder=3)


def _reliability_series(axes: Any, points: list[ReliabilityPoint], label: str, color: str, marker: str, dash: str) -> None:
    for p in points:
        if p.interval is not None:
            axes.plot([p.predicted] * 2, p.interval, color=color, linewidth=1.2, alpha=0.5, clip_on=False)
    axes.plot([p.predicted for p in points], [p.observed for p in points], label=label, color=color, marker=marker, linestyle=dash, clip_on=False)


def _pooled(al: AcceptanceLength | None) -> float:
    return 0.0 if al is None else al.pooled
