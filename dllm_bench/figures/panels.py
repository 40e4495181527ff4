"""How one panel is drawn: lines, bars, scatter, band, heat map, histogram, reliability diagram.

A kind of panel is a function of (axes, panel) and what its legend shows. The paper's numbers are in
the same panel as the measured ones: hollow, on pale lines, in the colour of their series; on bars,
diamonds. Intervals are thin bars. Only places are computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from dllm_bench.figures import style
from dllm_bench.figures.points import FigurePoint
from dllm_bench.figures.spec import StatedNumber

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

BAR_ROOM = 0.84  # share of a category's width that its bars take
BAND_ALPHA = 0.18
BARS = "_intervals"  # label of bars over intervals, which no legend shows
DODGE, MOST_DODGE = 2.4, 7.0  # distance of bars that would hide each other, in points; of them all
MANY_POINTS = 24  # markers on more points than this would hide the line
STAR_SIZE = 7.5  # a star looks smaller than other markers of its size
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

REPORTED_BAR: Mapping[str, Any] = {
    "color": style.INK,
    "linestyle": "none",
    "marker": "D",
    "markersize": 4.5,
    "markerfacecolor": "white",
    "markeredgewidth": 0.9,
    "zorder": 3,
}
STATED_LINE: Mapping[str, Any] = {"color": style.INK, "linewidth": 0.8, "linestyle": (0, (5, 2))}
NOTE: Mapping[str, Any] = {
    "fontsize": 6,
    "color": style.INK,
    "bbox": {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.6},
}
COUNT_ROW = 0.12  # height of a row of counts on an axis from 0 to 1
COUNT_APART = 0.055  # least distance of two counts, of an axis from 0 to 1
NUMBER_SIDES = (0.8, 0.6), (-0.8, 0.6), (0.8, -0.6), (-0.8, -0.6), (0, 1), (0, -1), (1, 0), (-1, 0)
NUMBER_PLACES = [(round(far * x), round(far * y)) for far in (7, 11, 15) for x, y in NUMBER_SIDES]
"""Where the number of a point may stand, in points of type from it, the best place first."""


@dataclass(frozen=True)
class Panel:
    """What one panel shows."""

    points: Sequence[FigurePoint]
    """Its points, measured and reported; all of them have a number."""
    series: Mapping[str, int]
    """Name of a series -> its number, from 1."""
    order: Mapping[str, int]
    """Category -> its place on the x axis."""
    z: str = ""
    """What the colours of a heat map mean."""
    log_y: bool = False
    """True if the y axis is logarithmic."""

    def place(self, point: FigurePoint) -> float:
        """Where a point stands on the x axis."""
        return self.order[point.x] if isinstance(point.x, str) else float(point.x or 0)

    def heights(self, points: Sequence[FigurePoint]) -> list[float]:
        """Where points stand on the y axis."""
        return [float(point.y or 0) for point in points]

    def by_series(self, measured: bool) -> Iterator[tuple[style.Look, list[FigurePoint]]]:
        """Look and points of each series, measured or reported, the points from left to right."""
        for name in self.series:
            points = [p for p in self.points if p.series == name and p.measured == measured]
            if points:
                yield style.look(name), sorted(points, key=self.place)

    def curves(self) -> Iterator[tuple[style.Look, list[FigurePoint]]]:
        """What one line goes through: the points of a series that are all measured or all the
        paper's, and whose runs have the same settings but for what the axis says.
        """
        for measured in (True, False):
            for look, points in self.by_series(measured):
                for switched in dict.fromkeys(point.switched for point in points):
                    yield look, [point for point in points if point.switched == switched]

    def switches(self) -> dict[float, str]:
        """Place on the x axis -> settings in place of those asked, of curves that mix settings."""
        mixed = [
            points
            for _, points in self.by_series(measured=True)
            if len({point.switched for point in points}) > 1
        ]
        marked = (p for points in mixed for p in points if p.switched)
        return {self.place(p): p.switched for p in marked if not isinstance(p.x, str)}


def line_settings(look: style.Look, reported: bool = False) -> dict[str, Any]:
    """Line and marker of a series, for `Axes.plot`."""
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


def draw_intervals(
    ax: Axes, xs: Sequence[float], points: Sequence[FigurePoint], colour: str
) -> None:
    """Thin bars over the intervals of the points that have one."""
    known = [(x, p.low, p.high) for x, p in zip(xs, points, strict=True) if p.low is not None]
    if known:
        x, low, high = zip(*known, strict=True)
        ax.vlines(x, low, high, color=colour, linewidth=0.7, label=BARS)


def separate_intervals(ax: Axes) -> None:
    """Move bars over intervals apart where one would hide another; the axes have their final place,
    and the points keep theirs.
    """
    import numpy as np
    from matplotlib.collections import LineCollection
    from matplotlib.transforms import Affine2D

    figure = ax.get_figure(root=True)
    assert figure
    point = figure.dpi / 72
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
        bars.set_offset_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)


def _hides(bar: tuple[float, float, float], other: tuple[float, int, int, float, float]) -> bool:
    (x, low, high), (place, _, _, other_low, other_high) = bar, other
    return abs(x - place) < DODGE / 2 and low <= other_high and other_low <= high


def lines(ax: Axes, panel: Panel) -> None:
    """One line per series."""
    for look, points in panel.curves():
        xs = [panel.place(point) for point in points]
        every = max(1, len(points) // MARKERS) if len(points) > MANY_POINTS else 1
        reported = not points[0].measured
        ax.plot(xs, panel.heights(points), markevery=every, **line_settings(look, reported))
        draw_intervals(ax, xs, points, look.colour)


def pareto_front(ax: Axes, panel: Panel) -> None:
    """Pale discs below the points on the Pareto front, and a pale line through them."""
    best = [point for point in panel.points if point.front]
    places = sorted({*zip(map(panel.place, best), panel.heights(best), strict=True)})
    ax.plot([x for x, _ in places], [y for _, y in places], **FRONT_LINE)


def band(ax: Axes, panel: Panel) -> None:
    """A line per series, in a band from its low to its high ends."""
    for look, points in panel.curves():
        xs = [panel.place(point) for point in points]
        every = max(1, len(points) // MARKERS)
        reported = not points[0].measured
        ax.plot(xs, panel.heights(points), markevery=every, **line_settings(look, reported))
        ends = [(p.low, p.high) for p in points if p.low is not None and p.high is not None]
        if len(ends) == len(points):
            low, high = zip(*ends, strict=True)
            ax.fill_between(xs, low, high, color=look.colour, alpha=BAND_ALPHA, linewidth=0)


def scatter(ax: Axes, panel: Panel) -> None:
    """A marker per point with the number of its series: two metrics against each other."""
    for look, points in panel.curves():
        xs, ys = [panel.place(point) for point in points], panel.heights(points)
        reported = not points[0].measured
        ax.plot(xs, ys, **{**line_settings(look, reported), "linestyle": "none"})
        draw_intervals(ax, xs, points, look.colour)
        for x, y, point in zip(xs, ys, points, strict=True):
            number = str(panel.series[point.series])
            text = ax.annotate(number, (x, y), xytext=NUMBER_PLACES[0], textcoords="offset points")
            text.set(fontsize=7, color=look.colour, ha="center", va="center")


def separate_numbers(ax: Axes) -> None:
    """Move the numbers of a scatter so that none lies on another or on a point, as far as there is
    room; the axes have their final place.
    """
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox

    numbers = [text for text in ax.texts if isinstance(text, Annotation)]
    figure = ax.get_figure(root=True)
    assert figure
    half = style.SETTINGS["lines.markersize"] / 2 * figure.dpi / 72
    places = [ax.transData.transform(text.xy) for text in numbers]
    taken = [Bbox([place - half, place + half]) for place in places]
    for text in numbers:
        tried = {}
        for offset in NUMBER_PLACES:
            text.set_position(offset)
            box = text.get_window_extent()
            tried[offset] = sum(box.overlaps(other) for other in taken)
        text.set_position(min(tried, key=lambda offset: tried[offset]))
        taken.append(text.get_window_extent())


def bars(ax: Axes, panel: Panel) -> None:
    """Groups of bars, one group per category; a diamond where the paper's bar ends."""
    shown = [name for name in panel.series if any(p.series == name for p in panel.points)]
    width = BAR_ROOM / max(len(shown), 1)
    for index, name in enumerate(shown):
        shift, look = (index + 0.5) * width - BAR_ROOM / 2, style.look(name)
        measured, reported = (
            [p for p in panel.points if p.series == name and p.measured == is_measured]
            for is_measured in (True, False)
        )
        xs = [panel.place(point) + shift for point in measured]
        draw_columns(ax, panel, look, (xs, panel.heights(measured)), width * 0.92)
        draw_intervals(ax, xs, measured, style.INK)
        xs = [panel.place(point) + shift for point in reported]
        ax.plot(xs, panel.heights(reported), **REPORTED_BAR)
    ax.grid(axis="x", visible=False)


