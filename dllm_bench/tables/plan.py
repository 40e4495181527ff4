"""Plan the runs that a table needs, and find the state of each.

Every cell's query, translated by the profile, is composed and turned into a `RunSpec` by the same
code as in `dllm-bench run`, so both have the same hash. The metrics of one combination share a run,
unless a metric has its own overrides. Each run is sealed, partial, missing, failed or unavailable
here, and has one command that completes it. A derived cell has the worst state of its parts.
Nothing is started here; the cost of open runs is estimated in `cost`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from dllm_bench.benchmarks.items import local_data_only
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.slurm import SlurmJobs
from dllm_bench.paths import conf_file, default_pieces, options, read_yaml
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.files import is_folder
from dllm_bench.store.groups import NOTHING_SET, RunConfig
from dllm_bench.store.inputs import MissingInputError, missing_device, resolve, sources
from dllm_bench.store.record import RunRecord
from dllm_bench.store.seal import first_items
from dllm_bench.store.spec import RunSpec, slug
from dllm_bench.store.store import RunState, Store
from dllm_bench.tables.spec import Cell, PaperTable, Profile, Query, overrides_by_key

Compose = Callable[[Sequence[str]], Mapping[str, Any]]
Resolve = Callable[[RunConfig], dict[str, Any]]


class CellState(StrEnum):
    """State of a cell's run; states without a number are missing (partial, missing, failed),
    unavailable, or reported only.
    """

    SEALED = "sealed"  # complete: the record gives the number
    PARTIAL = "partial"  # begun, not complete
    MISSING = "missing"  # not begun
    FAILED = "failed"  # ended with an error
    UNAVAILABLE = "unavailable"  # cannot be run here; the reason is given
    SETTING = "setting"  # read from the run's configuration, so nothing has to run
    REPORTED_ONLY = "reported only"  # no run can give it


OPEN = (CellState.PARTIAL, CellState.MISSING, CellState.FAILED)
WORST_FIRST = (
    CellState.REPORTED_ONLY,
    CellState.UNAVAILABLE,
    CellState.FAILED,
    CellState.MISSING,
    CellState.PARTIAL,
)
SERVED = "model=served"
NOT_SERVED_HERE = "A served engine, which profile {!r} does not ask; --profile paper does."
DO_NOT_FIT = "unavailable: settings do not fit"
GROUPS = ("benchmark", "model", "decoder")
ANY = "*"
Folders = Collection[tuple[str, ...]]
NOT_STORED = "no run of this model on this benchmark is stored"
TRAINED = "results/training/"  # output of `dllm-bench train`, read by decoders of tables


@dataclass(frozen=True, eq=False)
class PlannedRun:
    """A run that one or more cells need, and its state."""

    query: Query
    """Overrides in this profile; empty if the profile has no counterpart of the run."""
    state: CellState
    """Its state."""
    short: str = ""
    """Text shown in an empty cell instead of a number."""
    reason: str = ""
    """Full reason why there is no number."""
    spec: RunSpec | None = None
    """Its identity; None if it could not be specified here."""
    record: RunRecord | None = None
    """Its record, if it is sealed."""
    folder: str = ""
    """Its folder, below the runs folder."""
    done: int = 0
    """Samples finished."""
    total: int | None = None
    """Samples in all; None if not known yet."""
    items: int = 0
    """Items of its sealed record; an open run has one if it was completed for fewer items."""
    config: RunConfig = field(default_factory=lambda: NOTHING_SET, repr=False)
    """The composed configuration; empty if there is none."""

    @property
    def key(self) -> str | int:
        """Its hash, which equal runs share; of a run that could not be specified, its own."""
        return self.spec.identity_hash if self.spec else id(self)

    @property
    def command(self) -> str:
        """The command that completes the run."""
        return shlex.join(["dllm-bench", "run", *self.query])

    @property
    def chosen(self) -> dict[str, str]:
        """Override key -> value."""
        return overrides_by_key(self.query)

    @property
    def open(self) -> bool:
        """Whether the run can be made here and is not complete."""
        return self.state in OPEN

    @property
    def missing_device(self) -> str:
        """The device that it needs and this machine lacks, in words; empty if none."""
        elsewhere = not self.config or self.config.model.is_served
        return "" if elsewhere else missing_device(self.config.hardware)

    @property
    def is_for_elsewhere(self) -> bool:
        """Whether it can be made on a machine with the device, weights or data that this one
        lacks."""
        unavailable = self.state is CellState.UNAVAILABLE and self.short != DO_NOT_FIT
        return unavailable and bool(self.config)


@dataclass(frozen=True)
class PlannedCell:
    """A cell and the run that its number comes from."""

    cell: Cell
    """The cell."""
    run: PlannedRun
    """Its run; for a derived cell, the common part of its parts' runs."""
    parts: tuple[PlannedCell, ...] = ()
    """The cells that a derived cell is computed from."""

    @property
    def runs(self) -> tuple[PlannedRun, ...]:
        """The runs that the number comes from; empty if there are none."""
        if self.parts:
            return tuple(run for part in self.parts for run in part.runs)
        without_run = (CellState.SETTING, CellState.REPORTED_ONLY)
        return () if self.run.state in without_run else (self.run,)


