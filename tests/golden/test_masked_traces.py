"""Masked decoders reproduce the authors' code token for token on the tiny golden checkpoints.

Every case of the recorded methods is replayed: output ids, the number of forwards (branches of a
round count as one forward) and, where stored, the canvas before or after each step. The published
samplers leave the mask token in the distribution, so these decoders do too (`forbid_mask=False`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache

import pytest

from dllm_bench.core.request import Request
from dllm_bench.decoding.cache.block import BlockCache
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.explore.greedy import Greedy
from dllm_bench.decoding.explore.lookahead import Lookahead
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.schedule.pipeline import Pipeline
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.margin import Margin
from dllm_bench.decoding.score.neg_entropy import NegEntropy
from dllm_bench.decoding.select.threshold import Threshold
from dllm_bench.decoding.select.topk import TopK
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from tests.helpers import golden_dir, load_denoiser
from tests.tiers import covering

SCORES = {"default": Confidence, "neg_entropy": NegEntropy, "margin": Margin}
GOLDEN = golden_dir()


def cases(file: str, methods: set[str]) -> list[dict]:
    """Recorded cases of `methods`; empty where the golden folder is absent."""
    path = GOLDEN / file
    found = json.loads(path.read_text()) if path.exists() else []
    return [case for case in found if case["method"] in methods]


@lru_cache
def denoiser(folder: str):
    return load_denoiser(GOLDEN / folder)


def llada(case: dict) -> MaskedDecoder:
    """LLaDA's schedule, or Fast-dLLM's threshold without cache."""
    params = case["params"]
    blocks = params["gen_length"] // params["block_length"]
    select = (
        Threshold(params["threshold"])
        if "threshold" in params
        else TopK(steps=params["steps"] // blocks)
    )
    return MaskedDecoder(
        score=Confidence(),
        select=select,
        schedule=Blocks(params["block_length"]),
        cache=NoCache(),
        stop=Filled(),
        forbid_mask=False,
    )


def block_cached(case: dict) -> MaskedDecoder:
    """Fast-dLLM's threshold with the prefix or the dual cache."""
    caches = {"fast_dllm_prefix_cache": PrefixCache(), "fast_dllm_dual_cache": DualCache()}
    return replace(llada(case), cache=caches[case["method"]])


def pipelined(case: dict) -> MaskedDecoder:
    """D2F, and LoPA over it; one lookahead less than two branches means none."""
    params = case["params"]
    k = params.get("branching_factor", 0) if params.get("use_uncertainty_logic", True) else 0
    full = params.get("use_full_attention", False)
    return MaskedDecoder(
        score=SCORES[params.get("sampling_strategy", "default")](),
        select=Threshold(params["skip_threshold"], strict=True),
        schedule=Pipeline(
            params["block_size"], params["block_add_threshold"], params["decoded_token_threshold"]
        ),
        cache=BlockCache("full" if full else "block_causal"),
        explore=Greedy()
        if k <= 1
        else Lookahead(
            k,
            params["selection_conf_alpha"],
            params["branch_topp"],
            base_wins=bool(params.get("verification_force_base_winner")),
        ),
        stop=Eos(),
        forbid_mask=False,
    )


def replay(case: dict, folder: str, decoder: MaskedDecoder):
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    return decoder.generate(denoiser(folder), request)


def name(case: dict) -> str:
    return f"{case['method']}-p{len(case['prompt'])}"


LLADA = cases("llada/llada_cases.json", {"llada_vanilla", "fast_dllm_threshold"})
LLADA_CACHED = cases("llada/llada_cases.json", {"fast_dllm_prefix_cache", "fast_dllm_dual_cache"})
D2F = cases("dream/d2f_cases.json", {"d2f_dream"}) + cases(
    "dream/lopa_cases.json", {"diffucoder_d2f", "lopa_dream_single_branch"}
)
LOPA = cases("dream/lopa_cases.json", {"lopa_dream", "lopa_coder", "lopa_dream_one_block"})


@pytest.mark.skipif(not LLADA, reason=f"no golden traces at {GOLDEN}")
@pytest.mark.parametrize("case", covering(3, LLADA, often=2), ids=name)
def test_llada(case: dict) -> None:
    generation = replay(case, "llada", llada(case))
    assert list(generation.ids) == case["output"]
    assert len(generation.trace) == case["nfe"]
    assert canvases(generation, case) == case["states"]


@pytest.mark.skipif(not LLADA_CACHED, reason=f"no golden traces at {GOLDEN}")
@pytest.mark.parametrize("case", covering(3, LLADA_CACHED, often=2), ids=name)
def test_llada_with_cache(case: dict) -> None:
    """Official forwards over a block that its first forward has filled change nothing: not made."""
    generation = replay(case, "llada", block_cached(case))
    assert list(generation.ids) == case["output"]
    total = len(case["prompt"]) + case["params"]["gen_length"]
    block = case["params"]["block_length"]
    useful = [
        call["len"]
        for call in case["calls"]
        if call["len"] == total or call["masked"] > call["len"] - block
    ]
    assert [forward.fed for forward in generation.trace.forwards] == useful


def canvases(generation, case: dict) -> list[list[int]]:
    """The input of every forward, rebuilt from `born`."""
    mask = denoiser("llada").special.mask
    drawn = list(zip(generation.ids, generation.born, strict=True))
    return [
        case["prompt"] + [token if 0 <= born < step else mask for token, born in drawn]
        for step in range(len(generation.trace))
    ]


@pytest.mark.skipif(not D2F, reason=f"no golden traces at {GOLDEN}")
@pytest.mark.parametrize("case", covering(3, D2F, often=2), ids=name)
def test_d2f(case: dict) -> None:
    generation = replay(case, "dream", pipelined(case))
    assert list(generation.ids) == case["output"]
    assert len(generation.trace) == case["nfe"]
    fed = [forward.fed for forward in generation.trace.forwards]
    assert fed == [call["len"] for call in case["calls"]]
    cached = [forward.cached for forward in generation.trace.forwards]
    assert cached == [call["cache_len"] for call in case["calls"]]


@pytest.mark.skipif(not LOPA, reason=f"no golden traces at {GOLDEN}")
@pytest.mark.parametrize("case", covering(3, LOPA, often=2), ids=name)
def test_lopa(case: dict) -> None:
    generation = replay(case, "dream", pipelined(case))
    assert list(generation.ids) == case["output"]
    assert len(generation.trace) == case["rounds_with_forward"]
    for step, forward in zip(case["steps"], generation.trace.forwards, strict=True):
        base_won = forward.winner == forward.branches - 1
        assert base_won == bool(step["chosen_base"]), step["step"]
