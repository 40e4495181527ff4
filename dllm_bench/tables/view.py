"""What every format of a built table shares: blocks of rows, numbers as text, remarks.

A block is one combination of section and column facets (LoPA Table 4: a model and a benchmark). A
row in it is one run, or several if some metrics have runs of their own. The measured numbers come
first, then the reported ones if the block has any; each of the two groups of columns names its own
model and benchmark. Markup is added by the renderers (`render_*`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dllm_bench.tables.build import (
    LOAD_PER_CORE,
    UNDEFINED,
    BuiltCell,
    BuiltTable,
    CellVerdict,
)
from dllm_bench.tables.cost import cost_in_words
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun, distinct_runs
from dllm_bench.tables.spec import Cell, FacetValue, Query, TableMetric

DECIMALS = 1  # of measured numbers; more would be noise
OWN_DECIMALS = {  # of units whose numbers are small, or never broken
    "tokens/forward": 2,
    "tokens/round": 2,
    "×": 2,
    "s": 3,  # a small model's
    "ms": 2,
    "share": 3,
    "nats": 4,
    "bytes": 0,
    "bytes/forward": 0,
}
SHOWN_HASH = 10  # characters
SHOWN_RUNS = 3  # of a row; the json file has all of them
DISTURBED = "†"  # behind a number of times from a busy machine
NO_CELL = "–"  # shown where the table has no number at all
MARKS = {
    CellVerdict.EQUAL: "eq",
    CellVerdict.INSIDE_CI: "ci",
    CellVerdict.INSIDE_TOLERANCE: "tol",
    CellVerdict.OUTSIDE: "out",
    CellVerdict.NOT_COMPARABLE: "nc",
    CellVerdict.NONE: "",
}
LEGEND = (
    "ci: the reported value lies inside our 95 % interval; tol: inside the table's tolerance; "
    "eq: the setting is the reported one; out: none of these; nc: not comparable"
)


@dataclass(frozen=True)
class TableRow:
    """One combination of values of the row facets."""

    key: Query
    """Names of the facet values."""
    heads: Query
    """The texts in the first columns."""
    notes: Query
    """Notes on the whole row."""
    cells: tuple[BuiltCell, ...]
    """A cell per metric."""
    reported: tuple[BuiltCell, ...]
    """The same cells for the reported columns; empty in a block without reported values."""

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs of the row's own numbers, without the runs that they are compared with."""
        own = [c.planned for c in self.cells if not c.cell.metric.is_compared]
        return distinct_runs(own or [cell.planned for cell in self.cells])


@dataclass(frozen=True)
class TableBlock:
    """Rows under one pair of column groups, measured and reported."""

    section: str
    """Label of the section."""
    paper: str
    """Labels of the column facets' values: the group of columns in the paper."""
    here: Query
    """Model and benchmark that all measured numbers have in common."""
    heads: Query
    """Labels of the first columns."""
    metrics: Query
    """Labels of the metrics."""
    rows: tuple[TableRow, ...]
    """The rows; at least one."""

    @property
    def measured_on(self) -> str:
        """Model and benchmark of the measured columns."""
        runs = any(run.query for row in self.rows for run in row.runs)
        return " on ".join(self.here) or ("several models" if runs else "not run here")

    @property
    def title(self) -> str:
        """Section and column group of the paper."""
        return ", ".join(filter(None, (self.section, self.paper)))

    @property
    def groups(self) -> tuple[tuple[str, str], ...]:
        """The column groups: (measured or reported, model and benchmark)."""
        measured = ("Measured", self.measured_on)
        reported = ("Reported", self.title)
        return (measured, reported) if self.rows[0].reported else (measured,)

    @property
    def labels(self) -> Query:
        """Column labels, with "(%)" for percentages."""
        cells = self.rows[0].cells
        return tuple(
            f"{label} (%)" if cell.unit == "%" else label
            for label, cell in zip(self.metrics, cells, strict=True)
        )

    @property
    def reported_labels(self) -> Query:
        """Labels of the reported columns; none if nothing is reported."""
        return self.labels if self.rows[0].reported else ()

    @property
    def cells(self) -> list[BuiltCell]:
        """All cells, row by row."""
        return [cell for row in self.rows for cell in row.cells]

    @property
    def _verdicts(self) -> set[tuple[CellVerdict, str]]:
        """The distinct (verdict, reason) of the cells that have one."""
        return {
            (cell.verdict, cell.why) for cell in self.cells if cell.verdict is not CellVerdict.NONE
        }

    def verdict(self) -> str:
        """The verdict that all compared cells share, in words; empty if they differ."""
        if len(self._verdicts) != 1:
            return ""
        [(verdict, why)] = self._verdicts
        return f"{verdict} ({why})" if why else str(verdict)

    def verdict_remark(self) -> str:
        """The remark on the verdicts: the common one, or what the marks mean; empty if nothing was
        compared.
        """
        if not self._verdicts:
            return ""
        common = self.verdict()
        return f"Verdict: {common}." if common else f"Marks: {LEGEND}."


