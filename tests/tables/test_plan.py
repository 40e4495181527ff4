"""Which runs a table needs and where they stand."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from dllm_bench.api.compose import compose as real_compose
from dllm_bench.benchmarks.items import downloads_allowed
from dllm_bench.cli.main import main
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import local
from dllm_bench.runs.dependencies import prepare_device
from dllm_bench.store.groups import Role, RunConfig
from dllm_bench.store.inputs import MissingInputError, sources
from dllm_bench.store.spec import RunSpec, digest, slug, split
from dllm_bench.store.store import Store
from dllm_bench.tables import plan as planning
from dllm_bench.tables.load import load_profile, load_table, names_of
from dllm_bench.tables.plan import (
    GROUPS,
    CellState,
    PlannedRun,
    Planner,
    distinct_runs,
    folder_patterns,
    may_have,
)
from tests.tables.builders import (
    FULL,
    TINY,
    compose,
    planned_small,
    queries_of,
    record_of,
    seal,
    settings,
    small_table,
    spec_at,
    spec_of,
)
from tests.tiers import covering


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (MissingInputError("No weights of alpha."), "unavailable: needs weights or data"),
        (DllmBenchError("The filter was trained for beta."), "unavailable: settings do not fit"),
    ],
)
def test_a_run_that_cannot_be_specified_says_why(error, short, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(RunSpec, "from_config", Mock(side_effect=error))
    run = Planner(compose, Store(tmp_path)).cells(small_table(), FULL)[0].run
    assert (run.state, run.short) == (CellState.UNAVAILABLE, short)
    assert run.reason.endswith(str(error))


@pytest.mark.parametrize(("present", "state"), [
    (None, CellState.UNAVAILABLE),
    ("NVIDIA Y90", CellState.UNAVAILABLE),
    ("NVIDIA Z100 80GB", CellState.MISSING),
    ("nvidia z100-sxm", CellState.MISSING),
])  # fmt: skip
def test_planning_and_running_agree_on_the_device(present, state, tmp_path, monkeypatch) -> None:
    """A run is planned where it would start; upper and lower case make no difference."""

    def on_cuda(query):
        config = compose(query)
        config["hardware"] |= {"name": "z100", "device": "cuda", "match": "Z100"}
        return config

    monkeypatch.setattr(RunSpec, "from_config", staticmethod(spec_of))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: present)
    run = Planner(on_cuda, Store(tmp_path)).cells(small_table(), FULL)[0].run
    assert run.state is state
    spec = spec_of(on_cuda(run.query))
    if state is CellState.UNAVAILABLE:
        assert run.short == "unavailable: needs a GPU (Z100)"
        with pytest.raises(DllmBenchError, match=f"Z100.*{present or 'no CUDA device'}"):
            prepare_device(spec)
    else:
        prepare_device(spec)


def test_only_runs_to_be_made_here_need_their_device(tmp_path, monkeypatch) -> None:
    """Records measured elsewhere are shown; a login node sends runs to other machines."""
    store = Store(tmp_path)
    seal(store, record_of(spec_at(planned_small(store, FULL), "S1", "quiz")))
    monkeypatch.setattr(planning, "missing_device", lambda hardware: "a GPU (Z100)")
    here = {(p.cell.keys["setting"], p.cell.keys["benchmark"]): p.run.state
            for p in planned_small(store, FULL)}  # fmt: skip
    assert here.pop(("S1", "quiz")) is CellState.SEALED
    assert set(here.values()) == {CellState.UNAVAILABLE}
    monkeypatch.setattr(RunSpec, "from_config", staticmethod(spec_of))
    elsewhere = Planner(compose, store, any_machine=True).cells(small_table(), FULL)
    states = {CellState.SEALED, CellState.MISSING, CellState.UNAVAILABLE}
    assert {planned.run.state for planned in elsewhere} == states


def test_a_plan_asks_no_server_for_items_unless_told_to(tmp_path, monkeypatch) -> None:
    def note(config, resolve) -> RunSpec:
        assert downloads_allowed() is asks
        return spec_of(config)

    monkeypatch.setattr(RunSpec, "from_config", staticmethod(note))
    for asks in (False, True):
        Planner(compose, Store(tmp_path), download=asks).cells(small_table(), FULL)
    assert downloads_allowed(), "only while planning"


def test_what_has_to_be_trained_first_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = "results/training/filters/"
    (tmp_path / own / "there").mkdir(parents=True)
    sources = (own + "there", own + "absent", own + "absent", "assets/filters/x", None, "owner/id")
    configs = (RunConfig({"decoder": {"head": {"source": one}}}) for one in sources)
    runs = [PlannedRun((), CellState.MISSING, config=one) for one in configs]
    assert planning.missing_trained_files(runs) == [own + "absent"]


def test_a_value_without_counterpart_is_impossible_not_an_error(tmp_path) -> None:
    run = planned_small(Store(tmp_path), replace(TINY, replace={"model": {}}))[0].run
    assert run.state is CellState.UNAVAILABLE and "no counterpart of model=alpha" in run.reason


def test_table4_plans_the_runs_that_run_would_make(tmp_path: Path, monkeypatch) -> None:
    """Some runs of the plan have the hash that `dllm-bench run` gives to their commands; each
    setting has one for its score and one of several passes for its speed."""
    run_here = Mock(side_effect=lambda spec, *_, **__: record_of(spec))
    monkeypatch.setattr(local, "run", run_here)
    planner = Planner(real_compose, Store(tmp_path))
    planned = planner.cells(load_table("lopa/table4"), load_profile("embedded"))
    runs = distinct_runs(planned)
    assert (len(planned), len(runs)) == (288, 2 * 72)
    assert all(entry.cell.reported for entry in planned)
    assert {run.state for run in runs} == {CellState.MISSING}
    assert len({run.spec for run in runs}) == 2 * 72
    assert sorted({run.spec.repeats for run in runs if run.spec}) == [1, 5]
    monkeypatch.chdir(tmp_path)
    for run in runs[::47]:  # of both kinds
        assert main(run.command.split()[1:]) == 0
        assert run_here.call_args.args[0] == run.spec


@pytest.mark.xdist_group("reference claims")  # which share composed settings
@pytest.mark.parametrize("profile", ["embedded", "paper"])
@pytest.mark.parametrize("name", covering(12, names_of("table"), often=6))
def test_no_two_settings_of_a_benchmark_are_one_run(name: str, profile: str) -> None:
    """In what they compose to, files that enter by content included; every one composes, but for
    what a profile has no counterpart of."""
    found: dict[tuple[str | None, str], tuple[str, ...]] = {}
    for query, benchmark in queries_of(name).items():
        with suppress(DllmBenchError):
            config = settings().compose(load_profile(profile).translate(query))
            files = list(sources(config["decoder"]))
            key = (benchmark, digest([split(config)[Role.IDENTITY], files]))
            assert key not in found, f"{query} and {found[key]} are one run"
            found[key] = query


@pytest.mark.parametrize("profile", ["embedded", "paper"])
def test_masked_decoders_differ_in_the_decoder_alone(profile: str) -> None:
    table = load_table("decoders/masked")
    runs = {c.keys["decoder"]: load_profile(profile).translate(c.run) for c in table.cells()}
    rows = {decoder: real_compose(run) for decoder, run in runs.items()}
    decoders = {name: config.pop("decoder") for name, config in rows.items()}
    assert len({digest(config) for config in rows.values()}) == 1
    assert {decoder["schedule"]["block"] for decoder in decoders.values()} == {32}
    common = decoders["vanilla"]["stop"]
    others = {name for name, decoder in decoders.items() if decoder["stop"] != common}
    assert others == {"learn2pd_filled", "learn2pd_eotp", "learn2pd_eotp_paper"}


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
    config = real_compose(overrides)
    folder = tuple(slug(str(config[group]["name"])) for group in GROUPS)
    assert may_have([folder], folder_patterns(overrides))
    assert not may_have([("mini", *folder[1:])], folder_patterns(overrides))


def test_a_table_is_composed_only_where_a_run_of_it_may_be_stored(tmp_path: Path) -> None:
    composing, store, name = Mock(wraps=real_compose), Store(tmp_path), "creditdecoding/table1"
    mine = real_compose(["model=tiny-llada", "benchmark=minimath", "decoder=dus"])
    seal(store, record_of(spec_of({**mine, "limit": None})))
    table, profile = load_table(name), load_profile("embedded")
    planner = Planner(composing, store, folders=planning.stored_folders(store))
    assert not planner.has_run(table, profile)
    runs = [run for cell in planner.common([table], profile)[0].cells for run in cell.runs]
    assert {run.reason for run in runs} == {planning.NOT_STORED} and not composing.called
    assert Planner(composing, store).has_run(table, profile)
