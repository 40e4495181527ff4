"""Watching runs: the metrics over the samples finished so far, and progress on the terminal.

The runner knows nothing about progress displays and loggers except that they are observers.

It shows done/total, time left, the score so far with its interval, TPF and TPS. On a terminal rich
draws a bar on stderr; if that is no terminal, a plain line is written every ten seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Self

from dllm_bench.core.output import console, show_error
from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import MeanScore, mean_score, percent_of
from dllm_bench.metrics.sample_stats import UNREPORTED, UNTIMED, SampleStats, frame_of
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import RunRecord, SampleRecord, graded
from dllm_bench.store.spec import RunSpec

if TYPE_CHECKING:
    from pandas import DataFrame
    from rich.progress import Progress, TaskID


@dataclass
class RunningMetrics:
    """Metrics over the finished samples; those of earlier sessions count, except for the pace."""

    total: int  # samples of the whole run
    note: str | None = None  # a remark on the run, shown before its metrics
    done: int = 0  # finished samples, earlier sessions included
    stats: list[SampleStats] = field(default_factory=list)  # one entry per finished sample
    ids: list[str] = field(default_factory=list)  # of the samples
    values: list[float | None] = field(default_factory=list)
    """Their scores; None unless a sample is scored in no time."""
    session_done: int = 0  # samples that this session finished
    session_s: float = 0.0  # age of this session when its last sample finished
    _frame: DataFrame | None = field(default=None, init=False, repr=False)

    def add(
        self, key: str, stats: SampleStats, value: float | None, session_s: float | None = None
    ) -> None:
        """Count the sample with id `key`; `session_s` is the session's age if this session
        finished it."""
        self.done += 1
        self.ids.append(key)
        self.stats.append(stats)
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
        """Return the score so far, with its interval over items: repetitions count as one."""
        items = graded({"id": self.ids, "value": self.values}).values()
        return mean_score([fmean(values) for values in items])

    def metric(self, name: str) -> float | None:
        """Return a metric over the samples so far, by the name of its definition."""
        import pandas as pd

        known = 0 if self._frame is None else len(self._frame)
        if self._frame is None or known < len(self.stats):  # only new samples are converted
            self._frame = pd.concat([self._frame, frame_of(self.stats[known:])], ignore_index=True)
        return definitions.measure(name, self._frame)


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


TPF, TPS = "tpf/emitted", "tps/e2e"
SHOWN = {  # format -> metric, those that the run has so far
    "TPF (tpf/emitted) {:.2f}": TPF,
    "TPS (tps/e2e) {:.1f}": TPS,
    "{:.2f}× the baseline": "speedup/baseline",
    "{:.1%} equal texts": "equal/baseline",
    "{:.1f} tokens/s": "tps/throughput",
    "{:.2f} requests/s": "requests/s",
    "TTFT {:.3f} s": "ttft/p50",
}
PLAIN_EVERY_S, DRAWN_EVERY_S = 10.0, 0.1  # lines, and bars of a terminal


class _Display:
    """Bars below scrolling lines on a terminal; elsewhere lines alone."""

    def __init__(self) -> None:
        self.shown_at = time.monotonic()
        self.bars: Progress | None = None
        self.tasks: dict[str, TaskID] = {}  # title -> bar, "" for the bar of one run, or of all
        if sys.stderr.isatty():
            # only a terminal needs it, and `--help` of each command that makes runs is quicker
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            text = TextColumn("{task.description}", table_column=Column(no_wrap=True))
            on = console(stderr=True)
            self.bars = Progress(BarColumn(20), text, console=on, transient=True)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        if self.bars is not None:
            from rich.markup import escape

            self.bars.console.print(escape(text), highlight=False, soft_wrap=True)
        else:
            show_error(text)

    def is_due(self) -> bool:
        """Return whether progress is to be shown again, whose text takes time to make."""
        every_s = PLAIN_EVERY_S if self.bars is None else DRAWN_EVERY_S
        return time.monotonic() - self.shown_at >= every_s

    def plain(self, text: str) -> None:
        """Write a line if one is due; never on a terminal."""
        if self.bars is None and self.is_due():
            self.shown_at = time.monotonic()
            self.line(text)

    def bar(self, key: str, text: str, done: int | None = None, total: int | None = None) -> None:
        """Update the bar of `key`, or make it if there is none; only on a terminal.

        total: None for a pulsing bar.
        """
        if self.bars is None:
            return
        from rich.markup import escape

        self.bars.start()
        self.shown_at = time.monotonic()
        if key not in self.tasks:
            self.tasks[key] = self.bars.add_task("", total=total)
        self.bars.update(self.tasks[key], description=escape(text), completed=done, total=total)

    def close(self) -> None:
        if self.bars is not None:
            self.bars.stop()


class RunProgress(_Display, Observer):
    """The progress of one run. ends_with_line: write a line about the finished run."""

    def __init__(self, ends_with_line: bool = True) -> None:
        super().__init__()
        self.ends_with_line = ends_with_line
        self.title = ""

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self.title = spec.folder
        self.shown_at = time.monotonic()
        if running.note:
            self.line(f"{self.title}: {running.note}")
        if running.done:
            self.line(f"{self.title}: resumed, {running.done} of {running.total} were done")

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        if self.is_due():
            text = f"{self.title}: {progress_text(running)}"
            self.bar("", text, running.done, running.total)
            self.plain(text)

    def finish(self, record: RunRecord) -> None:
        if self.ends_with_line:
            self.line(f"{self.title}: {headline(record)}")


class ManyRunsProgress(_Display):
    """The progress of many runs, `total` of them: a line per finished run, and the progress of
    current ones.
    """

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self.done = 0
        self.current: dict[str, str] = {}  # title -> progress of the run
        self.started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, title: str, text: str) -> None:
        """Show the progress of a run."""
        self.current[title] = text
        self.bar("", self.overall(), self.done, self.total)
        self.bar(title, f"{title}: {text}")
        runs = (f"{title}: {text}" for title, text in self.current.items())
        self.plain(" | ".join([self.overall(), *runs]))

    def end(self, title: str, text: str) -> None:
        """Show that a run is over; `text` says how it ended."""
        self.done += 1
        self.current.pop(title, None)
        self.bar("", self.overall(), self.done, self.total)
        if self.bars is not None and title in self.tasks:
            self.bars.remove_task(self.tasks.pop(title))
        self.line(f"[{self.done}/{self.total}] {title}: {text}")

    def overall(self) -> str:
        """Return finished runs, and the time left at their pace."""
        pace_s = (time.monotonic() - self.started) / self.done if self.done else None
        left = duration(pace_s * (self.total - self.done) if pace_s is not None else None)
        return f"{self.done}/{self.total} runs, ETA {left}"


def progress_text(running: RunningMetrics) -> str:
    """Return the progress of a run, in one line."""
    parts = [f"{running.done}/{running.total}", f"ETA {duration(running.eta_s)}"]
    return " · ".join([*parts, *_metrics(running.score(), running.metric)])


def headline(record: RunRecord) -> str:
    """Return a finished run in one line."""
    metrics = _metrics(record.score, record.summary.get)
    done = f"done, {len(record.columns['id'])} samples"
    return " · ".join(filter(None, [done, *metrics, record.ungraded]))


def _metrics(score: MeanScore | None, metric: Callable[[str], float | None]) -> list[str]:
    parts = [f"score {100 * score.mean:.1f} ± {100 * score.margin:.1f}"] if score else []
    values = ((form, metric(name)) for form, name in SHOWN.items())
    return parts + [form.format(value) for form, value in values if value is not None]


def summary(record: RunRecord) -> list[str]:
    """Return the results of a finished run, one per line."""
    verdicts = ", ".join(f"{name} {count}" for name, count in record.verdicts.items())
    score = record.score
    lines = [f"{record.spec.folder}"]
    if score:
        percent = percent_of(score.mean, score.low, score.high)
        lines.append(f"score {percent} ({record.basis})")
    if len(record.scores) > 1:
        lines.append("also: " + ", ".join(f"{k} {100 * v:.1f}" for k, v in record.scores.items()))
    lines.append(f"verdicts: {verdicts}")
    if record.unused:
        shares = (f"{name} on {100 * share:.0f} %" for name, share in record.unused.items())
        lines.append(f"without effect (of samples): {', '.join(shares)}")
    lines += [f"warning: {text}" for text in record.warnings]
    if record.spec.baseline:
        lines.append(f"baseline: {setting_in(record.spec.baseline, 'name')}, in the same run")
    reasons = {**UNREPORTED, **UNTIMED}
    empty = {why for name, why in reasons.items() if None in record.columns.get(name, ())}
    lines += [f"left empty: {why}" for why in sorted(empty)]
    for name, metric in definitions.DEFINITIONS.items():
        if (value := record.summary.get(name)) is not None:
            lines.append(f"{name:28} {value:10.4g} {metric.unit}")
    return lines


def duration(seconds: float | None) -> str:
    """Return a duration as 1:02:03 or 2:03, or a dash for None."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
