"""Which runs does a table need, and where do they stand?

Every cell's query, translated by the profile, is composed and turned into a `RunSpec` by the same
code path as `dllm-bench run`, so the hash is the same by construction; the metrics of one
combination share a run. Each run is sealed, partial, missing, failed or impossible here, comes with
the one command that fills it and a rough estimate of its cost. Starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING, Any

from dllm_bench.core.request import DllmBenchError
from dllm_bench.tables.spec import Cell, PaperTable, Profile, Query

if TYPE_CHECKING:
    from dllm_bench.runs.record import RunRecord
    from dllm_bench.runs.spec import RunSpec
    from dllm_bench.runs.store import Store

Compose = Callable[[Sequence[str]], Mapping[str, Any]]


class State(StrEnum):
    """Where the run of a cell stands."""

    SEALED = "sealed"
    PARTIAL = "partial"
    MISSING = "missing"
    FAILED = "failed"
    IMPOSSIBLE = "impossible"


@dataclass(frozen=True)
class PlannedRun:
    """A run some cells need. `short` is what an empty cell shows, `reason` says it in full.

    query: overrides of this profile, empty where the profile has no counterpart; folder: below the
    runs folder.
    """

    query: Query
    state: State
    short: str = ""
    reason: str = ""
    spec: RunSpec | None = None
    record: RunRecord | None = None
    folder: str = ""
    done: int = 0
    total: int | None = None

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
        return self.state in (State.PARTIAL, State.MISSING, State.FAILED)


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the run that gives its number."""

    cell: Cell
    run: PlannedRun


def plan(table: PaperTable, profile: Profile, compose: Compose, store: Store) -> list[PlannedCell]:
    """All cells of the table in order; cells of one query share one `PlannedRun`."""
    runs: dict[tuple[Query, Query], PlannedRun] = {}
    planned = []
    for cell in table.cells():
        key = (cell.run, cell.needs)
        if key not in runs:
            runs[key] = _planned_run(cell, profile, compose, store)
        planned.append(PlannedCell(cell, runs[key]))
    return planned


def distinct_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """The runs behind the cells, each once, in the table's order."""
    runs = [entry.run for entry in planned]
    return list({run.spec.identity_hash if run.spec else id(run): run for run in runs}.values())


def open_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """The runs that are still to be made."""
    return [run for run in distinct_runs(planned) if run.open]


def _planned_run(cell: Cell, profile: Profile, compose: Compose, store: Store) -> PlannedRun:
    from dllm_bench.runs.spec import RunSpec

    if cell.needs and not profile.embedded:
        return _impossible((), ", ".join(cell.needs), "This machine cannot stand in for it.")
    try:
        query = profile.translate(cell.run)
    except DllmBenchError as error:
        return _impossible((), "an embedded counterpart", str(error))
    config = compose(query)
    absent = missing_device(config.get("hardware", {}))
    if absent:
        return _impossible(query, absent, f"hardware={config['hardware']['name']} asks for it.")
    try:
        spec = RunSpec.from_config(config)
    except DllmBenchError as error:
        return _impossible(query, "weights or data", str(error))
    return look_up(query, spec, store)


def _impossible(query: Query, what: str, why: str) -> PlannedRun:
    return PlannedRun(query, State.IMPOSSIBLE, f"needs: {what}", f"needs: {what}. {why}")


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
        record, entry = store.record(spec), store.entry(spec)
    except DllmBenchError as error:
        return PlannedRun(query, State.FAILED, "failed", str(error), spec, folder=folder)
    if record is not None:
        n = len(record.columns["id"])
        return PlannedRun(query, State.SEALED, "", "", spec, record, folder, n, n)
    if entry is None:
        return PlannedRun(query, State.MISSING, "missing", "not run yet", spec, folder=folder)
    progress = f"{entry.done} of {entry.total or 'an unknown number of'} samples"
    if entry.error:
        state, short, reason = State.FAILED, "failed", f"{entry.error} ({progress} finished)"
    else:
        state, short, reason = State.PARTIAL, progress, f"{progress} finished"
    return PlannedRun(query, state, short, reason, spec, None, folder, entry.done, entry.total)


def estimate_s(run: PlannedRun, runs: Iterable[PlannedRun]) -> float | None:
    """Rough seconds to complete `run`: open requests × median seconds of its sealed siblings.

    Siblings share model, benchmark and hardware; None when there are none.
    """
    same = ("model", "benchmark", "hardware")
    kin = [
        other.record
        for other in runs
        if other.record and all(other.chosen.get(k) == run.chosen.get(k) for k in same)
    ]
    seconds = [second for record in kin for second in record.columns["seconds"]]
    if not seconds:
        return None
    total = run.total or round(median(len(record.columns["id"]) for record in kin))
    return float(max(total - run.done, 0) * median(seconds))
