"""Tables and profiles as data: cells, queries, reported values, notes.

Also what the profiles of published sizes make of LoPA's tables, and the commands they print.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import yaml

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import parse
from dllm_bench.cli.table import chosen_profile
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import load_figure
from dllm_bench.metrics.definitions import definition
from dllm_bench.paths import CONFIG_DIR, conf_dir, conf_file, read_yaml
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import missing_device
from dllm_bench.store.spec import digest, slug
from dllm_bench.tables import load
from dllm_bench.tables.frame import why_incomparable
from dllm_bench.tables.load import REPORTED_TABLES, load_profile, load_table, names_of
from dllm_bench.tables.plan import DO_NOT_FIT, CellState, PlannedCell, PlannedRun, cells_with_runs
from dllm_bench.tables.spec import Cell, Instead, Profile, TableMetric, parse_number
from tests.tables.builders import HERE, TINY, queries_of, record_of, small_table, spec_of
from tests.tables.builders import compose as made_up

PRINTED = sorted(p for p in REPORTED_TABLES.rglob("*.csv") if not p.stem.endswith("_notes"))
"""The files of printed values; notes are this project's own."""


@pytest.mark.parametrize("path", PRINTED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_reported_value_is_the_transcriptions(path: Path, paper_tables: Path) -> None:
    theirs = sorted((paper_tables / path.parent.name).glob(f"{path.stem}*.csv"))
    assert theirs, f"nothing in {paper_tables} is called {path.stem}"
    printed, *found = (file.read_text(encoding="utf-8").split() for file in (path, *theirs))
    assert printed in found


@pytest.mark.parametrize("name", names_of("table"))
def test_the_parts_of_a_table_belong_together(name: str) -> None:
    """Reported values have cells, derived numbers parts, notes places."""
    table = load_table(name)
    cells = list(table.cells())
    shown = [(*cell.keys.values(), cell.metric.name) for cell in cells if cell.reported]
    assert sorted(shown) == sorted(table.reported)
    assert all(leaf.run for leaf in cells_with_runs(table))
    for metric in table.metrics:
        assert metric.is_score or metric.setting or definition(metric.definition).text
    for note in table.notes:
        assert not note.where or any(note.name in cell.notes for cell in cells), note
    values = [value.name for values in table.facets.values() for value in values]
    assert values == [slug(value) for value in values], "can be names of files"


@pytest.mark.parametrize("name", names_of("table"))
def test_the_embedded_profile_runs_small_models_and_tasks_alone(name: str) -> None:
    profile = load_profile("embedded")
    for asked in queries_of(name):
        try:
            query = profile.translate(asked)
        except DllmBenchError as error:
            assert re.search(r"has no counterpart of|was not trained on", str(error))
            continue
        chosen = dict(override.split("=", 1) for override in query)
        assert chosen["model"].startswith(("tiny-", "smollm2"))
        real = chosen["model"] == "smollm2" and chosen["benchmark"] in profile.as_asked
        assert real or chosen["benchmark"].startswith(("mini", "sentences", "open_text"))
        assert chosen["hardware"] == "cpu"


@pytest.mark.parametrize("name", names_of("table"))
def test_the_paper_profile_keeps_the_query(name: str) -> None:
    """But for the settings that make LoPA-Dist's decoder the released one."""
    profile = load_profile("paper")
    for query in queries_of(name):
        asked = dict(override.split("=", 1) for override in query)
        found = dict(override.split("=", 1) for override in profile.translate(query))
        changed = {key for key in asked if found.get(key) != asked[key]}
        if found.get("decoder") == "lopa_dist":
            assert name in ("lopa/table3", "lopa/table4")
            assert changed == {"decoder", "decoder.explore.k", "decoder.cache.attention"}
        else:
            assert not changed


MBPP, MINICODE = "model=llada-instruct benchmark=mbpp", "benchmark=minicode_free"
SERVED = ("model=served", "model.engine=fast")
STANDS_FOR = {"instead": (Instead(SERVED, ("model=alpha", "decoder=ar")),)}
TOGETHER = {"instead": (Instead(("model=alpha", "benchmark=quiz"), ("model=alpha", "decoder=ar")),)}
UNSEEN = {"untrained": {"miniquiz": ["tiny-alpha"]}}
PATTERN = {"replace": {"model": {"big-*": "small-*", "big-five": "small"}}, "set": ()}
AR, SET = "model=tiny-alpha decoder=ar", "limit=20 hardware=cpu"
DEFAULT = {"replace": {}, "set": ("seed=1",), "default": ("limit=60",)}


@pytest.mark.parametrize(
    ("profile", "asked", "found"),
    [
        ({}, "limit=5 model=alpha", "limit=20 model=tiny-alpha hardware=cpu"),
        (STANDS_FOR, "model=served", ".* no counterpart of model=served.*"),
        (STANDS_FOR, f"{' '.join(SERVED)} seed=1", f"{AR} seed=1 {SET}"),
        (TOGETHER, "model=other benchmark=quiz model=alpha", f"{AR} {SET}"),  # the last of a key
        (UNSEEN, "model=alpha benchmark=quiz", ".*tiny-alpha was not trained on miniquiz.*"),
        (UNSEEN, "model=alpha benchmark=code", f"model=tiny-alpha benchmark=minicode {SET}"),
        (PATTERN, "model=big-five", "model=small"),
        (PATTERN, "model=big-two", "model=small-two"),
        (DEFAULT, "seed=2", "seed=1 limit=60"),
        (DEFAULT, "limit=240", "limit=240 seed=1"),
    ],
)
def test_a_profile_translates_a_query(profile: dict[str, Any], asked: str, found: str) -> None:
    assert re.fullmatch(found, translated(replace(TINY, **profile), asked))


def translated(profile: Profile, asked: str) -> str:
    """Return the query of a profile, or why there is none."""
    try:
        return " ".join(profile.translate(tuple(asked.split())))
    except DllmBenchError as error:
        return str(error)


def cell_of(*run: str) -> Cell:
    return replace(next(iter(small_table().cells())), run=run)


def test_an_entry_applies_to_what_those_before_gave() -> None:
    first = Instead(("model=beta", "limit=5"), ("model=alpha", "limit=5"))
    second = Instead(("model=alpha", "decoder.tau=1"), ("model=alpha", "decoder.tau=2"))
    profile = replace(TINY, instead=(first, second), set=())
    asked = ("model=beta", "limit=5", "decoder.tau=1")
    assert profile.translate(asked) == ("model=tiny-alpha", "decoder.tau=2", "limit=5")
    assert profile.switched("p/t1", cell_of(*asked)) == ("decoder.tau=2",)


def test_what_is_not_finite_is_no_number() -> None:
    assert [*map(parse_number, ("-1e3", "nan", "inf", "x"))] == [-1000, None, None, None]


def test_an_entry_may_be_for_some_tables() -> None:
    entry = Instead(("decoder.tau=1",), ("decoder.tau=2",), of=("p/t1", "q/*"))
    profile = replace(TINY, instead=(entry,))
    cell = cell_of("decoder.tau=3", "decoder.tau=1")
    assert profile.run_of("p/t1", cell) == profile.run_of("q/any", cell) == ("decoder.tau=2",)
    assert profile.run_of("p/t2", cell) == ("decoder.tau=1",)
    assert profile.switched("p/t1", cell) == ("decoder.tau=2",)
    assert profile.switched("p/t2", cell) == () and "decoder.tau=1" in profile.translate(cell.run)


def test_numbers_of_times_come_from_runs_of_several_passes() -> None:
    own = ("limit=10", "benchmark.repeats=5")
    table = small_table()
    timed = {"tps_avg"}  # the largest speed is one of all items
    for names, fits in (((table.name,), True), (("small/*",), True), (("other/*",), False)):
        profile = replace(TINY, passes=own, passes_of=names)
        for cell in table.cells():
            added = own if fits and cell.metric.name in timed else ()
            assert profile.run_of(table.name, cell) == (*cell.run, *added)
            asked = ("benchmark.repeats=3",) if cell.metric.name in timed else ()
            assert profile.in_passes(3).run_of(table.name, cell) == (*cell.run, *added, *asked)
            assert profile.in_passes(1).run_of(table.name, cell) == cell.run
            repeated = replace(cell, metric=replace(cell.metric, run=own))
            once = () if cell.metric.is_score else ("benchmark.repeats=1",)
            assert profile.in_passes(1).run_of(table.name, repeated) == (*cell.run, *once)


def test_what_is_computed_from_times_is_a_time() -> None:
    for name, is_time in (("tps/e2e", True), ("requests/s", True), ("tpf/net", False)):
        assert TableMetric("", "", name, area="whole").is_of_times is is_time


BOTH = {"label": "T", "definition": "score", "over": {"decoder": "a"}, "minus": {"decoder": "b"}}


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("title", None, "title of a PaperTable is not a text"),
        ("metric", {}, "no key 'metric'; did you mean 'metrics'"),
        ("metrics", {}, "No cell is shown"),
        ("metrics.tpf", BOTH, "one of `over` and `minus`"),
        ("metrics.tpf.setting", "decoder.k", "Metric tpf needs a `definition`"),
        ("layout.rows", ["decodr"], "name each facet once"),
        ("facets.decoder.valus", {}, "no key 'valus'"),
        ("facets.decoder.sweeps", {"s": {"run": ["decoder.k={at}"]}}, "it has no 'at'"),
        ("facets.decoder.sweeps", {"s": {"at": [1], "labl": "x", "run": []}}, "no key 'labl'"),
        ("facets.decoder.values.plain.label", 4, "label of a FacetValue is not a text"),
        ("facets.decoder.values.mean", {"mean_of": ["mean"]}, "in a cycle"),
        ("reported", "none.csv", "none.csv"),
        ("rules", [{"where": {"decoder": "quik"}, "skip": True}], "decoder quik"),
    ],
)
def test_a_table_that_cannot_be_read_is_one_sentence(
    place: str, value: object, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = read_yaml(HERE / "small" / "own.yaml")
    *groups, key = place.split(".")
    reduce(lambda group, name: group[name], groups, plain)[key] = value
    (tmp_path / "table" / "mine").mkdir(parents=True)
    (tmp_path / "table" / "mine" / "t.yaml").write_text(yaml.safe_dump(plain))
    monkeypatch.setenv(CONFIG_DIR, str(tmp_path))
    with pytest.raises(DllmBenchError, match=f"t.yaml cannot be read as a table: .*{words}"):
        load_table("mine/t")


def test_a_title_may_have_several_lines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(load, "conf_file", lambda name: tmp_path / "t.yaml")
    for text, title in (("title: 'A\n  b'", "A b"), ("title: >-\n  A", "A"), ("source: B", "")):
        (tmp_path / "t.yaml").write_text(text)
        assert load.title_of("table", "mine/t") == title


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("model=llada-instruct", "model=tiny-llada"),
        ("model=llada-instruct benchmark=mbpp", "model=tiny-llada-free benchmark=minicode_free"),
        (  # an entry may hold for each of several values
            f"{MBPP} benchmark.max_new_tokens=512 decoder.schedule.block=64",
            f"{MINICODE} benchmark.max_new_tokens=128 decoder.schedule.block=16",
        ),
        ("model=smollm2 benchmark=deepspec_gsm8k limit=40", "limit=40 model=smollm2 hardware=cpu"),
        ("model=smollm2 benchmark=deepspec_math500", "no counterpart of benchmark=deepspec_math"),
        ("model=llada2-flash", "no counterpart"),
        ("benchmark=humaneval_plus", "no counterpart"),
        ("hardware.quantization=fp8", "no counterpart"),  # a CPU multiplies no fp8
        ("limit=100", "limit=60"),  # a paper's number
        ("limit=240", "limit=240"),  # an own table says how many items it needs
    ],
)
def test_the_embedded_profile_translates_a_query(asked: str, found: str) -> None:
    made = translated(load_profile("embedded"), asked)
    assert found in made or set(found.split()) <= set(made.split())


