"""One style for all figures: sizes, fonts, and the look of every series by its name.

A method has the same colour, marker and line in every figure, and variants of a method share a hue.
The colours suit colour-blind readers, and no figure depends on them: marker and line alone identify
a series, so a grey print is readable (`tests/figures` checks this for every committed figure).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANEL_INCHES = (2.9, 2.35)
DPI = 200
INK, FAINT, FOOT = "#222222", "#8a8a8a", "#5c5c5c"
FORMATS: Mapping[str, Mapping[str, Any]] = {  # no dates or program names: equal bytes
    "svg": {"metadata": {"Date": None, "Creator": None}},
    "png": {"metadata": {"Software": None}, "dpi": DPI},
}
SETTINGS: Any = {
    "svg.hashsalt": "dllm-bench",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.5,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "text.color": INK,
    "axes.labelcolor": INK,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "hatch.linewidth": 0.5,
    "figure.constrained_layout.h_pad": 0.07,
    "figure.constrained_layout.w_pad": 0.06,
}


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


_BLACK, _GREY = "#333333", "#767676"
_BLUE, _SKY, _NAVY = "#1f6fb4", "#58a6d6", "#0b3c6b"
_RED, _ORANGE, _BROWN = "#c8401f", "#e08a1e", "#8a4b14"
_GREEN, _TEAL, _OLIVE = "#1b8a5a", "#46a9a0", "#7a8b1f"
_PURPLE, _PINK = "#7b4ba0", "#cf6fa3"

LOOKS: Mapping[str, Look] = {
    # one token per forward
    "vanilla": Look(_BLACK, "o", ":"),
    "ar": Look(_BLACK, "o", ":"),
    # masked decoders
    "fast_dllm": Look(_BLUE, "s", "--", "///"),
    "fast_dllm_prefix": Look(_SKY, "P", "--", "..."),
    "fast_dllm_dual": Look(_NAVY, "X", "-.", "xxx"),
    "credit": Look(_RED, "D", "-", "\\\\\\"),
    "credit_adaptive": Look(_ORANGE, "d", "--", "---"),
    "credit_full": Look(_BROWN, "p", "-.", "+++"),
    "learn2pd": Look(_GREEN, "^", "-", "|||"),
    "learn2pd_eotp": Look(_TEAL, "v", "--", "ooo"),
    "learn2pd_eotp_kv": Look(_OLIVE, "<", "-.", "OOO"),
    "oracle": Look(_PURPLE, "*", "-", "**"),
    "d2f": Look(_GREY, "h", "--", "..."),
    "lopa": Look(_PINK, "o", "-", "///"),
    "credit_lopa": Look("#9c2f5a", "H", "-.", "xxx"),
    # the other masked decoders of the library
    "lopa_k3": Look(_PINK, "o", "-"),
    "lopa_k7": Look("#8e2f63", "o", "--"),
    "dparallel": Look(_TEAL, "^", "--"),
    "d3llm": Look(_TEAL, "v", "-"),
    "eb_sampler": Look(_GREEN, "<", "--"),
    "eb_sampler_blocks": Look(_GREEN, ">", "-"),
    "klass": Look(_OLIVE, "P", "--"),
    "local_leap": Look(_SKY, "X", "--"),
    "slow_fast": Look(_NAVY, "p", "-"),
    "hierarchy": Look(_BLUE, "h", "-"),
    "dus": Look(_GREY, "s", ":"),
    "pc_sampler": Look(_GREY, "^", ":"),
    "prophet": Look(_GREY, "D", ":"),
    "saber": Look(_BROWN, "P", ":"),
    "wino": Look(_BROWN, "X", ":"),
    "llada21": Look(_ORANGE, "v", ":"),
    "remedi": Look(_PURPLE, "h", ":"),
    "t2m": Look(_ORANGE, "<", ":"),
    "remdm": Look(_OLIVE, "h", ":"),
    "remdm_loop": Look(_OLIVE, "H", ":"),
    # drafters
    "eagle3": Look(_ORANGE, "^", "--", "///"),
    "dflash": Look(_BLUE, "s", "-.", "..."),
    "dspark": Look(_RED, "D", "-", ""),
    "dspark_threshold": Look("#e0765a", "<", "--", "///"),
    "dspark_scheduler": Look("#8f1d0b", "*", "-", "xxx"),
    "dspark_async": Look("#a8552f", "p", "-.", "ooo"),
    "mtp1": Look(_GREY, "h", ":", "..."),
    "dspark_rnn": Look(_PURPLE, "v", (0, (5, 1)), "xxx"),
    "ngram": Look(_OLIVE, "P", ":", "ooo"),
    "dspark_layers1": Look("#efb5a5", ">", ":", "---"),
    "dspark_layers2": Look("#dd7a5f", "H", "--", "///"),
    # branches of LoPA, and the operating points that its figure stars
    "lopa_stars": Look("#8e2f63", "*", "none"),
    "lopa_bp2": Look("#dc93ba", "v", ":", "..."),
    "lopa_bp4": Look("#cf6fa3", "D", "-.", "\\\\\\"),
    "lopa_bp8": Look("#8e2f63", "o", "-", "///"),
    # accelerations; a star is one with CreditDecoding
    "standard": Look(_BLACK, "o"),
    "standard_credit": Look(_BLACK, "*"),
    "fast": Look(_BLUE, "s"),
    "fast_kv": Look(_NAVY, "X"),
    "fast_kv_credit": Look(_NAVY, "*"),
    "early": Look(_GREEN, "^"),
    "early_credit": Look(_GREEN, "*"),
    "compiled": Look(_ORANGE, "v"),
    "compiled_credit": Look(_ORANGE, "*"),
    # hyper-parameters swept, and parts of one method's numbers
    "": Look(_BLUE, "o"),
    "alpha": Look(_RED, "D", "-"),
    "beta": Look(_ORANGE, "s", "--"),
    "accepted": Look(_RED, "D", "-"),
    "total": Look(_GREY, "o", "--", "..."),
    "rate": Look(_RED, "^", "-."),
    "rate_stars": Look(_RED, "*", "none"),
    "before": Look(_GREY, "o", "--", "..."),
    "after": Look(_RED, "D", "-"),
    "auroc": Look(_BLUE, "s", "-"),
    "train": Look(_BLUE, "o", "-"),
    "validation": Look(_RED, "D", "--"),
    "first": Look(_RED, "D", "--"),
    "decoded": Look(_BLUE, "o", "-"),
    "ideal": Look(_PURPLE, "*", "-."),
    # groups, in rising order
    "token 1": Look("#0b3c6b", "o", "-"),
    "token 2": Look("#2f7f8f", "s", "--"),
    "token 3": Look("#5bb26b", "^", "-."),
    "token 4": Look("#c0b41f", "D", ":"),
    "up to 4": Look("#c0b41f", "D", ":"),
    "up to 8": Look("#7db85a", "v", "-."),
    "up to 16": Look("#3b9b80", "^", (0, (5, 1))),
    "up to 32": Look("#2f6f8f", "s", "--"),
    "up to 64": Look("#0b3c6b", "o", "-"),
}


def look(series: str) -> Look:
    """Return the look of a series; raises DllmBenchError for a name that has none."""
    if series not in LOOKS:
        raise DllmBenchError(
            f"Series {series!r} has no look; add it to LOOKS in dllm_bench/figures/style.py."
        )
    return LOOKS[series]


@contextmanager
def applied() -> Iterator[None]:
    """Use this style inside of the block; matplotlib's settings are restored at its end."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


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
