"""Draw points as svg and png (layout of the panels, titles, axes, legend, footnote), write the
files of a figure, and report on it.

There is a row of panels per quantity. The paper's numbers are drawn as hollow marks over the
measured ones; only those of another target have their own panel, with the same range. Panels with
the same points are merged under both names. If there is no number, the reason is written instead.
`panels` draws the content of a panel, `style` defines the look of a series. Equal points give equal
bytes.

The files are `<folder>/<profile>/<paper>/<figure>.{csv,svg,png}`. The csv holds every point, with
or without a number, so everything in the drawing can be read from it. `why_kept` says whether files
written earlier have points that would be lost.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from dllm_bench.figures import panels, style
from dllm_bench.figures.panels import PANEL_KINDS, Panel
from dllm_bench.figures.points import BLANK, MEASURED, NO_REPLAY, STATED, BuiltFigure
from dllm_bench.figures.run_series import COUNTED, SIMULATED, Point
from dllm_bench.figures.spec import PaperFigure, StatedNumber
from dllm_bench.methods.drafting import device_of_step_profile
from dllm_bench.store.files import csv_rows, csv_text, write_atomic
from dllm_bench.tables.plan import CellState
from dllm_bench.tables.render import progress

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from pandas import DataFrame

TITLE_CHARACTERS, LEGEND_CHARACTERS, FOOTER_CHARACTERS = 11, 17, 20  # per inch
SWATCH_CHARACTERS = 7  # width of the piece of line beside a label
TITLE_INCHES, LEGEND_LINE, FOOTER_LINE = 0.4, 0.18, 0.11  # heights
LABEL_CHARACTERS = 26  # per line of a y axis label
PANEL_TITLE_CHARACTERS = 14  # per inch
LOG_ROOM = 1.02  # least factor between the outermost values and the ends of a logarithmic axis
FEW_TICKS = 7  # a logarithmic axis with at most this many places has a tick at each
MAX_UPRIGHT = 4  # more category names than this are slanted
SLANT_INCHES = 0.45  # more height for slanted names
DIGITS = 6  # of a number in the csv, after the point


def origin(panel: Panel) -> str:
    """Return the line below a panel's title: the models and tasks measured, or a note that the
    numbers are the paper's."""
    if not panel.placed.empty and panel.measured.empty:
        kinds = ", ".join(sorted(set(panel.placed.kind)))
        reasons = [r for r in panel.points.reason[panel.points.kind == MEASURED] if r]
        return "; ours: ".join([f"the paper's ({kinds})", *reasons[:1]])
    models, tasks = measured_names(panel.measured)
    if panel.built.categories and len(models) > 1:  # the axis names them
        models, tasks = [], tasks if len(tasks) == 1 else []
    return " on ".join(filter(None, map(", ".join, (models, tasks))))


def measured_names(points: DataFrame) -> tuple[list[str], list[str]]:
    """Return the models and the benchmarks measured."""
    parts = [source.partition(" on ") for source in points.source]
    names = [{name for part in parts for name in part[i].split(", ")} - {""} for i in (0, 2)]
    return sorted(names[0]), sorted(names[1])


def grid(built: BuiltFigure) -> list[list[Panel | None]]:
    """Return the panels in a row per quantity, with None for panels that the figure lacks. If there
    is only one panel, its quantities are in one row; a figure without any number is one panel.
    """
    if built.placed.empty:
        return [[Panel(built, next(iter(built.figure.quantities)), ("",), built.points)]]
    groups = merged_panels(built)
    rows = [
        [_panel(built, quantity, names, groups) for names in groups]
        for quantity in built.figure.quantities
    ]
    return rows if len(groups) > 1 else [[panel for row in rows for panel in row]]


def merged_panels(built: BuiltFigure) -> list[tuple[str, ...]]:
    """Return the names of each panel. Panels with the same measured and reported points are merged;
    panels without a number are not.
    """
    merged: dict[frozenset[Any] | str, list[str]] = {}
    for name in built.panels or [""]:
        own = built.placed[built.placed.panel == name]
        merged.setdefault(_distinct(built, own, "panel") or name, []).append(name)
    return [tuple(names) for names in merged.values()]


