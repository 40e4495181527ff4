"""Which runs a table needs, where they stand, and what the open ones will cost.

What tables remember of their settings is what composing and resolving would say again. Costs
(forwards, seconds, bytes) are checked against sealed runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dllm_bench import paths
from dllm_bench.api import compose as composing
from dllm_bench.benchmarks.items import downloads_allowed
from dllm_bench.cli.main import main
from dllm_bench.core import output
from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import local
from dllm_bench.paths import assets_dir, conf_dir, options, place_of
from dllm_bench.runs.dependencies import prepare_device
from dllm_bench.store import cache, inputs
from dllm_bench.store.cache import (
    DerivedCache,
    SettingsCache,
    default_paths,
    fingerprint,
    fingerprints,
)
from dllm_bench.store.groups import Role, RunConfig
from dllm_bench.store.inputs import MissingInputError, sources
from dllm_bench.store.spec import RunSpec, digest, slug, split
from dllm_bench.store.store import Store
from dllm_bench.tables import cost, load
from dllm_bench.tables import plan as planning
from dllm_bench.tables.load import load_profile, load_table, names_of
from dllm_bench.tables.plan import (
    GROUPS,
    CellState,
    PlannedCell,
    PlannedRun,
    Planner,
    distinct_runs,
    folder_patterns,
    may_have,
)
from dllm_bench.tables.spec import Cell, Query, TableMetric
from tests.helpers import forget_composed
from tests.tables.builders import (
    FULL,
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


def test_table4_plans_the_runs_that_run_would_make(tmp_path: Path, monkeypatch) -> None:
    """Some runs of the plan have the hash that `dllm-bench run` gives to their commands; each
    setting has one for its score and one of several passes for its speed."""
    run_here = Mock(side_effect=lambda spec, *_, **__: record_of(spec))
    monkeypatch.setattr(local, "run", run_here)
    planner = Planner(composing.compose, Store(tmp_path))
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
    rows = {decoder: composing.compose(run) for decoder, run in runs.items()}
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
    config = composing.compose(overrides)
    folder = tuple(slug(str(config[group]["name"])) for group in GROUPS)
    assert may_have([folder], folder_patterns(overrides))
    assert not may_have([("mini", *folder[1:])], folder_patterns(overrides))


def test_a_table_is_composed_only_where_a_run_of_it_may_be_stored(tmp_path: Path) -> None:
    composed, store, name = Mock(wraps=composing.compose), Store(tmp_path), "creditdecoding/table1"
    mine = composing.compose(["model=tiny-llada", "benchmark=minimath", "decoder=dus"])
    seal(store, record_of(spec_of({**mine, "limit": None})))
    table, profile = load_table(name), load_profile("embedded")
    planner = Planner(composed, store, folders=planning.stored_folders(store))
    assert not planner.has_run(table, profile)
    runs = [run for cell in planner.common([table], profile)[0].cells for run in cell.runs]
    assert {run.reason for run in runs} == {planning.NOT_STORED} and not composed.called
    assert Planner(composed, store).has_run(table, profile)


QUERY = ("decoder=fast_dllm", "hardware=cpu", "limit=3")
never = Mock(side_effect=AssertionError("worked out again"))


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of conf that may be changed."""
    copy = tmp_path / "conf"
    shutil.copytree(conf_dir(), copy)
    for module in (paths, load):
        monkeypatch.setattr(module, "conf_dir", lambda: copy)
    forget_composed()
    yield copy
    forget_composed()


def sampled() -> list[Query]:
    """Return some queries of some tables, as the embedded profile has them."""
    profile, queries = load_profile("embedded"), []
    for name in names_of("table")[::8]:
        for query in list(queries_of(name))[::30]:
            with suppress(DllmBenchError):  # no counterpart
                queries.append(profile.translate(query))
    return list(dict.fromkeys(queries))


