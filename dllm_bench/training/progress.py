"""Progress of a training or of collecting its data: when a line is due, what it says, time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dllm_bench.runs.progress import duration

Report = Callable[[str], None]
"""Receives a progress line, for example `print`."""

LINE_EVERY_S = 5.0


class Countdown:
    """Time left of a loop of `total` steps, at the pace since the countdown was made.

    `first` steps were done by an earlier call that was interrupted; they say nothing of the pace.
    """

    def __init__(self, total: int, first: int = 0) -> None:
        self.total, self.first = total, first
        self._started = self._last_line = time.monotonic()

    def due(self, done: int) -> bool:
        """Whether the next line should be printed: after five seconds, and at the end."""
        now = time.monotonic()
        if now - self._last_line <= LINE_EVERY_S and done < self.total:
            return False
        self._last_line = now
        return True

    def eta(self, done: int) -> str:
        """Time left after `done` steps, as `ETA 0:31`."""
        pace_s = (time.monotonic() - self._started) / (done - self.first)
        return f"ETA {duration(pace_s * (self.total - done))}"

    def line(self, point: Mapping[str, float]) -> str:
        """`step 200 of 2000: loss 1.2, ETA 0:31`; the first entry of the point is its step."""
        (unit, done), *rest = point.items()
        numbers = ", ".join(f"{name} {value:g}" for name, value in rest)
        return f"{unit} {done:g} of {self.total}: {numbers}, {self.eta(int(done))}"