def _distinct(built: BuiltFigure, points: DataFrame, *without: str) -> frozenset[Any]:
    """Return the distinct points, ignoring the columns `without`."""
    compared = built.points.loc[points.index].drop(columns=list(without))
    return frozenset(compared.itertuples(index=False, name=None))


def _panel(
    built: BuiltFigure, quantity: str, names: tuple[str, ...], groups: Sequence[tuple[str, ...]]
) -> Panel | None:
    ours = built.drawn(measured=True)

    def measured_in(panel: str) -> frozenset[Any]:
        return _distinct(built, ours[ours.panel == panel], "panel")

    mine, earlier = measured_in(names[0]), [other[0] for other in groups[: groups.index(names)]]
    same = next((name for name in earlier if mine and measured_in(name) == mine), "")
    points = built.points
    points = points[(points.quantity == quantity) & (points.panel == names[0])]
    return None if points.empty else Panel(built, quantity, names, points, same)


def common_origin(rows: Sequence[Sequence[Panel | None]]) -> str:
    """Return the models and tasks measured if they are the same in all panels, to be written
    once."""
    shown = (panel for row in rows for panel in row if panel)
    origins = {origin(panel) for panel in shown if not panel.measured.empty}
    return origins.pop() if len(origins) == 1 else ""


def images(built: BuiltFigure) -> dict[str, bytes]:
    """Return {file format: content of the drawing}."""
    with style.applied():
        drawn = drawing(built)
        return {form: style.as_file(drawn, form) for form in style.FORMATS}


def drawing(built: BuiltFigure) -> Figure:
    """Return the drawing, to be made inside of `style.applied`."""
    slots, kind = grid(built), PANEL_KINDS[built.figure.draw.kind]
    wide, high = style.PANEL_INCHES
    names = len(built.categories)
    panel_width = max(kind.wide, kind.per_category * names) * wide
    width = panel_width * len(slots[0]) + 0.3
    height = (high + (SLANT_INCHES if names > MAX_UPRIGHT else 0)) * len(slots) + TITLE_INCHES
    drawn = style.empty_figure(width, height)
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
            draw_panel(ax, slot)
            text = panel_title(slot, room, common_origin(slots))
            if (column, text) not in titled:  # below a panel of the same title it needs none
                ax.set_title(text, color=style.INK)
            titled.add((column, text))
        if kind.one_range:
            share_ranges(list(row), row_slots)
        for ax, slot in zip(row, row_slots, strict=True):
            if slot and not slot.placed.empty:
                panels.draw_stated(ax, slot)
    draw_below(drawn, built)
    drawn.draw_without_rendering()  # now the axes have their places
    for ax in axes.flat:
        panels.separate_intervals(ax)
        if kind.numbered:
            panels.separate_numbers(ax)
    return drawn


def share_ranges(axes: Sequence[Axes], slots: Sequence[Panel | None]) -> None:
    """Give the panels of a quantity the same y range and, if a panel has only the paper's numbers,
    the same x range, so that they can be compared.
    """
    shown = [ax for ax, slot in zip(axes, slots, strict=True) if slot and not slot.placed.empty]
    if not shown or len({slot.quantity for slot in slots if slot}) > 1:
        return
    ys = [end for ax in shown for end in ax.get_ylim()]
    xs = [end for ax in shown for end in ax.get_xlim()]
    apart = any(s and not s.placed.empty and s.measured.empty for s in slots)
    for ax in shown:
        ax.set_ylim(min(ys), max(ys))
        if apart:
            ax.set_xlim(min(xs), max(xs))


def draw_panel(ax: Axes, panel: Panel) -> None:
    """Draw one panel."""
    built, figure = panel.built, panel.built.figure
    if panel.placed.empty:
        write_reasons(ax, panel.points.reason)
        return
    if figure.draw.front:
        panels.pareto_front(ax, panel)
    PANEL_KINDS[figure.draw.kind].fill(ax, panel)
    ax.set_xlabel(figure.draw.x.label)
    simulated = f", simulated on {devices}" if (devices := simulated_on(panel)) else ""
    ax.set_ylabel(textwrap.fill(figure.quantities[panel.quantity] + simulated, LABEL_CHARACTERS))
    rows = built.placed[built.placed.quantity == panel.quantity]
    set_ticks(ax, "x", figure.draw.x.log, [] if built.categories else built.placed.place)
    set_ticks(ax, "y", panel.log_y, rows.y, [*rows.low, *rows.high])
    if built.categories:
        name_categories(ax, panel)
    panels.draw_switches(ax, panel)


