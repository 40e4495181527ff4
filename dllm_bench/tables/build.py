"""Planned cells to numbers: measured value and interval, reported value, delta and verdict.

Everything measured comes from the sealed records alone, a setting from the run's configuration. A
number is compared only where that means something: never for embedded models and tasks, and a speed
only on the reported hardware. Scores carry the record's interval, means and ratios of sums over
samples a bootstrap one (`derive`); extremes (maximum, top ten) have none, since resampling says
nothing about a tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions, tradeoff
from dllm_bench.tables.cost import Cost, CostModel, EstimateCheck, MeasuredRuns
from dllm_bench.tables.derive import (
    PERCENT,
    Curve,
    Interval,
    bootstrap,
    curve_of,
    derived,
    has_curve,
    unit_of,
)
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun, distinct_runs, trained_first
from dllm_bench.tables.spec import Cell, Note, PaperTable, Profile, TableMetric

if TYPE_CHECKING:
    from dllm_bench.store.record import RunRecord

SCORE_TEXT = "samples the benchmark's own metric grades as right, in percent of all samples."
AREA_TEXT = (
    "accuracy under parallelism as d3LLM's leaderboard has it: the area under score over x, a "
    f"score y beyond the slowest point's x weighing exp(−{tradeoff.ALPHA:g} (1 − y ÷ best score of "
    f"any row here on the model and benchmark)); points that lost more than {tradeoff.DROP:g} "
    "against the slowest do not count, and a curve that ends in one has no whole area. x:"
)
SETTING_TEXT = "a setting of the run, read from its configuration."
CLOCKED = ("tokens/s", "s", "ms", "×")  # units of numbers that hardware decides
MEASURED, UNDEFINED = "measured", "undefined"


class CellVerdict(StrEnum):
    """Measured against reported."""

    EQUAL = "equal"  # of settings
    INSIDE_CI = "inside CI"
    INSIDE_TOLERANCE = "inside tolerance"
    OUTSIDE = "outside"
    NOT_COMPARABLE = "not comparable"
    NONE = ""  # nothing measured, or nothing reported


@dataclass(frozen=True)
class BuiltCell:
    """A cell with its number. measured, interval and delta are in `unit`, the reported one.

    why: what makes the cell not comparable, or why it is empty; setting: what the configuration
    says, in the paper's words, of a cell that is a setting; curve: what an area was taken of.
    """

    planned: PlannedCell
    unit: str
    measured: float | None = None
    interval: Interval | None = None
    n: int = 0
    delta: float | None = None
    verdict: CellVerdict = CellVerdict.NONE
    why: str = ""
    setting: str = ""
    curve: Curve | None = None

    @property
    def cell(self) -> Cell:
        return self.planned.cell

    @property
    def run(self) -> PlannedRun:
        """The run, or what the runs of a derived cell have in common."""
        return self.planned.run

    @property
    def runs(self) -> list[PlannedRun]:
        """The runs behind the number, each once."""
        return distinct_runs([self.planned])

    @property
    def standing(self) -> str:
        """Where the cell stands, in a word: measured, or why it is empty."""
        if self.setting or self.measured is not None:
            return str(CellState.SETTING) if self.setting else MEASURED
        return UNDEFINED if self.run.state is CellState.SEALED else str(self.run.state)


@dataclass(frozen=True)
class ShownDefinition:
    """A metric's label, the name of its definition, and the definition in words."""

    label: str
    name: str
    unit: str
    text: str


@dataclass(frozen=True)
class RunToMake:
    """A run that is still to be made, with a rough cost (None: nothing to judge by)."""

    command: str
    state: CellState
    reason: str
    cost: Cost | None


@dataclass(frozen=True)
class BuiltTable:
    """A table ready to be rendered; nothing in it depends on when or where it was built.

    trained_first: what its decoders read and nobody trained yet; elsewhere: what the runs that are
    impossible here cost where they are possible; check: how far the estimates are off, if any.
    """

    table: PaperTable
    profile: Profile
    cells: tuple[BuiltCell, ...]
    definitions: tuple[ShownDefinition, ...]
    hardware: tuple[str, ...]
    code: tuple[str, ...]
    inputs: tuple[str, ...]
    open: tuple[RunToMake, ...]
    impossible: tuple[str, ...]
    reported_only: tuple[str, ...]
    trained_first: tuple[str, ...]
    elsewhere: tuple[Cost | None, ...]
    check: EstimateCheck | None

    def states(self) -> dict[CellState, int]:
        """How many runs stand where, in the order of `State`."""
        states = [run.state for run in distinct_runs(self.planned())]
        return {state: states.count(state) for state in CellState if state in states}

    def standings(self) -> dict[str, int]:
        """How many cells are measured, reported only, impossible, …, the most frequent first."""
        return dict(Counter(cell.standing for cell in self.cells).most_common())

    def planned(self) -> list[PlannedCell]:
        """The plan behind the table."""
        return [built.planned for built in self.cells]


