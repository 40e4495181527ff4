"""Dream's samplers and Fast-dLLM's for Dream, token for token on the tiny Dream checkpoint.

Dream's time schedule (three rankings and `origin`), Fast-dLLM's threshold without cache, with the
prefix and the dual cache, and its entropy schedule with caches. Every recorded case is replayed:
output ids, the input of every forward, and what each forward fed. The published samplers leave the
mask token in the distribution, so these decoders do too (`forbid_mask=False`). Official forwards
over a part that is decoded already change nothing and are not made (`origin` may be done early).
"""

from __future__ import annotations

import json
from functools import lru_cache

import pytest

from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.margin import Margin
from dllm_bench.decoding.score.neg_entropy import NegEntropy
from dllm_bench.decoding.select.epsilon import Epsilon
from dllm_bench.decoding.select.first_of_block import FirstOfBlock
from dllm_bench.decoding.select.origin import Origin
from dllm_bench.decoding.select.ration import Ration
from dllm_bench.decoding.select.threshold import Threshold
from tests.helpers import golden_dir, load_denoiser
from tests.tiers import covering

FILE = golden_dir() / "dream" / "dream_cases.json"
WHOLE = Blocks(None)
SCORES = {"maskgit_plus": Confidence, "topk_margin": Margin, "entropy": NegEntropy}
FULL = {"dream_maskgit_plus", "dream_topk_margin", "dream_entropy", "dream_origin"}
CACHED = {
    f"fast_dllm_dream_{rule}{cache}_cache"
    for rule in ("", "entropy_")
    for cache in ("prefix", "dual")
}


def cases(methods: set[str]) -> list[dict]:
    """Recorded cases of `methods`; empty where the golden folder is absent."""
    found = json.loads(FILE.read_text()) if FILE.exists() else []
    return [case for case in found if case["method"] in methods]


@lru_cache
def denoiser():
    return load_denoiser(golden_dir() / "dream")


def dream(params: dict) -> MaskedDecoder:
    """Dream's own sampler: the whole generation at once."""
    steps, eps = params["steps"], params["eps"]
    if params["alg"] == "origin":
        select = Origin(steps, eps, idle=True, seed=params["seed"])
        return MaskedDecoder(Confidence(), select, WHOLE, NoCache(), forbid_mask=False)
    score = SCORES[params["alg"]]()
    select = Epsilon(steps, eps, idle=True)
    return MaskedDecoder(score, select, WHOLE, NoCache(), forbid_mask=False)


def rationed(params: dict) -> MaskedDecoder:
    """Fast-dLLM without cache: a threshold within a budget."""
    select = Ration(Threshold(params["threshold"]), params["steps"])
    return MaskedDecoder(Confidence(), select, WHOLE, NoCache(), forbid_mask=False)


def block_cached(params: dict) -> MaskedDecoder:
    """Fast-dLLM's caches, with a threshold or with a time schedule per block."""
    schedule = Blocks(params["block_length"])
    cache = DualCache() if params["dual_cache"] else PrefixCache()
    if "threshold" in params:
        select = FirstOfBlock(Threshold(params["threshold"]))
        return MaskedDecoder(Confidence(), select, schedule, cache, forbid_mask=False)
    steps = params["steps"] * params["block_length"] // params["gen_length"]
    select = FirstOfBlock(Epsilon(steps, idle=True))
    return MaskedDecoder(NegEntropy(), select, schedule, cache, forbid_mask=False)


def replay(case: dict, decoder: MaskedDecoder) -> Generation:
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    return decoder.generate(denoiser(), request)


def useful(case: dict) -> list[tuple[dict, list[int] | None]]:
    """Calls whose open part holds masks, each with its recorded input."""
    ahead = case["params"].get("block_length", case["params"]["gen_length"])
    total = len(case["prompt"]) + case["params"]["gen_length"]
    states = case["states"] or [None] * len(case["calls"])
    return [
        (call, state)
        for call, state in zip(case["calls"], states, strict=True)
        if call["masked"] > (0 if call["len"] == total else call["len"] - ahead)
    ]


def inputs(generation: Generation, case: dict) -> list[list[int]]:
    """The input of every forward, rebuilt from `born`."""
    mask, prompt = denoiser().special.mask, case["prompt"]
    drawn = list(zip(generation.ids, generation.born, strict=True))
    canvases = [
        prompt + [token if 0 <= born < step else mask for token, born in drawn]
        for step in range(len(generation.trace))
    ]
    starts = [call.get("start", 0) for call, _ in useful(case)]
    return [
        canvas[start : start + forward.fed]
        for canvas, start, forward in zip(canvases, starts, generation.trace.forwards, strict=True)
    ]


def leaves_masks(case: dict) -> bool:
    """One scheduled step per block and a cache: the published loop ends with masks left (a bug)."""
    params = case["params"]
    blocks = params["gen_length"] // params["block_length"]
    return "threshold" not in params and params["steps"] == blocks


def name(case: dict) -> str:
    params = case["params"]
    cut = "-".join(
        str(params[key]) for key in ("gen_length", "steps", "block_length") if key in params
    )
    return f"{case['method']}-{params.get('threshold', '')}-{cut}-p{len(case['prompt'])}"


DREAM = cases(FULL)
RATIONED = cases({"fast_dllm_dream_threshold"})
BLOCKS = [case for case in cases(CACHED) if not leaves_masks(case)]


def check(case: dict, decoder: MaskedDecoder) -> None:
    generation = replay(case, decoder)
    assert list(generation.ids) == case["output"]
    fed = [forward.fed for forward in generation.trace.forwards]
    assert fed == [call["len"] for call, _ in useful(case)]
    if case["states"] is not None:
        assert inputs(generation, case) == [state for _, state in useful(case)]


@pytest.mark.skipif(not DREAM, reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize("case", covering(3, DREAM, often=2), ids=name)
def test_dream(case: dict) -> None:
    check(case, dream(case["params"]))


@pytest.mark.skipif(not RATIONED, reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize("case", covering(3, RATIONED, often=2), ids=name)
def test_fast_dllm(case: dict) -> None:
    check(case, rationed(case["params"]))


@pytest.mark.skipif(not BLOCKS, reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize("case", covering(3, BLOCKS, often=2), ids=name)
def test_fast_dllm_with_cache(case: dict) -> None:
    check(case, block_cached(case["params"]))
