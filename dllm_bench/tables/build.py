"""Planned cells to numbers: measured value and interval, reported value, delta and verdict.

Every measured number is computed from sealed records, every setting is read from the run's
configuration. Numbers are compared only where that means something: never for embedded models and
tasks, and speeds only on the reported hardware. Scores have the interval of their record, means and
ratios of sums over samples a bootstrap interval (`derive`). Extremes (maximum, top ten) have none,
because resampling says nothing about a tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from typing import Any

from dllm_bench.benchmarks.items import repetition_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions, tradeoff
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.store.record import RunRecord
from dllm_bench.tables.cost import Cost, CostModel, EstimateCheck, MeasuredRuns
from dllm_bench.tables.derive import (
    PERCENT,
    Curve,
    Interval,
    bootstrap,
    curve_of,
    derived,
    has_curve,
)
from dllm_bench.tables.plan import (
    CellState,
    PlannedCell,
    PlannedRun,
    distinct_runs,
    missing_trained_files,
)
from dllm_bench.tables.spec import Cell, PaperTable, Profile, TableMetric

SCORE_TEXT = "samples the benchmark's own metric grades as right, in percent of all samples."
AREA_TEXT = (
    "accuracy under parallelism as d3LLM's leaderboard has it: the area under score over x, a "
    f"score y beyond the slowest point's x weighing exp(−{tradeoff.ALPHA:g} (1 − y ÷ best score of "
    f"any row here on the model and benchmark)); points that lost more than {tradeoff.DROP:g} "
    "against the slowest do not count, and a curve that ends in one has no whole area. x:"
)
SETTING_TEXT = "a setting of the run, read from its configuration."
MEASURED, UNDEFINED = "measured", "undefined"
LOAD_PER_CORE = 1.3
"""Load average per core above which other work disturbs a run's times."""


class CellVerdict(StrEnum):
    """How the measured number compares with the reported one."""

    EQUAL = "equal"  # a setting that is the reported one
    INSIDE_CI = "inside CI"  # the reported value is inside our interval
    INSIDE_TOLERANCE = "inside tolerance"  # the difference is at most the table's tolerance
    OUTSIDE = "outside"  # none of these
    NOT_COMPARABLE = "not comparable"  # other models, tasks or hardware
    NONE = ""  # nothing measured, or nothing reported


@dataclass(frozen=True)
class BuiltCell:
    """A cell with its number."""

    planned: PlannedCell
    """The cell and its runs."""
    unit: str
    """Unit of measured, interval and delta, and of the reported value."""
    measured: float | None = None
    """The measured number; None if there is none."""
    interval: Interval | None = None
    """Its 95 % interval, if it has one."""
    n: int = 0
    """Number of samples behind it."""
    delta: float | None = None
    """Measured − reported, if the two are compared."""
    verdict: CellVerdict = CellVerdict.NONE
    """How they compare."""
    why: str = ""
    """Why there is no number, or why it is not comparable."""
    setting: str = ""
    """For a setting: what the configuration says, in the paper's words."""
    curve: Curve | None = None
    """For an area: the curve that it is taken of."""

    @property
    def cell(self) -> Cell:
        """The cell."""
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
    def is_disturbed(self) -> bool:
        """True for a number of times, one of whose runs began on a busy machine."""
        return bool(disturbed_runs([self.planned]))

    @property
    def status(self) -> str:
        """One word: measured or setting, or why the cell is empty (undefined, or a `CellState`)."""
        if self.setting or self.measured is not None:
            return str(CellState.SETTING) if self.setting else MEASURED
        return UNDEFINED if self.run.state is CellState.SEALED else str(self.run.state)


@dataclass(frozen=True)
class ShownDefinition:
    """How a metric of the table is defined, for the remarks below it."""

    label: str
    """Label of the metric."""
    name: str
    """Name of the definition."""
    unit: str
    """Unit; may be empty."""
    text: str
    """The definition in words."""


@dataclass(frozen=True)
class RunToMake:
    """A run that is still to be made."""

    command: str
    """The command that makes it."""
    state: CellState
    """Partial, missing or failed."""
    reason: str
    """The state in full."""
    cost: Cost | None
    """Its rough cost; None if there is nothing to estimate it by."""


