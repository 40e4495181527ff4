"""Locks where flock does not work, and runs that another process makes."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.cli import run as command
from dllm_bench.cli.doctor import path_lines
from dllm_bench.cli.main import main
from dllm_bench.core.request import Generation, Request
from dllm_bench.launch.local import run_all
from dllm_bench.runs.runner import run
from dllm_bench.store import lock as locks
from dllm_bench.store import store as stores
from dllm_bench.store.groups import Paths
from dllm_bench.store.lock import BusyError, Lock, supports_flock, unlock
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import LOCK, Store
from tests.resume import fakes


def refuse_flock(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    error = OSError(number, os.strerror(number))
    monkeypatch.setattr(locks.fcntl, "flock", Mock(side_effect=error))


@pytest.fixture(params=(errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS), ids=errno.errorcode.get)
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_flock(monkeypatch, request.param)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for a run that another process makes."""
    monkeypatch.setattr(stores, "WAIT_S", 0.02)
    monkeypatch.setattr(locks, "DYING_S", 0.02)


def owner(**changes: Any) -> str:
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), **changes})


def test_without_flock_one_process_writes_at_a_time(no_flock: None, tmp_path: Path) -> None:
    spec, store = fakes.spec(3), Store(tmp_path / "runs")
    lock = Lock(store.path(spec) / LOCK)
    with store.open(spec), pytest.raises(BusyError, match=f"process {os.getpid()} on"):
        lock.acquire()
    assert len(run(spec, store=store, deps=fakes.deps()).columns["id"]) == 3
    assert not lock.exclusive.exists()


