"""Which runs does a table need, and where do they stand?

Every cell's query, translated by the profile, is composed and turned into a `RunSpec` by the same
code path as `dllm-bench run`, so the hash is the same by construction; the metrics of one
combination share a run. Each run is sealed, partial, missing, failed or impossible here, and comes
with the one command that fills it. A derived cell stands where the worst of its parts stands.
Starts nothing; what the open runs cost is in `cost`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.tables.spec import Cell, PaperTable, Profile, Query

if TYPE_CHECKING:
    from dllm_bench.launch.slurm import SlurmJobs
    from dllm_bench.store.record import RunRecord
    from dllm_bench.store.spec import RunSpec
    from dllm_bench.store.store import Store

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
Resolve = Callable[[dict[str, Any]], dict[str, Any]]


class CellState(StrEnum):
    """Where the run of a cell stands; the later, the further from a number."""

    SEALED = "sealed"
    PARTIAL = "partial"
    MISSING = "missing"
    FAILED = "failed"
    UNAVAILABLE = "impossible"
    SETTING = "setting"  # read from the run's configuration, nothing to run
    REPORTED_ONLY = "reported only"  # no run can give it


SERVED = "model=served"
NOT_ASKED = "A served engine, which profile {!r} does not ask; --profile paper does."
TRAINED = "results/training/"  # where `dllm-bench train` writes, and tables look
OPEN = (CellState.PARTIAL, CellState.MISSING, CellState.FAILED)
WORST_FIRST = (
    CellState.REPORTED_ONLY,
    CellState.UNAVAILABLE,
    CellState.FAILED,
    CellState.MISSING,
    CellState.PARTIAL,
)


@dataclass(frozen=True)
class PlannedRun:
    """A run some cells need. `short` is what an empty cell shows, `reason` says it in full.

    query: overrides of this profile, empty where the profile has no counterpart; config: what they
    compose to; folder: below the runs folder.
    """

    query: Query
    state: CellState
    short: str = ""
    reason: str = ""
    spec: RunSpec | None = None
    record: RunRecord | None = None
    folder: str = ""
    done: int = 0
    total: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def command(self) -> str:
        """The one command that fills the run."""
        return shlex.join(["dllm-bench", "run", *self.query])

    @property
    def chosen(self) -> dict[str, str]:
        """Override key -> value."""
        return dict(override.partition("=")[::2] for override in self.query)

    @property
    def open(self) -> bool:
        """Can be run, and is not complete."""
        return self.state in OPEN


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the run that gives its number; a derived cell has the cells it is made of."""

    cell: Cell
    run: PlannedRun
    parts: tuple[PlannedCell, ...] = ()

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """The runs behind the number; none where no run can give it."""
        if self.parts:
            return tuple(run for part in self.parts for run in part.runs)
        return () if self.run.state in (CellState.SETTING, CellState.REPORTED_ONLY) else (self.run,)


Runs = dict[tuple[Query, Query, bool], PlannedRun]
"""(overrides, what they need, whether a setting is all that is asked) -> run."""


def plan(
    table: PaperTable,
    profile: Profile,
    compose: Compose,
    store: Store,
    anywhere: bool = False,
    resolve: Resolve | None = None,
    runs: Runs | None = None,
    asks: bool = False,
) -> list[PlannedCell]:
    """All cells shown, in the table's order; cells of one query share one `PlannedRun`.

    anywhere: the runs are meant for another machine, this one need not have their device; resolve:
    instead of `inputs.resolve`; runs: what tables of one profile and one moment share; asks: items
    that are not on this disk may be had from a server, as runs have them.
    """
    from dllm_bench.benchmarks.items import local_data_only
    from dllm_bench.launch.slurm import SlurmJobs

    jobs, shared = SlurmJobs.of(store), {} if runs is None else runs

    def specify(config: Mapping[str, Any]) -> RunSpec:
        from dllm_bench.store.spec import RunSpec

        with local_data_only(not asks):
            return RunSpec.from_config(config, resolve) if resolve else RunSpec.from_config(config)

    def run_of(cell: Cell) -> PlannedRun:
        key = (cell.run, cell.needs, bool(cell.metric.setting))
        if key not in shared:
            found = _planned_run(cell, profile, compose, specify, store, anywhere)
            shared[key] = followed(found, jobs)
        return shared[key]

    return [_planned(cell, table, run_of) for cell in table.cells()]


def _planned(cell: Cell, table: PaperTable, run_of: Callable[[Cell], PlannedRun]) -> PlannedCell:
    """The cell with its run, or with its parts."""
    if cell.only:
        return PlannedCell(
            cell, PlannedRun((), CellState.REPORTED_ONLY, "reported only", cell.only)
        )
    parts = tuple(_planned(part, table, run_of) for part in table.parts(cell))
    if parts:
        return PlannedCell(cell, joined([part.run for part in parts]), parts)
    return PlannedCell(cell, run_of(cell))


def joined(runs: Sequence[PlannedRun]) -> PlannedRun:
    """Several runs as one: what they have in common, in the state of the worst of them."""
    query = tuple(o for o in runs[0].query if all(o in run.query for run in runs))
    for state in WORST_FIRST:
        for run in runs:
            if run.state is state:
                own = shlex.join(o for o in run.query if o not in query)
                reason = f"{own}: {run.reason}" if own else run.reason
                return PlannedRun(query, state, run.short, reason)
    return PlannedRun(query, CellState.SEALED)