def test_the_flags_of_a_profile_choose_it_again() -> None:
    profile = replace(load_profile("embedded"), limit=20)
    for asked in (profile, profile.in_passes(1), profile.in_passes(3)):
        assert chosen_profile(parse(["table", "lopa/table4", *asked.flags.split()])) == asked
    assert len({profile.flags, profile.in_passes(1).flags, profile.in_passes(3).flags}) == 3


PAPERS = sorted(path.stem for path in (conf_dir() / "profile" / "embedded").glob("*.yaml"))


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_needs_no_other_papers_part_of_the_profile(paper, tmp_path, monkeypatch) -> None:
    whole, folder = load_profile("embedded"), conf_dir() / "profile"
    (tmp_path / "embedded").mkdir()
    for part in ("embedded.yaml", f"embedded/{paper}.yaml"):
        shutil.copy(folder / part, tmp_path / part)
    places = {"profile/embedded.yaml": tmp_path / "embedded.yaml"}
    monkeypatch.setattr(load, "conf_file", lambda name: places.get(name) or conf_file(name))
    alone = load_profile.__wrapped__("embedded")
    assert PAPERS and len(alone.instead) < len(whole.instead)
    for name in names_of("table"):
        for cell in load_table(name).cells() if name.startswith(f"{paper}/") else ():
            if not cell.reported_only:
                asked = " ".join(whole.run_of(name, cell))
                assert alone.run_of(name, cell) == whole.run_of(name, cell)
                assert translated(alone, asked) == translated(whole, asked)


