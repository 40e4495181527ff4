"""A built table as one self-contained HTML page, light and dark, no script.

A table per section, laid out as in the paper: groups of columns next to each other, measured ones
tinted, the interval below its number, a link from the number to its run. `body` is the page without
`<head>` and `<body>`, for pages of the site, which have their own and link runs elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from dllm_bench.tables import view
from dllm_bench.tables.build import BuiltCell, BuiltTable, CellVerdict
from dllm_bench.tables.plan import PlannedRun
from dllm_bench.tables.spec import Query
from dllm_bench.tables.view import TableBlock, TableRow

Address = Callable[[PlannedRun], str]  # of the page of a run; "" if it has none
CODE = re.compile("`([^`]*)`")
STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #5d6775; --page: #ffffff;
  --line: #d6dbe3; --here: #eef4fb; --paper: #ffffff; --link: #1f5fa8;
  --ok: #1d7a4c; --near: #8a6100; --off: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ee; --soft: #9aa5b4; --page: #14181f;
  --line: #303845; --here: #1c2736; --paper: #14181f; --link: #8ab8ee;
  --ok: #6fcf97; --near: #e0b050; --off: #ff8a80; } }
body { margin: 2rem auto; max-width: 96rem; padding: 0 1.5rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
p, li { max-width: 60rem; } a { color: var(--link); text-decoration: none; }
a:hover { text-decoration: underline; } code { font: 0.9em ui-monospace, monospace; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px;
  white-space: nowrap; width: 100%; }
th, td { padding: 0.3rem 0.4rem; text-align: right; border-top: 1px solid var(--line); }
thead tr:first-child th { border-top: 0; } thead th { vertical-align: bottom; white-space: normal; }
th.head, td.head { text-align: left; } th.group { text-align: center; }
th.first, td.first { border-left: 1px solid var(--line); }
td.head:first-child, th.head:first-child { position: sticky; left: 0; background: var(--page); }
.here { background: var(--here); } .paper { background: var(--paper); }
.ci { display: block; color: var(--soft); font-size: 11px; } td.empty { color: var(--soft);
  font-style: italic; } sup, sub { font-size: 0.75em; color: var(--soft); }
.ok { color: var(--ok); } .near { color: var(--near); } .off { color: var(--off); }
.soft { color: var(--soft); } footer { margin-top: 2rem; border-top: 1px solid var(--line); }
"""
CLASSES = {
    CellVerdict.EQUAL: "ok",
    CellVerdict.INSIDE_CI: "ok",
    CellVerdict.INSIDE_TOLERANCE: "near",
    CellVerdict.OUTSIDE: "off",
    CellVerdict.NOT_COMPARABLE: "soft",
    CellVerdict.NONE: "soft",
}
SIDES = ("here", "paper")  # CSS classes of measured and reported columns


def html(built: BuiltTable) -> str:
    """The whole page; numbers link to the record in the run's folder."""
    title = escape(built.table.title)
    lines = [
        "<!doctype html>",
        '<html lang="en">',
        '<head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title>",
        f"<style>{STYLE}</style></head>",
        "<body>",
        *body(built, lambda run: f"{view.link(built, run)}/record.json"),
        "</body></html>",
    ]
    return "\n".join(lines) + "\n"


def body(built: BuiltTable, address: Address) -> Iterator[str]:
    """The lines of the page's content; measured numbers link to the `address` of their run."""
    yield f"<h1>{escape(built.table.title)}</h1>"
    yield f"<p>{prose(view.profile_text(built))}</p>"
    yield f'<p class="soft">{escape(view.progress(built))}.</p>'
    for section, found in groupby(view.blocks(built), key=lambda block: block.section):
        yield from _section(section, list(found), address)
    yield from ("<footer>", *_footer(built), "</footer>")


def prose(text: str) -> str:
    """The text escaped, with `code` as <code>."""
    return CODE.sub(r"<code>\1</code>", escape(text))


def _section(section: str, blocks: Sequence[TableBlock], address: Address) -> Iterator[str]:
    if section:
        yield f"<h2>{escape(section)}</h2>"
    yield '<div class="scroll"><table><thead>'
    yield from _head(blocks)
    yield "</thead><tbody>"
    keyed = [{row.key: row for row in block.rows} for block in blocks]
    for key in dict.fromkeys(key for rows in keyed for key in rows):
        yield f"<tr>{''.join(_row([rows.get(key) for rows in keyed], blocks, address))}</tr>"
    yield "</tbody></table></div>"
    yield from (_verdict(block) for block in blocks)


