"""Render a table's frame as files: md, tex, html, csv and json; equal records give equal bytes.

Rendering reads only the built table (no torch, no store, no clock). json holds every cell with its
keys, state, measured and reported value; csv holds the same with one line per cell. The formats for
readers are templates in `templates/`, which add the markup to the content below: blocks of rows,
numbers as text, remarks. LaTeX is escaped ASCII, so it works with every engine and encoding; it
needs the packages booktabs and graphicx.

A block is one combination of section and column facets (LoPA Table 4: a model and a benchmark). A
row of it is one run, or several if some metrics have their own runs. Measured numbers come first,
then the reported ones, if any; each of the two groups of columns names its own model and benchmark.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from itertools import chain, groupby, product
from math import isnan
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dllm_bench.metrics.definitions import DECIMALS
from dllm_bench.paths import read_yaml
from dllm_bench.store.files import Plain, csv_text, write_atomic
from dllm_bench.tables.cost import cost_in_words
from dllm_bench.tables.derive import Curve
from dllm_bench.tables.frame import LOAD_PER_CORE, UNDEFINED, BuiltTable, Row, definition_text
from dllm_bench.tables.plan import CellState, PlannedRun, distinct_runs, missing_trained_files
from dllm_bench.tables.spec import FacetValue, Query, parse_number

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = 2  # version of the json file; raised with every change
DIGITS = 4  # after the decimal point; more would be noise
FORMS = ("md", "html", "tex", "csv", "json")
MARKDOWN = re.compile(r"[\\`*_\[\]|]")
CODE = re.compile("`([^`]*)`")
REORDERING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
LATEX = read_yaml(TEMPLATES / "latex.yaml")
WORDS = read_yaml(TEMPLATES / "words.yaml")
MIN_CHECKED = 3  # errors of fewer estimates are not meaningful
SHOWN_HASH = 10  # characters
SHOWN_RUNS = 3  # shown per row; the json file has all of them
TIMING_MARKS = {"disturbed": "†", "elsewhere": "‡"}  # after a timing; see `frame_of`
NO_CELL = "–"  # shown where the table has no number at all


# --- files --------------------------------------------------------------------------------------


def write(built: BuiltTable, folder: Path) -> list[Path]:
    """Write `<folder>/<paper>/<table>.<format>` for every format, each file atomically. Returns
    the paths.
    """
    files = [(folder / f"{built.stem}.{form}", text) for form, text in render(built).items()]
    return [write_atomic(path, text, durable=False) for path, text in files]


def render(built: BuiltTable) -> dict[str, str]:
    """Return {file extension: content}."""
    shown = {"built": built, "address": lambda run: f"{link(run)}/record.json"}
    pages = {form: environment().get_template(f"table.{form}") for form in ("md", "html", "tex")}
    texts = {form: page.render(shown) for form, page in pages.items()}
    return {**texts, "csv": as_csv(built), "json": as_json(built)}


@cache
def environment(*more: Path) -> Environment:
    """Return the templates in `templates/` and in further folders. html is escaped (autoescape),
    characters that reorder the text after them are written out, and a misspelt name in a template
    is an error, not an empty text.
    """
    found = Environment(
        loader=FileSystemLoader([*more, TEMPLATES]),
        autoescape=lambda name: name is None or name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_in_order,
    )
    found.filters.update(md=markdown, prose=prose, tex=latex, tex_prose=latex_prose)
    found.filters.update(short_hash=short_hash, call=lambda one, function: function(one))
    found.globals["show"] = globals()  # the functions of this module
    return found


def _in_order(value: Any) -> Any:
    if not isinstance(value, str) or not REORDERING.search(value):
        return value
    text = REORDERING.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return Markup(text) if isinstance(value, Markup) else text


def markdown(plain: str) -> str:
    """Return the text with Markdown's special characters escaped, also for use in a table."""
    return MARKDOWN.sub(r"\\\g<0>", plain.replace("&", "&amp;").replace("<", "&lt;"))


