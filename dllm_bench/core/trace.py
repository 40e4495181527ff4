"""What each model call did: `Forward` rows gathered in a `Trace`.

Facts only; every TPF, TPS and latency is computed from them by name in `metrics/speed.py`.
Committed counts are not stored twice: they follow from `Generation.born`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a forward was for."""

    PREFILL = "prefill"  # the prompt is fed for the first time
    REFRESH = "refresh"  # cached positions are fed again to renew their K/V
    DENOISE = "denoise"
    DRAFT = "draft"
    VERIFY = "verify"


@dataclass(frozen=True)
class Forward:
    """One model call. Positions are counted per branch; `ms` is wall time of the whole step."""

    kind: Kind
    branches: int  # K candidate states evaluated in this call; 2 K under guidance
    fed: int  # positions fed per branch
    cached: int  # positions read from the cache
    ms: float = 0.0
    winner: int = 0  # index of the branch that went on, creation order, base last
    forced: int = 0  # positions committed by the stall rule
    masks: int = 0  # masks of the open blocks before this call
    calls: int = 1  # network calls behind this row: a drafter's chain has several
    proposed: int = 0  # draft tokens this call verified
    accepted: int = 0  # draft tokens kept of them; what else it committed is the target's own


@dataclass
class Trace:
    """The forwards of one request in order, and the seconds spent outside of them."""

    forwards: list[Forward] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.forwards)

    def columns(self) -> dict[str, list]:
        """Column form for storage: {"kind": [...], "branches": [...], ...}."""
        rows = [asdict(forward) for forward in self.forwards]
        return {name: [row[name] for row in rows] for name in Forward.__annotations__}

    @classmethod
    def from_columns(cls, columns: dict[str, list]) -> Trace:
        """Inverse of `columns`."""
        names = list(columns)
        rows = zip(*columns.values(), strict=True)
        forwards = [Forward(**dict(zip(names, row, strict=True))) for row in rows]
        return cls([Forward(**{**asdict(f), "kind": Kind(f.kind)}) for f in forwards])
