"""The trade-off plot: score against speed of one model's runs on one benchmark, with the front.

A decoder has its colour and marker of `style`; variants (`lopa_dream`) have those of their family.
Runs of one decoder form a sweep and are joined by a line. Points that no other beats are joined by
the front and named in bold. A name is placed where it covers no point and no other name, or else in
the legend. The oracle, which knows the final tokens, is a bound and not on the front.

A point is a row of a frame with the columns decoder, speed, score, low, high (the ends of the
score's interval, all in percent), and front, which `with_front` adds.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dllm_bench.figures import style
from dllm_bench.metrics.tradeoff import pareto_front

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox
    from pandas import DataFrame

INCHES, FRONT = (7.2, 4.4), "#b8860b"
FRONT_LABEL, BOUND = "front: no run is better in both", "oracle"
UNKNOWN = (style.Look("#5c5c5c", "o"), style.Look("#9a6b00", "s"), style.Look("#4a7a8c", "^"))
"""Looks of decoders whose family has none, in turn."""
PLACES = [  # offsets of a name from its point: points right and up, alignment
    (reach * x, reach * y, across, up)
    for reach in (6, 12, 20, 30, 42)
    for x, y, across, up in (
        (1, 0.6, "left", "bottom"),
        (1, -0.6, "left", "top"),
        (-1, 0.6, "right", "bottom"),
        (-1, -0.6, "right", "top"),
        (0, 1, "center", "bottom"),
        (0, -1, "center", "top"),
    )
]
LEADER = 15  # points from which a line leads from the name to its point


def image(points: DataFrame, title: str, speed: str, form: str) -> bytes:
    """Return the plot as a file ("png" or "svg"); `speed` names the x axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.applied():
        figure = Figure(figsize=INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        ax = figure.subplots()
        draw(ax, points)
        ax.set(xlabel=speed, ylabel="score (%)")
        ax.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        unnamed = place_names(ax, points)
        handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        shown = [name for name in handles if name in (FRONT_LABEL, *unnamed)]
        ax.legend([handles[name] for name in shown], shown, loc="best", fontsize=7)
        content = io.BytesIO()
        figure.savefig(content, format=form, **style.FORMATS[form])
    return content.getvalue()


def draw(ax: Axes, points: DataFrame) -> None:
    """Draw the points by decoder, their intervals and the front, without names."""
    best = points[points.front].sort_values("speed")
    steps: dict[str, Any] = {"color": FRONT, "zorder": 1, "label": FRONT_LABEL}
    ax.plot(best.speed, best.score, lw=3, alpha=0.55, **steps)
    for name, look in looks(points.decoder).items():
        own = points[points.decoder == name].sort_values("speed", kind="stable")
        ends = [own.score - own.low, own.high - own.score]
        line: dict[str, Any] = {"ecolor": look.colour, "elinewidth": 0.6, "alpha": 0.3}
        ax.errorbar(own.speed, own.score, ends, fmt="none", **line)
        ax.plot(own.speed, own.score, "-", color=look.colour, lw=0.7, alpha=0.5, zorder=2)
        edge = own.front.map({True: "#111111", False: "white"})
        marks: dict[str, Any] = {"edgecolors": edge, "linewidths": 0.8, "zorder": 3}
        marks |= {"c": look.colour, "marker": look.marker, "label": name}
        ax.scatter(own.speed, own.score, 38, **marks)
    ax.margins(x=0.1, y=0.06)


def with_front(points: DataFrame) -> DataFrame:
    """Return the points, and in `front` whether no other beats them in both score and speed."""
    real = points[points.decoder != BOUND]
    best = real.index[pareto_front(list(zip(real.speed, real.score, strict=True)))]
    return points.assign(front=points.index.isin(best))


def looks(decoders: Iterable[str]) -> dict[str, style.Look]:
    """Return {decoder: its look}: its own or that of its family, with a marker unused in the
    family."""
    found, used = dict[str, style.Look](), set[tuple[str, str]]()
    unknown = 0
    for name in dict.fromkeys(decoders):
        families = [key for key in style.LOOKS if key and f"{name}_".startswith(f"{key}_")]
        look = style.look(max(families, key=len)) if families else UNKNOWN[unknown % len(UNKNOWN)]
        unknown += not families
        free = (m for m in (look.marker, *"osD^vPX*<>phH8d") if (look.colour, m) not in used)
        found[name] = replace(look, marker=next(free, look.marker))
        used.add((look.colour, found[name].marker))
    return found


def place_names(ax: Axes, points: DataFrame) -> set[str]:
    """Write each decoder's name where it covers nothing, names on the front first. A sweep's
    dominated points are named once. Return the decoders without a name at any point.

    The layout must be final: names are measured as they are drawn.
    """
    best, taken = points[points.front].sort_values("speed"), [*_marks(ax, points)]
    rest = points[~points.front].sort_values("score", ascending=False, kind="stable")
    colours = {name: look.colour for name, look in looks(points.decoder).items()}
    named = set[str]()
    for point in (*best.itertuples(), *rest.itertuples()):
        if point.decoder in named and not point.front:
            continue
        box = _write(ax, point, taken, colours[point.decoder])
        if box is not None:
            taken.append(box)
            named.add(point.decoder)
    return set(colours) - named


def _marks(ax: Axes, points: DataFrame) -> Iterator[Bbox]:
    """Yield what the markers cover, in pixels."""
    from matplotlib.transforms import Bbox

    size = 4 * ax.figure.dpi / 72
    for x, y in ax.transData.transform(points[["speed", "score"]]):
        yield Bbox.from_extents(x - size, y - size, x + size, y + size)


def _write(ax: Axes, point: Any, taken: Sequence[Bbox], colour: str) -> Bbox | None:
    """Return the first free place for the point's name, written there; None if all are taken."""
    weight = "bold" if point.front else "normal"
    given: dict[str, Any] = {"color": colour, "fontsize": 6.5, "fontweight": weight, "zorder": 4}
    given |= {"xycoords": "data", "textcoords": "offset points"}
    for right, up, across, along in PLACES:
        far = max(abs(right), abs(up)) >= LEADER
        line = {"arrowstyle": "-", "color": colour, "lw": 0.4, "alpha": 0.7} if far else None
        name = ax.annotate(
            point.decoder,
            (point.speed, point.score),
            (right, up),
            ha=across,
            va=along,
            arrowprops=line,
            **given,
        )
        box = _box_of(name)
        inside = ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1 and box.y1 <= ax.bbox.y1
        if inside and ax.bbox.y0 <= box.y0 and not box.count_overlaps(taken):
            return box
        name.remove()
    return None


def _box_of(name: Any) -> Bbox:
    """Return what a text covers, without its line, in pixels."""
    from matplotlib.text import Text

    name.update_positions(name.figure.canvas.get_renderer())
    box: Bbox = Text.get_window_extent(name)
    return box
