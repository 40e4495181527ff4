"""Laws of a buffer of blocks (MultiBD), between block diffusion and D2F's pipeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from torch import Tensor

from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.common import Blocks, Confidence, Pipeline, Threshold
from dllm_bench.methods.revising import BlockBuffer, Edit, EditBlocks
from tests.helpers import Watched, tiny_denoiser

REQUESTS = [Request("buffer", tuple(range(3, 3 + n)), 40, seed=n) for n in (1, 8, 11)]
BUFFER = BlockBuffer(block=8, tau_add=0.1, tau_act=0.5, size=3)
DECODER = MaskedDecoder(Confidence(), Threshold(0.4), BUFFER, BlockCache())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("sdar", 4)


def decode(model: Any, *requests: Request, **changes: Any) -> list[Generation]:
    decoder = replace(DECODER, **changes)
    return [decoder.generate(model, request) for request in requests or REQUESTS]


def facts(generations: list[Generation]) -> list[Any]:
    rows = [[(row.fed, row.cached) for row in one.trace.forwards] for one in generations]
    return [(one.ids, one.born, fed) for one, fed in zip(generations, rows, strict=True)]


def test_a_buffer_of_one_block_is_block_diffusion(model: Any) -> None:
    blocks = Blocks(8, sees_future=False, absolute=True, whole=True)
    one = replace(BUFFER, size=1)
    assert facts(decode(model, schedule=one)) == facts(decode(model, schedule=blocks))


def test_a_buffer_without_a_bound_is_a_pipeline(model: Any) -> None:
    """Behind a prompt of one block, which lies on both grids."""
    wide, pipeline = replace(BUFFER, size=99), Pipeline(8, tau_add=0.1, tau_act=0.5)
    found, wanted = (decode(model, REQUESTS[1], schedule=s) for s in (wide, pipeline))
    assert facts(found) == facts(wanted)
    assert facts(found) != facts(decode(model, REQUESTS[1]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_buffer_holds_no_more_than_its_size(size: int, model: Any) -> None:
    """Those of the last window that are stored now, and all that are open."""
    most = 0
    for request in REQUESTS:
        watched = Watched(model)
        decode(watched, request, schedule=replace(BUFFER, size=size))
        for before, plan in pairwise(watched.plans):
            if plan.rows[0] < before.rows[1]:  # else all were finished, and one opens anyway
                most = max(most, plan.rows[1] - before.rows[0])
    assert most == 8 * size


def test_an_exact_cache_changes_nothing(model: Any) -> None:
    none = decode(model, cache=NoCache("block_causal"))
    for own, wanted in zip(decode(model), none, strict=True):
        assert (own.ids, own.born) == (wanted.ids, wanted.born)


EDITS = EditBlocks(tau=0.2, rounds=3)


def test_editing_a_buffer_of_one_block_is_editing_the_open_block(model: Any) -> None:
    blocks = Blocks(8, sees_future=False, absolute=True, whole=True)
    one, edit = replace(BUFFER, size=1), Edit(tau=0.2, rounds=3, ignores_last=True)
    quick = Threshold(0.2)  # or a block is left before it has had its rounds
    found = decode(model, select=quick, schedule=one, revise=EDITS)
    assert facts(found) == facts(decode(model, select=quick, schedule=blocks, revise=edit))
    assert facts(found) != facts(decode(model, select=quick, schedule=one)), "it edits something"


def test_several_blocks_are_edited_at_once(model: Any) -> None:
    """Also under an exact cache, into which no block gets that is edited afterwards."""
    found = decode(model, revise=EDITS)
    none = decode(model, revise=EDITS, cache=NoCache("block_causal"))
    for generation, plain in zip(found, none, strict=True):
        assert (generation.ids, generation.born) == (plain.ids, plain.born)
        edits = [row.changes for row in generation.trace.forwards]
        assert edits == [row.changes for row in plain.trace.forwards]
        first = -len(generation.ids) % 8
        assert any(len({(first + e.position) // 8 for e in row}) > 1 for row in edits)


def test_no_block_opens_beside_an_unstable_one(model: Any) -> None:
    """Of which every token is to be the candidate of its row; none is in the first forward."""
    watched = Watched(model)
    request = Request("unstable", (3, 4, 5, 6, 7), 40)
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
    edits = EditBlocks(tau=0.0, rounds=16)
    one = replace(BUFFER, size=1)
    (generation,) = decode(
        watched,
        request,
        schedule=one,
        revise=edits,
        select=Threshold(1.0, strict=True),
        forbid_mask=False,
    )
    assert len(watched.plans) == 2 * (8 + 16 + 1) + 1, "the second begins with a mask"
    assert model.special.mask not in generation.ids


@pytest.mark.parametrize(("floor", "length"), [(False, 48), (True, 40)])
def test_a_canvas_has_whole_blocks(floor: bool, length: int) -> None:
    assert replace(BUFFER, floor=floor).grid(5, 40).length == length
    assert BUFFER.grid(8, 40).length == 48
    assert replace(BUFFER, floor=True).grid(9, 3).length == 16, "there is always one"
