"""The decoder of every recorded method that the masked loop replays, with the numbers of a run.

An entry of `DECODERS` holds the name of a decoder of `conf/decoder` and its settings, or is a
function of the run's parameters that returns both. A value that names a parameter of the run stands
for it, as does `steps_per_block`. The run's block length is the schedule's unless `schedule.block`
is given (None: the schedule has none). The mask token may be written, as published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.filters import FilterMetadata, save_filter
from tests.golden.cases import GOLDEN, Case, composed

Params = Mapping[str, Any]
Settings = dict[str, Any]

LLADA_CACHED = ("fast_dllm_prefix_cache", "fast_dllm_dual_cache")
DREAM = ("dream_maskgit_plus", "dream_topk_margin", "dream_entropy", "dream_origin")
DREAM_CACHED = tuple(
    f"fast_dllm_dream_{rule}{kind}_cache"
    for rule in ("", "entropy_")
    for kind in ("prefix", "dual")
)
PIPELINED = ("d2f_dream", "diffucoder_d2f", "lopa_dream_single_branch")
BRANCHING = ("lopa_dream", "lopa_dream_one_block", "lopa_coder")

FILTERS = tempfile.TemporaryDirectory()  # removed at exit
NEVER = 10_000  # a refresh interval that means none
COMMITS = {"all": "all", "max_conf": "most_probable", "min_kl": "most_stable"}
JUDGES = {"low_prob": "probability", "t2t_remask": "candidate", "logit_diff": "drop"}
SCORES = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "neg_entropy"}
RANKINGS = {"default": "confidence", "neg_entropy": "neg_entropy", "margin": "margin"}

STEPS = {"select.steps": "steps_per_block"}
TAU = {"select.tau": "threshold"}
FILLED = {"stop": "filled"}  # an end token does not end the run


def steps_per_block(params: Params) -> int:
    """Return the steps that a schedule of the whole generation leaves for a block."""
    return int(params["steps"] * params["block_length"] // params["gen_length"])


# --- LLaDA, Dream, Fast-dLLM, D2F, LoPA, Learn2PD -------------------------------------------------


def dream(p: Params) -> Settings:
    """Dream's own sampler: the whole generation at once."""
    schedule = {"decoder": "dream", "select.steps": "steps", "select.eps": "eps"}
    if p["alg"] != "origin":
        return schedule | {"score": SCORES[p["alg"]]}
    return schedule | {"score": "confidence", "select": "origin", "select.seed": "seed"}


def fast_dllm_dream_cached(p: Params) -> Settings:
    """A threshold, or a time schedule per block."""
    name = {"decoder": "fast_dllm_dream_dual" if p["dual_cache"] else "fast_dllm_dream_prefix"}
    if "threshold" in p:
        return name | {"select.inner.tau": "threshold"}
    inner = {"select.inner.steps": "steps_per_block", "select.inner.idle": True}
    return name | {"score": "neg_entropy", "select@inner": "epsilon"} | inner


def pipelined(p: Params) -> Settings:
    """D2F, and LoPA over it, whose released loop makes no lookahead branch of 1."""
    settings = {
        "decoder": "d2f",
        "score": RANKINGS[p.get("sampling_strategy", "default")],
        "select.tau": "skip_threshold",
        "schedule.tau_add": "block_add_threshold",
        "schedule.tau_act": "decoded_token_threshold",
        "cache.attention": "full" if p.get("use_full_attention") else "block_causal",
    }
    if "branching_factor" not in p:
        return settings
    return settings | {
        "decoder": "lopa",
        "explore.k": p["branching_factor"] if p["branching_factor"] > 1 else 0,
        "explore.alpha": "selection_conf_alpha",
        "explore.fraction": "branch_topp",
        "explore.base_wins": bool(p.get("verification_force_base_winner")),
    }


@cache
def filters() -> Path:
    """Return Learn2PD's recorded filters as a run reads them, one folder a block length."""
    from safetensors.torch import load_file

    recorded = load_file(GOLDEN / "llada" / "learn2pd_filters.safetensors")
    for block in {name.partition(".")[0] for name in recorded}:
        prefix = f"{block}."
        own = {n.removeprefix(prefix): t for n, t in recorded.items() if n.startswith(prefix)}
        save_filter(Path(FILTERS.name) / block, own, FilterMetadata())
    return Path(FILTERS.name)


