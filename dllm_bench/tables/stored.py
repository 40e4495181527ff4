"""Plan only the stored part of a table, without composing all of its runs.

Composing a run takes Hydra a tenth of a second, and all tables together have a thousand runs. A run
is stored in `<benchmark>/<model>/<decoder>-<hash>`, so the names in a query tell whether a folder
can exist. Only such queries are composed and looked up by their hash; the others are missing. Equal
decoders with different names are the same run, so a decoder's name only decides whether a table is
composed at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from dllm_bench.benchmarks.items import local_data_only
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_file, default_pieces, options, read_yaml
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.spec import RunSpec, slug
from dllm_bench.store.store import RunState, Store
from dllm_bench.tables.load import load_table
from dllm_bench.tables.plan import (
    CellState,
    PlannedCell,
    PlannedRun,
    PlannedTable,
    RunKey,
    SharedRuns,
    plan,
    plan_common,
    shared_key,
)
from dllm_bench.tables.spec import Cell, PaperTable, Profile, Query

BENCHMARK_AND_MODEL = ("benchmark", "model")
GROUPS = (*BENCHMARK_AND_MODEL, "decoder")
ANY = "*"
Patterns = tuple[str, ...]
NOT_STORED = "no run of this model on this benchmark is stored"


@dataclass(frozen=True)
class StoredNames:
    """The names in the folders of stored runs."""

    folders: frozenset[tuple[str, ...]] | None = None
    """Folder names of benchmark, model and decoder; None: any may be stored."""

    @classmethod
    def of(cls, store: Store) -> StoredNames:
        """Read the names of a store's folders, and no file in them."""
        parts = (folder.relative_to(store.root).parts for folder in store.folders())
        return cls(frozenset((*names, last.rpartition("-")[0]) for *names, last in parts))

    def may_have(self, patterns: Sequence[str]) -> bool:
        """Return whether a run may be stored, given patterns of its folder names
        (`folder_patterns`)."""
        return self.folders is None or any(
            all(map(fnmatchcase, folder, patterns)) for folder in self.folders
        )


@dataclass(frozen=True)
class StoredPlanner:
    """Plans the stored part of tables."""

    profile: Profile
    settings: SettingsCache
    store: Store
    names: StoredNames
    shared: SharedRuns = field(default_factory=dict)
    """Runs that were composed for other tables."""

    def has_run(self, name: str) -> bool:
        """Return whether a run of the table called `name` was begun."""
        key = f"queries {self.profile.flags} {name}"
        queries = self.settings.cached(key, lambda: self._distinct(load_table(name)))
        return any(map(self._is_begun, queries))

    def plan(self, tables: Iterable[PaperTable]) -> list[PlannedTable]:
        """Plan tables as they are shown (`plan_common`); runs that cannot be stored count as
        missing. If no run of a table was begun, none is composed.
        """

        def plans(profile: Profile) -> list[PlannedTable]:
            cells_of = replace(self, profile=profile)._cells
            return [PlannedTable(table, profile, cells_of(table)) for table in asked]

        asked = [*tables]
        return plan_common(self.profile, plans)

    def _cells(self, table: PaperTable) -> list[PlannedCell]:
        is_begun = any(map(self._is_begun, self._distinct(table)))
        two = len(BENCHMARK_AND_MODEL)
        known = self.shared | {
            key: PlannedRun(query, CellState.MISSING, "missing", NOT_STORED)
            for key, query in self._queries(table)
            if not (is_begun and self.names.may_have(folder_patterns(query)[:two]))
        }
        given = (self.profile, self.settings.compose, self.store)
        planned = plan(table, *given, resolve=self.settings.resolve, shared=known)
        composed = {key: run for key, run in known.items() if run.reason != NOT_STORED}
        self.shared.update(composed)
        return planned

    def _is_begun(self, query: Sequence[str]) -> bool:
        """Return whether the run of a query has a folder; the query is only composed if it may have
        one."""
        if self.names.folders is None:
            return True
        if not self.names.may_have(folder_patterns(query)):
            return False
        with suppress(DllmBenchError), local_data_only(True):
            config = self.settings.compose(query)
            spec = RunSpec.from_config(config, self.settings.resolve)
            return self.store.state(spec) is not RunState.ABSENT
        return False

    def _distinct(self, table: PaperTable) -> list[list[str]]:
        """Return the queries of the table's runs, each once, as plain data."""
        return [list(query) for query in dict.fromkeys(query for _, query in self._queries(table))]

    def _queries(self, table: PaperTable) -> Iterator[tuple[RunKey, Query]]:
        """Yield the query of each run of the table that can be made here, as far as this is
        known."""
        seen = set[RunKey]()
        for cell in cells_with_runs(table):
            cell = replace(cell, run=self.profile.run_of(table.name, cell))
            key = shared_key(cell, self.profile)
            is_elsewhere = cell.needs and not self.profile.embedded
            if key not in seen and not is_elsewhere:
                with suppress(DllmBenchError):  # `plan` gives the reason
                    yield key, self.profile.translate(cell.run)
            seen.add(key)


def cells_with_runs(table: PaperTable) -> Iterator[Cell]:
    """Yield the cells that have their own runs: plain cells, and the parts of derived ones."""
    waiting = [cell for cell in table.cells() if not cell.reported_only]
    while waiting:
        cell = waiting.pop()
        parts = table.parts(cell)
        waiting += [part for part in parts if not part.reported_only]
        if not parts:
            yield cell


def folder_patterns(query: Sequence[str]) -> Patterns:
    """Return a pattern for each folder name of a query's run, see `GROUPS`."""
    chosen = dict(override.partition("=")[::2] for override in query)
    return tuple(_folder_pattern(chosen, group) for group in GROUPS)


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