def blocks(built: BuiltTable) -> list[TableBlock]:
    """All blocks that have a cell, section by section."""
    table = built.table
    by_key = {(*cell.cell.keys.values(), cell.cell.metric.name): cell for cell in built.cells}
    shown = {name: _shown(values, built.cells, name) for name, values in table.facets.items()}
    outer_facets = (*table.sections, *table.columns)
    found = []
    for outer in product(*(shown[facet] for facet in outer_facets)):
        fixed = dict(zip(outer_facets, outer, strict=True))
        rows = []
        for inner in product(*(shown[facet] for facet in table.rows)):
            values = {**fixed, **dict(zip(table.rows, inner, strict=True))}
            names = tuple(values[facet].name for facet in table.facets)
            cells = [by_key.get((*names, metric.name)) for metric in table.metrics]
            if any(cells):
                pairs = zip(cells, table.metrics, strict=True)
                rows.append(_row(inner, [cell or _blank(metric) for cell, metric in pairs]))
        if not any(cell.cell.reported for row in rows for cell in row.cells):
            rows = [replace(row, reported=()) for row in rows]
        if rows:
            found.append(_block(built, outer, _with_measured_on(rows)))
    return found


def _shown(
    values: Iterable[FacetValue], cells: Iterable[BuiltCell], facet: str
) -> list[FacetValue]:
    """The values of a facet that any cell shown has."""
    names = {cell.cell.keys[facet] for cell in cells}
    return [value for value in values if value.name in names]


def _row(values: Sequence[FacetValue], cells: Sequence[BuiltCell]) -> TableRow:
    heads = (*(v.label for v in values), *(text for v in values for text in v.shown.values()))
    key = tuple(value.name for value in values)
    return TableRow(key, heads, common_notes(cells), tuple(cells), reported=tuple(cells))


def _blank(metric: TableMetric) -> BuiltCell:
    """The place of a number that a row does not have."""
    run = PlannedRun((), CellState.REPORTED_ONLY, NO_CELL, "the table has no such cell")
    return BuiltCell(PlannedCell(Cell({}, metric, (), None, ()), run), "", why=run.reason)