def learn2pd(p: Params) -> Settings:
    return {
        "decoder": "learn2pd_eotp" if "eotp" in p["method"] else "learn2pd",
        "select.first.head.source": str(filters() / f"block{p['block_length']}"),
        "select.first.tau": "threshold",
        "select.second.steps": "steps_per_block",
    }


# --- adaptive samplers ----------------------------------------------------------------------------


def eb_confidence(p: Params) -> Settings:
    least = {"select.gamma": "gamma", "select.least": "num_transfer_tokens"}
    return {"decoder": "eb_sampler_blocks", "score@inner": SCORES[p["alg"]]} | least


def localleap(p: Params) -> Settings:
    relaxed = {"select.relaxed": "relaxed_threshold", "select.radius": "radius"}
    stop = {"stop": "eos", "stop.turn_end": False} if p.get("early_stop") else {}
    return {"decoder": "local_leap"} | TAU | relaxed | stop


def klass(p: Params) -> Settings:
    settings = {
        "decoder": p["method"],
        "score.length": "kl_history_length",
        "select.tau": "conf_threshold",
        "select.eps": "kl_threshold",
        "select.commits": COMMITS[p.get("unmask_strategy", "all")],
    }
    if p["method"] == "klass":
        return settings | {"select.fallback.steps": "steps_per_block"}
    return settings | {"stop": "budget", "stop.forwards": "steps"}


def dus(p: Params) -> Settings:
    """Positions masked again stay masked: a budget of forwards leaves them so."""
    pattern = {"select.kind": "scheduler", "select.base": "base", "select.skip": "base_skip"}
    if p["remasking"] == "none":
        return {"decoder": "dus"} | pattern
    return pattern | {
        "decoder": "dus",
        "score.precision": "float64",
        "select.least": "confidence_threshold",
        "select.block": "block_length",
        "schedule": "full",
        "schedule.block": None,
        "stop": "budget",
        "stop.forwards": "nfe",
    }


def d3llm(p: Params) -> Settings:
    """Without the early stop nothing but the length ends a run."""
    early, every = p["early_stop"], p.get("refresh_interval")
    numbers = TAU | {"schedule.tau_add": "block_add_threshold"} | ({} if early else FILLED)
    if every is None:
        return {"decoder": "d3llm_early_stop" if early else "d3llm"} | numbers
    return numbers | {
        "decoder": "d3llm_early_stop" if early else "d3llm_cache",
        "cache": "delayed",
        "cache.delay": "cache_delay_iter",
        "cache.every": every if every < NEVER else None,
    }


def pc_sampler(p: Params) -> Settings:
    return STEPS | {
        "decoder": "pc_sampler_linear" if p["kind"] == "linear_position" else "pc_sampler",
        "score.counts.source": str(GOLDEN / "samplers" / "pc_sampler_baseline.json"),
        "score.decay": "lambd",
        "score.cap": "alpha",
        "select.ties": "block",
    }


def prophet(p: Params) -> Settings:
    """The blocks are the selector's."""
    return {
        "decoder": "prophet",
        "score.answer": "answer_offset",
        "select.inner.steps": "steps_per_block",
        "select.block": "block_length",
        **{f"select.{time}": time for time in ("early", "mid", "late")},
        "select.idle": True,
        "select.pinned": [[int(at), token] for at, token in (p["constraints"] or {}).items()],
        "schedule.block": None,
    }


# --- caches ---------------------------------------------------------------------------------------


def dkv_dream(p: Params) -> Settings:
    early = p["shift_type"] == "un"
    return {
        "decoder": "dkv_cache_dream",
        "score": SCORES[p["alg"]],
        "select.steps": "steps",
        "select.idle": True,
        "cache.every": p["cache_steps"] or 1,
        "cache.keeps_prompt": p["cache_type"] != "decoded",
        "cache.early": early,
        "cache.released_end": not early,
    }


