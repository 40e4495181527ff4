"""Open, list and remove files below a results folder without following any link there.

A results folder may come from a stranger. A planted link with the name of a file to be written
would redirect the write to a file outside; a pipe or device would block or never end. So every
folder below the results folder is opened by descriptor with O_NOFOLLOW, and only regular files are
opened. The results folder itself may be a link, because the user named it, and so may everything
outside of results folders. No other module opens, writes or removes anything below one.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from dllm_bench.core.errors import DllmBenchError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
TEMPORARY = ".tmp"  # ends the name of a file that replaces another when it is complete
ABSENT = (errno.ENOENT, errno.ENOTDIR)

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


def check_own_files(folder: Path) -> None:
    """Raise LinkError if anything in `folder` is neither a regular file nor a folder."""
    for path in matching(folder, "*"):
        found = lstat(path)
        if found and not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise LinkError(
                f"{folder} was to be written, and {path.name} in it is a link, pipe or device; "
                "move it away."
            )


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless it is there; nothing in it may be a link."""
    with parent_of(path / "_", make=True):
        check_own_files(path)


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