def build(
    table: PaperTable,
    profile: Profile,
    planned: Sequence[PlannedCell],
    kin: MeasuredRuns | None = None,
) -> BuiltTable:
    """The table with every number that the sealed records give; costs are estimated from `kin`, or
    else from its own runs.
    """
    planned = [remarked(entry, profile) for entry in planned]
    runs = distinct_runs(planned)
    records = [run.record for run in runs if run.record]
    costs = CostModel(planned, kin or MeasuredRuns.of(records))
    impossible = [run for run in runs if run.state is CellState.UNAVAILABLE]
    estimated = any(run.open for run in runs) or any(run.config for run in impossible)
    return BuiltTable(
        table=replace(table, notes=(*table.notes, *remarks_of(planned, profile))),
        profile=profile,
        cells=tuple(build_cell(entry, profile) for entry in planned),
        definitions=tuple(_definition(metric) for metric in table.metrics),
        hardware=tuple(sorted({hardware_of(record) for record in records})),
        code=tuple(sorted({code_of(one) for record in records for one in record.environments})),
        inputs=tuple(sorted({text for record in records for text in inputs_of(record)})),
        open=tuple(
            RunToMake(run.command, run.state, run.reason, costs.estimate(run))
            for run in runs
            if run.open
        ),
        impossible=tuple(sorted({run.reason for run in impossible})),
        reported_only=tuple(dict.fromkeys(only_reported(planned))),
        trained_first=tuple(trained_first(runs)),
        elsewhere=tuple(costs.estimate(run) for run in impossible if run.config),
        check=costs.kin.check if estimated else None,
    )


def remarked(planned: PlannedCell, profile: Profile) -> PlannedCell:
    """The cell with the marks of what its profile has to say of its runs."""
    marks = [r.name for r in profile.remarks if any(r.holds(run.query) for run in planned.runs)]
    return replace(planned, cell=replace(planned.cell, notes=(*planned.cell.notes, *marks)))


def remarks_of(planned: Sequence[PlannedCell], profile: Profile) -> list[Note]:
    """What the profile has to say of these cells."""
    marks = {mark for entry in planned for mark in entry.cell.notes}
    return [Note({}, r.name, r.text) for r in profile.remarks if r.name in marks]


def only_reported(planned: Sequence[PlannedCell]) -> list[str]:
    """Why some cells have no run, derived ones left out."""
    found = [
        p
        for p in planned
        if p.run.state is CellState.REPORTED_ONLY and (p.cell.only or not p.parts)
    ]
    return [p.cell.only or p.run.reason for p in found]


def build_cell(planned: PlannedCell, profile: Profile) -> BuiltCell:
    """One cell: measured from its runs' records, set against the reported value."""
    unit = unit_of(planned.cell.metric)
    if planned.run.state is CellState.SETTING:
        return _setting(planned, profile)
    if planned.run.state is not CellState.SEALED:
        return BuiltCell(planned, unit, why=planned.run.reason)
    n = sum(len(run.record.columns["id"]) for run in distinct_runs([planned]) if run.record)
    measured, interval = measure(planned)
    if measured is None:
        return BuiltCell(planned, unit, n=n, why=why_undefined(planned))
    curve = curve_of(planned) if has_curve(planned) else None
    found = BuiltCell(planned, unit, measured, interval, n, curve=curve)
    reported = planned.cell.reported.value if planned.cell.reported else None
    if reported is None:
        return found
    why = incomparable(planned, profile)
    if why:
        return replace(found, verdict=CellVerdict.NOT_COMPARABLE, why=why)
    verdict = judge(measured, interval, reported, planned.cell.metric)
    return replace(found, delta=measured - reported, verdict=verdict)


def why_undefined(planned: PlannedCell) -> str:
    """Why the sealed runs of a cell do not give its number."""
    if has_curve(planned):
        try:
            curve_of(planned)
        except DllmBenchError as error:
            return str(error)
    undefined = [part for part in planned.parts if measure(part)[0] is None]
    if undefined and planned.cell.metric.area:
        return why_undefined(undefined[0])
    metric, record = planned.cell.metric.plain, planned.run.record
    if record is None or metric.is_score:
        return "the samples do not define this number"
    return definitions.definition(metric.definition).why_undefined(record.sample_stats)


