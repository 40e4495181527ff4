"""Runs as jobs of a SLURM cluster: submit them, remember them, follow them.

`submit` sends runs (or commands) as one array with submitit and writes a ticket for each: a line of
`jobs.jsonl` that names the run, its job and the job's log. That file is in this user's cache
folder, because a results directory may come from a stranger. The store knows the progress of a run;
tickets and `squeue` tell whether its job is still queued or running. If its job is over but the run
is not sealed, it has failed, and the log says why.
"""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import cache_file, conf_dir, read_settings, read_yaml
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.runs.progress import ManyRunsProgress, RunProgress
from dllm_bench.store.files import Appender, parent_of, parse, whole_lines
from dllm_bench.store.groups import Hardware
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_entry, record_fingerprint

TICKETS = "jobs.jsonl"
ANSWER_S = 30.0  # time limit of a call of squeue
POLL_S = 3.0
SILENT_S = 300.0  # squeue of a busy cluster fails now and then; waiting goes on for so long
REFUSALS = read_yaml(Path(__file__).with_name("refusals.yaml"))
"""Text in a refusal of sbatch -> its meaning, and the settings to change."""
NEVER = ("PartitionConfig", "BadConstraints", "PartitionTimeLimit", "PartitionNodeLimit")
"""Reasons with which SLURM keeps a job that no node can ever start."""
NAMED_IN_REFUSALS = "cpus_per_task gpus_per_node partition account timeout_min".split()
PYTHON = shlex.join(["sh", "-c", 'trap "" USR1 USR2; exec "$0" "$@"', sys.executable])
"""Command that starts a job's Python, with the signal of a preemption ignored until submitit
handles it: unhandled it would end the job for good. SLURM itself queues a preempted job again.
"""
SHARED = frozenset(
    "timeout_min cpus_per_task gpus_per_node tasks_per_node mem_gb nodes name".split()
)
"""Settings that submitit has for every kind of cluster; the others are SLURM's own."""
OF_HYDRA = ("defaults", "submitit_folder")
"""Entries of conf/hydra/launcher/slurm.yaml that are no settings of a job."""


@dataclass(frozen=True)
class PackedJob:
    """A job as submitit stores it: bytes that are unpickled only when the job runs.

    submitit handles the signal of a preemption, by queueing the job again, only after it has
    unpickled its callable; an earlier signal is ignored (`PYTHON`). Unpickling a run imports torch,
    which takes seconds; these bytes are read immediately.
    """

    job: bytes  # a pickled callable

    def __call__(self) -> None:
        pickle.loads(self.job)()

    def checkpoint(self) -> Any:
        """Queue the job again; submitit calls this when the job is preempted."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


@dataclass(frozen=True)
class SlurmRun:
    """A run as a job of a cluster: progress and errors go to the job's log."""

    spec: RunSpec
    store: Store
    deps: Dependencies = REAL

    def __call__(self) -> None:
        from dllm_bench.launch.local import run  # imports torch

        run(self.spec, store=self.store, progress=RunProgress(), deps=self.deps)


@dataclass(frozen=True)
class SlurmCommand:
    """`dllm-bench ARGUMENTS` as a job: a training, or a run that waits for one."""

    arguments: tuple[str, ...]

    def __call__(self) -> None:
        subprocess.run([sys.executable, "-m", "dllm_bench", *self.arguments], check=True)


