"""The order in which one sample was filled: `view` turns a stored sample into plain data.

Every token with the forward at which it was committed, every forward with its branches, its drafts
and what it committed, and where the text ends. The terminal (`paint`) and the report's viewer
(`site_samples`) show this and nothing else; as JSON it is `dllm-bench show RUN --sample ID --json`.
Token texts are as decoded, control characters included: making them safe is the business of whoever
shows them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dllm_bench.cli.views import Decode
from dllm_bench.core.trace import Trace
from dllm_bench.store.record import SampleRecord


@dataclass(frozen=True)
class Token:
    """One position of the canvas; born: the forward that committed it, None while masked."""

    id: int
    text: str
    born: int | None


@dataclass(frozen=True)
class Step:
    """One forward. Branches are lookaheads in order of creation, then the base, which tried none.

    winner: index of the branch that went on; committed: positions, with the one that a winning
    lookahead had tried before the forward; forced: how many of them the stall rule added (which
    ones is not recorded); filled: share of the canvas decoded afterwards. proposed: draft tokens
    this forward verified; accepted: those kept, the first of `committed`, what follows is the
    target's own; drafted: texts of the whole proposal, empty where it was not stored; survival:
    logits of a confidence head that a token is accepted if all before it are.
    """

    kind: str
    branches: int
    winner: int
    lookahead_won: bool
    fed: int
    cached: int
    ms: float
    committed: list[int]
    forced: int
    filled: float
    proposed: int
    accepted: int
    drafted: list[str]
    survival: list[float]


@dataclass(frozen=True)
class Filling:
    """One sample. borders: positions at which a further block begins; end: where the text ends,
    the least of `ends` (reason -> position), for the reason `ended_by`.
    """

    id: str
    text: str
    tokens: list[Token]
    steps: list[Step]
    borders: list[int]
    ends: dict[str, int]
    end: int
    ended_by: str | None

    def to_json(self) -> str:
        """One JSON object, in ASCII."""
        return json.dumps(asdict(self))


def view(sample: SampleRecord, decode: Decode, decoder: Mapping[str, Any]) -> Filling:
    """What is known of the filling of `sample`; `decoder` is the decoder in the run's spec."""
    drafts = {token for row in sample.trace.get("drafted", ()) for token in row}
    texts = {token: decode([token]) for token in drafts.union(sample.ids)}
    born = [index if index >= 0 else None for index in sample.born]
    ends = dict(sorted(sample.cut.items(), key=lambda item: (item[1], item[0])))
    ended_by, end = next(iter(ends.items()), (None, len(sample.ids)))
    return Filling(
        id=sample.id,
        text=sample.text,
        tokens=[Token(i, texts[i], at) for i, at in zip(sample.ids, born, strict=True)],
        steps=steps(sample, texts, passes=2 if decoder.get("guidance") else 1),
        borders=borders(len(sample.ids), decoder),
        ends=ends,
        end=end,
        ended_by=ended_by,
    )


def steps(sample: SampleRecord, texts: Mapping[int, str], passes: int) -> list[Step]:
    """The forwards in order; `passes`: 2 where guidance shows the model every branch twice."""
    forwards, total = Trace.from_columns(sample.trace).forwards, len(sample.ids)
    committed: list[list[int]] = [[] for _ in forwards]
    for position, index in enumerate(sample.born):
        if index >= 0:
            committed[index].append(position)
    found, filled = [], 0
    for forward, positions in zip(forwards, committed, strict=True):
        filled += len(positions)
        branches = forward.branches // passes
        step = Step(
            kind=str(forward.kind),
            branches=branches,
            winner=forward.winner,
            lookahead_won=forward.winner < branches - 1,
            fed=forward.fed,
            cached=forward.cached,
            ms=forward.ms,
            committed=positions,
            forced=forward.forced,
            filled=filled / total if total else 1.0,
            proposed=forward.proposed,
            accepted=forward.accepted,
            drafted=[texts[token] for token in forward.drafted],
            survival=list(forward.survival),
        )
        found.append(step)
    return found


def borders(total: int, decoder: Mapping[str, Any]) -> list[int]:
    """Where blocks meet; none for blocks that are not counted from the end of the prompt."""
    schedule = decoder.get("schedule") or {}
    block = schedule.get("block")
    return list(range(block, total, block)) if block and not schedule.get("absolute") else []
