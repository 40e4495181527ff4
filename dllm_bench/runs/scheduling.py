"""The scheduling of this process (cores, niceness, policy), on which timings depend."""

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
        """Return the current scheduling; None if the system does not report it."""
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
        """Apply this scheduling to the process, as far as its user is allowed to."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cores)
        with suppress(OSError):
            os.sched_setscheduler(0, self.policy, os.sched_param(self.priority))
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)


STARTED = Scheduling.now()
"""Scheduling of the process when it began."""


def restore() -> None:
    """Restore the scheduling that this process began with; DllmBenchError if that is not
    possible."""
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
