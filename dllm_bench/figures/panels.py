"""How one panel is drawn: lines, bars, scatter, band, heat map, histogram, reliability diagram.

A kind of panel is a function of (axes, panel) and what its legend shows. Reported numbers are pale
or hollow, in the colour of their series. Intervals are thin bars. Only places are computed here.
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

BAR_ROOM = 0.84  # share of a category's width that its bars take
BAND_ALPHA = 0.18
MANY_POINTS = 24  # markers on more points than this would hide the line
MARKERS = 8  # number of markers drawn instead
DOT_COLOUR = "#e8452c"  # of points on a heat map
FRONT_LINE: Mapping[str, Any] = {
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
    """What one panel shows."""

    points: Sequence[FigurePoint]
    """Its points; all of them have a number."""
    series: Mapping[str, int]
    """Name of a series -> its number, from 1."""
    order: Mapping[str, int]
    """Category -> its place on the x axis."""
    reported: bool
    """True for numbers of the paper, which are drawn pale."""
    z: str = ""
    """What the colours of a heat map mean."""

    def place(self, point: FigurePoint) -> float:
        """Where a point stands on the x axis."""
        return self.order[point.x] if isinstance(point.x, str) else float(point.x or 0)

    def heights(self, points: Sequence[FigurePoint]) -> list[float]:
        """Where points stand on the y axis."""
        return [float(point.y or 0) for point in points]

    def by_series(self) -> Iterator[tuple[style.Look, list[FigurePoint]]]:
        """Look and points of each series, the points from left to right."""
        for name in self.series:
            points = [point for point in self.points if point.series == name]
            if points:
                yield style.look(name), sorted(points, key=self.place)


def line_settings(look: style.Look, reported: bool = False) -> dict[str, Any]:
    """Line and marker of a series, for `Axes.plot`."""
    return {
        "color": look.colour,
        "marker": look.marker,
        "linestyle": look.line,
        "alpha": 0.75 if reported else 1.0,
        "markerfacecolor": "white" if reported else look.colour,
        "markeredgewidth": 0.8,
        "linewidth": 1.0 if reported else 1.4,
    }


def draw_intervals(
    ax: Axes, xs: Sequence[float], points: Sequence[FigurePoint], colour: str
) -> None:
    """Thin bars over the intervals of the points that have one."""
    known = [(x, p.low, p.high) for x, p in zip(xs, points, strict=True) if p.low is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        ax.vlines(x, low, high, color=colour, linewidth=0.7)


def lines(ax: Axes, panel: Panel) -> None:
    """One line per series."""
    for look, points in panel.by_series():
        xs = [panel.place(point) for point in points]
        every = max(1, len(points) // MARKERS) if len(points) > MANY_POINTS else 1
        ax.plot(xs, panel.heights(points), markevery=every, **line_settings(look, panel.reported))
        draw_intervals(ax, xs, points, look.colour)


def pareto_front(ax: Axes, panel: Panel) -> None:
    """Pale discs below the points on the Pareto front, and a pale line through them."""
    best = [point for point in panel.points if point.front]
    places = sorted({*zip(map(panel.place, best), panel.heights(best), strict=True)})
    ax.plot([x for x, _ in places], [y for _, y in places], **FRONT_LINE)


def band(ax: Axes, panel: Panel) -> None:
    """A line per series, in a band from its low to its high ends."""
    for look, points in panel.by_series():
        xs = [panel.place(point) for point in points]
        every = max(1, len(points) // MARKERS)
        ax.plot(xs, panel.heights(points), markevery=every, **line_settings(look, panel.reported))
        ends = [(p.low, p.high) for p in points if p.low is not None and p.high is not None]
        if len(ends) == len(points):
            low, high = zip(*ends, strict=True)
            ax.fill_between(xs, low, high, color=look.colour, alpha=BAND_ALPHA, linewidth=0)


def scatter(ax: Axes, panel: Panel) -> None:
    """A marker per point with the number of its series: two metrics against each other."""
    for look, points in panel.by_series():
        xs, ys = [panel.place(point) for point in points], panel.heights(points)
        ax.plot(xs, ys, **{**line_settings(look, panel.reported), "linestyle": "none"})
        draw_intervals(ax, xs, points, look.colour)
        for x, y, point in zip(xs, ys, points, strict=True):
            number = str(panel.series[point.series])
            text = ax.annotate(number, (x, y), xytext=(4, 3), textcoords="offset points")
            text.set(fontsize=7, color=look.colour)


def bars(ax: Axes, panel: Panel) -> None:
    """Groups of bars, one group per category."""
    shown = list(panel.by_series())
    width = BAR_ROOM / max(len(shown), 1)
    for index, (look, points) in enumerate(shown):
        shift = (index + 0.5) * width - BAR_ROOM / 2
        xs = [panel.place(point) + shift for point in points]
        ax.bar(xs, panel.heights(points), width * 0.92, **bar_settings(look, panel.reported))
        draw_intervals(ax, xs, points, style.INK)
    ax.grid(axis="x", visible=False)


def histogram(ax: Axes, panel: Panel) -> None:
    """Adjacent bars at numbers on the x axis, as wide as these numbers are apart."""
    places = sorted({panel.place(point) for point in panel.points})
    distance = min((b - a for a, b in pairwise(places)), default=1.0)
    shown = list(panel.by_series())
    width = 0.9 * distance / max(len(shown), 1)
    for index, (look, points) in enumerate(shown):
        shift = (index + 0.5) * width - 0.45 * distance
        xs = [panel.place(point) + shift for point in points]
        ax.bar(xs, panel.heights(points), width, **bar_settings(look, panel.reported))
    ax.grid(axis="x", visible=False)


def heat(ax: Axes, panel: Panel) -> None:
    """A colour at (x, y) for z; points without z are dots on it."""
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
    ax.plot(
        [panel.place(p) for p in dots], panel.heights(dots), "o", color=DOT_COLOUR, markersize=1.6
    )
    ax.grid(visible=False)


def reliability(ax: Axes, panel: Panel) -> None:
    """Observed against predicted shares, with the diagonal of a calibrated head."""
    ax.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.7, linestyle=":")
    lines(ax, panel)
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-0.02, 1.02)
    ax.set_aspect("equal")


def bar_settings(look: style.Look, reported: bool = False) -> dict[str, Any]:
    """Fill of a bar, for `Axes.bar`; hatched, so that series differ in a grey print."""
    face = "white" if reported else look.colour
    edge = look.colour if reported else "white"
    return {"facecolor": face, "edgecolor": edge, "hatch": look.hatch, "linewidth": 0.6}


def line_swatch(look: style.Look, label: str) -> Artist:
    """Legend entry: a piece of the line with its marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **line_settings(look))


