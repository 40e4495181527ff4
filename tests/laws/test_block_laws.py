"""Laws of blocks: what the host concludes of a canvas is what stands there.

A round tells the host the masks of its window's blocks alone; here every round of many decoders is
compared with a count over the whole canvas. A canvas may grow (DAEDAL): what is inserted moves
tokens and changes nothing else, as the trace tells. A buffer of blocks (MultiBD) is between block
diffusion and D2F's pipeline; in WeDLM's window, attention is causal in feed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, LAST, LEFT, BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import Stop, StopFlags
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Filled, Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.causal_masks import FeedOrder, NearEntropy, Sliding
from dllm_bench.methods.common import (
    AnyOf,
    Best,
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
)
from dllm_bench.methods.fast_dllm import SubBlockGrid, SubBlocks
from dllm_bench.methods.lengths import AdaBlock, Daedal, MaskLast
from dllm_bench.methods.revising import BlockBuffer, Edit, EditBlocks
from tests.helpers import VOCAB, Watched, tiny_denoiser, with_method
from tests.pieces import CutAt, Table
from tests.tiers import covering, covering_pairs

REQUEST = Request("blocks", tuple(range(3, 14)), 32)
PINNED = replace(REQUEST, pinned=tuple((place, 7) for place in (0, 2, *range(6, 19), 31, 31)))
"""Places in the first block, whole blocks, and a block's end, the last one twice."""


@dataclass
class Canvas:
    """The branches of the round that is opened, until they are asked about; rounds so far."""

    branches: Iterator[Tensor] = field(default_factory=lambda: iter(()))
    rounds: int = 0


def showing(stop: Stop, canvas: Canvas) -> Any:
    """Return the stop, which shows the canvas of every round."""

    def ended(self: Stop, branches: DecodeState) -> StopFlags:
        canvas.branches = iter(branches.born_KL.clone())
        canvas.rounds += 1
        return stop.ended(branches)

    return with_method(stop, "ended", ended)


def counting(schedule: Any, canvas: Canvas) -> Any:
    def opened(self: Any, branch: BlockProgress) -> int:
        born_L, grid = next(canvas.branches), branch.grid
        spans = [born_L[grid.start(n) : grid.start(n + 1)] for n in range(grid.blocks)]
        left = [int((span == MASKED).sum()) for span in spans]
        starts = [max(grid.start(n), grid.prompt_len) for n in range(grid.blocks)]
        new_L = torch.tensor([MASKED if i in grid.given else n for i, n in enumerate(born_L)])
        new = [new_L[start : grid.start(n + 1)] for n, start in enumerate(starts)]
        begun = [bool((span != MASKED).any()) for span in new]
        assert [branch.masks_left(n) for n in range(grid.blocks)] == left
        assert [branch.begun(n) for n in range(grid.blocks)] == begun
        assert branch.finished == next((n for n, some in enumerate(left) if some), grid.blocks)
        count = int(schedule.opened(branch))
        assert branch.opened <= count or count >= grid.blocks
        assert branch.open_masks(count) == sum(left[:count])
        assert HELD not in branch.stays or (count == 0 and not branch.all_finished(count))
        return count

    return with_method(schedule, "opened", opened)


FINISHED = {(): 2, (HELD,): 2, (LEFT,): 3, (HELD, LEFT): 1, (0, 0, LEFT): 3}
FINISHED |= {(HELD, 0, 0): 0, (0, LAST, LEFT): 1}
"""What holds the last ones of three open blocks, the third of which has masks -> finished ones."""


def test_each_open_block_may_be_held() -> None:
    for stays, finished in FINISHED.items():
        progress = BlockProgress(BlockGrid(0, 8, 0, 32), 0, (0, 0, 5), 3, stays=stays)
        assert (progress.finished, progress.all_finished(3)) == (finished, finished == 3)


GREEDY, LOOKAHEAD = Greedy(), Lookahead(3)
ABSOLUTE = Blocks(8, False, absolute=True)
EQUAL = (Blocks(8), Blocks(None), Blocks(1, False), ABSOLUTE, replace(ABSOLUTE, whole=True))
SCHEDULES = [  # and how branches are explored
    *product((*EQUAL, Pipeline(8, 0.3, 0.6)), (GREEDY, LOOKAHEAD)),
    *((SubBlocks(8, *form), GREEDY) for form in product((1, 4, 8), (True, False))),
    (AdaBlock(8, delimiters=tuple(range(0, VOCAB, 3)), tau=0.1), GREEDY),
]
STOPS = (Filled(), Eos("block"), Eos("token"))
SELECTS = (Threshold(0.4), Threshold(1.0, strict=True))


