"""Runs that were sent to a cluster: a ticket per job, and what SLURM says of it.

A ticket names a run, its job and the job's log. The store tells how far a run is; this tells
whether anybody is still at it: a run that is not sealed though its job is over has failed, and the
log says why. Tickets are lines of one file beside the runs. Sending is in `launch`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.run.progress import Board
from dllm_bench.store.files import Appender, lines
from dllm_bench.store.store import RECORD, Store, read_entry

TICKETS = "jobs.jsonl"
ASK_S = 30.0  # SLURM's answer is waited for so long
POLL_S = 3.0


@dataclass(frozen=True)
class Ticket:
    """run: identity hash, empty for a command; what: folder of the run, or the command."""

    run: str
    what: str
    job: str
    log: str


def folder_of(store: Store) -> Path:
    """Where jobs and their logs are noted."""
    return Path(store.root).parent / ".launch"


def note(store: Store, tickets: Sequence[Ticket]) -> None:
    """Remember jobs that were sent."""
    folder_of(store).mkdir(parents=True, exist_ok=True)
    appender = Appender(folder_of(store) / TICKETS)
    for ticket in tickets:
        appender.append(json.dumps(asdict(ticket)))
    appender.close()


def states() -> dict[str, str] | None:
    """Job -> SLURM's word, of this user's jobs that are not over; None where SLURM is silent."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i %T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    pairs = (line.split() for line in done.stdout.splitlines())
    return {job: word.lower() for job, word in pairs}


@dataclass(frozen=True)
class Jobs:
    """The newest ticket of every run and command, and the words for jobs that are not over."""

    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    words: Mapping[str, str] | None = None

    @classmethod
    def of(cls, store: Store) -> Jobs:
        """What was sent from here; SLURM is asked only if anything was."""
        found = [Ticket(**json.loads(line)) for line in lines(folder_of(store) / TICKETS)]
        return cls({t.run or t.what: t for t in found}, states() if found else {})

    def goes(self, key: str) -> bool:
        """Whether a job of this run or command is queued or running."""
        return key in self.tickets and self.tickets[key].job in (self.words or {})

    def remark(self, key: str) -> tuple[bool, str]:
        """Of a run that is not sealed: whether its job is over, and where job and log are."""
        ticket = self.tickets.get(key)
        if ticket is None or self.words is None:
            return False, f"log of job {ticket.job}: {ticket.log}" if ticket else ""
        if ticket.job in self.words:
            return False, f"job {ticket.job} is {self.words[ticket.job]}"
        return True, f"its job {ticket.job} is over, log: {ticket.log}"


def board(store: Store) -> Iterator[str]:
    """One line per job whose run is not sealed, and per command that is not over."""
    jobs = Jobs.of(store)
    for key, ticket in jobs.tickets.items():
        if jobs.goes(key) or (ticket.run and not is_sealed(store, ticket)):
            yield f"{ticket.what}: {jobs.remark(key)[1]}"


def is_sealed(store: Store, ticket: Ticket) -> bool:
    """Whether the ticket's run is complete."""
    return bool(ticket.run) and (Path(store.root) / ticket.what / RECORD).exists()


def wait(
    store: Store, progress: Board, asked: Container[str] = (), poll_s: float = POLL_S
) -> list[str]:
    """Wait until no job goes any more; sentences of runs that were left unsealed.

    asked: runs that count even if their jobs were over before the waiting began.
    """
    jobs = Jobs.of(store)
    going = {key: t for key, t in jobs.tickets.items() if key in asked or jobs.goes(key)}
    progress.total, failed = len(going), list[str]()
    while going:
        for key, ticket in list(going.items()):
            if jobs.goes(key):
                progress.update(ticket.what, how_far(store, jobs, key))
                continue
            del going[key]
            why = jobs.remark(key)[1] if ticket.run and not is_sealed(store, ticket) else ""
            progress.end(ticket.what, why or "done")
            failed += [f"{ticket.what}: {why}"] if why else []
        time.sleep(poll_s if going else 0)
        jobs = Jobs.of(store)
        if going and jobs.words is None:
            raise DllmBenchError(
                "SLURM does not answer (squeue); its jobs go on, `dllm-bench status` shows them."
            )
    return failed


def how_far(store: Store, jobs: Jobs, key: str) -> str:
    """The job's word and the run's finished samples."""
    ticket = jobs.tickets[key]
    entry = read_entry(Path(store.root) / ticket.what) if ticket.run else None
    done = f" {entry.done}/{entry.total or '?'}" if entry else ""
    return (jobs.words or {})[ticket.job] + done
