"""Made-up samples for tests: a plain one with the values changed that a test is about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dllm_bench.core.trace import Trace
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.tables.derive import measure_run


def sample(**changes: Any) -> SampleStats:
    """Return one sample; keyword arguments replace single values."""
    counts = dict.fromkeys(("allocated", "committed", "content", "emitted"), 8)
    costs = {"forwards": 4, "rows": 32, "forced": 0}
    times = {"seconds": 1.0, "steps_s": 0.9, "first_step_s": 0.1}
    plain: dict[str, Any] = {**counts, **costs, **times, "truncated": False, "empty": False}
    return SampleStats(**{**plain, **changes})


def drafted(rounds: Sequence[Sequence[int]], **changes: Any) -> SampleStats:
    """Return a sample decoded in `rounds` of (proposed, accepted, committed)."""
    return sample(rounds=[[n for n in made if n is not None] for made in rounds], **changes)


def stored_sample(
    ids: Sequence[int], born: Sequence[int], trace: Trace, **changes: Any
) -> SampleRecord:
    """Return one sample as a run stores it; keyword arguments replace single fields."""
    texts = {"id": "a", "prompt_sha256": "", "text": "text"}
    tokens = {"ids": list(ids), "born": list(born), "cut": {"length": len(ids)}, "counts": {}}
    times = {"seconds": 0.01, "first_step_s": 0.005, "started_at": 0.0, "session": 0}
    columns = json.loads(json.dumps(trace.columns()))
    plain: dict[str, Any] = {**texts, **tokens, **times, "trace": columns}
    return SampleRecord(**{**plain, **changes})


def record_of(samples: Sequence[SampleStats], ids: Sequence[str] = ()) -> RunRecord:
    """Return a record of these samples, each of an item of its own unless their `ids` say
    otherwise."""
    spec = RunSpec(model={"name": "m"}, decoder={}, benchmark={"name": "b"}, hardware={})
    columns = {name: [getattr(one, name) for one in samples] for name in SampleStats.columns()}
    columns["id"] = list(ids) or [f"item-{i}" for i in range(len(samples))]
    return RunRecord(spec, "0" * 64, None, {}, columns, [], 0.0)


def interval(name: str, samples: Sequence[SampleStats]) -> tuple[float, float] | None:
    """Return the interval of a metric of a run of these samples."""
    return measure_run(name, record_of(samples))[1]
