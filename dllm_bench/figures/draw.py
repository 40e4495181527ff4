"""Points to one drawing, as svg and png: which panel stands where, titles, axes, legend, footnote.

A row of panels per quantity. The paper's numbers are drawn over the measured ones, hollow, and have
a panel of their own only where they are of another target, on the same range. Panels with the same
points are one panel with both names. Where there is no number, the reason stands in its place. How
a panel is filled is in `panels`, how a series looks in `style`. Equal points give equal bytes.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast

from dllm_bench.figures import style
from dllm_bench.figures.panels import (
    PANEL_KINDS,
    Panel,
    box_swatch,
    draw_stated,
    draw_switches,
    front_swatch,
    pareto_front,
    reported_swatch,
    separate_intervals,
    separate_numbers,
)
from dllm_bench.figures.points import BuiltFigure, FigurePoint
from dllm_bench.figures.run_series import COUNTED, SIMULATED
from dllm_bench.figures.spec import StatedNumber
from dllm_bench.methods.drafting import device_of_step_profile

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

TITLE_CHARACTERS, LEGEND_CHARACTERS, FOOTER_CHARACTERS = 11, 17, 20  # per inch
SWATCH_CHARACTERS = 7  # width of the piece of line beside a label
TITLE_INCHES, LEGEND_LINE, FOOTER_LINE = 0.4, 0.18, 0.11  # heights
LABEL_CHARACTERS = 26  # per line of a y axis label
PANEL_TITLE_CHARACTERS = 14  # per inch
LOG_ROOM = 1.02  # least factor between the outermost values and the ends of a logarithmic axis
FEW_TICKS = 7  # a logarithmic axis with at most this many places has a tick at each
MAX_UPRIGHT = 4  # more category names than this are slanted
SLANT_INCHES = 0.45  # more height for slanted names


@dataclass(frozen=True)
class PanelSlot:
    """One panel of the drawing."""

    quantity: str
    """Name of the quantity on its y axis."""
    names: tuple[str, ...]
    """Names of the panel; several if panels with the same points are merged."""
    points: tuple[FigurePoint, ...]
    """Its points, measured and reported, also those without a number."""
    same_runs: str = ""
    """Name of an earlier panel with the same measured points, but other reported ones."""

    @property
    def name(self) -> str:
        """Its first name."""
        return self.names[0]

    @property
    def drawable(self) -> list[FigurePoint]:
        """The points that have a number."""
        return [point for point in self.points if point.y is not None]

    @property
    def measured(self) -> list[FigurePoint]:
        """The measured points that have a number."""
        return [point for point in self.drawable if point.measured]

    @property
    def models(self) -> list[str]:
        """The models measured."""
        return _part_of_sources(self.measured, 0)

    @property
    def tasks(self) -> list[str]:
        """The benchmarks measured."""
        return _part_of_sources(self.measured, 2)

    @property
    def origin(self) -> str:
        """The line below its title: what was measured, or that the numbers are the paper's."""
        if self.drawable and not self.measured:
            kinds = ", ".join(sorted({point.kind for point in self.drawable}))
            reasons = dict.fromkeys(p.reason for p in self.points if p.measured and p.reason)
            return "; ours: ".join([f"the paper's ({kinds})", *list(reasons)[:1]])
        parts = self.models, self.tasks
        if isinstance(self.points[0].x, str) and len(self.models) > 1:  # the axis names them
            parts = [], self.tasks if len(self.tasks) == 1 else []
        return " on ".join(filter(None, map(", ".join, parts)))


def _part_of_sources(points: Sequence[FigurePoint], part: int) -> list[str]:
    names = {n for p in points for n in p.source.partition(" on ")[part].split(", ")}
    return sorted(names - {""})


def grid(built: BuiltFigure) -> list[list[PanelSlot | None]]:
    """The panels, a row per quantity; None where the figure has no such panel. A figure of one
    panel has its quantities in one row, a figure without any number is one panel.
    """
    panels = merged_panels(built)
    if not any(point.y is not None for point in built.points):
        return [[PanelSlot(next(iter(built.figure.quantities)), ("",), built.points)]]
    rows = [
        [_slot(built, quantity, names, panels) for names in panels]
        for quantity in built.figure.quantities
    ]
    return rows if len(panels) > 1 else [[slot for row in rows for slot in row]]


def merged_panels(built: BuiltFigure) -> list[tuple[str, ...]]:
    """The names of each panel: panels with the same points, the paper's too, are one. Panels
    without a number stay apart.
    """
    merged: dict[frozenset[FigurePoint] | str, list[str]] = {}
    for name in panel_names(built):
        merged.setdefault(_points_of(built, name, (True, False)) or name, []).append(name)
    return [tuple(names) for names in merged.values()]


