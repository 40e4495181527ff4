"""What each model call did: `Forward` rows gathered in a `Trace`.

Facts only; every TPF, TPS and latency is computed from them by name in `metrics/definitions.py`.
Committed counts are not stored twice: they follow from `Generation.born`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any


class ForwardKind(StrEnum):
    """What a forward was for."""

    PREFILL = "prefill"  # the prompt is fed for the first time
    REFRESH = "refresh"  # cached positions are fed again to renew their K/V
    DENOISE = "denoise"
    DRAFT = "draft"  # the drafter's network
    HEAD = "head"  # a block drafter's sequential head, which draws token after token
    VERIFY = "verify"


@dataclass(frozen=True)
class Forward:
    """One model call. Positions are counted per branch; `ms` is wall time of the whole step."""

    kind: ForwardKind
    branches: int  # K candidate states evaluated in this call; 2 K under guidance
    fed: int  # positions fed per branch
    cached: int  # positions read from the cache
    ms: float = 0.0
    winner: int = 0  # index of the branch that went on, creation order, base last
    forced: int = 0  # positions committed by the stall rule
    masks: int = 0  # masks of the open blocks before this call
    calls: int = (
        1  # network calls behind this row: a drafter's chain has several, a head one a token
    )
    proposed: int = 0  # draft tokens this call verified
    accepted: int = 0  # draft tokens kept of them; what else it committed is the target's own
    drafted: tuple[int, ...] = ()  # the whole proposal behind them, before it was cut to `proposed`
    survival: tuple[float, ...] = ()  # what a confidence head said of it, logits


@dataclass
class Trace:
    """The forwards of one request in order, and the seconds spent outside of them."""

    forwards: list[Forward] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.forwards)

    def columns(self) -> dict[str, list]:
        """Column form for storage: {"kind": [...], "branches": [...], ...}.

        A column that holds nothing but its default is left out.
        """
        values = {
            f: [getattr(forward, f.name) for forward in self.forwards] for f in fields(Forward)
        }
        return {
            f.name: [*map(_stored, column)]
            for f, column in values.items()
            if f.default is MISSING or any(value != f.default for value in column)
        }

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]]) -> Trace:
        """Inverse of `columns`; also of those stored before a column existed."""
        rows = zip(*columns.values(), strict=True)
        return cls([_forward(dict(zip(columns, row, strict=True))) for row in rows])


def _stored(value: Any) -> Any:
    """Plain text and lists in place of kinds and tuples."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, ForwardKind) else value


def _forward(row: dict[str, Any]) -> Forward:
    """A row from stored values."""
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return Forward(**{**row, **lists, "kind": ForwardKind(row["kind"])})
