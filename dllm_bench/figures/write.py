"""A built figure as files and as lines for the terminal.

The files are `<folder>/<profile>/<paper>/<figure>.{csv,svg,png}`. The csv holds every point, with
or without a number, so everything in the drawing can be read from it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from dllm_bench.figures.draw import images
from dllm_bench.figures.points import NO_REPLAY, STATED, BuiltFigure, FigurePoint
from dllm_bench.figures.spec import PaperFigure
from dllm_bench.store.files import write_atomic
from dllm_bench.tables import view
from dllm_bench.tables.cost import cost_in_words

DIGITS = 6


def write(built: BuiltFigure, folder: Path) -> list[Path]:
    """Write all formats, each file atomically; returns their paths."""
    stem = folder / built.built.profile.name / built.figure.name
    stem.parent.mkdir(parents=True, exist_ok=True)
    forms = {"csv": as_csv(built).encode(), **images(built)}
    paths = []
    for form, content in forms.items():
        path = stem.with_name(f"{stem.name}.{form}")
        write_atomic(path, content)
        paths.append(path)
    return paths


def as_csv(built: BuiltFigure) -> str:
    """The csv: one line per point."""
    text = io.StringIO()
    names = [field.name for field in fields(FigurePoint)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for point in (*built.points, *stated_points(built.figure)):
        writer.writerow({name: _plain(value) for name, value in asdict(point).items()})
    return text.getvalue()


def stated_points(figure: PaperFigure) -> Iterator[FigurePoint]:
    """The stated numbers as lines of the csv: a place on one axis, or low and high of a range."""
    for number in figure.stated:
        single = number.low == number.high
        yield FigurePoint(
            panel=number.panel,
            series="",
            quantity=number.quantity,
            x=number.low if single and number.axis == "x" else None,
            y=number.low if single and number.axis == "y" else None,
            low=None if single else number.low,
            high=None if single else number.high,
            kind=STATED,
            reason=number.sentence,
            source=figure.table.source,
            at=number.axis,
        )


def _plain(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else ""
    return round(value, DIGITS) if isinstance(value, float) else value


def headline(built: BuiltFigure) -> str:
    """One line: how many points are measured, reported, without number, and the runs' states."""
    measured, reported = len(built.drawn(measured=True)), len(built.drawn(measured=False))
    without = len(built.without_number())
    points = f"{measured} points measured, {reported} reported, {without} without number"
    return f"{built.figure.name}: {points}; {view.progress(built.built)}"


def lines(built: BuiltFigure) -> Iterator[str]:
    """What was drawn, what could not be and why, and the commands that run what is missing."""
    table = built.built
    yield built.figure.table.title
    yield headline(built)
    yield from (f"cannot run here: {reason}" for reason in table.unavailable)
    if table.open:
        cost = cost_in_words([run.cost for run in table.open])
        command = f"dllm-bench figure {table.table.name} {table.profile.flags} --run"
        yield f"{len(table.open)} runs to fill ({cost}): {command}"
    lacking = {point.run for point in built.without_number() if point.reason == NO_REPLAY}
    if lacking:
        yield f"{len(lacking)} runs lack a token replay, which --run records"
    for run in table.open:
        yield f"open ({run.state}: {run.reason}): {run.command}"
