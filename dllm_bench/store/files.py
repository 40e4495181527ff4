"""Files of a results folder: no link is followed, a crash leaves them whole, damage is detected.

A results folder may come from a stranger. A planted link with the name of a file to be written
would redirect the write to a file outside; a pipe or device would block or never end. So every
folder below the results folder is opened by descriptor with O_NOFOLLOW, and only regular files are
opened. The results folder itself may be a link, because the user named it, and so may everything
outside of results folders. No other module opens, writes or removes anything below one.

Files are replaced by a rename, or grow by whole lines. A line that does not fit on the disk is
removed again, so an error never leaves half a line. A killed process can leave half a line;
`whole_lines` skips it. Errors of the disk become a `DllmBenchError`.

JSON has a checksum of its content, so that damage is detected even if the JSON can be parsed:
`check` is the beginning of a sha256 over everything else, in canonical form; white space and the
order of keys do not matter. Values that no stored file contains are refused at any place: NaN,
infinities and numbers beyond `LARGEST`, halves of surrogate pairs, values nested deeper than
`LEVELS`.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import strike_out, strike_out_of
from dllm_bench.paths import expanded

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TEMPORARY = ".tmp"  # ends the name of a file that replaces another when it is complete
ABSENT = (errno.ENOENT, errno.ENOTDIR)
MAX_BYTES = 8 * 2**30  # of a file that is read whole

_results: set[str] = set()  # absolute paths of the results folders of this process


class LinkError(DllmBenchError):
    """Something below a results folder is neither a regular file nor a folder."""


def guard(results: Path) -> None:
    """Follow no link below this results folder from now on."""
    _results.update((os.path.abspath(results), os.path.join(os.getcwd(), results)))


@contextmanager
def parent_of(path: Path, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder that contains `path`, and the path's name in it.

    make: make the folders that are missing. Raises OSError, or LinkError.
    """
    start, names = _split(path)
    if make:
        os.makedirs(start, exist_ok=True)
    folder = os.open(start, FOLDER)
    try:
        for name in names[:-1]:
            folder = _enter(folder, name, path, make)
        yield folder, names[-1]
    finally:
        os.close(folder)


def _split(path: Path) -> tuple[str, list[str]]:
    """Return the folder to start from, which is trusted, and the names below it."""
    whole = os.path.join(os.getcwd(), path)
    start = _results_above(whole) or os.path.dirname(whole)
    names = whole.removeprefix(start).strip("/").split("/")
    if ".." in names:
        raise LinkError(f"{path} leads out of {start}; name a path without '..' in it.")
    return start, names


def _results_above(whole: str) -> str | None:
    """Return the innermost results folder that an absolute path is below; None outside of all."""
    head = os.path.dirname(whole)
    while head not in _results and head != os.path.dirname(head):
        head = os.path.dirname(head)
    return head if head in _results else None


