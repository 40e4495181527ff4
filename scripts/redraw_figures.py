"""Draw the figures of results/reference again, after a change of how figures are drawn.

    .venv/bin/python -m scripts.redraw_figures [NAME ...]

Nothing is run. Points that a record gives are computed from the packed records; those of run
series, which need samples that the reference does not hold, are read from the committed csv. What
the papers print is read anew.
"""

from __future__ import annotations

import tarfile
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path

from dllm_bench.api.compose import compose
from dllm_bench.figures.draw import write
from dllm_bench.figures.points import MEASURED, NUMBERS, BuiltFigure, build_figure, frame_of_points
from dllm_bench.figures.run_series import Point
from dllm_bench.figures.spec import PaperFigure, load_figure, number_or_text
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.files import csv_rows
from dllm_bench.store.store import Store
from dllm_bench.tables.frame import build
from dllm_bench.tables.load import load_profile, names_of
from dllm_bench.tables.plan import Planner
from dllm_bench.tables.spec import EMBEDDED
from scripts.update_reference import REFERENCE

FIGURES = REFERENCE / "figures"


def measured_points(figure: PaperFigure) -> Iterator[Point]:
    """Yield the measured points in the committed csv of a figure."""
    rows = csv_rows(FIGURES / EMBEDDED / f"{figure.name}.csv")
    for row in (row for row in rows if row["kind"] == MEASURED):
        numbers = {name: as_written(row[name]) if row[name] else None for name in NUMBERS}
        known = {"n": int(row["n"]), "front": row["front"] == "yes"}
        x = as_written(row["x"]) if row["x"] else None
        yield {**row, **numbers, **known, "x": x}


def as_written(text: str) -> float | str:
    """Return the number that a text spells, whole if it has no point, else the text."""
    return int(text) if text.isdigit() else number_or_text(text)


def redraw(names: Sequence[str], folder: Path) -> None:
    """Draw figures from the packed records, unpacked to `folder`."""
    with tarfile.open(REFERENCE / "runs.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    store, profile = Store(folder / "runs"), load_profile(EMBEDDED)
    settings = SettingsCache(folder, compose)
    planner = Planner.cached(settings, store)
    for name in names:
        figure = load_figure(name)
        [planned] = planner.common([figure.table], profile)
        built = None if figure.calls else build_figure(figure, *planned[1:], store)
        if built is None:
            points = frame_of_points([*measured_points(figure), *figure.reported])
            built = BuiltFigure(figure, build(*planned), points)
        for path in write(built, FIGURES):
            path.unlink() if path.suffix == ".png" else print(path)


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures; default: all")
    names = parser.parse_args().names or names_of("figure")
    with tempfile.TemporaryDirectory() as unpacked:
        redraw(names, Path(unpacked))
