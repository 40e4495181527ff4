"""A built figure as files and as lines for the terminal.

`<folder>/<profile>/<paper>/<figure>.{csv,svg,png}`; the csv holds every point, measured, reported
or open, so that nothing the drawing shows (or cannot show) is only in the drawing.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from dllm_bench.figures.draw import images
from dllm_bench.figures.points import EVOLUTION, BuiltFigure, FigurePoint
from dllm_bench.store.files import write_atomic
from dllm_bench.tables import view
from dllm_bench.tables.cost import cost_in_words

DIGITS = 6


def write(built: BuiltFigure, folder: Path) -> list[Path]:
    """All forms, each file whole or not at all."""
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
    """One line per point."""
    text = io.StringIO()
    names = [field.name for field in fields(FigurePoint)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for point in built.points:
        plain = {name: _short(value) for name, value in asdict(point).items()}
        writer.writerow(plain)
    return text.getvalue()


def _short(value: object) -> object:
    if isinstance(value, bool):
        return "yes" if value else ""
    return round(value, DIGITS) if isinstance(value, float) else value


def headline(built: BuiltFigure) -> str:
    """What was drawn, and what was not."""
    measured, reported = len(built.drawn(measured=True)), len(built.drawn(measured=False))
    points = f"{measured} points measured, {reported} reported, {len(built.without())} without"
    return f"{built.figure.name}: {points} number; {view.progress(built.built)}"


def lines(built: BuiltFigure) -> Iterator[str]:
    """What was drawn, what could not be, and the commands that fill it."""
    table = built.built
    yield built.figure.table.title
    yield headline(built)
    yield from (f"cannot run here: {reason}" for reason in table.impossible)
    if table.open:
        cost = cost_in_words([run.cost for run in table.open])
        command = f"dllm-bench figure {table.table.name} {table.profile.flags} --run"
        yield f"{len(table.open)} runs to fill ({cost}): {command}"
    lacking = {point.run for point in built.without() if point.reason == EVOLUTION}
    if lacking:
        yield f"{len(lacking)} runs lack the evolution of their tokens, which --run makes"
    for run in table.open:
        yield f"open ({run.state}: {run.reason}): {run.command}"