def _points_of(
    built: BuiltFigure, panel: str, measured: tuple[bool, ...]
) -> frozenset[FigurePoint]:
    """What is drawn in a panel, without its name."""
    drawn = (p for p in built.points if p.panel == panel and p.y is not None)
    return frozenset(replace(p, panel="") for p in drawn if p.measured in measured)


def _slot(
    built: BuiltFigure, quantity: str, names: tuple[str, ...], panels: Sequence[tuple[str, ...]]
) -> PanelSlot | None:
    key = (quantity, names[0])
    points = tuple(p for p in built.points if (p.quantity, p.panel) == key)
    mine = _points_of(built, names[0], (True,))
    earlier = [other[0] for other in panels[: panels.index(names)]]
    same = [name for name in earlier if mine and _points_of(built, name, (True,)) == mine]
    return PanelSlot(quantity, names, points, same[0] if same else "") if points else None


def panel_names(built: BuiltFigure) -> list[str]:
    """Names of the panels: the facet's values, then those that run series or the paper add."""
    facet = built.figure.facet_labels(built.figure.draw.panels)
    names = list(dict.fromkeys(point.panel for point in built.points))
    order = [*(name for name in facet if name in names), *(n for n in names if n not in facet)]
    return [name for name in order if name] or [""]


def common_origin(slots: Sequence[Sequence[PanelSlot | None]]) -> str:
    """What was measured, if it is the same in all panels, so that it is said once."""
    origins = {slot.origin for row in slots for slot in row if slot and slot.measured}
    return origins.pop() if len(origins) == 1 else ""


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
    panel_width = kind.width(names) * wide
    width = panel_width * len(slots[0]) + 0.3
    height = (high + (SLANT_INCHES if names > MAX_UPRIGHT else 0)) * len(slots) + TITLE_INCHES
    drawn = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(drawn)
    title = textwrap.fill(built.figure.table.title, round(TITLE_CHARACTERS * width))
    drawn.suptitle(title, fontsize=9.5, fontweight="bold")
    axes = drawn.subplots(len(slots), len(slots[0]), squeeze=False)
    room = round(PANEL_TITLE_CHARACTERS * panel_width)
    titled: set[tuple[int, str]] = set()
    for row, row_slots in zip(axes, slots, strict=True):
        for column, (ax, slot) in enumerate(zip(row, row_slots, strict=True)):
            if slot is None:
                ax.set_axis_off()
                continue
            draw_panel(ax, built, slot)
            text = panel_title(built, slot, room, common_origin(slots))
            if (column, text) not in titled:  # below a panel of the same title it needs none
                ax.set_title(text, color=style.INK)
            titled.add((column, text))
        if kind.one_range:
            share_ranges(list(row), row_slots)
        for ax, slot in zip(row, row_slots, strict=True):
            if slot and slot.drawable:
                draw_stated(ax, stated_in(built, slot))
    draw_below(drawn, built)
    drawn.draw_without_rendering()  # now the axes have their places
    for ax in axes.flat:
        separate_intervals(ax)
        if kind.numbered:
            separate_numbers(ax)
    return drawn


def stated_in(built: BuiltFigure, slot: PanelSlot) -> list[StatedNumber]:
    """The stated numbers that belong into a panel."""
    return [
        number
        for number in built.figure.stated
        if number.quantity in ("", slot.quantity) and number.panel in ("", *slot.names)
    ]


def share_ranges(axes: Sequence[Axes], slots: Sequence[PanelSlot | None]) -> None:
    """Give the panels of one quantity one y range, and one x range where a panel has the paper's
    numbers alone, so that they compare.
    """
    shown = [ax for ax, slot in zip(axes, slots, strict=True) if slot and slot.drawable]
    if not shown or len({slot.quantity for slot in slots if slot}) > 1:
        return
    ys = [end for ax in shown for end in ax.get_ylim()]
    xs = [end for ax in shown for end in ax.get_xlim()]
    apart = any(slot and slot.drawable and not slot.measured for slot in slots)
    for ax in shown:
        ax.set_ylim(min(ys), max(ys))
        if apart:
            ax.set_xlim(min(xs), max(xs))


def draw_panel(ax: Axes, built: BuiltFigure, slot: PanelSlot) -> None:
    """Draw one panel."""
    figure = built.figure
    if not slot.drawable:
        write_reasons(ax, [point.reason for point in slot.points])
        return
    order = {x: i for i, x in enumerate(categories(built))}
    numbers = {name: number for number, name in enumerate(series_names(built), start=1)}
    log_y = slot.quantity in figure.draw.log_y
    panel = Panel(slot.drawable, numbers, order, figure.draw.z, log_y)
    if figure.draw.front:
        pareto_front(ax, panel)
    PANEL_KINDS[figure.draw.kind].fill(ax, panel)
    ax.set_xlabel(figure.draw.x.label)
    simulated = f", simulated on {devices}" if (devices := simulated_on(built, slot)) else ""
    ax.set_ylabel(textwrap.fill(figure.quantities[slot.quantity] + simulated, LABEL_CHARACTERS))
    drawn = [point for point in built.points if point.y is not None]
    of_row = [point for point in drawn if point.quantity == slot.quantity]
    set_ticks(ax, "x", figure.draw.x.log, [] if order else [panel.place(p) for p in drawn])
    set_ticks(ax, "y", log_y, panel.heights(of_row))
    if order:
        name_categories(ax, built, slot, order)
    draw_switches(ax, panel)


