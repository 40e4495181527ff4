"""The documents quote what is stored: the README its table, a card its model's sealed runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from dllm_bench.paths import assets_dir
from dllm_bench.training import card
from tests.tables.builders import compose, record_of, spec_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = runpy.run_path(str(ROOT / "scripts" / "update_docs.py"))


def test_the_readme_quotes_the_committed_table() -> None:
    if not DOCS["TABLE"].exists():
        pytest.skip("results/tables/lopa/table4.md is not rendered in this checkout")
    readme = (ROOT / "README.md").read_text()
    assert DOCS["quote"](readme, DOCS["TABLE"].read_text()) == readme
    assert "| S18 " in readme


def test_a_card_keeps_its_text_and_lists_the_runs() -> None:
    query = ["model=tiny", "benchmark=quiz", "decoder=lopa", "hardware=cpu"]
    spec = spec_of(compose(query))
    spec.decoder.update(schedule={"block": 32}, select={"tau": 0.9}, explore={"k": 3})
    text = (assets_dir() / "tiny-llada" / "CARD.md").read_text()
    written = card.measured(text, [record_of(spec, right=11, n=20)])
    head = text.split(card.MEASURED)[0]
    assert written.startswith(head + card.MEASURED)
    # 20 x 64 tokens over 219 forwards
    row = (
        f"| quiz | lopa | block 32, tau 0.9, k 3 | 20 | 55.0 [34.2, 74.2] | 5.84 | `{spec.short}` |"
    )
    assert row in written
    assert card.measured(written, [record_of(spec, right=11, n=20)]) == written
