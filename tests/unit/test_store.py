"""Run folders: states, one writer at a time, atomic seals, records that are refused or read."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.runs.runner import run
from dllm_bench.store import files
from dllm_bench.store import lock as locks
from dllm_bench.store import store as store_module
from dllm_bench.store.files import Appender, whole_lines
from dllm_bench.store.lock import Lock
from dllm_bench.store.record import SCHEMA, RunRecord
from dllm_bench.store.store import LOCK, RECORD, SAMPLES, RunState, Store, read_entry, read_samples
from dllm_bench.tables.plan import look_up
from tests.resume import fakes

SPEC_5 = fakes.spec(5)


def made(root: Path) -> tuple[Store, RunRecord]:
    """Return a store with one sealed run of five samples."""
    store = Store(root)
    return store, run(SPEC_5, store=store, deps=fakes.deps())


def test_a_run_is_found_by_the_names_of_folders_and_no_other_is_read(tmp_path, monkeypatch) -> None:
    store, record = made(tmp_path)
    for seed in range(1, 4):
        with store.open(replace(SPEC_5, seed=seed)) as opened:
            opened.expect(5)
    reads = Mock(side_effect=read_entry)
    monkeypatch.setattr(store_module, "read_entry", reads)
    assert store.find(record.identity_hash[:6]).spec == SPEC_5
    reads.assert_called_once_with(store.path(SPEC_5))
    with pytest.raises(DllmBenchError, match="4 runs"):
        store.find("")


def test_a_lock_beats_while_it_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "BEAT_S", 0.01)
    lock = Lock(tmp_path / LOCK)
    lock.acquire()
    os.utime(lock.path, (0, 0))
    deadline = time.monotonic() + 30
    while lock.path.stat().st_mtime == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    lock.release()


def test_who_slept_too_long_writes_no_more(tmp_path: Path) -> None:
    """A suspended job whose run another machine took over."""
    store, _ = made(tmp_path / "other")
    sample = next(iter(read_samples(store.path(SPEC_5)).values()))
    with Store(tmp_path).open(SPEC_5) as opened:
        other = json.dumps({"pid": 7, "host": "elsewhere"})
        (opened.folder / LOCK).write_text(other)
        with pytest.raises(DllmBenchError, match="was taken over"):
            opened.append(sample)
        opened.fail("a reason of the one that slept")
    assert not (opened.folder / SAMPLES).exists()
    assert Store(tmp_path).state(SPEC_5) is RunState.PARTIAL
    assert (opened.folder / LOCK).read_text() == other


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    folder, other = store.path(SPEC_5), fakes.spec(6)
    target = store.root / other.folder
    folder.rename(target)
    with pytest.raises(DllmBenchError, match="belongs to run"):
        store.record(other)
    (target / RECORD).unlink()
    for _ in range(2):  # the lock is let go
        with pytest.raises(DllmBenchError, match="belongs to run"), store.open(other):
            pass


def test_one_run_in_two_folders_is_refused(tmp_path: Path) -> None:
    """As copying runs between results folders makes them; neither is read in place of the other."""
    store, record = made(tmp_path)
    folder = store.path(SPEC_5)
    shutil.copytree(folder, folder.with_name(f"copy-{SPEC_5.short}"))
    for asked in (
        lambda: store.record(SPEC_5),
        lambda: store.find(record.identity_hash[:6]),
        lambda: run(SPEC_5, store=store, deps=fakes.deps()),
    ):
        with pytest.raises(DllmBenchError, match=f"copy-{SPEC_5.short}.* are folders of one run"):
            asked()
    assert "folders of one run" in look_up((), SPEC_5, store).reason


def test_lines_reach_the_disk_within_a_second_and_at_the_end(tmp_path, monkeypatch) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(files.os, "fsync", lambda descriptor: synced.append(now[0]))
    appender = Appender(tmp_path / "lines")
    for step in range(25):
        now[0] = 100 + step / 10
        appender.append(str(step))
    assert synced == [101.0, 102.0]
    appender.close()
    assert synced == [101.0, 102.0, 102.4]
    assert whole_lines(tmp_path / "lines") == [str(step).encode() for step in range(25)]


def test_broken_lines_are_refused_by_readers_and_set_aside_by_the_next_start(tmp_path) -> None:
    store, _ = made(tmp_path)
    path = store.path(SPEC_5) / SAMPLES
    whole = path.read_bytes().splitlines(keepends=True)
    lines = [whole[0], b"\0\0\0\n", b'{"id": 3}\n', whole[1], whole[0], whole[2][:9]]
    path.write_bytes(b"".join(lines))
    with pytest.raises(DllmBenchError, match=r"samples\.jsonl line 2, .* and 1 more"):
        read_samples(path.parent)
    (path.parent / RECORD).unlink()
    with store.open(SPEC_5) as opened:
        assert list(opened.samples) == ["item-0", "item-1"]
    assert path.read_bytes() == whole[0] + whole[1]
    assert "set aside" in (path.parent / "log.txt").read_text()
    aside = (path.parent / f"{SAMPLES}.damaged").read_bytes()
    assert aside == b"\0\0\0\n" + b'{"id": 3}\n' + whole[2][:9] + b"\n"


def test_a_record_of_a_newer_version_is_refused_loudly(tmp_path: Path) -> None:
    store, _ = made(tmp_path)
    path = store.path(SPEC_5) / RECORD
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "schema": SCHEMA + 1}))
    with pytest.raises(DllmBenchError, match=f"schema version {SCHEMA + 1}.*update"):
        store.record(SPEC_5)
    for text in ("", "{}", "[]", json.dumps({**plain, "schema": SCHEMA - 1})):
        path.write_text(text)
        with pytest.raises(DllmBenchError, match=r"record\.json is no run record"):
            store.record(SPEC_5)
