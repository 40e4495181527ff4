"""The numbers of a table as rows of one frame: value, interval, reported value and verdict.

`build` makes a pandas frame; files, pages, figures and findings are views of it. Every measured
number is computed from sealed records, and every setting is read from the run's configuration.
Numbers are only compared if that is meaningful: never for embedded models and tasks, and speeds
only on the reported hardware. Scores have the interval of their record, differences of scores that
of paired shares, and means and ratios of sums over samples a bootstrap interval (`derive`).
Extremes (maximum, top ten) have no interval, because resampling says nothing about a tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, reduce
from math import isnan, nan
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions
from dllm_bench.store.record import RunRecord
from dllm_bench.tables import derive
from dllm_bench.tables.cost import CostModel, MeasuredRuns
from dllm_bench.tables.derive import Interval
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun, distinct_runs
from dllm_bench.tables.spec import PaperTable, Profile, TableMetric, parse_number

if TYPE_CHECKING:
    from pandas import DataFrame

MEASURED, UNDEFINED = "measured", "undefined"
LOAD_PER_CORE = 1.3
"""Load average per core above which other work disturbs a run's timings."""
Row = Any
"""A row of the frame, as `DataFrame.itertuples` gives it."""


class CellVerdict(StrEnum):
    """Result of comparing the measured with the reported number."""

    EQUAL = "equal"  # the setting equals the reported one
    INSIDE_CI = "inside CI"  # the reported value is inside our interval
    INSIDE_TOLERANCE = "inside tolerance"  # the difference is at most the table's tolerance
    OUTSIDE = "outside"  # none of these
    NOT_COMPARABLE = "not comparable"  # other models, tasks or hardware
    NONE = ""  # nothing measured, or nothing reported


@dataclass(frozen=True, eq=False)
class BuiltTable:
    """A table's frame with its sources; nothing in it depends on when or where it was built."""

    table: PaperTable
    """Its layout, runs and reported values."""
    profile: Profile
    """The profile."""
    cells: DataFrame
    """A row per cell shown, by its facet values and metric; see `frame_of`."""
    costs: CostModel
    """Estimates the cost of its runs."""

    @property
    def stem(self) -> str:
        """Path of its files below the folder of tables, without their endings; a profile other than
        the embedded one adds its name."""
        return self.table.name + ("" if self.profile.embedded else f"-{self.profile.name}")

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """The runs of all cells, each once."""
        return distinct_runs(self.cells.planned)

    @cached_property
    def records(self) -> list[RunRecord]:
        """The records of the sealed runs."""
        return [run.record for run in self.runs if run.record]

    @property
    def open(self) -> list[PlannedRun]:
        """Runs that have not been completed."""
        return [run for run in self.runs if run.open]

    @property
    def unavailable(self) -> list[str]:
        """Why some runs cannot be made here."""
        return sorted({r.reason for r in self.runs if r.state is CellState.UNAVAILABLE})

    @property
    def hardware(self) -> list[str]:
        """Hardware that the sealed runs were measured on."""
        return sorted(set(map(hardware_text, self.records)))

    @property
    def code(self) -> list[str]:
        """Commits that the sealed runs were made with."""
        environments = (one for record in self.records for one in record.environments)
        return sorted(set(map(code_text, environments)))

    @property
    def inputs(self) -> list[str]:
        """Content hashes of the inputs of the sealed runs."""
        return sorted({text for record in self.records for text in input_texts(record)})

    def status_counts(self) -> dict[str, int]:
        """Return status -> number of cells, the most frequent first."""
        return dict(Counter(self.cells.status).most_common())


def build(
    table: PaperTable,
    profile: Profile,
    planned: Sequence[PlannedCell],
    measured: MeasuredRuns | None = None,
) -> BuiltTable:
    """Build the table with every number that the sealed records give.

    measured: the runs that costs are estimated from, by default the table's own.
    """
    records = (run.record for run in distinct_runs(planned) if run.record)
    costs = CostModel(planned, measured or MeasuredRuns.of(records))
    return BuiltTable(table, profile, frame_of(planned, profile, table.facets), costs)