def simulated_on(built: BuiltFigure, slot: PanelSlot) -> str:
    """The devices whose step times a panel's simulated load has; empty if it is not simulated."""
    calls = [c for name, c in built.figure.calls.items() if built.figure.row(name) == slot.quantity]
    files = {
        call.settings["profile"].get(model)
        for call in calls
        if call.name in SIMULATED
        for model in slot.models
    }
    return ", ".join(sorted({device_of_step_profile(file) for file in files if file}))


def panel_title(built: BuiltFigure, slot: PanelSlot, room: int, common: str) -> str:
    """Its names, and what was measured unless that is `common` to all panels."""
    names = " = ".join(built.figure.label(name) for name in slot.names)
    same = f"the runs of {built.figure.label(slot.same_runs)}" if slot.same_runs else slot.origin
    own = "" if same == common else same
    parts = (textwrap.fill(part, room, break_on_hyphens=False) for part in (names, own))
    return "\n".join(part for part in parts if part)


def set_ticks(ax: Axes, axis: Literal["x", "y"], log: bool, values: Sequence[float]) -> None:
    """Plain numbers at the ticks of an axis, whole ones for whole values. A logarithmic axis starts
    with 0 if a value is 0 and has a tick at each value if they are few. `values`: of all panels,
    which so have one range there.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = sorted(set(values))
    if not log:
        if places and all(place == int(place) for place in places):
            ax.locator_params(axis, integer=True, min_n_ticks=1)
        return
    set_scale, set_limits = (
        (ax.set_xscale, ax.set_xlim) if axis == "x" else (ax.set_yscale, ax.set_ylim)
    )
    set_scale("log" if places[0] > 0 else "symlog", base=2)
    if places[0] > 0:
        room = LOG_ROOM * (places[-1] / places[0]) ** 0.05
        set_limits(places[0] / room, places[-1] * room)
    ticks = ax.xaxis if axis == "x" else ax.yaxis
    if len(places) <= FEW_TICKS:
        ticks.set_major_locator(FixedLocator(places))
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def name_categories(
    ax: Axes, built: BuiltFigure, slot: PanelSlot, order: Mapping[str, int]
) -> None:
    """Label the categories of the x axis, with the model and benchmark measured where there are
    several, and with the earlier category that has the same runs; a category without a number
    shows the reason. Several models: they are what was run, so their names come first.
    """
    labels = built.figure.facet_labels(built.figure.draw.x.facet)
    texts: list[str] = []
    runs: dict[frozenset[FigurePoint], str] = {}
    for x, place in order.items():
        points = [point for point in slot.points if point.x == x]
        measured = [point for point in points if point.measured and point.y is not None]
        own = [*_part_of_sources(measured, 0)] if len(slot.models) > 1 else []
        own += _part_of_sources(measured, 2) if len(slot.tasks) > 1 else []
        same = runs.setdefault(frozenset(replace(point, x="", at="") for point in measured), x)
        if measured and same != x:
            own = [f"= {labels.get(same, same)}"]
        star = " *" if any(point.switched for point in measured) else ""
        words = [f"{labels.get(x, x)}{star}", " on ".join(own)]
        if len(slot.models) > 1:
            words = [words[1], f"paper: {words[0]}"]
        texts.append("\n".join(filter(None, words)))
        reasons = [point.reason for point in points if point.measured]
        if reasons and not measured:
            ax.text(place - 0.1, 0.02, reasons[0], rotation=90, fontsize=5.5, color=style.FAINT,
                    ha="right", transform=ax.get_xaxis_transform())  # fmt: skip
    slanted = len(order) > MAX_UPRIGHT
    ax.set_xticks(range(len(order)), texts)
    if slanted:
        ax.tick_params(axis="x", labelrotation=30)
        for text in ax.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, len(order) - 0.4)


def write_reasons(ax: Axes, reasons: Sequence[str]) -> None:
    """Write in place of a panel's numbers that there are none, and why."""
    ax.set_axis_off()
    lines = ("no measured point:", *dict.fromkeys(reason for reason in reasons if reason))
    text = "\n".join(textwrap.fill(line, LABEL_CHARACTERS) for line in lines)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=style.FAINT, transform=ax.transAxes)


