"""Points to one drawing, as svg and png: the grid of `layout`, each panel filled by its kind.

Measured and reported numbers never share a panel; reported ones are muted and hollow. What has no
number says why in its place. How a series looks is `style`'s business. Equal points give equal
bytes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from dllm_bench.figures import style
from dllm_bench.figures.layout import PanelSlot, categories, grid, series_of
from dllm_bench.figures.panels import KINDS, Panel, front, front_swatch
from dllm_bench.figures.points import BuiltFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing
    from matplotlib.layout_engine import ConstrainedLayoutEngine

TITLE_CHARACTERS, LEGEND_CHARACTERS, FOOTER_CHARACTERS = 11, 17, 20  # of an inch
SWATCH_CHARACTERS = 7  # as wide as the piece of a line beside a label
LEGEND_LINE, FOOTER_LINE = 0.18, 0.11  # inches
LABEL_CHARACTERS = 26  # of a y axis
UPRIGHT = 4  # categories whose names are not slanted, at most
SLANT_INCHES = 0.45  # more height for those that are


def images(built: BuiltFigure) -> dict[str, bytes]:
    """The drawing in every form."""
    with style.applied():
        drawn = drawing(built)
        return {form: _saved(drawn, form) for form in style.FORMATS}


def _saved(drawn: Drawing, form: str) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format=form, **style.FORMATS[form])
    return buffer.getvalue()


def drawing(built: BuiltFigure) -> Drawing:
    """The drawing; `style.applied` has to hold."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Drawing

    places, kind = grid(built), KINDS[built.figure.draw.kind]
    wide, high = style.PANEL_INCHES
    names = len(categories(built))
    width = kind.width(names) * wide * len(places[0]) + 0.3
    height = (high + (SLANT_INCHES if names > UPRIGHT else 0)) * len(places) + 0.9
    drawn = Drawing(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    title = textwrap.fill(built.figure.table.title, round(TITLE_CHARACTERS * width))
    drawn.suptitle(title, fontsize=9.5, fontweight="bold")
    axes = drawn.subplots(len(places), len(places[0]), squeeze=False)
    for ax, place in zip(axes.flat, (place for row in places for place in row), strict=True):
        ax.set_axis_off() if place is None else fill(ax, built, place)
    below(drawn, built)
    return drawn


def fill(ax: Axes, built: BuiltFigure, place: PanelSlot) -> None:
    """One panel."""
    figure = built.figure
    ax.set_title(f"{figure.label(place.name)}\n{place.whence}".strip(), color=style.INK)
    if not place.numbers:
        say(ax, [point.reason for point in place.points])
        return
    order = {x: i for i, x in enumerate(categories(built))}
    numbers = {name: number for number, name in enumerate(series_of(built), start=1)}
    panel = Panel(place.numbers, numbers, order, place.muted, figure.draw.z)
    if figure.draw.front and not place.muted:
        front(ax, panel)
    KINDS[figure.draw.kind].fill(ax, panel)
    ax.set_xlabel(figure.draw.x.label)
    ax.set_ylabel(textwrap.fill(figure.quantities[place.quantity], LABEL_CHARACTERS))
    if figure.draw.x.log:
        ax.set_xscale("log", base=2)
    if order:
        name_categories(ax, built, place, order)


def name_categories(
    ax: Axes, built: BuiltFigure, place: PanelSlot, order: Mapping[str, int]
) -> None:
    """Labels of an x axis that counts nothing, with the stand-in where there are several; what has
    no number says why.
    """
    labels = built.figure.facet_labels(built.figure.draw.x.facet)
    texts = []
    for x, at in order.items():
        mine = [point for point in place.points if point.x == x]
        tasks = {point.source.partition(" on ")[2] for point in mine if point.y is not None}
        own = f"\n{'/'.join(sorted(tasks))}" if len(place.tasks) > 1 else ""
        texts.append(f"{labels.get(x, x)}{own}")
        if mine and all(point.y is None for point in mine):
            why = mine[0].reason
            ax.text(at, 0.02, why, rotation=90, fontsize=5.5, color=style.FAINT, ha="center",
                    transform=ax.get_xaxis_transform())  # fmt: skip
    ax.set_xticks(range(len(order)), texts, rotation=30 if len(order) > UPRIGHT else 0)
    ax.set_xlim(-0.6, len(order) - 0.4)


def say(ax: Axes, why: Sequence[str]) -> None:
    """Words in place of a panel's numbers."""
    ax.set_axis_off()
    text = "\n".join(textwrap.fill(line, LABEL_CHARACTERS) for line in dict.fromkeys(why))
    ax.text(0.5, 0.5, text, ha="center", va="center", color=style.FAINT, transform=ax.transAxes)


def below(drawn: Drawing, built: BuiltFigure) -> None:
    """Legend, and what the numbers were measured on, in a strip of their own below the panels."""
    width, height = drawn.get_size_inches()
    lines = textwrap.wrap(footnote(built), round(FOOTER_CHARACTERS * width))
    foot = FOOTER_LINE * len(lines) + 0.08
    strip = foot + LEGEND_LINE * legend(drawn, built, foot / height)
    rect = (0, strip / height, 1, 1 - strip / height)
    cast("ConstrainedLayoutEngine", drawn.get_layout_engine()).set(rect=rect)
    said = drawn.text(0.5, 0.04 / height, "\n".join(lines), ha="center", va="bottom")
    said.set(fontsize=6, color=style.FAINT)


def footnote(built: BuiltFigure) -> str:
    """What was measured on what, and how much has no number."""
    empty = len(built.without())
    missing = f" {empty} points have no number here; the csv says why." if empty else ""
    return f"Measured on {'; '.join(built.built.hardware) or 'nothing yet'}.{missing}"


def legend(drawn: Drawing, built: BuiltFigure, bottom: float) -> int:
    """All series once, in rows from `bottom` on; the number of rows."""
    series = [name for name in series_of(built) if name]
    if not series:
        return 0
    kind = KINDS[built.figure.draw.kind]
    labels = [built.figure.label(name) for name in series]
    if kind.numbered:
        labels = [f"{number} {label}" for number, label in enumerate(labels, start=1)]
    swatch = kind.swatch
    handles = [swatch(style.look(name), label) for name, label in zip(series, labels, strict=True)]
    if built.figure.draw.front:
        handles.append(front_swatch())
        labels.append(str(handles[-1].get_label()))
    room = LEGEND_CHARACTERS * drawn.get_size_inches()[0]
    columns = max(1, min(len(labels), int(room / (max(map(len, labels)) + SWATCH_CHARACTERS))))
    drawn.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, bottom),
        borderaxespad=0,
        ncols=columns,
    )
    return -(-len(labels) // columns)
