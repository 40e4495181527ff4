"""A cache of derived values in one JSON file: a value is valid while its fingerprint is the same.

A fingerprint tells one state of files from another (path, time of change, size, inode). Everything
else that the values depend on is in `made_by`; a file with another `made_by` is ignored. The file
may be deleted at any time. If it is damaged or cannot be written, values are computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import explain_write_errors, write_atomic

Fingerprint = list[Any]
MADE_BY, ENTRIES, MARK, VALUE = "made_by", "known", "mark", "value"  # keys of the JSON file


class DerivedCache:
    """Values by key, each with the fingerprint it was derived under. Only `save` writes the file.

    made_by: what all values depend on (versions, names of columns).
    """

    def __init__(self, path: Path, made_by: Sequence[str]) -> None:
        self.path, self.made_by = path, list(made_by)
        self._stored = self._read()
        self._used: dict[str, dict[str, Any]] = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            plain = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(plain[ENTRIES]) if plain[MADE_BY] == self.made_by else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def get(self, key: str, fingerprint: Fingerprint) -> Any:
        """A copy of the value under `key`; None if there is none with this fingerprint."""
        entry = self._used.get(key) or self._stored.get(key, {})
        if entry.get(MARK) != fingerprint:
            return None
        self._used[key] = entry
        return json.loads(entry[VALUE])

    def put(self, key: str, fingerprint: Fingerprint, value: Any) -> None:
        """Keep `value`, unless JSON would change it (a tuple, for example)."""
        text = json.dumps(value)
        if json.loads(text) == value:
            self._used[key] = {MARK: fingerprint, VALUE: text}

    def save(self, used_only: bool = False) -> None:
        """Write the file if anything changed; `used_only` drops entries not used since it was read.

        A file that cannot be written is no error.
        """
        entries = self._used if used_only else {**self._stored, **self._used}
        if entries == self._stored:
            return
        with suppress(DllmBenchError), explain_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({MADE_BY: self.made_by, ENTRIES: entries}) + "\n")


def fingerprint(file: Path) -> Fingerprint:
    """Time of change (ns), size (bytes) and inode of a file; empty if there is no file."""
    try:
        stat = file.stat()
    except OSError:
        return []
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def fingerprints(paths: Iterable[Path]) -> Fingerprint:
    """Path and fingerprint of every file at or below `paths`."""
    files = {
        file.resolve()
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if not file.is_dir()
    }
    return [[str(file), *fingerprint(file)] for file in sorted(files)]
