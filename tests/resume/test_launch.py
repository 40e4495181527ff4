"""Several runs at once: no repeats, a failure stays alone, workers die with their parent."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver
from operator import methodcaller
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import local, processes, workers
from dllm_bench.launch.local import groups, run_all, take_next
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import frame_of
from dllm_bench.runs import progress
from dllm_bench.runs.runner import run, run_in_turns
from dllm_bench.store.store import Store
from tests.hostile.test_terminal import Terminal
from tests.resume import fakes
from tests.sample_stats import sample

SPECS = [fakes.spec(n) for n in (3, 4, 5, 6)]


def test_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store = Store(tmp_path)
    decoder = fakes.Mixed(fakes.FakeDecoder(), {4: fakes.BrokenDecoder()})
    outcomes = run_all(SPECS, store=store, deps=fakes.deps(decoder=decoder))
    assert [o.error for o in outcomes] == ["", "ZeroDivisionError: by design", "", ""]
    assert [store.state(spec) for spec in SPECS] == ["sealed", "failed", "sealed", "sealed"]
    text = capsys.readouterr().err
    assert text.count(": done") == 3 and "[4/4]" in text and "by design" in text
    again = run_all([*SPECS, SPECS[0]], store=store, deps=fakes.deps())
    assert [o.error for o in again] == [""] * 5
    assert capsys.readouterr().err.count("[1/1]") == 1, "only the failed one is made"


@pytest.mark.exhaustive
def test_workers_share_the_runs_and_survive_a_dead_one(tmp_path, capsys) -> None:
    store, log = Store(tmp_path / "runs"), tmp_path / "calls"
    kinds = {4: fakes.DyingDecoder(), 6: fakes.BrokenDecoder()}
    decoder = fakes.Mixed(fakes.FakeDecoder(log=log), kinds)
    specs = [*SPECS, fakes.spec(7)]
    outcomes = run_all(specs, store=store, jobs=2, deps=fakes.deps(decoder=decoder))
    assert [bool(o.error) for o in outcomes] == [False, True, False, True, False]
    assert "exit code -9" in outcomes[1].error and "by design" in outcomes[3].error
    assert str(os.getpid()) not in {pid for pid, _ in fakes.calls(log)}
    assert "[5/5]" in capsys.readouterr().err
    for n in (3, 5, 7):
        alone = run(fakes.spec(n), store=Store(tmp_path / "alone"), deps=fakes.deps())
        assert fakes.timeless(store.record(fakes.spec(n))) == fakes.timeless(alone)
    assert not any(o.error for o in run_all(specs, store=store, deps=fakes.deps()))


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended before or while this was read
        return False


PARENT = """
import sys
from pathlib import Path
from dllm_bench.launch.local import run_all
from dllm_bench.store.store import Store
from tests.resume import fakes
deps = fakes.deps(decoder=fakes.StuckDecoder(log=Path(sys.argv[2])))
run_all([fakes.spec(9), fakes.spec(10)], store=Store(Path(sys.argv[1])), jobs=2, deps=deps)
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")
@pytest.mark.exhaustive
def test_workers_do_not_outlive_their_parent(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    arguments = [sys.executable, "-c", PARENT, str(tmp_path / "runs"), str(log)]
    parent = subprocess.Popen(arguments, cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)
    pids, deadline = set[int](), time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        pids = {int(pid) for pid, key in fakes.calls(log) if key == "item-3"}
    assert len(pids) == 2 and all(map(alive, pids))
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(alive, pids)), "a worker still holds its run's lock"
    with Store(tmp_path / "runs").open(fakes.spec(9)) as opened:
        assert list(opened.samples) == ["item-0", "item-1", "item-2"]


@pytest.mark.exhaustive
def test_a_first_process_that_ends_before_it_seals_is_named(tmp_path, monkeypatch) -> None:
    whole = processes._Watch.until

    def until(watch: Any, milestone: str, times: int = 1) -> None:
        whole(watch, milestone, times)
        first = watch.workers.started[0].process
        first.kill()
        first.join()

    monkeypatch.setattr(processes._Watch, "until", until)
    shared = fakes.spec(4, hardware={**fakes.spec().hardware, "replicas": 2})
    with pytest.raises(DllmBenchError, match="Process 0 of 2 .* ended with exit code -9"):
        local.run(shared, store=Store(tmp_path), deps=fakes.deps())