def simulated_on(panel: Panel) -> str:
    """Return the devices on which the step times of a panel's simulated load were measured; empty
    if it is not simulated."""
    figure = panel.built.figure
    files = {
        call.settings.get("profile", {}).get(model)
        for name, call in figure.calls.items()
        if figure.row(name) == panel.quantity and call.name in SIMULATED
        for model in measured_names(panel.measured)[0]
    }
    return ", ".join(sorted({device_of_step_profile(file) for file in files if file}))


def panel_title(panel: Panel, room: int, common: str) -> str:
    """Return the panel's names, and what was measured unless that is `common` to all panels."""
    label = panel.built.figure.label
    same = f"the runs of {label(panel.same_runs)}" if panel.same_runs else origin(panel)
    own = "" if same == common else same
    titles = (" = ".join(map(label, panel.names)), own)
    parts = (textwrap.fill(part, room, break_on_hyphens=False) for part in titles)
    return "\n".join(part for part in parts if part)


def set_ticks(ax: Axes, axis: Literal["x", "y"], log: bool, values: Any, ends: Any = ()) -> None:
    """Label the ticks of an axis with plain numbers, integers for integer values.

    A logarithmic axis starts with 0 if a value is 0, and has a tick at each value if there are few.
    `values`: numbers of all panels, which share the range. `ends`: of their intervals, as far as
    which a logarithmic axis reaches.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    places = sorted(set(values))
    ticks = ax.xaxis if axis == "x" else ax.yaxis
    if not places or isinstance(ticks.get_major_locator(), FixedLocator):  # a reliability diagram's
        return
    if not log:
        if all(place == int(place) for place in places):
            ax.locator_params(axis, integer=True, min_n_ticks=1)
        return
    (ax.set_xscale if axis == "x" else ax.set_yscale)("log" if places[0] > 0 else "symlog", base=2)
    if places[0] > 0:
        reach = [end for end in (*places, *ends) if end > 0]
        room = LOG_ROOM * (max(reach) / min(reach)) ** 0.05
        ax.set(**{f"{axis}lim": (min(reach) / room, max(reach) * room)})
    if len(places) <= FEW_TICKS:
        ticks.set_major_locator(FixedLocator(places))
    ticks.set_minor_locator(NullLocator())
    ticks.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def name_categories(ax: Axes, panel: Panel) -> None:
    """Label the categories of the x axis.

    Where there are several models or benchmarks, a label names those measured; models come first,
    as they are what was run. It also names the earlier category that has the same runs. A category
    without a number shows the reason.
    """
    order, figure = panel.built.categories, panel.built.figure
    labels = figure.facet_labels(figure.draw.x.facet)
    models, tasks = (len(names) > 1 for names in measured_names(panel.measured))
    texts: list[str] = []
    runs: dict[frozenset[Any], str] = {}
    for place, x in enumerate(order):
        measured = panel.measured[panel.measured.x == x]
        own_models, own_tasks = measured_names(measured)
        own = own_models * models + own_tasks * tasks
        same = runs.setdefault(_distinct(panel.built, measured, "x", "at"), x)
        if not measured.empty and same != x:
            own = [f"= {labels.get(same, same)}"]
        star = " *" if any(measured.switched) else ""
        words = [f"{labels.get(x, x)}{star}", " on ".join(own)]
        if models:
            words = [words[1], f"paper: {words[0]}"]
        texts.append("\n".join(filter(None, words)))
        asked = panel.points[(panel.points.x == x) & (panel.points.kind == MEASURED)]
        if len(asked) and measured.empty:
            reason = ax.text(place - 0.1, 0.02, asked.reason.iloc[0], rotation=90, fontsize=5.5)
            reason.set(color=style.FAINT, ha="right", transform=ax.get_xaxis_transform())
    ax.set_xticks(range(len(order)), texts)
    if len(order) > MAX_UPRIGHT:
        ax.tick_params(axis="x", labelrotation=30)
        for text in ax.get_xticklabels():
            text.set(ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, len(order) - 0.4)


def write_reasons(ax: Axes, reasons: Iterable[str]) -> None:
    """Write into a panel without numbers the reason why there are none."""
    ax.set_axis_off()
    lines = ("no measured point:", *dict.fromkeys(reason for reason in reasons if reason))
    text = "\n".join(textwrap.fill(line, LABEL_CHARACTERS) for line in lines)
    ax.text(0.5, 0.5, text, ha="center", va="center", color=style.FAINT, transform=ax.transAxes)


def draw_below(drawn: Figure, built: BuiltFigure) -> None:
    """Draw legend, stated numbers of the paper and footnote in a strip below the panels."""
    width, height = drawn.get_size_inches()
    room = round(FOOTER_CHARACTERS * width)
    texts = (stated(built), footnote(built))
    lines = [line for text in texts for line in textwrap.wrap(text, room)]
    entries = legend_entries(built)
    widest = max((len(str(entry.get_label())) for entry in entries), default=0)
    columns = int(LEGEND_CHARACTERS * width / (widest + SWATCH_CHARACTERS))
    columns = max(1, min(len(entries), columns))
    origins, room = common_origin(grid(built)), round(LEGEND_CHARACTERS * width)
    named = textwrap.wrap(origins, room, break_on_hyphens=False)
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
    """Return the legend entries of the series, the Pareto front, and the paper's numbers."""
    kind = PANEL_KINDS[built.figure.draw.kind]
    theirs = built.drawn(measured=False)
    shown = [name for name in built.series if name or len(theirs)]
    named = [(name, built.figure.label(name) or "measured here") for name in shown]
    if kind.numbered:
        named = [(name, f"{n} {label}") for n, (name, label) in enumerate(named, start=1)]
    ours = set(built.drawn(measured=True).series)
    entries = [kind.entry(style.look(name), label, name not in ours) for name, label in named]
    if built.figure.draw.front:
        entries.append(panels.line_entry("Pareto front", panels.FRONT_LINE))
    hollow = panels.line_settings(style.Look(style.INK, "o"), reported=True)
    mark = panels.REPORTED_BAR if kind.fill is panels.bars else hollow
    for paper in theirs.kind[theirs.series.isin(ours)].unique():
        entries.append(panels.line_entry(f"the paper's, {paper}", mark))
    return entries


