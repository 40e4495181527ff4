"""What a run tells while it goes: the `Observer` contract, running numbers, the progress line.

A progress display and a logger are both observers; the runner knows nothing else about them. The
line shows done/total, time left, running score with its interval, TPF and TPS. On a terminal it
rewrites itself, elsewhere a plain line comes every ten seconds. Nothing here is stored.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import MeanScore, mean_score
from dllm_bench.metrics.sample_stats import UNREPORTED, UNTIMED, SampleStats
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec

TPF, TPS = "tpf/emitted", "tps/decode"
SHOWN = {  # while a run goes, what it has of them
    "TPF {:.2f}": TPF,
    "TPS {:.1f}": TPS,
    "{:.2f}× the baseline": "speedup/baseline",
    "{:.1%} equal texts": "equal/baseline",
    "{:.1f} tokens/s": "tps/throughput",
    "{:.2f} requests/s": "requests/s",
    "TTFT {:.3f} s": "ttft/p50",
}
PLAIN_EVERY_S = 10.0
TTY_EVERY_S = 0.2


@dataclass
class RunningMetrics:
    """Numbers over the samples finished so far; earlier sessions count, except for the time left.

    values: sample scores, only of benchmarks that score a sample in no time; note: a remark on the
    run that belongs before its numbers.
    """

    total: int
    note: str | None = None
    done: int = 0
    facts: list[SampleStats] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    session_done: int = 0
    session_s: float = 0.0

    def add(self, facts: SampleStats, value: float | None, fresh_s: float | None = None) -> None:
        """Count a sample; `fresh_s` is the session's age if the sample is of this session."""
        self.done += 1
        self.facts.append(facts)
        if value is not None:
            self.values.append(value)
        if fresh_s is not None:
            self.session_done += 1
            self.session_s = fresh_s

    @property
    def eta_s(self) -> float | None:
        """Seconds left at this session's pace."""
        if not self.session_done:
            return None
        return self.session_s / self.session_done * (self.total - self.done)

    def score(self) -> MeanScore | None:
        """Running score with its interval."""
        return mean_score(self.values)

    def number(self, name: str) -> float | None:
        """A definition over the samples so far."""
        return definitions.measure(name, self.facts)


class Observer(Protocol):
    """Someone who watches a run. An observer changes nothing and must not fail it."""

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        """A session begins; `running` holds what earlier sessions finished."""

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        """A sample is finished and stored."""

    def finish(self, record: RunRecord) -> None:
        """The run is sealed."""

    def close(self) -> None:
        """The session is over, sealed or not."""


class SilentObserver:
    """An observer that does nothing; the base of the others."""

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None: ...

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None: ...

    def finish(self, record: RunRecord) -> None: ...

    def close(self) -> None: ...


class RunProgress(SilentObserver):
    """The progress of one run on a stream."""

    def __init__(
        self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.terminal = self.stream.isatty()
        self.title = ""
        self.shown_at = 0.0

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self.title = spec.folder
        self.shown_at = self.clock()
        if running.note:
            self._line(f"{self.title}: {running.note}")
        if running.done:
            self._line(f"{self.title}: resumed, {running.done} of {running.total} were done")

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        wait_s = TTY_EVERY_S if self.terminal else PLAIN_EVERY_S
        if self.clock() - self.shown_at < wait_s:
            return
        self.shown_at = self.clock()
        text = f"{self.title}: {line(running)}"
        if self.terminal:
            self.stream.write(f"\r\x1b[2K{text}")
            self.stream.flush()
        else:
            self._line(text)

    def finish(self, record: RunRecord) -> None:
        self._line(f"{self.title}: {headline(record)}")

    def _line(self, text: str) -> None:
        self.stream.write(("\r\x1b[2K" if self.terminal else "") + text + "\n")
        self.stream.flush()


def line(running: RunningMetrics) -> str:
    """One line about a run that goes."""
    parts = [f"{running.done}/{running.total}", f"ETA {duration(running.eta_s)}"]
    return " · ".join([*parts, *_numbers(running.score(), running.number)])


def headline(record: RunRecord) -> str:
    """One line about a finished run."""
    numbers = _numbers(record.score, record.summary.get)
    return " · ".join([f"done, {len(record.columns['id'])} samples", *numbers])


def _numbers(score: MeanScore | None, number: Callable[[str], float | None]) -> list[str]:
    parts = [f"score {100 * score.mean:.1f} ± {100 * score.margin:.1f}"] if score else []
    values = ((form, number(name)) for form, name in SHOWN.items())
    return parts + [form.format(value) for form, value in values if value is not None]


def summary(record: RunRecord) -> list[str]:
    """What a person wants to know about a finished run, one fact a line."""
    verdicts = ", ".join(f"{name} {count}" for name, count in record.verdicts.items())
    score = record.score
    lines = [f"{record.spec.folder}"]
    if score:
        interval = f"[{100 * score.low:.1f}, {100 * score.high:.1f}]"
        lines.append(f"score {100 * score.mean:.1f} {interval} ({score.method}, n = {score.n})")
    if len(record.scores) > 1:
        lines.append("also: " + ", ".join(f"{k} {100 * v:.1f}" for k, v in record.scores.items()))
    lines.append(f"verdicts: {verdicts}")
    if record.unused:
        idle = (f"{name} on {100 * share:.0f} %" for name, share in record.unused.items())
        lines.append(f"without effect (of samples): {', '.join(idle)}")
    if record.spec.baseline:
        lines.append(f"baseline: {record.spec.baseline.get('name')}, in the same run")
    reasons = {**UNREPORTED, **UNTIMED}
    untold = {why for name, why in reasons.items() if None in record.columns.get(name, ())}
    lines += [f"left empty: {why}" for why in sorted(untold)]
    for name, value in record.summary.items():
        if value is not None:
            lines.append(f"{name:28} {value:10.4g} {definitions.definition(name).unit}")
    return lines


def duration(seconds: float | None) -> str:
    """1:02:03, 2:03, or a dash."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class ObserverGroup(SilentObserver):
    """Several observers as one."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)

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


class ManyRunsProgress:
    """The progress of many runs in one place: a line per finished run, one line for those that go.

    On a terminal the last line rewrites itself, elsewhere it comes every ten seconds.
    """

    def __init__(
        self,
        total: int,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream = stream or sys.stderr
        self.clock = clock
        self.terminal = self.stream.isatty()
        self.total = total
        self.done = 0
        self.going: dict[str, str] = {}
        self.started = self.shown_at = clock()

    def update(self, title: str, text: str) -> None:
        """A run that goes says where it stands."""
        self.going[title] = text
        if self.clock() - self.shown_at >= (TTY_EVERY_S if self.terminal else PLAIN_EVERY_S):
            self.show()

    def end(self, title: str, text: str) -> None:
        """A run is over."""
        self.done += 1
        self.going.pop(title, None)
        self._write(f"[{self.done}/{self.total}] {title}: {text}", "\n")

    def show(self) -> None:
        """Write the line about the runs that go."""
        self.shown_at = self.clock()
        pace_s = (self.shown_at - self.started) / self.done if self.done else None
        left = duration(pace_s * (self.total - self.done) if pace_s is not None else None)
        runs = " | ".join(f"{title}: {text}" for title, text in self.going.items())
        text = f"{self.done}/{self.total} runs, ETA {left} | {runs}"
        if self.terminal:
            self._write(text[: shutil.get_terminal_size().columns - 1], "")
        else:
            self._write(text, "\n")

    def _write(self, text: str, end: str) -> None:
        self.stream.write(("\r\x1b[2K" if self.terminal else "") + text + end)
        self.stream.flush()
