"""Render a table's frame as files: md, tex, html, csv and json; equal records give equal bytes.

Rendering reads only the built table (no torch, no store, no clock). json holds every cell with its
keys, state, measured and reported value; csv holds the same with one line per cell. The formats for
readers are templates in `templates/`; their content is made in `view`. LaTeX is escaped ASCII, so
it works with every engine and encoding; it needs the packages booktabs and graphicx.
"""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import asdict
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from dllm_bench.store.files import csv_text, write_atomic
from dllm_bench.tables import view
from dllm_bench.tables.derive import Curve
from dllm_bench.tables.frame import BuiltTable, Row, definition_text
from dllm_bench.tables.plan import PlannedRun

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA = 2  # version of the json file; raised with every change
DIGITS = 4  # after the decimal point; more would be noise
FORMS = ("md", "html", "tex", "csv", "json")
MARKDOWN = re.compile(r"[\\`*_\[\]|]")
CODE = re.compile("`([^`]*)`")
LATEX = {
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


def write(built: BuiltTable, folder: Path) -> list[Path]:
    """Write `<folder>/<paper>/<table>.<format>` for every format, each file atomically; profiles
    other than the embedded one add their name. Returns the paths.
    """
    stem = (
        built.table.name if built.profile.embedded else f"{built.table.name}-{built.profile.name}"
    )
    paths = []
    for extension, text in render(built).items():
        path = folder / f"{stem}.{extension}"
        write_atomic(path, text)
        paths.append(path)
    return paths


def render(built: BuiltTable) -> dict[str, str]:
    """Return {file extension: content}."""

    def address(run: PlannedRun) -> str:
        return f"{view.link(built, run)}/record.json"

    pages = {form: environment().get_template(f"table.{form}") for form in ("md", "html", "tex")}
    texts = {form: page.render(built=built, address=address) for form, page in pages.items()}
    return {**texts, "csv": as_csv(built), "json": as_json(built)}


@cache
def environment(*more: Path) -> Environment:
    """Return the templates in `templates/` and in further folders. html is escaped (autoescape),
    and a misspelt name in a template is an error, not an empty text.
    """
    found = Environment(
        loader=FileSystemLoader([*more, TEMPLATES]),
        autoescape=lambda name: name is None or name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(md=markdown, prose=prose, tex=latex, tex_prose=latex_prose)
    found.filters.update(short_hash=view.short_hash, call=lambda one, function: function(one))
    found.globals["show"] = view
    return found


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
    pieces = CODE.split(text)
    return "".join(
        rf"\texttt{{{latex(piece)}}}" if index % 2 else latex(piece)
        for index, piece in enumerate(pieces)
    )


def rounded(value: float) -> float | None:
    """Return a number as it is written to json and csv; None if there is none."""
    return None if isnan(value) else round(value, DIGITS)


def cell_plain(row: Row) -> dict[str, Any]:
    """Return a row of the frame as plain data."""
    cell, chosen = row.planned.cell, row.planned.run.chosen
    return {
        "keys": cell.keys,
        "metric": cell.metric.name,
        "definition": row.definition,
        "unit": row.unit,
        "state": row.state,
        "measured": row.text or None if isnan(row.value) else rounded(row.value),
        "interval": None if isnan(row.low) else [rounded(row.low), rounded(row.high)],
        "n": row.n,
        "measured_with": {k: chosen[k] for k in ("model", "benchmark") if k in chosen},
        "reported": cell.reported.value if cell.reported else None,
        "reported_text": cell.reported.text if cell.reported else None,
        "source": cell.reported.source if cell.reported else None,
        "delta": rounded(row.delta),
        "verdict": str(row.verdict),
        "reason": row.reason,
        "notes": list(cell.notes),
        **({"disturbed": True} if row.disturbed else {}),
        "runs": [run.spec.identity_hash for run in row.runs if run.spec],
        **({"curve": curve_plain(row.curve)} if row.curve else {}),
    }


def curve_plain(curve: Curve) -> dict[str, Any]:
    """Return the curve of an area as plain data."""
    points = {name: [rounded(x), rounded(y)] for name, (x, y) in curve.points.items()}
    return {**asdict(curve), "points": points, "y_max": rounded(curve.y_max)}


def run_plain(run: PlannedRun) -> dict[str, Any]:
    """Return a run as plain data; cells refer to it by its hash."""
    return {"state": str(run.state), "folder": run.folder, "query": list(run.query)}


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
        "notes": [
            {
                "id": note.name,
                "text": note.text,
                "where": {k: list(v) for k, v in note.where.items()},
            }
            for note in table.notes
        ],
        "runs": {run.spec.identity_hash: run_plain(run) for run in built.runs if run.spec},
        "cells": [cell_plain(row) for row in built.cells.itertuples()],
    }
    return json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def as_csv(built: BuiltTable) -> str:
    """Return the csv file: one line per cell."""
    facets = list(built.table.facets)
    plain = ["metric", "definition", "unit", "state", "measured", "low", "high", "n"]
    names = [*facets, *plain, "measured_model", "measured_benchmark", "reported", "source"]
    names += ["delta", "verdict", "reason", "notes", "runs"]
    return csv_text(names, map(_csv_row, map(cell_plain, built.cells.itertuples())))


def _csv_row(entry: dict[str, Any]) -> dict[str, Any]:
    low, high = entry["interval"] or (None, None)
    measured_with = {f"measured_{key}": value for key, value in entry["measured_with"].items()}
    row = {**entry, **entry["keys"], **measured_with, "low": low, "high": high}
    row |= {key: " ".join(entry[key]) for key in ("notes", "runs")}
    return {**row, "reported": entry["reported_text"]}
