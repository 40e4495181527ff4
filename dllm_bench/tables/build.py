"""Planned cells to numbers: measured value and interval, reported value, delta and verdict.

Everything measured comes from the sealed records alone. A number is compared only where that means
something: never for embedded models and tasks, and a speed only on the reported hardware. Scores
carry the record's interval; a speed that is a mean over samples carries a bootstrap interval;
extremes (maximum, top ten) have none, since resampling says nothing about a tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isclose
from statistics import fmean
from typing import TYPE_CHECKING

from dllm_bench.metrics import accuracy, speed
from dllm_bench.tables.plan import PlannedCell, PlannedRun, State, distinct_runs, estimate_s
from dllm_bench.tables.spec import Cell, Metric, PaperTable, Profile

if TYPE_CHECKING:
    from dllm_bench.runs.record import RunRecord

PERCENT = 100
SCORE_UNIT = "%"
SCORE_TEXT = "samples the benchmark's own metric grades as right, in percent of all samples."
Interval = tuple[float, float]


class Verdict(StrEnum):
    """Measured against reported."""

    INSIDE_CI = "inside CI"
    INSIDE_TOLERANCE = "inside tolerance"
    OUTSIDE = "outside"
    NOT_COMPARABLE = "not comparable"
    NONE = ""  # nothing measured, or nothing reported


@dataclass(frozen=True)
class BuiltCell:
    """A cell with its number. measured, interval and delta are in the reported unit.

    why: what makes the cell not comparable, or why it is empty.
    """

    cell: Cell
    run: PlannedRun
    unit: str
    measured: float | None
    interval: Interval | None
    n: int
    delta: float | None
    verdict: Verdict
    why: str


@dataclass(frozen=True)
class Definition:
    """A metric's label, the name of its definition, and the definition in words."""

    label: str
    name: str
    unit: str
    text: str


@dataclass(frozen=True)
class OpenRun:
    """A run that is still to be made, with a rough cost (None: no sibling to judge by)."""

    command: str
    state: State
    reason: str
    estimate_s: float | None


@dataclass(frozen=True)
class BuiltTable:
    """A table ready to be rendered; nothing in it depends on when or where it was built."""

    table: PaperTable
    profile: Profile
    cells: tuple[BuiltCell, ...]
    definitions: tuple[Definition, ...]
    hardware: tuple[str, ...]
    code: tuple[str, ...]
    inputs: tuple[str, ...]
    open: tuple[OpenRun, ...]
    impossible: tuple[str, ...]

    def states(self) -> dict[State, int]:
        """How many runs stand where, in the order of `State`."""
        states = [run.state for run in distinct_runs(self.planned())]
        return {state: states.count(state) for state in State if state in states}

    def planned(self) -> list[PlannedCell]:
        """The plan behind the table."""
        return [PlannedCell(built.cell, built.run) for built in self.cells]


def build(table: PaperTable, profile: Profile, planned: Sequence[PlannedCell]) -> BuiltTable:
    """The table with every number that the sealed records give."""
    runs = distinct_runs(planned)
    records = [run.record for run in runs if run.record]
    impossible = {run.reason for run in runs if run.state is State.IMPOSSIBLE}
    return BuiltTable(
        table=table,
        profile=profile,
        cells=tuple(build_cell(entry, profile) for entry in planned),
        definitions=tuple(_definition(metric) for metric in table.metrics),
        hardware=tuple(sorted({hardware_of(record) for record in records})),
        code=tuple(sorted({code_of(record) for record in records})),
        inputs=tuple(sorted({text for record in records for text in inputs_of(record)})),
        open=tuple(
            OpenRun(run.command, run.state, run.reason, estimate_s(run, runs))
            for run in runs
            if run.open
        ),
        impossible=tuple(sorted(impossible)),
    )


