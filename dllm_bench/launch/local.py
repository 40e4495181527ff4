"""Make runs on this machine: one (on as many processes as its hardware says), or several, one after
the other in this process or with worker processes.

A worker prefers the next run with the model and benchmark it already holds. Workers report to the
parent, which alone writes to the terminal. If a run fails or its worker is killed, the others
continue; starting again resumes from the store. A run that another process is making is left to
that process; it is waited for after all others. Jobs of a cluster are in `slurm`.

Runs that repeat their items are timed. They come last, and those of one model and benchmark
alternate pass by pass in one process. A temporary slowdown of the machine then affects all of them,
and appears as variance between passes. With one job nothing else runs at the same time.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.workers import Ended, Failed, Worker, Workers
from dllm_bench.registry import instantiate
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.runs.progress import (
    ManyRunsProgress,
    Observer,
    ObserverGroup,
    RunningMetrics,
    headline,
    progress_text,
)
from dllm_bench.runs.runner import RunSession, run_in_turns
from dllm_bench.runs.runner import run as run_in_session
from dllm_bench.runs.sessions import check_session, session_class
from dllm_bench.store.lock import BusyError
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, digest
from dllm_bench.store.store import Store

REPORT_EVERY_S = 0.5


def run(
    spec: RunSpec,
    *,
    store: Store,
    logger: Observer | None = None,
    progress: Observer | None = None,
    deps: Dependencies = REAL,
) -> RunRecord:
    """Return the record of `spec`: read if it is sealed, else the run is made.

    logger: the one of the run's configuration by default.
    """
    check_session(spec)
    logger = logger or make_logger(spec)
    if spec.hardware.several and store.record(spec) is None:
        from dllm_bench.launch.processes import run_on_processes  # imports torch.distributed

        return run_on_processes(spec, store, ObserverGroup([logger, progress]), deps)
    return run_in_session(
        spec, store=store, logger=logger, progress=progress, deps=deps, session=session_class(spec)
    )


def make_logger(spec: RunSpec) -> Observer | None:
    """Return the logger of the run's configuration."""
    plain = spec.runtime.logger
    return instantiate(plain, "logger") if plain else None


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended."""

    spec: RunSpec
    error: str = ""  # why it failed; empty if it is sealed
    is_busy: bool = False  # another process is making it


@dataclass(frozen=True)
class RunJob:
    """Runs as a value that can be sent to another process; calling it makes them."""

    specs: tuple[RunSpec, ...]  # one run, or several of one model and benchmark that take turns
    store: Store
    deps: Dependencies = REAL

    def __call__(self, progress: Observer | None = None) -> list[RunOutcome]:
        """Make the runs; an exception becomes part of the run's outcome."""
        given: dict[str, Any] = {"store": self.store, "progress": progress, "deps": self.deps}
        first = self.specs[0]
        if not takes_turns(first):
            try:
                run(first, **given)
            except Exception as error:  # a bug in one run must not end the others
                return [outcome_of(first, error)]
            return [RunOutcome(first)]
        errors = run_in_turns(self.specs, loggers=list(map(make_logger, self.specs)), **given)
        return [outcome_of(spec, error) for spec, error in zip(self.specs, errors, strict=True)]


def takes_turns(spec: RunSpec) -> bool:
    """Return whether a run repeats its items, one request at a time, in one process."""
    return spec.repeats > 1 and not spec.hardware.several and session_class(spec) is RunSession


def outcome_of(spec: RunSpec, error: Exception | None) -> RunOutcome:
    """Return how a run ended."""
    match error:
        case None:
            return RunOutcome(spec)
        case BusyError():
            return RunOutcome(spec, f"being made by {error.owner}", is_busy=True)
        case DllmBenchError():
            return RunOutcome(spec, str(error))
    return RunOutcome(spec, f"{type(error).__name__}: {error}")