def submit(
    jobs: Mapping[str, Callable[[], None]],
    *,
    store: Store,
    hardware: Hardware,
    changes: Sequence[str] = (),
    after: Sequence[str] = (),
    cluster: str = "slurm",
) -> list[Any]:
    """Send jobs as one array and store a ticket for each; returns submitit's jobs.

    jobs: by the folder of their run or by their command; hardware: of the runs, it decides how many
    devices and cores a job gets; changes: NAME=VALUE, each replaces a setting of
    conf/hydra/launcher/slurm.yaml; after: ids of jobs that have to succeed first; cluster: "slurm",
    or "debug" for this process. Raises DllmBenchError if SLURM refuses.
    """
    try:
        import submitit
    except ImportError as error:
        raise DllmBenchError(
            "Jobs are sent with submitit, which is not installed; install the extra: "
            "pip install 'dllm-bench[slurm]'."
        ) from error
    if not jobs:
        return []
    usual = read_yaml(conf_dir() / "hydra/launcher/slurm.yaml").items()
    settings = {name: value for name, value in usual if name not in OF_HYDRA}
    settings |= {**resources(hardware), **read_settings(changes, "--slurm")}
    if after:
        own = settings.get("additional_parameters") or {}
        settings["additional_parameters"] = {**own, "kill-on-invalid-dep": "yes"}
        settings["dependency"] = f"afterok:{':'.join(after)}"
    start = {"slurm_max_num_timeout": settings.pop("max_num_timeout", 0), "slurm_python": PYTHON}
    named = {k if k in SHARED else f"slurm_{k}": v for k, v in settings.items() if v is not None}
    runs = {
        what: (job.spec.identity_hash, record_fingerprint(Path(store.root) / what))
        for what, job in jobs.items()
        if isinstance(job, SlurmRun)
    }
    try:
        executor = submitit.AutoExecutor(store.root.parent / ".launch/%j", cluster, **start)
        executor.update_parameters(**named)
        # raises if the folder is a planted link
        with parent_of(store.root.parent / ".launch/_", make=True), executor.batch():
            sent = [executor.submit(PackedJob(pickle.dumps(job))) for job in jobs.values()]
    except (RuntimeError, ValueError, NameError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
        raise DllmBenchError(
            f"SLURM did not take {len(jobs)} jobs ({meaning(text, settings)}); `table` "
            "takes settings as --slurm NAME=VALUE, `run -m` as hydra.launcher.NAME=VALUE; without "
            "SLURM, --run and hydra/launcher=local run here."
        ) from error
    tickets = list[JobTicket]()
    for what, its in zip(jobs, sent, strict=True):
        run_hash, before = runs.get(what, ("", []))
        tickets.append(JobTicket(run_hash, what, its.job_id, str(its.paths.stderr), before))
    record_tickets(store, tickets)
    return sent


def meaning(refusal: str, settings: Mapping[str, Any]) -> str:
    """Return the meaning of a known refusal of sbatch, and the settings to change."""
    named = {name: settings.get(name) or "0" for name in NAMED_IN_REFUSALS}
    known = (means for part, means in REFUSALS.items() if part.lower() in refusal.lower())
    return next((means.format_map(named) for means in known), refusal)


def resources(hardware: Hardware) -> dict[str, Any]:
    """Return cores and devices of a job, for all processes that its run starts."""
    devices = hardware.processes if hardware.uses_cuda else None
    return {"cpus_per_task": hardware.threads * hardware.processes, "gpus_per_node": devices}


@dataclass(frozen=True)
class JobTicket:
    """A job that was sent."""

    run: str  # identity hash of the run; empty for a command
    what: str  # folder of the run, or the command
    job: str  # SLURM's id
    log: str  # path of the job's log
    before: list[int] = field(default_factory=list)
    """Fingerprint of the record, of fewer items, that the run had when its job was sent; empty
    without one."""


def tickets_file(store: Store) -> Path:
    """Return the file of the tickets of this user's jobs."""
    return cache_file(store.root.parent, TICKETS)


def read_tickets(store: Store) -> list[JobTicket]:
    """Return the tickets of this user's jobs; damaged ones are left out."""
    tickets = list[JobTicket]()
    for line in whole_lines(tickets_file(store)):
        with suppress(ValueError):
            tickets.append(made_from(JobTicket, parse(line)))
    return tickets


def record_tickets(store: Store, tickets: Sequence[JobTicket]) -> None:
    """Store the tickets of jobs that were sent."""
    appender = Appender(tickets_file(store))
    for ticket in tickets:
        appender.append(json.dumps(asdict(ticket)))
    appender.close()


class QueuedJob(NamedTuple):
    """A job that is not over, in SLURM's words."""

    state: str  # in lower case
    cores: str = ""
    reason: str = ""  # reason why a job waits


def queued_jobs() -> dict[str, QueuedJob] | None:
    """Return this user's unfinished jobs by id; None if squeue does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T %C %r"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    rows = (line.split(maxsplit=3) for line in done.stdout.splitlines())
    return {job: QueuedJob(state.lower(), *facts) for job, state, *facts in rows}


def end_impossible(jobs: SlurmJobs) -> None:
    """Cancel jobs whose requirements no node can meet; raise DllmBenchError if there are any."""
    own, queued = {ticket.job for ticket in jobs.tickets.values()}, jobs.queued or {}
    found = [job for job in queued if job in own and queued[job].reason in NEVER]
    if not found:
        return
    with suppress(OSError, subprocess.SubprocessError):  # then they wait on, and squeue shows them
        subprocess.run(["scancel", *found], capture_output=True, timeout=ANSWER_S)
    _, cores, reason = queued[found[0]]
    raise DllmBenchError(
        f"SLURM took {len(found)} jobs that it can never start ({reason}), and they were "
        f"cancelled: no node has the {cores} cores, the memory, devices or time that they ask for. "
        "Set hardware.threads, cpus_per_task, mem_gb, gpus_per_node, constraint, timeout_min or "
        "partition to what `sinfo -o '%P %c %m %G %l'` lists."
    )


@dataclass(frozen=True)
class SlurmJobs:
    """Jobs submitted from here, and those that are not over."""

    tickets: Mapping[str, JobTicket] = field(default_factory=dict)
    """Run hash, or command -> its newest ticket."""
    queued: Mapping[str, QueuedJob] | None = None  # see `queued_jobs`

    @classmethod
    def of(cls, store: Store) -> SlurmJobs:
        """Return the jobs of a store; squeue is called only if this user sent any."""
        sent = read_tickets(store)
        return cls({t.run or t.what: t for t in sent}, queued_jobs() if sent else {})

    def is_active(self, key: str) -> bool:
        """Return whether a job of this run or command is queued or running."""
        return key in self.tickets and self.tickets[key].job in (self.queued or {})

    def remark(self, key: str) -> tuple[bool, str]:
        """Return, for a run that is not sealed, (whether its job is over, a text that names job and
        log)."""
        ticket = self.tickets.get(key)
        if ticket is None or self.queued is None:
            return False, f"log of job {ticket.job}: {ticket.log}" if ticket else ""
        if ticket.job in self.queued:
            return False, f"job {ticket.job} is {self.queued[ticket.job].state}"
        return True, f"its job {ticket.job} is over, log: {ticket.log}"


def answered_jobs(store: Store, patience_s: float = 0.0) -> SlurmJobs:
    """Return the jobs of a store; DllmBenchError if SLURM does not answer for `patience_s`."""
    end = time.monotonic() + patience_s
    while (jobs := SlurmJobs.of(store)).queued is None:
        if time.monotonic() >= end:
            raise DllmBenchError(
                "SLURM does not answer (squeue); jobs continue. Give the same command again later."
            )
        time.sleep(POLL_S)
    return jobs


def job_lines(store: Store) -> Iterator[str]:
    """Yield a line per job whose run is not sealed and per command that is not over."""
    jobs = SlurmJobs.of(store)
    for key, ticket in jobs.tickets.items():
        if jobs.is_active(key) or is_unsealed(store, ticket):
            yield f"{ticket.what}: {jobs.remark(key)[1]}"


def is_unsealed(store: Store, ticket: JobTicket) -> bool:
    """Return whether the ticket is of a run that was not sealed since its job was sent."""
    folder = Path(store.root) / ticket.what
    return bool(ticket.run) and record_fingerprint(folder) in ([], ticket.before)


def wait_for_jobs(store: Store, wanted: Container[str] = ()) -> list[str]:
    """Wait until all jobs are over; return a message per run that is not sealed.

    Raises DllmBenchError if SLURM does not answer or can never start a job (`end_impossible`).
    wanted: hashes of runs that count even if their jobs were over before.
    """
    jobs = answered_jobs(store, SILENT_S)
    waiting = [key for key in jobs.tickets if key in wanted or jobs.is_active(key)]
    failed = list[str]()
    with ManyRunsProgress(len(waiting)) as progress:
        while waiting:
            over = [key for key in waiting if not jobs.is_active(key)]
            waiting = [key for key in waiting if jobs.is_active(key)]
            for key in over:
                ticket, remark = jobs.tickets[key], jobs.remark(key)[1]
                is_failed = is_unsealed(store, ticket)
                # whether a command has succeeded, its log alone says
                progress.end(ticket.what, remark if is_failed or not ticket.run else "done")
                failed += [f"{ticket.what}: {remark}"] if is_failed else []
            for key in waiting:
                progress.update(jobs.tickets[key].what, how_far(store, jobs, key))
            time.sleep(POLL_S if waiting else 0)
            jobs = answered_jobs(store, SILENT_S)
            end_impossible(jobs)
    return failed


def how_far(store: Store, jobs: SlurmJobs, key: str) -> str:
    """Return the job's state and the run's finished samples."""
    ticket = jobs.tickets[key]
    entry = read_entry(Path(store.root) / ticket.what) if ticket.run else None
    done = f" {entry.done}/{entry.total or '?'}" if entry else ""
    return (jobs.queued or {})[ticket.job].state + done
