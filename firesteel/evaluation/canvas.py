"""What all plots share: size, colours, grid, legend.

Figures are narrow with large letters, so that they stay readable at the width of a phone. Colours are from the palette of
Okabe and Ito, distinguishable with any colour vision; shapes and line styles tell series apart without colour.
Nothing global is touched: figures are built without pyplot, styles live in a context.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

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
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":")


def canvas(title: str, *, rows: int | None = None, height: float = HEIGHT) -> tuple[Figure, Any]:
    """A figure with one pair of axes; `rows` horizontal bars need a height of their own."""
    tall = height if rows is None else max(HEIGHT, 1.35 + 0.36 * rows)
    figure = Figure(figsize=(WIDTH, tall), layout="constrained")
    axes = figure.subplots()
    figure.suptitle(title, x=0.02, ha="left", fontsize=12.5, fontweight="bold")
    grid(axes, "y")
    return figure, axes


def page_style(theme: Theme) -> dict[str, Any]:
    """Settings of matplotlib for a page of this theme."""
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


def grid(axes: Any, axis: str) -> None:
    """Lines across one axis only: `x`, `y` or `both`."""
    axes.grid(visible=False)
    axes.grid(visible=True, axis=axis, linewidth=0.8)


def legend(axes: Any, *, columns: int) -> None:
    """A legend below the axes, where it hides nothing."""
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower left", ncols=columns, handlelength=2.2, columnspacing=1.2)


def percent(axis: Any) -> None:
    """0.5 as `50%`."""
    axis.set_major_formatter(lambda value, _position: f"{100 * value:.0f}%")


def factor(axis: Any) -> None:
    """1.5 as `1.5×`."""
    axis.set_major_formatter(lambda value, _position: f"{value:.2f}".rstrip("0").rstrip(".") + "×")


def words(name: str) -> str:
    """A name as a plot shows it."""
    # "$" would start matplotlib's formula mode.
    return name.replace("_", " ").replace("$", r"\$")


def png_bytes(figure: Figure, dpi: int) -> bytes:
    """A figure as a PNG. No software or date in the file: equal figures give equal bytes."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, metadata={"Software": None})
    return out.getvalue()
