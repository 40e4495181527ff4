"""One style for all figures: sizes, fonts, and the look of every series by its name (looks.yaml).

A method has the same colour, marker and line in every figure, and variants of a method share a hue.
The colours suit colour-blind readers, and no figure depends on them: marker and line alone identify
a series, so a grey print is readable (`tests/figures` checks this for every committed figure).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from dllm_bench.paths import read_yaml

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKS = Path(__file__).with_name("looks.yaml")
PANEL_INCHES = (2.9, 2.35)
DPI = 200
MARKERS = "osD^vPX*<>phH8d"
INK, FAINT, FOOT = "#222222", "#8a8a8a", "#5c5c5c"
FORMATS: Mapping[str, Mapping[str, Any]] = {  # no dates or program names: equal bytes
    "svg": {"metadata": {"Date": None, "Creator": None}},
    "png": {"metadata": {"Software": None}, "dpi": DPI},
}
PLAIN: Any = read_yaml(LOOKS)
SETTINGS = PLAIN["settings"]
"""Those of matplotlib."""
MARKS: Mapping[str, Mapping[str, Any]] = PLAIN["marks"]
"""What is drawn for no series: the Pareto front, the paper's numbers on bars, notes."""


@dataclass(frozen=True)
class Look:
    """How a series looks, in matplotlib's terms."""

    colour: str
    """Colour of line, marker and bar."""
    marker: str
    """Marker of its points."""
    line: str | tuple[int, tuple[int, ...]] = "-"
    """Line style."""
    hatch: str = ""
    """Pattern of its bars."""


def look(series: str) -> Look:
    """Return the look of a series; that of a user's series follows from its name."""
    number, colours = crc32(series.encode()), [*PLAIN["colours"].values()]
    own = Look(colours[number % len(colours)], MARKERS[number % len(MARKERS)])
    return known_looks().get(series, own)


@cache
def known_looks() -> Mapping[str, Look]:
    """Return the looks of all series, by name."""
    found = {}
    for series, (colour, marker, *more) in PLAIN["series"].items():
        styles: list[Any] = [text if isinstance(text, str) else (0, tuple(text)) for text in more]
        found[series] = Look(PLAIN["colours"].get(colour, colour), marker, *styles)
    return found


def applied() -> AbstractContextManager[None]:
    """Use this style inside of the block; matplotlib's settings are restored at its end."""
    import matplotlib.style

    return matplotlib.style.context(["default", SETTINGS])


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure without axes, of a size in inches; to be made inside of `applied`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def as_file(figure: Figure, form: str) -> bytes:
    """Return the content of a file of the figure, in one of `FORMATS`."""
    content = io.BytesIO()
    figure.savefig(content, format=form, **FORMATS[form])
    return content.getvalue()
