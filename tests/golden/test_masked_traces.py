"""Masked decoders reproduce the authors' code token for token on the tiny golden checkpoints.

Every case of the recorded methods is replayed by the decoder of its yaml: output ids, the number of
forwards (branches of a round count as one forward), where stored the canvas before or after each
step, and the branch that each round of LoPA continued with. The published samplers leave the mask
token in the distribution, so these decoders do too (`forbid_mask=False`).
"""

from __future__ import annotations

from typing import Any

from dllm_bench.core.request import Generation
from dllm_bench.decoding.masked import MaskedDecoder
from tests.golden.cases import (
    Case,
    agreement,
    composed,
    denoiser,
    rebuilt,
    replayed,
    request,
    steps_per_block,
)
from tests.helpers import Watched

FAST_DLLM_PP = "new2026/fast_dllm_pp_cases.json"
LLADA, LOPA, D2F = "llada/llada_cases.json", "dream/lopa_cases.json", "dream/d2f_cases.json"
CACHED = ("fast_dllm_prefix_cache", "fast_dllm_dual_cache")
BRANCHING = ("lopa_dream", "lopa_coder", "lopa_dream_one_block")
NAMES = {
    "llada_vanilla": "vanilla",
    "fast_dllm_threshold": "fast_dllm",
    "fast_dllm_prefix_cache": "fast_dllm_prefix",
    "fast_dllm_dual_cache": "fast_dllm_dual",
}
SCORES = {"default": "confidence", "neg_entropy": "neg_entropy", "margin": "margin"}


def llada(case: Case) -> MaskedDecoder:
    """LLaDA's schedule, or Fast-dLLM's threshold, as released: every block is decoded."""
    params = case["params"]
    select: dict[str, Any] = {"select.steps": steps_per_block(params)}
    if "threshold" in params:
        select = {"select.tau": params["threshold"]}
    settings = {"schedule.block": params["block_length"], "stop": "filled"}
    return composed(NAMES[case["method"]], settings | select)


def pipelined(case: Case) -> MaskedDecoder:
    """D2F, and LoPA over it."""
    params = case["params"]
    settings = {
        "score": SCORES[params.get("sampling_strategy", "default")],
        "select.tau": params["skip_threshold"],
        "schedule.block": params["block_size"],
        "schedule.tau_add": params["block_add_threshold"],
        "schedule.tau_act": params["decoded_token_threshold"],
        "cache.attention": "full" if params.get("use_full_attention") else "block_causal",
    }
    if case["method"] not in BRANCHING:
        return composed("d2f", settings)
    k = params["branching_factor"]
    branches = {
        "explore.k": k if k > 1 else 0,  # the released loop makes no lookahead branch of 1
        "explore.alpha": params["selection_conf_alpha"],
        "explore.fraction": params["branch_topp"],
        "explore.base_wins": bool(params.get("verification_force_base_winner")),
    }
    return composed("lopa", settings | branches)


def replay(case: Case, folder: str, decoder: MaskedDecoder) -> Generation:
    return decoder.generate(denoiser(folder), request(case))


@replayed(LLADA, "llada_vanilla", "fast_dllm_threshold")
def test_llada(case: Case) -> None:
    generation = replay(case, "llada", llada(case))
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert len(generation.trace) == case["nfe"]
        assert rebuilt(generation, case, denoiser("llada").special.mask) == case["states"]


@replayed(LLADA, *CACHED)
def test_llada_with_cache(case: Case) -> None:
    """Official forwards over a block that its first forward has filled change nothing: not made."""
    generation = replay(case, "llada", llada(case))
    total = len(case["prompt"]) + case["params"]["gen_length"]
    block = case["params"]["block_length"]
    useful = [
        call["len"]
        for call in case["calls"]
        if call["len"] == total or call["masked"] > call["len"] - block
    ]
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert [forward.fed for forward in generation.trace.forwards] == useful


@replayed(FAST_DLLM_PP)
def test_fast_dllm_pp(case: Case) -> None:
    """Compare tokens, and what each forward fed and saw; every block is decoded, as released."""
    params = case["params"]
    settings = {
        "select.delta": params["frechet_margin"],
        "schedule.block": params["block_length"],
        "cache": params["cache"],
        "stop": "filled",
    }
    model = Watched(denoiser("llada"))
    generation = composed("fast_dllm_pp", settings).generate(model, request(case))
    fed = [
        (plan.feed[0], canvas[0, slice(*plan.feed)].tolist())
        for plan, canvas in zip(model.plans, model.canvases, strict=True)
    ]
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert len(generation.trace) == case["nfe"]
        assert fed == [(call["start"], call["ids"]) for call in case["calls"]]


def check_calls(case: Case) -> None:
    """Compare tokens and what each forward of a run without branches fed and read."""
    generation = replay(case, "dream", pipelined(case))
    fed = [(forward.fed, forward.cached) for forward in generation.trace.forwards]
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert len(generation.trace) == case["nfe"]
        assert fed == [(call["len"], call["cache_len"]) for call in case["calls"]]


@replayed(D2F)
def test_d2f(case: Case) -> None:
    check_calls(case)


@replayed(LOPA, "diffucoder_d2f", "lopa_dream_single_branch")
def test_lopa_without_branches(case: Case) -> None:
    check_calls(case)


@replayed(LOPA, *BRANCHING)
def test_lopa(case: Case) -> None:
    """Branches stand in the order in which they are made, the base last."""
    generation = replay(case, "dream", pipelined(case))
    rounds = [(forward.branches, forward.winner) for forward in generation.trace.forwards]
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert len(generation.trace) == case["rounds_with_forward"]
        assert rounds == [(len(step["branches"]), step["chosen"]) for step in case["steps"]]
