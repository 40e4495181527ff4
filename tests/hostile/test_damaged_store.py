"""Damage to stored runs: every flipped byte is named or harmless, and no other run suffers. Locks,
also where flock does not work, and runs that another process makes.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
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
from dllm_bench.cli import run as run_command
from dllm_bench.cli.doctor import path_lines
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.launch.local import run_all
from dllm_bench.runs import rescore
from dllm_bench.runs.runner import run
from dllm_bench.store import lock as locks
from dllm_bench.store import store as stores
from dllm_bench.store.groups import Paths
from dllm_bench.store.lock import BusyError, Lock, supports_flock, unlock
from dllm_bench.store.record import WARNING, RunRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import (
    LOCK,
    RECORD,
    SAMPLES,
    SESSIONS,
    SPEC,
    Store,
    read_samples,
    verify,
)
from dllm_bench.tables.plan import look_up
from tests.resume import fakes
from tests.tiers import covering

N = 4
SPEC_N = fakes.spec(N)
FILES = (SPEC, SESSIONS, SAMPLES, RECORD)
FLIPS = 160  # in each file
SAMPLE_OF_FLIPS = 40  # without -m drill


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "runs"
    run(SPEC_N, store=Store(root), deps=fakes.deps())
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Store:
    """Return a copy of it that may be damaged."""
    shutil.copytree(whole, tmp_path / "runs")
    return Store(tmp_path / "runs")


def flipped(content: bytes, seed: int) -> bytes:
    """Return one bit flipped, or, for odd seeds, one byte replaced."""
    draw = random.Random(seed)
    at = draw.randrange(len(content))
    change = draw.randrange(1, 256) if seed % 2 else 1 << draw.randrange(8)
    return content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def content_of(folder: Path) -> tuple[object, ...]:
    record, head = stores.read_record(folder), stores.read_head(folder)
    assert record is not None and head is not None
    sessions = [json.loads(line) for line in (folder / SESSIONS).read_text().splitlines()]
    return record.to_json(), head.spec.to_plain(), head.total, read_samples(folder), sessions


def seeds(name: str) -> range:
    start = FILES.index(name) * FLIPS
    return range(start, start + FLIPS)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", ["some", pytest.param("others", marks=pytest.mark.drill)])
def test_a_flipped_byte_is_named_or_changes_nothing(store: Store, name: str, part: str) -> None:
    """Each flip is named by `verify`, without a traceback, or what is read is the same."""
    folder, chosen = store.path(SPEC_N), seeds(name)
    chosen = chosen[:SAMPLE_OF_FLIPS] if part == "some" else chosen[SAMPLE_OF_FLIPS:]
    before, content = content_of(folder), (folder / name).read_bytes()
    named = 0
    for seed in chosen:
        (folder / name).write_bytes(flipped(content, seed))
        found = verify(folder)
        assert found is not None, seed
        named += bool(found)
        if not found:
            assert content_of(folder) == before, f"flip {seed} in {name} was not seen"
        list(store.entries())
    assert named > 0.9 * len(chosen)


def test_a_record_without_its_checksum_is_named_wherever_it_is_read(store: Store) -> None:
    path = store.path(SPEC_N) / RECORD
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith(' "sha256"')))
    with pytest.raises(DllmBenchError, match=r"record\.json was changed after it was sealed"):
        store.record(SPEC_N)
    assert "was changed" in look_up((), SPEC_N, store).reason
    (entry,) = store.entries()
    assert entry.state is stores.RunState.DAMAGED and "was changed" in entry.error


def test_a_lost_end_of_the_only_session_is_named(store: Store) -> None:
    folder = store.path(SPEC_N)
    content = (folder / SESSIONS).read_bytes()
    assert content.count(b"\n") == 1
    for end in (b"x", b""):
        (folder / SESSIONS).write_bytes(content[:-1] + end)
        found = verify(folder)
        assert found is not None and bool(found) == bool(end)


@pytest.mark.parametrize("name", covering(3, [SPEC, SESSIONS, SAMPLES]))
def test_a_run_with_a_flipped_byte_goes_on_and_ends_as_if_nothing_had_been(store, name) -> None:
    """What was damaged is set aside, its sample is decoded again, the record is the same."""
    folder = store.path(SPEC_N)
    first = store.record(SPEC_N)
    (folder / RECORD).unlink()
    content = (folder / name).read_bytes()
    for seed in seeds(name)[:12]:
        (folder / name).write_bytes(flipped(content, seed))
        assert fakes.timeless(run(SPEC_N, store=store, deps=fakes.deps())) == fakes.timeless(first)
        (folder / RECORD).unlink()
        assert verify(folder) == []
    assert (folder / (name + stores.ASIDE)).exists()
    assert "set aside" in (folder / stores.LOG).read_text()


@pytest.mark.parametrize("line", [N - 1, 1])
def test_rescoring_never_loses_a_torn_sample(store, line, monkeypatch) -> None:
    folder = store.path(SPEC_N)
    sealed = (folder / RECORD).read_bytes()
    lines = (folder / SAMPLES).read_bytes().splitlines()
    lines[line] = lines[line][:-30]
    (folder / SAMPLES).write_bytes(b"\n".join(lines))
    monkeypatch.setattr(rescore, "benchmark_of", lambda plain: fakes.Letters())
    entry = store.find(SPEC_N.identity_hash)
    with pytest.raises(DllmBenchError, match=r"samples\.jsonl"):
        rescore.rescore(entry, dict(entry.spec.benchmark))
    assert (folder / RECORD).read_bytes() == sealed


def test_status_names_damaged_runs_and_lists_the_others(store, command) -> None:
    for n, name in ((5, RECORD), (6, SPEC), (7, SAMPLES)):
        spec = fakes.spec(n)
        run(spec, store=store, deps=fakes.deps())
        folder = store.path(spec)
        if name != RECORD:
            (folder / RECORD).unlink()
        (folder / name).write_bytes(b"\xff\xfe" + (folder / name).read_bytes())
    (store.path(SPEC_N).parent / "another-0123456789").symlink_to(folder)
    for words, code in (("runs verify", 1), ("status", 0)):
        text = command(words, code=code)
        for n in (5, 6, 7):
            assert str(store.path(fakes.spec(n))) in text, words
        assert "Traceback" not in text
    assert "hardware.name" not in text, "a setting that all readable runs share"
    rows = {line.split()[0]: line for line in text.splitlines() if line}
    assert f" {stores.RunState.SEALED.value} " in rows[SPEC_N.short]
    assert all(" damaged " in rows[fakes.spec(n).short] for n in (5, 6, 7))
    assert "spec.json is damaged" in command("show", fakes.spec(6).short, code=2)
    assert "move it away" in text and "give the command that made the run again" in text


@pytest.mark.parametrize("checked", [True, False])
def test_samples_of_another_run_are_not_adopted(store: Store, checked: bool) -> None:
    """Copied into a new folder without spec.json; lines without a checksum are damaged ones."""
    other = fakes.spec(N, seed=7)
    folder = store.root / other.folder
    folder.mkdir(parents=True)
    lines = (store.path(SPEC_N) / SAMPLES).read_text().splitlines()
    if not checked:
        plain = [{**json.loads(line), "run": other.short} for line in lines]
        lines = [json.dumps({k: v for k, v in one.items() if k != "check"}) for one in plain]
    (folder / SAMPLES).write_text("".join(f"{line}\n" for line in lines))
    with store.open(other) as opened:
        assert opened.samples == {}
    assert len((folder / (SAMPLES + stores.ASIDE)).read_bytes().splitlines()) == N


def test_a_damaged_session_keeps_the_numbers_of_the_others(store: Store) -> None:
    folder = store.path(SPEC_N)
    (folder / RECORD).unlink()
    assert json.loads((folder / SESSIONS).read_text())["index"] == 0
    (folder / SESSIONS).write_text("damaged\n")
    with store.open(SPEC_N) as opened:
        assert [s.environment for s in opened.sessions] == [{}]
        assert opened.begin(opened.sessions[0]) == 1
        assert store.share(SPEC_N, 1, session=1).samples == opened.samples
        assert not store.share(SPEC_N, 1, session=0).samples, "what other shares have decoded"
        warned = Session(1.0, 2, {WARNING: "by design"})
        assert store.share(SPEC_N, 1, session=1).begin(warned) == 1
    assert stores.read_sessions(folder)[0][1] == warned, "of the process that decoded"


# --- locks ----------------------------------------------------------------------------------------


def test_deleting_the_lock_file_lets_no_two_writers_in(store: Store) -> None:
    folder = store.path(SPEC_N)
    sample, *_ = read_samples(folder).values()
    (folder / RECORD).unlink()
    with store.open(SPEC_N) as first:
        (folder / LOCK).unlink()
        with store.open(SPEC_N) as second:
            before = (folder / SAMPLES).read_bytes()
            with pytest.raises(DllmBenchError, match="was taken over.*or its lock was deleted"):
                first.append(sample)
            assert (folder / SAMPLES).read_bytes() == before
            second.append(sample)
    with store.open(SPEC_N):
        pass


def test_a_file_or_a_folder_deleted_under_a_run_is_noticed_at_the_next_line(store: Store) -> None:
    folder = store.path(SPEC_N)
    first, second, *_ = read_samples(folder).values()
    with store.share(SPEC_N, 0, 0) as share:
        share.append(first)
        share.samples_file.unlink()
        with pytest.raises(DllmBenchError, match="was deleted or replaced"):
            share.append(second)
    (folder / RECORD).unlink()
    with store.open(SPEC_N) as opened:
        opened.append(first)
        shutil.rmtree(folder)
        with pytest.raises(DllmBenchError, match="was deleted while the run"):
            opened.append(second)
    assert not folder.exists()


def test_a_run_is_unlocked_unless_its_process_lives(store, command) -> None:
    folder, words = store.path(SPEC_N), f"runs unlock {SPEC_N.short}"
    (folder / RECORD).unlink()
    assert "locked by nobody" in command(words, code=2)
    with store.open(SPEC_N):
        assert f"kill {os.getpid()}" in command(words, code=2)
        with pytest.raises(DllmBenchError, match=words):
            Lock(folder / LOCK).acquire()
    for pid, host in ((1, "elsewhere"), (2**22 + 1, socket.gethostname())):
        (folder / LOCK).write_text(json.dumps({"pid": pid, "host": host}))
        assert f"process {pid}" in command(words)
        with store.open(SPEC_N):
            pass


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
    monkeypatch.setattr(run_command.compose, "runs_in_this_process", lambda: local)
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

    monkeypatch.setattr(run_command, "show_error", show)
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