def _with_measured_on(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """The rows; if they were measured with different models or benchmarks, each has one more column
    that says with which, because the header cannot.
    """
    common = measured_on(run for row in rows for run in _runs_of(row))
    own = [measured_on(_runs_of(row)) for row in rows]
    if all(names == common for names in own if names):
        return tuple(rows)
    texts = [" on ".join(n for n in names if n not in common) or NO_CELL for names in own]
    return tuple(replace(row, heads=(*row.heads, t)) for row, t in zip(rows, texts, strict=True))


def _runs_of(row: TableRow) -> list[PlannedRun]:
    return [cell.run for cell in row.cells]


def _block(
    built: BuiltTable, outer: Sequence[FacetValue], rows: tuple[TableRow, ...]
) -> TableBlock:
    table = built.table
    split = len(table.sections)
    shown = [title for facet in table.rows for title in _shown_titles(table.facets[facet])]
    heads = (*(facet.replace("_", " ").capitalize() for facet in table.rows), *shown)
    return TableBlock(
        section=", ".join(value.label for value in outer[:split]),
        paper=", ".join(value.label for value in outer[split:]),
        here=measured_on(run for row in rows for run in _runs_of(row)),
        heads=(*heads, *("Measured with",) * (len(rows[0].heads) - len(heads))),
        metrics=tuple(metric.label for metric in table.metrics),
        rows=rows,
    )


def _shown_titles(values: Iterable[FacetValue]) -> Query:
    """Titles of the additional columns of a facet."""
    return next((tuple(value.shown) for value in values if value.shown), ())


def measured_on(runs: Iterable[PlannedRun]) -> Query:
    """Model and benchmark that the runs have in common; empty if none of them can run."""
    chosen = [run.chosen for run in runs if run.query]
    names = [{choice.get(key, "") for choice in chosen} for key in ("model", "benchmark")]
    return tuple(name for one in names if len(one) == 1 for name in one if name)


def common_notes(cells: Sequence[BuiltCell]) -> Query:
    """Notes that all of the cells have, in the order of the first cell."""
    return tuple(
        dict.fromkeys(n for n in cells[0].cell.notes if all(n in c.cell.notes for c in cells))
    )


def own_notes(cell: BuiltCell, shown: Query) -> Query:
    """Notes of the cell that are not shown for its whole row."""
    return tuple(dict.fromkeys(name for name in cell.cell.notes if name not in shown))


def number(value: float, unit: str) -> str:
    """A number with the decimals of its unit; a number that is rounded to zero has no sign."""
    return f"{value:z.{OWN_DECIMALS.get(unit, DECIMALS)}f}"


def measured_text(cell: BuiltCell) -> str:
    """The measured number, or what an empty cell shows."""
    if cell.setting or cell.measured is None:
        return cell.setting or cell.run.short or "undefined"
    text = number(cell.measured, cell.unit)
    change = cell.cell.metric.minus or cell.cell.metric.gain
    sign, mark = "+" if change and cell.measured > 0 else "", DISTURBED if cell.is_disturbed else ""
    return f"{sign}{text}{mark}"


def is_empty(cell: BuiltCell) -> bool:
    """True for a cell that shows why it has no number."""
    return cell.measured is None and not cell.setting


def interval_text(cell: BuiltCell) -> str:
    """The interval in brackets; empty if there is none."""
    ends = ", ".join(number(end, cell.unit) for end in cell.interval or ())
    return f"[{ends}]" if ends else ""


def reported_text(cell: BuiltCell) -> str:
    """The printed value."""
    if cell.run.short == NO_CELL:
        return NO_CELL
    return cell.cell.reported.text if cell.cell.reported else "not reported"


def link(built: BuiltTable, run: PlannedRun) -> str:
    """Path of the run's folder, relative to the rendered file."""
    up = "../" * (built.table.name.count("/") + 1)
    return f"{up}runs/{run.folder}"


def short_hash(run: PlannedRun) -> str:
    """The first characters of the run's hash; empty if there is no run."""
    return run.spec.identity_hash[:SHOWN_HASH] if run.spec else ""


def hashes(row: TableRow) -> str:
    """The hashes of the row's runs, as shown."""
    shown = [short_hash(run) for run in row.runs if run.spec]
    more = f" … ({len(shown)} runs)" if len(shown) > SHOWN_RUNS else ""
    return " ".join(shown[:SHOWN_RUNS]) + more or NO_CELL


def progress(built: BuiltTable) -> str:
    """How many runs are in which state."""
    states = built.states()
    if not states:
        return "nothing to run"
    return f"{sum(states.values())} runs: " + ", ".join(f"{n} {s}" for s, n in states.items())


def cost_lines(built: BuiltTable) -> list[str]:
    """The cost of open and of unavailable runs, how far such estimates are off, and what has to be
    trained before.
    """
    lines = []
    if built.open:
        lines.append(
            f"{len(built.open)} runs to make, {cost_in_words([run.cost for run in built.open])}"
        )
    costs = built.unavailable_costs
    if costs:
        where = f"{len(costs)} runs are unavailable here"
        lines.append(f"{where}; elsewhere: {cost_in_words(costs)}")
    if lines and built.check:
        check, ratio = built.check, "measured ÷ estimated seconds of"
        spread = f"{check.low:.1f} to {check.high:.1f} in 8 of 10"
        median = f"{check.median:.2f} in the middle"
        lines.append(f"{ratio} {check.runs} sealed runs: {median}, {spread}")
    lines += [f"train first: {source} (`dllm-bench train`)" for source in built.train_first]
    return lines


def profile_text(built: BuiltTable) -> str:
    """What the profile means for the columns."""
    reported = bool(built.table.reported)
    if built.profile.embedded:
        apart = " and are not to be compared with the reported columns, which are the paper's"
        return (
            "Profile `embedded`: the measured columns are small models and tasks that ship with "
            "the package, named in their headers. They show how the decoder behaves"
            f"{apart if reported else ''}."
        )
    what = "Reported columns are the paper's; what" if reported else "What"
    return (
        f"Profile `{built.profile.name}`: the published checkpoints and sizes. {what} this machine "
        "lacks shows `unavailable: needs …`."
    )


def _disturbed_lines(built: BuiltTable) -> list[str]:
    """What the mark of disturbed times means, if a cell has it."""
    count = sum(cell.is_disturbed for cell in built.cells if cell.measured is not None)
    meaning = f"began at a load average above {LOAD_PER_CORE:g} per core, which disturbs times"
    return [f"{DISTURBED} a run {meaning} ({count} cells)"] if count else []


def _passes_lines(built: BuiltTable) -> list[str]:
    """What the interval of a number of times is, if a run has several passes over its items."""
    cells = [cell for cell in built.cells if cell.interval and cell.cell.metric.is_of_times]
    specs = [run.spec for cell in cells for run in cell.planned.runs if run.spec]
    passes = sorted({spec.repeats for spec in specs} - {1})
    if not passes:
        return []
    counts = " or ".join(map(str, passes))
    return [
        f"Numbers of times are of {counts} passes over the items; their bracket is where a second "
        "measurement of as many passes is expected in 95 % of cases, variance between passes "
        "included."
    ]


def footer(built: BuiltTable, commands: bool = True) -> list[tuple[str, list[str]]]:
    """The remarks below a table: (heading, lines). `commands`: list the commands of open runs."""
    definitions = [
        f"{d.label} = `{d.name}`{f', {d.unit}' if d.unit else ''}: {d.text}"
        for d in built.definitions
    ]
    tail = (
        "Brackets: 95 % interval (Wilson for shares, else percentile bootstrap over samples; "
        "numbers derived from several runs draw the same items of a benchmark for all of them)."
    )
    bare = "Extremes (maximum, top-10, percentiles) are shown without one."
    parts = [
        ("Definitions", [*definitions, f"{tail} {bare}", *_passes_lines(built)]),
        ("Measured on", [*built.hardware, *_disturbed_lines(built)]),
        ("Code", [f"commit {code}" for code in built.code]),
        ("Inputs", list(built.inputs)),
        (
            "Reported" if built.table.reported else "Source",
            [built.table.source, *_reported_on(built)],
        ),
        ("Notes", [f"{note.name}: {note.text}" for note in built.table.notes]),
        ("Not graded", _ungraded_lines(built)),
        ("Undefined", _undefined_lines(built)),
        ("Reported only", list(built.reported_only)),
        ("Cannot run here", list(built.unavailable)),
        ("Still to run", _open_lines(built)[: None if commands else 1]),
    ]
    return [(title, lines) for title, lines in parts if lines]


def run_lines(built: BuiltTable) -> list[str]:
    """The hashes of each block's runs, row by row, for formats without a column for them."""
    return [
        f"{block.title}: " + ", ".join(f"{row.heads[0]} {hashes(row)}" for row in block.rows)
        for block in blocks(built)
    ]


def _reported_on(built: BuiltTable) -> list[str]:
    names = dict.fromkeys(cell.cell.reported_on for cell in built.cells)
    return [f"on {hardware}" for hardware in names if hardware]


def _ungraded_lines(built: BuiltTable) -> list[str]:
    """The runs behind scores that leave out samples whose grading failed, and how many."""
    runs = (run for cell in built.cells if cell.cell.metric.is_score for run in cell.runs)
    records = {run.record.spec.short: run.record for run in runs if run.record}
    return [f"{short}: {one.ungraded}" for short, one in records.items() if one.ungraded]


def _undefined_lines(built: BuiltTable) -> list[str]:
    """Why sealed runs give no number, and for which cells."""
    cells_by_reason: dict[str, list[str]] = {}
    for cell in built.cells:
        if cell.status == UNDEFINED:
            where = ", ".join(value.label for value in cell.cell.values.values())
            cells_by_reason.setdefault(cell.why, []).append(f"{where}, {cell.cell.metric.label}")
    return [f"{'; '.join(cells)}: {why}" for why, cells in cells_by_reason.items()]


def _open_lines(built: BuiltTable) -> list[str]:
    """The whole cost, then a line per open run."""
    lines = [
        f"`{run.command}` ({run.state}: {run.reason}; {cost_in_words([run.cost])})"
        for run in built.open
    ]
    return [*cost_lines(built), *lines]
