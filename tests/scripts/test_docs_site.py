"""Links of the documentation that its site cannot hold."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from scripts.docs_site.hooks import on_page_markdown

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="a.md"))


def test_links_out_of_docs_become_text_and_broken_ones_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "[5 [4, 6]](../README.md), [here](python.md), [x](../conf/run.yaml#seed)"
    assert on_page_markdown(text, PAGE) == "5 [4, 6], [here](python.md), x"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert on_page_markdown("[y](../nowhere.md)", PAGE) == "y"
    assert "a.md links to ../nowhere.md" in caplog.text
