"""Files that survive a crash: whole-or-absent writes, a file of whole lines, one writer at a time.

Plain POSIX (rename, fsync, flock); knows nothing of runs. A line that does not fit on the disk is
taken back, so that a file of lines never ends in the middle because of an error; a killed process
may still leave half a line, which readers leave out (`lines`).
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm_bench.core.request import DllmBenchError

SYNC_EVERY_S = 1.0


def lines(path: Path) -> list[bytes]:
    """Whole lines; a tail without a line end was cut off in the middle and does not count."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def write_atomic(path: Path, text: str) -> None:
    """Write `path` so that it is either whole or absent, on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appender:
    """A file that only grows, by whole lines; a line that did not fit is taken back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced = time.monotonic()
        self._broken = False

    def append(self, line: str) -> None:
        """Write one line; it reaches the disk within `SYNC_EVERY_S` or at `close`."""
        length = os.fstat(self._descriptor).st_size
        rest = memoryview((line + "\n").encode())
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if time.monotonic() - self._synced >= SYNC_EVERY_S:
                self.sync()
        except OSError as error:
            self._broken = True
            os.ftruncate(self._descriptor, length)
            raise DllmBenchError(
                f"{self.path} could not be written ({error.strerror}); what is finished is kept: "
                "make room and give the same command again."
            ) from error

    def sync(self) -> None:
        """Have everything on disk."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Have everything on disk, unless the disk already refused."""
        if not self._broken:
            self.sync()
        os.close(self._descriptor)


@dataclass
class Lock:
    """One writer per folder: an exclusive lock on a file that names its owner.

    The kernel frees the lock of a process that died; an owner on another machine cannot be looked
    at from here, so its lock stands until it is removed by hand.
    """

    path: Path
    descriptor: int = -1

    def acquire(self) -> None:
        """Take the lock; a sentence when somebody else has it."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:
            free = False
        owner = _owner(os.pread(descriptor, 4096, 0))
        host = socket.gethostname()
        if not free or owner.get("host", host) != host:
            os.close(descriptor)
            raise DllmBenchError(
                f"{self.path.parent} is being written by process {owner.get('pid', '?')} on "
                f"{owner.get('host', '?')}; wait for it, or delete {self.path} if it is gone."
            )
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "host": host}).encode(), 0)
        self.descriptor = descriptor

    def release(self) -> None:
        """Let the lock go; harmless when it is not held."""
        if self.descriptor >= 0:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = -1


def _owner(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