def prose(text: str) -> Markup:
    """Return escaped text whose words between backticks are set as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(text))))


def latex(text: str) -> str:
    """Return the text with LaTeX's special characters escaped; other non-ASCII characters lose
    their accents or become a question mark.
    """
    return "".join(LATEX.get(character) or _plain(character) for character in text)


def _plain(character: str) -> str:
    if character.isascii():
        return character
    return unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode() or "?"


def latex_prose(text: str) -> str:
    """Return the text escaped, with `code` in typewriter."""
    pieces = enumerate(map(latex, CODE.split(text)))
    return "".join(rf"\texttt{{{piece}}}" if index % 2 else piece for index, piece in pieces)


def rounded(value: float) -> float | None:
    """Return a number as it is written to json and csv; None if there is none."""
    return None if isnan(value) else round(value, DIGITS) + 0.0  # without the sign of -0.0


@lru_cache(maxsize=1)  # several formats show it
def cells_plain(built: BuiltTable) -> list[Plain]:
    """Return the rows of the frame as plain data. The source of reported values ends at its first
    semicolon, after which that of the set-up is named."""
    source = built.table.source.partition(";")[0]
    return [_cell_plain(row, source) for row in built.cells.itertuples()]


def _cell_plain(row: Row, source: str) -> Plain:
    cell, chosen = row.planned.cell, row.planned.run.chosen
    return {
        "keys": cell.keys,
        "metric": cell.metric.name,
        "definition": row.definition,
        "unit": row.unit,
        "state": row.state,
        "measured": (row.text or None) if isnan(row.value) else rounded(row.value),
        "interval": None if isnan(row.low) else [rounded(row.low), rounded(row.high)],
        "n": row.n,
        "measured_with": {k: chosen[k] for k in ("model", "benchmark") if k in chosen},
        "reported": parse_number(cell.reported),
        "reported_text": cell.reported or None,
        "source": source if cell.reported else None,
        "delta": rounded(row.delta),
        "verdict": str(row.verdict),
        "reason": row.reason,
        "notes": list(cell.notes),
        **{mark: True for mark in TIMING_MARKS if getattr(row, mark)},
        "runs": [run.spec.identity_hash for run in row.runs if run.spec],
        **({"curve": curve_plain(row.curve)} if row.curve else {}),
    }


def curve_plain(curve: Curve) -> dict[str, Any]:
    """Return the curve of an area as plain data."""
    points = {name: [rounded(x), rounded(y)] for name, (x, y) in curve.points.items()}
    return {**asdict(curve), "points": points, "y_max": rounded(curve.y_max)}


def as_json(built: BuiltTable) -> str:
    """Return the json file: everything, for programs."""
    table = built.table
    plain = {
        "schema": SCHEMA,
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "profile": built.profile.name,
        "definitions": {
            m.formula: {"label": m.label, "unit": m.unit, "text": definition_text(m)}
            for m in table.metrics
        },
        "hardware": built.hardware,
        "code": built.code,
        "inputs": built.inputs,
        "notes": [{"id": n.name, "text": n.text, "where": n.where} for n in table.notes],
        "runs": {  # cells refer to a run by its hash
            run.spec.identity_hash: {"state": run.state, "folder": run.folder, "query": run.query}
            for run in built.runs
            if run.spec
        },
        "cells": cells_plain(built),
    }
    return json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def as_csv(built: BuiltTable) -> str:
    """Return the csv file: one line per cell."""
    facets = list(built.table.facets)
    plain = ["metric", "definition", "unit", "state", "measured", "low", "high", "n"]
    names = [*facets, *plain, "measured_model", "measured_benchmark", "reported", "source"]
    names += ["delta", "verdict", "reason", "notes", "runs"]
    return csv_text(names, map(_csv_row, cells_plain(built)))


def _csv_row(entry: dict[str, Any]) -> dict[str, Any]:
    low, high = entry["interval"] or (None, None)
    measured_with = {f"measured_{key}": value for key, value in entry["measured_with"].items()}
    row = {**entry, **entry["keys"], **measured_with, "low": low, "high": high}
    row |= {key: " ".join(entry[key]) for key in ("notes", "runs")}
    return {**row, "reported": entry["reported_text"]}


# --- content of all formats ----------------------------------------------------------------------


@lru_cache(maxsize=1)  # several formats show it
def blocks(built: BuiltTable) -> list[Plain]:
    """Return all blocks that have a cell, section by section.

    Keys of a block:
    section; paper: the paper's group of columns; title: of both
    here, measured_on: common model and benchmark of all measured numbers, as data and in words
    heads: of the columns before the numbers; metrics, labels: of the columns with numbers
    is_reported; rows
    verdict: remark on the verdicts; marked: whether cells have marks

    Keys of a row: key, heads, notes, cells, runs (of its own numbers, without those used for
    comparison). A cell is a row of the frame, or None.
    """
    table = built.table
    by_key = {row.Index: row for row in built.cells.itertuples()}
    shown = {name: _shown(values, built, name) for name, values in table.facets.items()}
    outer_facets = (*table.sections, *table.columns)
    found = []
    for outer in product(*(shown[facet] for facet in outer_facets)):
        fixed = dict(zip(outer_facets, outer, strict=True))
        rows = []
        for inner in product(*(shown[facet] for facet in table.rows)):
            values = {**fixed, **dict(zip(table.rows, inner, strict=True))}
            names = tuple(values[facet].name for facet in table.facets)
            cells = [by_key.get((*names, metric.name)) for metric in table.metrics]
            if any(cells):
                rows.append(_row(built, inner, cells))
        if rows:
            found.append(_block(built, outer, rows))
    return found


def sections(built: BuiltTable) -> Iterator[Plain]:
    """Yield the blocks of each section, and lines across all of them: heads, common notes, and
    (block, row or None) of each block.
    """
    for section, found in groupby(blocks(built), key=lambda block: block["section"]):
        of_section = list(found)
        keyed = [{row["key"]: row for row in block["rows"]} for block in of_section]
        lines = []
        for key in dict.fromkeys(key for rows in keyed for key in rows):
            known = [rows[key] for rows in keyed if key in rows]
            notes = [n for n in known[0]["notes"] if all(n in row["notes"] for row in known)]
            rows = [(block, rows.get(key)) for block, rows in zip(of_section, keyed, strict=True)]
            lines.append({"heads": known[0]["heads"], "notes": notes, "rows": rows})
        yield {"section": section, "blocks": of_section, "lines": lines}


def _shown(values: Iterable[FacetValue], built: BuiltTable, facet: str) -> list[FacetValue]:
    """Return the facet's values that occur in shown cells."""
    names = set(built.cells.index.get_level_values(facet))
    return [value for value in values if value.name in names]