def test_a_worker_stays_with_its_model_and_benchmark_and_takes_the_longest_run_first() -> None:
    def made(model: str, benchmark: str, n: int) -> Any:
        return fakes.spec(n, model={"name": model}, benchmark={"name": benchmark})

    asked = [("a", "x", 1), ("b", "x", 1), ("b", "x", 2), ("a", "x", 3), ("b", "y", 1)]
    waiting = groups([made(*one) for one in asked])
    order, held = [], None
    while waiting:
        [held] = take_next(waiting, held)
        order.append((held.model["name"], held.benchmark["name"], held.limit))
    assert order == [("a", "x", 3), ("a", "x", 1), ("b", "x", 2), ("b", "x", 1), ("b", "y", 1)]
    one, same, other = (fakes.repeating(1, model={"name": name}) for name in "aab")
    alone = fakes.spec(5)
    found = groups([one, alone, other, same])
    assert found == [(alone,), (one, same), (other,)], "only runs of one model take turns"


def test_runs_of_several_passes_take_turns_with_those_of_their_model(tmp_path: Path) -> None:
    """Each warms up once, and the result is that of a run made alone."""
    log, store = tmp_path / "calls", Store(tmp_path / "runs")
    made = fakes.deps(decoder=fakes.FakeDecoder(log=log), benchmark=fakes.Repeating())
    specs = [fakes.repeating(3), fakes.repeating(4), fakes.repeating(3, model={"name": "other"})]
    assert [o.error for o in run_all(specs, store=store, deps=made)] == ["", "", ""]
    firsts = [0] * (2 + 3) + [0] * (2 + 4)  # two warm-ups and the items
    turns, alone = [*firsts, *[1] * 7, *[2] * 7], [0] * (2 + 3) + [1] * 3 + [2] * 3
    assert [int(key[-1]) for _, key in fakes.calls(log)] == [*turns, *alone]
    for spec in specs:
        record = store.record(spec)
        assert record is not None and len(record.sessions) == 1
    again = run(specs[1], store=Store(tmp_path / "alone"), deps=made)
    assert fakes.timeless(store.record(specs[1])) == fakes.timeless(again)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_all_runs_have_a_number_of_items_before_any_has_more(jobs: int, tmp_path: Path) -> None:
    store, seen = Store(tmp_path), []
    specs = [fakes.spec(9), fakes.spec(4), fakes.spec(12)]

    def after(items: int) -> None:
        records = [store.largest_record(spec) for spec in specs]
        seen.append((items, [record.items if record else 0 for record in records]))
        for idle in multiprocessing.active_children():  # another takes the place of each
            idle.kill()
            idle.join()

    outcomes = run_all(specs, store=store, jobs=jobs, stages=(3, 6), after=after, deps=fakes.deps())
    assert not any(outcome.error for outcome in outcomes)
    assert seen == [(3, [3, 3, 3]), (6, [6, 3, 6])]
    assert [record and record.items for record in map(store.record, specs)] == [9, 4, 12]


def test_a_run_that_fails_in_a_pass_is_not_tried_again_in_the_next(tmp_path, capsys) -> None:
    specs = [fakes.repeating(4), fakes.repeating(3)]
    decoder = fakes.Mixed(fakes.FakeDecoder(), {4: fakes.BrokenDecoder()})
    made = fakes.deps(decoder=decoder, benchmark=fakes.Repeating())
    outcomes = run_all(specs, store=Store(tmp_path), deps=made)
    assert [o.error for o in outcomes] == ["ZeroDivisionError: by design", ""]
    said = capsys.readouterr().err
    assert said.count("by design") == 1 and "[2/2]" in said


def test_the_progress_line_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", Mock(monotonic=lambda: now[0]))
    plain, terminal = io.StringIO(), Terminal()
    made = fakes.deps(decoder=fakes.FakeDecoder(clock=now, pause_s=3.0), clock=lambda: now[0])
    for stream, root in ((plain, tmp_path / "a"), (terminal, tmp_path / "b")):
        now[0] = 0.0
        monkeypatch.setattr("sys.stderr", stream)
        run(fakes.spec(12), store=Store(root), progress=progress.RunProgress(), deps=made)
    shown = plain.getvalue().splitlines()
    assert len(shown) == 4, "after 12, 24 and 36 of 42 seconds, two warm-ups included; the end"
    assert "2/12 · ETA 0:30 · score" in shown[0]
    assert all(word in shown[0] for word in (" ± ", "TPF ", "TPS "))
    assert "done, 12 samples" in shown[-1]
    drawn = terminal.getvalue()
    assert "12/12 · ETA 0:00 · score" in drawn and "━" in drawn, "a bar"
    assert drawn.count("done, 12 samples") == 1