def run_all(
    specs: Sequence[RunSpec],
    *,
    store: Store,
    jobs: int = 1,
    stages: Sequence[int] = (),
    after: Callable[[int], None] = lambda items: None,
    deps: Dependencies = REAL,
) -> list[RunOutcome]:
    """Make all runs, `jobs` at a time; the outcomes are in the order of `specs`.

    stages: numbers of items that all runs reach before any run continues; `after` is called with
    each once no run has fewer.
    """
    unique = list(dict.fromkeys(specs))
    outcomes = {spec: RunOutcome(spec) for spec in unique}

    def open_groups(wanted: Iterable[RunSpec]) -> list[tuple[RunSpec, ...]]:
        return groups(spec for spec in wanted if store.record(spec) is None)

    by_stage = {items: open_groups(_cut(unique, items)) for items in stages}
    whole = open_groups(unique)
    count = sum(len(group) for waiting in (*by_stage.values(), whole) for group in waiting)
    with ManyRunsProgress(count) as progress, Workers() as workers:
        pool = _WorkerPool(workers, jobs, store, deps, progress, outcomes)
        for items, waiting in by_stage.items():
            pool.work(waiting)
            if waiting:
                after(items)
        pool.work(whole)
        busy = [spec for spec, outcome in outcomes.items() if outcome.is_busy]
        outcomes |= _run_busy(busy, store, deps, progress)
    return [outcomes[spec] for spec in specs]


def _cut(specs: Sequence[RunSpec], items: int) -> list[RunSpec]:
    """Return the runs with more items, limited to this number."""
    return [replace(s, limit=items) for s in specs if s.limit is None or s.limit > items]


def groups(specs: Iterable[RunSpec]) -> list[tuple[RunSpec, ...]]:
    """Return groups of runs that are made together: alternating runs by model and benchmark, every
    other run alone. Alternating runs come last.
    """
    alone, together = list[tuple[RunSpec, ...]](), dict[str, list[RunSpec]]()
    for spec in specs:
        if takes_turns(spec):
            together.setdefault(_group(spec), []).append(spec)
        else:
            alone.append((spec,))
    return [*alone, *map(tuple, together.values())]


def _run_busy(
    specs: Sequence[RunSpec], store: Store, deps: Dependencies, progress: ManyRunsProgress
) -> dict[RunSpec, RunOutcome]:
    """Wait for runs that other processes are making; make those that are not sealed afterwards."""
    outcomes = {}
    for spec in specs:
        outcome = RunOutcome(spec, is_busy=True)
        while outcome.is_busy:
            try:
                store.wait_for(spec, progress.update)
                [outcome] = RunJob((spec,), store, deps)()
            except DllmBenchError as error:
                outcome = RunOutcome(spec, str(error))
        progress.end(spec.folder, outcome.error or "done")
        outcomes[spec] = outcome
    return outcomes


def take_next(waiting: list[tuple[RunSpec, ...]], previous: RunSpec | None) -> tuple[RunSpec, ...]:
    """Remove and return the next runs: those with the previous run's model and benchmark, or else
    the longest of those with the most items, so that no long run is left over for one worker.
    Alternating runs come after all others.
    """
    sizes: Counter[str] = Counter()
    for group in waiting:
        sizes[_group(group[0])] += _items(group)
    loaded = _group(previous) if previous else ""

    def preference(group: tuple[RunSpec, ...]) -> tuple[bool, bool, int, int]:
        key = _group(group[0])
        return not takes_turns(group[0]), key == loaded, sizes[key], _items(group)

    best = max(waiting, key=preference)
    waiting.remove(best)
    return best


@cache  # each worker that takes its next run asks for the keys of all that wait
def _group(spec: RunSpec) -> str:
    """Return a key that is equal for runs with the same model and benchmark."""
    return digest([spec.model, spec.benchmark, spec.hardware, spec.inputs])


def _items(group: Sequence[RunSpec]) -> int:
    """Return the number of requests of runs; a whole benchmark counts as a thousand items."""
    return sum((spec.limit or 1000) * spec.repeats for spec in group)


