"""What befalls the runs of a table on a real cluster; jobs read this file by its name.

A run waits in the middle of a request until its life is ended from outside, as often as its fate
says, and leaves a mark for each; one waits while its job is still being read; one kills itself
whenever it is tried.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm_bench.core.request import Generation, Request
from dllm_bench.store.spec import RunSpec
from tests.resume import fakes
from tests.resume.drill import Logged

AT = "item-3"  # where a run waits or dies
LONG_S = 600.0
WAITS = {"requeued": 1, "timed-out": 2}  # the last one is preempted before
STARTING = "starting"
FATES = (*WAITS, "dead", STARTING)  # in the order of the array's tasks


@dataclass
class Fated(fakes.FakeDecoder):
    """Meets its fate at one request."""

    fate: str = ""
    folder: Path = Path()

    def generate(self, model: Any, request: Request) -> Generation:
        if request.id == AT:
            self.meet()
        return super().generate(model, request)

    def meet(self) -> None:
        lives = len(list(self.folder.glob(f"{self.fate}.life-*")))
        if self.fate == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if lives < WAITS.get(self.fate, 0):
            mark(self.folder, self.fate, lives + 1).touch()
            time.sleep(LONG_S)


def mark(folder: Path, fate: str, life: int) -> Path:
    """There once the run waits, in its n-th life."""
    return folder / f"{fate}.life-{life}"


@dataclass
class Fates:
    """The decoder of each run, by the run's hash; slow to read in the first life of one."""

    by_hash: dict[str, str]
    folder: Path

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        fate = FATES[int(os.environ.get("SLURM_ARRAY_TASK_ID", 0))]
        if fate == STARTING and not mark(self.folder, fate, 1).exists():
            mark(self.folder, fate, 1).touch()
            time.sleep(LONG_S)

    def __call__(self, spec: RunSpec) -> Logged:
        fate = self.by_hash[spec.identity_hash]
        return Logged(Fated(fate=fate, folder=self.folder), self.folder / f"{fate}.log")
