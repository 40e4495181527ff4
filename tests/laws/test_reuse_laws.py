"""Laws of prompts whose beginning an earlier request has fed already.

Exact reuse changes what is fed and nothing that comes out; approximate reuse says so and may change
tokens. What cannot be exact is refused under that name.
"""

from __future__ import annotations

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, CausalCache
from dllm_bench.methods.common import Blocks, Confidence, Pipeline, Threshold, TopK
from tests.helpers import tiny_denoiser

SHOTS = tuple(range(3, 21))
PROMPTS = {  # request -> positions it shares with the one before
    "first": ((*SHOTS, 7, 9, 11), 0),
    "second": ((*SHOTS, 8, 9), 18),
    "same": ((*SHOTS, 8, 9), 19),  # one position is fed for the first prediction
    "other": ((4, *SHOTS), 0),
}
REQUESTS = [Request(name, ids, 8, seed=1) for name, (ids, _) in PROMPTS.items()]


def decoder(cache: CausalCache | BlockCache, block: int) -> MaskedDecoder:
    if isinstance(cache, CausalCache):
        return MaskedDecoder(Confidence(), TopK(1), Blocks(1, sees_future=False), cache)
    schedule = Blocks(block, sees_future=False, absolute=True, whole=True)
    return MaskedDecoder(Confidence(), Threshold(0.3), schedule, cache)


def run(layout: str, decoder: MaskedDecoder, batch: int = 1) -> dict[str, Generation]:
    model = tiny_denoiser(layout, seed=1)
    return {g.request_id: g for g in decoder.generate_stream(model, REQUESTS, batch)}


@pytest.mark.parametrize(
    ("layout", "kind", "block"),
    [("qwen3", CausalCache, 1), ("sdar", BlockCache, 4), ("llada2", BlockCache, 8)],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_exact_reuse_changes_nothing_but_what_is_fed(
    layout: str, kind: type[CausalCache | BlockCache], block: int, batch: int
) -> None:
    plain = run(layout, decoder(kind(), block))
    reused = run(layout, decoder(kind(reuse="exact"), block), batch)
    for name, (ids, shared) in PROMPTS.items():
        assert reused[name].ids == plain[name].ids
        assert reused[name].born == plain[name].born
        first, whole = (found[name].trace.forwards[0] for found in (reused, plain))
        assert first.kind == whole.kind
        assert first.cached + first.fed == whole.fed
        if batch == 1:
            assert first.cached == shared // block * block, (name, len(ids))


def test_approximate_reuse_feeds_less_of_a_prompt_that_is_one_block() -> None:
    schedule = Pipeline(4, tau_add=1.0, tau_act=1.0)
    parts = (Confidence(), Threshold(0.3), schedule)
    plain = run("dream", MaskedDecoder(*parts, BlockCache()))
    reused = run("dream", MaskedDecoder(*parts, BlockCache(reuse="approximate")))
    assert reused["first"].ids == plain["first"].ids
    assert [reused[name].trace.forwards[0].cached for name in PROMPTS] == [0, 18, 19, 0]
    with pytest.raises(DllmBenchError, match="needs a schedule with absolute blocks"):
        MaskedDecoder(*parts, BlockCache(reuse="exact"))
    decoder = MaskedDecoder(*parts, BlockCache(reuse="approximate"))
    with pytest.raises(DllmBenchError, match="one request at a time, which batch 2 does not give"):
        decoder.generate_stream(tiny_denoiser("dream", seed=1), [], 2)


@pytest.mark.parametrize("first", [4, 8])
def test_nothing_is_taken_from_another_decoder(first: int) -> None:
    """Keys and values of one model under blocks of another length are others."""
    model = tiny_denoiser("sdar", seed=1)
    request, blocks = REQUESTS[1], {4: 8, 8: 4}
    list(decoder(BlockCache(reuse="exact"), first).generate_stream(model, [request], 1))
    found = decoder(BlockCache(reuse="exact"), blocks[first]).generate(model, request)
    assert found.trace.forwards[0].cached == 0
