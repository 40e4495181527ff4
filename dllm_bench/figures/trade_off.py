"""The trade-off plot: score against speed of one model's runs on one benchmark, with the front.

A decoder has its colour and marker of `style`; variants (`lopa_dream`, `lopa+score.credit`) have
the colour of their family. Runs of one decoder form a sweep and are joined by a line. Points that
no other beats are joined by the front and named in bold. A name is placed where it covers no point
and no other name, or else in the legend. The oracle, which knows the final tokens, is a bound and
not on the front.

A point is a row of a frame with the columns decoder, speed, score, low, high (the ends of the
score's interval, all in percent), front, whether `front_of` has its run, and run, its short hash.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from dllm_bench.figures import style
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.metrics.definitions import definition
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.transforms import Bbox
    from pandas import DataFrame

INCHES, FRONT = (7.2, 4.4), "#b8860b"
FRONT_LABEL = "front: no run is better in both"
ORACLE = "select.oracle"  # registered name of the piece that knows the text
KnownRun = tuple[RunRecord, float, MeanScore]  # a run, its speed, its score
SIDES = (1, 0.6), (1, -0.6), (-1, 0.6), (-1, -0.6), (0, 1), (0, -1)
PLACES = [(reach * x, reach * y) for reach in (6, 12, 20, 30, 42) for x, y in SIDES]
"""Offsets of a name from its point, in points right and up."""
SHARE = {"left": 0, "center": 0.5, "right": 1}  # of a name, left of its place
LEADER = 15  # points from which a line leads from the name to its point


def known_runs(records: Iterable[RunRecord], speed: str) -> list[KnownRun]:
    """Return the runs that have a score and a finite number of the metric `speed`."""
    return [
        (record, x, record.score)
        for record in records
        if record.score and (x := record.summary.get(speed)) is not None and isfinite(x)
    ]


def points_of(known: Sequence[KnownRun]) -> DataFrame:
    """Return the frame of the points."""
    import pandas as pd

    best = front_of(known)
    return pd.DataFrame(
        {
            "run": record.spec.short,
            "decoder": record.spec.label,
            "speed": speed,
            "score": 100 * score.mean,
            "low": 100 * score.low,
            "high": 100 * score.high,
            "front": i in best,
        }
        for i, (record, speed, score) in enumerate(known)
    )


def image(points: DataFrame, title: str, speed: str, form: str) -> bytes:
    """Return the plot as a file ("png" or "svg"); `speed` is the metric of the x axis."""
    metric = definition(speed)
    with style.applied(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of a name: drawn as a box
        figure = style.empty_figure(*INCHES)
        ax = figure.subplots()
        draw(ax, points)
        ax.set(xlabel=f"{metric.name} ({metric.unit})", ylabel="score (%)")
        ax.set_title(title, loc="left", fontsize=9.5, fontweight="bold")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        unnamed = place_names(ax, points)
        handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
        shown = [name for name in handles if name in (FRONT_LABEL, *unnamed)]
        ax.legend([handles[name] for name in shown], shown, loc="best", fontsize=7)
        return style.as_file(figure, form)


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


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return indices of the points that no other point beats.

    Larger is better in both coordinates; a point beats another if it is better in one and at least
    as good in the other.
    """
    return [
        i
        for i, (x, y) in enumerate(points)
        if not any(u >= x and v >= y and (u, v) != (x, y) for u, v in points)
    ]


def front_of(known: Sequence[KnownRun]) -> list[int]:
    """Return the indices of the runs that no other beats, from slow to fast. A run that knows the
    text, which no method can, neither stands on a front nor beats another.
    """
    places = [(x, score.mean) for _, x, score in known]
    possible = [i for i, (record, _, _) in enumerate(known) if not knows_text(record)]
    chosen = possible or list(range(len(known)))
    front = pareto_front([places[i] for i in chosen])
    return sorted((chosen[i] for i in front), key=places.__getitem__)


def knows_text(record: RunRecord) -> bool:
    """Return whether the run's decoder selects tokens by a text that is known beforehand."""
    return bool(setting_in(record.spec.decoder, "select._target_") == ORACLE)


def looks(decoders: Iterable[str]) -> dict[str, style.Look]:
    """Return {decoder: its look}: its own or that of its family, with a marker unused in the
    family."""
    found, used = dict[str, style.Look](), set[tuple[str, str]]()
    for name in dict.fromkeys(decoders):
        own = f"{name.partition('+')[0]}_"
        families = [key for key in style.known_looks() if key and own.startswith(f"{key}_")]
        look = style.look(max(families, key=len, default=name))
        free = (m for m in (look.marker, *style.MARKERS) if (look.colour, m) not in used)
        found[name] = replace(look, marker=next(free, look.marker))
        used.add((look.colour, found[name].marker))
    return found


def place_names(ax: Axes, points: DataFrame) -> set[str]:
    """Write each decoder's name where it covers nothing, names on the front first. A sweep's
    dominated points are named once. Return the decoders without a name at any point.

    The layout must be final: names are measured as they are drawn.
    """
    from matplotlib.transforms import Bbox

    best = points[points.front].sort_values("speed")
    rest = points[~points.front].sort_values("score", ascending=False, kind="stable")
    colours = {name: look.colour for name, look in looks(points.decoder).items()}
    dot = 4 * ax.figure.dpi / 72
    places = ax.transData.transform(points[["speed", "score"]])
    taken = [Bbox.from_extents(x - dot, y - dot, x + dot, y + dot) for x, y in places]
    named = set[str]()
    for point in (*best.itertuples(), *rest.itertuples()):
        due = point.front or point.decoder not in named
        if due and _write(ax, point, taken, colours[point.decoder]):
            named.add(point.decoder)
    return set(colours) - named


def _write(ax: Axes, point: Any, taken: list[Bbox], colour: str) -> bool:
    """Write the point's name at the first free place, now taken; False if there is none."""
    place = point.speed, point.score
    given: dict[str, Any] = {"color": colour, "fontsize": 6.5, "zorder": 4}
    given["fontweight"] = "bold" if point.front else "normal"
    measured = ax.text(*place, point.decoder, va="bottom", **given)  # once, since it takes long
    box, scale = measured.get_window_extent(), ax.figure.dpi / 72
    measured.remove()
    for right, up in PLACES:
        across = "left" if right > 0 else "right" if right < 0 else "center"
        x, y = scale * right - SHARE[across] * box.width, scale * up - (up < 0) * box.height
        moved = box.translated(x, y)
        inside = all(ax.bbox.contains(*corner) for corner in moved.corners())
        if inside and not any(map(moved.fully_overlaps, taken)):
            break
    else:
        return False
    taken.append(moved)
    if max(abs(right), abs(up)) >= LEADER:
        given["arrowprops"] = {"arrowstyle": "-", "color": colour, "lw": 0.4, "alpha": 0.7}
    given |= {"ha": across, "va": "bottom" if up > 0 else "top", "textcoords": "offset points"}
    ax.annotate(point.decoder, place, (right, up), **given)
    return True