RunKey = tuple[Query, Query, bool, int | None]
"""(overrides, hardware needed, whether only a setting is read, items at most). Cells with equal
keys share a run.
"""


class PlannedTable(NamedTuple):
    """A table, the profile that it was planned with, and its cells: what `frame.build` reads."""

    table: PaperTable
    profile: Profile
    cells: list[PlannedCell]


Plans = Callable[[Profile], list[PlannedTable]]


def cells_of(planned: Iterable[PlannedTable]) -> list[PlannedCell]:
    """Return the cells of all tables."""
    return [cell for one in planned for cell in one.cells]


def plan_common(
    profile: Profile, plans: Plans, planned: list[PlannedTable] | None = None
) -> list[PlannedTable]:
    """Plan tables as they are shown: if some runs have fewer items than requested, all are planned
    with the smallest number.

    plans: plans the tables with a profile; planned: what it gave for this one, if known.
    """
    planned = plans(profile) if planned is None else planned
    fewer = [run.items for run in distinct_runs(cells_of(planned)) if run.open and run.items]
    return plans(replace(profile, most=min(fewer))) if fewer else planned


@dataclass
class Planner:
    """Plans tables; runs that several cells or tables need are planned once.

    To compose all runs of all tables takes minutes, so a report plans only the stored part. The
    names in a query tell whether its folder `<benchmark>/<model>/<decoder>-<hash>` can exist. Only
    such queries are composed and looked up by their hash; the others are missing. Equal decoders
    with different names are the same run, so a decoder's name only decides whether a table is
    composed at all.
    """

    compose: Compose
    """Returns the settings of a run."""
    store: Store
    """Where runs are looked up."""
    resolve: Resolve = resolve
    """Replaces "auto" in settings, for example from a cache."""
    any_machine: bool = False
    """Whether runs may be made on another machine, so that this one need not have their device."""
    download: bool = False
    """Whether items that are not on this disk may be fetched, as in runs."""
    folders: Folders | None = None
    """Names of stored runs; runs that cannot be among them count as missing. None: all are
    composed."""
    runs: dict[RunKey, PlannedRun] = field(default_factory=dict)
    """The runs planned so far."""
    found: dict[tuple[RunSpec, int | None], PlannedRun] = field(default_factory=dict)
    """The runs looked up so far, by identity and items: different queries may be the same run."""

    @classmethod
    def cached(cls, settings: SettingsCache, store: Store) -> Planner:
        """Return a planner whose settings come from a cache."""
        return cls(settings.compose, store, settings.resolve)

    def common(self, tables: Iterable[PaperTable], profile: Profile) -> list[PlannedTable]:
        """Plan tables as they are shown, see `plan_common`."""
        return plan_common(profile, partial(self.each, list(tables)))

    def each(self, tables: Sequence[PaperTable], profile: Profile) -> list[PlannedTable]:
        """Plan tables with the items that the profile requests."""
        return [PlannedTable(table, profile, self.cells(table, profile)) for table in tables]

    def cells(self, table: PaperTable, profile: Profile) -> list[PlannedCell]:
        """Return all cells shown, in the table's order; cells with the same query share one
        `PlannedRun`.
        """
        absent = dict(self._absent(table, profile))

        def run_of(cell: Cell) -> PlannedRun:
            cell = replace(cell, run=profile.run_of(table.name, cell))
            key = self._key(cell, profile)
            if key not in absent and key not in self.runs:
                self.runs[key] = with_job(self._run(cell, profile), self._jobs)
            return absent.get(key) or self.runs[key]

        return [_planned(cell, table, run_of) for cell in table.cells()]

    @cached_property
    def _jobs(self) -> SlurmJobs:
        return SlurmJobs.of(self.store)

    def _key(self, cell: Cell, profile: Profile) -> RunKey:
        return cell.run, cell.needs, bool(cell.metric.setting), profile.most

    def _run(self, cell: Cell, profile: Profile) -> PlannedRun:
        """Return the run of a cell: translated by the profile, composed, specified, looked up."""
        try:
            query = profile.translate(cell.run)
        except DllmBenchError as error:
            if SERVED in cell.run:
                return _reported_only(NOT_SERVED_HERE.format(profile.name))
            nothing = PlannedRun((), CellState.UNAVAILABLE)
            return _unavailable("an embedded counterpart", str(error), nothing)
        run = PlannedRun(query, CellState.SETTING, config=RunConfig(self.compose(query)))
        if cell.metric.setting:
            return run
        if cell.needs and not profile.embedded:
            without_config = PlannedRun(query, CellState.UNAVAILABLE)
            why = "This machine cannot stand in for it."
            return _unavailable(", ".join(cell.needs), why, without_config)
        device = "" if self.any_machine else run.missing_device
        if not device:
            return self._stored(run)
        names = (slug(run.config.benchmark.name), slug(run.config.model.name))
        if is_folder(Path(self.store.root, *names)):  # else none can be stored
            stored = self._stored(run)
            if stored.spec and not stored.open:
                return stored
        return _unavailable(device, f"hardware={run.config.hardware.name} asks for it.", run)

    def _stored(self, run: PlannedRun) -> PlannedRun:
        """Return a composed run with its specification and the state that it has in the store."""
        try:
            spec = self._specify(run.config)
        except MissingInputError as error:
            return _unavailable("weights or data", str(error), run)
        except DllmBenchError as error:
            return replace(run, state=CellState.UNAVAILABLE, short=DO_NOT_FIT, reason=str(error))
        known = spec, spec.limit
        if known not in self.found:
            self.found[known] = look_up(run.query, spec, self.store)
        return replace(self.found[known], query=run.query, spec=spec, config=run.config)

    def _specify(self, config: Mapping[str, Any]) -> RunSpec:
        with local_data_only(not self.download):
            return RunSpec.from_config(config, self.resolve)

    def has_run(self, table: PaperTable, profile: Profile) -> bool:
        """Return whether a run of the table was begun, as far as the names of folders are known."""
        queries = dict.fromkeys(query for _, query in self._queries(table, profile))
        return any(map(self._is_begun, queries))

    def _absent(self, table: PaperTable, profile: Profile) -> Iterator[tuple[RunKey, PlannedRun]]:
        """Yield the runs that are not composed, because they cannot be stored."""
        if self.folders is None:
            return
        is_begun = self.has_run(table, profile)
        for key, query in self._queries(table, profile):
            *benchmark_and_model, _ = folder_patterns(query)
            if not (is_begun and may_have(self.folders, benchmark_and_model)):
                yield key, PlannedRun(query, CellState.MISSING, "missing", NOT_STORED)

    def _is_begun(self, query: Query) -> bool:
        """Return whether the run of a query has a folder, or may have one if the names of folders
        are not known; the query is only composed if it may."""
        if self.folders is None:
            return True
        if not may_have(self.folders, folder_patterns(query)):
            return False
        with suppress(DllmBenchError):
            return self.store.state(self._specify(self.compose(query))) is not RunState.ABSENT
        return False

    def _queries(self, table: PaperTable, profile: Profile) -> Iterator[tuple[RunKey, Query]]:
        """Yield the query of each run of the table that can be made here, as far as this is
        known."""
        seen = set[RunKey]()
        for cell in cells_with_runs(table):
            cell = replace(cell, run=profile.run_of(table.name, cell))
            key = self._key(cell, profile)
            is_elsewhere = cell.needs and not profile.embedded
            if key not in seen and not is_elsewhere:
                with suppress(DllmBenchError):  # `_run` gives the reason
                    yield key, profile.translate(cell.run)
            seen.add(key)


