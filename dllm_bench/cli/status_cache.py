"""Board rows of sealed runs, remembered: thousands of records are not read again to be listed.

A file beside the runs holds the row of every sealed record under its size and time of change; a
record that was changed, or that is new, is read. Where the file cannot be written all is read each
time. Left out: runs that are not sealed, which are always looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dllm_bench import __version__
from dllm_bench.store.cache import DerivedCache
from dllm_bench.store.store import RunEntry, RunState, Store, read_entry, record_fingerprint

FILE = ".board.json"
Row = Sequence[str]


def rows(store: Store, columns: Row, row_of: Callable[[RunEntry], Row]) -> list[Row]:
    """One row per run folder, by path; `columns` says what a row is, for the next version."""
    cache = DerivedCache(Path(store.root) / FILE, [__version__, *columns])
    listed: list[Row] = []
    for folder in store.folders():
        name, state = folder.relative_to(store.root).as_posix(), record_fingerprint(folder)
        known = cache.get(name, state) if state else None
        if known is None:
            entry = read_entry(folder)
            if entry is None:
                continue
            known = list(row_of(entry))
            if state and entry.state is RunState.SEALED:
                cache.put(name, state, known)
        listed.append(known)
    cache.save(used_only=True)
    return listed