@dataclass(frozen=True)
class BuiltTable:
    """A table ready to be rendered; nothing in it depends on when or where it was built."""

    table: PaperTable
    """Its layout, runs and reported values."""
    profile: Profile
    """The profile."""
    cells: tuple[BuiltCell, ...]
    """All cells shown."""
    definitions: tuple[ShownDefinition, ...]
    """The definitions of its metrics."""
    hardware: tuple[str, ...]
    """What the sealed runs were measured on."""
    code: tuple[str, ...]
    """Commits that the sealed runs were made with."""
    inputs: tuple[str, ...]
    """Content hashes of what the sealed runs read."""
    open: tuple[RunToMake, ...]
    """Runs that are still to be made."""
    unavailable: tuple[str, ...]
    """Why some runs cannot be made here."""
    reported_only: tuple[str, ...]
    """Why some cells have no run."""
    train_first: tuple[str, ...]
    """Files that decoders read and that have to be trained before."""
    unavailable_costs: tuple[Cost | None, ...]
    """What the runs that are unavailable here cost on a machine where they are available."""
    check: EstimateCheck | None
    """How far cost estimates are off, if the table shows any."""

    def states(self) -> dict[CellState, int]:
        """State -> number of runs, in the order of `CellState`."""
        states = [run.state for run in distinct_runs(self.planned())]
        return {state: states.count(state) for state in CellState if state in states}

    def status_counts(self) -> dict[str, int]:
        """Status -> number of cells, the most frequent first."""
        return dict(Counter(cell.status for cell in self.cells).most_common())

    def planned(self) -> list[PlannedCell]:
        """The plan behind the table."""
        return [built.planned for built in self.cells]


def build(
    table: PaperTable,
    profile: Profile,
    planned: Sequence[PlannedCell],
    measured: MeasuredRuns | None = None,
) -> BuiltTable:
    """The table with every number that the sealed records give. Costs are estimated from the runs
    `measured`, by default the table's own.
    """
    runs = distinct_runs(planned)
    records = [run.record for run in runs if run.record]
    costs = CostModel(planned, measured or MeasuredRuns.of(records))
    unavailable = [run for run in runs if run.state is CellState.UNAVAILABLE]
    shows_costs = any(run.open for run in runs) or any(run.config for run in unavailable)
    return BuiltTable(
        table=table,
        profile=profile,
        cells=tuple(build_cell(entry, profile) for entry in planned),
        definitions=tuple(_shown_definition(metric) for metric in table.metrics),
        hardware=tuple(sorted({hardware_text(record) for record in records})),
        code=tuple(sorted({code_text(one) for record in records for one in record.environments})),
        inputs=tuple(sorted({text for record in records for text in input_texts(record)})),
        open=tuple(
            RunToMake(run.command, run.state, run.reason, costs.estimate(run))
            for run in runs
            if run.open
        ),
        unavailable=tuple(sorted({run.reason for run in unavailable})),
        reported_only=tuple(dict.fromkeys(_reported_only_reasons(planned))),
        train_first=tuple(missing_trained_files(runs)),
        unavailable_costs=tuple(costs.estimate(run) for run in unavailable if run.config),
        check=costs.measured.check if shows_costs else None,
    )


def _reported_only_reasons(planned: Sequence[PlannedCell]) -> list[str]:
    """Why some cells have no run; derived ones have the reasons of their parts."""
    return [
        p.cell.reported_only or p.run.reason
        for p in planned
        if p.run.state is CellState.REPORTED_ONLY and (p.cell.reported_only or not p.parts)
    ]


def build_cell(planned: PlannedCell, profile: Profile) -> BuiltCell:
    """One cell, measured from its runs' records and compared with the reported value."""
    unit = planned.cell.metric.unit
    if planned.run.state is CellState.SETTING:
        return _setting_cell(planned, profile)
    if planned.run.state is not CellState.SEALED:
        return BuiltCell(planned, unit, why=planned.run.reason)
    n = _samples_behind(planned)
    measured, interval = measure(planned)
    if measured is None:
        return BuiltCell(planned, unit, n=n, why=why_undefined(planned))
    curve = curve_of(planned) if has_curve(planned) else None
    built = BuiltCell(planned, unit, measured, interval, n, curve=curve)
    reported = planned.cell.reported.value if planned.cell.reported else None
    if reported is None:
        return built
    why = why_incomparable(planned, profile)
    if why:
        return replace(built, verdict=CellVerdict.NOT_COMPARABLE, why=why)
    verdict = judge(measured, interval, reported, planned.cell.metric)
    return replace(built, delta=measured - reported, verdict=verdict)


def _samples_behind(planned: PlannedCell) -> int:
    """Samples that the number of a cell is made of."""
    record, metric = planned.run.record, planned.cell.metric
    if record and not metric.is_score:
        return definitions.definition(metric.definition).count(record.sample_stats)
    return sum(len(run.record.columns["id"]) for run in distinct_runs([planned]) if run.record)


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
    """The number of a cell whose runs are sealed, and its interval if it has one."""
    if planned.parts:
        return derived(planned)
    record, metric = planned.run.record, planned.cell.metric
    if record is None:
        return None, None
    if metric.is_score:
        return _score(record)
    definition, stats = definitions.definition(metric.definition), record.sample_stats
    value = definition(stats)
    if value is None:
        return None, None
    bounds = definition.bounds
    return value, bounds(_first_pass(record)) if bounds else bootstrap(planned)


def measure_run(name: str, record: RunRecord) -> tuple[float | None, Interval | None]:
    """The metric called `name` of one run, and its interval if it has one."""
    run = PlannedRun((), CellState.SEALED, spec=record.spec, record=record)
    return measure(PlannedCell(Cell({}, TableMetric(name, name, name), (), None, ()), run))


