"""Measure milliseconds between marks, for the timings of a trace."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch


class Clock:
    """Milliseconds between marks: by events of a CUDA device, for which the host does not have to
    wait, else by the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []  # events, or seconds
        self.mark()

    def mark(self) -> None:
        """End one span and begin the next."""
        if self.device.type != "cuda":
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def spans_ms(self) -> list[float]:
        """Return one span per pair of neighbouring marks."""
        if self.device.type != "cuda":
            return [1000 * (after - before) for before, after in pairwise(self.marks)]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairwise(self.marks)]
