"""What the profiles of published sizes make of LoPA's tables, and the commands they print."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.cli.main import main
from dllm_bench.figures.spec import load_figure
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import missing_device
from dllm_bench.store.spec import digest
from dllm_bench.tables.frame import why_incomparable
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.plan import DO_NOT_FIT, CellState, PlannedCell, PlannedRun
from tests.tables.builders import compose as made_up
from tests.tables.builders import record_of, spec_of

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
def test_commands_of_runs_for_another_machine_are_a_script(kind, served, tmp_path, capsys) -> None:
    name = {"table": "lopa/table3", "figure": "lopa/figure1"}[kind]
    ask = [kind, name, "--profile", "paper-nv", "--commands", "--results", str(tmp_path)]
    assert main(ask) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not any(path.suffix in (".md", ".svg") for path in tmp_path.rglob("*"))
    commands = [line for line in lines if line.startswith("dllm-bench run ")]
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
