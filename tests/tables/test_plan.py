"""Which runs a table needs and where they stand.

What tables remember of their settings is what composing and resolving would say again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from dllm_bench import paths
from dllm_bench.api import compose as composing
from dllm_bench.api.compose import compose as real_compose
from dllm_bench.benchmarks.items import downloads_allowed
from dllm_bench.cli.main import main
from dllm_bench.core import output
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import local
from dllm_bench.paths import assets_dir, conf_dir, place_of
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
from dllm_bench.tables import load
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
from dllm_bench.tables.spec import Query
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
            with suppress(composing.DllmBenchError):  # no counterpart
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
        except composing.DllmBenchError:
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
