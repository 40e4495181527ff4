"""The tables of CreditDecoding and Learn2PD: the papers' numbers, and that equal cells are one run.

Cells that two tables share ask for the same run in both; every cell that has no number says why.
What each row runs is stated by its yaml, and pinned by the committed results (`test_reference`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.plan import CellState, Planner
from dllm_bench.tables.spec import Cell
from tests.tables.builders import run_cells

PAPERS = ("creditdecoding", "learn2pd")
LLADA, MOE = "llada-8b-instruct", "llada-moe-7b-a1b-instruct"
FILTER = "decoder.select.first.head.source"


def leaves(row: str) -> list[Cell]:
    """Return the cells with runs of their own of a row: "TABLE FACET=VALUE …"."""
    table, *pairs = row.split()
    keys = dict(pair.split("=") for pair in pairs)
    return [c for c in run_cells(load_table(table)) if keys.items() <= c.keys.items()]


def test_every_depth_has_a_filter_of_its_own() -> None:
    def source(row: str) -> str:
        [found] = {o for c in leaves(row) for o in c.run if o.startswith(FILTER)}
        return found

    depths = [source(f"learn2pd/table3 filter_mlp_layers={depth}") for depth in ("1", "2", "4")]
    assert len(set(depths)) == 3
    assert depths[1] == source("learn2pd/table1 decoder=learn2pd")


CREDIT4 = "creditdecoding/table4 decoder=credit optimization="
SAME = [
    (f"creditdecoding/table1 model={LLADA}", "creditdecoding/table5"),
    (f"creditdecoding/table1 model={MOE}", "creditdecoding/table6"),
    ("creditdecoding/table1", "creditdecoding/table2"),
    ("creditdecoding/table1 decoder=credit", f"{CREDIT4}early-stop"),
    (f"{CREDIT4}vanilla", f"{CREDIT4}fast-dllm kv_cache=none"),
    ("learn2pd/table1 benchmark=gsm8k", "learn2pd/table4"),
    ("learn2pd/table1 decoder=vanilla", "learn2pd/table6 decoder=vanilla"),
    (
        "learn2pd/table1 decoder=learn2pd-eotp",
        "learn2pd/table2 decoder=learn2pd-eotp kv_cache=none",
    ),
]
AT = ("model", "benchmark", "gen_length", "decoder")


def runs(row: str, at: set[str]) -> dict[tuple[str, ...], Any]:
    """Return what is asked for, by what both tables call a cell; no cache is what decoders begin
    with."""

    def asked(cell: Cell) -> set[tuple[str, ...]]:
        chosen = dict(override.split("=", 1) for override in cell.run)
        return set(chosen.items()) - {("decoder/cache", "none")}

    return {tuple(c.keys[f] for f in AT if f in at): asked(c) for c in leaves(row)}


@pytest.mark.parametrize(("one", "other"), SAME)
def test_cells_that_two_tables_share_are_one_run(one, other) -> None:
    facets = [load_table(row.split()[0]).facets for row in (one, other)]
    at = {facet for facet in AT if all(facet in known for known in facets)}
    ours, theirs = runs(one, at), runs(other, at)
    shared = ours.keys() & theirs.keys()
    assert shared
    assert all(ours[key] == theirs[key] for key in shared)


@pytest.mark.parametrize("paper", PAPERS)
def test_no_cell_of_a_papers_size_is_silently_empty(paper: str, tmp_path: Path) -> None:
    """The committed tables show that of the embedded profile."""
    table, chosen = load_table(f"{paper}/table2"), load_profile("paper")
    built = build(table, chosen, Planner(compose, Store(tmp_path)).cells(table, chosen))
    assert len(built.cells)
    for cell in built.cells.itertuples():
        run = cell.planned.run
        assert cell.planned.cell.reported
        assert cell.text or (run.short and cell.reason)
        assert run.state in (CellState.MISSING, CellState.UNAVAILABLE, CellState.SETTING)
        if run.state is CellState.UNAVAILABLE:
            assert run.short.startswith("unavailable: needs ")


@pytest.mark.parametrize("name", [f"learn2pd/table{n}" for n in range(1, 7)])
def test_learn2pd_has_an_embedded_counterpart_throughout(name: str) -> None:
    """Lengths that the paper compares stay apart and in order, and blocks fit them."""
    profile, lengths = load_profile("embedded"), {}
    for cell in run_cells(load_table(name)):
        chosen = dict(o.split("=", 1) for o in profile.translate(cell.run))
        length = int(chosen["benchmark.max_new_tokens"])
        assert length % 32 == 0
        lengths[int(cell.keys["gen_length"])] = length
    assert [lengths[key] for key in sorted(lengths)] == sorted(set(lengths.values()))


def test_fp8_has_no_embedded_counterpart() -> None:
    """The small models run on a CPU, which multiplies no fp8."""
    for cell in leaves("creditdecoding/table4 optimization=fp8"):
        assert "hardware.quantization=fp8" in cell.run
    with pytest.raises(DllmBenchError, match="no counterpart of hardware.quantization=fp8"):
        load_profile("embedded").translate(("hardware.quantization=fp8",))
