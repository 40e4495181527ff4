"""What every rendering of a built table shares: blocks of rows, and numbers as text.

A block is one combination of section and column facets (LoPA Table 4: a model and a benchmark), a
row in it one run: measured numbers first, reported ones (if the block has any) beside them, each
column group under its own model and benchmark. Markup belongs to the renderers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from dllm_bench.tables.build import BuiltCell, BuiltTable, Verdict
from dllm_bench.tables.plan import PlannedRun
from dllm_bench.tables.spec import Query

DECIMALS = 1  # of measured numbers; more would be noise
MORE_DECIMALS = {"tokens/forward": 2}  # of units whose numbers are small
SHOWN_HASH = 10
MARKS = {
    Verdict.INSIDE_CI: "ci",
    Verdict.INSIDE_TOLERANCE: "tol",
    Verdict.OUTSIDE: "out",
    Verdict.NOT_COMPARABLE: "nc",
    Verdict.NONE: "",
}
LEGEND = (
    "ci: the reported value lies inside our 95 % interval; tol: inside the table's tolerance; "
    "out: outside of both; nc: not comparable"
)


@dataclass(frozen=True)
class Row:
    """One run: leading entries, the notes of the whole row, a cell per metric.

    reported: the cells again, for the reported columns; empty in a block that has none.
    """

    heads: Query
    notes: Query
    cells: tuple[BuiltCell, ...]
    reported: tuple[BuiltCell, ...]

    @property
    def run(self) -> PlannedRun:
        return self.cells[0].run


@dataclass(frozen=True)
class Block:
    """Rows under one pair of column groups, measured `here` and reported by the `paper`."""

    section: str
    paper: str
    here: Query
    heads: Query
    metrics: Query
    rows: tuple[Row, ...]

    @property
    def measured_on(self) -> str:
        """Model and benchmark of the measured columns."""
        return " on ".join(self.here) or "not run here"

    @property
    def groups(self) -> tuple[tuple[str, str], ...]:
        """The column groups: (what the numbers are, of which model and benchmark)."""
        measured = ("Measured", self.measured_on)
        reported = ("Reported", f"{self.section}, {self.paper}")
        return (measured, reported) if self.rows[0].reported else (measured,)

    @property
    def labels(self) -> Query:
        """Column labels; percentages say so."""
        cells = self.rows[0].cells
        return tuple(
            f"{label} (%)" if cell.unit == "%" else label
            for label, cell in zip(self.metrics, cells, strict=True)
        )

    @property
    def reported_labels(self) -> Query:
        """Labels of the reported columns, none where nothing is reported."""
        return self.labels if self.rows[0].reported else ()

    @property
    def cells(self) -> list[BuiltCell]:
        return [cell for row in self.rows for cell in row.cells]

    @property
    def _verdicts(self) -> set[tuple[Verdict, str]]:
        """The verdicts given, each with what makes it so."""
        return {(cell.verdict, cell.why) for cell in self.cells if cell.verdict}

    def verdict(self) -> str:
        """The verdict that all cells with one share, in words; empty when they differ."""
        if len(self._verdicts) != 1:
            return ""
        [(verdict, why)] = self._verdicts
        return f"{verdict} ({why})" if why else str(verdict)

    def judgement(self) -> str:
        """What a reader has to know of the verdicts; empty where nothing was compared."""
        if not self._verdicts:
            return ""
        common = self.verdict()
        return f"Verdict: {common}." if common else f"Marks: {LEGEND}."


def blocks(built: BuiltTable) -> list[Block]:
    """All blocks, section by section."""
    table = built.table
    keyed = {(*cell.cell.keys.values(), cell.cell.metric.name): cell for cell in built.cells}
    found = []
    for outer in product(*(table.facets[f] for f in (*table.sections, *table.columns))):
        fixed = dict(zip((*table.sections, *table.columns), outer, strict=True))
        rows = []
        for inner in product(*(table.facets[facet] for facet in table.rows)):
            values = {**fixed, **dict(zip(table.rows, inner, strict=True))}
            names = tuple(values[facet].name for facet in table.facets)
            cells = tuple(keyed[(*names, metric.name)] for metric in table.metrics)
            heads = (*(v.label for v in inner), *(t for v in inner for t in v.shown.values()))
            rows.append(Row(heads, shared_notes(cells), cells, reported=cells))
        if not any(cell.cell.reported for row in rows for cell in row.cells):
            rows = [replace(row, reported=()) for row in rows]
        found.append(_block(built, outer, tuple(rows)))
    return found


def _block(built: BuiltTable, outer: Sequence, rows: tuple[Row, ...]) -> Block:
    table = built.table
    split = len(table.sections)
    shown = [title for facet in table.rows for title in table.facets[facet][0].shown]
    return Block(
        section=", ".join(value.label for value in outer[:split]),
        paper=", ".join(value.label for value in outer[split:]),
        here=here(row.run for row in rows),
        heads=(*(facet.capitalize() for facet in table.rows), *shown),
        metrics=tuple(metric.label for metric in table.metrics),
        rows=rows,
    )


def here(runs: Iterable[PlannedRun]) -> Query:
    """Model and benchmark that the runs have in common, empty when none of them can run."""
    for run in runs:
        if run.query:
            return run.chosen["model"], run.chosen["benchmark"]
    return ()


def shared_notes(cells: Sequence[BuiltCell]) -> Query:
    """Notes that all of the cells carry, in the first one's order."""
    return tuple(
        dict.fromkeys(n for n in cells[0].cell.notes if all(n in c.cell.notes for c in cells))
    )


