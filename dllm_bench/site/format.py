"""Format numbers and texts for the terminal and the pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dllm_bench.metrics.accuracy import MeanScore
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import SHOWN


def number(value: float | None, digits: int = 2) -> str:
    """Return a number with `digits` decimals, or a dash."""
    return "–" if value is None else f"{value:.{digits}f}"


def significant(value: float | None) -> str:
    """Return a number with four significant digits, empty if there is none."""
    return "" if value is None else f"{value:.4g}"


def percent(score: MeanScore | None) -> str:
    """Return a score in percent with its interval, or a dash."""
    return "–" if score is None else percent_of(score.mean, score.low, score.high)


def percent_of(mean: float, low: float, high: float) -> str:
    """Return a share in percent with the ends of its interval, which are shares too."""
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def commit(environment: Mapping[str, Any]) -> str:
    """Return the commit a run was made with, and whether the code had local changes."""
    if not environment.get("commit"):
        return "unknown (not run from a checkout)"
    changed = " with local changes" if environment.get("dirty") else ""
    return f"{environment['commit'][:SHOWN]}{changed}"


def looked_up(records: Sequence[RunRecord]) -> str:
    """Return when, and by which commit, records that a command found complete were made."""
    dates = sorted(f"{datetime.fromtimestamp(one.sealed_at, UTC):%Y-%m-%d}" for one in records)
    first, *others = dict.fromkeys(commit(record.environment) for record in records)
    made = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    by = f"by {1 + len(others)} commits" if others else f"by commit {first}"
    return f"looked up: made on {made} {by}"


def printable(text: str) -> str:
    """Return the text with control, format and other invisible characters written as in Python
    source."""
    return "".join(repr(character)[1:-1] for character in text)


def align(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows as lines of text with aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()