def distinct_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """The runs behind the cells, each once, in the table's order."""
    runs = [run for entry in planned for run in entry.runs]
    return list({run.spec.identity_hash if run.spec else id(run): run for run in runs}.values())


def open_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """The runs that are still to be made."""
    return [run for run in distinct_runs(planned) if run.open]


def _planned_run(
    cell: Cell,
    profile: Profile,
    compose: Compose,
    specify: Callable[[Mapping[str, Any]], RunSpec],
    store: Store,
    anywhere: bool,
) -> PlannedRun:
    from dllm_bench.store.inputs import is_served

    try:
        query = profile.translate(cell.run)
    except DllmBenchError as error:
        if SERVED in cell.run:
            return PlannedRun(
                (), CellState.REPORTED_ONLY, "reported only", NOT_ASKED.format(profile.name)
            )
        return _impossible(
            "an embedded counterpart", str(error), PlannedRun((), CellState.UNAVAILABLE)
        )
    asked = PlannedRun(query, CellState.SETTING, config=compose(query))
    if cell.metric.setting:
        return asked
    if cell.needs and not profile.embedded:
        other = PlannedRun(query, CellState.UNAVAILABLE)
        return _impossible(", ".join(cell.needs), "This machine cannot stand in for it.", other)
    hardware = asked.config.get("hardware", {})
    elsewhere = anywhere or is_served(asked.config.get("model", {}))
    absent = "" if elsewhere else missing_device(hardware)
    lacks = _impossible(absent, f"hardware={hardware.get('name')} asks for it.", asked)
    if absent and not _any_like(asked.config, store):
        return lacks
    try:
        spec = specify(asked.config)
    except DllmBenchError as error:
        return lacks if absent else _refused(error, asked)
    found = replace(look_up(query, spec, store), config=asked.config)
    return lacks if absent and found.open else found


def _any_like(config: Mapping[str, Any], store: Store) -> bool:
    """Whether the store holds any run of the model on the benchmark; a sealed one needs no GPU."""
    from dllm_bench.store.spec import slug

    names = (slug(str(config[group]["name"])) for group in ("benchmark", "model"))
    return Path(store.root, *names).is_dir()


def _impossible(what: str, why: str, asked: PlannedRun) -> PlannedRun:
    short = f"needs: {what}"
    return replace(asked, state=CellState.UNAVAILABLE, short=short, reason=f"{short}. {why}")


def _refused(error: DllmBenchError, asked: PlannedRun) -> PlannedRun:
    """A run that has no spec: something is not here, or the settings do not fit each other."""
    from dllm_bench.store.inputs import MissingInputError

    if isinstance(error, MissingInputError):
        return _impossible("weights or data", str(error), asked)
    return replace(asked, state=CellState.UNAVAILABLE, short="refused", reason=f"refused: {error}")


def missing_device(hardware: Mapping[str, Any]) -> str:
    """What the hardware group asks for and this machine lacks; empty when nothing."""
    if not str(hardware.get("device", "")).startswith("cuda"):
        return ""
    import torch

    wanted = hardware.get("match") or "CUDA"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    fits = any(wanted in name for name in names) if hardware.get("match") else bool(names)
    return "" if fits else f"a GPU ({wanted})"


def look_up(query: Query, spec: RunSpec, store: Store) -> PlannedRun:
    """Where the run stands in the store."""
    folder = store.path(spec).relative_to(store.root).as_posix()
    try:
        record = store.record(spec)
        entry = None if record else store.entry(spec)
    except DllmBenchError as error:
        return PlannedRun(query, CellState.FAILED, "failed", str(error), spec, folder=folder)
    if record is not None:
        n = len(record.columns["id"])
        return PlannedRun(query, CellState.SEALED, "", "", spec, record, folder, n, n)
    if entry is None:
        return PlannedRun(query, CellState.MISSING, "missing", "not run yet", spec, folder=folder)
    progress = f"{entry.done} of {entry.total or 'an unknown number of'} samples"
    if entry.error:
        state, short, reason = CellState.FAILED, "failed", f"{entry.error} ({progress} finished)"
    else:
        state, short, reason = CellState.PARTIAL, progress, f"{progress} finished"
    return PlannedRun(query, state, short, reason, spec, None, folder, entry.done, entry.total)


def followed(run: PlannedRun, jobs: SlurmJobs) -> PlannedRun:
    """The run with what is known of its job; one whose job is over though it is open has failed."""
    over, remark = jobs.remark(run.spec.identity_hash) if run.spec and run.open else (False, "")
    if not remark:
        return run
    told = replace(run, reason=f"{run.reason}; {remark}")
    return replace(told, state=CellState.FAILED, short="failed") if over else told


def trained_first(runs: Iterable[PlannedRun]) -> list[str]:
    """Filters, drafters and profiles below TRAINED that decoders name and nobody made yet."""
    from dllm_bench.store.inputs import sources

    found: dict[str, None] = {}
    for run in runs:
        for source in sources(run.config.get("decoder", {})):
            if source.startswith(TRAINED) and not Path(source).exists():
                found[source] = None
    return list(found)