@pytest.mark.parametrize(("schedule", "explore"), SCHEDULES, ids=str)
@pytest.mark.parametrize("length", covering(2, [None, 11 + 19, 11]))
def test_the_host_knows_the_canvas(schedule, explore, length) -> None:
    for request, *parts in covering_pairs((REQUEST, PINNED), STOPS, SELECTS):
        check(request, length, schedule, explore, *parts)


def test_the_host_knows_a_canvas_that_grows() -> None:
    for low, stop, select in product((0.5, 1.1), STOPS, SELECTS):
        check(REQUEST, None, Daedal(8, 4, 5, 0.2, 0.9, low, 5), GREEDY, stop, select)


def test_a_block_does_not_end_at_a_pinned_delimiter() -> None:
    request = replace(REQUEST, pinned=tuple((place, 7) for place in range(12, 21)))
    schedule = AdaBlock(8, (Table().special.eos,), share=1.0)
    decoder = MaskedDecoder(Confidence(), Threshold(1.0, strict=True), schedule, NoCache())
    assert decoder.generate(Watched(Table(), ending=11 + 20), request).born[21] < 12


def check(request: Request, length: int | None, *parts: Any) -> None:
    """Decode with both watching; what is decoded is what is decoded unwatched, and where tokens are
    pinned, every forward commits one."""
    canvas, (schedule, explore, stop, select) = Canvas(), parts
    pieces = (Confidence(), select, counting(schedule, canvas), NoCache(), explore)
    shown = showing(stop, canvas)
    watched = MaskedDecoder(*pieces, shown if length is None else AnyOf((shown, CutAt(length))))
    generation = watched.generate(Table(), request)
    assert canvas.rounds == len(generation.trace) + 1
    assert not request.pinned or length or {*range(canvas.rounds - 1)} <= {*generation.born}
    alone = replace(watched, schedule=schedule).generate(Table(), request)
    assert alone.ids == generation.ids and alone.born == generation.born


def test_a_grid_holds_every_position_once() -> None:
    sizes = product((0, 5), (1, 4, 7), (6, 12, 13), ((), (7, 11)))
    whole = [BlockGrid(o, block, 5, length, ends) for o, block, length, ends in sizes]
    inner = product(range(6, 26), (1, 2, 8))
    parts = [SubBlockGrid(0, 8, 5, length, small=small) for length, small in inner]
    for grid in (*(one for one in whole if one.length >= max(one.ends, default=0)), *parts):
        edges = [grid.start(n) for n in range(grid.blocks + 1)]
        assert edges[0] == grid.origin and edges[-1] == grid.length and edges == sorted(edges)
        assert sum(grid.new_positions(n) for n in range(grid.blocks)) == grid.length - 5
        if isinstance(grid, SubBlockGrid):
            inner = (n for n in range(grid.length) if n % 8 in (0, 1) or n % grid.small == 0)
            assert {*edges} == {*inner, grid.length}


# --- a canvas that grows (DAEDAL) -----------------------------------------------------------------

SPECIAL = Table().special
PROMPT_LEN = len(REQUEST.prompt_ids)
ENDS = ((0.1, 0.5, 0.9), (0.2, 0.9, 0.5), (0.5, 0.9, 1.1))  # when a canvas has, or needs, one
GROWING = [Daedal(8, *size, *end, 4) for *size, end in product((4, 9), (1, 3, 8), ENDS)]


def growing(schedule: Daedal) -> MaskedDecoder:
    return MaskedDecoder(Confidence(), Threshold(0.4, strict=True), schedule, NoCache())


def test_the_trace_tells_how_each_canvas_became_the_next() -> None:
    """Inserted are masks or end tokens; everything else moves, or is decoded, or falls off."""
    inserted_within = cut = 0
    for seed, schedule in product(range(2), GROWING):
        model = Watched(Table(seed))
        generation = growing(schedule).generate(model, REQUEST)
        assert len(generation.ids) <= REQUEST.max_new_tokens and SPECIAL.mask not in generation.ids
        rows = generation.trace.forwards
        new = [canvas[0, PROMPT_LEN:].tolist() for canvas in model.canvases]
        assert [row.canvas for row in rows] == [*map(len, new)]
        assert [row.fed for row in rows] == [PROMPT_LEN + row.canvas for row in rows]
        for row, (before, after) in zip(rows, pairwise([*new, list(generation.ids)]), strict=True):
            at, count = row.inserted or (0, 0)
            assert set(after[at : at + count]) <= {SPECIAL.mask, SPECIAL.eos}
            moved = after[:at] + after[at + count :]
            cut += len(moved) < len(before)
            inserted_within += bool(count) and row.kind != ForwardKind.SIZE
            for old, now in zip(before, moved, strict=len(after) < REQUEST.max_new_tokens):
                assert now == old if row.kind == ForwardKind.SIZE else old in (now, SPECIAL.mask)
    assert inserted_within and cut, "the settings try both"


