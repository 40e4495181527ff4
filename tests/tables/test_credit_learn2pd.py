"""The tables of CreditDecoding and Learn2PD: the papers' numbers, and that equal cells are one run.

Cells that two tables share ask for the same run in both; every cell that has no number says why.
What each row runs is stated by its yaml, and pinned by the committed results (`test_reference`).
"""

from __future__ import annotations

from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.registry import instantiate
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.plan import CellState, Planner
from dllm_bench.tables.spec import Cell
from tests.tables.builders import run_cells
from tests.tiers import covering

PAPERS = ("creditdecoding", "learn2pd")
TABLES = [f"{paper}/table{n}" for paper in PAPERS for n in range(1, 7)]
LLADA, MOE = "llada-8b-instruct", "llada-moe-7b-a1b-instruct"
FILTER = "decoder.select.first.head.source"


def leaves(row: str) -> list[Cell]:
    """Return the cells with runs of their own of a row: "TABLE FACET=VALUE …"."""
    table, *pairs = row.split()
    keys = dict(pair.split("=") for pair in pairs)
    return [c for c in run_cells(load_table(table)) if keys.items() <= c.keys.items()]


def decoder(row: str) -> MaskedDecoder:
    """Return the decoder of the row, which any of its benchmarks has; with a shipped filter in
    place of one that is still to be trained."""
    chosen = dict(override.split("=", 1) for override in leaves(row)[0].run)
    if FILTER in chosen:
        chosen[FILTER] = "assets/filters/tiny-llada-block32"
    plain = compose([f"{key}={value}" for key, value in chosen.items()])["decoder"]
    made = instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")
    assert isinstance(made, MaskedDecoder)
    return made


def test_the_numbers_of_credit_are_the_papers() -> None:
    plain, full = (
        decoder(f"creditdecoding/table5 decoder={name}").score
        for name in ("credit", "credit-full-dist")
    )
    assert (plain.alpha, plain.beta, plain.gamma) == (0.65, 0.7, 0.2)
    assert (plain.full_distribution, full.full_distribution) == (False, True)
    adaptive = decoder("creditdecoding/table2 decoder=credit-adaptive").score
    assert adaptive.adaptive and not plain.adaptive


def test_every_depth_has_a_filter_of_its_own() -> None:
    def source(row: str) -> str:
        [found] = {o for c in leaves(row) for o in c.run if o.startswith(FILTER)}
        return found

    depths = [source(f"learn2pd/table3 filter_mlp_layers={depth}") for depth in ("1", "2", "4")]
    assert len(set(depths)) == 3
    assert depths[1] == source("learn2pd/table1 decoder=learn2pd")
    assert decoder("learn2pd/table1 decoder=learn2pd").select.first.tau == 0.96


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


@pytest.mark.parametrize(
    ("name", "profile"),
    covering(
        4, [*((name, "embedded") for name in TABLES), *((f"{p}/table2", "paper") for p in PAPERS)]
    ),
)
def test_no_cell_is_silently_empty(name: str, profile: str, tmp_path) -> None:
    table, chosen = load_table(name), load_profile(profile)
    built = build(table, chosen, Planner(compose, Store(tmp_path)).cells(table, chosen))
    assert len(built.cells)
    for cell in built.cells.itertuples():
        run = cell.planned.run
        assert cell.planned.cell.reported
        assert cell.text or (run.short and cell.reason)
        assert run.state in (CellState.MISSING, CellState.UNAVAILABLE, CellState.SETTING)
        if run.state is CellState.UNAVAILABLE:
            assert run.short.startswith("unavailable: needs ")


@pytest.mark.parametrize("name", [name for name in TABLES if "learn2pd" in name])
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