def dpad(p: Params) -> Settings:
    """No recorded run ends early."""
    select = {"select": "topk"} | STEPS if p["threshold"] is None else TAU
    dual = p["cache"] == "dual"
    cached = {"decoder": "dpad_dual"} if dual else {"decoder": "dpad", "cache@inner": "cache"}
    return FILLED | select | cached


def sparse_dllm(p: Params) -> Settings:
    settings = {"cache.keep": "keep_ratio", "cache.kernel": p["kernel_size"] or 1}
    settings |= {"cache.released_ties": True}
    if "alg" not in p:
        return {"decoder": "sparse_dllm"} | settings | STEPS
    inner = {"select.inner.steps": "steps_per_block", "select.inner.idle": True}
    return {"decoder": "sparse_dllm_dream", "score": SCORES[p["alg"]]} | settings | inner


def dllm_cache(p: Params) -> Settings:
    settings = {
        "decoder": "dllm_cache",
        "cache.prompt_every": "prompt_interval_steps",
        "cache.every": "gen_interval_steps",
        "cache.share": "transfer_ratio",
    }
    if "alg" not in p:
        return settings | STEPS
    dream = {"score": SCORES[p["alg"]], "select.steps": "steps", "select.idle": True}
    return settings | dream | {"decoder": "dllm_cache_dream"}


def d2cache(p: Params) -> Settings:
    """The released quirks are on."""
    score, number = {"score": SCORES[p["alg"]]}, {"select.number": "num_transfer_tokens"}
    if p["decode_sigma"]:
        score = {"score@inner": SCORES[p["alg"]], "score.sigma": "decode_sigma"}
    if p["threshold"]:
        first = {"select.first.tau": "threshold", "select.first.strict": False}
        number = {"select": "threshold_best", "select.second.number": "num_transfer_tokens"} | first
    return (
        score
        | number
        | {
            "decoder": "d2cache_dream" if p["method"].endswith("dream") else "d2cache",
            "cache.current": "current_k",
            "cache.rollout": "rollout_p",
            "cache.sigma": "sigma",
            "cache.inflate": "inflate_w",
            "cache.released": True,
        }
    )


def fast_dllm_v2(p: Params) -> Settings:
    inside = {"schedule.small": "small_block_size", "cache.inside": "use_block_cache"}
    stop = {} if p["loop"] == "generate" else {"stop": "eos"}
    return {"decoder": "fast_dllm_v2", "schedule.whole": False} | TAU | inside | stop


def freedave(p: Params) -> Settings:
    cached = FILLED | {"cache": "dual" if p["dual_cache"] else "prefix"}
    if p["confidence_threshold"] is None:
        return cached | {"decoder": "freedave"}
    return cached | {"decoder": "freedave_plus", "select.tau": "confidence_threshold"}


# --- revisions, engines ---------------------------------------------------------------------------


def ended(p: Params) -> Settings:
    """Return the stop of a run that may end early."""
    return {} if p["eos_early_stop"] else FILLED


def llada21(p: Params) -> Settings:
    return (ended(p) if "eos_early_stop" in p else FILLED) | {
        "decoder": "llada21",
        "select.first.tau": "threshold",
        "select.second.number": "num_to_transfer",
        "revise.tau": "editing_threshold",
        "revise.rounds": "max_post_steps",
    }


