"""Laws of attention that is causal in feed order, and of a window that moves on (WeDLM)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dllm_bench.core.contracts import Round
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache
from dllm_bench.methods.causal_masks import FeedOrder, NearEntropy, Sliding
from dllm_bench.methods.common import Best, Blocks, Confidence, Eos, NegEntropy, Threshold
from tests.helpers import VOCAB, Watched, tiny_denoiser

REQUESTS = [Request("window", tuple(range(3, 3 + n)), 20) for n in (1, 8, 11)]
SCORE, CACHE = NegEntropy(), FeedOrder()
DECODER = MaskedDecoder(SCORE, NearEntropy(3.2), Sliding(8), CACHE)
SHORT = Blocks(8, sees_future=False, short=True)
BLOCKS = MaskedDecoder(Confidence(), Threshold(0.2), SHORT, CACHE)
ONE_BY_ONE = replace(DECODER, select=Best(1), schedule=Blocks(1, sees_future=False))


@dataclass(frozen=True)
class Uncached(FeedOrder):
    """The same attention over everything in every forward."""

    def plan(self, round: Round) -> ForwardPlan:
        everything = replace(super().plan(round), store=(0, 0))
        assert everything.feed[0] == 0
        return everything


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("llada", 4)


def texts(model: Any, decoder: MaskedDecoder) -> list[Any]:
    found = (decoder.generate(model, request) for request in REQUESTS)
    return [(one.ids, one.born) for one in found]


NEAREST = NearEntropy(None, penalty=math.log(VOCAB) + 0.1)  # which is above every entropy


@pytest.mark.parametrize("part", [{"schedule": Sliding(1)}, {"select": NEAREST}], ids=str)
def test_it_is_greedy_decoding_from_left_to_right(model: Any, part: dict[str, Any]) -> None:
    """Masks after the first one change nothing: no row before them sees them."""
    found = texts(model, replace(DECODER, **part))
    assert found == texts(model, ONE_BY_ONE) and all(born == tuple(range(20)) for _, born in found)
    assert found != texts(model, DECODER), "else the law says nothing"


def test_whatever_its_blocks_the_attention_is_causal() -> None:
    plain = replace(BLOCKS, cache=BlockCache())
    forms = [one.summary().attention for one in (DECODER, BLOCKS, plain)]
    assert forms == ["feed_order", "feed_order", "block_causal"]


@pytest.mark.parametrize("decoder", [DECODER, BLOCKS], ids=["window", "blocks"])
def test_the_cache_changes_nothing(model: Any, decoder: MaskedDecoder) -> None:
    assert texts(model, decoder) == texts(model, replace(decoder, cache=Uncached()))


@pytest.mark.parametrize("overruns", [False, True])
def test_the_window_stays_at_an_end_token_unless_it_overruns(model: Any, overruns: bool) -> None:
    """The end token is filled first: the least entropy is there."""
    watched = Watched(model, ending=len(REQUESTS[2].prompt_ids) + 5)
    one_each = replace(DECODER, select=NearEntropy(None), schedule=Sliding(8, overruns))
    ids = replace(one_each, stop=Eos("token")).generate(watched, REQUESTS[2]).ids
    eos = model.special.eos
    ended = [bool((canvas_KL == eos).any()) for canvas_KL in watched.canvases]
    assert any(ended) and eos in ids
    stops = [plan.rows[1] for plan, is_after in zip(watched.plans, ended, strict=True) if is_after]
    assert (len({*stops, watched.plans[ended.index(True) - 1].rows[1]}) == 1) != overruns
