"""The rows of `status`, a column of the index of records.

Listing thousands of sealed runs does not read their records again. Records that are new or changed
are read, and so are runs that are not sealed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dllm_bench.core.declared import fits
from dllm_bench.store.index import RecordIndex
from dllm_bench.store.store import (
    DamagedRunError,
    RunEntry,
    RunState,
    Store,
    read_entry,
)

ROWS = "status 3"  # raised when the columns of a row change
StatusRow = dict[str, Any]
"""Column -> value, plain data."""
TEXTS = ("run", "state", "done", "benchmark", "model", "decoder", "ungraded")
SEALED_ROW: dict[str, Any] = {
    **dict.fromkeys(TEXTS, str),
    **dict.fromkeys(("score", "tpf", "tps"), float | None),
    "interval": list[float] | None,
    "all": dict[str, str],
}
"""Column of a sealed run's row -> the type of its value."""


def is_sealed_row(row: Any) -> bool:
    """Whether a value, whoever made it, is the row of a sealed run."""
    is_plain = isinstance(row, dict) and row.keys() == SEALED_ROW.keys()
    return is_plain and all(fits(row[name], kind) for name, kind in SEALED_ROW.items())


def cached_rows(
    store: Store, row_of: Callable[[RunEntry], StatusRow]
) -> tuple[list[StatusRow], list[str]]:
    """The row of each run folder, by path, and a sentence for each damaged one."""
    index = RecordIndex(store, ROWS, is_sealed_row)
    rows, damages = list[StatusRow](), list[str]()
    for folder, state in index.folders():
        row = index.get(folder, state)
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
                index.put(folder, state, row)
        rows.append(row)
    index.save()
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
