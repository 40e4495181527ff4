"""Laws of a buffer of blocks (MultiBD), between block diffusion and D2F's pipeline."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.common import Blocks, Confidence, Pipeline, Threshold
from dllm_bench.methods.multi_bd import BlockBuffer
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


@pytest.mark.parametrize(("floor", "length"), [(False, 48), (True, 40)])
def test_a_canvas_has_whole_blocks(floor: bool, length: int) -> None:
    assert replace(BUFFER, floor=floor).grid(5, 40).length == length
    assert BUFFER.grid(8, 40).length == 48
    assert replace(BUFFER, floor=True).grid(9, 3).length == 16, "there is always one"
