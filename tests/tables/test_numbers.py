"""Measured numbers, their intervals and verdicts; ratios, differences and averages of them."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from dllm_bench.tables.derive import measure, measure_run, paired_scores
from dllm_bench.tables.frame import BuiltTable, CellVerdict, Row, build
from dllm_bench.tables.load import parse_table
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun, cells_with_runs, combined_run
from dllm_bench.tables.render import footer, measured_text
from dllm_bench.tables.spec import Cell, TableMetric
from tests.sample_stats import record_of as record_of_samples
from tests.sample_stats import sample
from tests.tables.builders import (
    ENVIRONMENT,
    FULL,
    HERE,
    TINY,
    compose,
    derived,
    planned_small,
    record_of,
    seal,
    small_table,
    spec_at,
    spec_of,
)
from tests.tiers import covering

SCORE = TableMetric("score", "Score", "score")
TPF = TableMetric("tpf", "TPF", "tpf/committed")


def cell(built: BuiltTable, decoder: str, benchmark: str, metric: str) -> Row:
    """Return the row of Alpha with these keys."""
    return built.cells.loc["alpha", decoder, benchmark, metric]


def row(planned: PlannedCell) -> Row:
    table = replace(small_table("derived"), facets={})
    return next(build(table, FULL, [planned]).cells.itertuples())


def planned_with(record: RunRecord, metric: TableMetric) -> PlannedCell:
    """Return a planned cell of a sealed run."""
    run = PlannedRun(("model=alpha",), CellState.SEALED, spec=record.spec, record=record)
    return PlannedCell(Cell({}, metric, (), "", ()), run)


def with_parts(metric: TableMetric, *parts: PlannedCell) -> PlannedCell:
    """Return a derived cell of these parts."""
    run = combined_run([part.run for part in parts])
    return PlannedCell(Cell({}, metric, (), "", ()), run, parts)


def record(benchmark: str, right: int, n: int = 40) -> RunRecord:
    """Return a sealed run on a benchmark with a spec of its own."""
    query = ["model=alpha", "decoder=plain", f"benchmark={benchmark}", "hardware=cpu"]
    return record_of(spec_of(compose([*query, f"decoder.k={right}"])), right, n)


def test_another_setting_of_an_embedded_run_is_not_compared(tmp_path) -> None:
    built = derived(tmp_path, TINY)
    equal, differs = (cell(built, "quicker", b, "k") for b in ("quiz", "code"))
    assert (equal.verdict, differs.verdict) == (CellVerdict.EQUAL, CellVerdict.NOT_COMPARABLE)
    assert differs.reason == "embedded model tiny-alpha on minicode"


@pytest.mark.parametrize(
    ("metric", "rule", "words"),
    [
        ({"minus": {"decoder": "slow"}}, {}, "delta at .* the table has no such cell"),
        ({}, {"where": {}, "skipped": True}, "no key .skipped.; did you mean .skip."),
    ],
)
def test_a_wrong_yaml_is_a_sentence(metric: dict, rule: dict, words: str) -> None:
    plain = read_yaml(HERE / "small" / "derived.yaml")
    plain["metrics"]["delta"] |= metric
    plain["rules"] += [rule] if rule else []
    with pytest.raises(DllmBenchError, match=words):
        list(cells_with_runs(parse_table("small/derived", plain, HERE / "small")))


def test_an_average_shows_the_setting_that_its_parts_share(tmp_path) -> None:
    plain = read_yaml(HERE / "small" / "derived.yaml")
    plain["rules"].pop()  # that averages have no setting
    table = parse_table("small/derived", plain, HERE / "small")
    built = build(table, FULL, planned_small(Store(tmp_path), FULL, table))
    shown = [cell(built, decoder, "average", "k") for decoder in ("lost", "quicker")]
    found = [(one.state, one.text, one.reason) for one in shown]
    assert found == [("setting", "9", ""), ("setting", "", "its runs differ in decoder.k")]


def test_pairing_narrows_the_interval_of_a_difference() -> None:
    """Runs right on the same items differ by little; drawn apart they would seem to differ more."""
    delta = replace(SCORE, minus={"decoder": "x"})
    widths = []
    for other in ("quiz", "code"):  # the same items, other items
        parts = [planned_with(record(b, r), SCORE) for b, r in (("quiz", 20), (other, 22))]
        low, high = measure(with_parts(delta, *parts))[1]
        widths.append(high - low)
    assert widths[0] < widths[1] / 2


def test_runs_of_other_seeds_draw_the_same_items() -> None:
    """The average of equal runs is known no better than one of them, and their ratio exactly."""
    one = record_of_samples([sample(committed=10, forwards=2 + i % 5) for i in range(40)])
    two = replace(one, spec=replace(one.spec, seed=1), identity_hash="1" * 64)
    parts = [planned_with(each, TPF) for each in (one, two)]
    assert measure(with_parts(TPF, *parts)) == measure(parts[0])
    _, ends = measure(with_parts(replace(TPF, over={"seed": "x"}), *parts))
    assert ends == (1.0, 1.0)


def test_what_is_not_comparable_has_no_interval_and_a_ratio_to_zero_no_value() -> None:
    """Runs of one benchmark on other items, and a number against itself."""
    sizes = ((9, 40), (12, 40), (10, 30), (10, 40), (0, 40))
    one, other, few, many, none = (planned_with(record("quiz", *size), SCORE) for size in sizes)
    assert paired_scores(with_parts(SCORE, one, other), one) == [], "an average and a run"
    other_items = row(with_parts(replace(SCORE, minus={"decoder": "x"}), few, many))
    assert other_items.value == pytest.approx(100 * (10 / 30 - 10 / 40))
    ratio = replace(SCORE, over={"decoder": "x"})
    ungraded = replace(record("quiz", 9), score=None)
    ungraded.columns["value"][:2] = [None, None]
    assert (row(many).n, row(planned_with(ungraded, SCORE)).n) == (40, 38)
    itself, to_zero = (row(with_parts(ratio, many, other)) for other in (many, none))
    assert itself.value == 1.0 and isnan(other_items.low) and isnan(itself.low)
    assert isnan(to_zero.value) and to_zero.status == "undefined"


def test_benchmarks_that_are_one_run_enter_an_average_once(tmp_path) -> None:
    one_task = {**TINY.replace, "benchmark": {"quiz": "miniquiz", "code": "miniquiz"}}
    parts = []
    for profile in (TINY, replace(TINY, replace=one_task)):
        cells = planned_small(Store(tmp_path), profile, small_table("derived"))
        keys = {"model": "alpha", "decoder": "quick", "benchmark": "average"}
        of = {c.cell.metric.name: c.parts for c in cells if c.cell.keys == keys}
        parts.append((len(of["score"]), *(len(side.parts) for side in of["speedup"])))
    assert parts == [(2, 2, 2), (1, 1, 1)]


def of_s1(built: BuiltTable, metric: str) -> Row:
    return built.cells.loc["alpha_7b", "S1", "quiz", metric]


def sealed(tmp_path, **record) -> BuiltTable:
    """Return the small table with one sealed run, S1 on quiz."""
    store = Store(tmp_path)
    seal(store, record_of(spec_at(planned_small(store, FULL), "S1", "quiz"), **record))
    return build(small_table(), FULL, planned_small(store, FULL))


@pytest.mark.parametrize(
    ("right", "n", "verdict"),
    [
        (11, 20, CellVerdict.INSIDE_CI),  # 55.0 of 55.00
        (20, 20, CellVerdict.OUTSIDE),  # 100 against 55
        (1, 20, CellVerdict.OUTSIDE),
        (2272, 4000, CellVerdict.INSIDE_TOLERANCE),  # of a narrow interval
    ],
)
def test_a_score_is_judged_by_its_interval_or_the_tolerance(tmp_path, right, n, verdict) -> None:
    found = of_s1(sealed(tmp_path, right=right, n=n), "score")
    assert (found.verdict, found.delta) == (verdict, pytest.approx(100 * right / n - 55))


def test_a_run_that_went_on_elsewhere_names_every_machine_and_compares_no_speed(tmp_path) -> None:
    """But not a machine that finished nothing."""
    built = sealed(tmp_path)
    record = of_s1(built, "tps_max").planned.run.record
    [first] = record.sessions
    names = ("Test CPU", "Idle CPU", "Another CPU")
    places = [{**first.environment, "device": name, "commit": name} for name in names]
    counts = zip((5, 0, 15), places, strict=True)
    record.sessions[:] = [replace(first, samples=n, environment=place) for n, place in counts]
    again = build(small_table(), FULL, list(built.cells.planned))
    speed, score = (of_s1(again, name) for name in ("tps_max", "score"))
    assert speed.reason == "measured on Test CPU and Another CPU, reported on Test CPU"
    assert speed.verdict == CellVerdict.NOT_COMPARABLE and isnan(speed.delta)
    assert score.verdict == CellVerdict.INSIDE_CI
    assert any(text.startswith("Test CPU and Another CPU, ") for text in again.hardware)
    commits = [name for name in names if any(text.startswith(name) for text in again.code)]
    assert commits == ["Test CPU", "Another CPU"]


def test_times_from_a_busy_machine_are_marked_and_counts_are_not(tmp_path, monkeypatch) -> None:
    for load, marked in ((2.5, False), (2.7, True)):
        monkeypatch.setitem(ENVIRONMENT, "load", load)
        monkeypatch.setitem(ENVIRONMENT, "cores", 2)
        built = sealed(tmp_path / str(load))
        tps, score = (of_s1(built, name) for name in ("tps_max", "score"))
        assert measured_text(tps).endswith("†") is marked and not measured_text(score).endswith("†")
        assert any("load average" in line for _, said in footer(built) for line in said) is marked


TOKENS, ITEMS, PASSES = 64, 12, 5


def measured(seconds: np.ndarray, forwards: np.ndarray | None = None) -> RunRecord:
    """Return a run whose item i took seconds[k, i] in pass k."""
    passes, items = seconds.shape
    steps = np.full(seconds.shape, 4) if forwards is None else forwards
    ids = [f"item-{i}#{k}" if passes > 1 else f"item-{i}" for k in range(passes)
           for i in range(items)]  # fmt: skip
    times = zip(seconds.ravel(), steps.ravel(), strict=True)
    samples = [sample(seconds=float(s), forwards=int(f), emitted=TOKENS) for s, f in times]
    return record_of_samples(samples, ids)


def speed(rng: np.random.Generator, items: np.ndarray, between: float) -> Any:
    """Return tokens per second and its interval: passes differ by `between`, samples by 3 %."""
    passes = rng.lognormal(0, between, (PASSES, 1))
    seconds = items * passes * rng.lognormal(0, 0.03, (PASSES, len(items)))
    return measure_run("tps/e2e", measured(seconds))


SPREADS = [(0.0, 0.1), (0.1, 0.05), (0.2, 0.1)]


@pytest.mark.parametrize(("among_items", "between"), covering(3, SPREADS, often=1))
def test_an_interval_covers_the_truth_and_a_second_measurement(among_items, between) -> None:
    """Of known variances among items and between passes, the first being 0 in the hardest case."""
    rng, draws = np.random.default_rng(3), 200
    truth = TOKENS / np.exp((among_items**2 + between**2 + 0.03**2) / 2)  # of lognormal means
    true = again = 0
    for _ in range(draws):
        items = rng.lognormal(0, among_items, ITEMS)
        (_, (low, high)), (second, _) = (speed(rng, items, between) for _ in range(2))
        true += low <= truth <= high
        again += low <= second <= high
    assert true >= 0.93 * draws and again >= 0.93 * draws


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
    assert busy[0] > 1.5 * calm[0] and busy[1] == calm[1]


def test_repetitions_of_an_equal_text_prove_no_more_than_one() -> None:
    """The Wilson interval of a share counts items."""
    ids = [f"item-{i}#{k}" for k in range(PASSES) for i in range(ITEMS)]
    equal = [sample(baseline_s=1.0, baseline_equal=i % 3 > 0) for i in range(ITEMS)]
    once, repeated = record_of_samples(equal), record_of_samples(equal * PASSES, ids)
    assert measure_run("equal/baseline", repeated) == measure_run("equal/baseline", once)
    sampled = [replace(one, baseline_equal=k > 0) for k in range(PASSES) for one in equal]
    value, (low, high) = measure_run("equal/baseline", record_of_samples(sampled, ids))
    assert low < value == 0.8 < high, "all passes are in the number and in its interval"


def ratio(ours: RunRecord, theirs: RunRecord) -> PlannedCell:
    """Return the speed-up of one run over another."""
    tps = TableMetric("", "TPS", "tps/e2e")
    sides = (planned_with(one, tps) for one in (ours, theirs))
    return with_parts(replace(tps, over={"decoder": "plain"}), *sides)


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
    two = measured(items * np.array([[1, 100]]).T)
    wild = [replace(two, identity_hash=str(k) * 64) for k in range(5)]
    assert all(measure(ratio(one, theirs))[1] for one in wild), "no overflow takes it away"