def _row(built: BuiltTable, values: Sequence[FacetValue], cells: Sequence[Row | None]) -> Plain:
    pairs = zip(cells, built.table.metrics, strict=True)
    own = [cell for cell, metric in pairs if not metric.is_compared] or cells
    more = zip(values, _added_titles(built), strict=True)
    return {
        "key": tuple(value.name for value in values),
        "heads": (
            *(v.label for v in values),
            *(v.shown.get(title, NO_CELL) for v, titles in more for title in titles),
        ),
        "notes": common_notes(cells),
        "cells": cells,
        "runs": distinct_runs(cell.planned for cell in own if cell),
    }


def _added_titles(built: BuiltTable) -> list[list[str]]:
    """Return the titles of the additional columns of each facet in rows."""
    facets = (built.table.facets[facet] for facet in built.table.rows)
    return [list(dict.fromkeys(title for v in values for title in v.shown)) for values in facets]


def _block(built: BuiltTable, outer: Sequence[FacetValue], rows: Sequence[Plain]) -> Plain:
    table, split = built.table, len(built.table.sections)
    section = ", ".join(value.label for value in outer[:split])
    paper = ", ".join(value.label for value in outer[split:])
    title = ", ".join(filter(None, (section, paper)))
    cells = [cell for row in rows for cell in row["cells"] if cell]
    here = measured_on(cells)
    heads = [facet.replace("_", " ").capitalize() for facet in table.rows]
    heads += chain.from_iterable(_added_titles(built))
    own = [measured_on(row["cells"]) for row in rows]
    if any(names not in ((), here) for names in own):  # the block's head cannot name these
        heads.append("Measured with")
        for row, names in zip(rows, own, strict=True):
            row["heads"] += (" on ".join(name for name in names if name not in here) or NO_CELL,)
    has_runs = any(run.query for row in rows for run in row["runs"])
    where = " on ".join(here) or ("several models" if has_runs else "not run here")
    is_reported = any(cell.planned.cell.reported for cell in cells)
    named = where if is_reported or not paper else f"{paper} ({where})"  # tells columns apart
    groups = (("here", "Measured", named), ("paper", "Reported", title))
    metrics = [metric.label for metric in table.metrics]
    verdicts = {(cell.verdict, cell.reason) for cell in cells if cell.verdict}
    remark = verdict_remark(verdicts)
    below = "Nothing measured yet." if all(map(is_empty, cells)) else remark
    return {
        "section": section,
        "paper": paper,
        "title": title,
        "here": here,
        "measured_on": where,
        "heads": tuple(heads),
        "metrics": metrics,
        "labels": [
            f"{label} (%)" if cell and cell.unit == "%" else label
            for label, cell in zip(metrics, rows[0]["cells"], strict=True)
        ],
        "is_reported": is_reported,
        "marked": len(verdicts) != 1,
        "verdict": remark,
        "rows": rows,
        "groups": groups if is_reported else groups[:1],
        "caption": " ".join(filter(None, (f"{table.title}.", title and f"{title}.", below))),
    }


