"""Archives of records from a stranger: names, types and sizes are checked, nothing is unpacked."""

from __future__ import annotations

import io
import lzma
import tarfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.runner import run
from dllm_bench.store import archive
from dllm_bench.store.store import RECORD, SAMPLES, Store
from tests.resume import fakes

SPEC_3 = fakes.spec(3)
NAME = "runs/a/b/c-0123456789/record.json"
Member = tuple[tarfile.TarInfo, bytes]


def member(name: str = NAME, content: bytes = b"{}", **changes: object) -> Member:
    info = tarfile.TarInfo(name)
    for key, value in {"size": len(content), **changes}.items():
        setattr(info, key, value)
    return info, content


def packed(*members: Member) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz", preset=0) as opened:
        for info, content in members:
            opened.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def numbered(count: int, content: bytes = b"{}") -> bytes:
    return packed(*(member(f"runs/a/b/c-{i:010}/record.json", content) for i in range(count)))


def store_of(tmp_path: Path, content: bytes) -> Store:
    (tmp_path / "runs.tar.xz").write_bytes(content)
    return Store(tmp_path / "runs")


def special(kind: bytes, **changes: object) -> tuple[bytes, str]:
    return packed(member(content=b"", type=kind, **changes)), "is a link, device"


WHOLE = packed(member(content=b"a" * 1024))
NO_ARCHIVE = "no archive of run records"
FOLDERS = "runs/../.. runs/a/.. runs/./b /runs/a/b runs/a/b/c other/a/b runs//b".split()
FOLDERS += ["runs/a/b\x1b[2J", "runs/a\n/b", f"runs/{'a' * 500}/b", f"runs/{'a/' * 300}"]
NAMES = [
    *(f"{folder}/c-0123456789/record.json" for folder in FOLDERS),
    *(f"runs/a/b/c-{hashed}/record.json" for hashed in ("012345678", "XYZ3456789", "\u0661" * 10)),
    *("runs/a/b/record.json", "runs/a/b/c-0123456789/spec.json"),
]
BAD: dict[str, tuple[bytes, str]] = {
    **{f"named {name!r}": (packed(member(name)), "is not named runs/") for name in NAMES},
    "a symbolic link": special(tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": special(tarfile.LNKTYPE, linkname="x"),
    "a device": special(tarfile.CHRTYPE),
    "a pipe": special(tarfile.FIFOTYPE),
    "a folder": (special(tarfile.DIRTYPE)[0], "is not named|is a link, device"),
    "one run twice": (packed(member(), member()), "is in it twice"),
    "text that is no UTF-8": (packed(member(content=b"\xff\xfe")), NO_ARCHIVE),
    "cut by 20": (WHOLE[:-20], NO_ARCHIVE),
    "cut by 60": (WHOLE[:-60], NO_ARCHIVE),
    "something behind": (lzma.compress(lzma.decompress(WHOLE) + b"more"), "something follows its"),
    "nothing": (b"", NO_ARCHIVE),
    "no xz": (b"no xz", NO_ARCHIVE),
    "no tar": (lzma.compress(b"no tar" * 200), NO_ARCHIVE),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_archive_is_refused_by_an_error_that_names_it(what: str, tmp_path: Path) -> None:
    content, reason = BAD[what]
    with pytest.raises(DllmBenchError, match=reason) as caught:
        store_of(tmp_path, content).folders()
    assert "move it away" in str(caught.value) and len(str(caught.value)) < 1000
    assert not set(map(chr, range(32))) & set(str(caught.value))


def test_too_many_and_too_large_records_are_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(archive, "MAX_RECORDS", 3)
    with pytest.raises(DllmBenchError, match="more than 3 records"):
        store_of(tmp_path, numbered(4)).folders()
    monkeypatch.setattr(archive, "MAX_RECORD_BYTES", 10)
    with pytest.raises(DllmBenchError, match="at most 10 are read"):
        store_of(tmp_path, numbered(1, b"x" * 11)).folders()


def test_a_small_file_that_unpacks_to_gigabytes_ends_early(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 2**22)
    store = store_of(tmp_path, numbered(12, bytes(2**20)))
    tracemalloc.start()
    with pytest.raises(DllmBenchError, match="unpacks to more than 4 MiB"):
        store.folders()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


def test_an_archive_that_is_a_link_is_refused(tmp_path: Path) -> None:
    assert len(store_of(tmp_path, WHOLE).folders()) == 1
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "runs.tar.xz").symlink_to(tmp_path / "runs.tar.xz")
    with pytest.raises(DllmBenchError, match="is a link"):
        Store(tmp_path / "theirs" / "runs").folders()


def test_a_run_of_an_archive_has_no_folder_to_remove_until_it_goes_on(tmp_path, command) -> None:
    store = Store(tmp_path / "made" / "runs")
    record = run(SPEC_3, store=store, deps=fakes.deps())
    files = {name: (store.path(SPEC_3) / name).read_bytes() for name in (RECORD, SAMPLES)}
    stored = (member(f"runs/{SPEC_3.folder}/{name}", content) for name, content in files.items())
    theirs = store_of(tmp_path, packed(*stored))
    assert [one.identity_hash for one in theirs.records()] == [record.identity_hash]
    assert "read-only archive" in command("runs rm", SPEC_3.short, code=2)
    continued = run(replace(SPEC_3, limit=5), store=theirs, deps=fakes.deps())
    assert continued.items == 5 and continued.sessions[0] == record.sessions[0]
    command("runs rm", SPEC_3.short)
