"""Documents quote what is stored, as the README its table; links that their site cannot hold."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from dllm_bench.metrics.accuracy import paired_shares
from dllm_bench.paths import assets_dir
from dllm_bench.registry import SLOTS
from dllm_bench.store.spec import RunSpec
from scripts import update_docs
from scripts.docs_site.hooks import ROOT, on_page_markdown
from scripts.embedded import card
from scripts.piece_settings import settings_of_loops, settings_of_slot
from tests.tables.builders import compose, record_of, spec_of


def test_the_readme_quotes_the_committed_table_and_the_marks_that_it_uses() -> None:
    readme, table = (update_docs.ROOT / "README.md").read_text(), update_docs.TABLE.read_text()
    assert update_docs.quote(readme, table) == readme, "run scripts.update_docs"
    busy = table.replace("\n\n**Code**", "\n- † a busy machine\n\n**Code**")
    assert update_docs.excerpt(busy, str) == update_docs.excerpt(table, str)
    assert "busy" in update_docs.excerpt(busy.replace("] |", "]† |"), str)


def test_the_pages_list_every_setting_with_its_meaning_and_every_figure() -> None:
    slots = [*(one for slot in SLOTS for one in settings_of_slot(slot)), *settings_of_loops()]
    assert [(one.piece, one.name) for one in slots if not one.meaning] == []
    tau = next(one for one in settings_of_slot("select") if one.piece == "threshold")
    assert (tau.name, tau.type, tau.default) == ("tau", "float", "0.9")
    figures = update_docs.figure_list()
    for page, listed in (("pieces.md", update_docs.page_tables()), ("reproduce.md", figures)):
        assert listed in (update_docs.ROOT / "docs" / page).read_text(), "run scripts.update_docs"
    assert "| `lopa/figure5` | LoPA Figure 5: tokens decoded per step |" in figures


def test_the_decoders_page_has_a_row_of_rule_pieces_and_cases() -> None:
    name, rule, pieces, cases, differs = update_docs.row("block_diffusion")
    assert name == "`block_diffusion`" and rule.startswith("Block-diffusion models")
    assert "select `threshold`" in pieces and "cache `block`" in pieces and "explore" not in pieces
    assert cases == differs == ""


CARD = (assets_dir() / "tiny-llada" / "CARD.md").read_text()


def run_of(decoder: str, **pieces: Any) -> RunSpec:
    query = ["model=tiny", "benchmark=quiz", f"decoder={decoder}", "hardware=cpu"]
    spec = spec_of(compose([*query, "benchmark.max_new_tokens=64"]))
    return replace(spec, decoder={**spec.decoder, "schedule": {"block": 32}, **pieces})


def test_a_card_keeps_its_text_and_lists_the_runs() -> None:
    spec = run_of("lopa", select={"tau": 0.9}, explore={"k": 3})
    written = card.measured(CARD, [record_of(spec, right=11, n=20)])
    assert written.startswith(CARD.split(card.MEASURED)[0] + card.MEASURED)
    cells = "quiz | lopa | block 32, tau 0.9, k 3 | 20 | 55.0 [34.2, 74.2]"
    assert f"| {cells} | 5.84 | `{spec.short}` |" in written  # 20 x 64 tokens over 219 forwards
    assert card.measured(written, [record_of(spec, right=11, n=20)]) == written


def test_a_card_says_what_editing_gains_on_the_same_items() -> None:
    edits = run_of("llada21", select={"first": {"tau": 0.5}}, revise={"tau": 0.9})
    plain = replace(edits, decoder={**edits.decoder, "revise": {}}, label="llada21+revise.none")
    records = [record_of(edits, right=16, n=20), record_of(plain, right=6, n=20)]
    gain = paired_shares([([1.0] * 16 + [0.0] * 4, [1.0] * 6 + [0.0] * 14)])
    low, high = (100 * end for end in (gain.low, gain.high))
    row = f"| quiz | block 32, tau 0.5, edits above 0.9 | 20 | +50.0 [{low:+.1f}, {high:+.1f}] |"
    assert low > 0 and row in card.measured(CARD, records)
    assert card.GAINS_NOTE not in card.measured(CARD, records[:1])


def test_links_out_of_docs_become_text_and_broken_ones_are_named(caplog) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))
    text = "[5 [4, 6]](../README.md), [here](python.md), [x](../conf/run.yaml#seed)"
    assert on_page_markdown(text, page) == "5 [4, 6], [here](python.md), x"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert on_page_markdown("[y](../nowhere.md)", page) == "y"
    assert "a.md links to ../nowhere.md" in caplog.text


def test_the_site_reaches_every_page_by_a_goal() -> None:
    reached = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(reached) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))