def draw_columns(
    ax: Axes, panel: Panel, look: style.Look, ends: tuple[Sequence[float], ...], width: float
) -> None:
    """Draw bars with their ends at x and y; on a logarithmic axis, where the length of a bar says
    nothing, markers.
    """
    xs, ys = ends
    if panel.log_y:
        ax.plot(xs, ys, **{**line_settings(look), "linestyle": "none"})
    else:
        ax.bar(xs, ys, width, **bar_settings(look))


def histogram(ax: Axes, panel: Panel) -> None:
    """Adjacent bars at numbers on the x axis, as wide as these numbers are apart."""
    places = sorted({panel.place(point) for point in panel.points})
    distance = min((b - a for a, b in pairwise(places)), default=1.0)
    shown = list(panel.by_series(measured=True))
    width = 0.9 * distance / max(len(shown), 1)
    for index, (look, points) in enumerate(shown):
        shift = (index + 0.5) * width - 0.45 * distance
        xs = [panel.place(point) + shift for point in points]
        draw_columns(ax, panel, look, (xs, panel.heights(points)), width)
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


def apart(places: Iterable[float], least: float) -> list[float]:
    """Rising places, each moved to at least `least` behind the one before."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + least) if moved else place)
    return moved


def reliability(ax: Axes, panel: Panel) -> None:
    """Observed against predicted shares, with the diagonal of a calibrated head; below, how many
    outcomes each bin holds, a row per series.
    """
    ax.plot([0, 1], [0, 1], color=style.FAINT, linewidth=0.7, linestyle=":")
    lines(ax, panel)
    rows = list(panel.by_series(measured=True))
    for row, (look, points) in enumerate(rows, start=1):
        places = apart(map(panel.place, points), COUNT_APART)
        for place, point in zip(places, points, strict=True):
            count = ax.text(place, -COUNT_ROW * row, str(point.n))
            count.set(
                fontsize=5, color=look.colour, ha="center", va="center", rotation=90, clip_on=True
            )
    ax.set_xlim(-0.02, 1.02)
    ax.set_ylim(-COUNT_ROW * (len(rows) + 0.6), 1.02)
    ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.set_aspect("equal")


def draw_switches(ax: Axes, panel: Panel) -> None:
    """Write below the axis which points have other settings than the paper's."""
    switches = panel.switches()
    if switches:
        places = sorted({panel.place(point) for point in panel.points})
        words = {x: [s.rpartition(".")[2] for s in text.split()] for x, text in switches.items()}
        short = ["\n".join(words.get(place, ())).replace("=", " ") for place in places]
        labels = [f"{x:g}\n{text}".strip() for x, text in zip(places, short, strict=True)]
        ax.set_xticks(places, labels)


