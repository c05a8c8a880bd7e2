"""A picture of a simulated run: how full the queues are over time, and how long steps are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from firesteel.artifact import write_atomic
from firesteel.evaluation.canvas import DPI, LIGHT, WIDTH, png_bytes

_POINTS = 120  # spans of time that are drawn; a queue's ups and downs within one are its band


def draw_queues(series: Sequence[tuple[float, float, float, float]], waits: Sequence[float], step: float) -> Figure:
    """Two panels.

    Args:
        series: (seconds, least, mean and most units of all queues).
        waits: seconds that each step was waited for.
        step: seconds of a step's own work, drawn as a line to compare with.
    """
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained", facecolor=LIGHT.paper)
    above, below = figure.subplots(2, 1)
    size = max(1, len(series) // _POINTS)
    spans = [series[i : i + size] for i in range(0, len(series), size)]
    times = [span[0][0] / 60 for span in spans]
    least, most = ([pick(row[column] for row in span) for span in spans] for pick, column in ((min, 1), (max, 3)))
    above.fill_between(times, least, most, color=LIGHT.series[1], alpha=0.25, linewidth=0, label="least to most")
    above.plot(times, [sum(row[2] for row in span) / len(span) for span in spans], color=LIGHT.series[1], linewidth=1.4, label="mean")
    above.set(title="Ready units in a queue", xlabel="minutes", ylabel="units")
    above.set_ylim(bottom=0)
    above.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    if waits:
        ordered = sorted(waits)
        shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
        below.step(ordered, shares, where="post", color=LIGHT.series[0], linewidth=1.6, label="steps")
    below.axvline(step, color=LIGHT.ink, linestyle=":", linewidth=1, label="a step's own work")
    below.set(title="Wait for samples before a step", xlabel="seconds", ylabel="share of steps", ylim=(0, 1.02))
    below.set_xlim(left=0)
    below.legend(frameon=False, fontsize=8, loc="lower right")
    for axes in (above, below):
        axes.set_facecolor(LIGHT.paper)
        axes.grid(color=LIGHT.faint, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def write_queue_plot(path: Path, series: Sequence[tuple[float, float, float, float]], waits: Sequence[float], step: float) -> None:
    """Write the picture as PNG; equal runs give equal bytes."""
    write_atomic(path, png_bytes(draw_queues(series, waits, step), DPI))
