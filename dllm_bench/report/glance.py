"""Board rows of sealed runs, remembered: thousands of records are not read again to be listed.

A file beside the runs holds the row of every sealed record under its size and time of change; a
record that was changed, or that is new, is read. Where the file cannot be written all is read each
time. Left out: runs that are not sealed, which are always looked at.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.core.request import DllmBenchError
from dllm_bench.runs.files import write_atomic
from dllm_bench.runs.store import RECORD, Entry, State, Store, read_entry

FILE = ".board.json"
Row = Sequence[str]


def rows(store: Store, columns: Row, row_of: Callable[[Entry], Row]) -> list[Row]:
    """One row per run folder, by path; `columns` says what a row is, for the next version."""
    path, made_by = Path(store.root) / FILE, [__version__, *columns]
    known = _read(path, made_by)
    listed: list[Row] = []
    sealed: dict[str, Any] = {}
    for folder in store.folders():
        name, mark = folder.relative_to(store.root).as_posix(), _mark(folder / RECORD)
        if mark and known.get(name, {}).get("mark") == mark:
            sealed[name] = known[name]
        else:
            entry = read_entry(folder)
            if entry is None:
                continue
            row = row_of(entry)
            if mark is None or entry.state is not State.SEALED:
                listed.append(row)
                continue
            sealed[name] = {"mark": mark, "row": list(row)}
        listed.append(sealed[name]["row"])
    if sealed != known:
        with suppress(DllmBenchError):
            write_atomic(path, json.dumps({"made_by": made_by, "sealed": sealed}) + "\n")
    return listed


def _mark(record: Path) -> list[int] | None:
    """What tells one state of a record from another; None without a record."""
    try:
        stat = record.stat()
    except OSError:
        return None
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def _read(path: Path, made_by: Row) -> dict[str, Any]:
    """What is remembered; nothing where it was made by another version, or is damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return dict(found["sealed"]) if found["made_by"] == list(made_by) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
