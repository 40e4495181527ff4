"""Decoders that revise reproduce the authors' code on the tiny golden checkpoint.

Of every recorded run, the tokens, the number of forwards and the canvas before each forward are
compared. The published loops leave the mask token in the distribution, so these decoders do too
(`forbid_mask` off): writing it leaves a position masked, or masks it again. Those with an exact
cache are also replayed without it. Guards of MultiBD's serving engine (allocated positions, an
automatic limit of forwards) end most of its recorded requests while blocks are open; these are
compared up to there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.common import Confidence
from tests.golden.cases import (
    Case,
    Proof,
    Settings,
    agreement,
    canvases_of,
    composed,
    denoiser,
    replayed,
    request,
    steps_per_block,
    takes_more_than_masked,
    with_end,
)
from tests.helpers import DEVICE, Watched

DENSE: dict[str, dict[str, Any]] = {
    "conf": {},
    "none": {"cache": "none", "cache.attention": "block_causal"},
}
WITH_AND_WITHOUT_CACHE = pytest.mark.parametrize("cache", DENSE)


def lives(generation: Generation) -> Iterator[tuple[int, int, int, int]]:
    """(position behind the prompt, token, forward that wrote it, forward that revised it)."""
    never = len(generation.trace)
    for position, (token, born) in enumerate(zip(generation.ids, generation.born, strict=True)):
        if born >= 0:
            yield position, token, born, never
    for index, forward in enumerate(generation.trace.forwards):
        for change in forward.changes:
            yield change.position, change.before, change.born, index


def canvases(generation: Generation, case: Case) -> list[list[int]]:
    """Return the canvas before every forward and after the last, rebuilt from the trace alone."""
    mask, prompt = denoiser("llada").special.mask, case["prompt"]
    made = [[*prompt, *[mask] * len(generation.ids)] for _ in range(len(generation.trace) + 1)]
    for position, token, born, revised in lives(generation):
        for step in range(born + 1, revised + 1):
            made[step][len(prompt) + position] = token
    return made


def check(case: Case, decoder: MaskedDecoder, last: int = 0, proof: Proof = lambda: None) -> None:
    """Replay `case`; compare tokens, forwards and canvases, or their `last` positions."""
    with agreement(case, proof):
        generation = decoder.generate(denoiser("llada"), request(case))
        made = canvases(generation, case)
        ours = [canvas[: len(theirs)] for canvas, theirs in zip(made, case["states"], strict=False)]
        assert [canvas[-last:] for canvas in ours] == [canvas[-last:] for canvas in case["states"]]
        assert len(generation.trace) == case["nfe"]
        masks = [denoiser("llada").special.mask] * len(case["output"])  # never opened blocks
        assert [*generation.ids, *masks][: len(case["output"])] == case["output"]
        assert made[-1][len(case["prompt"]) :] == list(generation.ids)
        rows = {forward.fed for forward in generation.trace.forwards}
        assert rows == {case.get("forward_rows")} or "forward_rows" not in case


def until_filled(params: Settings, key: str = "eos_early_stop") -> dict[str, Any]:
    """Return the stop of a run that an end token does not end."""
    return {} if params.get(key) else {"stop": "filled"}


@WITH_AND_WITHOUT_CACHE
@replayed("samplers/llada21_t2t_cases.json")
def test_llada21_generate(case: Case, cache: str) -> None:
    params = case["params"]
    settings = {
        "select.first.tau": params["threshold"],
        "select.second.number": params["num_to_transfer"],
        "schedule.block": params["block_length"],
        "revise.tau": params["editing_threshold"],
        "revise.rounds": params["max_post_steps"],
    }
    check(case, composed("llada21", settings | until_filled(params) | DENSE[cache]))


@WITH_AND_WITHOUT_CACHE
@replayed("samplers/joint_threshold_cases.json")
def test_joint_threshold(case: Case, cache: str) -> None:
    """SGLang's form; the forward that stores a finished block's K/V is not part of the traces."""
    params = case["params"]
    settings = {
        "score.penalty": params["penalty_lambda"],
        "select.tau": params["threshold"],
        "schedule.block": params["block_length"],
        "revise.tau": params["edit_threshold"],
        "revise.rounds": params["max_post_edit_steps"],
    }
    check(case, composed("llada21_joint", settings | until_filled(params) | DENSE[cache]))


@WITH_AND_WITHOUT_CACHE
@replayed("samplers/llada2_block_refinement_cases.json")
def test_block_refinement(case: Case, cache: str) -> None:
    """diffusers' form; editing from 0 is none there, and one more forward of edits is made."""
    params = case["params"]
    steps = min(params["num_inference_steps"], params["gen_length"] // params["minimal_topk"])
    settings = {
        "select.first.steps": steps,
        "select.first.idle": True,
        "select.second.tau": params["threshold"],
        "schedule.block": params["block_length"],
        "revise.tau": params["editing_threshold"] or 1,
        "revise.rounds": params["max_post_steps"] + 1,
        "revise.steps": steps,
    }
    check(case, composed("llada21_refine", settings | until_filled(params) | DENSE[cache]))


@replayed("new2026/dmax_cases.json")
def test_dmax(case: Case) -> None:
    """The forward over the prompt, which decodes nothing there, is not made here, and end tokens
    stay in the text.
    """
    params, prompt = case["params"], case["prompt"]
    settings = {
        "score.precision": "float64" if params.get("use_float64") else "float32",
        "select.tau": min(params["threshold"], 1),
        "schedule.block": params["block_length"],
        "revise.sure": params["confidence_stop"],
        "revise.likeliest": params["top_k"],
        "revise.released": True,
        "stop.turn_end": False,
    }
    model = with_end("new2026/ckpt/dmax", params["eos_id"])
    watched = Watched(model)
    generation = composed("dmax", settings).generate(watched, request(case))
    canvas = [*prompt, *[model.special.mask] * (len(watched.canvases[0][0]) - len(prompt))]
    calls = zip(case["calls"][1:], case["steps"], watched.canvases, watched.plans, strict=True)
    with agreement(case):
        for index, (call, step, before_KL, plan) in enumerate(calls):
            assert before_KL[0].tolist() == canvas
            assert plan.feed == (call["start"] * (index > 0), call["start"] + call["rows"])
            for at, before, after in step["changed"]:
                assert canvas[at] == before
                canvas[at] = after
        assert list(generation.ids) == canvas[len(prompt) :][: len(generation.ids)]
        assert [token for token in generation.ids if token != params["eos_id"]] == case["output"]


@replayed("samplers/t2m_remask_cases.json")
def test_t2m_remask(case: Case) -> None:
    """Keys and values of earlier blocks are those of the block's last forward, as released; the
    recorded canvases hold the tokens of that forward there.
    """
    params = case["params"]
    judge = {"low_prob": "probability", "t2t_remask": "candidate", "logit_diff": "drop"}
    settings = {
        "select.first.tau": params["threshold"],
        "select.second.number": params["num_to_transfer"],
        "schedule.block": params["block_length"],
        "cache.renews": False,
        "revise.judge": judge[params["remask_strategy"]],
        "revise.tau": params["remask_threshold"],
        "revise.ratio": params["max_remask_ratio"],
        "revise.per_position": params["max_remask_per_pos"],
        "revise.rounds": params["max_post_steps"],
        "revise.edits_end": not params.get("eos_early_stop"),
        "revise.forgets": True,
    }
    check(case, composed("t2m", settings | until_filled(params)), last=params["block_length"])


@replayed("samplers/wino_cases.json")
def test_wino(case: Case) -> None:
    params = case["params"]
    settings = {
        "select.inner.tau": params["threshold"],
        "schedule.block": params["block_length"],
        "revise.tau": params["threshold_back"],
    }
    check(case, composed("wino", settings))


@dataclass(frozen=True)
class GlobalGumbel(Score):
    """ReMDM's sampler: argmax of p / (eps - ln(u + eps)), from torch's global generator."""

    inner: Confidence

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        probability_KWV = logits_KWV.double().softmax(-1)
        shape = (1, state.length, logits_KWV.shape[-1])
        uniform = window.of(torch.rand(shape, dtype=torch.float64).to(DEVICE))
        ids_KW = (probability_KWV / (1e-10 - (uniform + 1e-10).log())).argmax(-1)
        return self.inner.of(logits_KWV, ids_KW, state)


@replayed("samplers/remdm_llada_cases.json")
def test_remdm_llada(case: Case) -> None:
    """The released draw is replayed; without a seed it is the most probable token."""
    params = case["params"]
    settings = {
        "select.number": params["gen_length"] // params["steps"],
        "schedule.block": params["block_length"],
        "revise.number": params["remdm_number"],
        "revise.steps": steps_per_block(params),
    }
    score: Score = Confidence("float64")
    if params["seed"] is not None:
        torch.manual_seed(params["seed"])
        score = GlobalGumbel(Confidence("float64"))
    check(case, replace(composed("remdm", settings), score=score))


@replayed("samplers/remdm_loop_cases.json")
def test_remdm_loop(case: Case) -> None:
    params = case["params"]
    settings = {
        "select.number": params["unmask_k"],
        "revise.number": params["unmask_k"],
        "revise.loops": params["loop_steps"],
        "revise.start": params["init_unmask_ratio"],
    }
    check(case, composed("remdm_loop", settings))


@replayed("samplers/saber_cases.json")
def test_saber(case: Case) -> None:
    """Where fewer than n are masked, the released code takes n all the same."""
    number, block = case["params"]["n"], case["params"]["block_length"]
    settings = {"select.number": number, "schedule.block": block, "revise.number": number}
    decoder = composed("saber", settings)
    check(case, decoder, proof=lambda: takes_more_than_masked(case, decoder, number))


@WITH_AND_WITHOUT_CACHE
@replayed("samplers/remedi_loop_cases.json")
def test_remedi_loop(case: Case, cache: str) -> None:
    """The forwards that store the prompt and a finished block are part of the next one here."""
    params = case["params"]
    settings = {"schedule.block": params["block_length"], "revise.steps": params["steps"]}
    states = zip(case["states"], case["calls"], strict=True)
    steps = [state for state, call in states if call == "step"]
    decoder = composed("remedi", settings | DENSE[cache])
    check(case | {"states": steps, "nfe": len(steps)}, decoder)


# --- MultiBD's engine, until a serving guard ends the request -------------------------------------


def changes(before: list[int], after: list[int]) -> list[list[int]]:
    """Positions whose tokens differ, and the tokens afterwards."""
    pairs = enumerate(zip(before, after, strict=False))
    return [[place, token] for place, (old, token) in pairs if old != token]


@replayed("new2026/multi_bd_cases.json")
def test_multi_bd(case: Case) -> None:
    params, prompt = case["params"], case["prompt"]
    block = params["block_size"]
    edits = params["sampling_mode"] == "edit"
    settings = {
        "forbid_mask": not edits,
        "select.tau": params["accept_threshold"],
        "schedule.block": block,
        "schedule.size": params["buffer_size"],
        "schedule.tau_add": params["add_block_threshold"],
        "schedule.tau_act": 0.0 if edits else params["semi_complete_threshold"],
        "stop.turn_end": False,
    }
    if edits:
        settings["revise.released"] = True
        settings["revise.tau"] = params["edit_threshold"]
        settings["revise.rounds"] = params["max_post_edit_steps"]
        settings["revise.stable"] = params.get("token_stability_threshold", 0.0)
    watched = Watched(with_end("llada", params.get("eos_id", -1)))
    length = len(case["canvas"]) - len(prompt) + 4 * block
    generation = composed("multi_bd_edit" if edits else "multi_bd", settings).generate(
        watched, Request("golden", tuple(prompt), length)
    )
    canvases = [*canvases_of(watched), [*prompt, *generation.ids]]
    ours = [
        (plan.feed[1], changes(*pair))
        for plan, pair in zip(watched.plans, pairwise(canvases), strict=True)
    ]
    rounds = zip(case["calls"], case["steps"], strict=True)
    wanted = [
        (
            call["start"] + call["valid"],
            sorted([*step["filled"], *([at, new] for at, _, new in step["overwritten"])]),
        )
        for call, step in rounds
        if any(state == "ACTIVE" for _, state in call["blocks"])
    ]
    with agreement(case):
        assert ours[: len(wanted)] == wanted
        if case["reason"] == "eos_token_generated":
            assert len(ours) == len(wanted)
            ids = list(generation.ids)
            assert ids[: ids.index(params["eos_id"])] == case["output"]