def _head(blocks: Sequence[TableBlock]) -> Iterator[str]:
    span = len(blocks[0].metrics)
    groups = [(side, block) for block in blocks for side in zip(SIDES, block.groups, strict=False)]
    top = "".join(
        f'<th class="group first {side}" colspan="{span}">{what}<br>{escape(where)}</th>'
        for (side, (what, where)), _ in groups
    )
    heads = "".join(
        f'<th class="head" rowspan="2" scope="col">{escape(text)}</th>' for text in blocks[0].heads
    )
    yield f"<tr>{heads}{top}</tr>"
    labels = [
        f'<th class="{side}{" first" if index == 0 else ""}" scope="col">{escape(label)}</th>'
        for (side, _), block in groups
        for index, label in enumerate(block.labels)
    ]
    yield f"<tr>{''.join(labels)}</tr>"


def _row(
    rows: Sequence[TableRow | None], blocks: Sequence[TableBlock], address: Address
) -> Iterator[str]:
    """One row of all blocks; a block without this row has empty cells."""
    known = [row for row in rows if row]
    first, *rest = known[0].heads
    common = tuple(name for name in known[0].notes if all(name in row.notes for row in known))
    yield f'<td class="head">{escape(first)}{_notes(common)}</td>'
    yield from (f'<td class="head">{escape(text)}</td>' for text in rest)
    for row, block in zip(rows, blocks, strict=True):
        if row is None:
            width = len(block.labels) + len(block.reported_labels)
            yield "".join('<td class="soft">–</td>' for _ in range(width))
            continue
        marked = not block.verdict()
        for index, cell in enumerate(row.cells):
            yield _measured(cell, address, index == 0, marked)
        for index, cell in enumerate(row.reported):
            yield _reported(cell, common, index == 0)


def _measured(cell: BuiltCell, address: Address, first: bool, marked: bool) -> str:
    side = "here first" if first else "here"
    if view.is_empty(cell):
        why = escape(cell.why, quote=True)
        return f'<td class="{side} empty" title="{why}">{escape(view.measured_text(cell))}</td>'
    shown = " ".join(view.short_hash(run) for run in cell.runs)
    samples = f", {cell.n} samples, run {shown}" if cell.runs else ""
    text = _linked(view.measured_text(cell), [address(run) for run in cell.runs])
    if marked and cell.verdict:
        text += f'<sub class="{CLASSES[cell.verdict]}">{view.MARKS[cell.verdict]}</sub>'
    if cell.interval:
        text += f'<span class="ci">{view.interval_text(cell)}</span>'
    return f'<td class="{side}" title="{escape(cell.cell.metric.formula + samples)}">{text}</td>'


def _linked(number: str, addresses: Sequence[str]) -> str:
    """A number with a link to its run; a number of several runs has a small link for each."""
    links = [escape(address) for address in addresses if address]
    if len(links) == 1:
        return f'<a href="{links[0]}">{escape(number)}</a>'
    marks = (f'<a href="{link}">{index}</a>' for index, link in enumerate(links, 1))
    return escape(number) + "".join(f"<sup>{mark}</sup>" for mark in marks)


def _reported(cell: BuiltCell, shown: Query, first: bool) -> str:
    side = "paper first" if first else "paper"
    text = escape(view.reported_text(cell))
    return f'<td class="{side}">{text}{_notes(view.own_notes(cell, shown))}</td>'


def _notes(names: Sequence[str]) -> str:
    return f" <sup>{escape(' '.join(names))}</sup>" if names else ""


def _verdict(block: TableBlock) -> str:
    text = block.verdict_remark()
    if not text:
        return ""
    named = f"{block.paper} {text[0].lower()}{text[1:]}" if block.paper else text
    return f'<p class="soft">{escape(named)}</p>'


def _footer(built: BuiltTable) -> Iterator[str]:
    for title, entries in [*view.footer(built), ("Runs", view.run_lines(built))]:
        items = "".join(f"<li>{prose(entry)}</li>" for entry in entries)
        yield f"<h3>{escape(title)}</h3><ul>{items}</ul>"
