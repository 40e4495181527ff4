"""Adaptive samplers reproduce the authors' code on the tiny golden checkpoints, forward by forward.

Every recorded case is replayed by the decoder of its yaml with the case's numbers and the mask
token left in, as published: output ids, number of forwards, and the canvas that each forward saw.
"""

from __future__ import annotations

from typing import Any

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.decoding.masked import MaskedDecoder
from tests.golden.cases import (
    GOLDEN,
    SCORES,
    Case,
    Settings,
    agreement,
    canvases_of,
    cases,
    composed,
    denoiser,
    each,
    request,
    steps_per_block,
    takes_more_than_masked,
    with_end,
)
from tests.helpers import Watched

NEVER = 10_000  # a refresh interval that means none
COMMITS = {"all": "all", "max_conf": "most_probable", "min_kl": "most_stable"}
Chosen = tuple[str, dict[str, Any]]  # a decoder of conf/decoder, and its settings


def eb_sampler(p: Settings) -> Chosen:
    return "eb_sampler", {"select.gamma": p["gamma"]}


def eb_confidence(p: Settings) -> Chosen:
    return "eb_sampler_blocks", {
        "score@inner": SCORES[p["alg"]],
        "select.gamma": p["gamma"],
        "select.least": p["num_transfer_tokens"],
        "schedule.block": p["block_length"],
    }


def dparallel(p: Settings) -> Chosen:
    return "dparallel", {"select.tau": p["threshold"], "schedule.block": p["block_length"]}


def localleap(p: Settings) -> Chosen:
    stop = {"stop": "eos", "stop.turn_end": False} if p.get("early_stop") else {}
    return "local_leap", stop | {
        "select.tau": p["threshold"],
        "select.relaxed": p["relaxed_threshold"],
        "select.radius": p["radius"],
        "schedule.block": p["block_length"],
    }


def stable(p: Settings) -> dict[str, Any]:
    return {
        "score.length": p["kl_history_length"],
        "select.tau": p["conf_threshold"],
        "select.eps": p["kl_threshold"],
        "select.commits": COMMITS[p.get("unmask_strategy", "all")],
    }


def klass(p: Settings) -> Chosen:
    steps = {"select.fallback.steps": steps_per_block(p), "schedule.block": p["block_length"]}
    return "klass", stable(p) | steps


def klass_dream(p: Settings) -> Chosen:
    return "klass_dream", stable(p) | {"stop": "budget", "stop.forwards": p["steps"]}


def dus(p: Settings) -> Chosen:
    """Positions masked again stay masked: a budget of forwards leaves them so."""
    pattern = {
        "select.kind": p["scheduler"],
        "select.base": p["base"],
        "select.skip": p["base_skip"],
    }
    if p["remasking"] == "none":
        return "dus", pattern | {"schedule.block": p["block_length"]}
    return "dus", pattern | {
        "score.precision": "float64",
        "select.least": p["confidence_threshold"],
        "select.block": p["block_length"],
        "schedule": "full",
        "stop": "budget",
        "stop.forwards": p["nfe"],
    }


def d3llm_multi_block(p: Settings) -> Chosen:
    """Without the early stop nothing but the length ends a run."""
    numbers = {
        "select.tau": p["threshold"],
        "schedule.block": p["block_size"],
        "schedule.tau_add": p["block_add_threshold"],
    }
    if p["early_stop"]:
        return "d3llm_early_stop", numbers
    return "d3llm", numbers | {"stop": "filled"}


def d3llm_kv(p: Settings) -> Chosen:
    every = p["refresh_interval"] if p["refresh_interval"] < NEVER else None
    cache = {"cache": "delayed", "cache.delay": p["cache_delay_iter"], "cache.every": every}
    name, numbers = d3llm_multi_block(p)
    return {"d3llm": "d3llm_cache"}.get(name, name), numbers | cache


def pc_sampler(p: Settings) -> Chosen:
    return {"pc_sampler": "pc_sampler", "linear_position": "pc_sampler_linear"}[p["kind"]], {
        "score.counts.source": str(GOLDEN / "samplers" / "pc_sampler_baseline.json"),
        "score.decay": p["lambd"],
        "score.cap": p["alpha"],
        "select.steps": steps_per_block(p),
        "select.ties": "block",
        "schedule.block": p["block_length"],
    }


