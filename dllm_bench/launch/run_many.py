"""Several runs, one after the other in this process or over worker processes.

A worker takes the next run of the model and benchmark it already holds, if there is one. Workers
report to the parent, which alone writes to the terminal. If a run fails or its worker is killed,
the others continue; starting again resumes from the store. A run that another process makes is left
to it and waited for when the others are done. Jobs of a cluster are in `slurm`.

Runs that repeat their items are there to be timed. They come last, in this process alone, and those
of one model and benchmark take turns pass by pass: what slows the machine down for a while slows
all of them, and shows as variance between the passes of each.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TextIO

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.run_one import decode_passes, make_logger, run
from dllm_bench.launch.workers import Ended, Failed, Worker, Workers
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.runs.observers import Observer, RunningMetrics, SilentObserver
from dllm_bench.runs.progress import ManyRunsProgress, headline, progress_text
from dllm_bench.store.lock import BusyError
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, digest
from dllm_bench.store.store import Store

REPORT_EVERY_S = 0.5


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    spec: RunSpec
    error: str = ""  # why it failed; empty if it is sealed
    is_busy: bool = False  # another process makes it


@dataclass(frozen=True)
class RunJob:
    """One run as a value that can be sent to another process; calling it makes the run."""

    spec: RunSpec
    store: Store
    deps: Dependencies = REAL
    passes: int | None = None  # decode the first passes over the items only; None: the whole run

    def __call__(self, progress: Observer | None = None) -> RunOutcome:
        """Make the run; an exception becomes part of the outcome."""
        given: dict[str, Any] = {"store": self.store, "progress": progress, "deps": self.deps}
        try:
            if self.passes is None:
                run(self.spec, logger=make_logger(self.spec), **given)
            else:
                decode_passes(self.spec, self.passes, **given)
        except BusyError as error:
            return RunOutcome(self.spec, f"being made by {error.owner}", is_busy=True)
        except DllmBenchError as error:
            return RunOutcome(self.spec, str(error))
        except Exception as error:  # a bug in one run must not end the others
            return RunOutcome(self.spec, f"{type(error).__name__}: {error}")
        return RunOutcome(self.spec)


def run_all(
    specs: Sequence[RunSpec],
    *,
    store: Store,
    jobs: int = 1,
    stream: TextIO | None = None,
    deps: Dependencies = REAL,
) -> list[RunOutcome]:
    """Make all runs, `jobs` at a time; the outcomes are in the order of `specs`.

    stream: where progress is written, standard error by default.
    """
    unique = list(dict.fromkeys(specs))
    open_specs = [spec for spec in unique if store.record(spec) is None]
    waiting = [spec for spec in open_specs if spec.repeats == 1]
    outcomes = {spec: RunOutcome(spec) for spec in unique}
    with ManyRunsProgress(len(open_specs), stream) as progress:
        if jobs > 1 and len(waiting) > 1:
            pool = _WorkerPool(waiting, store, deps, progress)
            outcomes |= pool.work(min(jobs, len(waiting)))
        else:
            outcomes |= _run_here(waiting, store, deps, progress)
        repeated = [spec for spec in open_specs if spec.repeats > 1]
        outcomes |= _run_in_turns(repeated, store, deps, progress)
        busy = [spec for spec, outcome in outcomes.items() if outcome.is_busy]
        outcomes |= _run_busy(busy, store, deps, progress)
    return [outcomes[spec] for spec in specs]


def _run_here(
    waiting: list[RunSpec], store: Store, deps: Dependencies, progress: ManyRunsProgress
) -> dict[RunSpec, RunOutcome]:
    outcomes: dict[RunSpec, RunOutcome] = {}
    spec: RunSpec | None = None
    while waiting:
        spec = take_next(waiting, spec)
        outcomes[spec] = _job_here(RunJob(spec, store, deps), progress)
    return outcomes


def _run_in_turns(
    specs: Sequence[RunSpec], store: Store, deps: Dependencies, progress: ManyRunsProgress
) -> dict[RunSpec, RunOutcome]:
    """Make runs of several passes, pass by pass in turn within each group."""
    outcomes: dict[RunSpec, RunOutcome] = {}
    for spec, passes in turns(specs):
        if spec not in outcomes:
            outcome = _job_here(RunJob(spec, store, deps, passes), progress)
            if passes is None or outcome.error:
                outcomes[spec] = outcome
    return outcomes


def _run_busy(
    specs: Sequence[RunSpec], store: Store, deps: Dependencies, progress: ManyRunsProgress
) -> dict[RunSpec, RunOutcome]:
    """Wait for runs that other processes make; one that is then not sealed is made here."""
    outcomes = {}
    for spec in specs:
        outcome = RunOutcome(spec, is_busy=True)
        while outcome.is_busy:
            try:
                store.wait_for(spec, partial(progress.update, spec.folder))
                outcome = RunJob(spec, store, deps)()
            except DllmBenchError as error:
                outcome = RunOutcome(spec, str(error))
        progress.end(spec.folder, outcome.error or "done")
        outcomes[spec] = outcome
    return outcomes


def turns(specs: Sequence[RunSpec]) -> Iterator[tuple[RunSpec, int | None]]:
    """(run, how many passes it then has, None for all), one pass after the other over the runs that
    share model and benchmark.
    """
    groups: dict[str, list[RunSpec]] = {}
    for spec in specs:
        groups.setdefault(_group(spec), []).append(spec)
    for group in groups.values():
        for passes in range(1, group[0].repeats + 1):  # equal in a group, as the benchmark is
            yield from ((spec, passes if passes < spec.repeats else None) for spec in group)


def _job_here(job: RunJob, progress: ManyRunsProgress) -> RunOutcome:
    report = _TextReport(partial(progress.update, job.spec.folder), every_s=0.0)
    outcome = job(report)
    if outcome.is_busy:
        progress.update(job.spec.folder, outcome.error)
    elif job.passes is None or outcome.error:
        progress.end(job.spec.folder, outcome.error or report.result)
    return outcome


def take_next(waiting: list[RunSpec], previous: RunSpec | None) -> RunSpec:
    """Remove and return a run: one with the previous run's model and benchmark, else one of the
    group with the most items; within it the longest run, so that none is left to one worker alone.
    """
    sizes: Counter[str] = Counter()
    for spec in waiting:
        sizes[_group(spec)] += _items(spec)
    loaded = _group(previous) if previous else ""

    def preference(spec: RunSpec) -> tuple[bool, int, int]:
        return _group(spec) == loaded, sizes[_group(spec)], _items(spec)

    best = max(waiting, key=preference)
    waiting.remove(best)
    return best


def _group(spec: RunSpec) -> str:
    """Equal for runs that share model and benchmark."""
    return digest([spec.model, spec.benchmark, spec.hardware, spec.inputs])


def _items(spec: RunSpec) -> int:
    """Items of a run; a whole benchmark counts as a thousand."""
    return spec.limit or 1000


class _TextReport(SilentObserver):
    """Sends a run's progress as text, at most every `every_s` seconds."""

    def __init__(self, send: Callable[[str], None], every_s: float) -> None:
        self.send = send
        self.every_s = every_s
        self.sent_at = 0.0
        self.result = "done"

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        if time.monotonic() - self.sent_at >= self.every_s:
            self.sent_at = time.monotonic()
            self.send(progress_text(running))

    def finish(self, record: RunRecord) -> None:
        self.result = headline(record)


