"""Made-up sample stats for tests: a plain sample with the values changed that a test is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dllm_bench.metrics.sample_stats import SampleStats


def sample(**changes: Any) -> SampleStats:
    """One sample; keyword arguments replace single values."""
    counts = dict.fromkeys(("allocated", "committed", "content", "emitted"), 8)
    costs = {"forwards": 4, "rows": 32, "forced": 0}
    times = {"seconds": 1.0, "steps_s": 0.9, "first_step_s": 0.1}
    plain: dict[str, Any] = {**counts, **costs, **times, "truncated": False, "empty": False}
    return SampleStats(**{**plain, **changes})


def drafted(rounds: Sequence[Sequence[int]], **changes: Any) -> SampleStats:
    """A sample decoded in `rounds` of (proposed, accepted, committed)."""
    return sample(rounds=[list(made) for made in rounds], **changes)
