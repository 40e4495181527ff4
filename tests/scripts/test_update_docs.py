"""Documents quote what is stored, as the README its table; links that their site cannot hold."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from dllm_bench.metrics.accuracy import paired_shares
from dllm_bench.paths import assets_dir
from dllm_bench.registry import SLOTS
from scripts import update_docs
from scripts.docs_site.hooks import ROOT, on_page_markdown
from scripts.embedded import card
from scripts.piece_settings import settings_of_loops, settings_of_slot
from tests.tables.builders import compose, record_of, spec_of

TOKENS = "benchmark.max_new_tokens=64"


def test_the_readme_quotes_speed_and_score_of_one_section() -> None:
    header = "| Setting | System | BP | τ | a | b | c | d | e | f | g | h | Run |"
    rule = "| --- " * 13 + "|"
    row = "| S1 | NV | 4 | 0.95 | 587 | x | x | 88 | 331 | x | x | 78 | [`abc`](../../runs/abc) |"
    table = (
        "# T\n\n## D2F-Dream-Base\n\n### GSM8K 4-shot\n\n| other |\n\n## D2F-Dream-Instruct\n\n"
        f"### GSM8K 4-shot\n\n{header}\n{rule}\n{row}\n{row.replace('NV', 'Ascend')}\n\nmore\n\n"
        "**Measured on**\n\n- a CPU\n\n**Code**\n"
    )
    readme = update_docs.quote(
        f"above\n{update_docs.BEGIN}\nold\n{update_docs.END}\nbelow\n", table, str.upper
    )
    assert readme.startswith("above\n") and readme.endswith("\nbelow\n")
    quoted = "| S1 | 4 | 0.95 | ABC | 587 | 88 | 331 | 78 |\n\nMeasured on:\n\n- a CPU"
    assert quoted in readme
    assert readme.count("S1") == 1
    assert "old" not in readme and "other" not in readme and "more" not in readme
    assert update_docs.quote(readme, table, str.upper) == readme
    busy = table.replace("- a CPU\n", "- a CPU\n- † a busy machine\n")
    assert update_docs.excerpt(busy, str) == update_docs.excerpt(table, str), (
        "no number has the mark"
    )
    assert "busy" in update_docs.excerpt(busy.replace("| 587 |", "| 587† |"), str)


def test_the_pages_list_every_setting_with_its_meaning_and_every_figure() -> None:
    slots = [*(one for slot in SLOTS for one in settings_of_slot(slot)), *settings_of_loops()]
    assert [(one.piece, one.name) for one in slots if not one.meaning] == []
    tau = next(one for one in settings_of_slot("select") if one.piece == "threshold")
    assert (tau.name, tau.type, tau.default) == ("tau", "float", "0.9")
    for page, listed in (
        ("pieces.md", update_docs.page_tables()),
        ("reproduce.md", update_docs.figure_list()),
    ):
        assert listed in (update_docs.ROOT / "docs" / page).read_text(), "run scripts.update_docs"
    assert (
        "| `lopa/figure5` | LoPA Figure 5: tokens decoded per step |" in update_docs.figure_list()
    )


def test_the_decoders_page_has_a_row_of_rule_pieces_and_cases() -> None:
    name, rule, pieces, cases, differs = update_docs.row("block_diffusion")
    assert name == "`block_diffusion`" and rule.startswith("Block-diffusion models")
    assert "select `threshold`" in pieces and "cache `block`" in pieces and "explore" not in pieces
    assert cases == differs == ""
    page = update_docs.between("a\n<b>\nold\n<c>\nd\n", "<b>", "new", "<c>")
    assert page == "a\n<b>\nnew\n<c>\nd\n"


@pytest.mark.skipif(not update_docs.GOLDEN.is_dir(), reason="no recorded cases to count")
def test_recorded_cases_are_those_of_the_methods_named() -> None:
    counts = [
        int(update_docs.recorded(["llada/llada_cases.json", *methods]))
        for methods in ([], ["llada_vanilla"], ["fast_dllm_threshold"])
    ]
    assert counts[0] > counts[1] + counts[2] > counts[1] > 0


def test_a_card_keeps_its_text_and_lists_the_runs() -> None:
    query = ["model=tiny", "benchmark=quiz", "decoder=lopa", "hardware=cpu", TOKENS]
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


def test_a_card_says_what_editing_gains_on_the_same_items() -> None:
    edits = spec_of(
        compose(["model=tiny", "benchmark=quiz", "decoder=llada21", "hardware=cpu", TOKENS])
    )
    pieces = {"schedule": {"block": 32}, "select": {"first": {"tau": 0.5}}}
    edits = replace(edits, decoder={**pieces, "revise": {"tau": 0.9}})
    plain = replace(edits, decoder={**pieces, "revise": {}}, label="llada21+revise.none")
    text = (assets_dir() / "tiny-llada" / "CARD.md").read_text()
    records = [record_of(edits, right=16, n=20), record_of(plain, right=6, n=20)]
    gain = paired_shares([([1.0] * 16 + [0.0] * 4, [1.0] * 6 + [0.0] * 14)])
    low, high = (100 * end for end in (gain.low, gain.high))
    row = f"| quiz | block 32, tau 0.5, edits above 0.9 | 20 | +50.0 [{low:+.1f}, {high:+.1f}] |"
    assert low > 0
    assert row in card.measured(text, records)
    assert card.GAINS_NOTE not in card.measured(text, records[:1])


def test_a_default_is_not_broken_within_a_word() -> None:
    """The page's other code may be, so that no column is cut."""
    cells = [one.cells()[3] for slot in SLOTS for one in settings_of_slot(slot) if one.default]
    assert all(re.fullmatch(r'<code class="whole">[^<>]+</code>', cell) for cell in cells)
    styles = (update_docs.ROOT / "docs/site.css").read_text()
    assert re.search(r"code\.whole[^{]*\{[^}]*white-space: nowrap", styles)


PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))


def test_links_out_of_docs_become_text_and_broken_ones_are_named(caplog) -> None:
    text = "[5 [4, 6]](../README.md), [here](python.md), [x](../conf/run.yaml#seed)"
    assert on_page_markdown(text, PAGE) == "5 [4, 6], [here](python.md), x"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert on_page_markdown("[y](../nowhere.md)", PAGE) == "y"
    assert "a.md links to ../nowhere.md" in caplog.text


def test_the_site_reaches_every_page_by_a_goal_and_cuts_no_table() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert set(pages_below(config["nav"])) == pages
    style = "".join((ROOT / "docs" / name).read_text() for name in config["extra_css"])
    assert "white-space: normal" in style and "overflow-x: auto" in style


def pages_below(entries: list[dict[str, Any]]) -> Iterator[str]:
    for entry in entries:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages_below(value)
