"""Which queries may have a stored run, by the names in folders (`tables/plan`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.store.spec import slug
from dllm_bench.store.store import Store
from dllm_bench.tables import plan as planning
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.plan import GROUPS, Planner, folder_patterns, may_have
from tests.tables.builders import record_of, seal, spec_of


@pytest.mark.parametrize(
    ("query", "patterns"),
    [
        ("model=tiny-llada benchmark=minigsm decoder=lopa", ("minigsm", "tiny-llada", "lopa")),
        ("decoder=lopa decoder/score=credit", ("*", "*", "lopa-score.credit")),
        ("decoder=lopa decoder/score=neg_entropy", ("*", "*", "lopa")),
        ("decoder=lopa decoder/score=credit decoder/stop=filled", ("*", "*", "lopa*")),
        ("decoder=credit_lopa decoder/stop=filled", ("*", "*", "credit_lopa*")),
        ("model=served model.name=Qwen/Qwen3-8B", ("*", "Qwen-Qwen3-8B", "*")),
        ("model=tiny-llada model.path=/weights", ("*", "*", "*")),
        ("model=owner/checkpoint benchmark=acceptance", ("*", "*", "*")),
    ],
)
def test_a_query_says_how_its_folder_is_called(query: str, patterns: tuple[str, ...]) -> None:
    assert folder_patterns(query.split()) == patterns


@pytest.mark.parametrize(
    "query",
    [
        "decoder=credit decoder/score=confidence",
        "decoder=fast_dllm",
        "decoder=fast_dllm decoder/stop=eos",
        "decoder=fast_dllm decoder/stop=eos_token",
        "decoder=fast_dllm decoder/stop=filled decoder/cache=dual",
        "decoder=credit_lopa decoder/stop=filled",
        "decoder=credit_lopa decoder/explore=greedy",
    ],
)
def test_a_composed_run_has_the_names_that_its_query_gives(query: str) -> None:
    overrides = ["model=tiny-llada", "benchmark=minigsm", *query.split()]
    config = compose(overrides)
    folder = tuple(slug(str(config[group]["name"])) for group in GROUPS)
    assert may_have([folder], folder_patterns(overrides))
    assert not may_have([("mini", *folder[1:])], folder_patterns(overrides))


def test_a_table_is_composed_only_where_a_run_of_it_may_be_stored(tmp_path: Path) -> None:
    composed: list[list[str]] = []

    def noting(overrides: Sequence[str]) -> dict:
        composed.append(list(overrides))
        return compose(overrides)

    store, name = Store(tmp_path / "runs"), "creditdecoding/table1"
    mine = compose(["model=tiny-llada", "benchmark=minimath", "decoder=dus"])
    seal(store, record_of(spec_of({**mine, "limit": None})))
    table, profile = load_table(name), load_profile("embedded")
    planner = Planner(noting, store, folders=planning.stored_folders(store))
    assert not planner.has_run(table, profile) and not composed
    cells = planner.common([table], profile)[0].cells
    runs = [run for cell in cells for run in cell.runs]
    assert runs and not composed
    assert {run.reason for run in runs} == {planning.NOT_STORED}
    assert Planner(noting, store).has_run(table, profile)
