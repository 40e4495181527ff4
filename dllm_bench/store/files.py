"""Files that survive a crash: whole-or-absent writes, a file of whole lines, one writer at a time.

Plain POSIX (rename, fsync, flock); knows nothing of runs. A line that does not fit on the disk is
taken back, so that a file of lines never ends in the middle because of an error; a killed process
may still leave half a line, which readers leave out (`lines`). What the disk refuses is a sentence.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError

SYNC_EVERY_S = 1.0
BEAT_S = 10.0  # a lock's owner touches it so often
UNFIT = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)
DYING_S = 1.0  # a killed process frees its locks when the last of its threads is gone
GONE_S = 60.0  # a lock of another machine that nobody touched for so long is nobody's


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into a sentence."""
    try:
        yield
    except OSError as error:
        mend = "make room"
        if error.errno in UNFIT:
            mend = "make it writable, or name another place (paths.results, --out),"
        raise DllmBenchError(
            f"{path} could not be written ({error.strerror}); what is finished is kept: {mend} and "
            "give the same command again."
        ) from error


def lines(path: Path) -> list[bytes]:
    """Whole lines; a tail without a line end was cut off in the middle and does not count."""
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def write_atomic(path: Path, text: str) -> None:
    """Write `path` so that it is either whole or absent, on disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write plain data for people and programs, whole or not at all, in a folder made for it."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(plain, indent=1) + "\n")


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
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced = time.monotonic()
        self._broken = False

    def append(self, line: str) -> None:
        """Write one line; it reaches the disk within `SYNC_EVERY_S` or at `close`."""
        length = os.fstat(self._descriptor).st_size
        rest = memoryview((line + "\n").encode())
        with writing(self.path):
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
                if time.monotonic() - self._synced >= SYNC_EVERY_S:
                    self.sync()
            except OSError:
                self._broken = True
                with suppress(OSError):
                    os.ftruncate(self._descriptor, length)
                raise

    def sync(self) -> None:
        """Have everything on disk."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Have everything on disk, unless the disk already refused."""
        with writing(self.path):
            try:
                if not self._broken:
                    self.sync()
            finally:
                os.close(self._descriptor)


@dataclass
class Lock:
    """One writer per folder: an exclusive lock on a file that names its owner.

    The kernel frees the lock of a process that died here. An owner on another machine cannot be
    looked at, but touches its lock every `BEAT_S` seconds: where nobody does while `GONE_S` pass on
    this machine's own monotonic clock, the lock is taken over. An owner that comes back after that
    (a suspended job) finds it `lost` and writes no more.
    """

    path: Path
    descriptor: int = -1
    _released: threading.Event = field(default_factory=threading.Event)

    def acquire(self) -> None:
        """Take the lock; a sentence when somebody else has it."""
        with writing(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._claim(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self._released.clear()
        threading.Thread(target=self._beat, args=(self._released,), daemon=True).start()

    def _claim(self, descriptor: int) -> None:
        """Put this process's name into the file, unless its owner is there."""
        free = _flock(descriptor)
        owner = _owner(os.pread(descriptor, 4096, 0))
        host = socket.gethostname()
        if not free or (owner.get("host", host) != host and self._touched_meanwhile()):
            raise DllmBenchError(
                f"{self.path.parent} is being written by process {owner.get('pid', '?')} on "
                f"{owner.get('host', '?')}; wait for it, or delete {self.path} if it is gone."
            )
        with writing(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _mine(), 0)

    def _touched_meanwhile(self) -> bool:
        """Whether the owner shows itself within `GONE_S`."""
        seen, end = self._touched_at(), time.monotonic() + GONE_S
        while time.monotonic() < end:
            time.sleep(min(BEAT_S, GONE_S) / 2)
            if self._touched_at() != seen:
                return True
        return False

    def _touched_at(self) -> int:
        """Read through an open file, which network file systems look up anew."""
        with open(self.path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self.path)

    @property
    def lost(self) -> bool:
        """Whether somebody else took over a lock that was held."""
        return self.descriptor >= 0 and os.pread(self.descriptor, 4096, 0) != _mine()

    def release(self) -> None:
        """Let the lock go; harmless when it is not held."""
        self._released.set()
        if self.descriptor >= 0:
            if not self.lost:
                os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = -1


def _flock(descriptor: int) -> bool:
    """Lock the open file, unless somebody keeps it for `DYING_S`."""
    end = time.monotonic() + DYING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
            time.sleep(DYING_S / 50)


def _mine() -> bytes:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()


def _owner(content: bytes) -> dict[str, Any]:
    try:
        owner = json.loads(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def check_results(results: object) -> None:
    """Results need a directory of their own; an empty name would be the working directory."""
    if not isinstance(results, str) or not results:
        raise DllmBenchError(
            f"The results directory is {results!r}; name one with paths.results=DIR, --results DIR "
            "or DLLM_BENCH_RESULTS."
        )
    place = Path(results)
    if files := [path for path in (place, *place.parents) if path.is_file()]:
        raise DllmBenchError(
            f"The results directory is {results}, and {files[0]} is a file; name a directory."
        )
