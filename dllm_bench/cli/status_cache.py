"""Cache of `status` rows, so that listing thousands of sealed runs does not re-read their records.

A file next to the runs holds the row of every sealed record together with the record's size and
time of change. Records that are new or changed are read, and so are runs that are not sealed. If
the file cannot be written, everything is read each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dllm_bench import __version__
from dllm_bench.store.cache import DerivedCache
from dllm_bench.store.store import RunEntry, RunState, Store, read_entry, record_fingerprint

FILE = ".status.json"
StatusRow = Sequence[str]


def cached_rows(
    store: Store, columns: StatusRow, row_of: Callable[[RunEntry], StatusRow]
) -> list[StatusRow]:
    """The row of each run folder, by path; another version or other `columns` empty the cache."""
    cache = DerivedCache(Path(store.root) / FILE, [__version__, *columns])
    rows: list[StatusRow] = []
    for folder in store.folders():
        name, state = folder.relative_to(store.root).as_posix(), record_fingerprint(folder)
        row = cache.get(name, state) if state else None
        if row is None:
            entry = read_entry(folder)
            if entry is None:
                continue
            row = list(row_of(entry))
            if state and entry.state is RunState.SEALED:
                cache.put(name, state, row)
        rows.append(row)
    cache.save(used_only=True)
    return rows
