"""A job as submitit stores it: bytes that are read only once it runs.

A job can be preempted at any time, also while it starts. submitit answers the signal, and queues
the job again, from when it has read what it is to call; until then the signal ends the job for
good. To read a run is to import torch, seconds on a good day; these bytes are read at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Packed:
    """Calls what was packed; `checkpoint` is submitit's word for "preempted, queue me again"."""

    job: bytes

    @classmethod
    def of(cls, job: Callable[[], None]) -> Packed:
        """Of a job that plain pickle can send to another process."""
        return cls(pickle.dumps(job))

    def __call__(self) -> None:
        pickle.loads(self.job)()

    def checkpoint(self) -> Any:
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)
