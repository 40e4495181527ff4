"""Archives of records from a stranger: names, types and sizes are checked, nothing is unpacked."""

from __future__ import annotations

import io
import lzma
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.runner import run
from dllm_bench.store import archive
from dllm_bench.store.store import RECORD, Store
from tests.resume import fakes

SPEC_3 = fakes.spec(3)
NAME = "runs/a/b/c-0123456789/record.json"
Pack = Callable[[tarfile.TarFile], None]


def member(name: str, content: bytes = b"{}", **changes: object) -> Pack:
    def add(packed: tarfile.TarFile) -> None:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        for key, value in changes.items():
            setattr(info, key, value)
        packed.addfile(info, io.BytesIO(content))

    return add


def twice(packed: tarfile.TarFile) -> None:
    member(NAME)(packed)
    member(NAME)(packed)


def store_of(tmp_path: Path, pack: Pack) -> Store:
    with tarfile.open(tmp_path / "runs.tar.xz", "w:xz", preset=0) as packed:
        pack(packed)
    return Store(tmp_path / "runs")


BAD: dict[str, tuple[Pack, str]] = {
    **{
        f"named {name!r}": (member(name), "is not named runs/")
        for name in (
            "runs/../../notes-0123456789/record.json",
            "runs/a/../c-0123456789/record.json",
            "runs/./b/c-0123456789/record.json",
            "/runs/a/b/c-0123456789/record.json",
            "runs/a/b/record.json",
            "runs/a/b/c/d-0123456789/record.json",
            "runs/a/b/c-012345678/record.json",
            "runs/a/b/c-XYZ3456789/record.json",
            "runs/a/b/c-0123456789/spec.json",
            "other/a/b/c-0123456789/record.json",
            "runs//b/c-0123456789/record.json",
            "runs/a/b\x1b[2J/c-0123456789/record.json",
            "runs/a\n/b/c-0123456789/record.json",
            f"runs/{'a' * 500}/b/c-0123456789/record.json",
            f"runs/{'a/' * 300}c-0123456789/record.json",
            "runs/a/b/c-\u0661\u0662\u0663\u0664\u0665\u0666\u0667\u0668\u0669\u0660/record.json",
        )
    },
    "a symbolic link": (
        member(NAME, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        "is a link, device",
    ),
    "a hard link": (member(NAME, b"", type=tarfile.LNKTYPE, linkname="x"), "is a link, device"),
    "a device": (member(NAME, b"", type=tarfile.CHRTYPE), "is a link, device"),
    "a pipe": (member(NAME, b"", type=tarfile.FIFOTYPE), "is a link, device"),
    "a folder": (member(NAME, b"", type=tarfile.DIRTYPE), "is not named|is a link, device"),
    "one run twice": (twice, "is in it twice"),
    "text that is no UTF-8": (member(NAME, b"\xff\xfe"), "no archive of run records"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_member_is_refused_by_an_error_that_names_it(what: str, tmp_path: Path) -> None:
    pack, reason = BAD[what]
    with pytest.raises(DllmBenchError, match=reason) as caught:
        store_of(tmp_path, pack).folders()
    assert "move it away" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert not set(map(chr, range(32))) & set(str(caught.value))


def test_too_many_and_too_large_records_are_refused(tmp_path, monkeypatch) -> None:
    def several(packed: tarfile.TarFile) -> None:
        for index in range(4):
            member(f"runs/a/b/c-{index:010}/record.json")(packed)

    monkeypatch.setattr(archive, "MAX_RECORDS", 3)
    with pytest.raises(DllmBenchError, match="more than 3 records"):
        store_of(tmp_path, several).folders()
    monkeypatch.setattr(archive, "MAX_RECORD_BYTES", 10)
    with pytest.raises(DllmBenchError, match="at most 10 are read"):
        store_of(tmp_path, member(NAME, b"x" * 11)).folders()


def test_a_small_file_that_unpacks_to_gigabytes_ends_early(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 2**22)

    def zeros(packed: tarfile.TarFile) -> None:
        for index in range(12):
            member(f"runs/a/b/c-{index:010}/record.json", bytes(2**20))(packed)

    store = store_of(tmp_path, zeros)
    tracemalloc.start()
    with pytest.raises(DllmBenchError, match="unpacks to more than 4 MiB"):
        store.folders()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**24


@pytest.mark.parametrize("cut", [20, 60])
def test_a_truncated_archive_is_refused(cut: int, tmp_path: Path) -> None:
    store = store_of(tmp_path, member(NAME, b"a" * 1024))
    assert len(store.folders()) == 1
    path = tmp_path / "runs.tar.xz"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DllmBenchError, match="no archive of run records"):
        store.folders()


def test_an_archive_that_something_follows_is_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path, member(NAME))
    path = tmp_path / "runs.tar.xz"
    path.write_bytes(lzma.compress(lzma.decompress(path.read_bytes()) + b"more"))
    with pytest.raises(DllmBenchError, match="something follows its end"):
        store.folders()


@pytest.mark.parametrize("content", [b"", b"no xz", lzma.compress(b"no tar" * 200)])
def test_what_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "runs.tar.xz").write_bytes(content)
    with pytest.raises(DllmBenchError, match="no archive of run records"):
        Store(tmp_path / "runs").folders()


def test_an_archive_that_is_a_link_is_refused(tmp_path: Path) -> None:
    store_of(tmp_path, member(NAME))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "runs.tar.xz").symlink_to(tmp_path / "runs.tar.xz")
    with pytest.raises(DllmBenchError, match="is a link"):
        Store(tmp_path / "theirs" / "runs").folders()


def test_a_run_of_an_archive_has_no_folder_that_could_be_removed(tmp_path, capsys) -> None:
    store = Store(tmp_path / "made" / "runs")
    record = run(SPEC_3, store=store, deps=fakes.deps())
    text = (store.path(SPEC_3) / RECORD).read_bytes()
    theirs = store_of(tmp_path, member(f"runs/{SPEC_3.folder}/record.json", text))
    assert [one.identity_hash for one in theirs.records()] == [record.identity_hash]
    assert main(["runs", "rm", SPEC_3.short, "--results", str(tmp_path)]) == 2
    assert "read-only archive" in capsys.readouterr().err
