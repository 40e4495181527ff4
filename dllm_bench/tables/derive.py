"""Compute the numbers of cells. Value and resamples share one array, so each formula is written
once.

Entry 0 of an array is the data, the others are resamples of its items. Runs of one benchmark draw
the same items (paired), different benchmarks draw independently; an item that was decoded several
times is drawn with all its samples. This requires numbers that are ratios of sums over samples, and
runs over the same items; other numbers (extremes, percentiles) only have entry 0 and no interval. A
planned cell with parts is computed from its parts, at any depth. The measured values decide once,
for all resamples, which points of a curve count and in which order.

The area under a curve of score over tokens per forward is AUP, "accuracy under parallelism", with
the constants of d3LLM's leaderboard. It is relative to a set of methods: scores below the best
known one have a lower weight, so a better one changes the AUP of all of them.

A timing also varies between passes over the same items. With several passes its interval is the
prediction interval for repeating the measurement: each resample is multiplied by exp(t s √(2 ÷ R)),
where s is the standard deviation between the R passes relative to their mean, and t is drawn from
Student's t distribution with R − 1 degrees of freedom. The factor 2 accounts for the uncertainty of
the second measurement. (Drawing passes with replacement would be too narrow: its variance is (R −
1) ÷ R of s², and s is poorly known from few passes.) Two runs draw independently.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeVar

from dllm_bench.benchmarks.items import repetition_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import accuracy, definitions
from dllm_bench.metrics.accuracy import LEVEL, NEARLY, RESAMPLES
from dllm_bench.store.record import RunRecord
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun
from dllm_bench.tables.spec import CUT, SCORE, Cell, Query, TableMetric

PERCENT = 100
ALPHA = 3.0  # of AUP: decay rate of the weight of lower scores
DROP = 5.0  # of AUP: points of score that may be lost
DIGITS = 9  # kept of resampled numbers; later digits of float sums depend on the processor
LARGEST_EXPONENT = 300.0
KEPT = 512  # numbers of runs that are remembered, since cells of a table share them
ENDS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
Key = TypeVar("Key", bound=Hashable)
N = TypeVar("N", float, Any)  # a number, or an array of resampled ones
Interval = tuple[float, float]  # low, high
Items = tuple[str, tuple[str, ...]]  # name of the benchmark, ids


class ResampledNumber(NamedTuple):
    """A number of one run with its resamples."""

    draws: Any
    """A numpy array: the value, then the number in each resample if it has any; NaN: undefined."""
    items: Items
    """What the resamples draw."""


def measure(planned: PlannedCell) -> tuple[float | None, Interval | None]:
    """Compute the number of a cell whose runs are sealed, and its interval if it has one."""
    draws = number_of(planned)
    return (None, None) if math.isnan(draws[0]) else (float(draws[0]), interval(planned, draws))


def measure_run(name: str, record: RunRecord) -> tuple[float | None, Interval | None]:
    """Return the metric called `name` of one run, and its interval if it has one."""
    run = PlannedRun((), CellState.SEALED, spec=record.spec, record=record)
    return measure(PlannedCell(Cell({}, TableMetric(name, name, name), (), "", ()), run))


def interval(planned: PlannedCell, draws: Any) -> Interval | None:
    """Return the interval of a cell's number; `draws` are its resamples.

    Counts give a better one than resamples do, so they are used for a score, a share or a
    difference of scores. None if the number has no interval (see above), or a difference of scores
    one without width.
    """
    record, metric = planned.run.record, planned.cell.metric
    if record and metric.is_score and record.score:
        return PERCENT * record.score.low, PERCENT * record.score.high
    definition = definitions.definition(metric.definition) if record else None
    if record and definition and definition.is_share and definition.ratio:
        ids, amounts = record.item_ids, definition.ratio.amounts(record.samples)
        items, sums = _sums_by(ids, amounts)
        happened, of = sums * len(items) / len(ids)  # repetitions of an item hardly differ
        return accuracy.wilson_of_clusters(happened, of) if of.any() else None
    if len(draws) == 1:
        return None
    is_difference = metric.is_score and metric.minus
    if is_difference and (scores := paired_scores(*planned.parts)):
        found = accuracy.paired_shares(scores, PERCENT)
        return found.low, found.high
    low, high = ends_of(draws)
    return None if low == high and is_difference else (low, high)


def ends_of(draws: Any) -> Interval:
    """Return the interval of a number by its resamples."""
    import numpy as np

    low, high = np.quantile(np.round(draws[1:], DIGITS), ENDS)  # equal bytes on every processor
    return float(low), float(high)


def paired_scores(ours: PlannedCell, theirs: PlannedCell) -> list[tuple[list[float], list[float]]]:
    """Return the right/wrong values of two scores by benchmark, on the items that both graded.

    They are in the items' order; empty for fractional values and for sides of different benchmarks
    or numbers of runs.
    """
    sides, pairs = (records_of(ours), records_of(theirs)), []
    if len(sides[0]) != len(sides[1]):
        return []
    for one, other in zip(*sides, strict=True):
        first, second = one.values, other.values
        shared = sorted(first.keys() & second.keys())
        if not shared or one.spec.benchmark.name != other.spec.benchmark.name:
            return []
        pairs.append(([first[key] for key in shared], [second[key] for key in shared]))
    return pairs if all(accuracy.is_binary([*a, *b]) for a, b in pairs) else []


def number_of(planned: PlannedCell) -> Any:
    """Compute the number of a cell whose runs are sealed, plain or derived.

    Returns an array as `ResampledNumber.draws`.
    """
    import numpy as np

    seed = min((record.spec.seed for record in records_of(planned)), default=0)
    known = {id(c): _plain(c.run, c.cell.metric.definition, seed) for c in leaves_of(planned)}
    compared = planned.cell.metric.is_compared and planned.parts
    if compared and len(timed_on(planned)) > 1:
        return np.array([np.nan])
    is_one_run = compared and planned.parts[0].runs == planned.parts[1].runs
    items = {number.items for number in known.values()}
    # runs of a benchmark draw the same items only if they have the same ones
    are_paired = len(items) == len({benchmark for benchmark, _ in items})
    length = min(len(one.draws) for one in known.values()) if are_paired and not is_one_run else 1
    with np.errstate(all="ignore"):
        draws = _combined(planned, {key: one.draws[:length] for key, one in known.items()})
    if not np.isfinite(draws[0]):
        return np.array([np.nan])
    return draws if np.isfinite(draws).all() else draws[:1]


def _combined(planned: PlannedCell, known: Mapping[int, Any]) -> Any:
    """Compute a cell's formula in the metric's unit.

    known: the numbers of the cells without parts, by their identity.
    """
    if not planned.parts:
        return known[id(planned)]
    numbers = [_combined(part, known) for part in planned.parts]
    metric = planned.cell.metric
    if metric.over:
        ratio = numbers[0] / numbers[1]
        return PERCENT * (ratio - 1) if metric.gain else ratio
    if metric.minus:
        return numbers[0] - numbers[1]
    return _area(planned, numbers) if has_curve(planned) else sum(numbers) / len(numbers)


@lru_cache(maxsize=KEPT)
def _value(run: PlannedRun, name: str) -> float | None:
    """Return a metric of one run, or its score; None if it is undefined."""
    record = run.record
    if record is None:
        return None
    if name == SCORE:
        return PERCENT * record.score.mean if record.score else None
    return definitions.definition(name)(record.samples)


@lru_cache(maxsize=KEPT)
def _plain(run: PlannedRun, name: str, seed: int) -> ResampledNumber:
    """Compute a metric of one run, or its score; `seed` draws its items, the same for all runs of a
    cell."""
    import numpy as np

    record, value = run.record, _value(run, name)
    alone = ResampledNumber(np.array([np.nan if value is None else value]), ("", ()))
    if record is None or value is None:
        return alone
    if name == SCORE:
        graded = record.values
        ids = tuple(graded)
        sums = np.array([[PERCENT * v for v in graded.values()], [1] * len(graded)])
    elif ratio := definitions.definition(name).ratio:
        amounts = ratio.amounts(record.samples)
        ids, sums = _sums_by(record.item_ids, amounts)
    else:
        return alone
    if len(ids) < 2:
        return alone
    benchmark = record.spec.benchmark.name
    counts = _draws(benchmark, len(ids), seed)
    with np.errstate(all="ignore"):
        drawn = (counts @ sums[0]) / (counts @ sums[1])
        if TableMetric(name, name, name).is_of_times:
            _, passes = _sums_by(map(repetition_of, record.columns["id"]), amounts)
            drawn = drawn * _second_measurement(passes[0] / passes[1], seed, record.identity_hash)
    return ResampledNumber(np.concatenate([[value], drawn]), (benchmark, ids))


def _sums_by(keys: Iterable[Key], amounts: Any) -> tuple[tuple[Key, ...], Any]:
    """Return the distinct keys, and the amounts (2, samples) summed by key as (2, keys)."""
    import numpy as np

    places: dict[Key, int] = {}
    index = [places.setdefault(key, len(places)) for key in keys]
    return tuple(places), np.array([np.bincount(index, weights=row) for row in amounts])


def _second_measurement(of_passes: Any, seed: int, run: str) -> Any:
    """Return the factor of a timing in each resample, as an array; see above.

    of_passes: the number measured in each pass over the items.
    """
    import numpy as np

    n = len(of_passes)
    if n == 1:
        return 1.0
    spread = of_passes.std(ddof=1) / of_passes.mean()
    rng = np.random.default_rng([seed, zlib.crc32(run.encode())])
    exponents = rng.standard_t(n - 1, RESAMPLES) * spread * math.sqrt(2 / n)
    # two passes give almost no information: an end may be astronomic, but ratios stay finite
    return np.exp(np.clip(exponents, -LARGEST_EXPONENT, LARGEST_EXPONENT))


def leaves_of(planned: PlannedCell) -> list[PlannedCell]:
    """Return the cells without parts that a cell is computed from; the cell itself if it has
    none."""
    return [leaf for part in planned.parts for leaf in leaves_of(part)] or [planned]


def records_of(planned: PlannedCell) -> list[RunRecord]:
    """Return the records of the sealed runs that a cell is computed from."""
    return [leaf.run.record for leaf in leaves_of(planned) if leaf.run.record]


def timed_on(planned: PlannedCell) -> set[str]:
    """Return the machines whose times a cell is computed from; empty if it is of no times."""
    records = records_of(planned) if planned.cell.metric.is_of_times else []
    return {record.devices for record in records}


@dataclass(frozen=True)
class Curve:
    """The curve under which an area is computed."""

    points: Mapping[str, tuple[float, float]]
    """The points that count, from slow to fast: name -> (x, score)."""
    left_out: Query
    """Names of the points that do not count because they lost too much score."""
    y_max: float
    """The best score of all rows."""
    best: str
    """The row with that score."""
    rows: Query
    """All rows that the table has for this model and benchmark."""


def has_curve(planned: PlannedCell) -> bool:
    """Return whether the cell itself is an area, not an average or ratio of areas."""
    areas = [bool(one.cell.metric.area) for one in (planned, *planned.parts)]
    return areas[0] and not any(areas[1:])


def curve_of(planned: PlannedCell) -> Curve:
    """Return the curve of a cell whose runs are sealed; DllmBenchError if it has no area."""
    names = planned.cell.curve
    numbers = [_value(part.run, part.cell.metric.definition) for part in planned.parts]
    xs, scores = numbers[: len(names)], numbers[len(names) :]
    [facet] = [facet for facet, value in planned.cell.values.items() if value.curve]
    rows = tuple(part.cell.keys[facet] for part in planned.parts[len(names) :])
    known = {row: score for row, score in zip(rows, scores, strict=True) if score}
    points = [(x, y) for x, y in zip(xs, scores, strict=False) if x is not None and y is not None]
    if len(points) < len(names) or not known:
        raise DllmBenchError("A point has no number, or no run scores above 0.")
    counted = [names[i] for i in within_drop(points, cut=planned.cell.metric.area == CUT)]
    best = max(known, key=lambda row: known[row])
    return Curve(
        points={name: points[names.index(name)] for name in counted},
        left_out=tuple(name for name in names if name not in counted),
        y_max=known[best],
        best=best,
        rows=rows,
    )


def _area(planned: PlannedCell, numbers: Sequence[Any]) -> Any:
    """Compute the area under the points that count by their measured values."""
    import numpy as np

    names = planned.cell.curve
    try:
        indices = [names.index(name) for name in curve_of(planned).points]
    except DllmBenchError:
        return np.array([np.nan])
    points = [(numbers[i], numbers[len(names) + i]) for i in indices]
    return area(points, reduce(np.maximum, numbers[len(names) :]))


def within_drop(
    points: Sequence[tuple[float, float]], drop: float = DROP, cut: bool = False
) -> list[int]:
    """Return indices of the points that lost at most `drop` against the slowest, from slow to fast.

    Raises DllmBenchError without points, or if the fastest lost more and `cut` does not allow that.
    """
    if not points:
        raise DllmBenchError("A curve without points has no area; give at least one point.")
    order = sorted(range(len(points)), key=lambda i: points[i][0])
    (first_x, first_y), (last_x, last_y) = points[order[0]], points[order[-1]]
    least = first_y - drop - NEARLY
    if last_y < least and not cut:
        raise DllmBenchError(
            f"The fastest point scores {last_y:.1f} at {last_x:.2f} and the slowest {first_y:.1f} "
            f"at {first_x:.2f}, {first_y - last_y:.1f} lost where {drop:g} are allowed: such a "
            "curve has no area; end the sweep earlier."
        )
    return [i for i in order if points[i][1] >= least]


def area(points: Sequence[tuple[N, N]], y_max: N, alpha: float = ALPHA) -> N:
    """Return the rectangle below the first point and the trapezoids from point to point.

    In the trapezoids a score y has the weight exp(-alpha (1 - y / y_max)), at most 1.
    """
    import numpy as np

    weighted = [y * np.minimum(1.0, np.exp(-alpha * (1 - y / y_max))) for _, y in points]
    total = points[0][0] * points[0][1]
    for k in range(1, len(points)):
        total = total + (points[k][0] - points[k - 1][0]) * (weighted[k] + weighted[k - 1]) / 2
    return total


@lru_cache(maxsize=16)
def _draws(benchmark: str, n: int, seed: int) -> Any:
    """Return how often each resample contains each of `n` items, as an array (resamples, items); it
    is the same for all runs of a benchmark.
    """
    import numpy as np

    rng = np.random.default_rng([seed, zlib.crc32(benchmark.encode())])
    picked = rng.integers(n, size=(RESAMPLES, n)) + n * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(picked.ravel(), minlength=RESAMPLES * n)
    return counts.reshape(RESAMPLES, n).astype(float)