def block_refinement(p: Params) -> Settings:
    """diffusers' form; editing from 0 is none there, and one more forward of edits is made."""
    steps = min(p["num_inference_steps"], p["gen_length"] // p["minimal_topk"])
    return ended(p) | {
        "decoder": "llada21_refine",
        "select.first.steps": steps,
        "select.first.idle": True,
        "select.second.tau": "threshold",
        "revise.tau": p["editing_threshold"] or 1,
        "revise.rounds": p["max_post_steps"] + 1,
        "revise.steps": steps,
    }


def t2m(p: Params) -> Settings:
    """Keys and values of earlier blocks are those of the block's last forward, as released."""
    return ended(p) | {
        "decoder": "t2m",
        "select.first.tau": "threshold",
        "select.second.number": "num_to_transfer",
        "cache.renews": False,
        "revise.judge": JUDGES[p["remask_strategy"]],
        "revise.tau": "remask_threshold",
        "revise.ratio": "max_remask_ratio",
        "revise.per_position": "max_remask_per_pos",
        "revise.rounds": "max_post_steps",
        "revise.edits_end": not p["eos_early_stop"],
        "revise.forgets": True,
    }


def remdm(p: Params) -> Settings:
    revise = {"revise.number": "remdm_number", "revise.steps": "steps_per_block"}
    return {"decoder": "remdm", "select.number": p["gen_length"] // p["steps"]} | revise


def dmax(p: Params) -> Settings:
    return {
        "decoder": "dmax",
        "score.precision": "float64" if p.get("use_float64") else "float32",
        "select.tau": min(p["threshold"], 1),
        "revise.sure": "confidence_stop",
        "revise.likeliest": "top_k",
        "revise.released": True,
        "stop.turn_end": False,
    }


def multi_bd(p: Params) -> Settings:
    settings = {
        "select.tau": "accept_threshold",
        "schedule.size": "buffer_size",
        "schedule.tau_add": "add_block_threshold",
        "stop.turn_end": False,
    }
    if p["sampling_mode"] != "edit":
        tau_act = {"schedule.tau_act": "semi_complete_threshold"}
        return settings | tau_act | {"decoder": "multi_bd", "forbid_mask": True}
    return settings | {
        "decoder": "multi_bd_edit",
        "schedule.tau_act": 0.0,
        "revise.released": True,
        "revise.tau": "edit_threshold",
        "revise.rounds": "max_post_edit_steps",
        "revise.stable": p.get("token_stability_threshold", 0.0),
    }


def wedlm_blocks(p: Params) -> Settings:
    score = {"score": "tempered", "score.temperature": "temperature"}
    always = {"select.tau": 1, "select.strict": True}
    tau = {"select.tau": "confidence_threshold"} if p["confidence_threshold"] else always
    return {"decoder": "wedlm_blocks"} | FILLED | score | tau


DECODERS: dict[str, Settings | Callable[[Params], Settings]] = {
    "llada_vanilla": {"decoder": "vanilla"} | FILLED | STEPS,
    "fast_dllm_threshold": {"decoder": "fast_dllm"} | FILLED | TAU,
    "fast_dllm_prefix_cache": {"decoder": "fast_dllm_prefix"} | FILLED | TAU,
    "fast_dllm_dual_cache": {"decoder": "fast_dllm_dual"} | FILLED | TAU,
    "fast_dllm_pp": {
        "decoder": "fast_dllm_pp",
        "select.delta": "frechet_margin",
        "cache": "cache",
        "stop": "filled",
    },
    **dict.fromkeys(DREAM, dream),
    "fast_dllm_dream_threshold": {
        "decoder": "fast_dllm_dream",
        "select.inner.tau": "threshold",
        "select.steps": "steps",
    },
    **dict.fromkeys(DREAM_CACHED, fast_dllm_dream_cached),
    **dict.fromkeys((*PIPELINED, *BRANCHING), pipelined),
    "learn2pd_authors": learn2pd,
    "learn2pd_eotp_authors": learn2pd,
    "eotp_authors": {"decoder": "learn2pd_eotp", "select": "topk"} | STEPS,
    "eb_sampler": {"decoder": "eb_sampler", "select.gamma": "gamma"},
    "eb_confidence": eb_confidence,
    "dparallel": {"decoder": "dparallel"} | TAU,
    "localleap": localleap,
    "klass": klass,
    "klass_dream": klass,
    "dus": dus,
    "d3llm_multi_block": d3llm,
    "d3llm_kv": d3llm,
    "pc_sampler": pc_sampler,
    "slowfast": {
        "decoder": "slow_fast",
        "select.tau": "high_confidence_threshold",
        "select.reach": "cycle_len_confidence_threshold",
        "select.explores": "k_exploration_steps",
        "select.estimates": "cycle_length_stability_window",
        "select.spread": "cycle_length_stability_std_dev_threshold",
    },
    "prophet": prophet,
    "freecache_llada": {"decoder": "freecache"} | STEPS,
    "adablock_llada": {
        "decoder": "adablock",
        "score.precision": "float64",
        "select.tau": "threshold",
        "schedule.block": "init_block_length",
        "schedule.delimiters": "delimiter_ids",
        "schedule.tau": "delimiter_threshold",
        "cache": "cache",
        "stop": "filled",
    },
    "daedal_llada": {
        "decoder": "daedal",
        "score": "mask_last",
        "select.tau": "high_conf_threshold",
        "schedule.initial": "initial_gen_length",
        "schedule.factor": "expansion_factor",
        "schedule.eos_enough": "eos_confidence_threshold",
        "schedule.eos_expand": "expand_eos_confidence_threshold",
        "schedule.low": "low_conf_threshold",
        "schedule.eos_window": "eos_check_tokens",
    },
    "dkv_cache_decode_llada": {
        "decoder": "dkv_cache",
        "score.precision": "float64",
        "select.steps": "steps_per_block",
        "cache.every": "cache_reloading_step",
    },
    "dkv_cache_greedy_llada": {
        "decoder": "dkv_cache_greedy",
        "score.precision": "float64",
        "cache.every": "cache_reloading_step",
        "cache.window": "window_size",
    },
    **{f"dkv_cache_{cached}_dream": dkv_dream for cached in ("decoded", "prefill", "pd")},
    "dpad_llada": dpad,
    "sparse_dllm_llada": sparse_dllm,
    "sparse_dllm_dream": sparse_dllm,
    "dllm_cache_llada": dllm_cache,
    "dllm_cache_dream": dllm_cache,
    "d2cache_llada": d2cache,
    "d2cache_dream": d2cache,
    "fast_dllm_v2_generate": fast_dllm_v2,
    "fast_dllm_v2_batch_sample": fast_dllm_v2,
    "freedave_llada": freedave,
    "llada21_t2t": llada21,
    "joint_threshold": {
        "decoder": "llada21_joint",
        "score.penalty": "penalty_lambda",
        "select.tau": "threshold",
        "revise.tau": "edit_threshold",
        "revise.rounds": "max_post_edit_steps",
        "stop": "filled",
    },
    "llada2_block_refinement": block_refinement,
    "t2m_remask": t2m,
    "wino": {"decoder": "wino", "select.inner.tau": "threshold", "revise.tau": "threshold_back"},
    "remdm_llada": remdm,
    "remdm_loop": {
        "decoder": "remdm_loop",
        "select.number": "unmask_k",
        "revise.number": "unmask_k",
        "revise.loops": "loop_steps",
        "revise.start": "init_unmask_ratio",
    },
    "saber": {"decoder": "saber", "select.number": "n", "revise.number": "n"},
    "remedi_loop": {"decoder": "remedi", "revise.steps": "steps"},
    "dmax": dmax,
    "multi_bd": multi_bd,
    "wedlm_hf": wedlm_blocks,
    "wedlm_engine": {
        "decoder": "wedlm",
        "select.tau": "entropy_threshold",
        "select.penalty": "pos_penalty_factor",
        "schedule.window": "window",
        "schedule.overruns": True,
        "stop.turn_end": False,
    },
}


def decoder_of(case: Case, changes: Params = MappingProxyType({})) -> MaskedDecoder:
    """Return the decoder of a case, with other settings where there are `changes`."""
    params = case["params"] | {"method": case["method"], "nfe": case["nfe"]}
    block = params.get("block_length", params.get("block_size"))
    if block and "steps" in params:
        params["steps_per_block"] = steps_per_block(params)
    entry = DECODERS[case["method"]]
    chosen = entry(params) if callable(entry) else entry
    given = {"schedule.block": block} | chosen | changes
    settings = {key: params.get(v, v) if isinstance(v, str) else v for key, v in given.items()}
    if settings["schedule.block"] is None:
        del settings["schedule.block"]
    return composed(settings.pop("decoder"), settings)


ELSEWHERE = """
    adablock_llada sparse_dllm_llada sparse_dllm_dream dllm_cache_llada dllm_cache_dream dmax
    fast_dllm_v2_generate fast_dllm_v2_batch_sample freedave_llada multi_bd wedlm_hf wedlm_engine
"""
LOOPS = DECODERS.keys() - {*BRANCHING, *ELSEWHERE.split()}
"""Methods of which all that is recorded is compared in one way."""