def _planned(cell: Cell, table: PaperTable, run_of: Callable[[Cell], PlannedRun]) -> PlannedCell:
    """Return the cell with its run, or with its parts."""
    if cell.reported_only:
        return PlannedCell(cell, _reported_only(cell.reported_only))
    parts = tuple(_planned(part, table, run_of) for part in table.parts(cell))
    if any(value.mean_of for value in cell.values.values()) and not cell.metric.is_compared:
        # parts of the same runs count once
        distinct = {tuple(run.key for run in one.runs) or (id(one),): one for one in parts}
        parts = tuple(distinct.values())
    if parts:
        return PlannedCell(cell, combined_run([part.run for part in parts]), parts)
    return PlannedCell(cell, run_of(cell))


def combined_run(runs: Sequence[PlannedRun]) -> PlannedRun:
    """Return several runs combined: their common overrides, with the worst of their states."""
    query = tuple(o for o in runs[0].query if all(o in run.query for run in runs))
    for state in WORST_FIRST:
        for run in runs:
            if run.state is state:
                own = shlex.join(o for o in run.query if o not in query)
                reason = f"{own}: {run.reason}" if own else run.reason
                return PlannedRun(query, state, run.short, reason)
    are_settings = all(run.state is CellState.SETTING for run in runs)
    return PlannedRun(query, CellState.SETTING if are_settings else CellState.SEALED)


