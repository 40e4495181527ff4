"""The order in which one sample was decoded, as plain data.

`decoding_order` turns a stored sample into its tokens, each with the forward that committed it, and
its forwards, each with branches, drafts and committed positions; also where the text ends. This is
all that the terminal (`cli.show`) and the trace viewer of the report (`run_page`) show;
`dllm-bench show RUN --sample ID --json` prints it. Token texts are as decoded, with control
characters: whoever shows them must make them safe.

The colours of forwards go from the first (dark blue) to the last (yellow), as in matplotlib's
viridis: lightness rises with the forward, so the order is visible with any colour vision and on any
terminal. The terminal uses `colours_of_forward`; the pages get the same constants as data and
compute the same colours in `static/site.js`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dllm_bench.core.trace import AGAIN_MASKED, GIVEN, ForwardKind, Trace
from dllm_bench.site.texts import DecodeTokens
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import SampleRecord

SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # viridis, RGB
LUMINANCE = (0.2126, 0.7152, 0.0722)  # weights of red, green and blue (sRGB)
UNCHANGED = "winner fed cached ms forced proposed accepted".split()  # as in the trace of a forward
EVEN_CONTRAST = 0.18  # luminance on which black and white are equally legible (WCAG 2)
COLOURS = {"scale": SCALE, "luminance": LUMINANCE, "even": EVEN_CONTRAST}  # for `static/site.js`


def colours_of_forward(forward: int, forwards: int) -> tuple[str, tuple[int, int, int]]:
    """Return (text colour, background as RGB) of a forward among `forwards`, counted from 0."""
    place = forward / max(forwards - 1, 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    start, end = SCALE[low], SCALE[low + 1]
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(start, end, strict=True))
    pairs = zip(LUMINANCE, (red, green, blue), strict=True)
    light = sum(weight * (value / 255) ** 2.2 for weight, value in pairs)
    return "#000000" if light > EVEN_CONTRAST else "#ffffff", (red, green, blue)


@dataclass(frozen=True)
class CanvasToken:
    """One position of the canvas after the last forward.

    id: the token's id.
    text: the token's text.
    born: index of the forward that committed it; None if the position is still masked. A token that
    was not decoded belongs to the first forward, or to the last one that changed the canvas length.
    """

    id: int
    text: str
    born: int | None


@dataclass(frozen=True)
class ForwardStep:
    """One forward. Its branches are the lookahead branches in order of creation, then the base.

    kind: prefill, refresh, denoise, draft, verify, … (`core.trace.ForwardKind`).
    branches: number of branches K.
    winner: index of the branch that decoding continued with.
    lookahead_won: the winner is a lookahead branch, not the base.
    fed: positions fed to the model.
    cached: positions read from the K/V cache.
    ms: device time in milliseconds; 0 if it was not measured.
    committed: positions whose final token this forward wrote, with the one that a winning lookahead
        branch had tried before the forward.
    overwritten: committed positions to which a reviser gave another token after this forward.
    remasked: committed positions that it masked again.
    inserted: position in front of which positions were inserted after this forward, and how many;
        empty if none were.
    forced: how many of these the stall rule added; which ones is not recorded.
    filled: share of the canvas after this forward that holds its final token.
    proposed: draft tokens that this forward verified.
    accepted: how many of them were kept. They are the first of `committed`; the rest are the
        target's own tokens.
    drafted: texts of all proposed draft tokens, verified or not; empty if they were not stored, or
        are a tree.
    survival: per draft token, the confidence head's logit that it is accepted if all before it are.
    """

    kind: str
    branches: int
    winner: int
    lookahead_won: bool
    fed: int
    cached: int
    ms: float
    committed: list[int]
    overwritten: list[int]
    remasked: list[int]
    inserted: list[int]
    forced: int
    filled: float
    proposed: int
    accepted: int
    drafted: list[str]
    survival: list[float]


@dataclass(frozen=True)
class DecodingOrder:
    """How one sample was decoded.

    id: the sample's name.
    text: the sample's text, cut at its end.
    tokens: the canvas after the last forward.
    steps: the forwards in order.
    borders: positions at which a block begins, but for the first block.
    ends: reason -> position at which the text ends for that reason, the first position first.
    end: where the text ends, the smallest of `ends`; without any, the length of the canvas.
    ended_by: the reason of `end`; None without any.
    """

    id: str
    text: str
    tokens: list[CanvasToken]
    steps: list[ForwardStep]
    borders: list[int]
    ends: dict[str, int]
    end: int
    ended_by: str | None

    def to_json(self) -> str:
        """Return one JSON object, in ASCII."""
        return json.dumps(asdict(self))


def decoding_order(
    sample: SampleRecord, decode: DecodeTokens, decoder: Mapping[str, Any]
) -> DecodingOrder:
    """Return the decoding order of `sample`; `decoder` is the configuration in the run's spec."""
    drafts = {token for row in sample.trace.get("drafted", ()) for token in row}
    texts = {token: decode([token]) for token in drafts.union(sample.ids)}
    trace = Trace.from_columns(sample.trace)
    sizing = sum(forward.kind == ForwardKind.SIZE for forward in trace.forwards)
    # a token that was not decoded counts with the last forward that found the length, or the first
    born = [max(sizing - 1, 0) if index == GIVEN else index for index in sample.born]
    ends = dict(sorted(sample.cut.items(), key=lambda item: (item[1], item[0])))
    ended_by, end = next(iter(ends.items()), (None, len(sample.ids)))
    places = zip(sample.ids, born, strict=True)
    tokens = [CanvasToken(i, texts[i], at if at >= 0 else None) for i, at in places]
    steps = forward_steps(trace, born, texts, passes=2 if setting_in(decoder, "guidance") else 1)
    borders = block_borders(len(sample.ids), decoder)
    return DecodingOrder(sample.id, sample.text, tokens, steps, borders, ends, end, ended_by)


def forward_steps(
    trace: Trace, born: Sequence[int], texts: Mapping[int, str], passes: int
) -> list[ForwardStep]:
    """Return the forwards in order; `passes` is 2 with guidance, which feeds every branch twice."""
    forwards, total = trace.forwards, len(born)
    after = [forward.canvas or total for forward in forwards[1:]]
    canvases = [*after, total] if forwards else []  # a server does not report forwards
    committed: list[list[int]] = [[] for _ in forwards]
    for position, index in enumerate(born):
        if index >= 0:
            committed[index].append(position)
    steps, filled = [], 0
    rows = zip(forwards, committed, trace.writes(born), canvases, strict=True)
    for forward, positions, made, canvas in rows:
        filled += made.committed - made.remasked
        branches, changes = forward.branches // passes, forward.changes
        step = ForwardStep(
            **{name: getattr(forward, name) for name in UNCHANGED},
            kind=str(forward.kind),
            branches=branches,
            lookahead_won=forward.winner < branches - 1,
            committed=positions,
            overwritten=[change.position for change in changes if change.after != AGAIN_MASKED],
            remasked=[change.position for change in changes if change.after == AGAIN_MASKED],
            inserted=list(forward.inserted),
            filled=filled / canvas if canvas else 1.0,
            drafted=[] if forward.parents else [texts[token] for token in forward.drafted],
            survival=list(forward.survival),
        )
        steps.append(step)
    return steps


def block_borders(total: int, decoder: Mapping[str, Any]) -> list[int]:
    """Return positions at which blocks meet; none if blocks are not counted from the end of the
    prompt."""
    block = setting_in(decoder, "schedule.block")
    if not isinstance(block, int) or block < 1 or setting_in(decoder, "schedule.absolute"):
        return []
    return list(range(block, total, block))