def measure(planned: PlannedCell) -> tuple[float | None, Interval | None]:
    """The number of a cell whose runs are sealed, with its interval where it has one."""
    if planned.parts:
        return derived(planned)
    record, metric = planned.run.record, planned.cell.metric
    if record is None:
        return None, None
    if metric.is_score:
        return _score(record)
    definition, facts = definitions.definition(metric.definition), record.sample_stats
    value = definition(facts)
    if value is None:
        return None, None
    return value, definition.bounds(facts) if definition.bounds else bootstrap(planned)


def _score(record: RunRecord) -> tuple[float | None, Interval | None]:
    score = record.score
    if score is None:
        return None, None
    return PERCENT * score.mean, (PERCENT * score.low, PERCENT * score.high)


def _setting(planned: PlannedCell, profile: Profile) -> BuiltCell:
    """A setting of the run, in the paper's words, equal to the reported one or not."""
    metric, reported = planned.cell.metric, planned.cell.reported
    text = setting_text(planned.run.config, metric)
    if not text:
        return BuiltCell(planned, "", why=f"the run has no setting {metric.setting}")
    number = as_number(text)
    if reported is None:
        return BuiltCell(planned, "", number, setting=text)
    equal = text == reported.text if number is None else number == reported.value
    why = "" if equal or not profile.embedded else _embedded(planned)
    differs = CellVerdict.NOT_COMPARABLE if why else CellVerdict.OUTSIDE
    verdict = CellVerdict.EQUAL if equal else differs
    return BuiltCell(planned, "", number, None, 0, None, verdict, why, text)


def setting_text(config: Mapping[str, Any], metric: TableMetric) -> str:
    """What the configuration says at the metric's dotted key; empty where it has no such key."""
    try:
        value = reduce(lambda group, name: group[name], metric.setting.split("."), config)
    except (KeyError, TypeError):
        return ""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return metric.labels.get(text, text)


def as_number(text: str) -> float | None:
    """The number a text spells, None for a word."""
    try:
        return float(text)
    except ValueError:
        return None


def incomparable(planned: PlannedCell, profile: Profile) -> str:
    """Why measured and reported must not be compared; empty when they may."""
    cell = planned.cell
    if profile.embedded:
        return _embedded(planned)
    if unit_of(cell.metric.plain) not in CLOCKED:
        return ""
    records = [run.record for run in planned.runs if run.record]
    devices = ", ".join(sorted({record.devices for record in records}))
    if devices == cell.reported_on:
        return ""
    return f"measured on {devices}, reported on {cell.reported_on or 'unstated hardware'}"


def _embedded(planned: PlannedCell) -> str:
    chosen = planned.run.chosen
    model = f" model {chosen['model']}" if "model" in chosen else " models"
    return f"embedded{model}" + (f" on {chosen['benchmark']}" if "benchmark" in chosen else "")


def judge(
    measured: float, interval: Interval | None, reported: float, metric: TableMetric
) -> CellVerdict:
    """Reported value inside our interval, inside the table's tolerance, or outside of both."""
    if interval and interval[0] <= reported <= interval[1]:
        return CellVerdict.INSIDE_CI
    near = abs(measured - reported) <= metric.allowed(reported)
    return CellVerdict.INSIDE_TOLERANCE if near else CellVerdict.OUTSIDE


def _definition(metric: TableMetric) -> ShownDefinition:
    unit = unit_of(metric)
    if metric.setting:
        return ShownDefinition(metric.label, metric.formula, unit, SETTING_TEXT)
    known = SCORE_TEXT if metric.is_score else definitions.definition(metric.definition).text
    text = f"{AREA_TEXT} {known}" if metric.area else known
    return ShownDefinition(metric.label, metric.formula, unit, text)


def hardware_of(record: RunRecord) -> str:
    """Devices, dtype and threads of a run, in words."""
    hardware = record.spec.hardware
    if seats := record.spec.model.get("concurrency"):
        return f"{record.devices}, {seats} request(s) in flight"
    return (
        f"{record.devices}, {hardware.get('dtype')}, "
        f"{hardware.get('attention')} attention, {hardware.get('threads')} thread(s), batch "
        f"{record.spec.batch}"
    )


def code_of(environment: Mapping[str, Any]) -> str:
    """Commit of a session, and a hash of what differed from it."""
    commit = str(environment.get("commit") or "no commit")[:12]
    changed = str(environment.get("diff_sha256") or "")[:12]
    return commit + (f" with local changes {changed}" if changed else "")


def inputs_of(record: RunRecord) -> list[str]:
    """What a run read, by content hash."""
    spec = record.spec
    sources = {"dataset": spec.benchmark["name"], "weights": spec.model["name"]}
    return [f"{sources.get(kind, kind)}: {kind} {str(h)[:12]}" for kind, h in spec.inputs.items()]
