"""Plots of a report, as PNG bytes, for light and dark pages.

Figures are narrow with large letters, so that they stay readable at the width of a phone. Colours are from the palette of
Okabe and Ito, distinguishable with any colour vision; shapes and line styles tell series apart without colour.
Nothing global is touched: figures are built without pyplot, styles live in a context.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from firesteel.artifact import write_atomic
from firesteel.evaluation.report import parse_report
from firesteel.evaluation.schema import AcceptanceLength, Interval, ReliabilityPoint, Report, Speed
from firesteel.evaluation.speed import expected_speedups

WIDTH, HEIGHT, DPI = 5.0, 3.5, 200


@dataclass(frozen=True)
class Theme:
    """Colours of a page."""

    name: str
    paper: str
    ink: str
    faint: str
    series: tuple[str, ...]


LIGHT = Theme("light", "#ffffff", "#23211f", "#dcd8d2", ("#d55e00", "#0072b2", "#009e73", "#8a5a83", "#8c7a00", "#5a5a5a"))
DARK = Theme("dark", "#1d1b1a", "#ece8e2", "#3d3936", ("#f28e3d", "#56b4e9", "#2cc295", "#cc79a7", "#f0e442", "#b0b0b0"))
THEMES = (LIGHT, DARK)
_MARKERS = ("o", "s", "^", "D", "v", "P")
_DASHES = ("-", "--", "-.", ":")


def render_plots(data: Mapping[str, Any], theme: Theme) -> dict[str, bytes]:
    """PNG bytes by plot name; a plot whose numbers were not measured is missing."""
    report = parse_report(data)
    drawn: dict[str, bytes] = {}
    with mpl.rc_context(_style(theme)):
        for name, draw in PLOTS.items():
            figure = draw(report, theme)
            if figure is not None:
                out = io.BytesIO()
                # No software or date in the file: equal reports give equal bytes.
                figure.savefig(out, format="png", dpi=DPI, metadata={"Software": None})
                drawn[name] = out.getvalue()
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
    figure, axes = _canvas("Drafts that survive, by position")
    for i, (name, positions) in enumerate(drafters.items()):
        style = {"color": theme.series[i % 6], "marker": _MARKERS[i % 6], "clip_on": False, "zorder": 3}
        prefix, step = positions.unconditional, [p for p in positions.conditional if p.rate is not None]
        axes.plot([p.position for p in prefix], [p.rate for p in prefix], label=f"{name}: whole prefix", linestyle="-", **style)
        axes.plot([p.position for p in step], [p.rate for p in step], label=f"{name}: given the last", linestyle=":", markerfacecolor=theme.paper, **style)
    axes.set(xlabel="position in the block", ylabel="share accepted", ylim=(0, 1))
    axes.set_xticks(range(1, max(len(p.unconditional) for p in drafters.values()) + 1))
    _percent(axes.yaxis)
    _legend(axes, columns=1 if len(drafters) == 1 else 2)
    return figure


def _domains(report: Report, theme: Theme) -> Figure | None:
    names = [n for n, d in report.domains.items() if d.by_drafter]
    if not names:
        return None
    names.sort(key=lambda n: _pooled(report.domains[n].acceptance_length))
    drafters = list(report.drafters)
    figure, axes = _canvas("Acceptance length by domain", rows=round(len(names) * max(1.0, len(drafters) / 3)))
    for i, drafter in enumerate(drafters):
        offset = (i - (len(drafters) - 1) / 2) * -min(0.28, 0.8 / len(drafters))
        for y, name in enumerate(names):
            al = report.domains[name].by_drafter.get(drafter)
            if al is not None:
                _whisker(axes, al.pooled, y + offset, al.interval, theme.series[i % 6], _MARKERS[i % 6])
        overall = report.drafters[drafter].acceptance_length
        label = drafter if overall is None else f"{drafter}: {overall.pooled:.2f} over all"
        axes.plot([], [], linestyle="", marker=_MARKERS[i % 6], color=theme.series[i % 6], label=label)
        if overall is not None:
            axes.axvline(overall.pooled, color=theme.series[i % 6], linestyle=_DASHES[(i + 1) % 4], linewidth=1, zorder=1)
    axes.set_yticks(range(len(names)), [_words(n) for n in names])
    axes.set(xlabel="tokens per target step (lines: 95% interval)")
    axes.set_xlim(left=min(1.0, axes.get_xlim()[0]))
    _grid(axes, "x")
    _legend(axes, columns=2)
    return figure


def _reliability(report: Report, theme: Theme) -> Figure | None:
    cal = report.calibration
    if cal is None or not cal.reliability_before:
        return None
    figure, axes = _canvas("Do confidences mean what they say?", height=4.1)
    axes.plot([0, 1], [0, 1], color=theme.ink, linewidth=1, linestyle=":", label="perfect")
    for i, (label, points) in enumerate([("before scaling", cal.reliability_before), ("after scaling", cal.reliability_after)]):
        _reliability_series(axes, points, label, theme.series[1 - i], _MARKERS[1 - i], _DASHES[1 - i])
    axes.set(xlabel="predicted: the prefix survives", ylabel="observed", xlim=(0, 1), ylim=(0, 1))
    _percent(axes.xaxis)
    _percent(axes.yaxis)
    _legend(axes, columns=3)
    return figure


def _sweep(report: Report, theme: Theme) -> Figure | None:
    rows = report.sweep
    if len(rows) < 2:
        return None
    figure, axes = _canvas("Verifying only confident drafts")
    at = [r.threshold for r in rows]
    for i, (label, values) in enumerate(
        [
            ("acceptance length", [r.acceptance_length for r in rows]),
            ("drafts verified", [r.verified for r in rows]),
            ("drafts wasted", [r.wasted for r in rows]),
        ]
    ):
        axes.plot(at, values, label=label, color=theme.series[i], marker=_MARKERS[i], linestyle=_DASHES[i])
    axes.set(xlabel="threshold on the prefix's survival", ylabel="tokens per round")
    axes.set_ylim(bottom=0)
    _legend(axes, columns=3)
    return figure


def _training(report: Report, theme: Theme) -> Figure | None:
    curves = {n: t.curve for n, t in report.training.items() if t.curve}
    if not curves:
        return None
    figure, axes = _canvas("Validation while training")
    for i, (name, curve) in enumerate(curves.items()):
        axes.plot(
            [p.seconds / 60 for p in curve],
            [p.acceptance_length for p in curve],
            label=name,
            color=theme.series[i % 6],
            marker=_MARKERS[i % 6],
            linestyle=_DASHES[i % 4],
        )
    axes.set(xlabel="minutes of training", ylabel="acceptance length (validation)")
    axes.set_xlim(left=0)
    _legend(axes, columns=2)
    return figure


def _speed_by_length(report: Report, theme: Theme) -> Figure | None:
    drafters = {n: d.speed_by_length for n, d in report.drafters.items() if d.speed_by_length}
    expected = expected_speedups(report.costs, report.positions)
    lengths = {s.draft_length for speeds in drafters.values() for s in speeds} | expected.keys()
    if len(lengths) < 2:
        return None
    figure, axes = _canvas("Speed by draft length")
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
        color, marker = theme.series[i % 6], _MARKERS[i % 6]
        axes.plot([s.draft_length for s in speeds], [s.pooled for s in speeds], label=f"{name}, measured", color=color, marker=marker, linestyle=_DASHES[i % 4])
        for s in speeds:
            if s.interval is not None:
                axes.plot([s.draft_length] * 2, s.interval, color=color, linewidth=1.4, alpha=0.55)
    axes.set_xticks(sorted(lengths))
    axes.set(xlabel="drafted tokens per round", ylabel="speed-up (95% interval)")
    _factor(axes.yaxis)
    _legend(axes, columns=2)
    return figure


def _speed_by_domain(report: Report, theme: Theme) -> Figure | None:
    speeds: dict[str, Speed] = {n: d.speed for n, d in report.domains.items() if d.speed is not None}
    if not speeds:
        return None
    names = sorted(speeds, key=lambda n: speeds[n].pooled)
    figure, axes = _canvas("Speed by domain", rows=len(names))
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
    axes.set_yticks(range(len(names)), [_words(n) for n in names])
    axes.set(xlabel="tokens per second, decoding")
    _grid(axes, "x")
    _legend(axes, columns=2)
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


def _canvas(title: str, *, rows: int | None = None, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure with one pair of axes; `rows` horizontal bars need a height of their own."""
    tall = height if rows is None else max(HEIGHT, 1.35 + 0.36 * rows)
    figure = Figure(figsize=(WIDTH, tall), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.02, ha="left", fontsize=12.5, fontweight="bold")
    _grid(axes, "y")
    return figure, axes