@dataclass
class _WorkerPool:
    """Runs that wait, the workers that make them, and the outcomes so far."""

    waiting: list[RunSpec]
    store: Store
    deps: Dependencies
    progress: ManyRunsProgress
    outcomes: dict[RunSpec, RunOutcome] = field(default_factory=dict)
    current: dict[Worker, RunSpec] = field(default_factory=dict)  # what each worker is at

    def work(self, jobs: int) -> dict[RunSpec, RunOutcome]:
        """Make all waiting runs with `jobs` workers."""
        with Workers() as workers:
            for _ in range(jobs):
                self._give(workers.start(_work_on_jobs))
            while self.current:
                for worker, message in workers.messages():
                    self._handle(workers, worker, message)
        return self.outcomes

    def _give(self, worker: Worker) -> None:
        """Give a worker its next run; dismiss it if none is left."""
        previous = self.current.pop(worker, None)
        if not self.waiting:
            worker.dismiss()
            return
        self.current[worker] = take_next(self.waiting, previous)
        worker.send(RunJob(self.current[worker], self.store, self.deps))

    def _handle(self, workers: Workers, worker: Worker, message: object) -> None:
        """A line of progress, an outcome, or the death of the worker (out of memory, killed)."""
        spec = self.current[worker]
        match message:
            case str():
                self.progress.update(spec.folder, message)
            case (RunOutcome() as outcome, str(result)):
                self._note(outcome, result)
                self._give(worker)
            case Failed(text):
                worker.dismiss()
                self._replace(workers, worker, text)
            case Ended(exit_code):
                text = f"its process ended with exit code {exit_code}; start it again to resume"
                self._replace(workers, worker, text)

    def _replace(self, workers: Workers, worker: Worker, error: str) -> None:
        """The worker's run failed; another worker takes its place if runs are waiting."""
        self._note(RunOutcome(self.current.pop(worker), error), "")
        if self.waiting:
            self._give(workers.start(_work_on_jobs))

    def _note(self, outcome: RunOutcome, result: str) -> None:
        self.outcomes[outcome.spec] = outcome
        if outcome.is_busy:
            self.progress.update(outcome.spec.folder, outcome.error)
        else:
            self.progress.end(outcome.spec.folder, outcome.error or result)


def _work_on_jobs(pipe: Connection) -> None:
    """What a worker does: receive a job, send progress and outcome, until the pipe is closed."""
    while True:
        try:
            job: RunJob = pipe.recv()
        except EOFError:
            return
        report = _TextReport(pipe.send, REPORT_EVERY_S)
        outcome = job(report)
        pipe.send((outcome, report.result))
