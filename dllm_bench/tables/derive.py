"""Derived numbers: ratios, differences, averages and areas of measured ones, with their intervals.

A planned cell with parts is computed from them, at any depth. The interval is a percentile
bootstrap of the whole formula: runs of one benchmark draw the same items (paired), benchmarks are
drawn apart. It needs numbers that are means or ratios of sums over samples, and runs that share all
items; otherwise there is none. Extremes and percentiles have none. Which points of a curve count,
and in which order, is what was measured, in every resample.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, TypeVar

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions, tradeoff
from dllm_bench.metrics.accuracy import LEVEL, RESAMPLES
from dllm_bench.metrics.metric import TotalRatio
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import CUT, Query, TableMetric

if TYPE_CHECKING:
    from dllm_bench.store.record import RunRecord

PERCENT = 100
DIGITS = 9  # of resampled numbers; sums of floats differ between processors beyond
SCORE_UNIT = "%"
N = TypeVar("N", float, Any)  # a number, or an array of resampled ones
Interval = tuple[float, float]


@dataclass(frozen=True)
class ItemSums:
    """A number as sum of `tops` ÷ sum of `bottoms` over items; a sample without one has 0 and 0."""

    benchmark: str
    seed: int
    ids: tuple[str, ...]
    tops: tuple[float, ...]
    bottoms: tuple[float, ...]


def unit_of(metric: TableMetric) -> str:
    """The unit of a metric's number."""
    if metric.over:
        return "%" if metric.gain else "×"
    if metric.setting:
        return ""
    if metric.area:
        return f"{SCORE_UNIT} × {definitions.definition(metric.definition).unit}"
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
    if has_curve(planned):
        return _area(planned, numbers)
    return sum(numbers) / len(numbers)


def derived(planned: PlannedCell) -> tuple[float | None, Interval | None]:
    """A derived number and its interval; None where a part has none, a base is zero or a curve has
    no area.
    """
    values = {id(leaf): plain_value(leaf) for leaf in _leaves(planned)}
    numbers = {key: value for key, value in values.items() if value is not None}
    if len(numbers) < len(values):
        return None, None
    try:
        value = float(combine(planned, lambda part: numbers[id(part)]))
    except (ZeroDivisionError, DllmBenchError):
        return None, None
    metric = planned.cell.metric
    if (metric.over or metric.minus) and planned.parts[0].runs == planned.parts[1].runs:
        return value, None  # a number against itself
    return value, bootstrap(planned)


def plain_value(planned: PlannedCell) -> float | None:
    """The number of a cell that has a run of its own."""
    record, metric = planned.run.record, planned.cell.metric
    if record is None:
        return None
    if metric.is_score:
        return PERCENT * record.score.mean if record.score else None
    return definitions.definition(metric.definition)(record.sample_stats)


@dataclass(frozen=True)
class Curve:
    """What an area was taken of. points: those that count, from slow to fast, name -> (x, score);
    left_out: those that lost too much; y_max: the best score, of the run `best` among `rows`, all
    that the table has for this model and benchmark.
    """

    points: Mapping[str, tuple[float, float]]
    left_out: Query
    y_max: float
    best: str
    rows: Query


def has_curve(planned: PlannedCell) -> bool:
    """Whether a cell is an area itself, no average or gain of areas."""
    areas = [bool(one.cell.metric.area) for one in (planned, *planned.parts)]
    return areas[0] and not any(areas[1:])


def curve_of(planned: PlannedCell) -> Curve:
    """The curve of an area whose runs are sealed; a sentence where it has no area."""
    names = planned.cell.curve
    numbers = [plain_value(part) for part in planned.parts]
    xs, scores = numbers[: len(names)], numbers[len(names) :]
    [facet] = [facet for facet, value in planned.cell.values.items() if value.curve]
    rows = tuple(part.cell.keys[facet] for part in planned.parts[len(names) :])
    known = {row: score for row, score in zip(rows, scores, strict=True) if score}
    points = [(x, y) for x, y in zip(xs, scores, strict=False) if x is not None and y is not None]
    if len(points) < len(names) or not known:
        raise DllmBenchError("A point has no number, or no run scores above 0.")
    counted = [names[i] for i in tradeoff.within_drop(points, cut=planned.cell.metric.area == CUT)]
    best = max(known, key=lambda row: known[row])
    return Curve(
        points={name: points[names.index(name)] for name in counted},
        left_out=tuple(name for name in names if name not in counted),
        y_max=known[best],
        best=best,
        rows=rows,
    )


def _area(planned: PlannedCell, numbers: Sequence[N]) -> N:
    """The area under the points that counted when measured."""
    import numpy as np

    names = planned.cell.curve
    at = [names.index(name) for name in curve_of(planned).points]
    points = [(numbers[i], numbers[len(names) + i]) for i in at]
    return tradeoff.area(points, reduce(np.maximum, numbers[len(names) :]))


def item_sums(metric: TableMetric, record: RunRecord) -> ItemSums | None:
    """The per-item parts of a metric's number, None where it has none."""
    spec = record.spec
    head = (str(spec.benchmark["name"]), spec.seed)
    if metric.is_score:
        graded = record.values
        tops = tuple(PERCENT * value for value in graded.values())
        return ItemSums(*head, tuple(graded), tops, (1.0,) * len(tops))
    definition, facts = definitions.definition(metric.definition), record.sample_stats
    ids = tuple(record.columns["id"])
    if isinstance(definition.function, TotalRatio):
        pairs = [definition.function.amounts(fact) for fact in facts]
    else:
        each = [definition([fact]) for fact in facts]
        pairs = [(0.0, 0.0) if value is None else (value, 1.0) for value in each]
    found = ItemSums(*head, ids, *(tuple(map(float, side)) for side in zip(*pairs, strict=True)))
    value, divisor = definition(facts), sum(found.bottoms)
    mean = value is not None and divisor and math.isclose(value, sum(found.tops) / divisor)
    return found if mean else None


def bootstrap(planned: PlannedCell) -> Interval | None:
    """Interval of a number, plain or derived, by resampling the items of its runs."""
    import numpy as np

    leaves = _leaves(planned)
    found = {
        id(leaf): item_sums(leaf.cell.metric, leaf.run.record) for leaf in leaves if leaf.run.record
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


def _resampled(sample: ItemSums) -> Any:
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
