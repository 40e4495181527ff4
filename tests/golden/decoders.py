"""The decoder of every recorded method that the masked loop replays, with the numbers of a run.

`decoders.yaml` names decoders of `conf/decoder` and their settings. A value that names a parameter
of the run or one of `DERIVED` stands for it; settings under `if …` or `unless …` apply by such a
value. The run's block length is the schedule's unless `schedule.block` is given (null: the schedule
has none). The mask token may be written, as published.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.models.filters import FilterMetadata
from dllm_bench.training.filters import save_filter
from tests.golden.cases import GOLDEN, Case, composed

Params = Mapping[str, Any]
Settings = dict[str, Any]

PIPELINED = ("d2f_dream", "diffucoder_d2f", "lopa_dream_single_branch")
BRANCHING = ("lopa_dream", "lopa_dream_one_block", "lopa_coder")
DECODERS: dict[str, Settings] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
ELSEWHERE = """
    adablock_llada sparse_dllm_llada sparse_dllm_dream dllm_cache_llada dllm_cache_dream dmax
    fast_dllm_v2_generate fast_dllm_v2_batch_sample freedave_llada multi_bd wedlm_hf wedlm_engine
"""
METHODS = DECODERS.keys() - {*BRANCHING, *ELSEWHERE.split()}
"""Methods of which all that is recorded is compared in one way."""

FILTERS = tempfile.TemporaryDirectory()  # removed at exit
NEVER = 10_000  # a refresh interval that means none
COMMITS = {"all": "all", "max_conf": "most_probable", "min_kl": "most_stable"}
JUDGES = {"low_prob": "probability", "t2t_remask": "candidate", "logit_diff": "drop"}
SCORES = {"maskgit_plus": "confidence", "topk_margin": "margin", "entropy": "neg_entropy"}
RANKINGS = {"default": "confidence", "neg_entropy": "neg_entropy", "margin": "margin"}


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


def steps_per_block(params: Params) -> int:
    """Return the steps that a schedule of the whole generation leaves for a block."""
    block = params.get("block_length", params.get("block_size"))
    return int(params["steps"] * block // params["gen_length"])


DERIVED: dict[str, Callable[[Params], Any]] = {
    "steps_per_block": steps_per_block,
    "tokens_per_step": lambda p: p["gen_length"] // p["steps"],
    "refinement_steps": lambda p: min(
        p["num_inference_steps"], p["gen_length"] // p["minimal_topk"]
    ),
    "one_more_step": lambda p: p["max_post_steps"] + 1,
    "score_of_alg": lambda p: SCORES[p["alg"]],
    "ranking": lambda p: RANKINGS[p.get("sampling_strategy", "default")],
    "commits": lambda p: COMMITS[p.get("unmask_strategy", "all")],
    "judge": lambda p: JUDGES[p["remask_strategy"]],
    "precision": lambda p: "float64" if p.get("use_float64") else "float32",
    "attention": lambda p: "full" if p.get("use_full_attention") else "block_causal",
    "lookaheads": lambda p: p["branching_factor"] if p["branching_factor"] > 1 else 0,
    "base_wins": lambda p: bool(p.get("verification_force_base_winner")),
    "filter": lambda p: str(filters() / f"block{p['block_length']}"),
    "counts": lambda p: str(GOLDEN / "samplers" / "pc_sampler_baseline.json"),
    "pinned": lambda p: [[int(at), token] for at, token in (p["constraints"] or {}).items()],
    "renewal": lambda p: p["refresh_interval"] if p["refresh_interval"] < NEVER else None,
    "cache_steps_or_1": lambda p: p["cache_steps"] or 1,
    "keeps_prompt": lambda p: p["cache_type"] != "decoded",
    "kernel": lambda p: p["kernel_size"] or 1,
    "editing_threshold_or_1": lambda p: p["editing_threshold"] or 1,
    "threshold_up_to_1": lambda p: min(p["threshold"], 1),
    "stability": lambda p: p.get("token_stability_threshold", 0.0),
    "is_klass": lambda p: p["method"] == "klass",
    "is_linear": lambda p: p["kind"] == "linear_position",
    "is_unshifted": lambda p: p["shift_type"] == "un",
    "is_shifted": lambda p: p["shift_type"] != "un",
    "is_dual": lambda p: p["cache"] == "dual",
    "remasks": lambda p: p["remasking"] != "none",
    "edits": lambda p: p["sampling_mode"] == "edit",
}


def value_of(name: str, params: Params, otherwise: Any = None) -> Any:
    return DERIVED[name](params) if name in DERIVED else params.get(name, otherwise)


def settings_of(entry: Settings, params: Params) -> Settings:
    """Return an entry's settings for the parameters of a run."""
    found = Settings()
    for key, value in entry.items():
        word, _, name = key.partition(" ")
        if not name:
            found[key] = value_of(value, params, value) if isinstance(value, str) else value
        elif bool(value_of(name, params)) == (word == "if"):
            found |= settings_of(value, params)
    return found


def decoder_of(case: Case, changes: Params = MappingProxyType({})) -> MaskedDecoder:
    """Return the decoder of a case, with other settings where there are `changes`."""
    params = case["params"] | {"method": case["method"], "nfe": case["nfe"]}
    given = {"schedule.block": params.get("block_length", params.get("block_size"))}
    settings = given | settings_of(DECODERS[case["method"]] | changes, params)
    if settings["schedule.block"] is None:
        del settings["schedule.block"]
    return composed(settings.pop("decoder"), settings)