def test_an_end_token_that_was_put_there_stops_nothing() -> None:
    """A decoded one does: what follows its block is left out, and the rest is the same."""
    stopped = 0
    for seed, schedule in product(range(2), GROWING[::2]):
        whole = growing(schedule).generate(Table(seed), REQUEST)
        for stop in (Eos("block"), AnyOf((Filled(), Eos("block")))):
            early = replace(growing(schedule), stop=stop).generate(Table(seed), REQUEST)
            assert early.ids == whole.ids[: len(early.ids)]
            decoded = [t for t, b in zip(early.ids, early.born, strict=True) if b >= 0]
            assert SPECIAL.eos in decoded or len(early.ids) == len(whole.ids)
            stopped += len(early.ids) < len(whole.ids)
    assert stopped


def test_mask_last_keeps_other_candidates() -> None:
    model, state = Table(), DecodeState.start(REQUEST, SPECIAL)
    model.place[:, SPECIAL.mask] += 6.0
    logits_KWV = (model.place + model.token.mean(0))[None, :32]
    window = Window(11, 43, 43, 8, 11, state.masked_KL[:, 11:])
    plain, last = (one(logits_KWV, state, window) for one in (Confidence(), MaskLast()))
    masks_KW = plain.ids_KW == SPECIAL.mask
    assert 0 < masks_KW.sum() < 32
    for ours, theirs in zip(last.tensors().values(), plain.tensors().values(), strict=False):
        assert torch.equal(ours[~masks_KW], theirs[~masks_KW])
    assert last.raw_KW is not None and torch.equal(last.raw_KW, plain.confidence_KW)
    assert (last.probability_KW[masks_KW] == 0).all() and (last.confidence_KW[masks_KW] < 0).all()
    assert (last.ids_KW != SPECIAL.mask).all()


# --- a buffer of blocks (MultiBD) -----------------------------------------------------------------

REQUESTS = [Request("buffer", tuple(range(3, 3 + n)), 40) for n in (1, 8, 11)]
BY_8 = Blocks(8, sees_future=False, absolute=True, whole=True)
BUFFER = BlockBuffer(block=8, tau_add=0.1, tau_act=0.5, size=3)
BUFFERED = MaskedDecoder(Confidence(), Threshold(0.4), BUFFER, BlockCache())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("sdar", 4)


def decode(
    model: Any, *requests: Request, of: MaskedDecoder | None = None, **changes: Any
) -> list[Generation]:
    decoder = replace(of or BUFFERED, **changes)
    return [decoder.generate(model, request) for request in requests or REQUESTS]


def texts(generations: list[Generation]) -> list[Any]:
    return [(one.ids, one.born) for one in generations]


def facts(generations: list[Generation]) -> list[Any]:
    rows = [[(row.fed, row.cached) for row in one.trace.forwards] for one in generations]
    return [*zip(texts(generations), rows, strict=True)]


def test_a_buffer_of_one_block_is_block_diffusion(model: Any) -> None:
    one = replace(BUFFER, size=1)
    assert facts(decode(model, schedule=one)) == facts(decode(model, schedule=BY_8))


def test_a_buffer_without_a_bound_is_a_pipeline(model: Any) -> None:
    """Behind a prompt of one block, which lies on both grids."""
    wide, pipeline = replace(BUFFER, size=99), Pipeline(8, tau_add=0.1, tau_act=0.5)
    found, wanted = (decode(model, REQUESTS[1], schedule=s) for s in (wide, pipeline))
    assert facts(found) == facts(wanted) and facts(found) != facts(decode(model, REQUESTS[1]))


def test_an_exact_cache_changes_nothing(model: Any) -> None:
    assert texts(decode(model)) == texts(decode(model, cache=NoCache("block_causal")))


EDITS = EditBlocks(tau=0.2, rounds=3)


def test_editing_a_buffer_of_one_block_is_editing_the_open_block(model: Any) -> None:
    one, edit = replace(BUFFER, size=1), Edit(tau=0.2, rounds=3, ignores_last=True)
    quick = Threshold(0.2)  # or a block is left before it has had its rounds
    found = decode(model, select=quick, schedule=one, revise=EDITS)
    assert facts(found) == facts(decode(model, select=quick, schedule=BY_8, revise=edit))
    assert facts(found) != facts(decode(model, select=quick, schedule=one)), "it edits something"


