"""One run on several processes of this machine: started, watched and ended together.

`replicas` teams share the requests, each with a samples file of its own; the processes of a team
(`branch_parallel` × `tensor_parallel`) decode one request together, the first of them writes. Here
nothing is decoded: progress comes through pipes, and when a process dies the others are ended, what
is finished stays, and one sentence says what happened. Several machines are left out.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import instantiate
from dllm_bench.run import batched, served
from dllm_bench.run.dependencies import PROCESSES, REAL, Dependencies, Loaded
from dllm_bench.run.loggers import NoLogger
from dllm_bench.run.progress import Observer, ObserverGroup, RunningMetrics, SilentObserver
from dllm_bench.run.runner import WARMUPS, RunSession, decode_share
from dllm_bench.run.runner import run as run_here
from dllm_bench.store import provenance
from dllm_bench.store.inputs import is_served
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store

if TYPE_CHECKING:
    from dllm_bench.core.contracts import Decoder
    from dllm_bench.parallel.group import ParallelLayout, RankGroup

COMMITS = {"winner": True, "none": False}
TIMEOUT_S = 120.0  # how long a process waits for another within a request
GRACE_S = 2.0  # a death is heard of from several processes; the cause comes within this time
PRELOAD = ["dllm_bench.launch.run_one", "dllm_bench.parallel.group", "transformers.modeling_utils"]
"""Imported once, by the process that all others are forked from."""


def layout_of(hardware: Mapping[str, Any]) -> ParallelLayout:
    """How the processes of a team divide their work."""
    from dllm_bench.parallel.group import ParallelLayout

    commit = str(hardware.get("commit", "winner"))
    if commit not in COMMITS:
        raise DllmBenchError(
            f"hardware.commit is {commit!r}; choose one of {', '.join(COMMITS)} (whether the "
            "winner's K/V are sent to every process)."
        )
    return ParallelLayout(
        branches=int(hardware.get("branch_parallel", 1)),
        tensors=int(hardware.get("tensor_parallel", 1)),
        commits=COMMITS[commit],
        timeout_s=float(hardware.get("timeout_s", TIMEOUT_S)),
    )


def make_logger(spec: RunSpec) -> Observer | None:
    """The logger of the run's configuration."""
    plain = spec.runtime.get("logger")
    logger: Observer | None = instantiate(plain) if plain else None
    return logger


def needs_several(hardware: Mapping[str, Any]) -> bool:
    """Whether a run on this hardware is made by more than the process that asks for it."""
    return any(int(hardware.get(name, 1)) > 1 for name in PROCESSES)


def run(
    spec: RunSpec,
    *,
    store: Store,
    logger: Observer | None = None,
    progress: Observer | None = None,
    deps: Dependencies = REAL,
) -> RunRecord:
    """The record of `spec`, made by as many processes as its hardware says, or by a server."""
    work, here = session_class(spec), not needs_several(spec.hardware)
    if work is batched.BatchedRunSession:
        batched.check(spec)
    if here or store.record(spec) is not None:
        return run_here(
            spec,
            store=store,
            logger=logger,
            progress=progress,
            deps=deps,
            work=work,
        )
    layout, replicas = layout_of(spec.hardware), int(spec.hardware.get("replicas", 1))
    check(spec, deps, layout, replicas)
    observer = ObserverGroup([logger or NoLogger(), progress or SilentObserver()])
    try:
        with tempfile.TemporaryDirectory() as folder:
            places = [
                RunProcess(spec, store, deps, layout, rank, team, replicas, Path(folder))
                for team in range(replicas)
                for rank in range(layout.processes)
            ]
            _make(spec, store, deps, places, observer)
    except DllmBenchError as error:
        with suppress(DllmBenchError), store.open(spec) as opened:
            opened.fail(str(error))
        raise
    finally:
        observer.close()
    record = store.record(spec)
    assert record is not None  # the first process said that it is sealed
    observer.finish(record)
    return record


def session_class(spec: RunSpec) -> type[RunSession]:
    """One request at a time, several, or a server's."""
    if is_served(spec.model):
        return served.ServedRunSession
    return batched.BatchedRunSession if spec.batch != 1 else RunSession


