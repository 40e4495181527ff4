"""Watching a run: the `Observer` base class and the metrics over the samples finished so far.

Progress displays and loggers are observers; the runner knows nothing else about them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import MeanScore, mean_score
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec


@dataclass
class RunningMetrics:
    """Metrics over the finished samples; those of earlier sessions count, except for the pace."""

    total: int  # samples of the whole run
    note: str | None = None  # a remark on the run, shown before its metrics
    done: int = 0  # finished samples, earlier sessions included
    stats: list[SampleStats] = field(default_factory=list)  # one entry per finished sample
    values: list[float] = field(default_factory=list)  # scores, if a sample is scored in no time
    session_done: int = 0  # samples that this session finished
    session_s: float = 0.0  # age of this session when its last sample finished

    def add(self, stats: SampleStats, value: float | None, session_s: float | None = None) -> None:
        """Count a sample; `session_s` is the session's age if this session finished the sample."""
        self.done += 1
        self.stats.append(stats)
        if value is not None:
            self.values.append(value)
        if session_s is not None:
            self.session_done += 1
            self.session_s = session_s

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this session's pace; None before its first sample."""
        if not self.session_done:
            return None
        return self.session_s / self.session_done * (self.total - self.done)

    def score(self) -> MeanScore | None:
        """Return the score so far, with its interval."""
        return mean_score(self.values)

    def metric(self, name: str) -> float | None:
        """Return a metric over the samples so far, by the name of its definition."""
        return definitions.measure(name, self.stats)


class Observer:
    """Watches a run; this one does nothing. An observer changes nothing about the run and must not
    make it fail.
    """

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        """Begin to observe a session; `running` holds the samples of earlier sessions."""

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        """Take note of a sample that is finished and stored."""

    def finish(self, record: RunRecord) -> None:
        """Take note that the run is sealed."""

    def close(self) -> None:
        """Finish when the session is over, whether or not the run is sealed."""


class ObserverGroup(Observer):
    """Several observers as one; None stands for no observer."""

    def __init__(self, observers: Iterable[Observer | None]) -> None:
        self.observers = [observer for observer in observers if observer is not None]

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        for observer in self.observers:
            observer.start(spec, folder, running)

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        for observer in self.observers:
            observer.sample(sample, running)

    def finish(self, record: RunRecord) -> None:
        for observer in self.observers:
            observer.finish(record)

    def close(self) -> None:
        for observer in self.observers:
            observer.close()
