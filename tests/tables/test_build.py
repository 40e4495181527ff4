"""Measured numbers, their intervals, and verdicts against the reported ones."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from statistics import fmean

import pytest

from dllm_bench.metrics import definitions
from dllm_bench.metrics.accuracy import wilson
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import BuiltTable, CellVerdict, Row, build
from dllm_bench.tables.render import footer, measured_text
from tests.tables.builders import (
    ENVIRONMENT,
    FULL,
    planned_small,
    record_of,
    seal,
    small_table,
    spec_at,
)


def cell(built: BuiltTable, setting: str, benchmark: str, metric: str) -> Row:
    """Return the row with these keys."""
    return built.cells.loc["alpha_7b", setting, benchmark, metric]


def sealed(tmp_path, profile, monkeypatch, **record) -> BuiltTable:
    """Return the small table with one sealed run, S1 on quiz."""
    store = Store(tmp_path)
    seal(
        store,
        record_of(spec_at(planned_small(store, profile, monkeypatch), "S1", "quiz"), **record),
    )
    return build(small_table(), profile, planned_small(store, profile, monkeypatch))


def test_a_score_is_a_percentage_with_its_wilson_interval(tmp_path, monkeypatch) -> None:
    found = cell(sealed(tmp_path, FULL, monkeypatch), "S1", "quiz", "score")
    low, high = wilson(11, 20)
    assert found.value == pytest.approx(55.0)
    assert (found.low, found.high) == pytest.approx((100 * low, 100 * high))
    assert (found.unit, found.n) == ("%", 20)


def test_a_mean_speed_has_a_bootstrap_interval_and_an_extreme_none(tmp_path, monkeypatch) -> None:
    built = sealed(tmp_path, FULL, monkeypatch)
    average, largest = (cell(built, "S1", "quiz", m) for m in ("tps_avg", "tps_max"))
    facts = average.planned.run.record.samples
    each = list(64 / (facts.seconds - facts.first_step_s))
    assert average.value == pytest.approx(fmean(each))
    assert average.value == definitions.measure("tps/no_first_step", facts)
    low, high = average.low, average.high
    assert min(each) < low < average.value < high < max(each)
    assert largest.value == pytest.approx(max(each))
    assert isnan(largest.low)


@pytest.mark.parametrize(
    ("right", "verdict"),
    [
        (11, CellVerdict.INSIDE_CI),  # 55.0 of 55.00
        (20, CellVerdict.OUTSIDE),  # 100 against 55
        (1, CellVerdict.OUTSIDE),
    ],
)
def test_a_score_is_judged_by_its_interval(tmp_path, monkeypatch, right, verdict) -> None:
    built = sealed(tmp_path, FULL, monkeypatch, right=right)
    found = cell(built, "S1", "quiz", "score")
    assert found.verdict == verdict
    assert found.delta == pytest.approx(5 * right - 55)


@pytest.mark.exhaustive
def test_a_score_outside_of_a_narrow_interval_may_be_inside_the_tolerance(
    tmp_path, monkeypatch
) -> None:
    found = cell(sealed(tmp_path, FULL, monkeypatch, right=5680, n=10000), "S1", "quiz", "score")
    assert found.low > 55.0
    assert found.verdict == CellVerdict.INSIDE_TOLERANCE


def test_a_speed_is_compared_on_the_reported_hardware_only(tmp_path, monkeypatch) -> None:
    built = sealed(tmp_path, FULL, monkeypatch)
    found = cell(built, "S1", "quiz", "tps_max")
    assert found.verdict == CellVerdict.OUTSIDE
    assert not isnan(found.delta)
    record = found.planned.run.record
    record.environment["device"] = "Another CPU"
    planned = list(built.cells.planned)
    again = build(small_table(), FULL, planned)
    speed_cell, score_cell = (cell(again, "S1", "quiz", m) for m in ("tps_max", "score"))
    assert speed_cell.verdict == CellVerdict.NOT_COMPARABLE
    assert isnan(speed_cell.delta)
    assert speed_cell.reason == "measured on Another CPU, reported on Test CPU"
    assert score_cell.verdict == CellVerdict.INSIDE_CI


def test_a_run_that_went_on_elsewhere_names_every_machine(tmp_path, monkeypatch) -> None:
    """But not one that finished nothing."""
    built = sealed(tmp_path, FULL, monkeypatch)
    record = cell(built, "S1", "quiz", "tps_max").planned.run.record
    [first] = record.sessions
    names = ("Test CPU", "Idle CPU", "Another CPU")
    record.sessions[:] = [
        replace(first, samples=n, environment={**first.environment, "device": name, "commit": name})
        for name, n in zip(names, (5, 0, 15), strict=True)
    ]
    again = build(small_table(), FULL, list(built.cells.planned))
    why = cell(again, "S1", "quiz", "tps_max").reason
    assert why == "measured on Test CPU and Another CPU, reported on Test CPU"
    assert any(text.startswith("Test CPU and Another CPU, ") for text in again.hardware)
    commits = [name for name in names if any(text.startswith(name) for text in again.code)]
    assert commits == ["Test CPU", "Another CPU"]


def test_times_from_a_busy_machine_are_marked_and_counts_are_not(tmp_path, monkeypatch) -> None:
    for load, marked in ((2.5, False), (2.7, True)):
        monkeypatch.setitem(ENVIRONMENT, "load", load)
        monkeypatch.setitem(ENVIRONMENT, "cores", 2)
        built = sealed(tmp_path / str(load), FULL, monkeypatch)
        tps, score = (cell(built, "S1", "quiz", name) for name in ("tps_max", "score"))
        assert measured_text(tps).endswith("†") is marked
        assert not measured_text(score).endswith("†")
        assert (
            any("busy" in line or "load" in line for _, lines in footer(built) for line in lines)
            is marked
        )