def frame_of(planned: Sequence[PlannedCell], profile: Profile, facets: Iterable[str]) -> DataFrame:
    """Return a row per cell, with every number that the sealed records give.

    The frame's index are facets and metric. Its columns: definition, unit; state of the run; status
    (`MEASURED`, `UNDEFINED`, or a `CellState`); value, low, high (NaN: none), n samples; text of a
    setting; reported value, delta to it, verdict; reason why there is no number or no comparison;
    disturbed, whether a timed run began on a busy machine; machine that a number was timed on,
    empty for one of no times; elsewhere, whether most of the table was timed on another one; runs,
    curve of an area, and planned, the cell with its runs.
    """
    import pandas as pd

    keys = [(*entry.cell.keys.values(), entry.cell.metric.name) for entry in planned]
    index = pd.MultiIndex.from_tuples(keys, names=[*facets, "metric"])
    cells = pd.DataFrame([_row(entry, profile) for entry in planned], index)
    usual = cells.machine[cells.machine != ""].mode().head(1)
    cells["elsewhere"] = (cells.machine != "") & ~cells.machine.isin(usual)
    return cells


def _row(planned: PlannedCell, profile: Profile) -> dict[str, Any]:
    """Return one cell, measured from its runs' records and compared with the reported value."""
    cell, metric, state = planned.cell, planned.cell.metric, planned.run.state
    draws, text, n = [nan], "", 0
    status, reason, verdict = str(state), planned.run.reason, CellVerdict.NONE
    if state is CellState.SETTING:
        text, reason = _setting(planned)
        draws = [_number_in(text)]
    elif state is CellState.SEALED:
        draws, n = derive.number_of(planned), _samples_behind(planned)
        status, reason = (UNDEFINED, why_undefined(planned)) if isnan(draws[0]) else (MEASURED, "")
    value, is_measured = float(draws[0]), status == MEASURED
    ends = derive.interval(planned, draws) if is_measured else None
    if text or is_measured:
        verdict, reason = _compared(planned, profile, value, ends, text)
    reported = _number_in(cell.reported)
    is_judged = is_measured and verdict not in (CellVerdict.NONE, CellVerdict.NOT_COMPARABLE)
    return {
        "definition": metric.formula,
        "unit": metric.unit,
        "state": str(state),
        "status": status,
        "value": value,
        "low": ends[0] if ends else nan,
        "high": ends[1] if ends else nan,
        "n": n,
        "text": text,
        "reported": reported,
        "delta": value - reported if is_judged else nan,
        "verdict": verdict,
        "reason": reason,
        "disturbed": is_measured and bool(disturbed_runs([planned])),
        "machine": " and ".join(sorted(derive.timed_on(planned))) if is_measured else "",
        "runs": tuple(distinct_runs([planned])),
        "curve": derive.curve_of(planned) if is_measured and derive.has_curve(planned) else None,
        "planned": planned,
    }


def _number_in(text: str) -> float:
    number = parse_number(text)
    return nan if number is None else number


def _setting(planned: PlannedCell) -> tuple[str, str]:
    """Return the text of a cell's setting, or "" and the reason why there is none."""
    metric = planned.cell.metric
    texts = {setting_text(leaf.run.config, metric) for leaf in derive.leaves_of(planned)}
    if len(texts) > 1:
        return "", f"its runs differ in {metric.setting}"
    [text] = texts
    return text, "" if text else f"the run has no setting {metric.setting}"


def _samples_behind(planned: PlannedCell) -> int:
    """Return the number of samples that a cell's number is computed from."""
    record, metric = planned.run.record, planned.cell.metric
    if record and not metric.is_score:
        return definitions.definition(metric.definition).count(record.samples)
    counted = "value" if metric.is_score else "id"  # a sample that was not graded has no value
    columns = [run.record.columns[counted] for run in distinct_runs([planned]) if run.record]
    return sum(len(column) - column.count(None) for column in columns)


def why_undefined(planned: PlannedCell) -> str:
    """Return why the sealed runs of a cell do not give its number."""
    if derive.has_curve(planned):
        try:
            derive.curve_of(planned)
        except DllmBenchError as error:
            return str(error)
    undefined = [part for part in planned.parts if isnan(derive.number_of(part)[0])]
    if undefined and planned.cell.metric.area:
        return why_undefined(undefined[0])
    machines = sorted(derive.timed_on(planned))
    if planned.cell.metric.is_compared and len(machines) > 1:
        return f"times of different machines are not compared: {', '.join(machines)}"
    metric, record = planned.cell.metric.plain, planned.run.record
    if record is None or metric.is_score:
        return "the samples do not define this number"
    return definitions.definition(metric.definition).why_undefined(record.samples)


