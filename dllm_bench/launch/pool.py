"""Several runs: over worker processes of this machine, or as one SLURM array.

Workers take the next run of the model and benchmark they already hold, where there is one. They
report to the parent, which alone writes to the terminal. A run that fails, or whose worker is
killed, is reported and the others go on; starting again takes up what the store has.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

import yaml

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import jobs as tickets
from dllm_bench.launch.packed import Packed
from dllm_bench.launch.ranks import PROCESSES, die_with_parent, run
from dllm_bench.paths import conf_dir
from dllm_bench.registry import instantiate
from dllm_bench.run.dependencies import REAL, Parts
from dllm_bench.run.progress import (
    Board,
    Observer,
    ProgressLine,
    Running,
    Silent,
    headline,
    line,
)
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, digest
from dllm_bench.store.store import Store

REPORT_EVERY_S = 0.5
SHARED = (
    "timeout_min",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "mem_gb",
    "nodes",
    "name",
)
"""Settings that submitit knows on every kind of cluster; the others are SLURM's."""


@dataclass(frozen=True)
class Outcome:
    """How one run ended: `error` is empty when it is sealed."""

    spec: RunSpec
    error: str = ""


@dataclass(frozen=True)
class Job:
    """One run as a value that can be sent to another process; calling it makes the run."""

    spec: RunSpec
    store: Store
    parts: Parts = REAL

    def __call__(self, progress: Observer | None = None) -> Outcome:
        """Make the run; an error becomes part of the outcome."""
        try:
            logger = make_logger(self.spec)
            run(self.spec, store=self.store, logger=logger, progress=progress, parts=self.parts)
        except DllmBenchError as error:
            return Outcome(self.spec, str(error))
        except Exception as error:  # a bug in one run must not end the others
            return Outcome(self.spec, f"{type(error).__name__}: {error}")
        return Outcome(self.spec)


def make_logger(spec: RunSpec) -> Observer | None:
    """The logger of the run's configuration."""
    plain = spec.runtime.get("logger")
    logger: Observer | None = instantiate(plain) if plain else None
    return logger


def run_all(
    specs: Sequence[RunSpec],
    *,
    store: Store,
    jobs: int = 1,
    stream: TextIO | None = None,
    parts: Parts = REAL,
) -> list[Outcome]:
    """Make all runs, `jobs` at a time; outcomes in the order of `specs`."""
    unique = list(dict.fromkeys(specs))
    waiting = [spec for spec in unique if store.record(spec) is None]
    outcomes = {spec: Outcome(spec) for spec in unique}
    board = Board(len(waiting), stream)
    if jobs > 1 and len(waiting) > 1:
        outcomes |= _Pool(waiting, store, parts, board).work(min(jobs, len(waiting)))
    else:
        outcomes |= _run_here(waiting, store, parts, board)
    return [outcomes[spec] for spec in specs]


def _run_here(
    waiting: list[RunSpec], store: Store, parts: Parts, board: Board
) -> dict[RunSpec, Outcome]:
    outcomes: dict[RunSpec, Outcome] = {}
    holding: RunSpec | None = None
    while waiting:
        holding = take_next(waiting, holding)
        report = _Report(partial(board.update, holding.folder), every_s=0.0)
        outcomes[holding] = Job(holding, store, parts)(report)
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


class _Report(Silent):
    """Progress of one run as text, not more often than `every_s`."""

    def __init__(self, tell: Callable[[str], None], every_s: float) -> None:
        self.tell = tell
        self.every_s = every_s
        self.told_at = 0.0
        self.result = "done"

    def sample(self, sample: SampleRecord, running: Running) -> None:
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
    parts: Parts
    board: Board
    outcomes: dict[RunSpec, Outcome] = field(default_factory=dict)
    workers: list[_Worker] = field(default_factory=list)

    def work(self, jobs: int) -> dict[RunSpec, Outcome]:
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
        worker.pipe.send(Job(worker.spec, self.store, self.parts))

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
        self._note(worker, Outcome(worker.spec, text), "")
        if self.waiting:
            self._hire()

    def _note(self, worker: _Worker, outcome: Outcome, text: str) -> None:
        self.outcomes[worker.spec] = outcome
        self.board.end(worker.spec.folder, outcome.error or text)