def test_what_is_available_itself_stands_for_itself(tmp_path, monkeypatch) -> None:
    for group in ("model", "benchmark"):
        (tmp_path / group).mkdir()
        (tmp_path / group / "mine.yaml").write_text("name: mine\n")
    monkeypatch.setenv(CONFIG_DIR, str(tmp_path))
    profile = load_profile.__wrapped__("embedded")
    for query in (
        ("model=tiny-llada-long", "benchmark=ministory"),
        ("model=mine", "benchmark=mine"),
        ("model=/path/to/folder", "benchmark=minigsm"),
    ):
        assert profile.translate(query)[:2] == query


def test_a_profile_may_lack_any_part_and_has_no_unknown_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(load, "conf_file", lambda name: tmp_path / "t.yaml")
    for text, words in (
        ("passes: {runs: []}", "no key 'runs'"),
        ("instead: [{aksed: [a=1]}]", "no key 'aksed'"),
        ("set: a=1", "t.yaml cannot be read as a profile: set of a Profile is not a list"),
    ):
        (tmp_path / "t.yaml").write_text(text)
        with pytest.raises(DllmBenchError, match=words):
            load_profile.__wrapped__("paper")
    (tmp_path / "t.yaml").write_text("default: [seed=0]")
    assert load_profile.__wrapped__("paper").translate(("a=1",)) == ("a=1", "seed=0")