def verdict_remark(verdicts: Iterable[tuple[str, str]]) -> str:
    """Return the remark on the (verdict, reason) of cells: the common one, or the meaning of the
    marks; empty if nothing was compared.
    """
    texts = [f"{verdict} ({why})" if why else verdict for verdict, why in verdicts]
    if len(texts) == 1:
        return f"Verdict: {texts[0]}."
    return f"Marks: {WORDS['legend']}." if texts else ""


def measured_on(cells: Iterable[Row | None]) -> Query:
    """Return the common model and benchmark of the cells' runs; empty if none of them can run.
    Cells that compare two runs count only if there are no others."""
    known = [cell.planned for cell in cells if cell and cell.planned.run.query]
    own = [planned for planned in known if not planned.cell.metric.is_compared] or known
    chosen = [planned.run.chosen for planned in own]
    names = [{choice.get(key, "") for choice in chosen} for key in ("model", "benchmark")]
    return tuple(name for one in names if len(one) == 1 for name in one if name)


def common_notes(cells: Sequence[Row | None]) -> Query:
    """Return the notes that all cells share, in the order of the first cell."""
    notes = [cell.planned.cell.notes if cell else () for cell in cells]
    return tuple(dict.fromkeys(name for name in notes[0] if all(name in own for own in notes)))


def own_notes(cell: Row | None, shown: Query) -> Query:
    """Return the notes of the cell that are not shown for its whole row."""
    notes = cell.planned.cell.notes if cell else ()
    return tuple(dict.fromkeys(name for name in notes if name not in shown))


def number(value: float, unit: str) -> str:
    """Return a number with the decimals of its unit; one that rounds to zero has no sign."""
    return f"{value:z.{DECIMALS.get(unit, 1)}f}"


def measured_text(cell: Row | None) -> str:
    """Return the measured number, or the text of an empty cell."""
    if cell is None:
        return NO_CELL
    if is_empty(cell) or cell.text:
        return cell.text or cell.planned.run.short or UNDEFINED
    metric, text = cell.planned.cell.metric, number(cell.value, cell.unit)
    sign = "+" if (metric.minus or metric.gain) and float(text) > 0 else ""
    return sign + text + "".join(m for name, m in TIMING_MARKS.items() if getattr(cell, name))


def is_empty(cell: Row | None) -> bool:
    """Return True for a cell that shows why it has no number."""
    return cell is None or (isnan(cell.value) and not cell.text)


def interval_text(cell: Row) -> str:
    """Return the interval in brackets; empty if there is none."""
    ends = ", ".join(number(end, cell.unit) for end in (cell.low, cell.high) if not isnan(end))
    return f"[{ends}]" if ends else ""


def reported_text(cell: Row | None) -> str:
    """Return the printed value."""
    if cell is None:
        return NO_CELL
    return cell.planned.cell.reported or "not reported"


def link(run: PlannedRun) -> str:
    """Return the path of the run's folder, relative to the rendered file."""
    return f"../../runs/{run.folder}"


def short_hash(run: PlannedRun) -> str:
    """Return the first characters of the run's hash; empty if there is no run."""
    return run.spec.identity_hash[:SHOWN_HASH] if run.spec else ""


def hashes(row: Plain) -> str:
    """Return the hashes of the row's runs, as shown."""
    shown = [short_hash(run) for run in row["runs"] if run.spec]
    more = f" … ({len(shown)} runs)" if len(shown) > SHOWN_RUNS else ""
    return " ".join(shown[:SHOWN_RUNS]) + more or NO_CELL


def progress(built: BuiltTable) -> str:
    """Return the number of runs in each state."""
    counts = Counter(run.state for run in built.runs)
    listed = ", ".join(f"{counts[state]} {state}" for state in CellState if counts[state])
    return f"{counts.total()} runs: {listed}" if listed else "nothing to run"


def cost_lines(built: BuiltTable) -> list[str]:
    """Return the cost of open and of unavailable runs, the error of such estimates, and the files
    that must be trained first.
    """
    lines, estimate = [], built.costs.estimate
    elsewhere = [r for r in built.runs if r.state is CellState.UNAVAILABLE and r.config]
    for runs, what in ((built.open, "to make,"), (elsewhere, "are unavailable here; elsewhere:")):
        if runs:
            lines.append(f"{len(runs)} runs {what} {cost_in_words(list(map(estimate, runs)))}")
    errors = built.costs.measured.errors if lines else []
    if len(errors) >= MIN_CHECKED:
        low, *_, high = quantiles(errors, n=10, method="inclusive")
        lines.append(
            f"measured ÷ estimated seconds of {len(errors)} sealed runs: {median(errors):.2f} in "
            f"the middle, {low:.1f} to {high:.1f} in 8 of 10"
        )
    trained = missing_trained_files(built.runs)
    lines += [f"train first: {source} (`dllm-bench train`)" for source in trained]
    return lines


