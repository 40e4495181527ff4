"""Grading stored texts again: same run with today's scorers, or another reading of the same texts.

The texts come from samples.jsonl, raw where the run cut them, so that no model is needed. With the
run's own settings a sealed record is written anew if a grade changed; with other settings nothing
is stored, since that would be another run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from dllm_bench.benchmarks.evalplus import EvalPlusBenchmark
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.files import Lock, write_atomic
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.seal import seal
from dllm_bench.store.store import LOCK, RECORD, RunEntry, read_record, read_samples

Plain = dict[str, Any]
SHOWN = 20  # changed samples that are listed one by one


@dataclass(frozen=True)
class Rescored:
    """The new record, the stored one (None for a partial run), and whether it was written."""

    record: RunRecord
    before: RunRecord | None
    stored: bool

    @property
    def changed(self) -> dict[str, tuple[str, str]]:
        """Sample -> (verdict before, verdict now), where value or verdict differ."""
        if self.before is None:
            return {}
        old, new = ({**_grades(r)} for r in (self.before, self.record))
        return {key: (old[key][1], new[key][1]) for key in new if old.get(key) != new[key]}


def _grades(record: RunRecord) -> dict[str, tuple[float | None, str]]:
    columns = record.columns
    pairs = zip(columns["value"], columns["verdict"], strict=True)
    return dict(zip(columns["id"], pairs, strict=True))


def changes(asked: Sequence[str]) -> Plain:
    """The values of settings written NAME=VALUE, read as yaml."""
    found = {}
    for text in asked:
        name, _, value = text.partition("=")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise DllmBenchError(f"{text!r} cannot be read; write NAME=VALUE.") from error
    return found


def settings(entry: RunEntry, changes: Mapping[str, Any]) -> Plain:
    """The run's benchmark settings with `changes` (None: keep)."""
    unknown = sorted(set(changes) - set(entry.spec.benchmark))
    if unknown:
        raise DllmBenchError(
            f"Benchmark {entry.spec.benchmark['name']!r} has no setting {unknown[0]!r}; it has "
            f"{', '.join(entry.spec.benchmark)}."
        )
    return {**entry.spec.benchmark, **changes}


def rescore(entry: RunEntry, plain: Plain) -> Rescored:
    """Grade what the run has; a sealed record is written anew where its own grades changed."""
    samples = list(read_samples(entry.path).values())
    if not samples:
        raise DllmBenchError(
            f"Run {entry.spec.short} has no stored text at {entry.path}; decode it again with the "
            "command that made it."
        )
    scores = benchmark_of(plain).score(texts(samples))
    before = read_record(entry.path)
    order = {key: i for i, key in enumerate(before.columns["id"])} if before else {}
    samples.sort(key=lambda sample: order.get(sample.id, len(order)))
    sessions = before.sessions if before else []
    record = seal(entry.spec, samples, scores, sessions, time.time())
    made = Rescored(record, before, stored=False)
    own = replace(entry.spec, benchmark=plain) == entry.spec
    if not (own and made.changed):
        return made
    _write(entry.path, record)
    return replace(made, stored=True)


def texts(samples: Sequence[SampleRecord]) -> dict[str, str]:
    """What the model wrote, before any stop string."""
    return {sample.id: sample.raw or sample.text for sample in samples}


def evalplus_lines(entry: RunEntry, plain: Plain) -> list[str]:
    """The run's programs as lines of a samples file for `evalplus.evaluate`."""
    benchmark = benchmark_of(plain)
    if not isinstance(benchmark, EvalPlusBenchmark):
        raise DllmBenchError(
            f"Run {entry.spec.short} is of benchmark {plain['name']!r}, which EvalPlus does not "
            "know; choose a run of humaneval_plus or mbpp_plus."
        )
    return list(benchmark.samples(texts(list(read_samples(entry.path).values()))))


def _write(folder: Path, record: RunRecord) -> None:
    lock = Lock(folder / LOCK)
    lock.acquire()
    try:
        write_atomic(folder / RECORD, record.to_json())
    finally:
        lock.release()


def report(made: Rescored) -> list[str]:
    """What came of it, one fact a line."""
    lines = [f"{key}: {old} -> {new}" for key, (old, new) in made.changed.items()][:SHOWN]
    rest = len(made.changed) - len(lines)
    lines += [f"and {rest} more"] if rest > 0 else []
    now = {"primary": made.record.score.mean} if made.record.score else {}
    scores = {**now, **made.record.scores}
    width = max(map(len, scores), default=0)
    lines += [f"{name:{width}} {100 * mean:6.1f} %" for name, mean in scores.items()]
    count = f"{len(made.changed)} of {len(made.record.columns['id'])} samples changed"
    kept = "record written anew" if made.stored else "nothing written"
    return [*lines, f"{count}; {kept}" if made.before else f"not sealed yet; {kept}"]
