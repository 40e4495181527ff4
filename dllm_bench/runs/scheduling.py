"""The scheduling of this process: cores, niceness and policy, which decide what a timing means."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from dllm_bench.core.errors import DllmBenchError


@dataclass(frozen=True)
class Scheduling:
    """How the kernel schedules this process."""

    cores: frozenset[int]
    """Processors it may use."""
    nice: int
    policy: int
    """A number of sched(7), 0 by default."""
    priority: int
    """0 for the policies that are not real time."""

    @classmethod
    def now(cls) -> Self | None:
        """That of this moment; None where the system does not tell."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        return cls(
            frozenset(os.sched_getaffinity(0)),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            os.sched_getparam(0).sched_priority,
        )

    def __str__(self) -> str:
        return f"{len(self.cores)} cores, nice {self.nice}, policy {self.policy}"

    def apply(self) -> None:
        """Schedule this process so, as far as its user may."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cores)
        with suppress(OSError):
            os.sched_setscheduler(0, self.policy, os.sched_param(self.priority))
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)


STARTED = Scheduling.now()
"""That of the process when it began."""


def restore() -> None:
    """Give this process the scheduling it began with; DllmBenchError if it cannot have it back."""
    found = Scheduling.now()
    if STARTED is None or found == STARTED:
        return
    STARTED.apply()
    if Scheduling.now() != STARTED:
        raise DllmBenchError(
            f"A run is timed with the scheduling that its process began with ({STARTED}), and "
            f"something changed it to {found}, which this user may not undo; give the same "
            "command again in a new process."
        )