def test_tables_hold_no_embedded_special_case() -> None:
    ours = (
        "caches later_drafts later_filters later_thresholds library long one_token "
        "one_token_long parallel revising seeds seeds_drafters seeds_llada templates unseen_credit "
        "unseen_drafters unseen_drafts unseen_filters unseen_lopa wording"
    )
    about_embedded_models = {f"decoders/{name}" for name in ours.split()}
    for name in set(names_of("table")) - about_embedded_models:
        text = (conf_dir() / "table" / f"{name}.yaml").read_text()
        assert not re.search(r"=(tiny-|mini)|embedded", text)


PAGE = Path(__file__).parents[2] / "docs" / "reproduce.md"
BASE = {"model": "d2f-dream-7b-base", "benchmark": "gsm8k"}
S12 = {**BASE, "setting": "S12"}


def composed(profile: str, table: Any, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return what the cells of a table at `keys` compose to."""
    (query,) = {cell.run for cell in table.cells() if cell.keys.items() >= keys.items()}
    return compose(load_profile(profile).translate(query))


@pytest.mark.parametrize(("profile", "hardware"), [("paper", "h200"), ("paper-nv", "nv-bp{}")])
def test_lopa_dist_has_the_released_branches_perhaps_a_device_for_each(profile, hardware) -> None:
    table = load_table("lopa/table4")
    for setting, branches in (("S1", 4), ("S12", 8)):
        config = composed(profile, table, {**BASE, "setting": setting})
        assert config["hardware"]["name"] == hardware.format(branches)
        assert config["decoder"]["explore"]["k"] == branches
    ascend = composed(profile, table, {**BASE, "setting": "S18"})
    assert (ascend["hardware"]["name"], ascend["decoder"]["name"]) == ("h200", "lopa")


@pytest.mark.parametrize("profile", ["paper", "paper-nv"])
def test_a_setting_is_one_run_in_every_table_and_figure(profile: str) -> None:
    """Table 3, Figure 1 and, for the paper's profile, the documentation ask for Table 4's S12."""
    found = digest(composed(profile, load_table("lopa/table4"), S12))
    system = {**BASE, "system": "lopa-dist-nv"}
    assert digest(composed(profile, load_table("lopa/table3"), system)) == found
    figure = load_figure("lopa/figure1").table
    system.pop("model")
    assert digest(composed(profile, figure, system)) == found


@pytest.mark.parametrize("profile", ["paper", "embedded"])
def test_figure_1_has_the_engines_of_table_7(profile: str) -> None:
    table, figure = load_table("lopa/table7"), load_figure("lopa/figure1").table
    for name in ("qwen3-8b", "sdar-8b-chat", "llada2.0-flash"):
        found = composed(profile, table, {"model": name, "benchmark": "gsm8k"})
        assert composed(profile, figure, {"system": name, "benchmark": "gsm8k"}) == found


def test_the_documented_command_is_the_run_of_its_cell() -> None:
    (shown,) = re.findall(r"dllm-bench (run model=d2f-dream-base(?:.*\\\n)*.*)", PAGE.read_text())
    query = shlex.split(shown.replace("\\\n", " "))[1:]
    assert compose(query) == composed("paper", load_table("lopa/table4"), S12)


def test_a_run_with_a_device_per_branch_is_compared_with_the_papers_speeds() -> None:
    profile = load_profile("paper-nv")
    cells = load_table("lopa/table4").cells()
    cell = next(c for c in cells if c.metric.name == "tps_avg" and c.keys.items() >= S12.items())
    record = record_of(spec_of(made_up(["model=a", "decoder=b", "benchmark=c", "hardware=d"])))
    session = replace(record.sessions[0], environment={"device": "NVIDIA H200"})
    for branches, comparable in ((1, False), (8, True)):
        hardware = {"device": "cuda", "branch_parallel": branches}
        made = replace(record, spec=replace(record.spec, hardware=hardware), sessions=[session])
        run = PlannedRun((), CellState.SEALED, record=made)
        assert (not why_incomparable(PlannedCell(cell, run), profile)) == comparable


@pytest.mark.skipif(
    not missing_device(Hardware({"device": "cuda"})), reason="the runs can be made here"
)
@pytest.mark.parametrize(("kind", "served"), [("table", 0), ("figure", 6)])
def test_commands_of_runs_for_another_machine_are_a_script(kind, served, tmp_path, command) -> None:
    name = {"table": "lopa/table3", "figure": "lopa/figure1"}[kind]
    lines = command(f"{kind} {name} --profile paper-nv --commands").splitlines()
    assert not any(path.suffix in (".md", ".svg") for path in tmp_path.rglob("*"))
    commands = [one for one in lines if re.match(f"dllm-bench run .* --results {tmp_path}$", one)]
    assert lines[0] == f"# {len(commands)} runs without a record"
    assert len(commands) == 4 + served, "all but those for Ascend"
    assert sum("model=served" in line for line in commands) == served
    assert {line.split()[0] for line in lines} == {"#", "dllm-bench"}
    (fetch,) = [line for line in lines if line.startswith("dllm-bench prefetch ")]
    words = {word for line in commands for word in line.split()}
    models = {word for word in words if word.startswith("model=")} - {"model=served"}
    assert models == {f"model={name}" for name in fetch.partition("  #")[0].split()[2:]}


def test_runs_that_no_machine_can_make_have_no_command() -> None:
    def run(short: str, **parts: Any) -> PlannedRun:
        return PlannedRun((), CellState.UNAVAILABLE, short, **parts)

    assert run("unavailable: needs a GPU", config={"model": {}}).is_for_elsewhere
    assert not run(DO_NOT_FIT, config={"model": {}}).is_for_elsewhere
    assert not run("unavailable: needs Ascend 910C").is_for_elsewhere
