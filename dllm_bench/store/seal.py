"""Make the record of a complete run from its samples and scores, and cut it to fewer items.

A record also says which settings had no effect, each with the share of the samples it left
unchanged: that often explains a surprising number (a chat template on a model without chat turns, a
lookahead whose branches never win). Only the stored samples are looked at, and only the settings
listed here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import fmean
from typing import Any

from dllm_bench.core.benchmark import JUDGE_ERROR, SampleScore
from dllm_bench.core.decoder import Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import mean_score, repeated
from dllm_bench.metrics.sample_stats import SampleStats, from_columns
from dllm_bench.registry import instantiate
from dllm_bench.store.groups import BenchmarkGroup, setting_in
from dllm_bench.store.inputs import PIECES, decoder_of
from dllm_bench.store.record import SCORE, RunRecord, SampleRecord, Session, graded
from dllm_bench.store.spec import RunSpec


def seal(
    spec: RunSpec,
    samples: Sequence[SampleRecord],
    scores: Mapping[str, SampleScore],
    sessions: Sequence[Session],
    sealed_at: float,
) -> RunRecord:
    """Return the record of a complete run.

    samples: in request order; scores: one per sample, by id; sealed_at: seconds since the epoch.
    Raises DllmBenchError if grading failed for more samples than `max_judge_errors` allows.
    """
    check_judge_errors(spec, scores)
    stats = [sample.stats() for sample in samples]
    grades = [scores[sample.id] for sample in samples]
    columns: dict[str, list] = {"id": [sample.id for sample in samples]}
    columns["value"] = [_number(score.value) for score in grades]
    columns["verdict"] = [str(score.verdict) for score in grades]
    for name in SampleStats.columns():
        column = [getattr(one, name) for one in stats]
        # microseconds: more digits are noise and cost space
        column = [round(value, 6) if isinstance(value, float) else value for value in column]
        if name in SampleStats.required() or any(value not in (None, []) for value in column):
            columns[name] = column
    for name in sorted({name for score in scores.values() for name in score.metrics}):
        columns[f"{SCORE}{name}"] = [_number(score.metrics.get(name)) for score in grades]
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

    Samples without a grade do not count in the mean, so they are only left out on request.
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
    """Return the record of only the first `limit` items, in the benchmark's order (None: all).

    Data that are not stored per sample (sessions, settings without effect) stay those of the whole
    record.
    """
    if limit is None or limit >= record.items:
        return record
    part = record.of_items(set(list(dict.fromkeys(record.item_ids))[:limit]))
    spec = replace(record.spec, limit=limit)
    return replace(part, spec=spec, **_summary(part.columns, spec.seed))


def _summary(columns: Mapping[str, list], seed: int) -> dict[str, Any]:
    """Return the fields of a record that are computed from its columns."""
    outcomes = list(graded(columns).values())
    return {
        "score": mean_score([fmean(values) for values in outcomes], seed=seed),
        "summary": definitions.measure_all(from_columns(columns)),
        "scores": {**_means(columns), **repeated(outcomes)},
    }


def _means(columns: Mapping[str, list]) -> dict[str, float]:
    """Return the mean of every further score over the samples that have it."""
    values = {
        name.removeprefix(SCORE): [value for value in column if value is not None]
        for name, column in columns.items()
        if name.startswith(SCORE)
    }
    return {name: fmean(column) for name, column in values.items() if column}


def _number(value: float | None) -> float | None:
    """Return the value; None if it is absent or NaN (not graded)."""
    return None if value is None or math.isnan(value) else float(value)


# --- settings without effect ----------------------------------------------------------------------


HasNoEffect = Callable[[SampleRecord], bool]
CHAT, MULTITURN = "chat", "chat_multiturn"


def settings_without_effect(spec: RunSpec, samples: Sequence[SampleRecord]) -> dict[str, float]:
    """Return setting -> share of the samples on which it had no effect, without shares of 0."""
    checks = {**_of_benchmark(spec.benchmark), **_of_decoder(spec.decoder), **_of_seed(spec)}
    shares = {name: sum(map(check, samples)) / len(samples) for name, check in checks.items()}
    return {name: share for name, share in sorted(shares.items()) if share > 0}


def _of_seed(spec: RunSpec) -> dict[str, HasNoEffect]:
    """Check for a seed other than the default if no decoder of the run draws by it.

    Nothing is known of what pieces from outside draw, or of a server's decoder.
    """
    if not spec.seed or PIECES in spec.inputs:
        return {}
    with suppress(DllmBenchError):
        decoders = map(decoder_of, filter(None, (spec.decoder, spec.baseline)))
        if not any(decoder.summary().uses_seed for decoder in decoders):
            return {"seed": lambda sample: True}
    return {}


def _of_benchmark(benchmark: BenchmarkGroup) -> dict[str, HasNoEffect]:
    """Check for a chat template without chat turns, one turn per example without examples,
    `escape_until` with nothing to escape, and stop strings that cut nothing.
    """
    template, stop, escapes = benchmark.template, benchmark.stop, benchmark.escape_until
    checks: dict[str, HasNoEffect] = {}
    without_turns = template.startswith(CHAT) and not benchmark.chat
    if without_turns or (template == MULTITURN and not benchmark.shots):
        checks["benchmark.template"] = lambda sample: True
    if escapes and not stop:
        checks["benchmark.escape_until"] = lambda sample: True
    if benchmark.hard_stop or (stop and not escapes):
        checks["benchmark.stop"] = lambda sample: "stop" not in sample.cut
    return checks


def _of_decoder(decoder: Mapping[str, Any]) -> dict[str, HasNoEffect]:
    """Return checks for pieces without effect.

    They are branches that never win, a cache that is never read, an end token that never occurs,
    and a reviser that changes nothing.
    """
    checks: dict[str, HasNoEffect] = {}
    slots = ("explore", "cache", "stop", "revise")
    explore, cache, stop, revise = (_piece_of(decoder, slot) for slot in slots)
    if explore is not None and Condition.ONE_BRANCH not in explore.gives:
        copies = 2 if setting_in(decoder, "guidance") else 1
        checks["decoder.explore"] = lambda sample: _base_always_wins(sample, copies)
    if cache is not None and Condition.NO_CACHE not in cache.gives:
        checks["decoder.cache"] = _reads_nothing
    if stop is not None and Condition.STOPS_ON_END in stop.gives:  # rules that combine others vary
        checks["decoder.stop"] = lambda sample: "eos" not in sample.cut
    if revise is not None and Condition.NO_CHANGES not in revise.gives:
        checks["decoder.revise"] = lambda sample: not any(sample.trace.get("changes", ()))
    return checks


def _piece_of(decoder: Mapping[str, Any], slot: str) -> Any:
    """Make the piece in a slot; None if it is of another slot or its plug-in is not installed."""
    with suppress(DllmBenchError):
        return instantiate(decoder.get(slot), slot)
    return None


def _reads_nothing(sample: SampleRecord) -> bool:
    """Return whether no forward read from the cache: no position and, where stored, no byte."""
    forwards = Trace.from_columns(sample.trace).forwards
    return not any(forward.cached or forward.read_bytes for forward in forwards)


def _base_always_wins(sample: SampleRecord, copies: int) -> bool:
    """Return whether the base branch won in every forward.

    copies: of each branch, in a forward; 2 under guidance.
    """
    forwards = Trace.from_columns(sample.trace).forwards
    return all(forward.winner == forward.branches // copies - 1 for forward in forwards)
