"""Dream's samplers and Fast-dLLM's for Dream, token for token on the tiny Dream checkpoint.

Dream's time schedule (three rankings and `origin`), Fast-dLLM's threshold without cache, with the
prefix and the dual cache, and its entropy schedule with caches. Every recorded case is replayed by
the decoder of its yaml: output ids, the input of every forward, and what each forward fed. The
published samplers leave the mask token in the distribution, so these decoders do too. Official
forwards over a part that is decoded already change nothing and are not made (`origin` may be done
early).
"""

from __future__ import annotations

from dllm_bench.core.request import Generation
from dllm_bench.decoding.masked import MaskedDecoder
from tests.golden.cases import (
    SCORES,
    Case,
    Settings,
    agreement,
    composed,
    denoiser,
    rebuilt,
    replayed,
    request,
    steps_per_block,
)

FILE = "dream/dream_cases.json"
FULL = ("dream_maskgit_plus", "dream_topk_margin", "dream_entropy", "dream_origin")
CACHED = tuple(
    f"fast_dllm_dream_{rule}{cache}_cache"
    for rule in ("", "entropy_")
    for cache in ("prefix", "dual")
)


def dream(params: Settings) -> MaskedDecoder:
    """Dream's own sampler: the whole generation at once."""
    schedule = {"select.steps": params["steps"], "select.eps": params["eps"]}
    if params["alg"] != "origin":
        return composed("dream", schedule | {"score": SCORES[params["alg"]]})
    order = {"score": "confidence", "select": "origin", "select.seed": params["seed"]}
    return composed("dream", schedule | order)


def rationed(params: Settings) -> MaskedDecoder:
    """Fast-dLLM without cache: a threshold within a budget."""
    numbers = {"select.inner.tau": params["threshold"], "select.steps": params["steps"]}
    return composed("fast_dllm_dream", numbers)


def block_cached(params: Settings) -> MaskedDecoder:
    """Fast-dLLM's caches, with a threshold or with a time schedule per block."""
    name = "fast_dllm_dream_dual" if params["dual_cache"] else "fast_dllm_dream_prefix"
    block = {"schedule.block": params["block_length"]}
    if "threshold" in params:
        return composed(name, block | {"select.inner.tau": params["threshold"]})
    inner = {"select.inner.steps": steps_per_block(params), "select.inner.idle": True}
    entropy = {"score": "neg_entropy", "select@inner": "epsilon"}
    return composed(name, block | entropy | inner)


def useful(case: Case) -> list[tuple[Case, list[int] | None]]:
    """Calls whose open part holds masks, each with its recorded input."""
    ahead = case["params"].get("block_length", case["params"]["gen_length"])
    total = len(case["prompt"]) + case["params"]["gen_length"]
    states = case["states"] or [None] * len(case["calls"])
    return [
        (call, state)
        for call, state in zip(case["calls"], states, strict=True)
        if call["masked"] > (0 if call["len"] == total else call["len"] - ahead)
    ]


def inputs(generation: Generation, case: Case) -> list[list[int]]:
    """Return the input of every forward."""
    canvases = rebuilt(generation, case, denoiser("dream").special.mask)
    starts = [call.get("start", 0) for call, _ in useful(case)]
    return [
        canvas[start : start + forward.fed]
        for canvas, start, forward in zip(canvases, starts, generation.trace.forwards, strict=True)
    ]


def check(case: Case, decoder: MaskedDecoder) -> None:
    with agreement(case):
        generation = decoder.generate(denoiser("dream"), request(case))
        assert list(generation.ids) == case["output"]
        fed = [forward.fed for forward in generation.trace.forwards]
        assert fed == [call["len"] for call, _ in useful(case)]
        if case["states"] is not None:
            assert inputs(generation, case) == [state for _, state in useful(case)]


@replayed(FILE, *FULL)
def test_dream(case: Case) -> None:
    check(case, dream(case["params"]))


@replayed(FILE, "fast_dllm_dream_threshold")
def test_fast_dllm(case: Case) -> None:
    check(case, rationed(case["params"]))


@replayed(FILE, *CACHED)
def test_fast_dllm_with_cache(case: Case) -> None:
    check(case, block_cached(case["params"]))
