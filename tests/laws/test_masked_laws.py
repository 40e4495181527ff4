"""Laws of masked decoding (docs/design.md, "Laws"), on tiny random models of both layouts.

Random weights make confidences spread over (0, 1), so every branch of the pieces is taken; the
laws hold for any model. The product test enumerates all combinations of pieces: each obeys the
laws or is refused with a sentence.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import MASKED
from dllm_bench.decoding.defaults import Filled, Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    AnyOf,
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.dream import Epsilon, Origin
from dllm_bench.methods.fast_dllm import Factor, FirstOfBlock, Hierarchy, Ration
from dllm_bench.methods.history import Credit
from tests.helpers import Watched
from tests.tiers import covering_pairs

REQUESTS = [
    Request("short", (5, 9, 2), 24),
    Request("long", tuple(range(3, 26)), 32),
]
NEVER = Threshold(1.0, strict=True)  # no probability passes it

# One member a kind (and its variants where they take another path) for the product test.
SCORES = (Confidence(), NegEntropy(), Credit(Confidence()))
SELECTS = (
    Union(FirstOfBlock(Epsilon(3)), Ration(Union(TopK(3), Origin(5)), steps=4)),
    Threshold(0.3),
    Union(Factor(1.0), Hierarchy(0.9)),
)
EXPLORES = (Greedy(), Lookahead(2), Lookahead(3, alpha=0.5, fraction=0.5))
SCHEDULES = (
    Blocks(8),
    Blocks(8, sees_future=False),
    Pipeline(8, tau_add=0.1, tau_act=0.5),
    Pipeline(8, tau_add=1.0, tau_act=1.0),
)
STOPS = (Filled(), AnyOf((Eos("token"), Filled())))
CACHES = (NoCache(), BlockCache("block_causal"), BlockCache("full"), PrefixCache(), DualCache(2))
PRODUCT_REQUEST = Request("product", (5, 9, 2), 16)

BASE = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(8), NoCache())


def tokens(decoder: MaskedDecoder, model, request: Request = REQUESTS[1]) -> tuple[int, ...]:
    return decoder.generate(model, request).ids


def committed(generation: Generation) -> list[int]:
    """Positions committed at each forward."""
    born = [b for b in generation.born if b != MASKED]
    return [born.count(step) for step in range(len(generation.trace))]


@pytest.mark.parametrize("schedule", [Blocks(8), Blocks(None)])
@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: r.id)
def test_a_threshold_that_nothing_passes_takes_one_token_per_forward(
    model, schedule, request_
) -> None:
    decoder = replace(BASE, select=NEVER, schedule=schedule)
    generation = decoder.generate(model, request_)
    assert committed(generation) == [1] * request_.max_new_tokens
    assert generation.ids == tokens(replace(decoder, select=TopK()), model, request_)
    assert all(forward.forced == 1 for forward in generation.trace.forwards)


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize("attention", ["full", "block_causal"])
def test_pipeline_of_one_open_block_is_blocks(model, explore, attention) -> None:
    blocks = replace(
        BASE,
        schedule=Blocks(8, sees_future=False),
        explore=explore,
        cache=NoCache(attention),
        stop=Eos(),
    )
    pipeline = replace(blocks, schedule=Pipeline(8, tau_add=1.0, tau_act=1.0))
    assert tokens(pipeline, model) == tokens(blocks, model)


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize(
    "schedule",
    [Blocks(8), Blocks(8, False), Blocks(8, False, absolute=True), Pipeline(8, 0.1, 0.5)],
    ids=str,
)
def test_exact_block_cache_changes_nothing(model, explore, schedule) -> None:
    plain = replace(BASE, schedule=schedule, explore=explore, cache=NoCache("block_causal"))
    cached = replace(plain, cache=BlockCache("block_causal"))
    first, second = (decoder.generate(model, REQUESTS[1]) for decoder in (plain, cached))
    assert first.ids == second.ids
    assert first.born == second.born
    assert sum(f.fed for f in second.trace.forwards) < sum(f.fed for f in first.trace.forwards)


@pytest.mark.parametrize("schedule", [Blocks(8), Pipeline(8, 0.1, 0.5)], ids=["blocks", "d2f"])
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize("cache", [PrefixCache(every=1), DualCache(every=1)], ids=str)
def test_cache_renewed_every_forward_changes_nothing(model, schedule, explore, cache) -> None:
    plain = replace(BASE, schedule=schedule, explore=explore)
    first, second = (
        decoder.generate(model, REQUESTS[1]) for decoder in (plain, replace(plain, cache=cache))
    )
    assert first.born == second.born and first.ids == second.ids


def test_lookahead_needs_no_more_rounds_at_the_same_threshold(model) -> None:
    """Every lookahead that wins adds a token, so one-token decoding gets shorter with branches."""
    one = replace(BASE, select=NEVER)
    rounds = len(one.generate(model, REQUESTS[1]).trace)
    wide = replace(one, explore=Lookahead(3)).generate(model, REQUESTS[1])
    assert len(wide.trace) < rounds
    assert max(forward.branches for forward in wide.trace.forwards) == 4


def test_equal_decoders_are_equal_values() -> None:
    again = MaskedDecoder(Confidence(), Threshold(0.3), Blocks(8), NoCache())
    assert again == BASE and hash(again) == hash(BASE)
    assert replace(BASE, select=Threshold(0.4)) != BASE


@pytest.mark.parametrize("block", [32, 40])
def test_a_generation_shorter_than_a_block_is_one_block(model, block) -> None:
    long, exact = (
        replace(BASE, schedule=Blocks(size)).generate(model, REQUESTS[0]) for size in (block, 24)
    )
    assert (long.ids, long.born) == (exact.ids, exact.born)


class OnlyMasks(Watched):
    """A model that predicts the mask token everywhere."""

    def forward(self, tokens_KL, plan, kv):
        logits_KWV = super().forward(tokens_KL, plan, kv)
        logits_KWV[..., self.special.mask] = 100.0
        return logits_KWV


def test_forbidding_the_mask_token_keeps_decoding_alive(model) -> None:
    stuck = OnlyMasks(model)
    assert tokens(BASE, stuck) == tokens(BASE, model)
    with pytest.raises(DllmBenchError, match="set decoder.forbid_mask=true"):
        tokens(replace(BASE, forbid_mask=False), stuck)


def check_laws(decoder: MaskedDecoder, model, request: Request) -> None:
    """What holds for every decoder."""
    generation = decoder.generate(model, request)
    per_forward = committed(generation)
    filled = sum(b != MASKED for b in generation.born)
    assert sum(per_forward) == filled, "committed counts add up"
    stalls = [i for i, count in enumerate(per_forward) if count == 0]
    assert not stalls or stalls == [len(per_forward) - 1], "every forward makes progress"
    assert model.special.mask not in (
        token for token, born in zip(generation.ids, generation.born, strict=True) if born != MASKED
    )
    assert len(generation.ids) <= request.max_new_tokens
    if MASKED in generation.born:
        assert generation.cut["eos"] < generation.born.index(MASKED)


def test_pairs_of_pieces_obey_the_laws(model) -> None:
    """Any two pieces of different slots meet; the whole product is in the exhaustive tier."""
    slots = (SCORES, SELECTS, SCHEDULES, CACHES, EXPLORES, STOPS)
    for pieces in covering_pairs(*slots):
        try:
            decoder = MaskedDecoder(*pieces)
        except DllmBenchError:
            continue
        check_laws(decoder, model, PRODUCT_REQUEST)


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("explore", EXPLORES, ids=str)
def test_every_combination_obeys_the_laws_or_is_refused(model, schedule, explore) -> None:
    """Every one is made or refused; two of seven decode, which takes most of the time."""
    refused = 0
    for place, pieces in enumerate(product(SCORES, SELECTS, STOPS, CACHES)):
        score, select, stop, cache = pieces
        try:
            decoder = MaskedDecoder(score, select, schedule, cache, explore, stop)
        except DllmBenchError as error:
            assert "needs a" in str(error)
            refused += 1
            continue
        if place % 7 < 2:
            check_laws(decoder, model, PRODUCT_REQUEST)
    pipelined = isinstance(schedule, Pipeline) and schedule.tau_add < 1
    assert refused == (len(SCORES) * len(STOPS) * len(CACHES) if pipelined else 0)
