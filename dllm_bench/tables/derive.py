"""Derived numbers: ratios, differences, averages and areas of measured ones, with their intervals.

A planned cell with parts is computed from these, at any depth. Its interval is a percentile
bootstrap of the whole formula: runs of one benchmark draw the same items (paired), different
benchmarks draw independently. An item that was decoded several times is drawn with all its samples.
That needs numbers that are means or ratios of sums over samples, and runs that share all items;
other numbers (extremes, percentiles) have no interval. Which points of a curve count, and in which
order, is decided once, by the measured values, for all resamples.

A number made of times also differs from pass to pass over the same items. With several passes its
interval is that of a second measurement of as many passes: each resample is multiplied by
exp(t s √(2 ÷ R)), with s the standard deviation between the R passes, relative to their mean, and t
drawn from Student's t distribution of R − 1 degrees of freedom. (Drawing passes with replacement
would be too narrow: its variance is (R − 1) ÷ R of s², and few passes hardly know s.) The 2 is
there because a second measurement is as uncertain as the first. Two runs draw independently.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Any, TypeVar

from dllm_bench.benchmarks.items import item_id_of, repetition_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions, tradeoff
from dllm_bench.metrics.accuracy import LEVEL, RESAMPLES
from dllm_bench.metrics.metric import MetricDefinition, TotalRatio
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.store.record import RunRecord
from dllm_bench.tables.plan import PlannedCell
from dllm_bench.tables.spec import CUT, Query, TableMetric

PERCENT = 100
DIGITS = 9  # of resampled numbers; further digits of float sums differ between processors
Key = TypeVar("Key", bound=Hashable)
N = TypeVar("N", float, Any)  # a number, or an array of numbers, one per resample
Interval = tuple[float, float]  # low, high
Amount = tuple[float, float]  # what is added to the two sums of a ratio


@dataclass(frozen=True)
class ItemSums:
    """A number as sum of `tops` ÷ sum of `bottoms` over the items of a benchmark."""

    benchmark: str
    """Name of the benchmark."""
    seed: int
    """Seed of the run."""
    run: str
    """Hash of the run."""
    ids: tuple[str, ...]
    """Ids of the items."""
    tops: tuple[float, ...]
    """What each item adds to the numerator; 0 for an item without the number."""
    bottoms: tuple[float, ...]
    """What each item adds to the denominator; 0 for an item without the number."""
    passes: tuple[Amount, ...] = ()
    """The same two sums for each pass over the items, of a number that is made of times."""


def combine(planned: PlannedCell, leaf: Callable[[PlannedCell], N]) -> N:
    """The formula of a cell, in the metric's unit; `leaf` gives the values of its leaves, the cells
    without parts.
    """
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
    """A derived number and its interval; None if a part has no number, a divisor is zero or a curve
    has no area.
    """
    values = {id(leaf): plain_value(leaf) for leaf in leaves_of(planned)}
    numbers = {key: value for key, value in values.items() if value is not None}
    if len(numbers) < len(values):
        return None, None
    try:
        value = float(combine(planned, lambda part: numbers[id(part)]))
    except (ZeroDivisionError, DllmBenchError):
        return None, None
    metric = planned.cell.metric
    if metric.is_compared and planned.parts[0].runs == planned.parts[1].runs:
        return value, None  # a run compared with itself
    return value, bootstrap(planned)


def plain_value(planned: PlannedCell) -> float | None:
    """The number of a cell that has a run of its own; None if it is undefined."""
    record, metric = planned.run.record, planned.cell.metric
    if record is None:
        return None
    if metric.is_score:
        return PERCENT * record.score.mean if record.score else None
    return definitions.definition(metric.definition)(record.sample_stats)


@dataclass(frozen=True)
class Curve:
    """The curve that an area is taken of."""

    points: Mapping[str, tuple[float, float]]
    """The points that count, from slow to fast: name -> (x, score)."""
    left_out: Query
    """Names of the points that do not count, because they lost too much score."""
    y_max: float
    """The best score of all rows."""
    best: str
    """The row that has it."""
    rows: Query
    """All rows that the table has for this model and benchmark."""


def has_curve(planned: PlannedCell) -> bool:
    """True for an area itself; False for averages and ratios of areas."""
    areas = [bool(one.cell.metric.area) for one in (planned, *planned.parts)]
    return areas[0] and not any(areas[1:])


def curve_of(planned: PlannedCell) -> Curve:
    """The curve of an area whose runs are sealed; raises DllmBenchError if it has no area."""
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
    """The area under the points that count by their measured values."""
    import numpy as np

    names = planned.cell.curve
    indices = [names.index(name) for name in curve_of(planned).points]
    points = [(numbers[i], numbers[len(names) + i]) for i in indices]
    return tradeoff.area(points, reduce(np.maximum, numbers[len(names) :]))


def item_sums(metric: TableMetric, record: RunRecord) -> ItemSums | None:
    """A metric's number as sums over items; None if it is no mean or ratio of sums."""
    spec = record.spec
    head = (str(spec.benchmark["name"]), spec.seed, record.identity_hash)
    if metric.is_score:
        graded = record.values
        tops = tuple(PERCENT * value for value in graded.values())
        return ItemSums(*head, tuple(graded), tops, (1.0,) * len(tops))
    definition, stats = definitions.definition(metric.definition), record.sample_stats
    amounts = _amounts(definition, stats)
    items = _sums_by(map(item_id_of, record.columns["id"]), amounts)
    passes = _sums_by(map(repetition_of, record.columns["id"]), amounts)
    sums = ItemSums(*head, tuple(items), *zip(*items.values(), strict=True))
    value, divisor = definition(stats), sum(sums.bottoms)
    if value is None or not divisor or not math.isclose(value, sum(sums.tops) / divisor):
        return None
    return replace(sums, passes=tuple(passes.values())) if metric.is_of_times else sums