def draw_below(drawn: Figure, built: BuiltFigure) -> None:
    """Draw legend, what the paper states and footnote in a strip that is added below the panels."""
    width, height = drawn.get_size_inches()
    room = round(FOOTER_CHARACTERS * width)
    texts = (stated(built), footnote(built))
    lines = [line for text in texts for line in textwrap.wrap(text, room)]
    entries = legend_entries(built)
    widest = max((len(str(entry.get_label())) for entry in entries), default=0)
    columns = int(LEGEND_CHARACTERS * width / (widest + SWATCH_CHARACTERS))
    columns = max(1, min(len(entries), columns))
    origin = common_origin(grid(built))
    named = textwrap.wrap(origin, round(LEGEND_CHARACTERS * width), break_on_hyphens=False)
    foot = FOOTER_LINE * len(lines) + 0.08
    strip = foot + LEGEND_LINE * (len(named) - (-len(entries) // columns))
    height += strip
    drawn.set_size_inches(width, height)
    rect = (0, strip / height, 1, 1 - strip / height)
    cast("ConstrainedLayoutEngine", drawn.get_layout_engine()).set(rect=rect)
    text = drawn.text(0.5, 0.04 / height, "\n".join(lines), ha="center", va="bottom")
    text.set(fontsize=6, color=style.FOOT)
    if entries or named:
        drawn.legend(handles=entries, loc="lower center", bbox_to_anchor=(0.5, foot / height),
                     borderaxespad=0, ncols=columns, title="\n".join(named))  # fmt: skip


def legend_entries(built: BuiltFigure) -> list[Artist]:
    """The series, the Pareto front, and how the paper's numbers look."""
    kind = PANEL_KINDS[built.figure.draw.kind]
    named = [(name, built.figure.label(name)) for name in series_names(built) if name]
    if kind.numbered:
        named = [(name, f"{n} {label}") for n, (name, label) in enumerate(named, start=1)]
    ours = {point.series for point in built.drawn(measured=True)}
    entries = [kind.swatch(style.look(name), label, name not in ours) for name, label in named]
    if built.figure.draw.front:
        entries.append(front_swatch())
    shared = [point for point in built.drawn(measured=False) if point.series in ours]
    for paper in dict.fromkeys(point.kind for point in shared):
        entries.append(reported_swatch(f"the paper's, {paper}", kind.swatch is box_swatch))
    return entries


def stated(built: BuiltFigure) -> str:
    """What the paper's text says of the figure, in one line; the numbers of one kind together."""
    values: dict[str, list[str]] = {}
    for number in built.figure.stated:
        values.setdefault(number.text + measured_over(built, number), []).append(number.value)
    said = [text.format(", ".join(numbers)) for text, numbers in values.items()]
    return f"The paper's text: {'; '.join(said)}." if said else ""


def measured_over(built: BuiltFigure, number: StatedNumber) -> str:
    """The first and the last value that a series has over a stated range of x, in words."""
    inside = [
        (float(point.x), float(point.y or 0))
        for point in built.drawn(measured=True)
        if (point.series, point.quantity) == (number.series, number.quantity)
        and isinstance(point.x, int | float)
        and number.low <= point.x <= number.high
    ]
    if not number.series or not inside:
        return ""
    return f" (measured here: from {min(inside)[1]:.3g} to {max(inside)[1]:.3g})"


def measured_on(built: BuiltFigure) -> str:
    """The hardware, and how many samples are behind a point; empty if nothing was measured."""
    points = built.drawn(measured=True)
    if not points:
        return ""
    numbers = sorted({point.n for point in points if point.n})
    units = {COUNTED.get(call.name, "samples") for call in built.figure.calls.values()}
    ends = "–".join(f"{n}" for n in dict.fromkeys([*numbers[:1], *numbers[-1:]]))
    behind = f"; n = {ends} ({', '.join(sorted(units)) or 'samples'})" if ends else ""
    devices = {simulated_on(built, slot) for row in grid(built) for slot in row if slot} - {""}
    simulated = f"Simulated on step times of {', '.join(sorted(devices))}; drafts " * bool(devices)
    on = f"{simulated}measured on {'; '.join(built.built.hardware) or 'unknown hardware'}{behind}."
    return on[0].upper() + on[1:]


def footnote(built: BuiltFigure) -> str:
    """The hardware measured on, and how many points have no number."""
    empty = len(built.without_number())
    missing = f"{empty} points have no number here; the csv says why." if empty else ""
    switched = len({p.switched for p in built.drawn(measured=True)}) > 1
    mark = "*" if categories(built) else "Below a tick"
    other = f"{mark}: a setting in place of the paper's (csv: switched)." if switched else ""
    return " ".join(filter(None, (measured_on(built), other, missing)))