def slowfast(p: Settings) -> Chosen:
    return "slow_fast", {
        "select.tau": p["high_confidence_threshold"],
        "select.reach": p["cycle_len_confidence_threshold"],
        "select.explores": p["k_exploration_steps"],
        "select.estimates": p["cycle_length_stability_window"],
        "select.spread": p["cycle_length_stability_std_dev_threshold"],
        "schedule.block": p["block_length"],
    }


def prophet(p: Settings) -> Chosen:
    return "prophet", {
        "score.answer": p["answer_offset"],
        "select.inner.steps": steps_per_block(p),
        "select.block": p["block_length"],
        "select.early": p["early"],
        "select.mid": p["mid"],
        "select.late": p["late"],
        "select.idle": True,
        "select.pinned": [[int(at), token] for at, token in (p["constraints"] or {}).items()],
    }


DECODERS = {
    decoder.__name__: decoder
    for decoder in (
        eb_sampler,
        eb_confidence,
        dparallel,
        localleap,
        klass,
        klass_dream,
        dus,
        d3llm_multi_block,
        d3llm_kv,
        pc_sampler,
        slowfast,
        prophet,
    )
}
CASES = [case for method in DECODERS for case in cases(f"samplers/{method}_cases.json")]


def decoder_of(case: Case) -> MaskedDecoder:
    return composed(*DECODERS[case["method"]](case["params"] | {"nfe": case["nfe"]}))


def generate(
    case: Case, decoder: MaskedDecoder
) -> tuple[Generation, SpecialTokens, list[list[int]]]:
    """Return what the decoder makes of the case, the special tokens, with the end token it names,
    and the canvas of every forward."""
    folder = case["checkpoint"].removeprefix("golden/")
    eos = case["params"].get("eos_id", denoiser(folder).special.eos)
    model = Watched(with_end(folder, eos))
    return decoder.generate(model, request(case)), model.special, canvases_of(model)


@each(CASES)
def test_sampler(case: Case) -> None:
    """A run that never ends there is refused here."""
    if case["status"] == "runaway":
        with pytest.raises(DllmBenchError, match="predicts the mask token.*forbid_mask=true"):
            generate(case, decoder_of(case))
        return
    with agreement(case, lambda: overwrites(case)):
        check(case)


def overwrites(case: Case) -> str | None:
    """Why a case of KLASS differs: its fallback takes its step's share of fewer masks."""
    share = case["params"]["block_length"] // steps_per_block(case["params"])
    return (
        takes_more_than_masked(case, decoder_of(case), share) if case["method"] == "klass" else None
    )


@each([case for case in CASES if case["method"] == "pc_sampler" and case["tie_dependent"]])
def test_a_tie_of_pc_sampler_goes_to_another_position_by_the_lower_one(case: Case) -> None:
    name, settings = DECODERS["pc_sampler"](case["params"])
    lower = composed(name, settings | {"select.ties": "lower"})
    assert generate(case, lower)[2] != case["states"]


def check(case: Case) -> None:
    generation, special, states = generate(case, decoder_of(case))
    behind = case["params"]["gen_length"] - len(generation.ids)  # in blocks that were never opened
    published = useful_states(case)
    assert len(generation.trace) == len(published)
    # SlowFast feeds a shorter canvas in its fast phase, a cache the end of it
    fed = [
        s[-len(p) :] if "calls" in case else s[: len(p)]
        for s, p in zip(states, published, strict=True)
    ]
    assert fed == published
    assert list(generation.ids) + [special.eos] * behind == case["output"]
    if "calls" in case:
        plans = [(forward.fed, forward.cached) for forward in generation.trace.forwards]
        assert plans == [(c["len"], c["use_cache"] * c["cache_len"]) for c in case["calls"]]


def useful_states(case: Case) -> list[list[int]]:
    """Return the canvas of every forward; those of SlowFast over a full block are not made here."""
    made = [case["method"] != "slowfast" or bool(step["filled"]) for step in case["steps"]]
    return [state for state, was_made in zip(case["states"], made, strict=True) if was_made]