def draw_stated(ax: Axes, numbers: Sequence[StatedNumber]) -> None:
    """Dashed lines, or grey ranges, at the places that the paper's text names, with the number.
    Numbers beyond an axis, whose range stays as it is, stand above the panel with an arrow.
    """
    beyond = []
    for number in (number for number in numbers if number.axis):
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
    """Fill of a bar, for `Axes.bar`; hatched, so that series differ in a grey print."""
    return {"facecolor": look.colour, "edgecolor": "white", "hatch": look.hatch, "linewidth": 0.6}


def line_swatch(look: style.Look, label: str, reported: bool = False) -> Artist:
    """Legend entry: a piece of the line with its marker."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label=label, **line_settings(look, reported))


def mark_swatch(look: style.Look, label: str, reported: bool = False) -> Artist:
    """Legend entry: the marker alone."""
    return line_swatch(replace(look, line="none"), label, reported)


def reported_swatch(label: str, on_bars: bool) -> Artist:
    """Legend entry: how the paper's numbers are drawn."""
    from matplotlib.lines import Line2D

    plain = line_settings(style.Look(style.INK, "o"), reported=True)
    return Line2D([], [], label=label, **(REPORTED_BAR if on_bars else plain))


def front_swatch() -> Artist:
    """Legend entry: a piece of the Pareto front."""
    from matplotlib.lines import Line2D

    return Line2D([], [], label="Pareto front", **FRONT_LINE)


def box_swatch(look: style.Look, label: str, reported: bool = False) -> Artist:
    """Legend entry: a piece of the bar; the paper's bars are diamonds, which have their own."""
    from matplotlib.patches import Patch

    return Patch(label=label, **bar_settings(look))


@dataclass(frozen=True)
class PanelKind:
    """A kind of panel."""

    fill: Callable[[Axes, Panel], None]
    """Draws the panel."""
    swatch: Callable[[style.Look, str, bool], Artist] = line_swatch
    """Makes the legend entry of a series, from its look, its label and whether the paper's numbers
    are all that it has.
    """
    wide: float = 1.0
    """Width of the panel, in units of `style.PANEL_INCHES`."""
    per_category: float = 0.0
    """Least width for each category, in the same units."""
    numbered: bool = False
    """True if the legend numbers the series."""
    one_range: bool = True
    """True if panels of one quantity have one y range."""

    def width(self, categories: int) -> float:
        """Width of a panel with `categories` categories, in units of `style.PANEL_INCHES`."""
        return max(self.wide, self.per_category * categories)


PANEL_KINDS: Mapping[str, PanelKind] = {
    "lines": PanelKind(lines),
    "band": PanelKind(band, wide=1.15),
    "scatter": PanelKind(scatter, mark_swatch, wide=2, numbered=True),
    "bars": PanelKind(bars, box_swatch, wide=1.3, per_category=0.26),
    "histogram": PanelKind(histogram, box_swatch, wide=1.2),
    "heat": PanelKind(heat, wide=1.25, one_range=False),
    "reliability": PanelKind(reliability),
}
