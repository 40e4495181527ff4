"""Metrics with runs of their own: speeds over fewer items and several passes than the score."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from dllm_bench.claims.spec import Claim
from dllm_bench.cli import table as command
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store
from dllm_bench.tables import render
from dllm_bench.tables.frame import BuiltTable, Row, build
from dllm_bench.tables.load import parse_table
from dllm_bench.tables.plan import PlannedTable, distinct_runs
from dllm_bench.tables.render import as_json
from dllm_bench.tables.spec import PaperTable, Profile
from tests.tables import test_areas
from tests.tables.builders import ENVIRONMENT, FULL, HERE, TINY, planned_small, record_of, seal

OWN = ["limit=12", "benchmark.repeats=5"]
EMBEDDED = replace(TINY, set=("hardware=cpu",), default=("limit=20",))
"""Like the embedded profile, whose number of items is a default."""


def table(**metrics: Any) -> PaperTable:
    """Return the small table that reports nothing, with speeds from runs of their own."""
    plain = deepcopy(read_yaml(HERE / "small" / "own.yaml"))
    tps = {"label": "TPS", "definition": "tps/e2e", "run": OWN}
    plain["metrics"] |= {"tps": tps, "faster": {**tps, "over": {"decoder": "plain"}}, **metrics}
    return parse_table("small/own", plain, HERE)


def made(spec: RunSpec) -> RunRecord:
    """Return the run's record: as many items and passes as it says; pass k is k + 10 tenths as
    slow."""
    once = record_of(spec, right=5, n=spec.limit or 30)
    if spec.repeats == 1:
        return once
    n, passes = len(once.columns["id"]), range(spec.repeats)
    columns = {name: column * len(passes) for name, column in once.columns.items()}
    columns["id"] = [f"{key}#{k}" for k in passes for key in once.columns["id"]]
    columns["seconds"] = [
        (1 + k / 10) * seconds
        for k in passes
        for seconds in columns["seconds"][k * n : (k + 1) * n]
    ]
    return replace(once, columns=columns)


def built(store: Store, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> BuiltTable:
    """Return the table with all of its runs."""
    for run in distinct_runs(planned_small(store, profile, monkeypatch, table())):
        assert run.spec
        seal(store, made(run.spec))
    return build(table(), profile, planned_small(store, profile, monkeypatch, table()))


def cell(found: BuiltTable, metric: str, decoder: str = "quick") -> Row:
    [row] = found.cells.xs((decoder, metric), level=["decoder", "metric"]).itertuples()
    return row


@pytest.mark.parametrize(("profile", "scores"), [(EMBEDDED, "20"), (FULL, None)])
def test_speeds_have_runs_of_their_own(profile, scores, tmp_path, monkeypatch) -> None:
    """The last override of a key wins, after the profile's default and the paper's settings."""
    planned = planned_small(Store(tmp_path), profile, monkeypatch, table())
    runs = {metric: [p.run for p in planned if p.cell.metric.name == metric]
            for metric in ("score", "tpf", "tps", "faster")}  # fmt: skip
    assert runs["score"] == runs["tpf"]
    chosen = [(run.chosen.get("limit"), run.chosen.get("benchmark.repeats"))
              for run in (*runs["score"], *runs["tps"])]  # fmt: skip
    assert chosen == [(scores, None)] * 2 + [("12", "5")] * 2
    assert len(distinct_runs(planned)) == 4, "a ratio takes the runs of its two sides"
    lines = list(command.command_lines([PlannedTable(table(), profile, planned)]))
    assert sum("limit=12" in line and "benchmark.repeats=5" in line for line in lines) == 2
    quick = planned_small(Store(tmp_path), profile.limited(3), monkeypatch, table())
    assert {run.chosen["limit"] for run in distinct_runs(quick)} == {"3"}


def test_each_number_comes_from_its_run(tmp_path, monkeypatch) -> None:
    found = built(Store(tmp_path), EMBEDDED, monkeypatch)
    assert [cell(found, name).n for name in ("score", "tpf", "tps")] == [20, 20, 60]
    assert cell(found, "score").value == 25.0
    tps = cell(found, "tps")
    assert tps.low < 0.9 * tps.value
    faster = cell(found, "faster")
    assert faster.low < 1 < faster.high


def test_a_row_names_both_runs_and_the_notes_say_what_a_bracket_is(tmp_path, monkeypatch) -> None:
    found = built(Store(tmp_path), EMBEDDED, monkeypatch)
    [block] = render.blocks(found)
    assert [len(render.hashes(row).split()) for row in block["rows"]] == [2, 2]
    assert block["here"] == ("tiny-alpha", "miniquiz")
    notes = dict(render.footer(found))["Definitions"]
    assert any("5 passes over the items" in line for line in notes)
    cells = json.loads(as_json(found))["cells"]
    by_metric = {c["metric"]: c["runs"] for c in cells if c["keys"]["decoder"] == "quick"}
    assert by_metric["score"] == by_metric["tpf"] != by_metric["tps"]


def test_a_table_without_such_runs_says_nothing_of_passes(tmp_path, monkeypatch) -> None:
    found = test_areas.built(tmp_path, monkeypatch)
    assert not any("passes" in line for _, lines in render.footer(found) for line in lines)


def test_runs_of_a_busy_machine_are_removed_once_it_is_idle(tmp_path, monkeypatch) -> None:
    """Those of the speeds alone: what other work disturbed is no reason to grade again."""
    monkeypatch.setitem(ENVIRONMENT, "cores", 2)
    monkeypatch.setitem(ENVIRONMENT, "load", 2.7)
    store = Store(tmp_path)
    planned = list(built(store, EMBEDDED, monkeypatch).cells.planned)
    speeds = [run for run in distinct_runs(planned) if run.spec and run.spec.repeats > 1]
    folders = {tmp_path / run.folder: run in speeds for run in distinct_runs(planned)}
    monkeypatch.setattr(command, "machine", lambda device: {"load": 2.61, "cores": 2})
    with pytest.raises(DllmBenchError, match=r"2 runs again .* below 2\.6"):
        command.remove_disturbed(planned, store)
    assert all(folder.exists() for folder in folders)
    monkeypatch.setattr(command, "machine", lambda device: {"load": 2.0, "cores": 2})
    assert command.remove_disturbed(planned, store) == 2
    assert {folder: not folder.exists() for folder in folders} == folders
    again = planned_small(store, EMBEDDED, monkeypatch, table())
    assert sum(run.open for run in distinct_runs(again)) == 2
    assert command.remove_disturbed(again, store) == 0


def test_a_claim_takes_the_runs_of_the_tables_metric(monkeypatch) -> None:
    sides = {"ours": ({"decoder": "quick"},), "theirs": ({"decoder": "plain"},)}
    monkeypatch.setattr("dllm_bench.claims.spec.source_table", lambda name: table())
    at = {"model": "alpha", "benchmark": "quiz"}
    for metric, own in (("tps/e2e", True), ("score", False)):
        claim = Claim("p/c", "A.", "T", table="x", metric=metric, at=at, **sides)
        assert all((c.run[-2:] == tuple(OWN)) is own for c in claim.cells().cells())


def test_an_area_takes_speeds_and_scores_from_their_own_runs() -> None:
    plain = deepcopy(test_areas.PLAIN)
    plain["metrics"] = {
        "score": {"label": "Score", "definition": "score", "run": ["limit=50"]},
        "aup": {"label": "AUP", "definition": "tps/e2e", "area": "whole", "run": OWN},
    }
    areas = parse_table("small/areas", plain, HERE)
    [area] = [c for c in areas.cells() if c.metric.area and c.curve == ("slow",) and
              c.keys["benchmark"] == "quiz"]  # fmt: skip
    ends = {part.metric.definition: part.run[-1] for part in areas.parts(area)}
    assert ends == {"tps/e2e": OWN[-1], "score": "limit=50"}
