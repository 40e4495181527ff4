"""Loggers, which copy a run's metrics elsewhere: none, or Weights & Biases.

The run folder stays the source of truth; a logger that fails costs one warning and nothing else.
W&B works offline, below the run folder, unless a key is in the environment or a mode is set. Only
this file imports wandb, and only on use.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.core.secrets import strike_out_of
from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.registry import register
from dllm_bench.runs.observers import RunningMetrics, SilentObserver
from dllm_bench.runs.progress import TPF, TPS
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec

TABLE = ("sample", "id", "text", "seconds")
"""Columns of W&B's table of samples; `sample` is the number that `show --sample` takes, from 0."""


@register("logger.none")
class NoLogger(SilentObserver):
    """Logs nothing."""


@register("logger.wandb")
class WandbLogger(SilentObserver):
    """One W&B run per session, all with the beginning of the run's hash as their id.

    Logged per sample: TPF, TPS and score so far, and the sample's latency. Logged at the end: every
    speed metric, the score with its interval, and a table of the session's first samples.

    project, entity, tags: of W&B; group, job_type: None for "benchmark/model" and the decoder, so
    that W&B's page shows the decoders of one task and model together.
    mode: "online", "offline" or "disabled", see `_mode` for None.
    samples: rows of the table; 0 for no table.
    """

    def __init__(
        self,
        project: str = "dllm-bench",
        mode: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        tags: Sequence[str] = (),
        samples: int = 20,
    ) -> None:
        self.project, self.mode, self.entity = project, mode, entity
        self.group, self.job_type, self.tags = group, job_type, list(tags)
        self.samples = samples
        self._first: list[SampleRecord] = []  # of the table, in the order they were finished
        self._run: Any = None
        self._broken = False

    def start(self, spec: RunSpec, folder: Path, running: RunningMetrics) -> None:
        self._safely(lambda: self._init(spec, folder))

    def sample(self, sample: SampleRecord, running: RunningMetrics) -> None:
        values = {
            "tpf": running.metric(TPF),
            "tps": running.metric(TPS),
            "latency": sample.seconds,
            **_score(running.score()),
        }
        self._safely(lambda: self._log(values, running.done))
        if len(self._first) < self.samples:
            self._first.append(sample)

    def finish(self, record: RunRecord) -> None:
        values = {
            **record.summary,
            "tpf": record.summary[TPF],
            "tps": record.summary[TPS],
            "latency": record.summary["latency/mean"],
            **_score(record.score),
            **{f"verdict/{name}": count for name, count in record.verdicts.items()},
        }
        step = len(record.columns["id"]) + 1
        self._safely(lambda: self._log({**values, **self._table(record)}, step))

    def close(self) -> None:
        if self._run is not None:
            self._safely(self._run.finish)
            self._run = None

    def _init(self, spec: RunSpec, folder: Path) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            group=self.group or f"{spec.benchmark['name']}/{spec.model['name']}",
            job_type=self.job_type or spec.label,
            tags=self.tags,
            id=spec.short,
            name=spec.folder,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            config=strike_out_of({**spec.to_plain(), "identity_hash": spec.identity_hash}),
            resume="allow",
            **self._mode(),
        )

    def _mode(self) -> dict[str, Any]:
        """The mode to pass on: wandb reads $WANDB_MODE by itself if none is passed."""
        if self.mode:
            return {"mode": self.mode}
        if os.environ.get("WANDB_MODE"):
            return {}
        return {"mode": "online" if os.environ.get("WANDB_API_KEY") else "offline"}

    def _log(self, values: dict[str, Any], step: int) -> None:
        if self._run is not None:
            known = {k: v for k, v in values.items() if v is not None}
            self._run.log(strike_out_of(known), step=step)

    def _table(self, record: RunRecord) -> dict[str, Any]:
        if self._run is None or not self._first:
            return {}
        import wandb

        places = {name: place for place, name in enumerate(record.columns["id"])}
        rows = [[places[one.id], *(getattr(one, c) for c in TABLE[1:])] for one in self._first]
        return {"samples": wandb.Table(columns=list(TABLE), data=strike_out_of(sorted(rows)))}

    def _safely(self, action: Callable[[], object]) -> None:
        """Call `action`; after the first failure, which is a warning, nothing more is logged."""
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


def _score(score: MeanScore | None) -> dict[str, float]:
    if score is None:
        return {}
    return {"score": score.mean, "score/low": score.low, "score/high": score.high}
