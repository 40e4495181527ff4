"""Draw one panel: lines, bars, scatter, band, heat map, histogram, reliability diagram.

A kind of panel is a function of (axes, panel) and a legend entry. The paper's numbers are in the
same panel as the measured ones: hollow marks on pale lines in the colour of their series, or
diamonds on bars. Intervals are thin bars. Only positions are computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from dllm_bench.figures import style
from dllm_bench.figures.points import MEASURED, BuiltFigure
from dllm_bench.figures.spec import Kind, StatedNumber

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from pandas import DataFrame, Series

BAR_ROOM = 0.84  # share of a category's width that its bars take
BAND_ALPHA = 0.18
BARS = "_intervals"  # label of bars over intervals, which no legend shows
DODGE, MOST_DODGE = 2.4, 7.0  # distance of bars that would hide each other, in points; of them all
MANY_POINTS = 24  # markers on more points than this would hide the line
STAR_SIZE = 7.5  # a star looks smaller than other markers of its size
MARKERS = 8  # number of markers drawn instead
DOT_COLOUR = "#e8452c"  # colour of points on a heat map
FRONT_LINE, REPORTED_BAR, NOTE = (style.MARKS[name] for name in ("front", "reported_bar", "note"))

STATED_LINE: Mapping[str, Any] = {"color": style.INK, "linewidth": 0.8, "linestyle": (0, (5, 2))}
COUNT_ROW = 0.12  # height of a row of counts on an axis from 0 to 1
COUNT_APART = 0.055  # least distance of two counts, of an axis from 0 to 1
NUMBER_SIDES = (0.8, 0.6), (-0.8, 0.6), (0.8, -0.6), (-0.8, -0.6), (0, 1), (0, -1), (1, 0), (-1, 0)
NUMBER_PLACES = [(round(far * x), round(far * y)) for far in (7, 11, 15) for x, y in NUMBER_SIDES]
"""Where the number of a point may stand, in points of type from it, the best place first."""


@dataclass(frozen=True)
class Panel:
    """One panel of a drawing."""

    built: BuiltFigure
    """The figure."""
    quantity: str
    """Name of the quantity on its y axis."""
    names: tuple[str, ...]
    """Names of the panel; several if panels with the same points are merged."""
    points: DataFrame
    """Its points, measured and reported, also those without a number."""
    same_runs: str = ""
    """Name of an earlier panel with the same measured points, but other reported ones."""

    @cached_property
    def placed(self) -> DataFrame:
        """The points that have a number, with their place on the x axis."""
        return self.built.placed[self.built.placed.index.isin(self.points.index)]

    @property
    def measured(self) -> DataFrame:
        """The measured points that have a number."""
        return self.placed[self.placed.kind == MEASURED]

    @property
    def log_y(self) -> bool:
        """Whether the y axis is logarithmic."""
        return self.quantity in self.built.figure.draw.log_y

    def by_series(self, measured: bool) -> Iterator[tuple[style.Look, DataFrame]]:
        """Yield look and points of each series, measured or reported, the points from left to
        right. Equal points (two lengths of the paper may be one of ours) are drawn once.
        """
        points = self.placed[self.placed.kind.eq(MEASURED) == measured]
        points = points[~points.drop(columns="at").duplicated()]
        for name in self.built.series:
            if (own := points[points.series == name]).size:
                yield style.look(name), own.sort_values("place", kind="stable")

    def curves(self) -> Iterator[tuple[style.Look, DataFrame, bool]]:
        """Yield the points of each line, and whether they are the paper's. A line joins points of a
        series that are all measured or all the paper's, and whose runs only differ in the setting
        on the axis.
        """
        for measured in (True, False):
            for look, points in self.by_series(measured):
                for _, curve in points.groupby("switched", sort=False):
                    yield look, curve, not measured


def line_settings(look: style.Look, reported: bool = False) -> dict[str, Any]:
    """Return a series' line and marker as arguments of `Axes.plot`."""
    return {
        "color": look.colour,
        "marker": look.marker,
        "markersize": STAR_SIZE if look.marker == "*" else style.SETTINGS["lines.markersize"],
        "linestyle": look.line,
        "alpha": 0.75 if reported else 1.0,
        "markerfacecolor": "white" if reported else look.colour,
        "markeredgewidth": 0.8,
        "linewidth": 1.0 if reported else 1.4,
    }