def stated(built: BuiltFigure) -> str:
    """Return the stated numbers of the paper's text in one line, grouped by kind."""
    values: dict[str, list[str]] = {}
    for number in built.figure.stated:
        values.setdefault(number.text + measured_over(built, number), []).append(number.value)
    said = [text.format(", ".join(numbers)) for text, numbers in values.items()]
    return f"The paper's text: {'; '.join(said)}." if said else ""


def measured_over(built: BuiltFigure, number: StatedNumber) -> str:
    """Return the first and the last value that a series has over a stated range of x, in words."""
    ours = built.drawn(measured=True)
    named = (ours.series == number.series) & (ours.quantity == number.quantity)
    inside = ours[named & ours.place.between(number.low, number.high)].sort_values(["place", "y"])
    if not number.series or inside.empty:
        return ""
    return f" (measured here: from {inside.y.iloc[0]:.3g} to {inside.y.iloc[-1]:.3g})"


def measured_on(built: BuiltFigure) -> str:
    """Return the hardware and the number of samples per point; empty if nothing was measured."""
    points = built.drawn(measured=True)
    if points.empty:
        return ""
    numbers = sorted(set(points.n) - {0})
    units = {COUNTED.get(call.name, "samples") for call in built.figure.calls.values()}
    ends = "–".join(f"{n}" for n in dict.fromkeys([*numbers[:1], *numbers[-1:]]))
    count = f"; n = {ends} ({', '.join(sorted(units)) or 'samples'})" if ends else ""
    devices = {simulated_on(panel) for row in grid(built) for panel in row if panel} - {""}
    simulated = f"Simulated on step times of {', '.join(sorted(devices))}; drafts " * bool(devices)
    on = f"{simulated}measured on {'; '.join(built.built.hardware) or 'unknown hardware'}{count}."
    return on[0].upper() + on[1:]