def test_a_resumed_run_says_so_and_estimates_by_its_own_pace() -> None:
    running = progress.RunningMetrics(total=100)
    for _ in range(50):
        running.add("a", sample(), None)
    assert running.eta_s is None
    running.add("a", sample(), None, session_s=2.0)
    running.add("a", sample(), None, session_s=4.0)
    assert running.eta_s == 2.0 * 48 and running.score() is None
    assert [progress.duration(s) for s in (None, 59.6, 3723)] == ["–", "1:00", "1:02:03"]


def test_each_sample_is_converted_once_for_the_metrics_of_all(monkeypatch) -> None:
    converted = list[int]()
    monkeypatch.setattr(
        progress, "frame_of", lambda stats: converted.append(len(stats)) or frame_of(stats)
    )
    running = progress.RunningMetrics(total=4)
    for n in range(1, 5):
        running.add("a", sample(emitted=n), None)
        for name in ("tpf/emitted", "tps/e2e"):
            assert running.metric(name) == measure(name, running.stats)
    assert converted == [1] * 4


def test_the_score_so_far_ends_as_that_of_the_record(tmp_path: Path) -> None:
    """Its interval is over items: a repetition is no further one."""
    watched, made = Mock(), fakes.deps(benchmark=fakes.Repeating())
    record = run(fakes.repeating(8), store=Store(tmp_path), deps=made, progress=watched)
    assert watched.sample.call_args.args[1].score() == record.score and record.score.n == 8


def test_the_progress_of_many_runs(monkeypatch, capsys) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", Mock(monotonic=lambda: now[0]))
    shown = progress.ManyRunsProgress(10)
    shown.update("a", "1/9")
    assert capsys.readouterr().err == ""
    now[0] = 30.0
    shown.end("b", "done")
    shown.update("a", "5/9")
    assert capsys.readouterr().err == "[1/10] b: done\n1/10 runs, ETA 4:30 | a: 5/9\n"


@pytest.mark.parametrize("kills", [1, workers.START_TRIES])
def test_a_fork_server_that_is_killed_during_a_start_is_started_again(kills, monkeypatch) -> None:
    """It is stopped before it can answer, and killed while the start waits for it."""
    monkeypatch.setattr(workers, "PRELOAD", [])
    server, connect = forkserver._forkserver, forkserver.connect_to_new_process
    left = iter(range(kills))

    def end_server(signal_: int) -> None:
        if server._forkserver_pid is not None:
            os.kill(server._forkserver_pid, signal_)

    def connect_and_kill(fds: Any) -> Any:
        forkserver.ensure_running()
        if next(left, None) is None:
            return connect(fds)
        end_server(signal.SIGSTOP)
        try:
            return connect(fds)
        finally:
            end_server(signal.SIGKILL)

    monkeypatch.setattr(forkserver, "connect_to_new_process", connect_and_kill)
    with workers.Workers() as group:
        if kills < workers.START_TRIES:
            group.start(methodcaller("send", "hello"))
            assert [message for _, message in group.messages()] == ["hello"]
        else:
            words = r"in 3 tries \((unexpected EOF|.*Broken pipe)\)"
            with pytest.raises(DllmBenchError, match=words):
                group.start(methodcaller("send", "hello"))
    end_server(signal.SIGKILL)  # the next test has one with everything imported


def test_a_logger_of_runs_that_take_turns_has_one_run_at_a_time(tmp_path: Path) -> None:
    specs, both = [fakes.repeating(3), fakes.repeating(4)], Mock()
    loggers, made = [both.first, both.second], fakes.deps(benchmark=fakes.Repeating())
    assert run_in_turns(specs, store=Store(tmp_path), loggers=loggers, deps=made) == [None, None]
    begun = [name for name, *_ in both.mock_calls if name.endswith((".start", ".close"))]
    assert begun == ["first.start", "first.close", "second.start", "second.close"]