def draw_intervals(ax: Axes, xs: Series, points: DataFrame, colour: str) -> None:
    """Draw thin bars over the intervals of the points that have one."""
    known = points.low.notna()
    if known.any():
        ends = points.low[known], points.high[known]
        ax.vlines(xs[known], *ends, color=colour, linewidth=0.7, label=BARS)


def separate_intervals(ax: Axes) -> None:
    """Move interval bars apart if one would hide another. The axes must have their final position;
    points are not moved.
    """
    import numpy as np
    from matplotlib.collections import LineCollection
    from matplotlib.transforms import Affine2D

    point = ax.figure.dpi / 72
    drawn = [c for c in ax.collections if isinstance(c, LineCollection) if c.get_label() == BARS]
    moved = [np.zeros((len(bars.get_segments()), 2)) for bars in drawn]
    groups: list[list[tuple[float, int, int, float, float]]] = []
    for series, bars in enumerate(drawn):
        for index, segment in enumerate(bars.get_segments()):
            (x, low), (_, high) = ax.transData.transform(segment) / point
            near = (g for g in groups if any(_hides((x, low, high), other) for other in g))
            group = next(near, None)
            if group is None:
                groups.append(group := [])
            group.append((round(x, 1), series, index, low, high))
    for group in groups:
        step = min(DODGE, MOST_DODGE / max(len(group) - 1, 1))
        for place, (_, series, index, *_) in enumerate(sorted(group)):
            moved[series][index, 0] = step * (place - (len(group) - 1) / 2)
    for bars, offsets in zip(drawn, moved, strict=True):
        bars.set_offsets(offsets)
        bars.set_offset_transform(Affine2D().scale(1 / 72) + ax.figure.dpi_scale_trans)


def _hides(bar: tuple[float, float, float], other: tuple[float, int, int, float, float]) -> bool:
    (x, low, high), (place, _, _, other_low, other_high) = bar, other
    return abs(x - place) < DODGE / 2 and low <= other_high and other_low <= high


