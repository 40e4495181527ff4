"""A built figure as files and as lines for the terminal.

The files are `<folder>/<profile>/<paper>/<figure>.{csv,svg,png}`. The csv holds every point, with
or without a number, so everything in the drawing can be read from it. `why_kept` says whether files
written earlier have points that would be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dllm_bench.figures.draw import images
from dllm_bench.figures.points import BLANK, MEASURED, NO_REPLAY, STATED, BuiltFigure
from dllm_bench.figures.run_series import Point
from dllm_bench.figures.spec import PaperFigure
from dllm_bench.store.files import csv_rows, csv_text, write_atomic
from dllm_bench.tables import view
from dllm_bench.tables.cost import cost_in_words
from dllm_bench.tables.plan import CellState

DIGITS = 6


def file_of(built: BuiltFigure, folder: Path, form: str) -> Path:
    """Return the file with one format of a figure."""
    return folder / built.built.profile.name / f"{built.figure.name}.{form}"


def write(built: BuiltFigure, folder: Path) -> list[Path]:
    """Write all formats, each file atomically; returns their paths."""
    forms = {"csv": as_csv(built).encode(), **images(built)}
    contents = {file_of(built, folder, form): content for form, content in forms.items()}
    for path, content in contents.items():
        write_atomic(path, content)
    return list(contents)


def why_kept(built: BuiltFigure, folder: Path) -> str:
    """Return the reason to keep the files of an earlier drawing: they have measured points of a run
    that is sealed but now gives none, or that failed when made again. Empty if nothing would be
    lost.
    """
    path = file_of(built, folder, "csv")
    states = (CellState.SEALED, CellState.FAILED)
    open_points = built.without_number.itertuples()
    reasons = {p.run: p.reason for p in open_points if p.state in states}
    drawn = set(map(_line_of, built.drawn(measured=True).to_dict("records")))
    earlier = [row for row in measured_rows(path) if _line_of(row) not in drawn]
    lost = {row["run"]: reasons[row["run"]] for row in earlier if row["run"] in reasons}
    if not lost:
        return ""
    why = "; ".join(dict.fromkeys(lost.values()))
    return (
        f"{path} was not written again, since it has points of {len(lost)} runs that would be lost "
        f"({why}); move it away to draw the figure without them."
    )


def measured_rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a figure's csv with a measured number; none without the file."""
    return [row for row in csv_rows(path) if row.get("kind") == MEASURED and row.get("y")]


def _line_of(point: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the common key of the points of one series of a run."""
    return tuple(point.get(name, "") for name in ("panel", "series", "quantity", "run"))


def as_csv(built: BuiltFigure) -> str:
    """Return the csv: one line per point."""
    points = (*built.points.to_dict("records"), *stated_points(built.figure))
    rows = ({name: _plain(value) for name, value in {**BLANK, **one}.items()} for one in points)
    return csv_text(list(BLANK), rows)


def stated_points(figure: PaperFigure) -> Iterator[Point]:
    """Yield the stated numbers as lines of the csv: a place on one axis, or low and high of a
    range."""
    for number in figure.stated:
        single = {number.axis: number.low} if number.axis else {}
        yield {
            "panel": number.panel,
            "quantity": number.quantity,
            **(single if number.low == number.high else {"low": number.low, "high": number.high}),
            "kind": STATED,
            "reason": number.sentence,
            "source": figure.table.source,
            "at": number.axis,
        }


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else ""
    return round(value, DIGITS) if isinstance(value, float) else value


def headline(built: BuiltFigure) -> str:
    """Return one line: how many points are measured, reported, without number, and the runs'
    states."""
    measured, reported = (len(built.drawn(measured=ours)) for ours in (True, False))
    without = len(built.without_number)
    points = f"{measured} points measured, {reported} reported, {without} without number"
    return f"{built.figure.name}: {points}; {view.progress(built.built)}"


def lines(built: BuiltFigure) -> Iterator[str]:
    """Yield lines about what was drawn, what could not be drawn and why, and the commands for
    missing runs."""
    table = built.built
    yield built.figure.table.title
    yield headline(built)
    yield from (f"cannot run here: {reason}" for reason in table.unavailable)
    if table.open:
        cost = cost_in_words([table.costs.estimate(run) for run in table.open])
        command = f"dllm-bench figure {table.table.name} {table.profile.flags} --run"
        yield f"{len(table.open)} runs to fill ({cost}): {command}"
    empty = built.without_number
    lacking = empty.run[empty.reason == NO_REPLAY].nunique()
    if lacking:
        yield f"{lacking} runs lack a token replay, which --run records"
    unread = empty[(empty.state == CellState.SEALED) & (empty.reason != NO_REPLAY)]
    reasons = dict(zip(unread.run, unread.reason, strict=True))
    for reason in dict.fromkeys(reasons.values()):
        yield f"{list(reasons.values()).count(reason)} runs: {reason}"
    for run in table.open:
        yield f"open ({run.state}: {run.reason}): {run.command}"