def _serve(pipe: Connection) -> None:
    """A worker's life: a job comes, progress and outcome go, until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=die_with_parent, daemon=True).start()
    while True:
        try:
            job: Job = pipe.recv()
        except EOFError:
            return
        report = _Report(pipe.send, REPORT_EVERY_S)
        outcome = job(report)
        pipe.send((outcome, report.result))


@dataclass(frozen=True)
class Sent:
    """A run as a job of a cluster: progress and errors go to its log, all else to the store."""

    spec: RunSpec
    store: Store
    parts: Parts = REAL

    def __call__(self) -> None:
        logger, line = make_logger(self.spec), ProgressLine()
        run(self.spec, store=self.store, logger=logger, progress=line, parts=self.parts)


@dataclass(frozen=True)
class Command:
    """`dllm-bench ARGUMENTS` as a job: what has to be trained, and what waits for it."""

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        subprocess.run([sys.executable, "-m", "dllm_bench", *self.arguments], check=True)


def submit(
    jobs: Mapping[str, Callable[[], None]],
    *,
    store: Store,
    hardware: Mapping[str, Any],
    changes: Sequence[str] = (),
    after: Sequence[str] = (),
    cluster: str = "slurm",
) -> list[Any]:
    """Send jobs, by folder of their run or by command, as one array; submitit's jobs.

    hardware: of the runs, says how many devices and cores a job takes; changes: NAME=VALUE over
    conf/hydra/launcher/slurm.yaml; after: jobs that have to succeed first; cluster: "slurm", or
    "debug" for this process.
    """
    submitit = _submitit()
    if not jobs:
        return []
    settings = {**slurm_settings(), **resources(hardware), **read(changes)}
    if after:
        own = settings.get("additional_parameters") or {}
        settings["additional_parameters"] = {**own, "kill-on-invalid-dep": "yes"}
        settings["dependency"] = f"afterok:{':'.join(after)}"
    timeouts = {"slurm_max_num_timeout": settings.pop("max_num_timeout", 0)}
    named = {k if k in SHARED else f"slurm_{k}": v for k, v in settings.items() if v is not None}
    try:
        executor = submitit.AutoExecutor(tickets.folder_of(store) / "%j", cluster, **timeouts)
        executor.update_parameters(**named)
        with executor.batch():
            sent = [executor.submit(Packed.of(job)) for job in jobs.values()]
    except (RuntimeError, ValueError, NameError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
        raise DllmBenchError(
            f"SLURM did not take {len(jobs)} jobs ({text}); mend the settings with --slurm "
            "NAME=VALUE, or run here with --run."
        ) from error
    pairs = zip(jobs.items(), sent, strict=True)
    tickets.note(store, [_ticket(what, job, its) for (what, job), its in pairs])
    return sent


def _submitit() -> Any:
    try:
        import submitit
    except ImportError as error:
        raise DllmBenchError(
            "Jobs are sent with submitit, which is not installed; install the extra: "
            "pip install 'dllm-bench[slurm]'."
        ) from error
    return submitit


def _ticket(what: str, job: Callable[[], None], sent: Any) -> tickets.Ticket:
    run_hash = job.spec.identity_hash if isinstance(job, Sent) else ""
    return tickets.Ticket(run_hash, what, sent.job_id, str(sent.paths.stderr))


def slurm_settings() -> dict[str, Any]:
    """Those of `hydra/launcher=slurm` that have nothing to do with Hydra."""
    plain = yaml.safe_load((conf_dir() / "hydra/launcher/slurm.yaml").read_text(encoding="utf-8"))
    return {k: v for k, v in plain.items() if k not in ("defaults", "submitit_folder")}


def resources(hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Cores and devices of a job: of each of the processes that `ranks` starts in it."""
    processes = prod(int(hardware.get(name, 1)) for name in PROCESSES)
    devices = processes if str(hardware["device"]).startswith("cuda") else None
    return {"cpus_per_task": int(hardware["threads"]) * processes, "gpus_per_node": devices}


def read(changes: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE settings as plain data."""
    pairs = [text.partition("=") for text in changes]
    wrong = [text for text, (_, equals, _) in zip(changes, pairs, strict=True) if not equals]
    if wrong:
        raise DllmBenchError(f"--slurm {wrong[0]} sets nothing; write NAME=VALUE: partition=gpu.")
    return {name: yaml.safe_load(value) for name, _, value in pairs}
