"""Read sealed runs that are packed into one archive next to the runs folder (`runs.tar.xz`).

It contains a record for each run, and samples and token replays if figures need them. An archive
may come from a stranger. Its members are read in order. Every name, type and size is checked before
the member is read, and nothing is unpacked to disk. Only names of run folders are accepted. A run
in an archive has no folder, so it cannot be removed.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.cache import fingerprint
from dllm_bench.store.files import open_file
from dllm_bench.store.spec import SHOWN

MAX_RECORDS = 100_000
MAX_RECORD_BYTES = 32 * 2**20
MAX_BYTES = 256 * 2**20  # limit of the unpacked size
MAX_NAME = 400  # characters
MAX_MEMORY = 128 * 2**20  # limit of the decompressor's memory
PART = r"[^/\x00-\x1f\x7f-\x9f]+"
RECORD, SAMPLES, REPLAYS = "record.json", "samples.jsonl", "evolution.npz"
FILES = "|".join(map(re.escape, (RECORD, SAMPLES, REPLAYS)))
MEMBER = re.compile(rf"runs/({PART}/{PART}/{PART}-[0-9a-f]{{{SHOWN}}})/({FILES})")
CHUNK = 2**16


@dataclass(frozen=True)
class RunArchive:
    """The files of an archive."""

    files: Mapping[str, Mapping[str, bytes]]
    """File name -> run folder, relative to the runs folder -> content."""

    @property
    def records(self) -> Mapping[str, bytes]:
        """Run folder, relative to the runs folder -> content of its record."""
        return self.files.get(RECORD, {})

    @cached_property
    def by_hash(self) -> dict[str, str]:
        """Hash at the end of a run folder's name -> the run folder."""
        return {name[-SHOWN:]: name for name in self.records}


def archive_of(runs: Path) -> Path:
    """Return the path of the archive of a runs folder."""
    return runs.with_name(runs.name + ".tar.xz")


def is_run_folder(name: str) -> bool:
    """Return whether a name is that of a run folder, relative to the runs folder."""
    matched = MEMBER.fullmatch(f"runs/{name}/{RECORD}")
    return bool(matched) and len(name) <= MAX_NAME and not {".", ".."} & set(name.split("/"))


def unpacked(path: Path) -> bytes:
    """Return the content of an xz file below a results folder; OSError, EOFError, ValueError or
    LZMAError if it is not there, damaged or too large.
    """
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_MEMORY)
    content = bytearray()
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        while not decompressor.eof:
            packed = file.read(CHUNK) if decompressor.needs_input else b""
            if decompressor.needs_input and not packed:
                raise EOFError("it ends too early")
            content += decompressor.decompress(packed, CHUNK)
            if len(content) > MAX_BYTES:
                raise ValueError(f"it unpacks to more than {MAX_BYTES >> 20} MiB")
    return bytes(content)


def archived(runs: Path) -> RunArchive:
    """Return the archive next to the runs folder; empty if there is none.

    Raises DllmBenchError if it contains anything but files of runs.
    """
    path = archive_of(runs)
    state = fingerprint(path)
    return _read(path, tuple(state)) if state else RunArchive({})


@lru_cache(maxsize=4)
def _read(path: Path, _fingerprint: tuple[int, ...]) -> RunArchive:
    """Return the content of an archive, cached in memory until its file changes."""
    files: dict[str, dict[str, bytes]] = {}
    try:
        stream = io.BytesIO(unpacked(path))
        with tarfile.open(fileobj=stream, mode="r|", errorlevel=2) as packed:
            for folder, name, content in _members(packed):
                files.setdefault(name, {})[folder] = content
        if stream.read().strip(b"\0"):
            raise ValueError("something follows its end")
        return RunArchive(files)
    except (OSError, EOFError, ValueError, OverflowError, tarfile.TarError, lzma.LZMAError) as why:
        raise DllmBenchError(
            f"{path} is no archive of run records ({why}); restore it, or move it away."
        ) from why


def _members(packed: tarfile.TarFile) -> Iterator[tuple[str, str, bytes]]:
    """Yield (run folder, file name, content) of each member, checked; ValueError for any other."""
    names = set[tuple[str, str]]()
    for member in packed:
        name = _checked_name(member)
        if name in names:
            raise ValueError(f"{member.name!r} is in it twice")
        names.add(name)
        if len(names) > MAX_RECORDS:
            raise ValueError(f"it has more than {MAX_RECORDS} records")
        file = packed.extractfile(member)
        content = file.read() if file else b""
        if len(content) != member.size:
            raise ValueError(f"{member.name!r} ends too early")
        if name[1] != REPLAYS:
            content.decode()  # ValueError where it is no text
        yield *name, content


def _checked_name(member: tarfile.TarInfo) -> tuple[str, str]:
    """Return the run folder and file name of a member; ValueError unless it is a file of a run,
    with a name and size in bounds.

    Error messages do not contain overlong names.
    """
    shown = repr(member.name[:MAX_NAME])
    matched = MEMBER.fullmatch(member.name)
    if not matched or not is_run_folder(matched[1]) or len(member.name) > MAX_NAME:
        raise ValueError(f"{shown} is not named runs/BENCHMARK/MODEL/DECODER-HASH/record.json")
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        raise ValueError(f"{shown} is a link, device or folder, and no file")
    if not 0 <= member.size <= MAX_RECORD_BYTES:
        raise ValueError(f"{shown} has {member.size} bytes, at most {MAX_RECORD_BYTES} are read")
    return matched[1], matched[2]
