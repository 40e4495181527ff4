"""Points to one drawing, as svg and png: which panel stands where, titles, axes, legend, footnote.

A row of panels per quantity, the paper's panels below the measured ones where both have panels in
common. Measured and reported numbers never share a panel; reported ones are pale and hollow. Where
there is no number, the reason stands in its place. How a panel is filled is in `panels`, how a
series looks in `style`. Equal points give equal bytes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from dllm_bench.figures import style
from dllm_bench.figures.panels import PANEL_KINDS, Panel, front_swatch, pareto_front
from dllm_bench.figures.points import BuiltFigure, FigurePoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

MEASURED_ONLY, REPORTED_ONLY, BOTH = (True,), (False,), (True, False)
"""Values of `FigurePoint.measured` that a row of panels shows."""
FEW_CATEGORIES = 4  # panels with at most this many categories share a row
TITLE_CHARACTERS, LEGEND_CHARACTERS, FOOTER_CHARACTERS = 11, 17, 20  # per inch
SWATCH_CHARACTERS = 7  # width of the piece of line beside a label
LEGEND_LINE, FOOTER_LINE = 0.18, 0.11  # inches
LABEL_CHARACTERS = 26  # per line of a y axis label
MAX_UPRIGHT = 4  # more category names than this are slanted
SLANT_INCHES = 0.45  # more height for slanted names


@dataclass(frozen=True)
class PanelSlot:
    """One panel of the drawing."""

    quantity: str
    """Name of the quantity on its y axis."""
    name: str
    """Name of the panel."""
    points: tuple[FigurePoint, ...]
    """Its points, also those without a number."""

    @property
    def drawable(self) -> list[FigurePoint]:
        """The points that have a number."""
        return [point for point in self.points if point.y is not None]

    @property
    def reported(self) -> bool:
        """True if it shows numbers of the paper."""
        return any(not point.measured for point in self.drawable)

    @property
    def models(self) -> list[str]:
        """The models measured."""
        return _part_of_sources(self.drawable, 0)

    @property
    def tasks(self) -> list[str]:
        """The benchmarks measured."""
        return _part_of_sources(self.drawable, 2)

    @property
    def origin(self) -> str:
        """The line below its title: what was measured, or that the numbers are the paper's."""
        if self.reported:
            return f"the paper's ({', '.join(sorted({point.kind for point in self.drawable}))})"
        return " on ".join(filter(None, (", ".join(self.models), ", ".join(self.tasks))))


def _part_of_sources(points: Sequence[FigurePoint], part: int) -> list[str]:
    names = {point.source.partition(" on ")[part] for point in points}
    return sorted(names - {""})


def grid(built: BuiltFigure) -> list[list[PanelSlot | None]]:
    """The panels, row by row; None where the figure has no such panel. A figure of one panel has
    its quantities in one row.
    """
    quantities, panels = list(built.figure.quantities), panel_names(built)
    if len(panels) > 1 or len(quantities) == 1:
        rows = [
            [_slot(built, quantity, panel, shown) for panel in panels]
            for quantity in quantities
            for shown in _rows_of(built, quantity)
        ]
        one_row = len(panels) == 1 and len(categories(built)) <= FEW_CATEGORIES
        return [[slot for row in rows for slot in row]] if one_row else rows
    columns = {quantity: _rows_of(built, quantity) for quantity in quantities}
    return [
        [
            _slot(built, quantity, panels[0], shown[row]) if row < len(shown) else None
            for quantity, shown in columns.items()
        ]
        for row in range(max(map(len, columns.values())))
    ]


def _rows_of(built: BuiltFigure, quantity: str) -> list[tuple[bool, ...]]:
    """One row for all points if no panel has measured and reported ones, else a row for each."""
    measured, reported = (
        {p.panel for p in built.points if p.quantity == quantity and p.measured == is_measured}
        for is_measured in (True, False)
    )
    return [MEASURED_ONLY, REPORTED_ONLY] if measured & reported else [BOTH]


def _slot(
    built: BuiltFigure, quantity: str, panel: str, shown: tuple[bool, ...]
) -> PanelSlot | None:
    key = (quantity, panel)
    points = [p for p in built.points if (p.quantity, p.panel) == key and p.measured in shown]
    return PanelSlot(quantity, panel, tuple(points)) if points else None


def panel_names(built: BuiltFigure) -> list[str]:
    """Names of the panels: the facet's values, then those that run series or the paper add."""
    facet = built.figure.facet_labels(built.figure.draw.panels)
    names = list(dict.fromkeys(point.panel for point in built.points))
    order = [*(name for name in facet if name in names), *(n for n in names if n not in facet)]
    return [name for name in order if name] or [""]


def series_names(built: BuiltFigure) -> list[str]:
    """Names of the series that have a point to draw, in the order of their facet."""
    names = [point.series for point in built.points if point.y is not None]
    order = [*built.figure.facet_labels(built.figure.draw.series), *built.figure.rows, *names]
    return [name for name in dict.fromkeys(order) if name in names]


def categories(built: BuiltFigure) -> list[str]:
    """The categories on the x axis, in the order of their facet; none where x is a number."""
    names = [point.x for point in built.points if isinstance(point.x, str)]
    order = [*built.figure.facet_labels(built.figure.draw.x.facet), *names]
    return [x for x in dict.fromkeys(order) if x in names]