def distinct_runs(planned: Iterable[PlannedCell]) -> list[PlannedRun]:
    """Return the runs of the cells in the table's order, each once, with the largest number of
    items that any cell requests.
    """
    distinct: dict[object, PlannedRun] = {}
    for run in (run for entry in planned for run in entry.runs):
        distinct[run.key] = max(distinct.get(run.key, run), run, key=_items_asked)
    return list(distinct.values())


def _items_asked(run: PlannedRun) -> float:
    """Return the number of items requested for the run."""
    limit = run.spec.limit if run.spec else None
    return inf if limit is None else limit


def _reported_only(reason: str) -> PlannedRun:
    return PlannedRun((), CellState.REPORTED_ONLY, "reported only", reason)


def _unavailable(what: str, why: str, run: PlannedRun) -> PlannedRun:
    short = f"unavailable: needs {what}"
    return replace(run, state=CellState.UNAVAILABLE, short=short, reason=f"needs {what}. {why}")


def look_up(query: Query, spec: RunSpec, store: Store) -> PlannedRun:
    """Return the run with the state that it has in the store."""
    run = PlannedRun(query, CellState.MISSING, "missing", "not run yet", spec, folder=spec.folder)
    try:
        run = replace(run, folder=store.path(spec).relative_to(store.root).as_posix())
        sealed = store.largest_record(spec)
        if sealed and sealed.covers(spec.limit):
            record = first_items(sealed, spec.limit)
            n = len(record.columns["id"])
            of_record = replace(run, record=record, done=n, total=n, items=record.items)
            return replace(of_record, state=CellState.SEALED, short="", reason="")
        entry = None if sealed else store.entry(spec)
    except DllmBenchError as error:
        return replace(run, state=CellState.FAILED, short="failed", reason=str(error))
    if sealed:
        short = f"{sealed.items} of {spec.limit or 'all'} items"
        done, total = len(sealed.columns["id"]), spec.limit and spec.limit * spec.repeats
        run = replace(run, done=done, total=total, items=sealed.items)
        return replace(run, state=CellState.PARTIAL, short=short, reason=f"{short} finished")
    if entry is None:
        return run
    progress = f"{entry.done} of {entry.total or 'an unknown number of'} samples"
    run = replace(run, done=entry.done, total=entry.total)
    if entry.error:
        reason = f"{entry.error} ({progress} finished)"
        return replace(run, state=CellState.FAILED, short="failed", reason=reason)
    return replace(run, state=CellState.PARTIAL, short=progress, reason=f"{progress} finished")


