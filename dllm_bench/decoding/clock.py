"""Measure milliseconds between marks, for the timings of a trace."""

from __future__ import annotations

import time
from itertools import pairwise

import torch


class HostClock:
    """Milliseconds between marks, by the host's clock."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self.mark()

    def mark(self) -> None:
        """End one span and begin the next."""
        self.marks.append(time.perf_counter())

    def spans_ms(self) -> list[float]:
        """Return one span per pair of neighbouring marks."""
        return [1000 * (after - before) for before, after in pairwise(self.marks)]


class CudaClock:
    """Milliseconds between marks, by events of a CUDA device, for which the host does not have to
    wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[torch.cuda.Event] = []
        self.mark()

    def mark(self) -> None:
        """End one span and begin the next."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        self.marks.append(event)

    def spans_ms(self) -> list[float]:
        """Return one span per pair of neighbouring marks."""
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairwise(self.marks)]


def clock_of(device: torch.device) -> HostClock | CudaClock:
    """Return a clock for work on the device."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
