"""Links, pipes and second names planted in a results folder: nothing outside of it changes."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import slurm
from dllm_bench.runs.runner import run
from dllm_bench.store import files
from dllm_bench.store.files import LinkError, append_bytes, guard, stored_bytes, write_atomic
from dllm_bench.store.store import ERROR, LOCK, LOG, RECORD, SAMPLES, SESSIONS, SPEC, Store, remove
from tests.resume import fakes

SPEC_3 = fakes.spec(3)
SECRET = b"a file of the user\n"
NAMES = (LOCK, LOG, SPEC, RECORD, SAMPLES, SESSIONS, ERROR)
PLANTED = (*NAMES, *(f"{name}.tmp" for name in NAMES), f"{SPEC}.damaged", f"{SAMPLES}.damaged")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("whole")
    run(SPEC_3, store=Store(results / "runs"), deps=fakes.deps())
    return results


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    shutil.copytree(whole, tmp_path / "theirs")
    return Store(tmp_path / "theirs" / "runs")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(SECRET)
    return tmp_path / "secret"


def plant(place: Path, target: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", PLANTED)
def test_a_run_never_writes_through_a_link(name: str, store: Store, secret: Path) -> None:
    folder = store.path(SPEC_3)
    (folder / RECORD).unlink()
    plant(folder / name, secret)
    with pytest.raises(DllmBenchError, match="is a link"):
        run(SPEC_3, store=store, deps=fakes.deps())
    assert secret.read_bytes() == SECRET


@pytest.mark.parametrize("command", ["status", "runs verify", "runs rm"])
@pytest.mark.parametrize("place", NAMES)
def test_a_command_never_writes_through_a_link(command, place, store, secret) -> None:
    plant(store.path(SPEC_3) / place, secret)
    short = [SPEC_3.short] if command == "runs rm" else []
    main([*command.split(), *short, "--results", str(store.root.parent)])
    assert secret.read_bytes() == SECRET


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_folder_behind_a_link_is_neither_removed_nor_written(level, store, tmp_path) -> None:
    place = [store.root, *reversed(store.path(SPEC_3).parents[:2]), store.path(SPEC_3)][level]
    shutil.move(place, tmp_path / "outside")
    place.symlink_to(tmp_path / "outside")
    before = sorted(tmp_path.joinpath("outside").rglob("*"))
    for words in (["status"], ["runs", "rm", SPEC_3.short]):
        main([*words, "--results", str(store.root.parent)])
    with pytest.raises(DllmBenchError):
        remove([store.root / SPEC_3.folder])
    with pytest.raises(DllmBenchError):
        store.open(SPEC_3)
    assert sorted(tmp_path.joinpath("outside").rglob("*")) == before


def test_a_link_inside_a_run_is_removed_with_it_and_not_followed(store, tmp_path) -> None:
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    (store.path(SPEC_3) / "more").symlink_to(outside)
    remove([store.path(SPEC_3)])
    assert (outside / "inner").is_dir()
    assert not store.path(SPEC_3).exists()


def test_a_results_folder_may_itself_be_a_link(store: Store, tmp_path: Path) -> None:
    (tmp_path / "named").symlink_to(store.root.parent)
    named = Store(tmp_path / "named" / "runs")
    assert named.record(SPEC_3) is not None
    remove([named.path(SPEC_3)])
    assert store.folders() == []


def test_only_a_regular_file_of_its_own_is_written(tmp_path: Path, secret: Path) -> None:
    guard(tmp_path / "theirs")
    pipe, second_name, folder = (tmp_path / "theirs" / name for name in "abc")
    folder.mkdir(parents=True)
    os.mkfifo(pipe)
    os.link(secret, second_name)
    for place in (pipe, second_name, folder):
        with pytest.raises((LinkError, OSError)):
            append_bytes(place, b"more")
    with pytest.raises(LinkError):
        stored_bytes(pipe)
    (folder / "sparse").touch()
    os.truncate(folder / "sparse", 2**40)
    with pytest.raises(DllmBenchError, match="File too large"):
        stored_bytes(folder / "sparse")
    with pytest.raises(LinkError, match="leads out of"):
        write_atomic(folder / ".." / ".." / "mine", b"x")
    assert secret.read_bytes() == SECRET and not (tmp_path / "mine").exists()


def test_a_named_output_is_written_through_the_users_own_link(tmp_path, secret) -> None:
    (tmp_path / "out").symlink_to(secret)
    write_atomic(tmp_path / "out", b"new")
    assert secret.read_bytes() == b"new"
    assert (tmp_path / "out").is_symlink()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_folder_that_cannot_be_synced_stops_nothing(number, tmp_path, monkeypatch) -> None:
    original = os.fsync

    def fsync(descriptor: int) -> None:
        if files.stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        original(descriptor)

    monkeypatch.setattr(files.os, "fsync", fsync)
    write_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"


def test_samples_that_were_cut_under_a_run_are_not_sealed(tmp_path) -> None:
    store = Store(tmp_path / "runs")
    samples = store.path(SPEC_3) / SAMPLES

    class Cutting(fakes.Letters):
        def score(self, texts: Any) -> Any:
            if len(texts) == 3:
                samples.write_bytes(b"".join(samples.read_bytes().splitlines(keepends=True)[:2]))
            return super().score(texts)

    with pytest.raises(DllmBenchError, match="not on disk as they were decoded"):
        run(SPEC_3, store=store, deps=fakes.deps(benchmark=Cutting()))
    assert store.record(SPEC_3) is None
    record = run(SPEC_3, store=store, deps=fakes.deps())
    assert len(record.columns["id"]) == len(files.whole_lines(samples)) == 3


def test_status_looks_up_this_users_jobs_alone(tmp_path, command, monkeypatch) -> None:
    asked, squeue = tmp_path / "asked", tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(f"#!/bin/sh\n: > {asked}\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=":")
    ticket = slurm.JobTicket("a" * 64, "minigsm/tiny/x", "17_0", "/etc/passwd")
    for folder in (tmp_path / name for name in ("", ".launch", "runs")):
        folder.mkdir(exist_ok=True)
        (folder / slurm.TICKETS).write_text(json.dumps(asdict(ticket)) + "\n", encoding="utf-8")
    assert "/etc/passwd" not in command("status") and not asked.exists()
    slurm.record_tickets(Store(tmp_path / "runs"), [ticket])
    assert "/etc/passwd" in command("status") and asked.exists()