def test_nothing_is_kept_without_a_home_directory_and_no_secret_ever(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(output, "_secrets", {"sk-0123456789abcdef": None})
    cache = DerivedCache(tmp_path, "kind", ["1"])
    cache.put("key", [], {"url": "x?key=sk-0123456789abcdef"})
    assert cache.get("key", []) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-here/caches")
    cache = DerivedCache(tmp_path, "kind", ["1"])
    cache.put("key", [], 1)
    cache.save()
    assert cache.get("key", []) == 1
    assert DerivedCache(tmp_path, "kind", ["1"]).get("key", []) is None


def test_what_is_remembered_is_what_was_worked_out(tmp_path, monkeypatch) -> None:
    real = {f"model={file.stem}" for file in (conf_dir() / "model").glob("smollm2*.yaml")}
    queries = [query for query in sampled() if not {"model=served", *real} & set(query)]
    first = SettingsCache(tmp_path, composing.compose)
    made = {}
    for query in queries:
        config = first.compose(query)
        by_hydra = composing.to_plain(composing.compose_groups(tuple(query)))
        assert config == composing.compose(query) == by_hydra, query
        try:
            made[query] = RunSpec.from_config(config, first.resolve)
        except DllmBenchError:
            continue  # weights that are not here
        assert made[query].to_plain() == RunSpec.from_config(composing.compose(query)).to_plain()
    assert len(made) > 3
    first.save()
    again = SettingsCache(tmp_path, never)
    monkeypatch.setattr(inputs, "resolve", never)
    for query, spec in made.items():
        found = RunSpec.from_config(again.compose(query), again.resolve)
        assert (found.to_plain(), found.runtime) == (spec.to_plain(), spec.runtime)


@pytest.mark.parametrize("file", ["decoder/select/threshold.yaml", "paths/default.yaml"])
def test_a_changed_yaml_forgets_everything(conf: Path, tmp_path: Path, file: str) -> None:
    first = SettingsCache(tmp_path, composing.compose)
    before = first.compose(QUERY)
    first.save()
    assert SettingsCache(tmp_path, never).compose(QUERY) == before
    text = (conf / file).read_text()
    changed = text.replace("tau: 0.9", "tau: 0.8").replace(",results}", ",elsewhere}")
    assert changed != text
    (conf / file).write_text(changed)
    forget_composed()
    after = SettingsCache(tmp_path, composing.compose).compose(QUERY)
    assert after != before and after == composing.compose(QUERY)


def test_a_changed_variable_forgets_everything(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("DLLM_BENCH_DATA", raising=False)
    first = SettingsCache(tmp_path, composing.compose)
    assert first.compose(QUERY)["paths"]["data"] is None
    first.save()
    monkeypatch.setenv("DLLM_BENCH_DATA", "/somewhere")
    again = SettingsCache(tmp_path, composing.compose).compose(QUERY)
    assert again["paths"]["data"] == "/somewhere"


def test_a_changed_line_of_the_package_forgets_everything(tmp_path, monkeypatch) -> None:
    package = tmp_path / "package"
    (package / "assets").mkdir(parents=True)
    (package / "code.py").write_text("a = 1\n")
    monkeypatch.setattr(cache, "PACKAGE", package)
    before = cache.made_by()
    (package / "assets" / "weights").write_text("read where settings name it")
    assert cache.made_by() == before
    (package / "code.py").write_text("a = 2\n")
    assert cache.made_by() != before


def test_a_file_that_a_decoder_names_is_part_of_what_it_is_remembered_by(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text((assets_dir() / "profiles" / "tiny-qwen3-cpu.json").read_text())
    query = ("model=tiny-qwen3", "decoder=dspark", "decoder/length=hardware_aware", "hardware=cpu")
    config = composing.compose((*query, f"decoder.length.profile.source={profile}"))
    first = SettingsCache(tmp_path, composing.compose)
    before = RunSpec.from_config(config, first.resolve)
    first.save()
    plain = json.loads(profile.read_text())
    plain["steps_per_s"] = [2 * rate for rate in plain["steps_per_s"]]
    profile.write_text(json.dumps(plain))
    after = RunSpec.from_config(config, SettingsCache(tmp_path, never).resolve)
    assert after.identity_hash != before.identity_hash and after == RunSpec.from_config(config)


def test_what_files_do_not_tell_is_not_remembered() -> None:
    def files(*overrides: str) -> Any:
        return inputs.files_of(RunConfig(composing.compose((*QUERY, *overrides))))

    head = "decoder/select=filter", "decoder.select.head.source=nowhere"
    assert files() is not None and files(head[0]) is not None
    for unknown in (("hardware=auto",), ("model=llada-instruct",), head, ("benchmark=gsm8k",)):
        assert files(*unknown) is None, unknown
    imported = files("model=smollm2-block4")
    assert place_of("imported/smollm2") in imported, "before it is imported too"


@pytest.mark.parametrize("results", [None, "there", ""])
def test_paths_are_read_without_hydra_or_left_to_it(conf: Path, monkeypatch, results) -> None:
    monkeypatch.delenv("DLLM_BENCH_RESULTS", raising=False)
    monkeypatch.setenv("DLLM_BENCH_DATA", "null")
    if results is not None:
        monkeypatch.setenv("DLLM_BENCH_RESULTS", results)
    forget_composed()
    assert default_paths() == composing.compose(())["paths"]
    file = conf / "paths" / "default.yaml"
    file.write_text(file.read_text() + "more: ${paths.results}/more\n")
    assert default_paths() is None, "of another form"


def test_a_derived_value_is_kept_while_its_fingerprint_holds(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("a")
    cache = DerivedCache(tmp_path, "kind", ["v1"])
    before = fingerprints([tmp_path / "file"])
    cache.put("one", before, {"a": [1, 2.5, None]})
    cache.put("changed by json", before, (1, 2))
    cache.put("two", [], 2)
    cache.save()
    assert list(tmp_path.iterdir()) == [file], "results stay as they are"
    others = DerivedCache(tmp_path / "other", "kind", ["v1"]), DerivedCache(tmp_path, "x", ["v1"])
    assert [other.get("two", []) for other in others] == [None, None]
    again = DerivedCache(tmp_path, "kind", ["v1"])
    assert again.get("one", before) == {"a": [1, 2.5, None]}
    assert again.get("changed by json", before) is None
    file.write_text("ab")
    assert again.get("one", fingerprints([file])) is None
    assert DerivedCache(tmp_path, "kind", ["v2"]).get("two", []) is None
    again.save(lambda key: key != "two")
    assert DerivedCache(tmp_path, "kind", ["v1"]).get("two", []) is None
    for damaged in ("no json", "[]", "{}", json.dumps({"made_by": 1, "values": 2})):
        cache.path.write_text(damaged)
        assert DerivedCache(tmp_path, "kind", ["v1"]).get("one", before) is None
    assert fingerprint(tmp_path / "absent") == []


LOOKAHEAD = {"_target_": "explore.lookahead"}
CACHED = {"cache": {"_target_": "cache.dual"}}
SCORE = TableMetric("score", "Score", "score")
SUMMARY = DecoderSummary(branches=3, block=8)
TPF = TableMetric("tpf", "TPF", "tpf/committed")


def config(**changes: Any) -> RunConfig:
    """Return a composed run: 20 items of GSM8K, 64 tokens, LLaDA on an H200."""
    groups: dict[str, Any] = {
        "model": {"name": "llada-instruct"},
        "decoder": {
            "name": "fast_dllm",
            "_target_": "decoder.masked",
            "score": {"_target_": "score.confidence"},
            "select": {"_target_": "select.threshold", "tau": 0.9},
            "schedule": {"_target_": "schedule.blocks", "block": 32},
            "cache": {"_target_": "cache.none"},
        },
        "benchmark": {"name": "gsm8k", "max_new_tokens": 64, "shots": 0},
        "hardware": {"name": "h200"},
        "limit": 20,
    }
    for group, change in changes.items():
        groups[group] = {**groups[group], **change} if isinstance(change, Mapping) else change
    return RunConfig(groups)


def ms_of(config: RunConfig) -> float:
    """Milliseconds of one forward."""
    return cost.forward_ms(config, cost.summary_of(config["decoder"])) or 0.0


def model_of(*runs: PlannedRun, tpf: str = "") -> cost.CostModel:
    """Return the cost model of these runs; the first one's cell reports `tpf`."""
    cells = [planned(run) for run in runs]
    cells += [planned(runs[0], TPF, tpf)] if tpf else []
    return cost.CostModel(cells, cost.MeasuredRuns.of(run.record for run in runs if run.record))


def planned(run: PlannedRun, metric: TableMetric = SCORE, reported: str = "") -> PlannedCell:
    return PlannedCell(Cell({}, metric, (), reported, ()), run)


def missing(**changes: Any) -> PlannedRun:
    return PlannedRun((str(changes),), CellState.MISSING, config=config(**changes))


def sealed(forwards: int, seconds: float, n: int = 20, **changes: Any) -> PlannedRun:
    """Return a sealed run of `n` samples with the same forwards and seconds each."""
    plain = config(**changes)
    record = record_of(spec_of({**plain, "seed": 0, "limit": n}), n=n)
    record.columns["forwards"][:] = [forwards] * n
    record.columns["seconds"][:] = [seconds] * n
    run = PlannedRun((str(changes),), CellState.SEALED, spec=record.spec, record=record)
    return replace(run, folder="x", done=n, total=n, config=plain)


def test_a_decoder_takes_its_own_forwards_else_what_is_reported_else_one_a_token() -> None:
    run = missing()
    found = model_of(run).estimate(run)
    assert found.forwards == 20 * 64
    assert found.seconds == pytest.approx(20 * 64 * ms_of(run.config) / 1000)
    assert model_of(run, tpf="4.0").estimate(run).forwards == 20 * 64 / 4
    other = sealed(16, 1.0, decoder={"name": "fast_dllm"}, benchmark={"max_new_tokens": 128})
    assert model_of(run, other, tpf="4.0").estimate(run).forwards == 20 * 64 * 16 / 128


def test_without_a_sealed_run_of_the_decoder_the_others_speak_for_it() -> None:
    """But not for a decoder that commits one token per forward, and it not for them."""
    single = {"select": {"_target_": "select.topk"}}
    quick = sealed(16, 1.0, decoder={"name": "credit"})
    model = model_of(quick, sealed(64, 1.0, decoder={"name": "vanilla", **single}))
    assert model.estimate(missing()).forwards == 20 * 16
    assert model.estimate(missing(decoder={"name": "dream", **single})).forwards == 20 * 64


def test_what_is_done_costs_nothing_more() -> None:
    run = replace(missing(), done=15, total=20)
    whole, part = (model_of().estimate(each) for each in (missing(), run))
    for field in ("forwards", "seconds", "size"):
        assert getattr(part, field) == pytest.approx(getattr(whole, field) / 4)


def test_all_items_where_there_is_no_limit() -> None:
    assert model_of().estimate(missing(limit=None)).forwards == 1319 * 64
    assert model_of().estimate(missing(limit=9999)).forwards == 1319 * 64
    assert model_of().estimate(missing(benchmark={"repeats": 4})).forwards == 4 * 20 * 64


def test_nothing_is_guessed_of_an_unknown_model_or_task() -> None:
    assert model_of().estimate(missing(model={"name": "omega"})) is None
    assert model_of().estimate(missing(benchmark={"name": "riddles"})) is None
    assert cost.cost_in_words([None]) == "unknown"
    assert cost.cost_in_words([cost.Cost(10, 30, 1e6), None]).endswith("and 1 runs of unknown cost")


def test_every_model_has_its_parameters_and_every_benchmark_its_items() -> None:
    lacking = [name for name in options("model") if not cost._entry("parameters", name)]
    named = (name.replace("deepspec_", "acceptance-") for name in options("benchmark"))
    lacking += [name for name in named if not cost._entry("items", name)]
    assert lacking == ["served", "acceptance"]


@pytest.mark.parametrize(
    ("changes", "fed"),
    [
        ({}, 90 + 64),
        ({"decoder": {"explore": LOOKAHEAD | {"k": 3}}}, 4 * (90 + 64)),
        ({"decoder": {"explore": LOOKAHEAD | {"k": 4, "counts_base": True}}}, 4 * (90 + 64)),
        ({"benchmark": {"shots": 4}}, 90 + 64 + 4 * 150),
        ({"decoder": CACHED}, 64),
    ],
)
def test_branches_canvas_and_cache_make_the_positions(changes, fed) -> None:
    run = config(**changes)
    assert cost.positions(run, cost.summary_of(run["decoder"])) == fed


def test_a_small_forward_is_overhead_and_reading_weights_a_large_one_arithmetic() -> None:
    assert ms_of(config(decoder=CACHED)) == pytest.approx(15 + 1000 * 16e9 / 3400e9)
    large = ms_of(config(decoder={"explore": {**LOOKAHEAD, "k": 31}}))
    assert large == pytest.approx(15 + 1000 * 2 * 8e9 * 32 * 154 / 690e12)


def test_estimates_are_checked_on_each_run_from_the_others() -> None:
    each = ms_of(config()) / 1000
    runs = [sealed(10, 10 * each * n, decoder={"name": f"d{n}", "k": n}) for n in (2, 4)]
    assert model_of(*runs).measured.errors == pytest.approx([1 / 2, 2])


def test_a_decoder_that_cannot_be_made_here_is_estimated_by_its_settings() -> None:
    """The run is unavailable here, but its cost elsewhere is shown."""
    absent = {"_target_": "filter.learned", "source": "results/training/filters/absent"}
    select = {"_target_": "select.filter", "head": absent}
    plain = config(decoder={"select": select, "schedule": {"block": 16}})["decoder"]
    assert cost.summary_of(plain) == DecoderSummary(block=16)
    assert cost.summary_of({"draft": {}}) == DecoderSummary(drafts=True)
    assert cost.summary_of(config()["decoder"]).caches is False


def test_a_decoders_summary_is_kept_until_its_file_changes(tmp_path, monkeypatch) -> None:
    make = Mock(return_value=SUMMARY)
    monkeypatch.setattr(cost, "summary_of", make)
    file = tmp_path / "filter"
    file.write_text("one")
    settings = SettingsCache(tmp_path, dict)
    for decoder in ({"name": "plain"}, {"filter": {"source": str(file)}}):
        for _ in range(2):
            assert cost.MeasuredRuns([], settings=settings).summary(decoder) == SUMMARY
    assert make.call_count == 2
    file.write_text("another")
    cost.MeasuredRuns([], settings=settings).summary(decoder)
    assert make.call_count == 3
    for _ in range(2):
        cost.MeasuredRuns([], settings=settings).summary({"_target_": "mine.Decoder"})
    assert make.call_count == 5
