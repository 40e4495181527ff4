"""Cache of `status` rows, so that listing thousands of sealed runs does not re-read their records.

A file next to the runs holds the row of every sealed record together with the record's size and
time of change. Records that are new or changed are read, and so are runs that are not sealed. If
the file cannot be written, everything is read each time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.store.cache import DerivedCache
from dllm_bench.store.nolinks import is_folder
from dllm_bench.store.store import (
    DamagedRunError,
    RunEntry,
    RunState,
    Store,
    read_entry,
    record_fingerprint,
)

FILE = ".status.json"
ROWS = "rows 3"  # raised when the columns of a row change
StatusRow = dict[str, Any]
"""Column -> value, plain data."""


def cached_rows(
    store: Store, row_of: Callable[[RunEntry], StatusRow]
) -> tuple[list[StatusRow], list[str]]:
    """The row of each run folder, by path, and a sentence for each damaged one.

    Another version, of the package or of the rows, empties the cache. A store that is an archive
    alone has none.
    """
    cache = DerivedCache(Path(store.root) / FILE, [__version__, ROWS])
    rows, damages = list[StatusRow](), list[str]()
    for folder in store.folders():
        name, state = folder.relative_to(store.root).as_posix(), record_fingerprint(folder)
        row = cache.get(name, state) if state else None
        if row is None:
            try:
                entry = read_entry(folder)
            except DamagedRunError as error:
                damages.append(str(error))
                rows.append(unreadable_row(folder))
                continue
            if entry is None:
                continue
            row = row_of(entry)
            if entry.state is RunState.DAMAGED:
                damages.append(entry.error)
            if state and entry.state is RunState.SEALED:
                cache.put(name, state, row)
        rows.append(row)
    if is_folder(Path(store.root)):
        cache.save(used_only=True)
    return rows, damages


def unreadable_row(folder: Path) -> StatusRow:
    """The row of a run that is known by its folder's name alone."""
    label, _, short = folder.name.rpartition("-")
    return {
        "run": short,
        "state": RunState.DAMAGED.value,
        "benchmark": folder.parts[-3],
        "model": folder.parts[-2],
        "decoder": label,
    }