def lines(ax: Axes, panel: Panel) -> None:
    """Draw one line per series."""
    for look, points, reported in panel.curves():
        every = max(1, len(points) // MARKERS) if len(points) > MANY_POINTS else 1
        ax.plot(points.place, points.y, markevery=every, **line_settings(look, reported))
        draw_intervals(ax, points.place, points, look.colour)


def pareto_front(ax: Axes, panel: Panel) -> None:
    """Draw pale discs below the points on the Pareto front, and a pale line through them."""
    best = panel.placed[panel.placed.front.astype(bool)][["place", "y"]].drop_duplicates()
    best = best.sort_values(["place", "y"])
    ax.plot(best.place, best.y, **FRONT_LINE)


def band(ax: Axes, panel: Panel) -> None:
    """Draw a line per series, in a band from its low to its high ends."""
    for look, points, reported in panel.curves():
        every = max(1, len(points) // MARKERS)
        ax.plot(points.place, points.y, markevery=every, **line_settings(look, reported))
        if points.low.notna().all() and points.high.notna().all():
            ends = points.low, points.high
            ax.fill_between(points.place, *ends, color=look.colour, alpha=BAND_ALPHA, linewidth=0)


def scatter(ax: Axes, panel: Panel) -> None:
    """Draw a marker per point with the number of its series: two metrics against each other."""
    for look, points, reported in panel.curves():
        marks = {**line_settings(look, reported), "linestyle": "none"}
        ax.plot(points.place, points.y, **marks)
        draw_intervals(ax, points.place, points, look.colour)
        for p in points.itertuples():
            number, place = str(panel.built.series[p.series]), NUMBER_PLACES[0]
            text = ax.annotate(number, (p.place, p.y), xytext=place, textcoords="offset points")
            text.set(fontsize=7, color=look.colour, ha="center", va="center")


def separate_numbers(ax: Axes) -> None:
    """Move the numbers of a scatter so that they overlap neither each other nor a point, as far as
    there is room. The axes must have their final position.
    """
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    numbers = [text for text in ax.texts if isinstance(text, Annotation)]
    half = style.SETTINGS["lines.markersize"] / 2 * ax.figure.dpi / 72
    places = [ax.transData.transform(text.xy) for text in numbers]
    taken = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in places]
    for text in numbers:
        boxes = []
        for place in NUMBER_PLACES:
            text.set_position(place)
            boxes.append(text.get_window_extent())
        covered = [sum(map(box.fully_overlaps, taken)) for box in boxes]
        index = covered.index(min(covered))
        taken.append(boxes[index])
        text.set_position(NUMBER_PLACES[index])


def bars(ax: Axes, panel: Panel) -> None:
    """Draw groups of bars, one group per category, with a diamond at the end of the paper's bar. At
    numbers, bars are adjacent, as wide as the distance of these numbers. On a logarithmic axis,
    where the length of a bar is meaningless, draw markers.
    """
    points, room, filled = panel.placed, BAR_ROOM, 0.92
    if not panel.built.categories:
        places = sorted(set(points.place))
        room, filled = 0.9 * min((b - a for a, b in pairwise(places)), default=1.0), 1.0
    shown = [name for name in panel.built.series if name in set(points.series)]
    width = room / max(len(shown), 1)
    for index, name in enumerate(shown):
        shift, look = (index + 0.5) * width - room / 2, style.look(name)
        measured = points[(points.series == name) & (points.kind == MEASURED)]
        reported = points[(points.series == name) & (points.kind != MEASURED)]
        if panel.log_y:
            marks = {**line_settings(look), "linestyle": "none"}
            ax.plot(measured.place + shift, measured.y, **marks)
        else:
            ax.bar(measured.place + shift, measured.y, width * filled, **bar_settings(look))
        draw_intervals(ax, measured.place + shift, measured, style.INK)
        ax.plot(reported.place + shift, reported.y, **REPORTED_BAR)
    ax.grid(axis="x", visible=False)


def heat(ax: Axes, panel: Panel) -> None:
    """Draw a colour at (x, y) for z; points without z are dots on it."""
    grid = panel.placed[panel.placed.z.notna()].pivot_table("z", "y", "place", aggfunc="last")
    for axis, places in enumerate(grid.axes):
        if len(places) == 1:  # it gets neighbours, because its cells would have no size
            grid = grid.reindex([places[0] + step for step in (-1, 0, 1)], axis=axis)
    values = panel.built.placed.z  # of all panels, so that a colour means the same in each
    colours: dict[str, Any] = {"cmap": "viridis", "shading": "nearest", "rasterized": True}
    colours |= {"vmin": values.min(), "vmax": values.max()}
    mesh = ax.pcolormesh(grid.columns, grid.index, grid, **colours)
    ax.figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30, label=panel.built.figure.draw.z)
    dots = panel.placed[panel.placed.z.isna()]
    ax.plot(dots.place, dots.y, "o", color=DOT_COLOUR, markersize=1.6)
    ax.grid(visible=False)


def reliability(ax: Axes, panel: Panel) -> None:
    """Draw observed against predicted shares, with the diagonal of a calibrated head; below, the
    number of outcomes in each bin, a row per series.
    """
    ax.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.7, linestyle=":")
    lines(ax, panel)
    rows = list(panel.by_series(measured=True))
    for row, (look, points) in enumerate(rows, start=1):
        places = accumulate(points.place, lambda last, place: max(place, last + COUNT_APART))
        for place, n in zip(places, points.n, strict=True):
            count = ax.text(place, -COUNT_ROW * row, str(n))
            count.set(
                fontsize=5, color=look.colour, ha="center", va="center", rotation=90, clip_on=True
            )
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-COUNT_ROW * (len(rows) + 0.6), 1.02)
    ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.set_aspect("equal")


