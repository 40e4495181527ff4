"""Rendered bytes: golden files, determinism, well-formed markup, no heavy import.

After a wanted change of a form, write the golden files anew with
`DLLM_BENCH_REGOLD=1 pytest tests/tables/test_render.py` and read the diff.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dllm_bench.cli.table import overview_lines, table_lines
from dllm_bench.tables import render as rendering
from dllm_bench.tables.frame import BuiltTable
from dllm_bench.tables.load import load_table
from dllm_bench.tables.render import FORMS, SHOWN_HASH, latex, number, render, write
from tests.tables.builders import FULL, GOLDEN, TINY, derived, every_state, nothing_reported

BUILT = {
    "embedded": (every_state, TINY),
    "paper": (every_state, FULL),
    "own": (nothing_reported, TINY),
    "derived": (derived, FULL),
}


@cache
def built(name: str) -> BuiltTable:
    """Return a table of made-up runs, which callers leave as it is."""
    make, profile = BUILT[name]
    with TemporaryDirectory() as folder:
        return make(Path(folder), profile)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", BUILT)
def test_the_bytes_are_the_stored_ones(name: str, form: str) -> None:
    text, path = render(built(name))[form], GOLDEN / f"{name}.{form}"
    for i, run in enumerate(run for run in built(name).runs if run.spec):
        full = run.spec.identity_hash  # numbered, whatever it is made of
        text = text.replace(full, f"hash-{i}").replace(full[:SHOWN_HASH], f"short-{i}")
    if os.environ.get("DLLM_BENCH_REGOLD"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_profiles_do_not_overwrite_each_other(tmp_path) -> None:
    tiny, full = (write(built(name), tmp_path) for name in ("embedded", "paper"))
    assert [path.name for path in tiny] == [f"table1.{form}" for form in FORMS]
    assert not set(tiny) & set(full)


def test_links_lead_to_the_record(tmp_path) -> None:
    table = every_state(tmp_path / "runs", TINY)
    page = next(p for p in write(table, tmp_path / "tables") if p.suffix == ".html")
    links = set(re.findall(r'href="([^"]+)"', page.read_text(encoding="utf-8")))
    assert len(links) == 3 and all((page.parent / link).is_file() for link in links)


def test_the_terminal_shows_a_table_that_reports_nothing_without_comparisons() -> None:
    shown = list(table_lines(built("own")))
    assert not re.search(r"reported|verdict|marks: ", "\n".join(shown), re.IGNORECASE)
    (line,) = (line for line in shown if line.startswith("Plain"))
    assert line.split() == ["Plain", "55.0", "5.84"]


def test_latex_escapes_what_latex_reads_as_commands() -> None:
    assert latex("50 % & a_b #1 {x} ~y ^z \\q $") == (
        r"50 \% \& a\_b \#1 \{x\} \textasciitilde{}y \textasciicircum{}z \textbackslash{}q \$"
    )
    assert latex("τ ≥ 0.9 – é") == r"$\tau$ $\geq$ 0.9 -- e"
    table = load_table("lopa/table4")
    texts = [table.title, table.source, *(note.text for note in table.notes)]
    assert all("?" not in latex(text) for text in texts if "?" not in text)


def test_the_listing_of_tables_counts_every_cell_and_says_why_some_are_empty(tmp_path) -> None:
    tables = list(map(built, BUILT))
    lines = list(overview_lines(tables, tmp_path))
    head, *rows = (re.split(r"  +", line) for line in lines[: len(tables) + 1])
    assert head[:2] == ["table", "cells"]
    for table, row in zip(tables, rows, strict=True):
        assert row[0] == table.table.name
        assert int(row[1]) == len(table.cells) == sum(map(int, row[2:]))
    text = "\n".join(lines)
    assert "small/derived: 28 cells reported only: A served engine, not run here." in text
    assert "small/table1: 6 cells unavailable: needs NPU × 8. This machine" in text
    assert "small/derived: 2 runs to make, unknown" in text


def test_a_number_rounded_to_zero_has_no_sign_and_short_times_have_digits() -> None:
    assert [number(-0.04, "%"), number(-0.06, "%"), number(0.0112, "s")] == ["0.0", "-0.1", "0.011"]
    assert str(rendering.rounded(-0.00001)) == "0.0"
    _, delta, *_ = built("derived").cells.itertuples()
    near = (delta._replace(value=value) for value in (0.04, 0.06))
    assert list(map(rendering.measured_text, near)) == ["0.0", "+0.1"]


def test_a_head_names_the_model_of_a_blocks_own_numbers() -> None:
    own, delta, *_ = built("derived").cells.itertuples()
    run = replace(delta.planned.run, query=("benchmark=quiz",))  # against another model's
    other = delta._replace(planned=replace(delta.planned, run=run))
    assert rendering.measured_on([own, other]) == ("alpha", "quiz")
