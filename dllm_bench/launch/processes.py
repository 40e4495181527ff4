"""One run on several processes of this machine.

With `replicas`, groups of processes share the requests and each group writes a samples file of its
own. The processes of a group (`branch_parallel` × `tensor_parallel`) decode one request together,
and the group's rank 0 writes. The calling process decodes nothing: it starts the others and shows
their progress. If one of them dies, the others are ended, finished samples are kept, and one
message says what happened. Runs over several machines are not supported.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from dllm_bench.core.decoder import Decoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.launch.workers import GRACE_S, Ended, Failed, Worker, Workers
from dllm_bench.parallel import AnnouncingDecoder, RankGroup
from dllm_bench.runs.dependencies import Dependencies, Loaded
from dllm_bench.runs.progress import Observer, RunningMetrics
from dllm_bench.runs.runner import WARMUPS, prepare
from dllm_bench.runs.runner import run as run_here
from dllm_bench.runs.sessions import session_class
from dllm_bench.store import provenance
from dllm_bench.store.groups import ModelGroup
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store

DECODED, SEALED = "its share of the requests is decoded", "the run is sealed"
"""Milestones that a process reports in addition to its samples."""


def run_on_processes(
    spec: RunSpec, store: Store, observer: Observer, deps: Dependencies
) -> RunRecord:
    """Return the record of `spec`, made by as many processes as its hardware says."""
    check(spec, deps)
    try:
        with tempfile.TemporaryDirectory() as folder:
            processes = [
                RunProcess(spec, store, deps, folder, group, rank)
                for group in range(spec.hardware.replicas)
                for rank in range(spec.hardware.group_size)
            ]
            _make(processes, observer)
        record = store.record(spec)
        assert record is not None  # the first process reported that it is sealed
        observer.finish(record)
        return record
    except DllmBenchError as error:
        with suppress(DllmBenchError), store.open(spec) as opened:
            opened.fail(str(error))
        raise
    finally:
        observer.close()


def check(spec: RunSpec, deps: Dependencies) -> None:
    """Refuse settings that these processes do not support, before any is started."""
    hardware, decoder, name = spec.hardware, deps.decoder(spec), spec.hardware.name
    if hardware.branch_parallel > 1 and not isinstance(decoder, MaskedDecoder):
        raise DllmBenchError(
            f"hardware={name} deals branches to {hardware.branch_parallel} processes, and decoder "
            f"{spec.label!r} has no branches; choose a decoder with lookahead (decoder=lopa), or "
            "hardware without branch_parallel."
        )
    present, wanted = torch.cuda.device_count(), hardware.processes
    if hardware.uses_cuda and present < wanted:
        raise DllmBenchError(
            f"hardware={name} asks for {wanted} CUDA devices, this machine has {present}; "
            "choose hardware with fewer processes."
        )


@dataclass(frozen=True)
class RunProcess:
    """One process of a run, as a value that is sent to it."""

    spec: RunSpec
    store: Store
    deps: Dependencies
    folder: str  # temporary folder where the processes of a group meet
    group: int  # index of its group
    rank: int  # index within its group
    session: int = 0  # index of the session that the shares of the requests belong to
    zero_s: float = 0.0  # the clock at that session's start

    @property
    def index(self) -> int:
        """Index of this process among all of the run, and of its device."""
        return self.group * self.spec.hardware.group_size + self.rank

    def __call__(self, pipe: Connection) -> None:
        """Decode (rank 0 of a group) or follow the group's rank 0, until the run is complete."""
        spec, group = self._on_device(), self._join()
        if group is not None and self.rank > 0:
            self._follow(spec, group)
            return
        deps = self.deps if group is None else announcing(self.deps, spec, group)
        report = _ReportToParent(pipe)
        kind = session_class(spec)
        if spec.hardware.replicas > 1:
            with self.store.share(spec, self.group, self.session, self.zero_s) as share:
                kind(spec, deps, *prepare(spec, deps), share, report).decode()
            pipe.send(DECODED)
            if self.index == 0:
                pipe.recv()  # the parent says that the others have decoded their shares too
        if self.index == 0:
            run_here(spec, store=self.store, progress=report, deps=deps, session=kind)
            pipe.send(SEALED)
        if group is not None:
            group.leave()

    def _follow(self, spec: RunSpec, group: RankGroup) -> None:
        """Take part in the requests that the group's rank 0 announces."""
        both = [spec, *([spec.of_baseline] if spec.baseline else [])]
        decoders = [self.deps.decoder(one) for one in both]
        self.deps.prepare(spec)
        loaded = self.deps.model(spec)
        group.split(loaded.denoiser)
        group.follow(decoders, loaded.denoiser)

    def _join(self) -> RankGroup | None:
        if self.spec.hardware.group_size == 1:
            return None
        meeting = Path(self.folder) / f"group-{self.group}"
        return RankGroup.join(self.spec.hardware, self.rank, meeting)

    def _on_device(self) -> RunSpec:
        """Return the run on this process's own device; the index is not part of its identity."""
        if not self.spec.hardware.uses_cuda:
            return self.spec
        torch.cuda.init()  # if the device is initialised, `init_device_mesh` does not change it
        torch.cuda.set_device(self.index)
        return replace(
            self.spec, model=ModelGroup({**self.spec.model, "device": f"cuda:{self.index}"})
        )


