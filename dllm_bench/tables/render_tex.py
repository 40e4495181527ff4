"""A built table as LaTeX: one booktabs table per block, followed by the remarks.

Needs the packages booktabs and graphicx. All text is escaped and ASCII, so every engine and
encoding works. Numbers have no links, because a paper is not stored next to the runs.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from dllm_bench.tables import view
from dllm_bench.tables.build import BuiltCell, BuiltTable
from dllm_bench.tables.view import TableBlock, TableRow

SPECIAL = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    "|": r"$|$",
    '"': "''",
    "τ": r"$\tau$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "–": "--",
    "—": "---",
    "−": r"$-$",
    "×": r"$\times$",
    "÷": r"$\div$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "…": r"\ldots{}",
    "\N{NO-BREAK SPACE}": "~",
}
CODE = re.compile("`([^`]*)`")


def escape(text: str) -> str:
    """The text with LaTeX's special characters escaped; other non-ASCII characters lose their
    accents, or become a question mark.
    """
    return "".join(SPECIAL.get(character) or _plain(character) for character in text)


def _plain(character: str) -> str:
    if character.isascii():
        return character
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"


def prose(text: str) -> str:
    """The text escaped, with `code` in typewriter."""
    pieces = CODE.split(text)
    return "".join(
        rf"\texttt{{{escape(piece)}}}" if index % 2 else escape(piece)
        for index, piece in enumerate(pieces)
    )


def latex(built: BuiltTable) -> str:
    """The tables and their remarks, for use with \\input."""
    lines = [
        f"% {escape(built.table.title)}; profile {escape(built.profile.name)}",
        r"% preamble: \usepackage{booktabs,graphicx}",
    ]
    for index, block in enumerate(view.blocks(built)):
        lines += _block(built, block, index)
    lines += [
        r"\begingroup\footnotesize\raggedright",
        rf"\noindent {prose(view.profile_text(built))}",
    ]
    footer = [*view.footer(built, commands=False), ("Runs", view.run_lines(built))]
    for title, entries in footer:
        items = "; ".join(entry.removesuffix(".") for entry in entries)
        lines += ["", rf"\noindent\textbf{{{escape(title)}.}} {prose(items)}."]
    return "\n".join([*lines, r"\par\endgroup"]) + "\n"


def _block(built: BuiltTable, block: TableBlock, index: int) -> Iterator[str]:
    heads, metrics, groups = len(block.heads), len(block.metrics), block.groups
    parts = (f"{part}." for part in (built.table.title, block.title) if part)
    caption = " ".join((*parts, _verdict(block))).strip()
    yield from (r"\begin{table*}[p]", r"\centering\small")
    yield rf"\caption{{{prose(caption)}}}"
    yield rf"\label{{tab:{built.table.name.replace('/', '-')}-{index + 1}}}"
    yield r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%"
    yield rf"\begin{{tabular}}{{{'l' * heads}{'r' * len(groups) * metrics}}}"
    yield r"\toprule"
    above = (f"{{c}}{{{prose(f'{what}: {where}')}}}" for what, where in groups)
    yield _line((*("",) * heads, *(rf"\multicolumn{{{metrics}}}{text}" for text in above)))
    ends = [heads + metrics * (index + 1) for index in range(len(groups))]
    yield "".join(rf"\cmidrule(lr){{{end - metrics + 1}-{end}}}" for end in ends)
    yield _line(map(escape, (*block.heads, *block.labels, *block.reported_labels)))
    yield r"\midrule"
    yield from (_line(_row(row, marked=not block.verdict())) for row in block.rows)
    yield from (r"\bottomrule", r"\end{tabular}}", r"\end{table*}", "")


def _verdict(block: TableBlock) -> str:
    if all(map(view.is_empty, block.cells)):
        return "Nothing measured yet."
    return block.verdict_remark()


def _row(row: TableRow, marked: bool) -> Iterator[str]:
    first, *rest = row.heads
    yield escape(first) + _notes(row.notes)
    yield from (escape(text) for text in rest)
    yield from (_measured(cell, marked) for cell in row.cells)
    for cell in row.reported:
        yield escape(view.reported_text(cell)) + _notes(view.own_notes(cell, row.notes))


def _measured(cell: BuiltCell, marked: bool) -> str:
    if view.is_empty(cell):
        return rf"\textit{{{escape(view.measured_text(cell))}}}"
    mark = rf"\textsubscript{{{view.MARKS[cell.verdict]}}}" if marked and cell.verdict else ""
    interval = rf"\,{{\scriptsize {view.interval_text(cell)}}}" if cell.interval else ""
    return view.measured_text(cell) + mark + interval


def _notes(names: Sequence[str]) -> str:
    return rf"\textsuperscript{{{escape(' '.join(names))}}}" if names else ""


def _line(entries: Iterable[str]) -> str:
    return " & ".join(entries) + r" \\"
