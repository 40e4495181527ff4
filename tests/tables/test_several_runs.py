"""Numbers of several runs: areas under curves (AUP), and speeds with runs of their own.

An area: points, the best score of all rows, what has no area, the published areas of d3LLM's
leaderboard. Speeds are over fewer items and several passes than the score.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dllm_bench.claims.spec import Claim
from dllm_bench.cli import table as command
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import load_figure
from dllm_bench.figures.trade_off import pareto_front
from dllm_bench.paths import read_yaml
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store
from dllm_bench.tables.derive import DROP, area, within_drop
from dllm_bench.tables.frame import BuiltTable, Row, build
from dllm_bench.tables.load import parse_table
from dllm_bench.tables.plan import PlannedRun, PlannedTable, cells_with_runs, distinct_runs
from dllm_bench.tables.render import as_json, blocks, footer, hashes, measured_text, render
from dllm_bench.tables.spec import PaperTable, Profile, Query
from tests.tables import builders

PLAIN: dict[str, Any] = read_yaml(builders.HERE / "small" / "areas.yaml")
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
    return parse_table("small/areas", {**deepcopy(PLAIN), **changes}, builders.HERE / "small")


@pytest.fixture(scope="module")
def areas(tmp_path_factory: pytest.TempPathFactory) -> BuiltTable:
    """Return the table with every run sealed."""

    def made(run: PlannedRun) -> RunRecord:
        decoder, k = run.chosen["decoder"], run.chosen["decoder.k"]
        right, faster = RUNS[decoder if decoder in RUNS else f"{decoder}-{k}"]
        found = builders.record_of(run.spec, right, N)
        found.columns["forwards"] = [64 // faster] * N
        return found

    store = Store(tmp_path_factory.mktemp("runs"))
    return builders.sealed(table(), store, builders.FULL, made)


def cell(built: BuiltTable, benchmark: str, decoder: str, metric: str) -> Row:
    return built.cells.loc[benchmark, decoder, metric]


def test_a_sweep_from_a_value_is_a_curve_and_its_points_are_hidden() -> None:
    values = {value.name: value for value in table().facets["decoder"]}
    assert values["steady"].curve == ("slow", "steady-2", "steady-4", "steady-8")
    assert values["steady-4"].run == ("decoder=steady", "decoder.k=4")
    assert {c.keys["decoder"] for c in table().cells()} == {"alone", "steady", "losing"}
    assert {len(table().parts(c)) for c in table().cells() if c.keys["benchmark"] == "quiz"
            and c.metric.name == "aup"} == {1 + 7, 4 + 7, 3 + 7}  # fmt: skip


def test_an_area_is_the_published_formula_over_the_runs(areas) -> None:
    steady = cell(areas, "quiz", "steady", "aup")
    points = [(1.0, 90.0), (2.0, 90.0), (4.0, 75.0), (8.0, 87.5)]
    assert steady.value == pytest.approx(aup(points, y_max=100.0))
    assert steady.value != pytest.approx(aup(points, y_max=90.0))
    assert steady.unit == "% × tokens/forward"
    assert cell(areas, "quiz", "alone", "aup").value == pytest.approx(90.0)
    assert steady.low < steady.value < steady.high and len(steady.runs) == len(RUNS)


def test_what_it_was_taken_of_is_stored(areas) -> None:
    steady = {"benchmark": "quiz", "decoder": "steady"}, "aup"
    cells = json.loads(as_json(areas))["cells"]
    [found] = [c["curve"] for c in cells if (c["keys"], c["metric"]) == steady]
    assert found["points"] == {"slow": [1, 90], "steady-2": [2, 90], "steady-8": [8, 87.5]}
    assert found["left_out"] == ["steady-4"]
    assert (found["y_max"], found["best"], set(found["rows"])) == (100, "best", set(RUNS))


def test_a_curve_that_ends_in_a_loss_has_no_area_and_says_so(areas) -> None:
    for benchmark in ("quiz", "average"):
        losing = cell(areas, benchmark, "losing", "aup")
        assert isnan(losing.value) and losing.status == "undefined"
        assert "scores 50.0 at 4.00 and the slowest 90.0 at 1.00" in losing.reason
    text = render(areas)["md"]
    assert "Losing" not in text and "quiz, losing, AUP" in text.partition("**Undefined**")[2]
    cut = cell(areas, "quiz", "losing", "cut")
    assert cut.value == pytest.approx(aup([(1.0, 90.0), (2.0, 90.0)], y_max=100.0))


def test_an_area_needs_a_curve_and_a_curve_an_area() -> None:
    facets = {**PLAIN["facets"], "decoder": {"values": {"slow": {"run": ["decoder=slow"]}}}}
    twice = deepcopy(PLAIN["facets"])
    twice["benchmark"]["values"]["all"] = {"curve": ["quiz", "code"]}
    aup = {"aup": PLAIN["metrics"]["aup"]}
    score = {"score": {"label": "Score", "definition": "score"}}
    for changes in (
        {"metrics": aup, "facets": facets},
        {"metrics": aup, "facets": twice},
        {"metrics": score},
    ):
        with pytest.raises(DllmBenchError, match=r"(aup|score) at .* is an area where"):
            list(cells_with_runs(table(**changes)))
    with pytest.raises(DllmBenchError, match="There is no area 'part'; choose one of: whole, cut"):
        table(metrics={"aup": {**PLAIN["metrics"]["aup"], "area": "part"}})


def effective(runs: Iterable[Query]) -> set[frozenset[str]]:
    """Return the runs of queries, of which the last override of a key counts."""
    found = (dict(o.split("=", 1) for o in run).items() for run in runs)
    return {frozenset(f"{key}={value}" for key, value in items) for items in found}


def test_the_figures_are_of_runs_of_the_table() -> None:
    tables = [load_figure(f"decoders/{name}").table for name in ("tradeoff", "tradeoff_row_cost")]
    first, second = (effective(cell.run for cell in cells_with_runs(own)) for own in tables)
    assert first == second < effective(builders.queries_of("decoders/aup"))
    assert len(first) == 2 * (5 * 6 + 2)


OWN = ["limit=12", "benchmark.repeats=5"]
EMBEDDED = replace(builders.TINY, set=("hardware=cpu",), default=("limit=20",))
"""Like the embedded profile, whose number of items is a default."""


def own_table(**metrics: Any) -> PaperTable:
    """Return the small table that reports nothing, with speeds from runs of their own."""
    plain = deepcopy(read_yaml(builders.HERE / "small" / "own.yaml"))
    tps = {"label": "TPS", "definition": "tps/e2e", "run": OWN}
    plain["metrics"] |= {"tps": tps, "faster": {**tps, "over": {"decoder": "plain"}}, **metrics}
    return parse_table("small/own", plain, builders.HERE)


def test_a_value_without_an_additional_column_leaves_it_empty(tmp_path) -> None:
    """Names may be numbers, and a single override a text."""
    plain = read_yaml(builders.HERE / "small" / "own.yaml")
    own = {4: {"run": "decoder=plain"}, 5: {"run": ["decoder=lopa"], "show": {"System": "NV"}}}
    plain["facets"]["decoder"]["values"] = own
    plain["rules"] = [{"where": {"decoder": 4}, "run": ["decoder.k=2"]}]
    table = parse_table("small/own", plain, builders.HERE)
    planned = builders.planned_small(Store(tmp_path), EMBEDDED, table)
    [block] = blocks(build(table, EMBEDDED, planned))
    assert block["heads"] == ("Decoder", "System")
    assert [row["heads"] for row in block["rows"]] == [("4", "–"), ("5", "NV")]
    assert next(table.cells()).run[-2:] == ("decoder=plain", "decoder.k=2")


def made(spec: RunSpec) -> RunRecord:
    """Return a record with the run's items and passes; pass k takes 1 + k / 10 times as long."""
    once = builders.record_of(spec, right=5, n=spec.limit or 30)
    if spec.repeats == 1:
        return once
    n, passes = len(once.columns["id"]), range(spec.repeats)
    columns = {name: column * len(passes) for name, column in once.columns.items()}
    columns["id"] = [f"{key}#{k}" for k in passes for key in once.columns["id"]]
    columns["seconds"] = [(1 + i // n / 10) * s for i, s in enumerate(columns["seconds"])]
    return replace(once, columns=columns)


def built_own(store: Store, profile: Profile) -> BuiltTable:
    return builders.sealed(own_table(), store, profile, lambda run: made(run.spec))


def cell_of(found: BuiltTable, metric: str, decoder: str = "quick") -> Row:
    [row] = found.cells.xs((decoder, metric), level=["decoder", "metric"]).itertuples()
    return row


@pytest.mark.parametrize(("profile", "scores"), [(EMBEDDED, "20"), (builders.FULL, None)])
def test_speeds_have_runs_of_their_own(profile, scores, tmp_path) -> None:
    """The last override of a key wins, after the profile's default and the paper's settings."""
    planned = builders.planned_small(Store(tmp_path), profile, own_table())
    runs = {metric: [p.run for p in planned if p.cell.metric.name == metric]
            for metric in ("score", "tpf", "tps", "faster")}  # fmt: skip
    assert runs["score"] == runs["tpf"]
    chosen = [(run.chosen.get("limit"), run.chosen.get("benchmark.repeats"))
              for run in (*runs["score"], *runs["tps"])]  # fmt: skip
    assert chosen == [(scores, None)] * 2 + [("12", "5")] * 2
    assert len(distinct_runs(planned)) == 4, "a ratio takes the runs of its two sides"
    lines = list(command.command_lines([PlannedTable(own_table(), profile, planned)]))
    assert sum("limit=12" in line and "benchmark.repeats=5" in line for line in lines) == 2
    quick = builders.planned_small(Store(tmp_path), replace(profile, limit=3), own_table())
    assert {run.chosen["limit"] for run in distinct_runs(quick)} == {"3"}


def test_each_number_comes_from_its_run_and_notes_explain_brackets(areas, tmp_path) -> None:
    found = built_own(Store(tmp_path), EMBEDDED)
    assert [cell_of(found, name).n for name in ("score", "tpf", "tps")] == [20, 20, 60]
    assert cell_of(found, "score").value == 25.0
    tps, faster = cell_of(found, "tps"), cell_of(found, "faster")
    assert tps.low < 0.9 * tps.value and faster.low < 1 < faster.high
    [block] = blocks(found)
    assert [len(hashes(row).split()) for row in block["rows"]] == [2, 2]
    assert block["here"] == ("tiny-alpha", "miniquiz")
    assert "5 passes over the items" in str(footer(found)) and "passes" not in str(footer(areas))
    cells = json.loads(as_json(found))["cells"]
    by_metric = {c["metric"]: c["runs"] for c in cells if c["keys"]["decoder"] == "quick"}
    assert by_metric["score"] == by_metric["tpf"] != by_metric["tps"]


def test_runs_of_a_busy_machine_are_removed_once_it_is_idle(tmp_path, monkeypatch) -> None:
    """Those of the speeds alone: what other work disturbed is no reason to grade again."""
    monkeypatch.setitem(builders.ENVIRONMENT, "cores", 2)
    monkeypatch.setitem(builders.ENVIRONMENT, "load", 2.7)
    store = Store(tmp_path)
    planned = list(built_own(store, EMBEDDED).cells.planned)
    speeds = [run for run in distinct_runs(planned) if run.spec and run.spec.repeats > 1]
    folders = {tmp_path / run.folder: run in speeds for run in distinct_runs(planned)}
    monkeypatch.setattr(command, "machine", lambda device: {"load": 2.61, "cores": 2})
    with pytest.raises(DllmBenchError, match=r"2 runs again .* below 2\.6"):
        command.remove_disturbed(planned, store)
    assert all(folder.exists() for folder in folders)
    monkeypatch.setattr(command, "machine", lambda device: {"load": 2.0, "cores": 2})
    assert command.remove_disturbed(planned, store) == 2
    assert {folder: not folder.exists() for folder in folders} == folders
    again = builders.planned_small(store, EMBEDDED, own_table())
    assert sum(run.open for run in distinct_runs(again)) == 2
    assert command.remove_disturbed(again, store) == 0


def test_speeds_of_another_machine_are_marked_and_not_compared(tmp_path) -> None:
    built = built_own(Store(tmp_path), EMBEDDED)
    assert not built.cells.elsewhere.any()
    sessions = cell_of(built, "tps").planned.run.record.sessions
    elsewhere = {**sessions[0].environment, "device": "Another CPU"}
    sessions[:] = [replace(sessions[0], environment=elsewhere)]
    again = build(own_table(), EMBEDDED, list(built.cells.planned))
    tps = again.cells.xs("tps", level="metric")
    assert sorted(measured_text(row)[-1] == "‡" for row in tps.itertuples()) == [False, True]
    assert not again.cells.xs("score", level="metric").elsewhere.any()
    assert isnan(cell_of(again, "faster").value)
    assert "not compared: Another CPU, Test CPU" in cell_of(again, "faster").reason
    assert "do not compare" in str(footer(again)) and "‡" not in str(footer(built))


def test_a_claim_takes_the_runs_of_the_tables_metric(monkeypatch) -> None:
    sides = {"ours": ({"decoder": "quick"},), "theirs": ({"decoder": "plain"},)}
    monkeypatch.setattr("dllm_bench.claims.spec.source_table", lambda name: own_table())
    at = {"model": "alpha", "benchmark": "quiz"}
    for metric, own in (("tps/e2e", True), ("score", False)):
        claim = Claim("p/c", "A.", "T", table="x", metric=metric, at=at, **sides)
        assert {c.run[-2:] == tuple(OWN) for c in claim.cells().cells()} == {own}


def test_an_area_takes_speeds_and_scores_from_their_own_runs() -> None:
    plain = deepcopy(PLAIN)
    plain["metrics"] = {
        "score": {"label": "Score", "definition": "score", "run": ["limit=50"]},
        "aup": {"label": "AUP", "definition": "tps/e2e", "area": "whole", "run": OWN},
    }
    areas = parse_table("small/areas", plain, builders.HERE)
    area = next(c for c in areas.cells() if c.metric.area and c.keys["benchmark"] == "quiz")
    ends = {part.metric.definition: part.run[-1] for part in areas.parts(area)}
    assert ends == {"tps/e2e": OWN[-1], "score": "limit=50"}


Points = list[tuple[float, float]]


def aup(points: Points, y_max: float, drop: float = DROP) -> float:
    """Return the area under the curve of the points that lost at most `drop`."""
    return float(area([points[i] for i in within_drop(points, drop)], y_max))


# d3LLM's leaderboard (commit e5bfcac): tasks; scores of one token per forward (autoregressive and
# diffusion models), which may be the best of a task; points of each method and the area below them.
LLADA = """
GSM8K MATH MBPP HumanEval Long-GSM8K
74.1 41.15 63.6 67.73 82.56
72.55 32.2 41.72 38.28 78.58
1:74.79 2.77:74.68 = 205.8 | 1:32.1 1.97:30.82 = 47.2 | 1:41.58 2.13:38.6 = 56.6 | \
1:38.16 2.56:37.8 = 54.0 | 1:78.45 2.45:78.01 = 175.4
1:74.98 2.88:74.39 = 213.8 | 1:29.1 2.66:28.94 = 49.0 | 1:39.1 2.13:39.0 = 53.0 | \
1:41.02 2.69:40.64 = 62.0 | 1:76.0 2.7:75.66 = 176.9
1:74.0 5.14:72.63 = 358.1 | 1:32.0 3.17:30.18 = 64.5 | 1:41.62 2.35:40.0 = 60.5 | \
1:39.68 4.93:39.02 = 83.7 | 1:79.15 4.49:76.65 = 309.1
1:74.02 9.11:73.09 = 637.7 | 1:32.76 5.74:30.36 = 107.6 | 1:42.0 4.21:40.6 = 88.4 | \
1:39.8 5.95:39.63 = 96.6 | 1:78.32 6.95:74.22 = 441.1
"""


def test_every_published_area() -> None:
    lines = LLADA.strip().splitlines()[1:]
    alone = [[float(word) for word in line.split()] for line in lines if ":" not in line]
    rows = [line.split("|") for line in lines if ":" in line]
    assert (len(alone), [len(row) for row in rows]) == (2, [5] * 4)
    for task in range(5):
        areas = [row[task].split("=") for row in rows]
        curves = [[tuple(map(float, p.split(":"))) for p in points.split()] for points, _ in areas]
        scores = [row[task] for row in alone] + [y for points in curves for _, y in points]
        for points, (_, expected) in zip(curves, areas, strict=True):
            assert aup(points, max(scores)) == pytest.approx(float(expected), abs=0.0501), points


def test_a_loss_of_more_than_five_points_is_left_out() -> None:
    kept = [(1.0, 70.0), (4.0, 68.0)]
    assert aup([*kept, (2.0, 64.9)], 70.0) == aup(kept, 70.0) != aup([*kept, (2.0, 65.0)], 70.0)
    assert aup([*kept, (5.0, 64.9)], 70.0, drop=6) > aup(kept, 70.0)
    with pytest.raises(DllmBenchError, match="without points"):
        aup([], 70.0)


scores = st.floats(1, 100)
points_of = st.lists(st.tuples(st.floats(1, 20), scores), min_size=1, max_size=8)


@settings(deadline=None)
@given(points_of, st.randoms())
def test_the_order_of_points_says_nothing(points: Points, random) -> None:
    assume(len({x for x, _ in points}) == len(points))
    shuffled = random.sample(points, len(points))
    assert aup(shuffled, 100.0, drop=100) == pytest.approx(aup(points, 100.0, drop=100))


@settings(deadline=None)
@given(st.lists(st.tuples(scores, scores), min_size=1, max_size=5))
def test_an_area_of_arrays_is_the_area_of_each(draws: list[tuple[float, float]]) -> None:
    ys = np.array(draws).T
    found = area([(1.0, ys[0]), (3.0 + ys[1] / 100, ys[1])], ys.max(0))
    for k, (first, last) in enumerate(draws):
        one = area([(1.0, first), (3.0 + last / 100, last)], max(first, last))
        assert found[k] == pytest.approx(one)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=10))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    front = pareto_front(points)
    for j, (u, v) in enumerate(points):
        beaten = any(x >= u and y >= v and (x > u or y > v) for x, y in points)
        assert (j in front) == (not beaten)
