"""The record of each forward: `Trace`, a list of `Forward` rows.

Only raw counts and times are stored. Every TPF, TPS and latency is computed from them in
`metrics/definitions.py`. Counts of committed tokens follow from `Generation.born` and, where a
decoder revises them, from the `Change` entries of the forwards (`Trace.writes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, NamedTuple, get_type_hints

from dllm_bench.core.declared import Amount, Count, Range, Seconds, fits, in_words

GIVEN = -2  # `Generation.born` of a token that was not decoded: it was pinned or inserted
AGAIN_MASKED = -1  # `Change.after` of a position that was masked again


class Change(NamedTuple):
    """A committed token that was revised."""

    position: int  # offset after the prompt
    before: int  # the token that was replaced
    born: int  # the forward that had written it
    after: int  # the new token, or `AGAIN_MASKED`


class Writes(NamedTuple):
    """How many positions a forward wrote."""

    committed: int  # positions that were masked before
    overwritten: int  # positions that had another committed token
    remasked: int  # committed positions that were masked again


class ForwardKind(StrEnum):
    """The purpose of a forward."""

    SIZE = "size"  # finds the canvas length and commits nothing
    PREFILL = "prefill"  # feeds the prompt for the first time
    REFRESH = "refresh"  # feeds cached positions again to renew their K/V
    DENOISE = "denoise"
    DRAFT = "draft"  # the network of a drafter
    SELF_DRAFT = "self_draft"  # the model drafts for itself; unlike `DRAFT`, a forward of the model
    HEAD = "head"  # the sequential head of a block drafter, which draws token after token
    VERIFY = "verify"  # the target judges draft tokens


Branches = Annotated[int, Range(1, 2**16)]
Token = Annotated[int, Range(0, 2**31 - 1)]


@dataclass(frozen=True)
class Forward:
    """One model call. Positions are counted per branch."""

    kind: ForwardKind
    branches: Branches  # K; twice as many under guidance
    fed: Count  # positions fed per branch
    cached: Count  # positions read from the cache
    ms: Seconds = 0.0  # wall time of the whole step, in milliseconds
    winner: Count = 0  # index of the branch that continued, by creation; the base is last
    forced: Count = 0  # positions committed by the stall rule
    masks: Count = 0  # masks of the open blocks before this call
    calls: Count = 1  # network calls: several for a drafter's chain, one per token for a head
    proposed: Count = 0  # draft tokens that this call verified
    accepted: Count = 0  # draft tokens that were kept; other committed tokens are the target's own.
    # For a canvas of random tokens: positions that kept the token drawn for them
    drafted: tuple[Token, ...] = ()  # the whole proposal, before it was cut to `proposed`
    parents: tuple[Count, ...] = ()  # for a tree: the parent of each token, from 1; 0: the anchor
    survival: tuple[float, ...] = ()  # logits of a confidence head, one per drafted token
    changes: tuple[Change, ...] = ()  # revisions after this forward
    canvas: Count = 0  # new positions of the canvas that it saw, if the canvas grows
    inserted: tuple[Count, ...] = ()  # (offset after the prompt, count) of an insertion
    # after this forward; later positions moved right, and those that did not fit are lost
    rows: Amount | None = None  # rows computed per branch, mean over layers; None: all fed
    read_bytes: Count = 0  # bytes read from the cache, over all layers
    kept_bytes: Count = 0  # bytes that the cache keeps after this call, over all layers
    replayed: bool = False  # whether a recorded CUDA graph was replayed (hardware.compile=max)
    recorded: bool = False  # whether that graph was recorded first, which is part of `ms`
    moved: bool = False  # whether the cache moved K/V to longer buffers


@dataclass
class Trace:
    """The forwards of one request, in order."""

    forwards: list[Forward] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.forwards)

    def writes(self, born: Sequence[int]) -> list[Writes]:
        """Return the numbers of positions that each forward wrote; `born`: the forward of each
        final token."""
        written = Counter(born)
        written.update(change.born for forward in self.forwards for change in forward.changes)
        rows = []
        for index, forward in enumerate(self.forwards):
            remasked = sum(change.after == AGAIN_MASKED for change in forward.changes)
            overwritten = len(forward.changes) - remasked
            rows.append(Writes(written[index] - overwritten, overwritten, remasked))
        return rows

    def columns(self) -> dict[str, list]:
        """Return columns for storage: {"kind": [...], "branches": [...], ...}.

        A column that contains only its default is left out.
        """
        values = {f: [getattr(one, f.name) for one in self.forwards] for f in fields(Forward)}
        return {
            f.name: [*map(_stored, column)]
            for f, column in values.items()
            if f.default is MISSING or any(value != f.default for value in column)
        }

    @staticmethod
    def check_columns(columns: Mapping[str, Sequence[Any]]) -> int:
        """Return the number of forwards; ValueError for columns that `columns` cannot have made."""
        declared = _stored_types()
        lengths = {len(column) for column in columns.values()}
        required = {f.name for f in fields(Forward) if f.default is MISSING}
        if len(lengths) > 1 or (columns and not required <= columns.keys() <= declared.keys()):
            raise ValueError("forwards with other columns, or columns of unequal length")
        for name, column in columns.items():
            if not fits(column, Sequence[declared[name]]):  # type: ignore[valid-type]
                raise ValueError(f"{name} of a forward is not {in_words(declared[name])}")
        if not set(columns.get("kind", ())) <= set(ForwardKind):
            raise ValueError("a forward of an unknown kind")
        if any(len(one) not in (0, 2) for one in columns.get("inserted", ())):
            raise ValueError("an insertion that is no position and count")
        return max(lengths, default=0)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Sequence[Any]]) -> Trace:
        """Make a trace from what `columns` returned. Missing columns get their defaults."""
        rows = zip(*columns.values(), strict=True)
        return cls([_forward(dict(zip(columns, row, strict=True))) for row in rows])


@cache
def _stored_types() -> dict[str, Any]:
    """Return the types of a forward's fields as `columns` stores them."""
    hints = get_type_hints(Forward, include_extras=True)
    changes = Sequence[tuple[Count, Token, int, Annotated[int, Range(AGAIN_MASKED, 2**31 - 1)]]]
    return {**hints, "kind": str, "changes": changes}


def _stored(value: Any) -> Any:
    """Return the value with kinds as text and tuples as lists."""
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, ForwardKind) else value


def _forward(row: dict[str, Any]) -> Forward:
    """Make a forward from a row written by `_stored`."""
    lists = {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    if "changes" in lists:
        lists["changes"] = tuple(Change(*change) for change in lists["changes"])
    return Forward(**{**row, **lists, "kind": ForwardKind(row["kind"])})
