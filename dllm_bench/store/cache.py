"""A cache of derived values in one file: a value is valid while its fingerprint is the same.

The file is signed with a key of this user: one that came with somebody else's results folder, or
was changed, is ignored. A fingerprint tells one state of files from another (path, time of change,
size, inode). Everything else that the values depend on is in `made_by`; a file with another
`made_by` is ignored. The file may be deleted at any time. If it is damaged or cannot be written,
values are computed again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import user_folder
from dllm_bench.store.files import stored_bytes, write_atomic
from dllm_bench.store.nolinks import is_file, is_folder

Fingerprint = list[Any]
MADE_BY, ENTRIES, MARK, VALUE = "made_by", "known", "mark", "value"  # keys of the JSON
KEY_BYTES = 32
PACKED = "runs.tar.xz"  # beside the runs folder: sealed records in one archive


class DerivedCache:
    """Values by key, each with the fingerprint it was derived under. Only `save` writes the file.

    made_by: what all values depend on (versions, names of columns).
    """

    def __init__(self, path: Path, made_by: Sequence[str]) -> None:
        self.path, self.made_by = writable(path), list(made_by)
        self._stored = self._read()
        self._used: dict[str, dict[str, Any]] = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = stored_bytes(self.path) or b""
            stated, _, body = content.decode().partition("\n")
            if not hmac.compare_digest(stated.encode(), signature(body).encode()):
                return {}
            plain = json.loads(body)
            return dict(plain[ENTRIES]) if plain[MADE_BY] == self.made_by else {}
        except (DllmBenchError, ValueError, KeyError, TypeError):
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

    def known(self) -> list[str]:
        """The keys of all values, valid or not."""
        return sorted({**self._stored, **self._used})

    def save(self, keep: Callable[[str], bool] = bool) -> None:
        """Write the file if anything changed; only entries whose key `keep` accepts stay in it.

        A file that cannot be written is no error.
        """
        every = {**self._stored, **self._used}
        entries = {key: entry for key, entry in every.items() if keep(key)}
        if entries == self._stored:
            return
        body = json.dumps({MADE_BY: self.made_by, ENTRIES: entries}) + "\n"
        with suppress(DllmBenchError):
            write_atomic(self.path, f"{signature(body)}\n{body}")


def writable(path: Path) -> Path:
    """The path of a cache; beside runs that are an archive alone (reference results) it would be
    in a folder that nothing is written to, so that cache is in this user's folder of caches.
    """
    packed = (one for one in path.parents[:2] if is_file(one / PACKED))
    results = next(packed, None)
    if results is None or is_folder(results / "runs"):
        return path
    place = hashlib.sha256(str(results.resolve()).encode()).hexdigest()[:16]
    return user_folder() / place / path.name.lstrip(".")


def signature(body: str) -> str:
    """A mark of text that this user's processes alone can make."""
    return hmac.new(_key(), body.encode(errors="surrogatepass"), "sha256").hexdigest()


@cache
def _key() -> bytes:
    """This user's key, made on first use; one of this process alone if it cannot be stored."""
    fresh = os.urandom(KEY_BYTES)
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home directory
        folder = user_folder()
        path = folder / "key"
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(fresh)
        stored = path.read_bytes()
        return stored if len(stored) == KEY_BYTES else fresh
    return fresh


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