def _amounts(definition: MetricDefinition, stats: Sequence[SampleStats]) -> list[Amount]:
    """What every sample adds to the sums of a ratio, or of a mean."""
    if isinstance(definition.function, TotalRatio):
        return [definition.function.amounts(sample) for sample in stats]
    values = [definition([sample]) for sample in stats]
    return [(0.0, 0.0) if value is None else (value, 1.0) for value in values]


def _sums_by(keys: Iterable[Key], amounts: Iterable[Amount]) -> dict[Key, Amount]:
    """The amounts of each key's samples, summed."""
    sums: dict[Key, Amount] = {}
    for key, (top, bottom) in zip(keys, amounts, strict=True):
        tops, bottoms = sums.get(key, (0.0, 0.0))
        sums[key] = (tops + top, bottoms + bottom)
    return sums


def bootstrap(planned: PlannedCell) -> Interval | None:
    """Interval of a number, plain or derived, by resampling the items of its runs; None if it has
    none (see above).
    """
    import numpy as np

    drawn = resampled(planned)
    if drawn is None:
        return None
    ends = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
    low, high = np.quantile(np.round(drawn, DIGITS), ends)  # the same bytes on every processor
    return float(low), float(high)


def resampled(planned: PlannedCell) -> Any:
    """The number of a cell in every resample of its runs' items, as an array; None if resampling
    is not defined for it (see above).
    """
    import numpy as np

    leaves = leaves_of(planned)
    sums: dict[int, ItemSums] = {}
    for leaf in leaves:
        of_leaf = item_sums(leaf.cell.metric, leaf.run.record) if leaf.run.record else None
        if of_leaf:
            sums[id(leaf)] = of_leaf
    items = {(one.benchmark, one.ids) for one in sums.values()}
    paired = len(items) == len({benchmark for benchmark, _ in items})
    if len(sums) < len(leaves) or not paired or any(len(ids) < 2 for _, ids in items):
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = combine(planned, lambda leaf: _draw(sums[id(leaf)]))
    return drawn if np.isfinite(drawn).all() else None


def leaves_of(planned: PlannedCell) -> list[PlannedCell]:
    """The cells without parts that a cell is computed from; the cell itself if it has none."""
    return [leaf for part in planned.parts for leaf in leaves_of(part)] or [planned]


def _draw(sums: ItemSums) -> Any:
    """The number in every resample, as an array."""
    counts = _draws(sums.benchmark, len(sums.ids), sums.seed)
    drawn = (counts @ list(sums.tops)) / (counts @ list(sums.bottoms))
    return drawn * _second_measurement(sums) if len(sums.passes) > 1 else drawn


def _second_measurement(sums: ItemSums) -> Any:
    """What the number of times is multiplied by in each resample, as an array; see above."""
    import numpy as np

    tops, bottoms = np.array(sums.passes).T
    numbers, n = tops / bottoms, len(tops)
    spread = numbers.std(ddof=1) / numbers.mean()
    rng = np.random.default_rng([sums.seed, zlib.crc32(sums.run.encode())])
    with np.errstate(over="ignore"):  # two passes tell next to nothing: an end is infinite then
        return np.exp(rng.standard_t(n - 1, RESAMPLES) * spread * math.sqrt(2 / n))


@lru_cache(maxsize=4)
def _draws(benchmark: str, n: int, seed: int) -> Any:
    """How often each of `n` items is in each resample, as an array of resamples × items; equal for
    all runs of a benchmark.
    """
    import numpy as np

    rng = np.random.default_rng([seed, zlib.crc32(benchmark.encode())])
    picked = rng.integers(n, size=(RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(picked.ravel(), minlength=RESAMPLES * n)
    return counts.reshape(RESAMPLES, n).astype(float)
