"""Derived numbers: ratios, differences and averages of measured ones, with their intervals.

A planned cell with parts is computed from them, at any depth. The interval is a percentile
bootstrap of the whole formula: runs of one benchmark draw the same items (paired), benchmarks are
drawn apart. It needs numbers that are means or ratios of sums over samples, and runs that share all
items; otherwise there is none. Extremes and percentiles have none.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import LEVEL, RESAMPLES
from dllm_bench.metrics.numbers import TotalRatio
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import Metric

if TYPE_CHECKING:
    from dllm_bench.runs.record import RunRecord

PERCENT = 100
DIGITS = 9  # of resampled numbers; sums of floats differ between processors beyond
SCORE_UNIT = "%"
N = TypeVar("N", float, Any)  # a number, or an array of resampled ones
Interval = tuple[float, float]


@dataclass(frozen=True)
class Samples:
    """A number as sum of `tops` ÷ sum of `bottoms` over items; a sample without one has 0 and 0."""

    benchmark: str
    seed: int
    ids: tuple[str, ...]
    tops: tuple[float, ...]
    bottoms: tuple[float, ...]


def unit_of(metric: Metric) -> str:
    """The unit of a metric's number."""
    if metric.over:
        return "%" if metric.gain else "×"
    if metric.setting:
        return ""
    if metric.is_score:
        return "points" if metric.minus else SCORE_UNIT
    return definitions.definition(metric.definition).unit


def combine(planned: PlannedCell, leaf: Callable[[PlannedCell], N]) -> N:
    """The formula of a cell over its leaves, in the metric's unit."""
    if not planned.parts:
        return leaf(planned)
    numbers = [combine(part, leaf) for part in planned.parts]
    metric = planned.cell.metric
    if metric.over:
        ratio = numbers[0] / numbers[1]
        return PERCENT * (ratio - 1) if metric.gain else ratio
    if metric.minus:
        return numbers[0] - numbers[1]
    return sum(numbers) / len(numbers)


def derived(
    planned: PlannedCell, leaf: Callable[[PlannedCell], float | None]
) -> tuple[float | None, Interval | None]:
    """A derived number and its interval; None where a part has none or a base is zero."""
    leaves = _leaves(planned)
    values = {id(part): leaf(part) for part in leaves}
    numbers = {key: value for key, value in values.items() if value is not None}
    if len(numbers) < len(values):
        return None, None
    try:
        value = combine(planned, lambda part: numbers[id(part)])
    except ZeroDivisionError:
        return None, None
    metric = planned.cell.metric
    if (metric.over or metric.minus) and planned.parts[0].runs == planned.parts[1].runs:
        return value, None  # a number against itself
    return value, bootstrap(planned)


def samples(metric: Metric, record: RunRecord) -> Samples | None:
    """The per-item parts of a metric's number, None where it has none."""
    spec = record.spec
    head = (str(spec.benchmark["name"]), spec.seed)
    if metric.is_score:
        graded = record.values
        tops = tuple(PERCENT * value for value in graded.values())
        return Samples(*head, tuple(graded), tops, (1.0,) * len(tops))
    definition, facts = definitions.definition(metric.definition), record.facts
    ids = tuple(record.columns["id"])
    if isinstance(definition.function, TotalRatio):
        pairs = [definition.function.amounts(fact) for fact in facts]
    else:
        each = [definition([fact]) for fact in facts]
        pairs = [(0.0, 0.0) if value is None else (value, 1.0) for value in each]
    found = Samples(*head, ids, *(tuple(map(float, side)) for side in zip(*pairs, strict=True)))
    value, divisor = definition(facts), sum(found.bottoms)
    mean = value is not None and divisor and math.isclose(value, sum(found.tops) / divisor)
    return found if mean else None


def bootstrap(planned: PlannedCell) -> Interval | None:
    """Interval of a number, plain or derived, by resampling the items of its runs."""
    import numpy as np

    leaves = _leaves(planned)
    found = {
        id(leaf): samples(leaf.cell.metric, leaf.run.record) for leaf in leaves if leaf.run.record
    }
    known = {key: sample for key, sample in found.items() if sample}
    items = {(sample.benchmark, sample.ids) for sample in known.values()}
    paired = len(items) == len({benchmark for benchmark, _ in items})
    if len(known) < len(leaves) or not paired or any(len(ids) < 2 for _, ids in items):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = combine(planned, lambda leaf: _resampled(known[id(leaf)]))
    if not np.isfinite(drawn).all():
        return None
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.round(drawn, DIGITS), ends)  # the same bytes on every processor
    return float(low), float(high)


def _leaves(planned: PlannedCell) -> list[PlannedCell]:
    return [leaf for part in planned.parts for leaf in _leaves(part)] or [planned]


def _resampled(sample: Samples) -> Any:
    """The number over every resample, as an array."""
    counts_RN = _draws(sample.benchmark, len(sample.ids), sample.seed)
    return (counts_RN @ list(sample.tops)) / (counts_RN @ list(sample.bottoms))


@lru_cache(maxsize=4)
def _draws(benchmark: str, n: int, seed: int) -> Any:
    """How often each of `n` items is in each resample; the same for all runs of a benchmark."""
    import numpy as np

    rng = np.random.default_rng([seed, zlib.crc32(benchmark.encode())])
    picked_RN = rng.integers(n, size=(RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(picked_RN.ravel(), minlength=RESAMPLES * n)
    return counts.reshape(RESAMPLES, n).astype(float)