def announcing(deps: Dependencies, spec: RunSpec, group: RankGroup) -> Dependencies:
    """Return the dependencies of a group's rank 0: its decoders announce each request to the other
    ranks, and its model is split.
    """

    @cache
    def load() -> Loaded:
        loaded = deps.model(spec)
        group.split(loaded.denoiser)
        return loaded

    def decoder(wanted: RunSpec) -> Decoder:
        return AnnouncingDecoder(deps.decoder(wanted), group, which=0 if wanted == spec else 1)

    return replace(deps, model=lambda _: load(), decoder=decoder)


class _ReportToParent(Observer):
    """Sends a process's progress to the process that shows it.

    When it begins to decode, it sends the metrics of earlier sessions; then each sample that it
    stored, with its score if the benchmark can score immediately.
    """

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self.pipe.send(running)

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        self.pipe.send((sample, running.values[-1]))


def _make(processes: Sequence[RunProcess], observer: Observer) -> None:
    """Start the processes and have the run sealed by the first one."""
    first = processes[0]
    replicas = first.spec.hardware.replicas
    with Workers() as workers:
        if replicas == 1:
            watch = _Watch(workers, observer)
            watch.start(processes)
            watch.until(SEALED)
            return
        with first.store.open(first.spec) as opened:  # nobody else may write during the shares
            if opened.record is not None:
                return
            environment = provenance.environment_of(first.spec)
            session = opened.begin(Session(first.deps.now(), WARMUPS, environment))
            opened.note(f"session {session}: {replicas} processes share the requests")
            zero_s = first.deps.clock()
            watch = _Watch(workers, observer)
            watch.start([replace(one, session=session, zero_s=zero_s) for one in processes])
            watch.until(DECODED, times=replicas)
        with suppress(ConnectionError):  # it has just ended: the next line explains it
            workers.started[0].pipe.send("seal")
        watch.until(SEALED)


@dataclass
class _Watch:
    """Shows what a run's processes report as the progress of one run; explains why they failed."""

    workers: Workers
    observer: Observer
    running: RunningMetrics | None = None
    started: float = 0.0
    processes: dict[Worker, RunProcess] = field(default_factory=dict)
    failures: dict[Worker, Failed] = field(default_factory=dict)

    def start(self, processes: Sequence[RunProcess]) -> None:
        """Start one worker per process."""
        self.processes = {self.workers.start(process): process for process in processes}

    def until(self, milestone: str, times: int = 1) -> None:
        """Show progress until `milestone` was reported `times` times; raise if a process fails."""
        reached = 0
        while reached < times:
            for worker, message in self.workers.messages():
                if self._is_failure(worker, message):
                    raise self._explain()
                reached += message == milestone
                match message:
                    case RunningMetrics() as running:
                        self._begin(running, self.processes[worker])
                    case (sample, value):
                        assert self.running is not None  # a process begins before it has a sample
                        session_s = time.monotonic() - self.started
                        self.running.add(sample.id, sample.stats(), value, session_s)
                        self.observer.sample(sample, self.running)

    def _begin(self, running: RunningMetrics, first: RunProcess) -> None:
        """Begin the display with the earlier samples; all processes report the same, so the first
        report counts."""
        if self.running is None:
            self.running, self.started = running, time.monotonic()
            self.observer.start(first.spec, first.store.path(first.spec), running)

    def _is_failure(self, worker: Worker, message: object) -> bool:
        if isinstance(message, Failed):
            self.failures[worker] = message
            return True
        return isinstance(message, Ended) and message.exit_code != 0

    def _explain(self) -> DllmBenchError:
        """Return the message of the primary cause: a death before a refusal, and a refusal before
        its consequences.

        A process that dies makes others fail too, so reports are collected for `GRACE_S`.
        """
        end = time.monotonic() + GRACE_S
        while (left_s := end - time.monotonic()) > 0 and self.workers.listening:
            for worker, message in self.workers.messages(left_s):
                self._is_failure(worker, message)
        for worker in self.workers.started:
            if worker.pipe.closed and worker not in self.failures and worker.process.exitcode:
                return self._sentence(worker, f"ended with exit code {worker.process.exitcode}")
        for failure in self.failures.values():
            if failure.refused:
                return DllmBenchError(failure.text)
        worker, failure = next(iter(self.failures.items()))
        return self._sentence(worker, f"failed ({failure.text})")

    def _sentence(self, worker: Worker, what: str) -> DllmBenchError:
        process = self.processes[worker]
        return DllmBenchError(
            f"Process {process.index} of {len(self.processes)} (hardware="
            f"{process.spec.hardware.name}) {what}, and the others were ended; finished "
            "samples are kept, give the same command again to continue."
        )
