"""How one panel is filled: lines, bars, scatter, band, heat map, histogram, reliability diagram.

A kind is a function (axes, panel) and what its legend shows; whether a series is muted (reported)
changes its fill, never its colour. Intervals are thin bars. Nothing is computed here but places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dllm_bench.figures import style
from dllm_bench.figures.points import FigurePoint

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

BAR_ROOM = 0.84  # of a category's width
SHADE = 0.18
DOT = "#e8452c"  # upon a heat map
FRONT: Mapping[str, Any] = {
    "color": style.FAINT,
    "linewidth": 7.0,
    "alpha": 0.35,
    "solid_capstyle": "round",
    "marker": "o",
    "markersize": 11.0,
    "markeredgewidth": 0.0,
    "zorder": 1.5,
}


@dataclass(frozen=True)
class Panel:
    """Points of one panel. series: name -> number, from 1; order: category -> place; muted: the
    paper's; z: what the colours of a heat map mean.
    """

    points: Sequence[FigurePoint]
    series: Mapping[str, int]
    order: Mapping[str, int]
    muted: bool
    z: str = ""

    def place(self, point: FigurePoint) -> float:
        """Where a point stands on the x axis."""
        return self.order[point.x] if isinstance(point.x, str) else float(point.x or 0)

    def heights(self, points: Sequence[FigurePoint]) -> list[float]:
        """Where points stand on the y axis; all of a panel have a number."""
        return [float(point.y or 0) for point in points]

    def each(self) -> Iterator[tuple[style.Look, list[FigurePoint]]]:
        """Looks and points, series by series, from left to right."""
        for name in self.series:
            mine = [point for point in self.points if point.series == name]
            if mine:
                yield style.look(name), sorted(mine, key=self.place)


def marked(look: style.Look, muted: bool) -> dict[str, Any]:
    """Line and marker of a series."""
    return {
        "color": look.colour,
        "marker": look.marker,
        "linestyle": look.line,
        "alpha": 0.75 if muted else 1.0,
        "markerfacecolor": "white" if muted else look.colour,
        "markeredgewidth": 0.8,
        "linewidth": 1.0 if muted else 1.4,
    }


def whiskers(ax: Axes, xs: Sequence[float], points: Sequence[FigurePoint], colour: str) -> None:
    """Thin bars over the intervals that are known."""
    known = [(x, p.low, p.high) for x, p in zip(xs, points, strict=True) if p.low is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        ax.vlines(x, low, high, color=colour, linewidth=0.7)


def lines(ax: Axes, panel: Panel) -> None:
    """One line per series."""
    for look, points in panel.each():
        xs = [panel.place(point) for point in points]
        many = len(points) > 24  # markers would hide the line
        every = max(1, len(points) // 8) if many else 1
        ax.plot(xs, panel.heights(points), markevery=every, **marked(look, panel.muted))
        whiskers(ax, xs, points, look.colour)


def front(ax: Axes, panel: Panel) -> None:
    """Pale discs below the points that nothing beats, and a pale line through them."""
    best = [point for point in panel.points if point.front]
    places = sorted({*zip(map(panel.place, best), panel.heights(best), strict=True)})
    ax.plot([x for x, _ in places], [y for _, y in places], **FRONT)


def band(ax: Axes, panel: Panel) -> None:
    """A line per series in the band of its low and high."""
    for look, points in panel.each():
        xs = [panel.place(point) for point in points]
        every = max(1, len(points) // 8)
        ax.plot(xs, panel.heights(points), markevery=every, **marked(look, panel.muted))
        ends = [(p.low, p.high) for p in points if p.low is not None and p.high is not None]
        if len(ends) == len(points):
            low, high = zip(*ends, strict=True)
            ax.fill_between(xs, low, high, color=look.colour, alpha=SHADE, linewidth=0)


def scatter(ax: Axes, panel: Panel) -> None:
    """Marks with the numbers of their series: a trade-off of two metrics."""
    for look, points in panel.each():
        xs, ys = [panel.place(point) for point in points], panel.heights(points)
        ax.plot(xs, ys, **{**marked(look, panel.muted), "linestyle": "none"})
        whiskers(ax, xs, points, look.colour)
        for x, y, point in zip(xs, ys, points, strict=True):
            number = str(panel.series[point.series])
            said = ax.annotate(number, (x, y), xytext=(4, 3), textcoords="offset points")
            said.set(fontsize=7, color=look.colour)


def bars(ax: Axes, panel: Panel) -> None:
    """Groups of bars, one group per category."""
    shown = list(panel.each())
    width = BAR_ROOM / max(len(shown), 1)
    for index, (look, points) in enumerate(shown):
        shift = (index + 0.5) * width - BAR_ROOM / 2
        xs = [panel.place(point) + shift for point in points]
        ax.bar(xs, panel.heights(points), width * 0.92, **filled(look, panel.muted))
        whiskers(ax, xs, points, style.INK)
    ax.grid(axis="x", visible=False)


def histogram(ax: Axes, panel: Panel) -> None:
    """Bars side by side at numeric places, as wide as the places are apart."""
    places = sorted({panel.place(point) for point in panel.points})
    apart = min((b - a for a, b in pairwise(places)), default=1.0)
    shown = list(panel.each())
    width = 0.9 * apart / max(len(shown), 1)
    for index, (look, points) in enumerate(shown):
        shift = (index + 0.5) * width - 0.45 * apart
        xs = [panel.place(point) + shift for point in points]
        ax.bar(xs, panel.heights(points), width, **filled(look, panel.muted))
    ax.grid(axis="x", visible=False)


def heat(ax: Axes, panel: Panel) -> None:
    """Colour at (x, y); points without a value are dots upon it."""
    import numpy as np

    cells = [p for p in panel.points if p.z is not None]
    xs = sorted({panel.place(p) for p in cells})
    ys = sorted({float(p.y or 0) for p in cells})
    grid = np.full((len(ys), len(xs)), np.nan)
    columns, rows = ({v: i for i, v in enumerate(values)} for values in (xs, ys))
    for p in cells:
        grid[rows[float(p.y or 0)], columns[panel.place(p)]] = p.z
    drawn = ax.pcolormesh(xs, ys, grid, cmap="viridis", shading="nearest", rasterized=True)
    assert ax.figure
    ax.figure.colorbar(drawn, ax=ax, pad=0.02, aspect=30, label=panel.z)
    dots = [p for p in panel.points if p.z is None]
    ax.plot([panel.place(p) for p in dots], panel.heights(dots), "o", color=DOT, markersize=1.6)
    ax.grid(visible=False)


def reliability(ax: Axes, panel: Panel) -> None:
    """Predicted against happened, with the diagonal of a calibrated head."""
    ax.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.7, linestyle=":")
    lines(ax, panel)
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-0.02, 1.02)
    ax.set_aspect("equal")


def filled(look: style.Look, muted: bool) -> dict[str, Any]:
    """Fill of a bar; hatched, so that it is told apart in grey."""
    face = "white" if muted else look.colour
    edge = look.colour if muted else "white"
    return {"facecolor": face, "edgecolor": edge, "hatch": look.hatch, "linewidth": 0.6}


def line_swatch(look: style.Look, label: str) -> Artist:
    """A piece of the line with its marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **marked(look, muted=False))


