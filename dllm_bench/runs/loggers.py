"""Loggers, which copy a run's metrics elsewhere: none, or Weights & Biases.

The run folder stays the source of truth; a failing logger only causes one warning.
W&B works offline, below the run folder, unless a key is in the environment or a mode is set. Only
this file imports wandb, and only on use. A user's guide is docs/wandb.md.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from dllm_bench.core.declared import Count
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show_error, strike_out_of
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.registry import register
from dllm_bench.runs.progress import TPF, TPS, Observer, RunningMetrics
from dllm_bench.store.files import matching, remove_folder
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import RunRecord, SampleRecord, whole_texts
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import read_samples

TABLE = ("sample", "id", "prompt", "target", "answer", "verdict", "seconds")
"""Columns of W&B's table of samples; `sample` is the number that `show --sample` takes, from 0."""


@register("logger.none")
class NoLogger(Observer):
    """Logs nothing."""


@register("logger.wandb")
@dataclass
class WandbLogger(Observer):
    """Logs a run to one W&B run; its id, the beginning of the run's hash, is the same in all
    sessions.

    Logged per sample: TPF, TPS and score so far, and the sample's latency. In W&B's summary at the
    end: every metric, the score with its interval, and a table of the run's first samples.
    Offline, a session logs the samples of earlier sessions again and removes their folders, so that
    there is one folder to send, with everything in it.

    project, entity, tags: as in W&B; group, job_type: None for "benchmark/model" and the decoder,
    so that W&B groups the decoders of one task and model. mode: "online", "offline" or "disabled",
    see `_mode` for None. samples: rows of the table; 0 for no table.
    """

    project: str = "dllm-bench"
    mode: Literal["online", "offline", "disabled"] | None = None
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    tags: Sequence[str] = ()
    samples: Count = 20
    _folder: Path = field(default=Path(), init=False)  # the run's folder
    _run: Any = field(default=None, init=False)
    _broken: bool = field(default=False, init=False)

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self._folder = folder
        self._safely(lambda: self._init(spec, folder))
        self._safely(lambda: self._log_earlier(running))

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        self._safely(lambda: self._log(_so_far(running), running.done))

    def finish(self, record: RunRecord) -> None:
        values = {
            **record.summary,
            "tpf": record.summary[TPF],
            "tps": record.summary[TPS],
            "latency": record.summary["latency/mean"],
            **_score(record.score),
            **{f"verdict/{name}": count for name, count in record.verdicts.items()},
        }
        self._safely(lambda: self._log({**values, **self._table(record)}))

    def close(self) -> None:
        if self._run is not None:
            self._safely(self._run.finish)
            self._safely(self._say_where)
            self._run = None

    def _init(self, spec: RunSpec, folder: Path) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group or f"{spec.benchmark.name}/{spec.model.name}",
            job_type=self.job_type or spec.label,
            tags=list(self.tags),
            id=spec.short,
            name=spec.folder,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            config=strike_out_of({**spec.to_plain(), "identity_hash": spec.identity_hash}),
            resume="allow",
            **self._mode(),
        )

    def _log_earlier(self, running: RunningMetrics) -> None:
        """Log the samples of earlier sessions that W&B does not have; offline, all of them."""
        if self._run.offline:
            own = Path(self._run.settings.sync_dir)
            for old in matching(own.parent, f"offline-run-*-{self._run.id}"):
                if old.name != own.name:
                    remove_folder(old)
        first = self._run.step
        for earlier in _prefixes(running):
            if earlier.done >= first:
                self._log(_so_far(earlier), earlier.done)

    def _say_where(self) -> None:
        """Print where the run is logged and, if that is on this machine, the command that sends
        it."""
        if self._run.offline:
            folder = self._run.settings.sync_dir
            where = f"{folder}; send it with: wandb sync {shlex.quote(str(folder))}"
        else:
            where = self._run.url
        show_error(f"W&B: logged to {where}")

    def _mode(self) -> dict[str, Any]:
        """Return the mode to pass on: wandb reads $WANDB_MODE by itself if none is passed."""
        if self.mode:
            return {"mode": self.mode}
        if os.environ.get("WANDB_MODE"):
            return {}
        return {"mode": "online" if os.environ.get("WANDB_API_KEY") else "offline"}

    def _log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Log values of the sample with this number, from 1; None: of the whole run, whose step
        would be that of a later sample if the run goes on."""
        if self._run is not None:
            known = strike_out_of({k: v for k, v in values.items() if v is not None})
            if step is None:
                self._run.summary.update(known)
            else:
                self._run.log(known, step=step, commit=True)  # before the summary

    def _table(self, record: RunRecord) -> dict[str, Any]:
        if self._run is None or not self.samples:
            return {}
        import wandb

        rows = list(islice(self._rows(record), self.samples))
        return {"samples": wandb.Table(columns=list(TABLE), data=strike_out_of(rows))}

    def _rows(self, record: RunRecord) -> Iterator[list[Any]]:
        """Yield the samples in the run's order, with the columns of `TABLE`."""
        samples = read_samples(self._folder)
        targets = _targets(record.spec, samples)
        pairs = zip(record.columns["id"], record.columns["verdict"], strict=True)
        for place, (key, verdict) in enumerate(pairs):
            one = samples[key]
            yield [place, key, one.prompt, targets.get(key), one.text, verdict, one.seconds]

    def _safely(self, action: Callable[[], object]) -> None:
        """Call `action`; the first failure gives a warning and ends the logging."""
        if self._broken:
            return
        try:
            action()
        except Exception as error:  # a third party's failure of any kind must not end a run
            self._broken = True
            warnings.warn(
                f"W&B logging stopped ({type(error).__name__}: {error}); the run continues "
                "and its folder has everything.",
                stacklevel=3,
            )


def _targets(spec: RunSpec, samples: Mapping[str, SampleRecord]) -> dict[str, str]:
    """Return sample id -> the right answer; a benchmark may not know it."""
    with suppress(DllmBenchError):
        answers = benchmark_of(spec.benchmark).answers(whole_texts(samples.values()))
        return {key: answer.gold for key, answer in answers.items()}
    return {}


def _prefixes(running: RunningMetrics) -> Iterator[RunningMetrics]:
    """Yield the metrics after each of the finished samples, in their order."""
    growing = RunningMetrics(running.total)
    for sample in zip(running.ids, running.stats, running.values, strict=True):
        growing.add(*sample)
        yield growing


def _so_far(running: RunningMetrics) -> dict[str, float | None]:
    """Return the values logged after a sample: metrics of all samples so far, latency of the last
    one."""
    return {
        "tpf": running.metric(TPF),
        "tps": running.metric(TPS),
        "latency": running.stats[-1].seconds,
        **_score(running.score()),
    }


def _score(score: MeanScore | None) -> dict[str, float]:
    if score is None:
        return {}
    return {"score": score.mean, "score/low": score.low, "score/high": score.high}
