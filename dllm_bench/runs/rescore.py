"""Grade stored texts again, with the current scorers or with other benchmark settings.

The texts come from samples.jsonl, as they were before any cut, so no model is needed. With the
run's own settings, a sealed record is rewritten if a grade changed; with other settings nothing is
stored, since that would be another run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.core.benchmark import JUDGE_ERROR
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.cache import Compose, on_this_machine
from dllm_bench.store.files import write_atomic
from dllm_bench.store.groups import BenchmarkGroup, Plain, RunConfig
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.lock import Lock
from dllm_bench.store.record import RunRecord, whole_texts
from dllm_bench.store.seal import seal
from dllm_bench.store.store import LOCK, RECORD, SAMPLES, RunEntry, read_record, read_samples

DECODED = {"max_new_tokens", "shots", "template", "chat"}  # settings that grading does not read
SHOWN = 20  # changed samples that are listed one by one


@dataclass(frozen=True)
class Rescored:
    """Result of grading again."""

    record: RunRecord  # with the new grades
    before: RunRecord | None  # the stored record; None for a partial run
    stored: bool  # whether the new record was written

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        """Sample id -> (verdict before, verdict now), of the samples whose grade changed."""
        if self.before is None:
            return {}
        old, new = self.before.grades, self.record.grades
        return {key: (old[key].verdict, new[key].verdict) for key in new if old[key] != new[key]}


def settings(entry: RunEntry, changes: Mapping[str, Any], compose: Compose) -> Plain:
    """Return the run's benchmark settings with `changes`; data and consent are this machine's."""
    known = [key for key in entry.spec.benchmark if key not in DECODED]
    if unknown := sorted(set(changes) - set(known)):
        raise DllmBenchError(
            f"The grading of benchmark {entry.spec.benchmark.name!r} has no setting "
            f"{unknown[0]!r}; it has {', '.join(known)}."
        )
    return {**on_this_machine("benchmark", entry.spec.benchmark, compose), **changes}


def rescore(entry: RunEntry, plain: Plain) -> Rescored:
    """Grade the run's samples with benchmark settings `plain`. A sealed record is rewritten if
    these are its own settings and a grade changed.

    Raises DllmBenchError if grading fails for more samples than when the run was sealed.
    """
    stored = read_samples(entry.path)
    if not stored:
        raise DllmBenchError(
            f"Run {entry.spec.short} has no stored text at {entry.path}; decode it again with the "
            "command that made it."
        )
    before = read_record(entry.path)
    if before:
        check_ids(entry, before, stored)
    # a run that is being continued has more samples than its record
    samples = [stored[key] for key in (before.columns["id"] if before else stored)]
    scores = benchmark_of(plain).score(whole_texts(samples))
    sessions = before.sessions if before else []
    ungraded = before.verdicts.get(JUDGE_ERROR, 0) if before else 0
    allowed = replace(entry.spec, runtime=RunConfig({"max_judge_errors": ungraded}))
    record = seal(allowed, samples, scores, sessions, time.time())
    rescored = Rescored(record, before, stored=False)
    own = replace(entry.spec, benchmark=BenchmarkGroup(plain)) == entry.spec
    if not (own and rescored.changed):
        return rescored
    with Lock(entry.path / LOCK):
        if read_record(entry.path) != before:
            raise DllmBenchError(
                f"Run {entry.spec.short} was sealed anew while its texts were graded, so these "
                "grades are not stored; give the same command again."
            )
        write_atomic(entry.path / RECORD, record.to_json())
    return replace(rescored, stored=True)


def check_ids(entry: RunEntry, before: RunRecord, stored: Iterable[str]) -> None:
    """Raise DllmBenchError unless all samples of the sealed record are among the ids stored."""
    sealed = before.columns["id"]
    missing = sorted(set(sealed) - set(stored))
    if not missing:
        return
    raise DllmBenchError(
        f"Run {entry.spec.short} was sealed with {len(sealed)} samples, and {SAMPLES} lacks "
        f"{len(missing)} of them ({missing[0]!r} first); the record stays as it is. To decode "
        f"what is missing, move {entry.path / RECORD} away and give the command that made the run."
    )


def evalplus_lines(entry: RunEntry, plain: Plain) -> list[str]:
    """Return the run's programs as lines of a samples file for `evalplus.evaluate`."""
    benchmark = benchmark_of(plain)
    if not isinstance(benchmark, EvalPlusBenchmark):
        raise DllmBenchError(
            f"Run {entry.spec.short} is of benchmark {plain['name']!r}, which EvalPlus does not "
            "know; choose a run of humaneval_plus or mbpp_plus."
        )
    return list(benchmark.samples(whole_texts(read_samples(entry.path).values())))


def report(rescored: Rescored) -> list[str]:
    """Return the changes, one per line."""
    lines = [f"{key}: {old} -> {new}" for key, (old, new) in rescored.changed.items()][:SHOWN]
    rest = len(rescored.changed) - len(lines)
    lines += [f"and {rest} more"] if rest > 0 else []
    now = {"primary": rescored.record.score.mean} if rescored.record.score else {}
    scores = {**now, **rescored.record.scores}
    width = max(map(len, scores), default=0)
    lines += [f"{name:{width}} {100 * mean:6.1f} %" for name, mean in scores.items()]
    count = f"{len(rescored.changed)} of {len(rescored.record.columns['id'])} samples changed"
    kept = "record rewritten" if rescored.stored else "nothing written"
    return [*lines, f"{count}; {kept}" if rescored.before else f"not sealed yet; {kept}"]