def mark_swatch(look: style.Look, label: str) -> Artist:
    """The marker alone."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{**marked(look, muted=False), "linestyle": "none"})


def front_swatch() -> Artist:
    """A piece of the line through the points that nothing beats."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label="Pareto front", **FRONT)


def box_swatch(look: style.Look, label: str) -> Artist:
    """A piece of the bar."""
    from matplotlib.patches import Patch

    return Patch(label=label, **filled(look, muted=False))


@dataclass(frozen=True)
class PanelKind:
    """How panels of a kind are filled, what stands in the legend, how wide a panel is.

    wide: of the usual width; per_category: at least so much for each category; numbered: whether
    the legend numbers the series.
    """

    fill: Callable[[Axes, Panel], None]
    swatch: Callable[[style.Look, str], Artist] = line_swatch
    wide: float = 1.0
    per_category: float = 0.0
    numbered: bool = False

    def width(self, categories: int) -> float:
        """Width of a panel, of the usual one."""
        return max(self.wide, self.per_category * categories)


KINDS: Mapping[str, PanelKind] = {
    "lines": PanelKind(lines),
    "band": PanelKind(band, wide=1.15),
    "scatter": PanelKind(scatter, mark_swatch, wide=1.3, numbered=True),
    "bars": PanelKind(bars, box_swatch, wide=1.3, per_category=0.26),
    "histogram": PanelKind(histogram, box_swatch, wide=1.2),
    "heat": PanelKind(heat, wide=1.25),
    "reliability": PanelKind(reliability, wide=0.8),
}