class _TextReport(Observer):
    """Sends a run's progress as text, at most every `REPORT_EVERY_S` seconds."""

    def __init__(self, send: Callable[[str], None]) -> None:
        self.send = send
        self.sent_at = 0.0
        self.results: dict[str, str] = {}  # folder of a run -> its results

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        if time.monotonic() - self.sent_at >= REPORT_EVERY_S:
            self.sent_at = time.monotonic()
            self.send(progress_text(running))

    def finish(self, record: RunRecord) -> None:
        self.results[record.spec.folder] = headline(record)


@dataclass
class _WorkerPool:
    """Workers that make runs; one job, or a single run at the start, is made in this process."""

    workers: Workers
    jobs: int
    store: Store
    deps: Dependencies
    progress: ManyRunsProgress
    outcomes: dict[RunSpec, RunOutcome]
    waiting: list[tuple[RunSpec, ...]] = field(default_factory=list)
    idle: list[Worker] = field(default_factory=list)
    current: dict[Worker, tuple[RunSpec, ...]] = field(default_factory=dict)  # what each is at

    def work(self, waiting: list[tuple[RunSpec, ...]]) -> None:
        """Make all these runs."""
        self.waiting = list(waiting)
        list(self.workers.messages(0))  # notices those that ended while they were idle
        self.idle = [worker for worker in self.idle if not worker.pipe.closed]
        if self.jobs == 1 or (len(waiting) == 1 and not self.idle):
            self._work_here()
        while self.waiting and len(self.current) < self.jobs:
            worker = self.idle.pop() if self.idle else self.workers.start(_work_on_jobs)
            self._give(worker, None)
        while self.current:
            for worker, message in self.workers.messages():
                if worker in self.current:
                    self._handle(worker, message)

    def _work_here(self) -> None:
        spec: RunSpec | None = None
        while self.waiting:
            group = take_next(self.waiting, spec)
            spec = group[0]
            report = _TextReport(partial(self.progress.update, spec.folder))
            self._note(RunJob(group, self.store, self.deps)(report), report.results)

    def _give(self, worker: Worker, previous: RunSpec | None) -> None:
        """Give a worker its next runs; it is idle if none are left."""
        if not self.waiting:
            self.idle.append(worker)
            return
        self.current[worker] = take_next(self.waiting, previous)
        with suppress(ConnectionError):  # it has just ended: `messages` reports that
            worker.pipe.send(RunJob(self.current[worker], self.store, self.deps))

    def _handle(self, worker: Worker, message: object) -> None:
        """Handle a message: a line of progress, outcomes, or the death of the worker (out of
        memory, killed)."""
        group = self.current[worker]
        match message:
            case str():
                self.progress.update(group[0].folder, message)
            case (list() as outcomes, dict() as results):
                del self.current[worker]
                self._note(outcomes, results)
                self._give(worker, group[0])
            case Failed(text):
                worker.pipe.close()
                self._replace(worker, text)
            case Ended(exit_code):
                text = f"its process ended with exit code {exit_code}; start it again to resume"
                self._replace(worker, text)

    def _replace(self, worker: Worker, error: str) -> None:
        """Record that the worker's runs failed, and start another worker if runs are waiting."""
        self._note([RunOutcome(spec, error) for spec in self.current.pop(worker)], {})
        if self.waiting:
            self._give(self.workers.start(_work_on_jobs), None)

    def _note(self, outcomes: Sequence[RunOutcome], results: Mapping[str, str]) -> None:
        for outcome in outcomes:
            self.outcomes[outcome.spec] = outcome
            folder = outcome.spec.folder
            if outcome.is_busy:
                self.progress.update(folder, outcome.error)
            else:
                self.progress.end(folder, outcome.error or results.get(folder, "done"))


def _work_on_jobs(pipe: Connection) -> None:
    """Do a worker's work: receive jobs and send progress and outcomes until the pipe is closed."""
    while True:
        try:
            job: RunJob = pipe.recv()
        except EOFError:
            return
        report = _TextReport(pipe.send)
        pipe.send((job(report), report.results))