def check(spec: RunSpec, deps: Dependencies, layout: ParallelLayout, replicas: int) -> None:
    """Refuse at once what these processes could not do."""
    from dllm_bench.decoding.masked import MaskedDecoder

    decoder, name = deps.decoder(spec), spec.hardware["name"]
    if layout.branches > 1 and not isinstance(decoder, MaskedDecoder):
        raise DllmBenchError(
            f"hardware={name} deals branches to {layout.branches} processes, and decoder "
            f"{spec.label!r} has no branches; choose a decoder with lookahead (decoder=lopa), or "
            "hardware without branch_parallel."
        )
    if str(spec.hardware["device"]).startswith("cuda"):
        import torch

        found, wanted = torch.cuda.device_count(), layout.processes * replicas
        if found < wanted:
            raise DllmBenchError(
                f"hardware={name} asks for {wanted} CUDA devices, this machine has {found}; choose "
                "hardware with fewer processes."
            )


def _make(
    spec: RunSpec,
    store: Store,
    deps: Dependencies,
    places: list[RunProcess],
    observer: Observer,
) -> None:
    """Start the processes and have the run sealed by the first one."""
    relay = _Progress(spec, store.path(spec), observer)
    replicas = places[0].replicas
    if replicas == 1:
        with _Members(places) as members:
            members.listen(relay, "sealed")
        return
    with _Members([]) as members:
        with store.open(spec) as opened:  # no other run may write while the shares are decoded
            if opened.record is not None:
                return
            facts = provenance.environment(str(spec.hardware["device"]))
            index = opened.begin(Session(deps.now(), WARMUPS, facts))
            opened.note(f"session {index}: {replicas} processes share the requests")
            zero_s = deps.clock()
            members.start([replace(place, session=index, zero_s=zero_s) for place in places])
            members.listen(relay, "decoded", times=replicas)
        members.members[0].pipe.send("seal")
        members.listen(relay, "sealed")


@dataclass(frozen=True)
class RunProcess:
    """One process of a run, as a value that is sent to it: process `rank` of team `team`."""

    spec: RunSpec
    store: Store
    deps: Dependencies
    layout: ParallelLayout
    rank: int
    team: int
    replicas: int
    folder: Path  # where the processes of a team meet
    session: int = 0
    zero_s: float = 0.0  # what the clock said when it began

    @property
    def index(self) -> int:
        """Of the process among all, and of its device."""
        return self.team * self.layout.processes + self.rank

    def work(self, pipe: Connection) -> None:
        """Lead or follow until the run is made."""
        spec, team = self._on_device(), self._join()
        if team is not None and self.rank > 0:
            asked = [spec, *([spec.of_baseline] if spec.baseline else [])]
            decoders = [self.deps.decoder(one) for one in asked]
            self.deps.prepare(spec)
            loaded = self.deps.model(spec)
            team.split(loaded.denoiser)
            team.follow(decoders, loaded.denoiser)
            return
        deps = self.deps if team is None else led(self.deps, spec, team)
        report = _Report(pipe)
        if self.replicas > 1:
            share = self.store.share(spec, self.team, self.replicas, self.session, self.zero_s)
            decode_share(spec, share, observer=report, deps=deps, work=session_class(spec))
            pipe.send(("decoded",))
            if self.index == 0:
                pipe.recv()  # the others are done too
        if self.index == 0:
            run_here(
                spec,
                store=self.store,
                progress=report,
                deps=deps,
                work=session_class(spec),
            )
            pipe.send(("sealed",))
        if team is not None:
            team.leave()

    def _join(self) -> RankGroup | None:
        if self.layout.processes == 1:
            return None
        from dllm_bench.parallel.group import RankGroup

        device = str(self.spec.hardware["device"])
        return RankGroup.join(self.layout, self.rank, self.folder / f"team-{self.team}", device)

    def _on_device(self) -> RunSpec:
        """The run on this process's own device; its identity knows nothing of the index."""
        if not str(self.spec.hardware["device"]).startswith("cuda"):
            return self.spec
        import torch

        torch.cuda.init()  # a mesh leaves the device alone once there is one
        torch.cuda.set_device(self.index)
        return replace(self.spec, model={**self.spec.model, "device": f"cuda:{self.index}"})


def led(deps: Dependencies, spec: RunSpec, team: RankGroup) -> Dependencies:
    """The dependencies of a team's first process: decoders that announce, a model that is split."""
    from dllm_bench.parallel.group import AnnouncingDecoder

    @cache
    def loaded() -> Loaded:
        found = deps.model(spec)
        team.split(found.denoiser)
        return found

    def decoder(asked: RunSpec) -> Decoder:
        return AnnouncingDecoder(deps.decoder(asked), team, which=0 if asked == spec else 1)

    return replace(deps, model=lambda _: loaded(), decoder=decoder)