def own_notes(cell: BuiltCell, shown: Query) -> Query:
    """Notes of the cell that its row does not show already."""
    return tuple(dict.fromkeys(name for name in cell.cell.notes if name not in shown))


def number(value: float, unit: str) -> str:
    """A number in a measured unit."""
    return f"{value:.{MORE_DECIMALS.get(unit, DECIMALS)}f}"


def measured_text(cell: BuiltCell) -> str:
    """The measured number, or what stands in its place."""
    if cell.measured is None:
        return cell.run.short or "undefined"
    return number(cell.measured, cell.unit)


def interval_text(cell: BuiltCell) -> str:
    """The interval in brackets, empty where there is none."""
    ends = ", ".join(number(end, cell.unit) for end in cell.interval or ())
    return f"[{ends}]" if ends else ""


def reported_text(cell: BuiltCell) -> str:
    """The printed value."""
    return cell.cell.reported.text if cell.cell.reported else "not reported"


def link(built: BuiltTable, run: PlannedRun) -> str:
    """Relative address of the run's folder, seen from the rendered file."""
    up = "../" * (built.table.name.count("/") + 1)
    return f"{up}runs/{run.folder}"


def short_hash(run: PlannedRun) -> str:
    """The run's hash as shown, empty where there is no run."""
    return run.spec.identity_hash[:SHOWN_HASH] if run.spec else ""


def progress(built: BuiltTable) -> str:
    """How many runs stand where."""
    states = built.states()
    return f"{sum(states.values())} runs: " + ", ".join(f"{n} {s}" for s, n in states.items())


def cost(seconds: Iterable[float | None]) -> str:
    """A rough cost in words; unknown when a part of it is."""
    total = 0.0
    for second in seconds:
        if second is None:
            return "unknown"
        total += second
    return f"about {total:.0f} s" if total < 120 else f"about {total / 60:.0f} min"


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
        "lacks shows `needs: …`."
    )


def footer(built: BuiltTable, commands: bool = True) -> list[tuple[str, list[str]]]:
    """The remarks below a table: (heading, lines), with the commands of open runs or without."""
    definitions = [f"{d.label} = `{d.name}`, {d.unit}: {d.text}" for d in built.definitions]
    tail = (
        "Brackets: 95 % interval (Wilson for shares, percentile bootstrap over samples for means)."
    )
    bare = "Ratios of sums and extremes (maximum, top-10, percentiles) are shown without one."
    parts = [
        ("Definitions", [*definitions, f"{tail} {bare}"]),
        ("Measured on", [*built.hardware]),
        ("Code", [f"commit {code}" for code in built.code]),
        ("Inputs", list(built.inputs)),
        (
            "Reported" if built.table.reported else "Source",
            [built.table.source, *_reported_on(built)],
        ),
        ("Notes", [f"{note.name}: {note.text}" for note in built.table.notes]),
        ("Cannot run here", list(built.impossible)),
        ("Still to run", _open_lines(built)[: None if commands else 1]),
    ]
    return [(title, lines) for title, lines in parts if lines]


def run_lines(built: BuiltTable) -> list[str]:
    """The hashes of each block's runs in row order, for forms that have no column for them."""
    return [
        f"{block.section}, {block.paper}: "
        + ", ".join(f"{row.heads[0]} {short_hash(row.run) or '–'}" for row in block.rows)
        for block in blocks(built)
    ]


def _reported_on(built: BuiltTable) -> list[str]:
    found = dict.fromkeys(cell.cell.reported_on for cell in built.cells)
    return [f"on {hardware}" for hardware in found if hardware]


def _open_lines(built: BuiltTable) -> list[str]:
    """One line per run to be made, the whole cost first."""
    if not built.open:
        return []
    total = cost([run.estimate_s for run in built.open])
    lines = [
        f"`{run.command}` ({run.state}: {run.reason}; cost: {cost([run.estimate_s])})"
        for run in built.open
    ]
    return [f"{len(built.open)} runs, cost: {total}", *lines]
