"""What was worked out before, kept in one JSON file: a value under a key while its mark holds.

A mark is what tells one state of files from another (path, time of change, size, inode); all else
that values depend on is in `made_by`, and a file made by something else is forgotten whole. Safe to
delete at any time; where it is damaged or cannot be written, everything is worked out anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import write_atomic, writing

Mark = list[Any]
MARK, VALUE = "mark", "value"


class Memory:
    """Key -> value with the mark it was made under; written by `save` alone."""

    def __init__(self, path: Path, made_by: Sequence[str]) -> None:
        self.path, self.made_by = path, list(made_by)
        self._stored = self._read()
        self._used: dict[str, dict[str, Any]] = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return dict(found["known"]) if found["made_by"] == self.made_by else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def recall(self, key: str, mark: Mark) -> Any:
        """A copy of the value kept under `key`, None where there is none with this mark."""
        entry = self._used.get(key) or self._stored.get(key, {})
        if entry.get(MARK) != mark:
            return None
        self._used[key] = entry
        return json.loads(entry[VALUE])

    def keep(self, key: str, mark: Mark, value: Any) -> None:
        """Remember `value`, unless JSON would change it."""
        text = json.dumps(value)
        if json.loads(text) == value:
            self._used[key] = {MARK: mark, VALUE: text}

    def save(self, used_only: bool = False) -> None:
        """Write what is known; `used_only` leaves out what nobody asked for since it was read."""
        known = self._used if used_only else {**self._stored, **self._used}
        if known == self._stored:
            return
        with suppress(DllmBenchError), writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps({"made_by": self.made_by, "known": known}) + "\n")


def mark(file: Path) -> Mark:
    """What changes when the file at `file` does; empty where there is none."""
    try:
        stat = file.stat()
    except OSError:
        return []
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def marks(places: Iterable[Path]) -> Mark:
    """Path and mark of every file at or below `places`."""
    files = {
        file.resolve()
        for place in places
        for file in (place.rglob("*") if place.is_dir() else [place])
        if not file.is_dir()
    }
    return [[str(file), *mark(file)] for file in sorted(files)]
