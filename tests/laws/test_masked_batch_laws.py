"""Laws of masked decoding in a batch: batched and unbatched decoding are the same.

Compared are tokens, the forwards that committed them and the facts of every forward, for every
configured decoder, every model layout and several batch sizes. The next request starts when one
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.masked import LARGE, MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import Blocks, Confidence, Pipeline, Threshold
from dllm_bench.methods.fast_dllm import HierarchicalCache, SubBlocks
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import tiny_denoiser
from tests.pieces import decoders, needs_unshifted
from tests.tiers import covering

REQUESTS = [
    Request("short", (5, 9, 2), 16, seed=1),
    Request("long", tuple(range(3, 24)), 8, seed=2),
    Request("one", (7,), 24, seed=3),
    Request("again", (3, 9, 27, 3, 9), 8, seed=4),
    Request("like it", (4, 8, 26, 2, 8), 8, seed=5),
]


@lru_cache
def model(layout: str) -> TransformerDenoiser:
    return tiny_denoiser(layout, seed=1)


def facts(found: Generation) -> tuple[tuple[int, ...], tuple[int, ...], list[Forward]]:
    """Tokens, when they came, and what was done for them, without times."""
    return found.ids, found.born, [replace(row, ms=0.0) for row in found.trace.forwards]


def check(decoder: MaskedDecoder, denoiser: TransformerDenoiser, batch: int) -> None:
    batched = list(decoder.generate_stream(denoiser, REQUESTS, batch))
    alone = {request.id: decoder.generate(denoiser, request) for request in REQUESTS}
    assert sorted(found.request_id for found in batched) == sorted(alone)
    for found in batched:
        assert facts(found) == facts(alone[found.request_id]), found.request_id


@pytest.mark.parametrize("name", covering(4, decoders()))
def test_every_decoder_batched(name: str) -> None:
    decoder = decoders()[name]
    layout = "llada" if needs_unshifted(decoder) else "dream"
    check(decoder, model(layout), batch=3)


LAYOUTS = ("llada", "dream", "sdar", "llada_moe", "llada2")
BLOCKS = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(8, sees_future=False), NoCache())
PLANS = {  # what a forward may feed, see and keep
    "whole canvas": replace(BLOCKS, schedule=Blocks(8)),
    "block causal": replace(BLOCKS, cache=BlockCache(), explore=Lookahead(3)),
    "dual": replace(BLOCKS, schedule=Blocks(8), cache=DualCache(2), explore=Lookahead(2)),
    "prefix": replace(BLOCKS, schedule=Blocks(8), cache=PrefixCache()),
    "pipeline": replace(BLOCKS, schedule=Pipeline(8, 0.1, 0.5), explore=Lookahead(2)),
    "guided": replace(BLOCKS, schedule=Blocks(8), guidance=0.7),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_on_every_layout(name: str, layout: str) -> None:
    check(PLANS[name], model(layout), batch=2)


@pytest.mark.parametrize("inside", [False, True])
def test_sub_blocks_on_a_model_of_theirs(inside: bool) -> None:
    """Rows of a batch keep their own block stores."""
    decoder = replace(BLOCKS, schedule=SubBlocks(8, 4), cache=HierarchicalCache(inside))
    check(decoder, model("fast_dllm_v2"), batch=3)


def watch_forwards(model: Any) -> list[int]:
    """Return how many requests share each of the model's forwards from here on."""
    alone, together, sizes = model.forward, model.forward_batch, list[int]()
    model.forward = lambda *asked: sizes.append(1) or alone(*asked)
    model.forward_batch = lambda *asked: sizes.append(len(asked[0])) or together(*asked)
    return sizes


@pytest.mark.parametrize("batch", [1, 4, 9])
def test_the_next_request_starts_when_one_ends(batch: int) -> None:
    """While requests wait, the batch is full, and no request starts early."""
    watched, begun = copy(model("llada")), list[str]()
    sizes = watch_forwards(watched)

    def waiting() -> Iterator[Request]:
        for request in REQUESTS:
            begun.append(request.id)
            yield request

    finished = []
    for found in BLOCKS.generate_stream(watched, waiting(), batch):
        assert len(begun) - len(finished) <= batch
        finished.append(found)
    assert [*begun] == [request.id for request in REQUESTS] and len(finished) == len(REQUESTS)
    assert sizes == sorted(sizes, reverse=True), "the batch is full while requests wait"
    assert max(sizes) == min(batch, len(REQUESTS))
    assert sum(sizes) == sum(len(found.trace) for found in finished)


@pytest.mark.parametrize("name", ["whole canvas", "block causal", "dual"])
def test_batched_rows_may_be_left_out(name: str) -> None:
    large = copy(model("dream"))
    large.vocab_size = LARGE
    check(PLANS[name], large, batch=3)


def test_a_request_that_cannot_be_decoded_is_refused() -> None:
    wrong = replace(REQUESTS[1], prompt_ids=(model("llada").special.mask, 5))
    with pytest.raises(DllmBenchError, match="'long' begins with the padding token"):
        list(BLOCKS.generate_stream(model("llada"), [REQUESTS[0], wrong], 2))
