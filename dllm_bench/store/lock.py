"""A lock for one writer per folder.

It is `flock` on a file that contains its owner. If the file system does not support `flock`, an
exclusively created file next to it is used instead.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store import files

BEAT_S = 10.0  # the owner of a lock touches it this often
DYING_S = 1.0  # a killed process keeps its locks until the last of its threads has ended
GONE_S = 60.0  # a lock of another machine that was not touched for this long is taken over
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
EXCLUSIVE = ".owner"  # ends the name of the file that is made exclusively in place of flock
CLOCK_FIELD = 19  # field of /proc/PID/stat, after the name: start time of the process


class BusyError(DllmBenchError):
    """Another process writes the folder. owner: that process, in words."""

    def __init__(self, message: str, owner: str = "") -> None:
        super().__init__(message)
        self.owner = owner


@dataclass
class Lock:
    """One writer per folder: an exclusive lock on a file that contains its owner's pid and host.

    The kernel releases the lock of a process that died on this machine. A process on another
    machine cannot be checked, but it touches its lock every `BEAT_S` seconds. If the lock is not
    touched for `GONE_S` seconds of this machine's monotonic clock, it is taken over. An owner that
    continues after that (a suspended job), or whose lock file was deleted, finds the lock `lost`
    and stops writing.

    path: the lock file; descriptor: of the open file, -1 while the lock is not held.
    """

    path: Path
    descriptor: int = -1
    is_exclusive: bool = False  # held by an exclusive file, because flock is not supported
    _released: threading.Event = field(default_factory=threading.Event)

    @property
    def exclusive(self) -> Path:
        """The exclusively created file, used if flock is not supported."""
        return self.path.with_name(self.path.name + EXCLUSIVE)

    def acquire(self) -> None:
        """Take the lock; raises BusyError if another process has it."""
        while True:
            with files.explain_write_errors(self.path):
                descriptor = files.open_file(self.path, os.O_RDWR | os.O_CREAT)
            try:
                self._claim(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            if files.is_at(descriptor, self.path):
                break
            os.close(descriptor)  # the file was deleted before it was locked
        self.descriptor = descriptor
        self._released.clear()
        threading.Thread(target=self._beat, args=(self._released,), daemon=True).start()

    def _claim(self, descriptor: int) -> None:
        """Write this process's pid and host into the file, unless its owner is alive."""
        try:
            free = _flock(descriptor) and not self._other_is_exclusive()
        except OSError:  # see `UNSUPPORTED`
            free = self.is_exclusive = self._make_exclusive(_owner(os.pread(descriptor, 4096, 0)))
        owner, here = _owner(os.pread(descriptor, 4096, 0)), socket.gethostname()
        if not free or (owner.get("host", here) != here and self._touched_meanwhile(self.path)):
            self._drop_exclusive()
            owner = owner or _owner(files.stored_bytes(self.exclusive) or b"")
            who, folder = _in_words(owner), self.path.parent
            raise BusyError(
                f"{folder} is being written by {who}; wait for it, or, if it is gone, free the "
                f"folder with `dllm-bench runs unlock {folder.name.rpartition('-')[2]}`.",
                who,
            )
        with files.explain_write_errors(self.path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _mine(), 0)

    def _make_exclusive(self, writer: dict[str, Any]) -> bool:
        """Make the exclusive file; False if it, or the lock file, has an owner who is alive.

        writer: the owner in the lock file, which holds it by flock where that is supported.
        """
        if _is_alive_here(writer):
            return False
        with files.explain_write_errors(self.exclusive):
            for _ in range(2):
                with suppress(FileExistsError):
                    new = files.open_file(self.exclusive, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
                    with os.fdopen(new, "wb") as file:
                        file.write(_mine())
                    return True
                if self._other_is_exclusive():
                    return False
                self._take_away()
        return False

    def _take_away(self) -> None:
        """Remove the exclusive file of an owner that is gone. If another process has meanwhile
        replaced it by its own, that file is put back.
        """
        gone, aside = files.stored_bytes(self.exclusive), files.temporary_of(self.exclusive)
        with suppress(FileNotFoundError):
            files.rename(self.exclusive, aside.name)
            if files.stored_bytes(aside) == gone:
                files.remove_file(aside)
            else:
                files.rename(aside, self.exclusive.name)

    def _other_is_exclusive(self) -> bool:
        """Return whether a process that is alive made the exclusive file."""
        content = files.stored_bytes(self.exclusive)
        if content is None:
            return False
        owner = _owner(content)
        is_here = owner.get("host") == socket.gethostname()
        return _is_alive_here(owner) if is_here else self._touched_meanwhile(self.exclusive)

    def _drop_exclusive(self) -> None:
        if self.is_exclusive and files.stored_bytes(self.exclusive) == _mine():
            files.remove_file(self.exclusive)
        self.is_exclusive = False

    def _touched_meanwhile(self, path: Path) -> bool:
        """Return whether the owner touches its file within `GONE_S`."""
        seen, end = _touched_at(path), time.monotonic() + GONE_S
        while time.monotonic() < end:
            time.sleep(min(BEAT_S, GONE_S) / 2)
            if _touched_at(path) != seen:
                return True
        return False

    def _beat(self, released: threading.Event) -> None:
        while not released.wait(BEAT_S):
            for path in (self.path, *([self.exclusive] if self.is_exclusive else [])):
                with suppress(OSError, DllmBenchError), files.parent_of(path) as (folder, name):
                    os.utime(name, dir_fd=folder, follow_symlinks=False)

    @property
    def lost(self) -> bool:
        """Whether another process took over the lock this one held, or its file is gone."""
        if self.descriptor < 0:
            return False
        is_there = files.is_at(self.descriptor, self.path)
        return not is_there or os.pread(self.descriptor, 4096, 0) != _mine()

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        self._released.set()
        if self.descriptor >= 0:
            if not self.lost:
                os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = -1
            with suppress(DllmBenchError, OSError):  # a folder that was deleted meanwhile
                self._drop_exclusive()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def unlock(path: Path) -> str:
    """Free a lock whose owner is gone; return that owner, in words.

    Raises if the owner is alive on this machine. An owner on another machine that is still alive
    stops before it writes its next line.
    """
    owner = _owner(files.stored_bytes(path) or b"")
    if not owner:
        raise DllmBenchError(f"{path.parent} is locked by nobody; there is nothing to free.")
    who = _in_words(owner)
    if _is_alive_here(owner):
        raise DllmBenchError(
            f"{path.parent} is being written by {who}, which is alive; wait for it, or end it with "
            f"`kill {owner['pid']}`."
        )
    with files.explain_write_errors(path):
        files.remove_file(path)
        files.remove_file(Lock(path).exclusive)
    return who


def owner_of(path: Path) -> str:
    """Return the process that holds the lock `path`, in words; empty if it is free."""
    try:
        with Lock(path):
            return ""
    except BusyError as error:
        return error.owner


def supports_flock(folder: Path) -> bool:
    """Return whether files in `folder` can be locked with flock; True where nothing can be
    written."""
    path = files.temporary_of(folder / "lock")
    try:
        descriptor = files.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except (OSError, DllmBenchError):
        return True
    try:
        return _flock(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
        files.remove_file(path)


def _in_words(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"


def _is_alive_here(owner: dict[str, Any]) -> bool:
    """Return whether the owner runs on this machine: its pid exists and is of no later process."""
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(owner["pid"], 0)
    except PermissionError:
        pass
    except (OSError, OverflowError, TypeError, KeyError):
        return False
    return owner.get("start") in (None, _started_at(owner["pid"]))


def _started_at(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[CLOCK_FIELD]
    except (OSError, IndexError):
        return None


def _touched_at(path: Path) -> int:
    """Return the time of change, read through an open file: network file systems cache it
    otherwise."""
    try:
        with os.fdopen(files.open_file(path, os.O_RDONLY), "rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return 0


def _flock(descriptor: int) -> bool:
    """Lock the open file; False if another process keeps it for `DYING_S`.

    Raises OSError where the file system does not support that.
    """
    end = time.monotonic() + DYING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in UNSUPPORTED:
                raise
            if time.monotonic() >= end:
                return False
            time.sleep(DYING_S / 50)


def _mine() -> bytes:
    """Return the content of a lock file that names this process."""
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "start": _started_at(os.getpid())}
    return json.dumps(mine).encode()


def _owner(content: bytes) -> dict[str, Any]:
    try:
        owner = files.parse(content)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
