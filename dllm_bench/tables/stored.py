"""Planning the part of a table that is stored, without composing all of its runs.

Composing a run takes Hydra a tenth of a second, and all tables have a thousand. A run is stored in
`<benchmark>/<model>/<decoder>-<hash>`, so the names that a query gives to these say whether it may
have a folder. Only queries that may are composed and looked up by their hash; the others are
missing. Equal decoders are one run under any name, so a decoder's name only decides whether a table
is worth composing at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from dllm_bench.benchmarks.items import local_data_only
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_file, options
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.spec import RunSpec, slug
from dllm_bench.store.store import RunState, Store
from dllm_bench.tables.load import load_table, read_yaml
from dllm_bench.tables.plan import (
    CellState,
    PlannedCell,
    PlannedRun,
    RunKey,
    SharedRuns,
    plan,
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
    """Benchmark, model and decoder, as folders are called; None: any may be stored."""

    @classmethod
    def of(cls, store: Store) -> StoredNames:
        """Read the names of a store's folders, and no file in them."""
        parts = (folder.relative_to(store.root).parts for folder in store.folders())
        return cls(frozenset((*names, last.rpartition("-")[0]) for *names, last in parts))

    def may_have(self, patterns: Sequence[str]) -> bool:
        """Whether a run may be stored, by patterns of its first names (`folder_patterns`)."""
        return self.folders is None or any(
            all(map(fnmatchcase, folder, patterns)) for folder in self.folders
        )


@dataclass(frozen=True)
class StoredPlanner:
    """Plans tables as far as they are stored."""

    profile: Profile
    settings: SettingsCache
    store: Store
    names: StoredNames
    shared: SharedRuns = field(default_factory=dict)
    """Runs that were composed for other tables."""

    def has_run(self, name: str) -> bool:
        """Whether a run of the table called `name` was begun."""
        key = f"queries {self.profile.flags} {name}"
        queries = self.settings.cached(key, lambda: self._distinct(load_table(name)))
        return any(map(self._is_begun, queries))

    def plan(self, table: PaperTable) -> list[PlannedCell]:
        """Return the table's cells; runs that cannot be stored are missing ones. If no run of the
        table was begun, none is composed.
        """
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
        """Whether the run of a query has a folder; only one that may have is composed."""
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
        """The queries of the table's runs, each once, as plain data."""
        return [list(query) for query in dict.fromkeys(query for _, query in self._queries(table))]

    def _queries(self, table: PaperTable) -> Iterator[tuple[RunKey, Query]]:
        """Yield the query of each run of the table that can be made here, as far as known."""
        seen = set[RunKey]()
        for cell in cells_with_runs(table):
            cell = replace(cell, run=self.profile.run_of(table.name, cell))
            key = shared_key(cell)
            is_elsewhere = cell.needs and not self.profile.embedded
            if key not in seen and not is_elsewhere:
                with suppress(DllmBenchError):  # `plan` gives the reason
                    yield key, self.profile.translate(cell.run)
            seen.add(key)


def cells_with_runs(table: PaperTable) -> Iterator[Cell]:
    """Yield the cells that have runs of their own: all but derived ones, and what these need."""
    waiting = [cell for cell in table.cells() if not cell.reported_only]
    while waiting:
        cell = waiting.pop()
        parts = table.parts(cell)
        waiting += [part for part in parts if not part.reported_only]
        if not parts:
            yield cell


def folder_patterns(query: Sequence[str]) -> Patterns:
    """Return a pattern of each name in the folder of a query's run, see `GROUPS`."""
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
    """Return the folder name of a choice of a group, if its file has it as text."""
    if option not in options(group):
        return ANY
    name = str(read_yaml(conf_file(f"{group}/{option}.yaml")).get("name", option))
    return ANY if "${" in name else slug(name)


@lru_cache
def _pattern_of_pieces(decoder: str, pieces: frozenset[tuple[str, str]]) -> str:
    """Return what a folder's name adds for the pieces (slot, name) chosen instead of a decoder's.

    That is known of a single one, in a slot that the decoder's own file fills.
    """
    if not pieces or decoder not in options("decoder"):
        return ANY if pieces else ""
    defaults = read_yaml(conf_file(f"decoder/{decoder}.yaml")).get("defaults", ())
    own = {
        slot.removeprefix("override "): name
        for one in defaults
        if isinstance(one, dict)
        for slot, name in one.items()
    }
    changed = [(slot, name) for slot, name in pieces if own.get(slot) != name]
    if len(changed) > 1 or any(slot not in own for slot, _ in changed):
        return ANY
    return "".join(f"-{slug(f'{slot}.{name}')}" for slot, name in changed)
