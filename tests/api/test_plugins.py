"""A package that is installed beside this one, and a folder of yaml files, are found and used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dllm_bench as db
from dllm_bench.cli.main import main
from dllm_bench.paths import CONFIG_DIR, options
from dllm_bench.store.store import Store
from dllm_bench.tables.render import render
from tests.helpers import forget_composed

PACKAGE = Path(__file__).parents[1] / "data" / "plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield the package as pip would install it: on the path, with its entry points."""
    monkeypatch.syspath_prepend(str(PACKAGE))
    forget_composed()
    yield
    forget_composed()


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_goes_through_a_run_and_a_table(tmp_path, command) -> None:
    assert {"strided", "vanilla"} <= set(db.decoders())
    command("run model=stride-llada decoder=strided benchmark=sums hardware=cpu limit=2")
    before = db.table("stride/table1", profile="own", results=tmp_path).to_pandas()
    assert list(before.state) == ["sealed", "missing"]
    said = command("table stride/table1 --profile own --run")
    assert "1 of 2 runs looked up: made on 20" in said
    cells = db.table("stride/table1", profile="own", results=tmp_path)
    frame = cells.to_pandas().set_index("decoder")
    assert frame.measured["two"] > frame.measured["four"] > 1
    assert "Every fourth" in cells._repr_html_()
    runs = db.records(tmp_path)
    assert (set(runs["decoder.select.n"]), set(runs["model"])) == ({2, 4}, {"stride-llada"})


@pytest.mark.exhaustive
@pytest.mark.usefixtures("plugin")
def test_python_and_the_report_show_the_items_that_the_command_shows(tmp_path, command) -> None:
    """Runs with fewer items than the table asks for: their common number."""
    command("table stride/table1 --profile own --run --limit 1")
    command("table stride/table1 --profile own")
    table = db.table("stride/table1", profile="own", results=tmp_path)
    assert list(table.to_pandas().state) == ["sealed", "sealed"]
    command("report --profile own")
    written = [path.read_text() for path in tmp_path.rglob("*.csv")]
    assert written == [render(table.built)["csv"]] * 2, "by the command and by the report"


PIECE = """
from dataclasses import dataclass

from dllm_bench.core.contracts import Select
from dllm_bench.registry import register
from own_rules import first


@register("select.own_rule")
@dataclass(frozen=True)
class OwnRule(Select):
    def __call__(self, scores, window, state):
        return first(window)
"""
RULE = "def first(window):\n    return window.eligible_KW & (window.eligible_KW.cumsum(1) <= {n})\n"


def test_a_piece_that_was_edited_is_another_run(tmp_path, monkeypatch, capsys) -> None:
    """Its file and what that imports; the second time the run is looked up, and said to be."""
    results, code = tmp_path / "results", tmp_path
    monkeypatch.syspath_prepend(str(code))
    (code / "own_pieces.py").write_text(PIECE)
    settings = {"limit": 1, "hardware": "cpu", "benchmark.max_new_tokens": 32}
    made = []
    for n in (1, 16, 16):  # of other lengths: bytecode is renewed by second and size of a file
        (code / "own_rules.py").write_text(RULE.format(n=n))
        for name in ("own_rules", "own_pieces"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        decoder = db.decoder("vanilla", select=importlib.import_module("own_pieces").OwnRule())
        made.append(db.run("tiny-llada", decoder, "minigsm", results=results, **settings))
    assert [record.summary["forwards/mean"] for record in made] == [32, 2, 2]
    assert made[0].spec.short != made[1].spec.short and made[1] == made[2]
    assert len(made[0].spec.inputs["pieces"]) == 64
    choice = ["model=tiny-llada", "limit=1", "hardware=cpu", f"paths.results={results}"]
    for is_known in (False, True):
        assert main(["run", *choice, "benchmark.max_new_tokens=32"]) == 0
        assert ("nothing was decoded, looked up: made on 20" in capsys.readouterr().out) is is_known
    inputs = [record.spec.inputs for record in Store(results / "runs").records()]
    assert sum("pieces" in one for one in inputs) == 2 and len(inputs) == 3


def test_a_folder_of_yaml_files_goes_with_every_command(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv(CONFIG_DIR, "")
    (tmp_path / "conf" / "decoder").mkdir(parents=True)
    text = "defaults: [fast_dllm, _self_]\nselect: {tau: 0.5}\n"
    (tmp_path / "conf" / "decoder" / "mine.yaml").write_text(text)
    where = ["--config-dir", str(tmp_path / "conf")]
    forget_composed()
    assert main(["generate", "tiny-llada", "mine", "2 + 2 =", *where]) == 0
    assert "mine" in options("decoder")
    assert main(["run", "--cfg", "job", "decoder=mine", *where]) == 0
    assert "tau: 0.5" in capsys.readouterr().out
    forget_composed()