def _enter(folder: int, name: str, path: Path, make: bool) -> int:
    """Return the descriptor of folder `name` in `folder`, which is closed if it was opened."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
    try:
        inner = os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as error:
        _explain_link(folder, name, path, error)
        raise
    os.close(folder)
    return inner


def _explain_link(folder: int, name: str, path: Path, error: OSError) -> None:
    """Raise LinkError if `name` in `folder` is a link."""
    with suppress(OSError):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise LinkError(
                f"{path} was to be opened, and {name} is a link, which is not followed below a "
                "results folder; put the files themselves there, or link the results folder whole."
            ) from error


def open_file(path: Path, flags: int, make: bool = False) -> int:
    """Return a descriptor of a regular file; a link is followed only to read outside of results
    folders.

    To write, the file may have no second name (hard link). Raises OSError, or LinkError.
    """
    reads = flags & os.O_ACCMODE == os.O_RDONLY
    is_trusted = reads and _results_above(os.path.join(os.getcwd(), path)) is None
    safe = os.O_NONBLOCK | os.O_CLOEXEC | (0 if is_trusted else os.O_NOFOLLOW)
    with parent_of(path, make) as (folder, name):
        try:
            descriptor = os.open(name, flags | safe, 0o666, dir_fd=folder)
        except OSError as error:
            _explain_link(folder, name, path, error)
            if error.errno == errno.ENXIO:
                raise _not_regular(path) from error
            raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (not reads and found.st_nlink > 1):
        os.close(descriptor)
        raise _not_regular(path)
    return descriptor


def target_of(path: Path) -> Path:
    """Return the file to replace; outside of results folders, the user's own links are followed.

    Raises LinkError if the path is a link or anything but a regular file.
    """
    inside = _results_above(os.path.join(os.getcwd(), path))
    target = path if inside else Path(os.path.realpath(path))
    found = lstat(target)
    if found and not stat.S_ISREG(found.st_mode) and not stat.S_ISLNK(found.st_mode):
        raise _not_regular(path)
    return target


def _not_regular(path: Path) -> LinkError:
    return LinkError(
        f"{path} was to be opened, and it is no file of its own (a pipe, a device, a folder or a "
        "second name of another file); move it away."
    )


def lstat(path: Path) -> os.stat_result | None:
    """Return the status of `path`, without following a link; None if it does not exist or is below
    a link."""
    try:
        with parent_of(path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (OSError, LinkError):
        return None


def is_file(path: Path) -> bool:
    """Return whether a regular file is at `path`."""
    found = lstat(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def is_folder(path: Path) -> bool:
    """Return whether a folder, no link to one, is at `path`."""
    found = lstat(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def matching(folder: Path, pattern: str) -> list[Path]:
    """Return the paths below `folder` that match a pattern like `*/*.json`, sorted; links at its
    last level are among them. Raises LinkError for a link above it.
    """
    first, *rest = pattern.split("/")
    try:
        with parent_of(folder / "_") as (descriptor, _), os.scandir(descriptor) as entries:
            found = [(e.name, e.is_dir(follow_symlinks=False), e.is_symlink()) for e in entries]
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise DllmBenchError(
            f"{folder} cannot be listed ({error.strerror}); make it readable, or move it away."
        ) from error
    found = sorted(one for one in found if fnmatchcase(one[0], first))
    if not rest:
        return [folder / name for name, _, _ in found]
    inner = [folder / name for name, is_dir, is_link in found if is_dir or is_link]
    return [path for one in inner for path in matching(one, "/".join(rest))]


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there.

    Raises LinkError if anything in it is neither a regular file nor a folder.
    """
    with parent_of(path / "_", make=True):
        for inner in matching(path, "*"):
            if lstat(inner) and not is_file(inner) and not is_folder(inner):
                raise LinkError(
                    f"{path} was to be written, and {inner.name} in it is a link, pipe or device; "
                    "move it away."
                )


def remove_file(path: Path) -> None:
    """Remove a file, or a link itself; nothing happens if there is none."""
    with suppress(FileNotFoundError), parent_of(path) as (folder, name):
        os.unlink(name, dir_fd=folder)


def remove_folder(path: Path) -> None:
    """Remove a folder and everything in it; links in it are removed, not followed."""
    with parent_of(path) as (folder, name):
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise LinkError(f"{path} was to be removed, and it is a link; remove the link itself.")
        shutil.rmtree(name, dir_fd=folder)


def rename(path: Path, name: str) -> None:
    """Rename `path` within its folder, replacing a file of the new name."""
    with parent_of(path) as (folder, own):
        os.replace(own, name, src_dir_fd=folder, dst_dir_fd=folder)


# --- whole files and whole lines ------------------------------------------------------------------

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
    """Return the content of a file, None if there is none; DllmBenchError if it cannot be read, or
    is larger than any that is written here."""
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
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
    temporary = temporary_of(path)
    with explain_write_errors(path):
        os.close(open_file(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, make=True))
        try:
            yield temporary
            if durable:
                with os.fdopen(open_file(temporary, os.O_RDONLY), "rb") as file:
                    os.fsync(file.fileno())
            rename(temporary, path.name)
            if durable:
                _sync_names(path)
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


