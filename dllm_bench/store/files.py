"""Files that survive a crash: atomic writes and files of whole lines.

It makes plain POSIX calls (rename, fsync) through `nolinks`, which follows no link below a results
folder; it does not depend on runs. A line that does not fit on the disk is removed again, so an
error never leaves half a line. A killed process can leave half a line; `whole_lines` skips it.
Errors of the disk become a `DllmBenchError`.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.secrets import strike_out
from dllm_bench.paths import expanded
from dllm_bench.store.nolinks import (
    TEMPORARY,
    guard,
    lstat,
    matching,
    open_file,
    parent_of,
    remove_file,
    target_of,
)

SYNC_EVERY_S = 1.0  # an `Appender` calls fsync at most this often
UNSYNCED = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)  # errors of file systems without fsync
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
    """Return the content of a file, None if there is none; DllmBenchError if it cannot be read."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DllmBenchError(
            f"{path} cannot be read ({error.strerror}); make it readable, or move it away."
        ) from error


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file that end in a newline; none if there is no file."""
    return (stored_bytes(path) or b"").split(b"\n")[:-1]


def every_line(path: Path) -> list[bytes]:
    """Return all lines of a file that is always replaced as a whole; the last may lack a
    newline."""
    content = stored_bytes(path) or b""
    return content.removesuffix(b"\n").split(b"\n") if content else []


def csv_rows(path: Path) -> Iterator[dict[str, str]]:
    """Yield the rows of a csv file with a header; none if there is no file."""
    text = (stored_bytes(path) or b"").decode()
    yield from csv.DictReader(io.StringIO(text, newline=""))


def csv_text(names: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a csv file with a header; entries of a row under other names are left out."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


@contextmanager
def atomic_path(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield the path of a new file in the same folder, which replaces `path` when the block ends.

    A missing folder is created. On any error the file is removed and `path` is unchanged.
    durable: wait until the file is on disk, which takes milliseconds.
    """
    path = target_of(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")
    with explain_write_errors(path):
        os.close(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True))
        try:
            yield temporary
            if durable:
                descriptor = open_file(temporary, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            _replace(temporary, path, durable)
        except BaseException:
            with suppress(OSError):
                remove_file(temporary)
            raise


def write_atomic(path: Path, content: str | bytes, durable: bool = True) -> Path:
    """Write the whole file or leave the old one, see `atomic_path`, and return its path; text is
    UTF-8 with `\\n` line ends.
    """
    with (
        atomic_path(path, durable) as temporary,
        os.fdopen(open_file(temporary, os.O_WRONLY), "wb") as file,
    ):
        file.write(strike_out(content).encode() if isinstance(content, str) else content)
    return path


def _replace(temporary: Path, path: Path, durable: bool) -> None:
    """Rename a file to `path`, in its folder, and wait until the name is on disk."""
    with parent_of(path) as (folder, name):
        os.replace(temporary.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        if durable:
            sync_names(folder)


def sync_names(folder: int) -> None:
    """Wait until the names in an open folder are on disk, where the file system can do that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in UNSYNCED:
            raise


def remove_temporaries(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote."""
    for path in matching(folder, f".*{TEMPORARY}"):
        remove_file(path)


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write plain data as indented JSON, atomically; makes the folder."""
    write_atomic(path, json.dumps(plain, indent=1) + "\n")


def append_bytes(path: Path, content: bytes) -> None:
    """Append to a file, which is created if it is missing; raises OSError."""
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with os.fdopen(descriptor, "ab") as file:
        file.write(content)


class Appender:
    """Appends whole lines to a file; a line that does not fit on the disk is removed again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with explain_write_errors(path):
            self._descriptor = open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, make=True)
        self._synced = time.monotonic()
        self._broken = False

    def append(self, line: str) -> None:
        """Write one line; it reaches the disk at most `SYNC_EVERY_S` after the next line, or at
        `close`."""
        if not is_at(self._descriptor, self.path):
            raise DllmBenchError(
                f"{self.path} was deleted or replaced while a run was writing it, and what it held "
                "is gone; give the same command again, which decodes it again."
            )
        length = os.fstat(self._descriptor).st_size
        rest = memoryview((strike_out(line) + "\n").encode())
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
    """Return whether an open file is the one that `path` names now."""
    found = lstat(path)
    return found is not None and os.path.samestat(os.fstat(descriptor), found)


def results_directory(results: object) -> Path:
    """Return the given results directory, with `~` replaced by the home folder.

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
    guard(folder)
    return folder
