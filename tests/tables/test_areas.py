"""Areas under curves (AUP) in a table: points, the best score of all rows, what has no area."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from math import isnan
from typing import Any

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import load_figure
from dllm_bench.paths import read_yaml
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import BuiltTable, Row, build
from dllm_bench.tables.load import load_table, parse_table
from dllm_bench.tables.plan import distinct_runs
from dllm_bench.tables.render import as_json, render
from dllm_bench.tables.spec import PaperTable
from tests.tables.builders import FULL, HERE, planned_small, record_of, run_cells, seal
from tests.unit.test_tradeoff import aup

PLAIN: dict[str, Any] = read_yaml(HERE / "small" / "areas.yaml")
N = 40
# value of the facet -> how many of 40 are right, how many times fewer forwards
RUNS = {
    "slow": (36, 1),
    "best": (40, 2),
    "steady-2": (36, 2),
    "steady-4": (30, 4),  # 15 points lost: does not count
    "steady-8": (35, 8),
    "losing-3": (36, 2),
    "losing-5": (20, 4),
}


def table(**changes: Any) -> PaperTable:
    return parse_table("small/areas", {**deepcopy(PLAIN), **changes}, HERE / "small")


def record(spec: Any, right: int, faster: int) -> RunRecord:
    """Return a run that takes 64 forwards a sample, or so many times fewer."""
    found = record_of(spec, right, N)
    return replace(found, columns={**found.columns, "forwards": [64 // faster] * N})


def built(root: Any, monkeypatch: pytest.MonkeyPatch, without: str = "") -> BuiltTable:
    """Return the table with every run sealed but those of a decoder."""
    store = Store(root)
    for run in distinct_runs(planned_small(store, FULL, monkeypatch, table())):
        decoder, k = run.chosen["decoder"], run.chosen["decoder.k"]
        if run.spec and decoder != without:
            name = decoder if decoder in RUNS else f"{decoder}-{k}"
            seal(store, record(run.spec, *RUNS[name]))
    return build(table(), FULL, planned_small(store, FULL, monkeypatch, table()))


def cell(built: BuiltTable, benchmark: str, decoder: str, metric: str) -> Row:
    return built.cells.loc[benchmark, decoder, metric]


def test_a_sweep_from_a_value_is_a_curve_and_its_points_are_hidden() -> None:
    values = {value.name: value for value in table().facets["decoder"]}
    assert values["steady"].curve == ("slow", "steady-2", "steady-4", "steady-8")
    assert values["steady-4"].run == ("decoder=steady", "decoder.k=4")
    assert {c.keys["decoder"] for c in table().cells()} == {"alone", "steady", "losing"}
    assert {len(table().parts(c)) for c in table().cells() if c.keys["benchmark"] == "quiz"
            and c.metric.name == "aup"} == {1 + 7, 4 + 7, 3 + 7}  # fmt: skip


def test_an_area_is_the_published_formula_over_the_runs(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    steady = cell(found, "quiz", "steady", "aup")
    points = [(1.0, 90.0), (2.0, 90.0), (4.0, 75.0), (8.0, 87.5)]
    assert steady.value == pytest.approx(aup(points, y_max=100.0))
    assert steady.value != pytest.approx(aup(points, y_max=90.0))
    assert steady.unit == "% × tokens/forward"
    assert cell(found, "quiz", "alone", "aup").value == pytest.approx(90.0)
    assert steady.low < steady.value < steady.high
    assert len(steady.runs) == len(RUNS)


def test_what_it_was_taken_of_is_stored(tmp_path, monkeypatch) -> None:
    plain = json.loads(as_json(built(tmp_path, monkeypatch)))
    [found] = [c["curve"] for c in plain["cells"]
               if (c["keys"]["benchmark"], c["keys"]["decoder"], c["metric"])
               == ("quiz", "steady", "aup")]  # fmt: skip
    assert found["points"] == {"slow": [1, 90], "steady-2": [2, 90], "steady-8": [8, 87.5]}
    assert found["left_out"] == ["steady-4"]
    assert (found["y_max"], found["best"]) == (100, "best")
    assert set(found["rows"]) == set(RUNS)


def test_a_curve_that_ends_in_a_loss_has_no_area_and_says_so(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    for benchmark in ("quiz", "average"):
        losing = cell(found, benchmark, "losing", "aup")
        assert isnan(losing.value) and losing.status == "undefined"
        assert "scores 50.0 at 4.00 and the slowest 90.0 at 1.00" in losing.reason
    text = render(found)["md"]
    assert "Losing" not in text
    assert "quiz, losing, AUP" in text.partition("**Undefined**")[2]
    cut = cell(found, "quiz", "losing", "cut")
    assert cut.value == pytest.approx(aup([(1.0, 90.0), (2.0, 90.0)], y_max=100.0))


def test_averages_and_gains_are_of_areas(tmp_path, monkeypatch) -> None:
    found = built(tmp_path, monkeypatch)
    parts = [cell(found, name, "steady", "cut").value for name in ("quiz", "code")]
    assert cell(found, "average", "steady", "cut").value == pytest.approx(sum(parts) / 2)
    assert cell(found, "average", "steady", "cut").curve is None
    assert cell(found, "quiz", "steady", "gain").value == pytest.approx(parts[0] / 90)
    assert cell(found, "quiz", "alone", "gain").value == pytest.approx(1.0)


def test_every_run_of_the_table_has_to_be_there(tmp_path, monkeypatch) -> None:
    """The best score is not known before, of whichever row it is."""
    found = built(tmp_path, monkeypatch, without="losing")
    assert set(found.cells.status) == {"missing"}


def test_an_area_needs_a_curve_and_a_curve_an_area() -> None:
    values = {"values": {"slow": {"run": ["decoder=slow"]}}}
    facets = {**PLAIN["facets"], "decoder": values}
    with pytest.raises(DllmBenchError, match="aup at .* is an area where"):
        run_cells(table(facets=facets))
    metrics = {"score": {"label": "Score", "definition": "score"}}
    with pytest.raises(DllmBenchError, match="score at .* is an area where"):
        run_cells(table(metrics=metrics))
    with pytest.raises(DllmBenchError, match="There is no area 'part'; choose one of: whole, cut"):
        table(metrics={"aup": {**PLAIN["metrics"]["aup"], "area": "part"}})


def queries(table: PaperTable) -> set[frozenset[str]]:
    """Return the runs a table asks for; the last override of a key counts."""
    found = (dict(o.split("=", 1) for o in cell.run).items() for cell in run_cells(table))
    return {frozenset(f"{key}={value}" for key, value in items) for items in found}


def test_the_figures_are_of_runs_of_the_table() -> None:
    names = ("decoders/tradeoff", "decoders/tradeoff_row_cost")
    first, second = (queries(load_figure(name).table) for name in names)
    assert first == second < queries(load_table("decoders/aup"))
    assert len(first) == 2 * (5 * 6 + 2)


def test_no_combination_of_the_matrix_is_silently_absent() -> None:
    """Score, selection, exploration, stop and cache: all there are, and the oracle once."""
    table = load_table("decoders/orthogonality")
    found = {tuple(cell.keys.values()) for cell in table.cells()}
    assert not [cell for cell in table.cells() if cell.reported_only]
    oracle = {keys for keys in found if "oracle" in keys}
    assert len(oracle) == 1
    assert len(found - oracle) == len({frozenset(c.run) for c in table.cells()}) - 1 == 48