@pytest.mark.parametrize("gone", [{"pid": 2**22 + 1}, {"start": "1"}])
def test_without_flock_a_dead_owner_is_succeeded(gone, no_flock, tmp_path) -> None:
    """A process that is gone, or whose pid another process has by now."""
    lock = Lock(tmp_path / LOCK)
    lock.path.write_text(owner(**gone))
    lock.exclusive.write_text(owner(**gone))
    lock.acquire()
    assert json.loads(lock.exclusive.read_text())["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("flock", [True, False])
def test_an_owner_elsewhere_is_respected_while_it_beats(flock, tmp_path, monkeypatch) -> None:
    """Its heart beats for a while on this machine's monotonic clock, then it is given up."""
    lock, slept_s, beats_until_s = Lock(tmp_path / LOCK), [0.0], 40.0
    beating = lock.path if flock else lock.exclusive
    for path in {lock.path, beating}:
        path.write_text(owner(host="elsewhere"))
    if not flock:
        refuse_flock(monkeypatch, errno.ENOLCK)

    def sleep(seconds: float) -> None:
        slept_s[0] += seconds
        if slept_s[0] < beats_until_s:
            os.utime(beating, (0, 1000 - slept_s[0]))  # of a clock that runs backwards

    monkeypatch.setattr(locks.time, "sleep", sleep)
    monkeypatch.setattr(locks.time, "monotonic", lambda: slept_s[0])
    with pytest.raises(BusyError, match="on elsewhere"):
        lock.acquire()
    assert 0 < slept_s[0] <= locks.BEAT_S, "the first beat is enough"
    slept_s[0] = beats_until_s
    with Lock(tmp_path / LOCK) as ours:
        assert slept_s[0] >= beats_until_s + locks.GONE_S
        assert json.loads(ours.path.read_text())["host"] == socket.gethostname()


@pytest.mark.parametrize("flock", [True, False])
def test_an_owner_is_respected_where_one_alone_has_flock(flock, tmp_path, monkeypatch) -> None:
    lock = Lock(tmp_path / LOCK)
    (lock.exclusive if flock else lock.path).write_text(owner())
    if not flock:
        refuse_flock(monkeypatch, errno.ENOLCK)
    with pytest.raises(BusyError):
        lock.acquire()


def test_without_flock_a_dead_owner_can_be_unlocked(no_flock: None, tmp_path: Path) -> None:
    lock = Lock(tmp_path / LOCK)
    for path in (lock.path, lock.exclusive):
        path.write_text(owner(host="elsewhere"))
    assert "elsewhere" in unlock(lock.path)
    lock.acquire()
    lock.release()


def test_a_lock_of_another_content_belongs_to_nobody(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("[" * 4000)
    Lock(tmp_path / LOCK).acquire()


def test_doctor_says_where_flock_does_not_work(no_flock: None, tmp_path: Path) -> None:
    assert not supports_flock(tmp_path)
    assert any(topic == "locks" for _, topic, _ in path_lines(Paths({"results": str(tmp_path)})))
    assert list(tmp_path.iterdir()) == []


def test_two_sweeps_over_one_folder_both_end_well(quick, tmp_path) -> None:
    specs = [fakes.spec(3, seed=seed) for seed in range(3)]
    store, deps = Store(tmp_path / "runs"), fakes.deps()
    with ThreadPoolExecutor() as pool, store.open(specs[0]), store.open(specs[2]):
        sweep = pool.submit(run_all, specs, store=store, deps=deps)
        end = time.monotonic() + 60
        while store.record(specs[1]) is None and time.monotonic() < end:
            time.sleep(0.02)
        assert not sweep.done(), "it waits for the runs that are being made"
    assert [outcome.error for outcome in sweep.result(60)] == ["", "", ""]
    assert all(store.record(spec) for spec in specs)


@pytest.mark.parametrize("local", [True, False], ids=["here", "by a launcher"])
def test_a_job_waits_for_the_one_with_fewer_items(local, quick, tmp_path, monkeypatch) -> None:
    """Jobs that differ in `limit` alone share a run folder: the second continues the first."""
    monkeypatch.setattr(command.compose, "runs_in_this_process", lambda: local)
    begun, waited, shown = threading.Event(), threading.Event(), list[str]()

    class Waiting(fakes.FakeDecoder):
        def generate(self, model: Any, request: Request) -> Generation:
            begun.set()
            assert waited.wait(60)
            return super().generate(model, request)

    def show(text: str) -> None:
        shown.append(text)
        waited.set()

    def make(spec: RunSpec, store: Store, **_: object) -> RunRecord:
        return run(spec, store=store, deps=fakes.deps(decoder=Waiting(log=tmp_path / "calls")))

    monkeypatch.setattr(command, "show_error", show)
    monkeypatch.setattr("dllm_bench.launch.local.run", make)
    words, store = [f"paths.results={tmp_path}", "limit=3"], Store(tmp_path / "runs")
    few = RunSpec.from_config(compose(words))
    first = threading.Thread(target=make, args=(few, store))
    first.start()
    assert begun.wait(60)
    assert main(["run", "-m", words[0], "limit=5"]) == 0
    first.join(60)
    assert f"postponed: process {os.getpid()}" in shown[0]
    assert store.record(replace(few, limit=5)).columns["id"] == [f"item-{i}" for i in range(5)]
    calls = (tmp_path / "calls").read_text().split()[1::2]
    assert {calls.count(f"item-{i}") for i in (2, 3, 4)} == {1}, "warm-ups take the first"
    assert store.record(few) is not None


def test_waiting_ends_when_the_other_process_leaves_the_run(tmp_path, monkeypatch) -> None:
    store, spec, waited = Store(tmp_path / "runs"), fakes.spec(3), list[str]()
    held = store.open(spec)
    monkeypatch.setattr(locks, "DYING_S", 0.0)
    monkeypatch.setattr(stores.time, "sleep", lambda _: held.close())
    store.wait_for(spec, lambda *words: waited.append(": ".join(words)))
    assert waited == [
        f"{spec.folder}: being made by process {os.getpid()} on {socket.gethostname()}"
    ]
    assert store.record(spec) is None
