"""The index of a store's sealed records: `IndexedRun` of each, in one file.

Code that writes records updates it (`indexed.add`); missing values are read and added. A value is
valid as long as its record's fingerprint (for an archived record, the archive's) is unchanged. Runs
are found without unpacking the archive as long as it is unchanged. See `DerivedCache` for which
lines are trusted.

An archive may come with its own index, made together with it (`ship`), so that its runs can be
listed without unpacking. It is used if it states the archive's sha256. It is as trustworthy as the
archive, and its types are checked.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.archive import (
    RECORD,
    archive_of,
    archived,
    is_run_folder,
    sha256_of,
    unpacked,
)
from dllm_bench.store.cache import DerivedCache, Fingerprint
from dllm_bench.store.files import write_atomic
from dllm_bench.store.indexed import FILE, KIND, MADE_BY, IndexedRun, fingerprint_of, key_of
from dllm_bench.store.nolinks import matching
from dllm_bench.store.spec import digest
from dllm_bench.store.store import (
    DamagedRunError,
    RunEntry,
    RunState,
    Store,
    read_entry,
    read_record,
)

PACKED = "packed"  # key of the names of the archived runs
SHIPPED = "index.json.xz"  # beside an archive
ARCHIVE, VALUES = "archive", "values"  # keys of its JSON: the archive's sha256, values by key


class RecordIndex:
    """The index of a store."""

    def __init__(self, store: Store) -> None:
        self.root = Path(store.root)
        self._cache = DerivedCache(self.root / FILE, KIND, MADE_BY)
        self._names: set[str] = set()
        self._ids: dict[str, list[str]] = {}

    def folders(self) -> Iterator[tuple[Path, Fingerprint]]:
        """Yield every run folder, by path, with its record's fingerprint: empty if not sealed."""
        archive = self._archive
        packed = set(self._packed(archive))
        on_disk = matching(self.root, "*/*/*")
        names = {path.relative_to(self.root).as_posix() for path in on_disk}
        self._names = names | packed
        for name in sorted(self._names, key=lambda name: self.root / name):
            own = fingerprint_of(self.root / name / RECORD) if name in names else []
            yield self.root / name, own or (archive if name in packed else [])

    def _packed(self, archive: Fingerprint) -> list[str]:
        """Return the names of the archived runs."""
        names = self._cache.get(PACKED, archive) if archive else []
        if names is None:
            names = self._shipped.get(PACKED) or list(archived(self.root).records)
            self._cache.put(PACKED, archive, names)
        return list(names)

    def sealed(self) -> Iterator[IndexedRun]:
        """Yield every sealed run, by path; damaged ones are left out."""
        for folder, mark in self.folders():
            with suppress(DllmBenchError):
                run = self._get(folder, mark) or (self._read(folder, mark) if mark else None)
                if isinstance(run, IndexedRun):
                    yield run
        self.save()

    def runs(self) -> Iterator[tuple[Path, IndexedRun | RunEntry | DamagedRunError]]:
        """Yield each run folder, by path, with its information: for a sealed run from the index,
        otherwise from the folder now, or the reason why that cannot be read.
        """
        for folder, mark in self.folders():
            try:
                run = self._get(folder, mark) or self._read(folder, mark)
            except DamagedRunError as error:
                yield folder, error
                continue
            if run is not None:
                yield folder, run
        self.save()

    def entries(self, unreadable: list[str]) -> Iterator[RunEntry]:
        """Yield every run folder, by path, with `IndexedRun.record` instead of a sealed run's
        record. For a run that cannot be read, a message is added to `unreadable` instead.
        """
        for folder, mark in self.folders():
            try:
                known = self._get(folder, mark)
                run = known if known and known.is_own else self._read(folder, mark)
                entry = self._entry(folder, run) if isinstance(run, IndexedRun) else run
            except (DllmBenchError, KeyError) as error:  # KeyError: changed since it was listed
                unreadable.append(str(error))
                continue
            if entry is not None:
                yield entry
        self.save()

    def _entry(self, folder: Path, run: IndexedRun) -> RunEntry:
        """Return a sealed run as an entry; for runs with the same samples, one record is read for
        their common ids.
        """

        def ids_of(stated: str) -> list[str]:
            if stated not in self._ids:
                whole = read_record(folder)
                ids = whole.columns["id"] if whole else []
                self._ids[digest(ids)] = ids
            return self._ids[stated]

        record, n = run.record(ids_of), run.samples
        return RunEntry(folder, RunState.SEALED, record.spec, n, n, record=record)

    def _get(self, folder: Path, mark: Fingerprint) -> IndexedRun | None:
        """Return the index's value for a sealed record; None if there is none."""
        key = key_of(self.root, folder)
        plain = self._cache.get(key, mark) if mark else None
        if plain is not None:
            return IndexedRun.of_line(plain)
        if mark and mark == self._archive and key in self._shipped:
            with suppress(ValueError):
                run = replace(made_from(IndexedRun, self._shipped[key]), is_own=False)
                self._cache.put(key, mark, asdict(run))
                return run
        return None

    def _read(self, folder: Path, mark: Fingerprint) -> IndexedRun | RunEntry | None:
        """Read the folder and return its content, added to the index if it is a sealed record."""
        entry = read_entry(folder)
        if entry is None or entry.record is None or not mark:
            return entry
        run = IndexedRun.of(entry.record)
        self._cache.put(key_of(self.root, folder), mark, asdict(run))
        return run

    @cached_property
    def _archive(self) -> Fingerprint:
        return fingerprint_of(archive_of(self.root))

    @cached_property
    def _shipped(self) -> Mapping[str, Any]:
        """Return the values by key that came with the archive, if they state its sha256."""
        try:
            plain = json.loads(unpacked(self.root.with_name(SHIPPED)))
            names = plain[VALUES].get(PACKED, ())
            is_of_archive = plain[ARCHIVE] == sha256_of(archive_of(self.root))
            return dict(plain[VALUES]) if is_of_archive and all(map(is_run_folder, names)) else {}
        except (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError):
            return {}
        except (lzma.LZMAError, RecursionError, DllmBenchError):
            return {}

    def ship(self) -> None:
        """Write the index of the archived runs next to the archive."""
        values = {key: self._cache.get(key, self._archive) for key in self._cache.known()}
        kept = {key: value for key, value in values.items() if value is not None}
        text = json.dumps({ARCHIVE: sha256_of(archive_of(self.root)), VALUES: kept}, sort_keys=True)
        write_atomic(self.root.with_name(SHIPPED), lzma.compress(text.encode(), preset=9))

    def save(self) -> None:
        """Write new values, and drop those of runs that are gone."""
        self._cache.save(lambda key: key == PACKED or key in self._names)