def _first_pass(record: RunRecord) -> list[SampleStats]:
    """A sample per item, since counts hardly differ between repetitions of an item."""
    pairs = zip(record.columns["id"], record.sample_stats, strict=True)
    return [sample for key, sample in pairs if repetition_of(key) == 0]


def _score(record: RunRecord) -> tuple[float | None, Interval | None]:
    score = record.score
    if score is None:
        return None, None
    return PERCENT * score.mean, (PERCENT * score.low, PERCENT * score.high)


def _setting_cell(planned: PlannedCell, profile: Profile) -> BuiltCell:
    """A cell that shows a setting of the run, compared with the reported one."""
    metric, reported = planned.cell.metric, planned.cell.reported
    text = setting_text(planned.run.config, metric)
    if not text:
        return BuiltCell(planned, "", why=f"the run has no setting {metric.setting}")
    number = parse_number(text)
    built = BuiltCell(planned, "", number, setting=text)
    if reported is None:
        return built
    if text == reported.text if number is None else number == reported.value:
        return replace(built, verdict=CellVerdict.EQUAL)
    if profile.embedded:
        why = _embedded_run_text(planned)
        return replace(built, verdict=CellVerdict.NOT_COMPARABLE, why=why)
    return replace(built, verdict=CellVerdict.OUTSIDE)


def setting_text(config: Mapping[str, Any], metric: TableMetric) -> str:
    """The value at the metric's dotted key, in the paper's words; empty if there is no such key."""
    try:
        value = reduce(lambda group, name: group[name], metric.setting.split("."), config)
    except (KeyError, TypeError):
        return ""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return metric.labels.get(text, text)


def parse_number(text: str) -> float | None:
    """The number that a text spells; None for a word."""
    try:
        return float(text)
    except ValueError:
        return None


def why_incomparable(planned: PlannedCell, profile: Profile) -> str:
    """Why measured and reported value must not be compared; empty if they may."""
    cell = planned.cell
    if profile.embedded:
        return _embedded_run_text(planned)
    if not cell.metric.is_of_times:
        return ""
    records = [run.record for run in planned.runs if run.record]
    devices = ", ".join(sorted({record.devices for record in records}))
    if devices == cell.reported_on:
        return ""
    return f"measured on {devices}, reported on {cell.reported_on or 'unstated hardware'}"


def _embedded_run_text(planned: PlannedCell) -> str:
    chosen = planned.run.chosen
    model = f" model {chosen['model']}" if "model" in chosen else " models"
    return f"embedded{model}" + (f" on {chosen['benchmark']}" if "benchmark" in chosen else "")


def judge(
    measured: float, interval: Interval | None, reported: float, metric: TableMetric
) -> CellVerdict:
    """Whether the reported value is in our interval, within the table's tolerance, or outside."""
    if interval and interval[0] <= reported <= interval[1]:
        return CellVerdict.INSIDE_CI
    is_near = abs(measured - reported) <= metric.allowed(reported)
    return CellVerdict.INSIDE_TOLERANCE if is_near else CellVerdict.OUTSIDE


def _shown_definition(metric: TableMetric) -> ShownDefinition:
    unit = metric.unit
    if metric.setting:
        return ShownDefinition(metric.label, metric.formula, unit, SETTING_TEXT)
    own = SCORE_TEXT if metric.is_score else definitions.definition(metric.definition).text
    text = f"{AREA_TEXT} {own}" if metric.area else own
    return ShownDefinition(metric.label, metric.formula, unit, text)


def hardware_text(record: RunRecord) -> str:
    """Devices, dtype, attention, threads and batch of a run, in words."""
    hardware = record.spec.hardware
    if seats := record.spec.model.get("concurrency"):
        return f"{record.devices}, {seats} request(s) in flight"
    return (
        f"{record.devices}, {hardware.get('dtype')}, "
        f"{hardware.get('attention')} attention, {hardware.get('threads')} thread(s), batch "
        f"{record.spec.batch}"
    )


def is_loaded(environment: Mapping[str, Any]) -> bool:
    """Whether a session began under a load that disturbs its times."""
    load, cores = environment.get("load"), environment.get("cores")
    return bool(load and cores and load > LOAD_PER_CORE * cores)


def disturbed_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """The runs behind numbers of times that began on a busy machine, each once."""
    timed = distinct_runs(entry for entry in planned if entry.cell.metric.is_of_times)
    return [run for run in timed if run.record and any(map(is_loaded, run.record.environments))]


def code_text(environment: Mapping[str, Any]) -> str:
    """Commit of a session, with a hash of the local changes if there were any."""
    commit = str(environment.get("commit") or "no commit")[:12]
    changed = str(environment.get("diff_sha256") or "")[:12]
    return commit + (f" with local changes {changed}" if changed else "")


def input_texts(record: RunRecord) -> list[str]:
    """The content hashes of what a run read, each with a name."""
    spec = record.spec
    names = {"dataset": spec.benchmark["name"], "weights": spec.model["name"]}
    return [f"{names.get(kind, kind)}: {kind} {str(h)[:12]}" for kind, h in spec.inputs.items()]
