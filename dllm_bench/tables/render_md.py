"""A built table as GitHub Markdown: a table per block, measured columns before reported ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from dllm_bench.tables import view
from dllm_bench.tables.build import BuiltCell, BuiltTable
from dllm_bench.tables.view import TableBlock, TableRow

SPECIAL = re.compile(r"[\\`*_\[\]|]")


def markdown(built: BuiltTable) -> str:
    """The whole file."""
    lines = [f"# {built.table.title}", "", view.profile_text(built), "", view.progress(built) + "."]
    section = ""
    for block in view.blocks(built):
        if block.section != section and block.section:
            section = block.section
            lines += ["", f"## {text(section)}"]
        lines += ["", *_block(built, block)]
    for title, entries in view.footer(built):
        lines += ["", f"**{title}**", "", *(f"- {entry.replace('<', '&lt;')}" for entry in entries)]
    return "\n".join(lines) + "\n"


def _block(built: BuiltTable, block: TableBlock) -> Iterator[str]:
    yield "### " + " · ".join(filter(None, (text(block.paper), f"measured: {block.measured_on}")))
    yield ""
    yield _line(_headers(block))
    numbers = len(block.labels) + len(block.reported_labels)
    yield _line(("---",) * len(block.heads) + ("---:",) * numbers + ("---",))
    for row in block.rows:
        yield _line(_row(built, row, marked=not block.verdict()))
    if block.verdict_remark():
        yield from ("", block.verdict_remark())


def _headers(block: TableBlock) -> Iterator[str]:
    yield from map(text, block.heads)
    measured = "".join(f"<br>{text(name)}" for name in block.here or ("measured",))
    above = [text(name) for name in (block.section, block.paper) if name]
    reported = "<br>".join(("", *above, "(reported)"))
    yield from (text(label) + measured for label in block.labels)
    yield from (text(label) + reported for label in block.reported_labels)
    yield "Run"


def _row(built: BuiltTable, row: TableRow, marked: bool) -> Iterator[str]:
    first, *rest = row.heads
    yield text(first) + _notes(row.notes)
    yield from map(text, rest)
    yield from (_measured(cell, marked) for cell in row.cells)
    yield from (_reported(cell, row) for cell in row.reported)
    yield _runs(built, row)


def _runs(built: BuiltTable, row: TableRow) -> str:
    """The hashes of the row's runs; those of sealed runs link to their folders."""
    runs = [run for run in row.runs if run.spec]
    shown = [
        f"[`{view.short_hash(run)}`]({view.link(built, run)})"
        if run.record
        else f"`{view.short_hash(run)}`"
        for run in runs[: view.SHOWN_RUNS]
    ]
    more = f"… ({len(runs)} runs)" if len(runs) > view.SHOWN_RUNS else ""
    return " ".join(filter(None, (*shown, more))) or view.NO_CELL


def _measured(cell: BuiltCell, marked: bool) -> str:
    if view.is_empty(cell):
        return f"*{text(view.measured_text(cell))}*"
    mark = f"<sub>{view.MARKS[cell.verdict]}</sub>" if marked and cell.verdict else ""
    parts = (f"**{view.measured_text(cell)}**{mark}", view.interval_text(cell))
    return " ".join(filter(None, parts))


def _reported(cell: BuiltCell, row: TableRow) -> str:
    return text(view.reported_text(cell)) + _notes(view.own_notes(cell, row.notes))


def _notes(names: Sequence[str]) -> str:
    return f" <sup>{' '.join(names)}</sup>" if names else ""


def _line(entries: Iterable[str]) -> str:
    return "| " + " | ".join(entries) + " |"


def text(plain: str) -> str:
    """The text with Markdown's special characters escaped, also for use in a table."""
    return SPECIAL.sub(r"\\\g<0>", plain.replace("&", "&amp;").replace("<", "&lt;"))
