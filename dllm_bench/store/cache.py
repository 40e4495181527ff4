"""Caches of derived values in a file of signed lines: a value is valid as long as its mark is
unchanged.

Each line is signed with a key of this user; lines that were changed or came with somebody else's
results folder are ignored. A mark identifies one state of files (path, time of change, size,
inode). Everything else that a value depends on is in `made_by`; lines with another `made_by` are
ignored. Several processes may append lines at once; the last line of a key counts. The file may be
deleted at any time. If it is damaged or cannot be written, values are computed again.
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
from typing import Any, NamedTuple

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.secrets import strike_out
from dllm_bench.paths import user_folder
from dllm_bench.store.files import append_bytes, stored_bytes, write_atomic
from dllm_bench.store.nolinks import is_file, is_folder, make_folder

Fingerprint = list[Any]
KEY_BYTES = 32
MADE_BY_DIGITS = 16  # hexadecimal, of a hash of `made_by`
PACKED = "runs.tar.xz"  # beside the runs folder: sealed records in one archive


class CacheLine(NamedTuple):
    """A line of the file: JSON of the mark, JSON of the value, and the whole line as stored."""

    mark: str
    value: str
    line: bytes


class DerivedCache:
    """Values by key, each with the mark of the files it was derived from. Only `save` writes the
    file.

    kind: name of this kind of values; several kinds share a file.
    made_by: dependencies of all values of the kind (versions, names of columns).
    """

    def __init__(self, path: Path, kind: str, made_by: Sequence[str]) -> None:
        self.path, self._head = writable(path), head_of(kind, made_by)
        self._others: list[bytes] = []  # lines of other kinds
        self._stale = 0  # lines that no longer count
        self._stored: dict[str, CacheLine] = {}
        self._new: dict[str, CacheLine] = {}
        self._read()

    def _read(self) -> None:
        content = b""
        with suppress(DllmBenchError):
            content = stored_bytes(self.path) or b""
        kind, own = f"{self._head.partition(' ')[0]} ".encode(), f"{self._head}\t".encode()
        for line in content.split(b"\n")[:-1]:
            stated, _, signed = line.partition(b"\t")
            is_own = signed.startswith(own)
            if not is_own and not signed.startswith(kind):
                self._others.append(line)
            elif is_own and hmac.compare_digest(stated, signature(signed).encode()):
                key, mark, value = signed.decode().split("\t")[1:]
                self._stale += key in self._stored
                self._stored[json.loads(key)] = CacheLine(mark, value, line)
            else:
                self._stale += 1

    def get(self, key: str, mark: Fingerprint) -> Any:
        """Return a copy of the value under `key`; None if there is none with this mark."""
        line = self._new.get(key) or self._stored.get(key)
        return json.loads(line.value) if line and line.mark == json.dumps(mark) else None

    def put(self, key: str, mark: Fingerprint, value: Any) -> None:
        """Keep `value`, unless JSON would change it (a tuple, for example)."""
        if json.loads(json.dumps(value)) == value:
            self._new[key] = signed_line(self._head, key, mark, value)

    def known(self) -> list[str]:
        """Return the keys of all values, valid or not."""
        return sorted({**self._stored, **self._new})

    def save(self, keep: Callable[[str], bool] = bool) -> None:
        """Append new values to the file. It is rewritten if `keep` refuses keys in it, or if many
        lines no longer count. It is not an error if the file cannot be written.
        """
        gone = [key for key in self._stored if not keep(key)]
        replaced = sum(key in self._stored for key in self._new)
        is_stale = bool(gone) or self._stale + replaced > len(self._stored) // 2
        self._stored = {key: self._stored[key] for key in self._stored if keep(key)}
        new = {key: line for key, line in self._new.items() if keep(key)}
        self._stored |= new
        self._new.clear()
        with suppress(DllmBenchError, OSError):
            if is_stale:
                lines = [*self._others, *(one.line for one in self._stored.values())]
                write_atomic(self.path, joined(lines))
                self._stale = 0
            elif new:
                add_lines(self.path, [one.line for one in new.values()])
                self._stale += replaced


def head_of(kind: str, made_by: Sequence[str]) -> str:
    """Return the beginning of every line of a kind, after its signature."""
    digest = hashlib.sha256(json.dumps(list(made_by)).encode()).hexdigest()
    return f"{kind} {digest[:MADE_BY_DIGITS]}"


def signed_line(head: str, key: str, mark: Fingerprint, value: Any) -> CacheLine:
    """Return the line of a value."""
    stated, text = json.dumps(mark), json.dumps(value)
    signed = f"{head}\t{json.dumps(key)}\t{stated}\t{text}".encode()
    return CacheLine(stated, text, signature(signed).encode() + b"\t" + signed)


def add_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Append lines to a cache in one write, because other processes append too; raises OSError."""
    make_folder(path.parent)
    append_bytes(path, joined(lines))


def joined(lines: Iterable[bytes]) -> bytes:
    """Return the lines in their stored form; secrets of this process are removed, which invalidates
    such a line."""
    return strike_out(b"".join(line + b"\n" for line in lines).decode()).encode()


def writable(path: Path) -> Path:
    """Return the path of a cache file. For a read-only archive (reference results) it is in the
    user's cache directory.
    """
    packed = (one for one in path.parents[:2] if is_file(one / PACKED))
    results = next(packed, None)
    if results is None or is_folder(results / "runs"):
        return path
    place = hashlib.sha256(str(results.resolve()).encode()).hexdigest()[:16]
    return user_folder() / place / path.name.lstrip(".")


def signature(content: bytes) -> str:
    """Return a signature of the content that only this user's processes can make."""
    return hmac.digest(_key(), content, "sha256").hex()


@cache
def _key() -> bytes:
    """Return this user's key, made on first use; if it cannot be stored, a key of this process
    only."""
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
    """Return the time of change (ns), size (bytes) and inode of a file; empty if there is no
    file."""
    try:
        stat = file.stat()
    except OSError:
        return []
    return [stat.st_mtime_ns, stat.st_size, stat.st_ino]


def fingerprints(paths: Iterable[Path]) -> Fingerprint:
    """Return the path and fingerprint of every file at or below `paths`."""
    files = {
        file.resolve()
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if not file.is_dir()
    }
    return [[str(file), *fingerprint(file)] for file in sorted(files)]
