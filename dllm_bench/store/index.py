"""The index of a store's sealed records: what lists and estimates need of each, in one file.

A value is derived from one record and valid while the record's fingerprint stays the same; of an
archived record, while the archive does. Each user of the index has a column of its own. Runs are
found without unpacking the archive as long as it did not change. See `DerivedCache` for what is
trusted.

An archive may come with an index of its own beside it, made where the archive was (`ship`), so that
nobody has to unpack it to list its runs. It counts if it states the archive's sha256, and it is as
trustworthy as the archive: each user of the index says which values it accepts.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_bench import __version__
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
from dllm_bench.store.nolinks import lstat, matching
from dllm_bench.store.store import Store

FILE = ".index.json"  # in the runs folder
PACKED = "packed"  # key of the names of the archived runs
SHIPPED = "index.json.xz"  # beside an archive
ARCHIVE, VALUES = "archive", "values"  # keys of its JSON: the archive's sha256, values by key


class RecordIndex:
    """One column of the index: values of sealed records.

    column: its name, which changes when what the values hold does.
    accepts: whether a value from elsewhere is one of the column.
    """

    def __init__(
        self, store: Store, column: str, accepts: Callable[[Any], bool] = lambda value: False
    ) -> None:
        self.root, self.column, self._accepts = Path(store.root), column, accepts
        self._cache = DerivedCache(self.root / FILE, [__version__])
        self._names: set[str] = set()

    def folders(self) -> Iterator[tuple[Path, Fingerprint]]:
        """Yield every run folder, by path, with its record's fingerprint: empty if not sealed."""
        archive = self._archive
        packed = set(self._packed(archive))
        on_disk = matching(self.root, "*/*/*")
        names = {path.relative_to(self.root).as_posix() for path in on_disk}
        self._names = names | packed
        for name in sorted(self._names, key=lambda name: self.root / name):
            own = _fingerprint(self.root / name / RECORD) if name in names else []
            yield self.root / name, own or (archive if name in packed else [])

    def _packed(self, archive: Fingerprint) -> list[str]:
        """The names of the archived runs."""
        names = self._cache.get(PACKED, archive) if archive else []
        if names is None:
            names = self._shipped.get(PACKED) or list(archived(self.root).records)
            self._cache.put(PACKED, archive, names)
        return list(names)

    def get(self, folder: Path, fingerprint: Fingerprint) -> Any:
        """The value of the record in a folder; None if it is not known."""
        key = self._key(folder)
        value = self._cache.get(key, fingerprint) if fingerprint else None
        is_packed = fingerprint == self._archive
        if value is None and fingerprint and is_packed and self._accepts(self._shipped.get(key)):
            value = self._shipped[key]
            self._cache.put(key, fingerprint, value)
        return value

    @cached_property
    def _archive(self) -> Fingerprint:
        return _fingerprint(archive_of(self.root))

    @cached_property
    def _shipped(self) -> Mapping[str, Any]:
        """Values by key that came with the archive, if they state its sha256."""
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
        """Write the index of the archived runs beside the archive, with every column known here."""
        values = {key: self._cache.get(key, self._archive) for key in self._cache.known()}
        kept = {key: value for key, value in values.items() if value is not None}
        text = json.dumps({ARCHIVE: sha256_of(archive_of(self.root)), VALUES: kept}, sort_keys=True)
        write_atomic(self.root.with_name(SHIPPED), lzma.compress(text.encode(), preset=9))

    def put(self, folder: Path, fingerprint: Fingerprint, value: Any) -> None:
        """Keep the value of a sealed record."""
        self._cache.put(self._key(folder), fingerprint, value)

    def save(self) -> None:
        """Write the file if anything changed, without the runs that are gone."""
        self._cache.save(lambda key: key == PACKED or key.rpartition(" ")[2] in self._names)

    def _key(self, folder: Path) -> str:
        return f"{self.column} {folder.relative_to(self.root).as_posix()}"


def _fingerprint(file: Path) -> Fingerprint:
    """Time of change (ns), size and inode of a file below a results folder; empty without one."""
    found = lstat(file)
    return [found.st_mtime_ns, found.st_size, found.st_ino] if found else []