def test_several_blocks_are_edited_at_once(model: Any) -> None:
    """Also under an exact cache, into which no block gets that is edited afterwards."""
    found = decode(model, revise=EDITS)
    none = decode(model, revise=EDITS, cache=NoCache("block_causal"))
    assert texts(found) == texts(none)
    for generation, plain in zip(found, none, strict=True):
        edits = [row.changes for row in generation.trace.forwards]
        assert edits == [row.changes for row in plain.trace.forwards]
        first = -len(generation.ids) % 8
        assert any(len({(first + e.position) // 8 for e in row}) > 1 for row in edits)


def test_no_block_opens_beside_an_unstable_one(model: Any) -> None:
    """Of which every token is to be the candidate of its row; none is in the first forward."""
    watched, request = Watched(model), Request("unstable", (3, 4, 5, 6, 7), 40)
    decode(watched, request, revise=replace(EDITS, stable=1.0))
    assert watched.plans[0].feed[1] == 8
    wide = [plan for plan in watched.plans if plan.rows[1] - plan.rows[0] > 8]
    free = Watched(model)
    decode(free, request, revise=EDITS)
    assert free.plans[0].feed[1] == 16
    assert len(wide) < sum(plan.rows[1] - plan.rows[0] > 8 for plan in free.plans)


class MaskingAgain(Watched):
    """Predicts the mask token at every position in every second forward."""

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        logits_KRV = super().forward(tokens_KL, plan, kv)
        logits_KRV[..., self.special.mask] += 99 if len(self.plans) % 2 == 0 else -99
        return logits_KRV


def test_a_block_is_left_after_a_number_of_forwards(model: Any) -> None:
    """As many as its positions and `rounds`, and one that fills it."""
    watched, request = MaskingAgain(model), Request("again", tuple(range(3, 11)), 16)
    edits, one = EditBlocks(tau=0.0, rounds=16), replace(BUFFER, size=1)
    slow = {"select": Threshold(1.0, strict=True), "forbid_mask": False}
    (generation,) = decode(watched, request, schedule=one, revise=edits, **slow)
    assert len(watched.plans) == 2 * (8 + 16 + 1) + 1, "the second begins with a mask"
    assert model.special.mask not in generation.ids


def test_a_canvas_has_whole_blocks() -> None:
    sizes = {(5, 40, False): 48, (5, 40, True): 40, (8, 40, False): 48, (9, 3, True): 16}
    for (prompt, new, floor), length in sizes.items():
        assert replace(BUFFER, floor=floor).grid(prompt, new).length == length


# --- a window that moves on, causal in feed order (WeDLM) -----------------------------------------

WINDOW = MaskedDecoder(NegEntropy(), NearEntropy(3.2), Sliding(8), FeedOrder())
SHORT = Blocks(8, sees_future=False, short=True)
FED = MaskedDecoder(Confidence(), Threshold(0.2), SHORT, FeedOrder())
ONE_BY_ONE = replace(WINDOW, select=Best(1), schedule=Blocks(1, sees_future=False))
NEAREST = NearEntropy(None, penalty=math.log(VOCAB) + 0.1)  # which is above every entropy


@pytest.mark.parametrize("part", [{"schedule": Sliding(1)}, {"select": NEAREST}], ids=str)
def test_it_is_greedy_decoding_from_left_to_right(model: Any, part: dict[str, Any]) -> None:
    """Masks after the first one change nothing: no row before them sees them."""
    found, plain, usual = (
        texts(decode(model, of=one)) for one in (replace(WINDOW, **part), ONE_BY_ONE, WINDOW)
    )
    assert found == plain and all(born == tuple(range(40)) for _, born in found)
    assert found != usual, "else the law says nothing"


def test_whatever_its_blocks_the_attention_is_causal() -> None:
    plain = replace(FED, cache=BlockCache())
    forms = [one.summary().attention for one in (WINDOW, FED, plain)]
    assert forms == ["feed_order", "feed_order", "block_causal"]


@pytest.mark.parametrize("overruns", [False, True])
def test_the_window_stays_at_an_end_token_unless_it_overruns(overruns: bool) -> None:
    """The end token is filled first: the least entropy is there."""
    watched = Watched(tiny_denoiser("llada", 4), ending=len(REQUESTS[2].prompt_ids) + 5)
    one_each = replace(WINDOW, select=NearEntropy(None), schedule=Sliding(8, overruns))
    ids = replace(one_each, stop=Eos("token")).generate(watched, REQUESTS[2]).ids
    eos = watched.special.eos
    ended = [bool((canvas_KL == eos).any()) for canvas_KL in watched.canvases]
    assert any(ended) and eos in ids
    stops = [plan.rows[1] for plan, is_after in zip(watched.plans, ended, strict=True) if is_after]
    assert (len({*stops, watched.plans[ended.index(True) - 1].rows[1]}) == 1) != overruns