def build_cell(planned: PlannedCell, profile: Profile) -> BuiltCell:
    """One cell: measured from its run's record, set against the reported value."""
    cell, run = planned.cell, planned.run
    unit = SCORE_UNIT if cell.metric.is_score else speed.definition(cell.metric.definition).unit
    if run.record is None:
        return BuiltCell(cell, run, unit, None, None, 0, None, Verdict.NONE, run.reason)
    n = len(run.record.columns["id"])
    measured, interval = measure(cell.metric, run.record)
    if measured is None:
        why = "the samples do not define this number"
        return BuiltCell(cell, run, unit, None, None, n, None, Verdict.NONE, why)
    why = incomparable(planned, profile) if cell.reported else ""
    verdict = Verdict.NOT_COMPARABLE if why else judge(measured, interval, cell)
    delta = measured - cell.reported.value if cell.reported and not why else None
    return BuiltCell(cell, run, unit, measured, interval, n, delta, verdict, why)


def measure(metric: Metric, record: RunRecord) -> tuple[float | None, Interval | None]:
    """The number a metric names, with its interval where it has one."""
    if metric.is_score:
        return _score(record)
    definition = speed.definition(metric.definition)
    facts = record.facts
    value = definition(facts)
    each = [number for number in (definition([fact]) for fact in facts) if number is not None]
    if value is None or len(each) < 2 or not isclose(value, fmean(each), rel_tol=1e-9):
        return value, None
    return value, accuracy.bootstrap(each, record.spec.seed)


def _score(record: RunRecord) -> tuple[float | None, Interval | None]:
    score = record.score
    if score is None:
        return None, None
    return PERCENT * score.mean, (PERCENT * score.low, PERCENT * score.high)


def incomparable(planned: PlannedCell, profile: Profile) -> str:
    """Why measured and reported must not be compared; empty when they may."""
    cell, run = planned.cell, planned.run
    if profile.embedded:
        return f"embedded model {run.chosen['model']} on {run.chosen['benchmark']}"
    device = str(run.record.environment.get("device")) if run.record else ""
    if not cell.metric.is_score and device != cell.reported_on:
        return f"measured on {device}, reported on {cell.reported_on or 'unstated hardware'}"
    return ""


def judge(measured: float, interval: Interval | None, cell: Cell) -> Verdict:
    """Reported value inside our interval, inside the table's tolerance, or outside of both."""
    if cell.reported is None:
        return Verdict.NONE
    reported = cell.reported.value
    if interval and interval[0] <= reported <= interval[1]:
        return Verdict.INSIDE_CI
    near = abs(measured - reported) <= cell.metric.allowed(reported)
    return Verdict.INSIDE_TOLERANCE if near else Verdict.OUTSIDE


def _definition(metric: Metric) -> Definition:
    if metric.is_score:
        return Definition(metric.label, metric.definition, SCORE_UNIT, SCORE_TEXT)
    found = speed.definition(metric.definition)
    return Definition(metric.label, found.name, found.unit, found.text)


def hardware_of(record: RunRecord) -> str:
    """Device, dtype and threads of a run, in words."""
    environment, hardware = record.environment, record.spec.hardware
    return (
        f"{environment.get('device') or 'unknown device'}, {hardware.get('dtype')}, "
        f"{hardware.get('attention')} attention, {hardware.get('threads')} thread(s), batch "
        f"{record.spec.batch}"
    )


def code_of(record: RunRecord) -> str:
    """Commit of a run, and a hash of what differed from it."""
    environment = record.environment
    commit = str(environment.get("commit") or "no commit")[:12]
    changed = str(environment.get("diff_sha256") or "")[:12]
    return commit + (f" with local changes {changed}" if changed else "")


def inputs_of(record: RunRecord) -> list[str]:
    """What a run read, by content hash."""
    spec = record.spec
    sources = {"dataset": spec.benchmark["name"], "weights": spec.model["name"]}
    return [f"{sources.get(kind, kind)}: {kind} {str(h)[:12]}" for kind, h in spec.inputs.items()]
