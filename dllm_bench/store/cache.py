"""Cache of derived values: a value is valid as long as the fingerprint of its files is unchanged.

Each results directory has a file for each kind of values. It lies in this user's cache folder: a
results directory may come from a stranger, and some are read-only. A fingerprint identifies one
state of files (path, time of change, size, inode). Everything else that a value depends on is in
`made_by`; a file with another `made_by` is ignored. The file may be deleted at any time. If it is
damaged or cannot be written, values are computed again. If several processes save at once, the
values of the last one stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.secrets import strike_out
from dllm_bench.paths import cache_file
from dllm_bench.store.files import lstat, stored_bytes, write_atomic
from dllm_bench.store.spec import digest

Fingerprint = list[Any]


class DerivedCache:
    """Values by key, each with the fingerprint of the files it was derived from. Only `save` writes
    the file.

    results: the results directory; kind: name of this kind of values; made_by: dependencies of all
    values of the kind (versions, names of columns).
    """

    def __init__(self, results: Path, kind: str, made_by: Sequence[str]) -> None:
        self.path, self._made_by = cache_file(results, f"{kind}.json"), digest(list(made_by))
        self._values = self._read()
        self._has_new = False

    def _read(self) -> dict[str, tuple[str, str]]:
        """Return key -> (fingerprint, value), both as JSON, since few of them are needed."""
        with suppress(DllmBenchError, ValueError, LookupError, TypeError, AttributeError):
            plain = json.loads(stored_bytes(self.path) or b"{}")
            if plain["made_by"] == self._made_by:
                return {key: (state, value) for key, (state, value) in plain["values"].items()}
        return {}

    def get(self, key: str, state: Fingerprint) -> Any:
        """Return a copy of the value under `key`; None if there is none with this fingerprint."""
        stored, value = self._values.get(key, ("", ""))
        return json.loads(value) if stored == json.dumps(state) else None

    def put(self, key: str, state: Fingerprint, value: Any) -> None:
        """Keep `value`, unless JSON would change it (a tuple, for example) or it holds a secret."""
        text = json.dumps(value)
        if json.loads(text) == value and strike_out(text) == text:
            self._values[key] = json.dumps(state), text
            self._has_new = True

    def known(self) -> list[str]:
        """Return the keys of all values, valid or not."""
        return sorted(self._values)

    def save(self, keep: Callable[[str], bool] = bool) -> None:
        """Write the file if values are new, or if `keep` refuses keys, which are removed. It is not
        an error if the file cannot be written.
        """
        kept = {key: value for key, value in self._values.items() if keep(key)}
        if not self._has_new and len(kept) == len(self._values):
            return
        self._values, self._has_new = kept, False
        with suppress(DllmBenchError, OSError):
            text = json.dumps({"made_by": self._made_by, "values": kept})
            write_atomic(self.path, text, durable=False)


def fingerprint(file: Path) -> Fingerprint:
    """Return the time of change (ns), size (bytes) and inode of a file; empty without one."""
    found = lstat(file)
    return [found.st_mtime_ns, found.st_size, found.st_ino] if found else []


def fingerprints(paths: Iterable[Path]) -> Fingerprint:
    """Return the path and fingerprint of every file at or below `paths`; links are followed."""
    files = {
        file.resolve()
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if not file.is_dir()
    }
    return [[str(file), *fingerprint(file)] for file in sorted(files)]
