"""Count the measured points of the committed figures, so that no later drawing has fewer.

    .venv/bin/python -m scripts.figure_points

Writes tests/figures/points.yaml: figure, series, number of points. `tests/figures` compares every
committed csv with it. If a figure has lost points, nothing is written and the lost series are
listed; measure them again, or remove them from the file by hand.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from dllm_bench.figures.draw import measured_rows
from dllm_bench.tables.load import names_of
from dllm_bench.tables.spec import EMBEDDED
from scripts.update_reference import REFERENCE, ROOT

POINTS = ROOT / "tests" / "figures" / "points.yaml"
FIGURES = REFERENCE / "figures" / EMBEDDED
UNNAMED = "-"  # the series of a figure that has only one, without a name

Counts = Mapping[str, Mapping[str, int]]


def counted(folder: Path = FIGURES) -> dict[str, dict[str, int]]:
    """Figure -> series -> number of measured points, of the csv files in a folder."""
    found = {}
    for name in names_of("figure"):
        rows = measured_rows(folder / f"{name}.csv")
        found[name] = dict(sorted(Counter(row["series"] or UNNAMED for row in rows).items()))
    return found


def known(path: Path = POINTS) -> dict[str, dict[str, int]]:
    """Return the numbers of the file; none without it."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.exists() else {}


def fewer(before: Counts, found: Counts) -> Iterator[str]:
    """Yield what was lost, a line per series."""
    for name, series in before.items():
        for key, number in series.items():
            left = found.get(name, {}).get(key, 0)
            if left < number:
                yield f"{name}: series {key} has {left} measured points, and had {number}"


def raise_counts(path: Path = POINTS, folder: Path = FIGURES) -> list[str]:
    """Write the counts unless some are lower; return the lost series."""
    found = counted(folder)
    lost = list(fewer(known(path), found))
    if not lost:
        text = yaml.safe_dump(found, sort_keys=True, default_flow_style=None, width=100)
        path.write_text(f"# Written by scripts/figure_points.py.\n{text}", encoding="utf-8")
    return lost


if __name__ == "__main__":
    ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args()
    sys.exit("\n".join(raise_counts()) or None)