def _compared(
    planned: PlannedCell, profile: Profile, value: float, ends: Interval | None, text: str
) -> tuple[CellVerdict, str]:
    """Return the comparison of a number or setting with the reported value, or the reason why there
    is none."""
    printed, metric = planned.cell.reported, planned.cell.metric
    reported = parse_number(printed)
    if not printed or (reported is None and not text):
        return CellVerdict.NONE, ""
    if text and (text == printed if isnan(value) else value == reported):
        return CellVerdict.EQUAL, ""
    if why := why_incomparable(planned, profile):
        return CellVerdict.NOT_COMPARABLE, why
    if text or reported is None:
        return CellVerdict.OUTSIDE, ""
    return judge(value, ends, reported, metric), ""


def setting_text(config: Mapping[str, Any], metric: TableMetric) -> str:
    """Return the value at the metric's dotted key, in the paper's words; empty if there is no such
    key."""
    try:
        value = reduce(lambda group, name: group[name], metric.setting.split("."), config)
    except (KeyError, TypeError):
        return ""
    text = str(value).lower() if isinstance(value, bool) or value is None else str(value)
    return metric.labels.get(text, text)


def why_incomparable(planned: PlannedCell, profile: Profile) -> str:
    """Return the reason why measured and reported value must not be compared; empty if they may."""
    cell = planned.cell
    if profile.embedded:
        chosen = planned.run.chosen
        model = f" model {chosen['model']}" if "model" in chosen else " models"
        return f"embedded{model}" + (f" on {chosen['benchmark']}" if "benchmark" in chosen else "")
    if cell.metric.setting or not cell.metric.is_of_times:
        return ""
    records = [run.record for run in planned.runs if run.record]
    devices = ", ".join(sorted({record.devices for record in records}))
    if devices == cell.reported_on:
        return ""
    return f"measured on {devices}, reported on {cell.reported_on or 'unstated hardware'}"


def judge(
    measured: float, interval: Interval | None, reported: float, metric: TableMetric
) -> CellVerdict:
    """Return whether the reported value is in our interval, within the table's tolerance, or
    outside."""
    if interval and interval[0] <= reported <= interval[1]:
        return CellVerdict.INSIDE_CI
    is_near = abs(measured - reported) <= metric.allowed(reported)
    return CellVerdict.INSIDE_TOLERANCE if is_near else CellVerdict.OUTSIDE


def definition_text(metric: TableMetric) -> str:
    """Return the definition of a table's metric, in words."""
    texts = definitions.TEXTS
    if metric.setting:
        return texts["setting"]
    own = texts["score"] if metric.is_score else definitions.definition(metric.definition).text
    area = texts["area"].format(alpha=derive.ALPHA, drop=derive.DROP)
    return f"{area} {own}" if metric.area else own


def hardware_text(record: RunRecord) -> str:
    """Return devices, dtype, attention, threads and batch of a run, in words."""
    hardware = record.spec.hardware
    if record.spec.model.is_served:
        return f"{record.devices}, {record.spec.model.concurrency} request(s) in flight"
    return (
        f"{record.devices}, {hardware.dtype}, {hardware.attention} attention, "
        f"{hardware.threads} thread(s), batch {record.spec.batch}"
    )


def is_loaded(environment: Mapping[str, Any]) -> bool:
    """Return whether a session began under a load that disturbs its timings."""
    load, cores = environment.get("load"), environment.get("cores")
    return bool(load and cores and load > LOAD_PER_CORE * cores)


def disturbed_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """Return the timed runs that began on a busy machine, each once."""
    timed = distinct_runs(entry for entry in planned if entry.cell.metric.is_of_times)
    return [run for run in timed if run.record and any(map(is_loaded, run.record.environments))]


def code_text(environment: Mapping[str, Any]) -> str:
    """Return the commit of a session, with a hash of the local changes if there were any."""
    commit = str(environment.get("commit") or "no commit")[:12]
    changed = str(environment.get("diff_sha256") or "")[:12]
    return commit + (f" with local changes {changed}" if changed else "")


def input_texts(record: RunRecord) -> list[str]:
    """Return the content hashes of a run's inputs, each with a name."""
    spec = record.spec
    names = {"dataset": spec.benchmark.name, "weights": spec.model.name}
    return [f"{names.get(kind, kind)}: {kind} {str(h)[:12]}" for kind, h in spec.inputs.items()]