def mark_swatch(look: style.Look, label: str) -> Artist:
    """Legend entry: the marker alone."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **{**line_settings(look), "linestyle": "none"})


def front_swatch() -> Artist:
    """Legend entry: a piece of the Pareto front."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label="Pareto front", **FRONT_LINE)


def box_swatch(look: style.Look, label: str) -> Artist:
    """Legend entry: a piece of the bar."""
    from matplotlib.patches import Patch

    return Patch(label=label, **bar_settings(look))


@dataclass(frozen=True)
class PanelKind:
    """A kind of panel."""

    fill: Callable[[Axes, Panel], None]
    """Draws the panel."""
    swatch: Callable[[style.Look, str], Artist] = line_swatch
    """Makes the legend entry of a series, from its look and label."""
    wide: float = 1.0
    """Width of the panel, in units of `style.PANEL_INCHES`."""
    per_category: float = 0.0
    """Least width for each category, in the same units."""
    numbered: bool = False
    """True if the legend numbers the series."""

    def width(self, categories: int) -> float:
        """Width of a panel with `categories` categories, in units of `style.PANEL_INCHES`."""
        return max(self.wide, self.per_category * categories)


PANEL_KINDS: Mapping[str, PanelKind] = {
    "lines": PanelKind(lines),
    "band": PanelKind(band, wide=1.15),
    "scatter": PanelKind(scatter, mark_swatch, wide=1.3, numbered=True),
    "bars": PanelKind(bars, box_swatch, wide=1.3, per_category=0.26),
    "histogram": PanelKind(histogram, box_swatch, wide=1.2),
    "heat": PanelKind(heat, wide=1.25),
    "reliability": PanelKind(reliability, wide=0.8),
}