def images(built: BuiltFigure) -> dict[str, bytes]:
    """File format -> content of the drawing."""
    with style.applied():
        drawn = drawing(built)
        return {form: _saved(drawn, form) for form in style.FORMATS}


def _saved(drawn: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    drawn.savefig(buffer, format=form, **style.FORMATS[form])
    return buffer.getvalue()


def drawing(built: BuiltFigure) -> Figure:
    """The drawing, to be made inside of `style.applied`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    slots, kind = grid(built), PANEL_KINDS[built.figure.draw.kind]
    wide, high = style.PANEL_INCHES
    names = len(categories(built))
    width = kind.width(names) * wide * len(slots[0]) + 0.3
    height = (high + (SLANT_INCHES if names > MAX_UPRIGHT else 0)) * len(slots) + 0.9
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    title = textwrap.fill(built.figure.table.title, round(TITLE_CHARACTERS * width))
    drawn.suptitle(title, fontsize=9.5, fontweight="bold")
    axes = drawn.subplots(len(slots), len(slots[0]), squeeze=False)
    for ax, slot in zip(axes.flat, (slot for row in slots for slot in row), strict=True):
        ax.set_axis_off() if slot is None else draw_panel(ax, built, slot)
    draw_below(drawn, built)
    return drawn


def draw_panel(ax: Axes, built: BuiltFigure, slot: PanelSlot) -> None:
    """Draw one panel."""
    figure = built.figure
    ax.set_title(f"{figure.label(slot.name)}\n{slot.origin}".strip(), color=style.INK)
    if not slot.drawable:
        write_reasons(ax, [point.reason for point in slot.points])
        return
    order = {x: i for i, x in enumerate(categories(built))}
    numbers = {name: number for number, name in enumerate(series_names(built), start=1)}
    panel = Panel(slot.drawable, numbers, order, slot.reported, figure.draw.z)
    if figure.draw.front and not slot.reported:
        pareto_front(ax, panel)
    PANEL_KINDS[figure.draw.kind].fill(ax, panel)
    ax.set_xlabel(figure.draw.x.label)
    ax.set_ylabel(textwrap.fill(figure.quantities[slot.quantity], LABEL_CHARACTERS))
    if figure.draw.x.log:
        ax.set_xscale("log", base=2)
    if order:
        name_categories(ax, built, slot, order)


def name_categories(
    ax: Axes, built: BuiltFigure, slot: PanelSlot, order: Mapping[str, int]
) -> None:
    """Label the categories of the x axis, with the benchmark measured where there are several; a
    category without a number shows the reason.
    """
    labels = built.figure.facet_labels(built.figure.draw.x.facet)
    texts = []
    for x, place in order.items():
        points = [point for point in slot.points if point.x == x]
        tasks = {point.source.partition(" on ")[2] for point in points if point.y is not None}
        own = f"\n{'/'.join(sorted(tasks))}" if len(slot.tasks) > 1 else ""
        texts.append(f"{labels.get(x, x)}{own}")
        if points and all(point.y is None for point in points):
            why = points[0].reason
            ax.text(place, 0.02, why, rotation=90, fontsize=5.5, color=style.FAINT, ha="center",
                    transform=ax.get_xaxis_transform())  # fmt: skip
    ax.set_xticks(range(len(order)), texts, rotation=30 if len(order) > MAX_UPRIGHT else 0)
    ax.set_xlim(-0.6, len(order) - 0.4)


def write_reasons(ax: Axes, reasons: Sequence[str]) -> None:
    """Write the reasons in place of the numbers of a panel."""
    ax.set_axis_off()
    text = "\n".join(textwrap.fill(line, LABEL_CHARACTERS) for line in dict.fromkeys(reasons))
    ax.text(0.5, 0.5, text, ha="center", va="center", color=style.FAINT, transform=ax.transAxes)


def draw_below(drawn: Figure, built: BuiltFigure) -> None:
    """Draw legend and footnote in a strip below the panels."""
    width, height = drawn.get_size_inches()
    lines = textwrap.wrap(footnote(built), round(FOOTER_CHARACTERS * width))
    foot = FOOTER_LINE * len(lines) + 0.08
    strip = foot + LEGEND_LINE * draw_legend(drawn, built, foot / height)
    rect = (0, strip / height, 1, 1 - strip / height)
    cast("ConstrainedLayoutEngine", drawn.get_layout_engine()).set(rect=rect)
    text = drawn.text(0.5, 0.04 / height, "\n".join(lines), ha="center", va="bottom")
    text.set(fontsize=6, color=style.FAINT)


def footnote(built: BuiltFigure) -> str:
    """The hardware measured on, and how many points have no number."""
    empty = len(built.without_number())
    missing = f" {empty} points have no number here; the csv says why." if empty else ""
    return f"Measured on {'; '.join(built.built.hardware) or 'nothing yet'}.{missing}"


def draw_legend(drawn: Figure, built: BuiltFigure, bottom: float) -> int:
    """Draw the legend of all series, from `bottom` upwards; returns its number of rows."""
    series = [name for name in series_names(built) if name]
    if not series:
        return 0
    kind = PANEL_KINDS[built.figure.draw.kind]
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