class _Report(SilentObserver):
    """Progress of a process, sent to where it is shown."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.scored = 0

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self.scored = len(running.values)
        self.pipe.send(("start", running))

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        value = running.values[-1] if len(running.values) > self.scored else None
        self.scored = len(running.values)
        self.pipe.send(("sample", sample, value))


@dataclass
class _Progress:
    """What the processes report, as one run that goes."""

    spec: RunSpec
    folder: Path
    observer: Observer
    running: RunningMetrics | None = None
    started: float = 0.0

    def start(self, running: RunningMetrics) -> None:
        """All processes say the same; the first one is heard."""
        if self.running is None:
            self.running, self.started = running, time.monotonic()
            self.observer.start(self.spec, self.folder, running)

    def sample(self, sample: SampleRecord, value: float | None) -> None:
        assert self.running is not None  # a process starts before it has a sample
        self.running.add(sample.stats(), value, time.monotonic() - self.started)
        self.observer.sample(sample, self.running)


@dataclass
class _Member:
    """A started process and the pipe to it; `last` are its last words, where something failed."""

    place: RunProcess
    process: BaseProcess
    pipe: Connection
    last: tuple[bool, str] | None = None


@dataclass
class _Members:
    """The processes of a run; all are ended when the block is left."""

    places: list[RunProcess]
    members: list[_Member] = field(default_factory=list)

    def __enter__(self) -> _Members:
        self.start(self.places)
        return self

    def __exit__(self, *_: object) -> None:
        for member in self.members:
            member.process.terminate()
        for member in self.members:
            member.process.join(GRACE_S)
            member.process.kill()
            member.process.join()

    def start(self, places: list[RunProcess]) -> None:
        """One process per place."""
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for place in places:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(place, theirs))
            process.start()
            theirs.close()
            self.members.append(_Member(place, process, ours))

    def listen(self, relay: _Progress, word: str, times: int = 1) -> None:
        """Pass progress on until `word` came so often; raise the sentence of a failure."""
        heard = 0
        while heard < times:
            for kind, *content in self._messages(None):
                if kind == "failed":
                    raise self._failure()
                if kind == word:
                    heard += 1
                else:
                    getattr(relay, kind)(*content)

    def _messages(self, timeout_s: float | None) -> Iterator[tuple[Any, ...]]:
        """What has come within the time; a closed pipe is a failure unless the process is done."""
        open_pipes = [m.pipe for m in self.members if not m.pipe.closed]
        for pipe in wait(open_pipes, timeout_s):
            member = next(m for m in self.members if m.pipe is pipe)
            try:
                message = member.pipe.recv()
            except (EOFError, OSError):
                member.pipe.close()
                member.process.join()
                if member.process.exitcode == 0:
                    continue
                message = ("failed",)
            if message[0] == "failed" and len(message) > 1:
                member.last = message[1:]
            yield message

    def _failure(self) -> DllmBenchError:
        """The sentence of the first cause: a death before a refusal before what followed of it."""
        end = time.monotonic() + GRACE_S
        while (left := end - time.monotonic()) > 0 and any(not m.pipe.closed for m in self.members):
            for _ in self._messages(left):
                pass
        dead = [m for m in self.members if m.pipe.closed and m.last is None and m.process.exitcode]
        if dead:
            what = f"ended with exit code {dead[0].process.exitcode}"
            return self._sentence(dead[0], what)
        told = [m for m in self.members if m.last is not None]
        refusals = [m.last[1] for m in told if m.last and m.last[0]]
        if refusals:
            return DllmBenchError(refusals[0])
        return self._sentence(told[0], f"failed ({told[0].last and told[0].last[1]})")

    def _sentence(self, member: _Member, what: str) -> DllmBenchError:
        return DllmBenchError(
            f"Process {member.place.index} of {len(self.members)} (hardware="
            f"{member.place.spec.hardware['name']}) {what}, and the others were ended; finished "
            "samples are kept, give the same command again to go on."
        )


def _serve(place: RunProcess, pipe: Connection) -> None:
    """A process's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it decides
    threading.Thread(target=die_with_parent, daemon=True).start()
    try:
        place.work(pipe)
    except DllmBenchError as error:
        pipe.send(("failed", True, str(error)))
    except Exception as error:
        pipe.send(("failed", False, f"{type(error).__name__}: {error}"))


def die_with_parent() -> None:
    """A process must not outlive the one that started it: it would hold the lock of its run."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
