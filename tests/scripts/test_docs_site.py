"""Links of the documentation that its site cannot hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import yaml

from scripts.docs_site.hooks import ROOT, on_page_markdown

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
