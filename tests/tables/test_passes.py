"""Intervals of runs that decode every item several times: their passes widen those of times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dllm_bench.store.record import RunRecord
from dllm_bench.tables.derive import measure, measure_run
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun
from dllm_bench.tables.spec import Cell, TableMetric
from tests.sample_stats import record_of, sample

TOKENS, ITEMS, PASSES = 64, 12, 5
Interval = tuple[float, float]


def measured(seconds: np.ndarray, forwards: np.ndarray | None = None) -> RunRecord:
    """Return a run whose item i took seconds[k, i] in pass k."""
    passes, items = seconds.shape
    steps = np.full(seconds.shape, 4) if forwards is None else forwards
    ids = [f"item-{i}#{k}" if passes > 1 else f"item-{i}" for k in range(passes)
           for i in range(items)]  # fmt: skip
    times = zip(seconds.ravel(), steps.ravel(), strict=True)
    samples = [sample(seconds=float(s), forwards=int(f), emitted=TOKENS) for s, f in times]
    return record_of(samples, ids)


def speed(seconds: np.ndarray) -> tuple[float, Interval]:
    """Return tokens per second with the interval."""
    value, ends = measure_run("tps/e2e", measured(seconds))
    assert value is not None and ends is not None
    return value, ends


def times(rng: np.random.Generator, items: np.ndarray, between: float) -> np.ndarray:
    """Seconds of items in passes that differ by `between`, with noise of 3 % of each sample."""
    passes = rng.lognormal(0, between, (PASSES, 1))
    return items * passes * rng.lognormal(0, 0.03, (PASSES, len(items)))


def mean_of_lognormal(*spreads: float) -> float:
    return float(np.exp(sum(spread**2 for spread in spreads) / 2))


@pytest.mark.parametrize(("among_items", "between"), [(0.0, 0.1), (0.1, 0.05), (0.2, 0.1)])
def test_an_interval_covers_the_truth_and_a_second_measurement(among_items, between) -> None:
    """Of known variances among items and between passes, the first being 0 in the hardest case."""
    rng, draws = np.random.default_rng(3), 200
    truth = TOKENS / mean_of_lognormal(among_items, between, 0.03)
    true = again = 0
    for _ in range(draws):
        items = rng.lognormal(0, among_items, ITEMS)
        (_, (low, high)), (second, _) = (speed(times(rng, items, between)) for _ in range(2))
        true += low <= truth <= high
        again += low <= second <= high
    assert true >= 0.93 * draws
    assert again >= 0.93 * draws


def test_what_differs_between_passes_widens_times_and_no_counts() -> None:
    rng = np.random.default_rng(1)
    items = rng.lognormal(0, 0.2, ITEMS)
    steps = np.tile(rng.integers(3, 9, ITEMS), (PASSES, 1))
    still, moving = (items * np.array([passes]).T for passes in ([1] * 5, [1, 1.2, 0.9, 1.1, 1]))
    widths = []
    for seconds in (items[None], still, moving):
        record = measured(seconds, steps[: len(seconds)])
        widths.append([np.ptp(measure_run(name, record)[1]) for name in ("tps/e2e", "tpf/emitted")])
    once, calm, busy = widths
    assert calm == pytest.approx(once), "five equal passes say as much of items as one"
    assert busy[0] > 1.5 * calm[0]
    assert busy[1] == calm[1]


def test_samples_of_an_item_are_drawn_as_one() -> None:
    """A count of equal passes varies as that of one of them."""
    steps = np.tile(np.arange(1, ITEMS + 1), (PASSES, 1))
    once, often = (measured(np.ones(one.shape), one) for one in (steps[:1], steps))
    assert measure_run("tpf/emitted", often) == measure_run("tpf/emitted", once)


def test_repetitions_of_an_equal_text_prove_no_more_than_one() -> None:
    """The Wilson interval of a share counts items."""
    ids = [f"item-{i}#{k}" for k in range(PASSES) for i in range(ITEMS)]
    equal = [sample(baseline_s=1.0, baseline_equal=i % 3 > 0) for i in range(ITEMS)]
    once, repeated = record_of(equal), record_of(equal * PASSES, ids)
    assert measure_run("equal/baseline", repeated) == measure_run("equal/baseline", once)


def ratio(ours: RunRecord, theirs: RunRecord) -> PlannedCell:
    """Return the speed-up of one run over another."""
    tps = TableMetric("", "TPS", "tps/e2e")
    runs = [PlannedRun((), CellState.SEALED, spec=r.spec, record=r) for r in (ours, theirs)]
    parts = tuple(PlannedCell(Cell({}, tps, (), None, ()), run) for run in runs)
    over = replace(tps, over={"decoder": "plain"})
    return PlannedCell(Cell({}, over, (), None, ()), runs[0], parts)


def test_a_ratio_pairs_items_and_draws_the_passes_of_each_run() -> None:
    """Items that differ by a factor of two leave no trace in a ratio; passes of both runs do."""
    items = np.tile([1.0, 2.0], ITEMS // 2)
    shaken = items * np.array([[1, 1.1, 0.9, 1.05, 0.95]]).T
    theirs = replace(measured(shaken / 1.7), identity_hash="1" * 64)
    low, high = measure(ratio(measured(np.tile(items, (PASSES, 1))), theirs))[1] or (0, 0)
    alone = high / low
    low, high = measure(ratio(measured(shaken), theirs))[1] or (0, 0)
    assert low < 1 / 1.7 < high
    assert alone**1.2 < high / low < alone**1.8, "about √2 times as wide"