def draw_switches(ax: Axes, panel: Panel) -> None:
    """Write below the axis which points of curves that mix settings have other settings than the
    paper's."""
    mixed = (p for _, p in panel.by_series(measured=True) if p.switched.nunique() > 1)
    marked = (p for points in mixed for p in points[points.switched != ""].itertuples())
    switches = {p.place: p.switched for p in marked if not isinstance(p.x, str)}
    if switches:
        places = sorted(set(panel.placed.place))
        words = {x: [s.rpartition(".")[2] for s in text.split()] for x, text in switches.items()}
        short = ["\n".join(words.get(place, ())).replace("=", " ") for place in places]
        labels = [f"{x:g}\n{text}".strip() for x, text in zip(places, short, strict=True)]
        ax.set_xticks(places, labels)


def draw_stated(ax: Axes, panel: Panel) -> None:
    """Draw dashed lines, or grey ranges, at the places stated in the paper's text, with the number.
    Numbers beyond an axis, whose range is not changed, are written above the panel with an arrow.
    """
    beyond = []
    stated = (n for n in panel.built.figure.stated if n.axis and n.panel in ("", *panel.names))
    for number in (n for n in stated if n.quantity in ("", panel.quantity)):
        low, high = sorted(ax.get_xlim() if number.axis == "x" else ax.get_ylim())
        if low <= number.high and number.low <= high:
            _draw_place(ax, number)
        else:
            arrow = "←↓→↑"[2 * (number.low > high) + (number.axis == "y")]
            beyond.append(f"{number.value} {arrow}")
    if beyond:
        ax.set_title(ax.get_title(), pad=14, color=style.INK)
        text = ax.text(1, 1.02, "   ".join(beyond), transform=ax.transAxes, **NOTE)
        text.set(ha="right", va="bottom")


def _draw_place(ax: Axes, number: StatedNumber) -> None:
    upright = number.axis == "x"
    limits = ax.get_xlim(), ax.get_ylim()
    if number.low == number.high:
        (ax.axvline if upright else ax.axhline)(number.low, **STATED_LINE)
    else:
        span = ax.axvspan if upright else ax.axhspan
        span(number.low, number.high, color=style.FAINT, alpha=0.18, linewidth=0)
    ax.set(xlim=limits[0], ylim=limits[1])
    if upright:
        text = ax.text(number.low, 0.98, number.value, transform=ax.get_xaxis_transform(), **NOTE)
        text.set(rotation=90, ha="right", va="top")
    else:
        text = ax.text(0.99, number.high, number.value, transform=ax.get_yaxis_transform(), **NOTE)
        text.set(ha="right", va="bottom")


def bar_settings(look: style.Look) -> dict[str, Any]:
    """Return the fill of a bar for `Axes.bar`, hatched, so that series differ in a grey print."""
    return {"facecolor": look.colour, "edgecolor": "white", "hatch": look.hatch, "linewidth": 0.6}


def line_entry(label: str, settings: Mapping[str, Any]) -> Artist:
    """Make a legend entry: a piece of a line, with arguments of `Axes.plot`."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **settings)


@dataclass(frozen=True)
class PanelKind:
    """A kind of panel."""

    fill: Callable[[Axes, Panel], None]
    """Draws the panel."""
    wide: float = 1.0
    """Width of the panel, in units of `style.PANEL_INCHES`."""
    per_category: float = 0.0
    """Least width for each category, in the same units."""
    numbered: bool = False
    """True if the legend numbers the series."""
    one_range: bool = True
    """True if panels of one quantity have one y range."""

    def entry(self, look: style.Look, label: str, reported: bool) -> Artist:
        """Make the legend entry of a series: a piece of its bar or line, or the marker alone.

        reported: whether the paper's numbers are all that it has; on bars these are diamonds, which
        have an entry of their own.
        """
        from matplotlib.patches import Patch

        if self.fill is bars:
            return Patch(label=label, **bar_settings(look))
        shown = replace(look, line="none") if self.numbered else look
        return line_entry(label, line_settings(shown, reported))


PANEL_KINDS: Mapping[Kind, PanelKind] = {
    "lines": PanelKind(lines),
    "band": PanelKind(band, wide=1.15),
    "scatter": PanelKind(scatter, wide=2, numbered=True),
    "bars": PanelKind(bars, wide=1.3, per_category=0.26),
    "histogram": PanelKind(bars, wide=1.2),
    "heat": PanelKind(heat, wide=1.25, one_range=False),
    "reliability": PanelKind(reliability),
}
