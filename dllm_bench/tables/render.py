"""A built table as files: md, tex, html, csv and json, the same bytes for the same records.

Rendering reads nothing but the built table (no torch, no store, no clock). json holds every cell
with its keys, state, measured and reported value, csv the same in one line per cell; both are made
here. The formats for readers have a module each: `render_md`, `render_tex`, `render_html`.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dllm_bench.store.files import write_atomic
from dllm_bench.tables.build import BuiltCell, BuiltTable
from dllm_bench.tables.derive import Curve
from dllm_bench.tables.plan import PlannedRun, distinct_runs
from dllm_bench.tables.render_html import html
from dllm_bench.tables.render_md import markdown
from dllm_bench.tables.render_tex import latex

SCHEMA = 2  # of the json file; raised with every change of it
DIGITS = 4  # behind the point; more would be noise


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
    """File extension -> content."""
    return {extension: renderer(built) for extension, renderer in RENDERERS.items()}


def rounded(value: float | None) -> float | None:
    """A number as it is written to json and csv."""
    return None if value is None else round(value, DIGITS)


def cell_plain(built: BuiltCell) -> dict[str, Any]:
    """A cell as plain data."""
    cell, run = built.cell, built.run
    return {
        "keys": cell.keys,
        "metric": cell.metric.name,
        "definition": cell.metric.formula,
        "unit": built.unit,
        "state": str(run.state),
        "measured": built.setting or None if built.measured is None else rounded(built.measured),
        "interval": [rounded(end) for end in built.interval] if built.interval else None,
        "n": built.n,
        "measured_with": {k: run.chosen[k] for k in ("model", "benchmark") if k in run.chosen},
        "reported": cell.reported.value if cell.reported else None,
        "reported_text": cell.reported.text if cell.reported else None,
        "source": cell.reported.source if cell.reported else None,
        "delta": rounded(built.delta),
        "verdict": str(built.verdict),
        "reason": built.why,
        "notes": list(cell.notes),
        **({"disturbed": True} if built.measured is not None and built.is_disturbed else {}),
        "runs": [run.spec.identity_hash for run in built.runs if run.spec],
        **({"curve": curve_plain(built.curve)} if built.curve else {}),
    }


def curve_plain(curve: Curve) -> dict[str, Any]:
    """The curve of an area as plain data."""
    points = {name: [rounded(x), rounded(y)] for name, (x, y) in curve.points.items()}
    return {**asdict(curve), "points": points, "y_max": rounded(curve.y_max)}


def run_plain(run: PlannedRun) -> dict[str, Any]:
    """A run as plain data; cells refer to it by its hash."""
    return {"state": str(run.state), "folder": run.folder, "query": list(run.query)}


def as_json(built: BuiltTable) -> str:
    """The json file: everything, for programs."""
    table = built.table
    plain = {
        "schema": SCHEMA,
        "table": table.name,
        "title": table.title,
        "source": table.source,
        "profile": built.profile.name,
        "definitions": {
            d.name: {"label": d.label, "unit": d.unit, "text": d.text} for d in built.definitions
        },
        "hardware": list(built.hardware),
        "code": list(built.code),
        "inputs": list(built.inputs),
        "notes": [
            {
                "id": note.name,
                "text": note.text,
                "where": {k: list(v) for k, v in note.where.items()},
            }
            for note in table.notes
        ],
        "runs": {
            run.spec.identity_hash: run_plain(run)
            for run in distinct_runs(built.planned())
            if run.spec
        },
        "cells": [cell_plain(cell) for cell in built.cells],
    }
    return json.dumps(plain, ensure_ascii=False, indent=1, allow_nan=False) + "\n"


def as_csv(built: BuiltTable) -> str:
    """The csv file: one line per cell."""
    facets = list(built.table.facets)
    plain = ["metric", "definition", "unit", "state", "measured", "low", "high", "n"]
    names = [*facets, *plain, "measured_model", "measured_benchmark", "reported", "source"]
    names += ["delta", "verdict", "reason", "notes", "runs"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for cell in built.cells:
        entry = cell_plain(cell)
        low, high = entry["interval"] or (None, None)
        measured_with = {f"measured_{key}": value for key, value in entry["measured_with"].items()}
        row = {**entry, **entry["keys"], **measured_with, "low": low, "high": high}
        row |= {"reported": entry["reported_text"]}
        row |= {key: " ".join(entry[key]) for key in ("notes", "runs")}
        writer.writerow(row)
    return text.getvalue()


RENDERERS: dict[str, Callable[[BuiltTable], str]] = {
    "md": markdown,
    "html": html,
    "tex": latex,
    "csv": as_csv,
    "json": as_json,
}