def footnote(built: BuiltFigure) -> str:
    """Return the hardware measured on, and the number of points without a number."""
    empty = len(built.without_number)
    missing = f"{empty} points have no number here; the csv says why." if empty else ""
    switched = built.drawn(measured=True).switched.nunique() > 1
    mark = "*" if built.categories else "Below a tick"
    other = f"{mark}: a setting in place of the paper's (csv: switched)." if switched else ""
    return " ".join(filter(None, (measured_on(built), other, missing)))


# --- files, and lines for the terminal -----------------------------------------------------------


def file_of(built: BuiltFigure, folder: Path, form: str) -> Path:
    """Return the file with one format of a figure."""
    return folder / built.built.profile.name / f"{built.figure.name}.{form}"


def write(built: BuiltFigure, folder: Path) -> list[Path]:
    """Write all formats, each file atomically; returns their paths."""
    forms = {"csv": as_csv(built).encode(), **images(built)}
    return [write_atomic(file_of(built, folder, form), forms[form]) for form in forms]


def why_kept(built: BuiltFigure, folder: Path) -> str:
    """Return the reason to keep the files of an earlier drawing: they have measured points of a run
    that is sealed but now gives none, or that failed when made again. Empty if nothing would be
    lost.
    """
    path = file_of(built, folder, "csv")
    states = (CellState.SEALED, CellState.FAILED)
    open_points = built.without_number.itertuples()
    reasons = {p.run: p.reason for p in open_points if p.state in states}
    drawn = set(map(_line_of, built.drawn(measured=True).to_dict("records")))
    earlier = [row for row in measured_rows(path) if _line_of(row) not in drawn]
    lost = {row["run"]: reasons[row["run"]] for row in earlier if row["run"] in reasons}
    if not lost:
        return ""
    why = "; ".join(dict.fromkeys(lost.values()))
    return (
        f"{path} was not written again, since it has points of {len(lost)} runs that would be lost "
        f"({why}); move it away to draw the figure without them."
    )


def measured_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a figure's csv with a measured number; none without the file."""
    return [row for row in csv_rows(path) if row.get("kind") == MEASURED and row.get("y")]


def _line_of(point: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the common key of the points of one series of a run."""
    return tuple(point.get(name, "") for name in ("panel", "series", "quantity", "run"))


def as_csv(built: BuiltFigure) -> str:
    """Return the csv: one line per point."""
    points = (*built.points.to_dict("records"), *stated_points(built.figure))
    rows = ({name: _plain(value) for name, value in {**BLANK, **one}.items()} for one in points)
    return csv_text(list(BLANK), rows)


def stated_points(figure: PaperFigure) -> Iterator[Point]:
    """Yield the stated numbers as lines of the csv: a place on one axis, or low and high of a
    range."""
    for number in figure.stated:
        single = {number.axis: number.low} if number.axis else {}
        yield {
            "panel": number.panel,
            "quantity": number.quantity,
            **(single if number.low == number.high else {"low": number.low, "high": number.high}),
            "kind": STATED,
            "reason": number.sentence,
            "source": figure.table.source,
            "at": number.axis,
        }


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else ""
    return round(value, DIGITS) if isinstance(value, float) else value


def headline(built: BuiltFigure) -> str:
    """Return one line: how many points are measured, reported, without number, and the runs'
    states."""
    measured, reported = (len(built.drawn(measured=ours)) for ours in (True, False))
    without = len(built.without_number)
    points = f"{measured} points measured, {reported} reported, {without} without number"
    return f"{built.figure.name}: {points}; {progress(built.built)}"


def lines(built: BuiltFigure) -> Iterator[str]:
    """Yield lines about what was drawn, and what could not be drawn and why."""
    yield built.figure.table.title
    yield headline(built)
    empty = built.without_number
    lacking = empty.run[empty.reason == NO_REPLAY].nunique()
    if lacking:
        yield f"{lacking} runs lack a token replay, which --run records"
    unread = empty[(empty.state == CellState.SEALED) & (empty.reason != NO_REPLAY)]
    reasons = dict(zip(unread.run, unread.reason, strict=True))
    for reason in dict.fromkeys(reasons.values()):
        yield f"{list(reasons.values()).count(reason)} runs: {reason}"
