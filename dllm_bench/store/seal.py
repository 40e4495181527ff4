"""Make the record of a complete run from its samples and scores, and cut it to fewer items."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from statistics import fmean
from typing import Any

from dllm_bench.benchmarks.items import item_id_of
from dllm_bench.core.benchmark import JUDGE_ERROR, SampleScore
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import mean_score, repeated
from dllm_bench.metrics.sample_stats import SampleStats, from_columns
from dllm_bench.store.ineffective import settings_without_effect
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord, Session, graded
from dllm_bench.store.spec import RunSpec


def seal(
    spec: RunSpec,
    samples: Sequence[SampleRecord],
    scores: Mapping[str, SampleScore],
    sessions: Sequence[Session],
    sealed_at: float,
) -> RunRecord:
    """The record of a complete run.

    samples: in request order; scores: one per sample, by id; sealed_at: seconds since the epoch.
    Raises DllmBenchError if grading failed for more samples than `max_judge_errors` allows.
    """
    check_judge_errors(spec, scores)
    stats = [sample.stats() for sample in samples]
    columns: dict[str, list] = {"id": [sample.id for sample in samples]}
    columns["value"] = [_number(scores[sample.id].value) for sample in samples]
    columns["verdict"] = [str(scores[sample.id].verdict) for sample in samples]
    for name in SampleStats.columns():
        column = [_short(getattr(one, name)) for one in stats]
        if name in SampleStats.required() or any(value not in (None, []) for value in column):
            columns[name] = column
    further = sorted({name for score in scores.values() for name in score.metrics})
    for name in further:
        columns[f"{SCORE}{name}"] = [_number(scores[s.id].metrics.get(name)) for s in samples]
    counted = Counter(sample.session for sample in samples)
    return RunRecord(
        spec=spec,
        identity_hash=spec.identity_hash,
        columns=columns,
        sessions=[
            replace(session, samples=counted[index]) for index, session in enumerate(sessions)
        ],
        sealed_at=sealed_at,
        unused=settings_without_effect(spec, samples),
        **_summary(columns, spec.seed),
    )


def check_judge_errors(spec: RunSpec, scores: Mapping[str, SampleScore]) -> None:
    """Raise DllmBenchError if grading failed for more samples than allowed, or for all of them.

    Samples without a grade leave the mean, so that they are only left out if somebody asks for it.
    """
    allowed = spec.runtime.max_judge_errors
    failed = [key for key, score in scores.items() if score.verdict == JUDGE_ERROR]
    every = 0 < len(failed) == len(scores)
    if every or (allowed is not None and len(failed) > allowed):
        limit = "At least one sample must" if every else f"At most {allowed} samples may fail to"
        raise DllmBenchError(
            f"{limit} be graded and grading failed for {len(failed)} of {len(scores)}, "
            f"{failed[0]!r} first ({scores[failed[0]].detail}); the texts are stored: "
            "remove the cause and give the same command again"
            f"{'' if every else ', or raise --max-judge-errors'}."
        )


def first_items(record: RunRecord, limit: int | None) -> RunRecord:
    """Return the record of the first `limit` items alone, in the benchmark's order (None: of all).

    What a record does not hold by sample (sessions, settings without effect) is that of the whole.
    """
    if limit is None or limit >= record.items:
        return record
    items = set(list(dict.fromkeys(map(item_id_of, record.columns["id"])))[:limit])
    kept = [item_id_of(key) in items for key in record.columns["id"]]
    columns = {name: list(compress(column, kept)) for name, column in record.columns.items()}
    spec = replace(record.spec, limit=limit)
    return replace(record, spec=spec, columns=columns, **_summary(columns, spec.seed))


def _summary(columns: Mapping[str, list], seed: int) -> dict[str, Any]:
    """Return the fields of a record that are computed from its columns."""
    outcomes = list(graded(columns).values())
    return {
        "score": mean_score([fmean(values) for values in outcomes], seed=seed),
        "summary": definitions.measure_all(from_columns(columns)),
        "scores": {**_means(columns), **repeated(outcomes)},
    }


def _means(columns: Mapping[str, list]) -> dict[str, float]:
    """Mean of every further score over the samples that have it."""
    values = {
        name.removeprefix(SCORE): [value for value in column if value is not None]
        for name, column in columns.items()
        if name.startswith(SCORE)
    }
    return {name: fmean(column) for name, column in values.items() if column}


def _short(value: Any) -> Any:
    """Seconds to the microsecond: more digits are noise and cost space."""
    return round(value, 6) if isinstance(value, float) else value


def _number(value: float | None) -> float | None:
    """The value; None if it is absent or NaN (not graded)."""
    return None if value is None or math.isnan(value) else float(value)