def _style(theme: Theme) -> dict[str, Any]:
    return {
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],  # travels with matplotlib, so plots look the same everywhere
        "font.size": 10.5,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.faint,
        "axes.facecolor": theme.paper,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "xtick.major.size": 0,
        "ytick.major.size": 0,
        "grid.color": theme.faint,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.axisbelow": True,
        "lines.linewidth": 2,
        "lines.markersize": 5.5,
        "legend.frameon": False,
        "legend.fontsize": 9.5,
        "figure.constrained_layout.w_pad": 0.09,
        "figure.constrained_layout.h_pad": 0.07,
        "hatch.color": theme.ink,
        "hatch.linewidth": 0.4,
    }


def _grid(axes: Any, axis: str) -> None:
    axes.grid(visible=False)
    axes.grid(visible=True, axis=axis, linewidth=0.8)


def _legend(axes: Any, *, columns: int) -> None:
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns, handlelength=2.2, columnspacing=1.2)


def _whisker(axes: Any, value: float, y: float, interval: Interval | None, color: str, marker: str) -> None:
    if interval is not None:
        axes.plot(interval, [y, y], color=color, linewidth=2, solid_capstyle="butt", alpha=0.6, zorder=2)
    axes.plot([value], [y], color=color, marker=marker, linestyle="", zorder=3)


def _reliability_series(axes: Any, points: list[ReliabilityPoint], label: str, color: str, marker: str, dash: str) -> None:
    for p in points:
        if p.interval is not None:
            axes.plot([p.predicted] * 2, p.interval, color=color, linewidth=1.2, alpha=0.5, clip_on=False)
    axes.plot([p.predicted for p in points], [p.observed for p in points], label=label, color=color, marker=marker, linestyle=dash, clip_on=False)


def _percent(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _position: f"{100 * value:.0f}%")


def _factor(axis: Any) -> None:
    axis.set_major_formatter(lambda value, _position: f"{value:.2f}".rstrip("0").rstrip(".") + "×")


def _pooled(al: AcceptanceLength | None) -> float:
    return 0.0 if al is None else al.pooled


def _words(name: str) -> str:
    # "$" would start matplotlib's formula mode.
    return name.replace("_", " ").replace("$", r"\$")
