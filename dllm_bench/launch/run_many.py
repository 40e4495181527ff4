"""Several runs: over worker processes of this machine, or as one SLURM array.

Workers take the next run of the model and benchmark they already hold, where there is one. They
report to the parent, which alone writes to the terminal. A run that fails, or whose worker is
killed, is reported and the others go on; starting again takes up what the store has.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TextIO

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch.run_one import die_with_parent, make_logger, run
from dllm_bench.run.dependencies import REAL, Dependencies
from dllm_bench.run.progress import (
    ManyRunsProgress,
    Observer,
    RunningMetrics,
    SilentObserver,
    headline,
    line,
)
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, digest
from dllm_bench.store.store import Store

REPORT_EVERY_S = 0.5


@dataclass(frozen=True)
class RunOutcome:
    """How one run ended: `error` is empty when it is sealed."""

    spec: RunSpec
    error: str = ""


@dataclass(frozen=True)
class RunJob:
    """One run as a value that can be sent to another process; calling it makes the run."""

    spec: RunSpec
    store: Store
    deps: Dependencies = REAL

    def __call__(self, progress: Observer | None = None) -> RunOutcome:
        """Make the run; an error becomes part of the outcome."""
        try:
            logger = make_logger(self.spec)
            run(
                self.spec,
                store=self.store,
                logger=logger,
                progress=progress,
                deps=self.deps,
            )
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
    """Make all runs, `jobs` at a time; outcomes in the order of `specs`."""
    unique = list(dict.fromkeys(specs))
    waiting = [spec for spec in unique if store.record(spec) is None]
    outcomes = {spec: RunOutcome(spec) for spec in unique}
    board = ManyRunsProgress(len(waiting), stream)
    if jobs > 1 and len(waiting) > 1:
        outcomes |= _Pool(waiting, store, deps, board).work(min(jobs, len(waiting)))
    else:
        outcomes |= _run_here(waiting, store, deps, board)
    return [outcomes[spec] for spec in specs]


def _run_here(
    waiting: list[RunSpec], store: Store, deps: Dependencies, board: ManyRunsProgress
) -> dict[RunSpec, RunOutcome]:
    outcomes: dict[RunSpec, RunOutcome] = {}
    holding: RunSpec | None = None
    while waiting:
        holding = take_next(waiting, holding)
        report = _Report(partial(board.update, holding.folder), every_s=0.0)
        outcomes[holding] = RunJob(holding, store, deps)(report)
        board.end(holding.folder, outcomes[holding].error or report.result)
    return outcomes


def take_next(waiting: list[RunSpec], holding: RunSpec | None) -> RunSpec:
    """Remove and return a run: of the model and benchmark held, else of the fullest group."""
    sizes = Counter(_group(spec) for spec in waiting)
    held = _group(holding) if holding else ""
    best = max(waiting, key=lambda spec: (_group(spec) == held, sizes[_group(spec)]))
    waiting.remove(best)
    return best


def _group(spec: RunSpec) -> str:
    """Runs of one group share model and benchmark."""
    return digest([spec.model, spec.benchmark, spec.hardware, spec.inputs])


class _Report(SilentObserver):
    """Progress of one run as text, not more often than `every_s`."""

    def __init__(self, tell: Callable[[str], None], every_s: float) -> None:
        self.tell = tell
        self.every_s = every_s
        self.told_at = 0.0
        self.result = "done"

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        if time.monotonic() - self.told_at >= self.every_s:
            self.told_at = time.monotonic()
            self.tell(line(running))

    def finish(self, record: RunRecord) -> None:
        self.result = headline(record)


@dataclass
class _Worker:
    """A child process, and the run it is at."""

    process: BaseProcess
    pipe: Connection
    spec: RunSpec


@dataclass
class _Pool:
    """Runs that wait, the workers that make them, and what became of the others."""

    waiting: list[RunSpec]
    store: Store
    deps: Dependencies
    board: ManyRunsProgress
    outcomes: dict[RunSpec, RunOutcome] = field(default_factory=dict)
    workers: list[_Worker] = field(default_factory=list)

    def work(self, jobs: int) -> dict[RunSpec, RunOutcome]:
        """Make all waiting runs with `jobs` workers."""
        try:
            for _ in range(jobs):
                self._hire()
            while self.workers:
                ready = wait([worker.pipe for worker in self.workers])
                for worker in [w for w in self.workers if w.pipe in ready]:
                    self._hear(worker)
        finally:
            for worker in self.workers:
                worker.process.terminate()
        return self.outcomes

    def _hire(self) -> None:
        context = get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=False)
        process.start()
        theirs.close()
        spec = take_next(self.waiting, None)
        self.workers.append(_Worker(process, pipe, spec))
        self._give(self.workers[-1])

    def _give(self, worker: _Worker) -> None:
        worker.pipe.send(RunJob(worker.spec, self.store, self.deps))

    def _hear(self, worker: _Worker) -> None:
        """One message of a worker: a line of progress, an end, or its death."""
        try:
            message = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker)
            return
        if isinstance(message, str):
            self.board.update(worker.spec.folder, message)
            return
        outcome, text = message
        self._note(worker, outcome, text)
        if self.waiting:
            worker.spec = take_next(self.waiting, worker.spec)
            self._give(worker)
        else:
            worker.pipe.close()
            self.workers.remove(worker)

    def _bury(self, worker: _Worker) -> None:
        """The worker died (out of memory, killed): its run failed, another takes its place."""
        worker.process.join()
        self.workers.remove(worker)
        code = worker.process.exitcode
        text = f"its process ended with exit code {code}; start it again to resume"
        self._note(worker, RunOutcome(worker.spec, text), "")
        if self.waiting:
            self._hire()

    def _note(self, worker: _Worker, outcome: RunOutcome, text: str) -> None:
        self.outcomes[worker.spec] = outcome
        self.board.end(worker.spec.folder, outcome.error or text)


def _serve(pipe: Connection) -> None:
    """A worker's life: a job comes, progress and outcome go, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=die_with_parent, daemon=True).start()
    while True:
        try:
            job: RunJob = pipe.recv()
        except EOFError:
            return
        report = _Report(pipe.send, REPORT_EVERY_S)
        outcome = job(report)
        pipe.send((outcome, report.result))
