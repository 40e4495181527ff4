"""Fault drills: what dies, fills up, jumps or was tampered with costs no finished sample.

By default death at every fourth change of the disk, a full and a read-only disk, a clock that jumps
and changed items; the whole suite adds a handful of random kills, `pytest -m drill` hundreds.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.benchmark import Encode, SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.launch import local
from dllm_bench.runs.dependencies import REAL
from dllm_bench.runs.runner import run
from dllm_bench.store import provenance
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, RunState, Store
from tests.resume import fakes
from tests.resume.drill import REFUSED, WARMUPS, Books, Logged, die_at_change, ended, fork

N = 4
NOBODY = 65534


def whole(root: Path, n: int = N) -> RunRecord:
    """Return the same run, undisturbed."""
    return run(fakes.spec(n), store=Store(root / "whole"), deps=fakes.deps())


def drill(few: int, many: int) -> pytest.MarkDecorator:
    """Return a few kills in the whole suite, many with `-m drill`."""
    whole = pytest.param(few, marks=pytest.mark.exhaustive)
    hundreds = pytest.param(many, marks=[pytest.mark.drill, pytest.mark.timeout(1200)])
    return pytest.mark.parametrize("kills", [whole, hundreds])


@drill(6, 200)
def test_random_kills_on_an_embedded_model_lose_and_repeat_nothing(kills, tmp_path) -> None:
    small = ["limit=6", "decoder.schedule.block=4", "hardware=cpu"]
    spec = RunSpec.from_config(compose(["model=tiny-llada", "decoder=fast_dllm", *small]))
    real = replace(REAL, benchmark=fakes.Always(fakes.Letters()))  # graded at once
    undisturbed = run(spec, store=Store(tmp_path / "whole"), deps=real)  # loads what is loaded once
    started = time.monotonic()
    assert ended(fork(lambda: run(spec, store=Store(tmp_path / "forked"), deps=real))) == 0
    takes_s, chance, killed = time.monotonic() - started, random.Random(kills), 0
    for attempt in itertools.count():
        books = Books(Store(tmp_path / str(attempt)), spec, tmp_path / f"{attempt}.log")
        own = replace(real, decoder=lambda s, log=books.log: Logged(REAL.decoder(s), log))
        life = partial(run, spec, store=books.store, deps=own)
        while killed < kills and books.store.record(spec) is None:
            killed += books.live(life, kill_after_s=chance.uniform(0, takes_s)) != 0
        books.live(life)
        record = books.store.record(spec)
        assert fakes.timeless(record) == fakes.timeless(undisturbed)
        assert sum(session.samples for session in record.sessions) == 6
        assert {session.warmups for session in record.sessions} == {WARMUPS}
        if killed >= kills:
            break


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.drill)])
def test_death_at_changes_of_the_disk(step, tmp_path, monkeypatch) -> None:
    """Each write torn in the middle, each rename, removal, truncation and flush, each file and
    folder made; or every `step`-th of them, among which is one of the samples."""
    monkeypatch.setattr(provenance, "environment_of", lambda spec: {})
    samples = 5
    undisturbed, spec = fakes.timeless(whole(tmp_path, samples)), fakes.spec(samples)
    for n in itertools.count(step=step):
        books = Books(Store(tmp_path / str(n)), spec, tmp_path / f"{n}.log")
        deps = fakes.deps(decoder=fakes.FakeDecoder(log=books.log))
        life = partial(run, spec, store=books.store, deps=deps)
        code = books.live(partial(die_at_change, n, books.store.root, life))
        books.live(life)
        record = books.store.record(spec)
        assert record is not None and fakes.timeless(record) == undisturbed, f"change {n}"
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert n > 30, "fewer changes than a run makes"


@dataclass
class SlowGrades(fakes.Letters):
    scores_fast: bool = False

    def score(self, texts: Mapping[str, str]) -> dict[str, SampleScore]:
        time.sleep(0.3)
        return super().score(texts)


@pytest.mark.xdist_group("dist")
@drill(1, 40)
def test_random_kills_among_processes_that_share_a_run(kills: int, tmp_path: Path) -> None:
    """World sizes in turn, each going on with what another left; grading included."""
    chance, n = random.Random(kills), 12
    undisturbed, killed = fakes.timeless(whole(tmp_path, n)), 0
    for attempt in itertools.count():
        spec = fakes.spec(n)
        books = Books(Store(tmp_path / str(attempt)), spec, tmp_path / f"{attempt}.log")
        decoder = fakes.FakeDecoder(log=books.log, pause_s=0.05)
        own = fakes.deps(decoder=decoder, benchmark=SlowGrades())
        sizes = itertools.cycle((2, 3))
        while (record := books.store.record(spec)) is None:
            shared = replace(spec, hardware={**spec.hardware, "replicas": next(sizes)})
            hunter = Hunter(books.log, chance.uniform(0, 0.9), hunts=killed < kills)
            with books.balanced(), hunter, suppress(DllmBenchError):
                local.run(shared, store=books.store, deps=own)
            killed += hunter.hit
        assert fakes.timeless(record)["columns"] == undisturbed["columns"]
        if killed >= kills:
            break


class Hunter:
    """Kills one of this process's new children, some time after the first of them decodes."""

    def __init__(self, log: Path, after_s: float, hunts: bool) -> None:
        self.log, self.after_s, self.hit = log, after_s, False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._hunt if hunts else self.over.wait, daemon=True)
        self.known = {child.pid for child in multiprocessing.active_children()}

    def _hunt(self) -> None:
        begun = self._logged()
        while self._logged() == begun:
            if self.over.wait(0.01):
                return
        self.over.wait(self.after_s)
        prey = [child for child in multiprocessing.active_children() if child.pid not in self.known]
        if prey and not self.over.is_set():
            prey[-1].kill()
            self.hit = True

    def _logged(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def test_a_full_disk_at_any_file_is_a_sentence_and_costs_one_sample(tmp_path: Path) -> None:
    """A real limit on the size of files, a little short of what each file of a run needs."""
    undisturbed, spec = whole(tmp_path), fakes.spec(N)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    folder = Store(tmp_path / "whole").path(spec)
    short = {p.name: p.stat().st_size * 19 // 20 for p in folder.iterdir() if p.suffix != ".txt"}
    for limit in sorted(set(short.values())):  # 0 among them: the lock's
        store, words = Store(tmp_path / str(limit)), tmp_path / f"{limit}.words"

        def starved(limit: int = limit, store: Store = store) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                run(spec, store=store, deps=fakes.deps())
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

        assert ended(fork(starved, words)) == REFUSED, limit
        assert "File too large" in words.read_text() and "make room" in words.read_text()
        assert not list(store.root.rglob("*.tmp")), "rubbish on a full disk"
        assert store.record(spec) is None
        if limit == short[SAMPLES]:
            entry = store.entry(spec)
            assert (entry.state, entry.done) == (RunState.FAILED, N - 1)
            assert "File too large" in entry.error
            assert (store.path(spec) / SAMPLES).read_bytes().endswith(b"}\n")
        record = run(spec, store=store, deps=fakes.deps())
        assert fakes.timeless(record) == fakes.timeless(undisturbed)


def test_read_only_results_can_be_read_and_are_not_written() -> None:
    def powerless() -> None:
        if os.getuid() == 0:  # to whom nothing is read-only
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        assert run(fakes.spec(N), store=store) == record
        assert store.state(fakes.spec(N)) is RunState.SEALED
        run(fakes.spec(N + 1), store=store, deps=fakes.deps())

    with tempfile.TemporaryDirectory() as folder:
        public = Path(folder)
        store, words = Store(public / "runs"), public / "words" / "said"
        record = run(fakes.spec(N), store=store, deps=fakes.deps())
        words.parent.mkdir()
        for path in (public, store.root, *store.root.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        words.parent.chmod(0o777)
        assert ended(fork(powerless, words)) == REFUSED
        assert "make it writable" in words.read_text() and str(store.root) in words.read_text()


def test_a_clock_that_jumps_changes_nothing_but_time_stamps(tmp_path: Path) -> None:
    now = iter([2e9, 2e9, 1.0, 5e9, -3.0, *range(100)])
    jumping = {"now": lambda: float(next(now))}
    store = Store(tmp_path / "runs")
    broken = fakes.deps(decoder=fakes.BrokenDecoder(at="item-2"), **jumping)
    with pytest.raises(ZeroDivisionError):
        run(fakes.spec(N), store=store, deps=broken)
    record = run(fakes.spec(N), store=store, deps=fakes.deps(**jumping))
    assert fakes.timeless(record) == fakes.timeless(whole(tmp_path))
    assert all(0 <= seconds < 60 for seconds in record.columns["seconds"])
    assert [session.samples for session in record.sessions] == [2, 2]


@dataclass
class OtherItems(fakes.Letters):
    """The prompts of one item changed, though the data set's hash says nothing of it."""

    changed: int = 1

    def requests(self, encode: Encode) -> list[Request]:
        found = super().requests(encode)
        found[self.changed] = replace(found[self.changed], prompt_ids=(9,))
        return found


def test_items_that_changed_under_a_run_are_found_and_named(tmp_path: Path) -> None:
    store = Store(tmp_path / "runs")
    with pytest.raises(ZeroDivisionError):
        run(fakes.spec(N), store=store, deps=fakes.deps(decoder=fakes.BrokenDecoder(at="item-2")))
    samples = store.path(fakes.spec(N)) / SAMPLES
    before = samples.read_bytes()
    with pytest.raises(DllmBenchError, match="holds sample 'item-1' of another prompt.*changed"):
        run(fakes.spec(N), store=store, deps=fakes.deps(benchmark=OtherItems()))
    assert samples.read_bytes() == before
    later = fakes.deps(benchmark=OtherItems(changed=2))
    assert run(fakes.spec(N), store=store, deps=later).columns["id"][0] == "item-0"
    elsewhere = fakes.spec(N, inputs={"dataset": "of other content"})
    assert store.state(elsewhere) is RunState.ABSENT, "other items known by their hash: another run"
