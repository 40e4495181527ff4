"""The index of a store's sealed records: what lists and estimates need of each, in one file.

A value is derived from one record and valid while the record's fingerprint stays the same; of an
archived record, while the archive does. Each user of the index has a column of its own. Runs are
found without unpacking the archive as long as it did not change. See `DerivedCache` for what is
trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.store.archive import RECORD, archive_of, archived
from dllm_bench.store.cache import DerivedCache, Fingerprint
from dllm_bench.store.nolinks import lstat, matching
from dllm_bench.store.store import Store

FILE = ".index.json"  # in the runs folder
PACKED = "packed"  # key of the names of the archived runs


class RecordIndex:
    """One column of the index: values of sealed records.

    column: its name, which changes when what the values hold does.
    """

    def __init__(self, store: Store, column: str) -> None:
        self.root, self.column = Path(store.root), column
        self._cache = DerivedCache(self.root / FILE, [__version__])
        self._names: set[str] = set()

    def folders(self) -> Iterator[tuple[Path, Fingerprint]]:
        """Yield every run folder, by path, with its record's fingerprint: empty if not sealed."""
        archive = _fingerprint(archive_of(self.root))
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
            names = list(archived(self.root).records)
            self._cache.put(PACKED, archive, names)
        return list(names)

    def get(self, folder: Path, fingerprint: Fingerprint) -> Any:
        """The value of the record in a folder; None if it is not known."""
        return self._cache.get(self._key(folder), fingerprint) if fingerprint else None

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
