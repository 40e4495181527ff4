"""Numbers and texts as the terminal and the pages show them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.store.spec import SHOWN

LISTED_METRICS = ("tpf/emitted", "tps/e2e")  # shown as TPF and TPS wherever runs are listed


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """A number with four significant digits, empty if there is none."""
    return "" if value is None else f"{value:.4g}"


def percent(score: MeanScore | None) -> str:
    """A score in percent with its interval, or a dash."""
    if score is None:
        return "–"
    return f"{100 * score.mean:.1f} [{100 * score.low:.1f}, {100 * score.high:.1f}]"


def commit(environment: Mapping[str, Any]) -> str:
    """The commit a run was made with, and whether the code had local changes."""
    if not environment.get("commit"):
        return "unknown (not run from a checkout)"
    changed = " with local changes" if environment.get("dirty") else ""
    return f"{environment['commit'][:SHOWN]}{changed}"


def printable(text: str) -> str:
    """The text with control, format and other invisible characters written as in Python source."""
    return "".join(repr(character)[1:-1] for character in text)
