"""Files that survive a crash: atomic writes, files of whole lines, and a lock for one writer.

Plain POSIX calls (rename, fsync, flock); this file knows nothing about runs. If a line does not fit
on the disk it is removed again, so an error never leaves half a line. A killed process can still
leave half a line; `whole_lines` skips it. Errors of the disk become a `DllmBenchError`.
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
from dllm_bench.paths import expanded

SYNC_EVERY_S = 1.0  # an `Appender` calls fsync at most this often
BEAT_S = 10.0  # the owner of a lock touches it this often
DYING_S = 1.0  # a killed process keeps its locks until the last of its threads has ended
GONE_S = 60.0  # a lock of another machine that was not touched for this long is taken over
UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EEXIST)


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError raised in the block into a DllmBenchError about writing `path`."""
    try:
        yield
    except OSError as error:
        remedy = "make room"
        if error.errno in UNWRITABLE:
            remedy = "make it writable, or name another place (paths.results, --out),"
        raise DllmBenchError(
            f"{path} could not be written ({error.strerror}); what is finished is kept: {remedy} "
            "and give the same command again."
        ) from error


def stored_bytes(path: Path) -> bytes | None:
    """The content of a file, None if there is none; DllmBenchError if it cannot be read."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DllmBenchError(
            f"{path} cannot be read ({error.strerror}); make it readable, or move it away."
        ) from error


def whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that end in a newline; none if there is no file."""
    return (stored_bytes(path) or b"").split(b"\n")[:-1]


def every_line(path: Path) -> list[bytes]:
    """The lines of a file that is replaced as a whole, the last one with or without a newline."""
    content = stored_bytes(path) or b""
    return content.removesuffix(b"\n").split(b"\n") if content else []


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path in the same folder; when the block ends, its file replaces `path`.

    The file is on disk when the block is left. On any error the temporary file is removed and
    `path` stays as it was.
    """
    temporary = path.with_name(path.name + ".tmp")
    with explain_write_errors(path):
        try:
            yield temporary
            _sync(temporary)
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write the whole file or leave the old one; text is UTF-8 with `\\n` line ends."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write plain data as indented JSON, atomically; makes the folder."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(plain, indent=1) + "\n")


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Appender:
    """Appends whole lines to a file; a line that does not fit on the disk is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_write_errors(path):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._synced = time.monotonic()
        self._broken = False

    def append(self, line: str) -> None:
        """Write one line; it is on disk within `SYNC_EVERY_S` of the next line, or at `close`."""
        if not is_at(self._descriptor, self.path):
            raise DllmBenchError(
                f"{self.path} was deleted or replaced while a run was writing it, and what it held "
                "is gone; give the same command again, which decodes it again."
            )
        length = os.fstat(self._descriptor).st_size
        rest = memoryview((line + "\n").encode())
        with explain_write_errors(self.path):
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
        """Wait until every line is on disk."""
        os.fsync(self._descriptor)
        self._synced = time.monotonic()

    def close(self) -> None:
        """Sync, unless a write failed before, and close the file."""
        with explain_write_errors(self.path):
            try:
                if not self._broken:
                    self.sync()
            finally:
                os.close(self._descriptor)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


@dataclass
class Lock:
    """One writer per folder: an exclusive lock on a file that contains its owner's pid and host.

    The kernel releases the lock of a process that died on this machine. A process on another
    machine cannot be checked, but touches its lock every `BEAT_S` seconds: if nobody does for
    `GONE_S` seconds of this machine's monotonic clock, the lock is taken over. An owner that
    continues after that (a suspended job), or whose lock file was deleted, finds the lock `lost`
    and stops writing.

    path: the lock file; descriptor: of the open file, -1 while the lock is not held.
    """

    path: Path
    descriptor: int = -1
    _released: threading.Event = field(default_factory=threading.Event)

    def acquire(self) -> None:
        """Take the lock; raises DllmBenchError if another process has it."""
        while True:
            with explain_write_errors(self.path):
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._claim(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if is_at(descriptor, self.path):
                break
            os.close(descriptor)  # the file was deleted before it was locked
        self.descriptor = descriptor
        self._released.clear()
        threading.Thread(target=self._beat, args=(self._released,), daemon=True).start()

    def _claim(self, descriptor: int) -> None:
        """Write this process's pid and host into the file, unless its owner is alive."""
        free = _flock(descriptor)
        owner = _owner(os.pread(descriptor, 4096, 0))
        host = socket.gethostname()
        if not free or (owner.get("host", host) != host and self._touched_meanwhile()):
            raise DllmBenchError(
                f"{self.path.parent} is being written by process {owner.get('pid', '?')} on "
                f"{owner.get('host', '?')}; wait for it, or, if it is gone, free the folder with "
                f"`dllm-bench runs unlock {self.path.parent.name.rpartition('-')[2]}`."
            )
        with explain_write_errors(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _mine(), 0)

    def _touched_meanwhile(self) -> bool:
        """Whether the owner touches the lock within `GONE_S`."""
        seen, end = self._touched_at(), time.monotonic() + GONE_S
        while time.monotonic() < end:
            time.sleep(min(BEAT_S, GONE_S) / 2)
            if self._touched_at() != seen:
                return True
        return False

    def _touched_at(self) -> int:
        """Time of change, read through an open file: network file systems cache it otherwise."""
        with open(self.path, "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self.path)

    @property
    def lost(self) -> bool:
        """Whether another process took over the lock this one held, or its file is gone."""
        return self.descriptor >= 0 and not (
            is_at(self.descriptor, self.path) and os.pread(self.descriptor, 4096, 0) == _mine()
        )

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        self._released.set()
        if self.descriptor >= 0:
            if not self.lost:
                os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = -1


def unlock(path: Path) -> str:
    """Free a lock whose owner is gone; returns who that was, in words.

    Raises if the owner lives on this machine. An owner on another machine, if it lives after all,
    stops before the next line it would write.
    """
    owner = _owner(stored_bytes(path) or b"")
    if not owner:
        raise DllmBenchError(f"{path.parent} is locked by nobody; there is nothing to free.")
    who = f"process {owner.get('pid')} on {owner.get('host')}"
    if owner.get("host") == socket.gethostname() and _is_alive(owner.get("pid")):
        raise DllmBenchError(
            f"{path.parent} is being written by {who}, which is alive; wait for it, or end it with "
            f"`kill {owner['pid']}`."
        )
    with explain_write_errors(path):
        path.unlink()
    return who


def _is_alive(pid: Any) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError, TypeError):
        return False
    return True


def _flock(descriptor: int) -> bool:
    """Lock the open file; False if another process keeps it for `DYING_S`."""
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


def results_directory(results: object) -> Path:
    """The results directory that was named, with the home folder in place of `~`.

    Refuses an empty name (it would mean the working directory) and a path through a file.
    """
    if not isinstance(results, str) or not results:
        raise DllmBenchError(
            f"The results directory is {results!r}; name one with paths.results=DIR, --results DIR "
            "or DLLM_BENCH_RESULTS."
        )
    folder = expanded(results)
    if files := [path for path in (folder, *folder.parents) if path.is_file()]:
        raise DllmBenchError(
            f"The results directory is {results}, and {files[0]} is a file; name a directory."
        )
    return folder