def _sync_names(path: Path) -> None:
    """Wait until the names in the folder of `path` are on disk, where the file system can do
    that."""
    with parent_of(path) as (folder, _):
        try:
            os.fsync(folder)
        except OSError as error:
            if error.errno not in UNSYNCED:
                raise


def temporary_of(path: Path) -> Path:
    """Return the path of an unfinished file next to `path`, see `remove_temporaries`."""
    return path.with_name(f".{secrets.token_hex(8)}{TEMPORARY}")


def remove_temporaries(folder: Path) -> None:
    """Remove the unfinished files of processes that were killed while they wrote."""
    for path in matching(folder, f".*{TEMPORARY}"):
        remove_file(path)


def write_json(path: Path, plain: Mapping[str, Any]) -> None:
    """Write plain data as indented JSON, atomically; makes the folder."""
    write_atomic(path, json.dumps(plain, indent=1) + "\n")


def append_bytes(path: Path, content: bytes) -> None:
    """Append to a file, which is created if it is missing; raises OSError."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
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
    if not isinstance(results, (str, os.PathLike)) or not str(results):
        raise DllmBenchError(
            f"The results directory is {results!r}; name one with paths.results=DIR, --results DIR "
            "or DLLM_BENCH_RESULTS."
        )
    folder = expanded(str(results))
    if files := [path for path in (folder, *folder.parents) if path.is_file()]:
        raise DllmBenchError(
            f"The results directory is {results}, and {files[0]} is a file; name a directory."
        )
    guard(folder)
    return folder


# --- checked JSON ---------------------------------------------------------------------------------

CHECK = "check"
DIGITS = 16  # hexadecimal, of the checksum
LARGEST = 2**63  # no number is as large
LEVELS = 32  # nesting depth of lists and objects
NUMBERS = {int, float}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, or of two escapes that are one
Plain = dict[str, Any]


def checksum(plain: Mapping[str, Any]) -> str:
    """Return the checksum of plain data without its own `check`."""
    content = {key: value for key, value in plain.items() if key != CHECK}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def checked_line(plain: Mapping[str, Any]) -> str:
    """Return one line of JSON with its checksum, without the newline."""
    return json.dumps(checked(plain), ensure_ascii=False, separators=(",", ":"))


def checked(plain: Mapping[str, Any]) -> Plain:
    """Return plain data without this process's secrets, and with its checksum."""
    content = strike_out_of(plain)
    return {**content, CHECK: checksum(content)}


def read_checked(text: str | bytes) -> Plain:
    """Return the content of checked JSON; ValueError for damage of any kind."""
    plain = parse(text)
    if not isinstance(plain, dict):
        raise ValueError("not a JSON object")
    stated = plain.pop(CHECK, None)
    if stated != checksum(plain):
        raise ValueError("its checksum is not that of its content")
    return plain


def parse(text: str | bytes) -> Any:
    """Return `json.loads` of UTF-8; ValueError if it cannot be read, or contains values that no
    stored file has."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    check_plain(value)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def check_plain(value: Any, levels: int = LEVELS) -> None:
    """Raise ValueError for plain data with a number or a depth that no stored file has."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        inner = [value]
    elif not levels:
        raise ValueError(f"nested more than {LEVELS} levels deep")
    kinds = set(map(type, inner))
    numbers = inner if kinds <= NUMBERS else [one for one in inner if type(one) in NUMBERS]
    if numbers and not (-LARGEST < min(numbers) <= max(numbers) < LARGEST):
        raise ValueError("a number beyond 2**63")
    if kinds & {dict, list}:
        for one in inner:
            if isinstance(one, (dict, list)):
                check_plain(one, levels - 1)