def profile_text(built: BuiltTable) -> str:
    """Return the meaning of the profile for the columns."""
    kind = "embedded" if built.profile.embedded else "published"
    form = WORDS[f"{kind}, reported" if built.table.reported else kind]
    return form.format(name=built.profile.name)


def _mark_lines(built: BuiltTable) -> Iterator[str]:
    """Yield the meaning of each mark that a timing has."""
    for mark, sign in TIMING_MARKS.items():
        if count := built.cells[mark].sum():
            yield WORDS[mark].format(mark=sign, load=LOAD_PER_CORE, count=count)


def _passes_lines(built: BuiltTable) -> list[str]:
    """Return the meaning of a timing's interval, if a run has several passes over its items."""
    with_interval = built.cells.planned[built.cells.low.notna()]
    timed = distinct_runs(one for one in with_interval if one.cell.metric.is_of_times)
    passes = sorted({run.spec.repeats for run in timed if run.spec} - {1})
    return [WORDS["passes"].format(counts=" or ".join(map(str, passes)))] if passes else []


@lru_cache(maxsize=1)  # several formats show it
def footer(built: BuiltTable, commands: bool = True) -> list[tuple[str, list[str]]]:
    """Return the remarks below a table: (heading, lines). `commands`: list the commands of open
    runs."""
    definitions = [
        f"{m.label} = `{m.formula}`{f', {m.unit}' if m.unit else ''}: {definition_text(m)}"
        for m in built.table.metrics
    ]
    compares_scores = any(m.is_score and m.minus for m in built.table.metrics)
    intervals = WORDS["intervals"].format(paired=WORDS["paired"] if compares_scores else "")
    reported_on = dict.fromkeys(planned.cell.reported_on for planned in built.cells.planned)
    parts = [
        ("Definitions", [*definitions, intervals, *_passes_lines(built)]),
        ("Measured on", [*built.hardware, *_mark_lines(built)]),
        ("Code", [f"commit {code}" for code in built.code]),
        ("Inputs", built.inputs),
        (
            "Reported" if built.table.reported else "Source",
            [built.table.source, *(f"on {hardware}" for hardware in reported_on if hardware)],
        ),
        ("Notes", [f"{note.name}: {note.text}" for note in built.table.notes]),
        ("Not graded", _ungraded_lines(built)),
        ("Undefined", list(_undefined_lines(built))),
        ("Reported only", _reported_only_lines(built)),
        ("Cannot run here", built.unavailable),
        ("Still to run", _open_lines(built)[: None if commands else 1]),
    ]
    return [(title, lines) for title, lines in parts if lines]


def run_lines(built: BuiltTable) -> list[str]:
    """Return the hashes of each block's runs, row by row, for formats without a column for them."""
    return [
        f"{block['title']}: "
        + ", ".join(f"{row['heads'][0]} {hashes(row)}" for row in block["rows"])
        for block in blocks(built)
    ]


def _ungraded_lines(built: BuiltTable) -> list[str]:
    """Return the runs whose scores leave out samples that could not be graded, with their
    numbers."""
    scores = [planned for planned in built.cells.planned if planned.cell.metric.is_score]
    records = {r.record.spec.short: r.record for r in distinct_runs(scores) if r.record}
    return [f"{short}: {one.ungraded}" for short, one in records.items() if one.ungraded]


def _undefined_lines(built: BuiltTable) -> Iterator[str]:
    """Yield the reasons why sealed runs give no number, with the cells."""
    undefined = built.cells[built.cells.status == UNDEFINED]
    for why, planned in undefined.groupby("reason", sort=False).planned:
        labels = (
            [v.label for v in p.cell.values.values()] + [p.cell.metric.label] for p in planned
        )
        yield f"{'; '.join(map(', '.join, labels))}: {why}"


def _reported_only_lines(built: BuiltTable) -> list[str]:
    """Return the reasons why some cells have no run; derived cells have those of their parts."""
    without = built.cells.planned[built.cells.state == CellState.REPORTED_ONLY]
    own = [p for p in without if p.cell.reported_only or not p.parts]
    return list(dict.fromkeys(p.cell.reported_only or p.run.reason for p in own))


def _open_lines(built: BuiltTable) -> list[str]:
    """Return the total cost, then a line per open run."""
    costs = {id(run): cost_in_words([built.costs.estimate(run)]) for run in built.open}
    lines = [f"`{r.command}` ({r.state}: {r.reason}; {costs[id(r)]})" for r in built.open]
    return [*cost_lines(built), *lines]
