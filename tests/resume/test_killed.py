"""A run that is killed, at any point, finishes as if nothing had happened."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dllm_bench.runs import runner
from dllm_bench.runs.dependencies import Dependencies
from dllm_bench.runs.runner import run
from dllm_bench.store import files
from dllm_bench.store import store as store_module
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import RunState, Store
from tests.resume import fakes
from tests.resume.drill import Books, ended, fork
from tests.tiers import covering

N = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Return the same run, not interrupted."""
    return run(fakes.spec(N), store=Store(tmp_path_factory.mktemp("whole")), deps=fakes.deps())


def test_sigkill_at_random_points_loses_and_repeats_nothing(tmp_path, whole) -> None:
    books, chance = Books(Store(tmp_path / "runs"), fakes.spec(N), tmp_path / "log"), Random(20)
    own = fakes.deps(decoder=fakes.FakeDecoder(log=books.log, pause_s=0.02))
    for _ in range(3):
        with books.balanced():
            before = len(books.stored())
            pid = fork(lambda: run(books.spec, store=books.store, deps=own))
            while len(books.stored()) == before:
                time.sleep(0.005)
            time.sleep(chance.uniform(0, 0.2))
            os.kill(pid, signal.SIGKILL)
            assert ended(pid) == -signal.SIGKILL, "the run ended before it was killed"
        mine = [key for process, key in fakes.calls(books.log) if process == str(pid)]
        assert mine[:2] == ["item-0", "item-1"], "every session warms up on the same requests"
    with books.balanced():
        record = run(books.spec, store=books.store, deps=own)
    assert fakes.timeless(record) == fakes.timeless(whole)
    assert len(record.sessions) == 4
    assert all(s.warmups == 2 and s.samples > 0 for s in record.sessions)
    assert sum(s.samples for s in record.sessions) == N


class Killed(BaseException):
    """Stands for a death that no handler sees."""


def die(*_: Any, **__: Any) -> None:
    raise Killed


def die_at_nth(n: int, function: Any) -> Any:
    """`function` that dies instead of its n-th call."""
    calls = iter(range(n))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise Killed
        return function(*args, **kwargs)

    return wrapped


POINTS: dict[str, tuple[Any, str, int | None]] = {
    "before the first sample": (store_module.OpenRunFolder, "append", 0),
    "before the sixth sample": (store_module.OpenRunFolder, "append", 5),
    "while grading": (fakes.Letters, "score", N),
    "before the record": (runner, "seal", 0),
    "while writing the record": (files.os, "replace", 2),
    "after the record": (runner.RunSession, "finish", None),
}


@pytest.mark.parametrize("point", covering(3, POINTS))
def test_death_at_a_point_of_the_path(point, tmp_path, whole, monkeypatch) -> None:
    store = Store(tmp_path)
    owner, name, n = POINTS[point]
    with monkeypatch.context() as patch:
        original = getattr(owner, name)

        def last_words(*args: Any) -> None:
            original(*args)
            raise Killed

        patch.setattr(owner, name, last_words if n is None else die_at_nth(n, original))
        with pytest.raises(Killed):
            run(fakes.spec(N), store=store, deps=fakes.deps())
    state = store.state(fakes.spec(N))
    assert state is (RunState.SEALED if point == "after the record" else RunState.PARTIAL)
    record = run(fakes.spec(N), store=store, deps=fakes.deps())
    assert fakes.timeless(record) == fakes.timeless(whole)


def test_a_sealed_run_is_read_and_nothing_is_built(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = run(fakes.spec(5), store=store, deps=fakes.deps())
    nothing: Any = die
    broken = Dependencies(model=nothing, decoder=nothing, benchmark=nothing, prepare=nothing)
    assert run(fakes.spec(5), store=store, deps=broken) == first