def with_job(run: PlannedRun, jobs: SlurmJobs) -> PlannedRun:
    """Return the run with a remark on its SLURM job; an open run whose job is over has failed."""
    is_over, remark = jobs.remark(run.spec.identity_hash) if run.spec and run.open else (False, "")
    if not remark:
        return run
    run = replace(run, reason=f"{run.reason}; {remark}")
    return replace(run, state=CellState.FAILED, short="failed") if is_over else run


def named_sources(runs: Iterable[PlannedRun]) -> list[str]:
    """Return the filters, drafters and step profiles that the runs' decoders name, each once."""
    return list(dict.fromkeys(one for run in runs for one in sources(run.config.decoder)))


def missing_trained_files(runs: Iterable[PlannedRun]) -> list[str]:
    """Return the filters, drafters and step profiles below `TRAINED` that decoders name and that
    are not trained yet.
    """
    return [s for s in named_sources(runs) if s.startswith(TRAINED) and not Path(s).exists()]


# --- which queries can have a stored run ---------------------------------------------------------


def stored_folders(store: Store) -> Folders:
    """Return the names in the folders of a store's runs (benchmark, model, decoder); no file in
    them is read."""
    parts = (folder.relative_to(store.root).parts for folder in store.folders())
    return {(*names, last.rpartition("-")[0]) for *names, last in parts}


def may_have(folders: Folders, patterns: Sequence[str]) -> bool:
    """Return whether a run may be stored, given patterns of its folder names
    (`folder_patterns`)."""
    return any(all(map(fnmatchcase, folder, patterns)) for folder in folders)


def cells_with_runs(table: PaperTable) -> Iterator[Cell]:
    """Yield the cells that have their own runs: plain cells, and the parts of derived ones."""
    waiting = [cell for cell in table.cells() if not cell.reported_only]
    while waiting:
        cell = waiting.pop()
        parts = table.parts(cell)
        waiting += [part for part in parts if not part.reported_only]
        if not parts:
            yield cell


def folder_patterns(query: Sequence[str]) -> Query:
    """Return a pattern for each folder name of a query's run, see `GROUPS`."""
    return tuple(_folder_pattern(overrides_by_key(query), group) for group in GROUPS)


def _folder_pattern(chosen: Mapping[str, str], group: str) -> str:
    if f"{group}.name" in chosen:
        return slug(chosen[f"{group}.name"])
    if group not in chosen or f"{group}.path" in chosen:
        return ANY
    slots = [key for key in chosen if key.startswith(f"{group}/")]
    pieces = frozenset((slot.partition("/")[2], chosen[slot]) for slot in slots)
    return _pattern_of_option(group, chosen[group]) + _pattern_of_pieces(chosen[group], pieces)


@lru_cache
def _pattern_of_option(group: str, option: str) -> str:
    """Return the folder name of a group's choice, if its file states it as text."""
    if option not in options(group):
        return ANY
    name = str(read_yaml(conf_file(f"{group}/{option}.yaml")).get("name", option))
    return ANY if "${" in name else slug(name)


@lru_cache
def _pattern_of_pieces(decoder: str, pieces: frozenset[tuple[str, str]]) -> str:
    """Return the suffix of a folder's name for pieces (slot, name) that replace a decoder's.

    It is only known for a single piece, in a slot that the decoder's own file fills.
    """
    if not pieces or decoder not in options("decoder"):
        return ANY if pieces else ""
    own = default_pieces(decoder)
    changed = [(slot, name) for slot, name in pieces if own.get(slot) != name]
    if len(changed) > 1 or any(slot not in own for slot, _ in changed):
        return ANY
    return "".join(f"-{slug(f'{slot}.{name}')}" for slot, name in changed)
