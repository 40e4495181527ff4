"""Laws of a canvas that grows (DAEDAL): what is inserted moves tokens and changes nothing else.

Where it cannot grow, decoding is that of a fixed canvas. The trace tells how each canvas became the
next.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from dllm_bench.core.blocks import Window
from dllm_bench.core.request import Request
from dllm_bench.core.state import PROMPT, DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import AnyOf, Blocks, Confidence, Eos, Threshold
from dllm_bench.methods.lengths import Daedal, MaskLast
from tests.helpers import Watched, tiny_denoiser
from tests.pieces import Table

SPECIAL = Table().special
PROMPT_IDS = tuple(range(3, 14))
REQUEST = Request("growing", PROMPT_IDS, 32)
SETTINGS = [
    Daedal(8, initial, factor, enough, expand, low, 4)
    for initial, factor, (enough, expand, low) in product(
        (4, 9), (1, 3, 8), ((0.1, 0.5, 0.9), (0.2, 0.9, 0.5), (0.5, 0.9, 1.1))
    )
]


def decoder(schedule: Blocks, tau: float = 0.4) -> MaskedDecoder:
    return MaskedDecoder(Confidence(), Threshold(tau, strict=True), schedule, NoCache())


@pytest.mark.parametrize("layout", ["llada", "dream"])
def test_a_canvas_that_cannot_grow_is_a_fixed_one(layout: str) -> None:
    """All that is added is the forward that looks for the length."""
    model = tiny_denoiser(layout, seed=1)
    for initial, block, tau in product((20, 32), (5, 8), (0.05, 1.0)):
        request = replace(REQUEST, max_new_tokens=initial)
        never = decoder(Daedal(block, initial, eos_expand=0.0), tau).generate(model, request)
        fixed = decoder(Blocks(block, short=True), tau).generate(model, request)
        assert never.ids == fixed.ids and never.cut == fixed.cut
        assert never.born == tuple(born + 1 for born in fixed.born)
        first, *rest = (replace(row, ms=0.0, canvas=0) for row in never.trace.forwards)
        assert rest == [replace(row, ms=0.0) for row in fixed.trace.forwards]
        assert (first.kind, first.masks, first.inserted) == (ForwardKind.SIZE, 0, ())


def test_a_canvas_that_is_long_enough_ends_with_end_tokens() -> None:
    """They are tokens that stand there, as pinned ones do."""
    for seed, initial, looked_at in product(range(4), (9, 16), (1, 4, 7)):
        schedule = Daedal(8, initial, eos_enough=0.0, eos_expand=0.0, eos_window=looked_at)
        grown = decoder(schedule).generate(Table(seed), REQUEST)
        given = looked_at // 2
        pins = tuple((initial + i, Table().special.eos) for i in range(given))
        pinned = replace(REQUEST, max_new_tokens=initial + given, pinned=pins)
        fixed = decoder(Blocks(8, short=True)).generate(Table(seed), pinned)
        assert grown.ids == fixed.ids
        assert grown.born.count(PROMPT) == given
        assert grown.born == tuple(b if b == PROMPT else b + 1 for b in fixed.born)


def test_the_trace_tells_how_each_canvas_became_the_next() -> None:
    """Inserted are masks or end tokens; everything else moves, or is decoded, or falls off."""
    inserted_within = cut = 0
    for seed, schedule in product(range(6), SETTINGS):
        model = Watched(Table(seed))
        generation = decoder(schedule).generate(model, REQUEST)
        assert len(generation.ids) <= REQUEST.max_new_tokens
        assert SPECIAL.mask not in generation.ids
        rows = generation.trace.forwards
        new = [canvas[0, len(PROMPT_IDS) :].tolist() for canvas in model.canvases]
        assert [row.canvas for row in rows] == [*map(len, new)]
        assert [row.fed for row in rows] == [len(PROMPT_IDS) + row.canvas for row in rows]
        for row, (before, after) in zip(rows, pairwise([*new, list(generation.ids)]), strict=True):
            at, count = row.inserted or (0, 0)
            assert set(after[at : at + count]) <= {SPECIAL.mask, SPECIAL.eos}
            moved = after[:at] + after[at + count :]
            cut += len(moved) < len(before)
            inserted_within += bool(count) and row.kind != ForwardKind.SIZE
            for old, now in zip(before, moved, strict=len(after) < REQUEST.max_new_tokens):
                assert now == old if row.kind == ForwardKind.SIZE else old in (now, SPECIAL.mask)
    assert inserted_within > 20 and cut > 5, "the settings try both"


def test_an_end_token_that_was_put_there_stops_nothing() -> None:
    """A decoded one does: what follows its block is left out, and the rest is the same."""
    stopped = 0
    for seed, schedule in product(range(6), SETTINGS):
        whole = decoder(schedule).generate(Table(seed), REQUEST)
        for stop in (Eos("block"), AnyOf((Filled(), Eos("block")))):
            early = replace(decoder(schedule), stop=stop).generate(Table(seed), REQUEST)
            assert early.ids == whole.ids[: len(early.ids)]
            decoded = [t for t, b in zip(early.ids, early.born, strict=True) if b >= 0]
            assert SPECIAL.eos in decoded or len(early.ids) == len(whole.ids)
            stopped += len(early.ids) < len(whole.ids)
    assert stopped


def test_mask_last_keeps_other_candidates() -> None:
    model, state = Table(), DecodeState.start(REQUEST, SPECIAL)
    model.place[:, SPECIAL.mask] += 6.0
    logits_KWV = (model.place + model.token.mean(0))[None, :32]
    window = Window(11, 43, 43, 11, 8, 11, state.masked_KL[:, 11:])
    plain, last = (one(logits_KWV, state, window) for one in (Confidence(), MaskLast()))
    masks_KW = plain.ids_KW == SPECIAL.mask
    assert 0 < masks_KW.sum() < 32
    for ours, theirs in zip(last.tensors().values(), plain.tensors().values(), strict=False):
        assert torch.equal(ours[~masks_KW], theirs[~masks_KW])
    assert last.raw_KW is not None and torch.equal(last.raw_KW, plain.confidence_KW)
    assert (last.probability_KW[masks_KW] == 0).all() and (last.confidence_KW[masks_KW] < 0).all()
    assert (last.ids_KW != SPECIAL.mask).all()
