"""Decoders that revise reproduce the authors' code on the tiny golden checkpoint.

Of every recorded run, the tokens, the number of forwards and the canvas before each forward are
compared. The published loops leave the mask token in the distribution, so these decoders do too
(`forbid_mask` off): writing it leaves a position masked, or masks it again. Left out: runs in which
an exact tie, or a distance within float32 rounding, decided something.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Revise, Score, Scores, Select
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.cache.block import BlockCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.revise.drop import ConfidenceDrop
from dllm_bench.decoding.revise.edit import Edit
from dllm_bench.decoding.revise.keep_best import KeepBest
from dllm_bench.decoding.revise.remask import Remask
from dllm_bench.decoding.revise.remdm import ReMDM
from dllm_bench.decoding.revise.remdm_loop import ReMDMLoop
from dllm_bench.decoding.revise.wino import Wino
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.repeat_penalty import RepeatPenalty
from dllm_bench.decoding.select.accepted_mean import AcceptedMean
from dllm_bench.decoding.select.best import Best
from dllm_bench.decoding.select.capped import Capped
from dllm_bench.decoding.select.share import Share
from dllm_bench.decoding.select.threshold import Threshold
from dllm_bench.decoding.select.union import Union
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from tests.helpers import golden_dir, load_denoiser
from tests.tiers import covering

FOLDER = golden_dir() / "samplers"
ROUNDING = 1e-5  # decisions closer than this may differ by float32 rounding
DENSE = pytest.mark.parametrize(
    "cache", [NoCache("block_causal"), BlockCache()], ids=["none", "block"]
)


@lru_cache
def denoiser():
    return load_denoiser(golden_dir() / "llada")


def cases(method: str) -> list[dict]:
    """The recorded runs of a method; empty without the reference data."""
    path = FOLDER / f"{method}_cases.json"
    found = json.loads(path.read_text()) if path.exists() else []
    return [case for case in found if is_decided(case)]


def is_decided(case: dict) -> bool:
    """Whether rounding or a tie decides nothing."""
    return not case["tie_dependent"] and min(case["min_margin"].values()) >= ROUNDING


def absent(found: list[dict]) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not found, reason=f"no golden traces at {FOLDER}")


def name(case: dict) -> str:
    settings = "-".join(str(value) for value in case["params"].values())
    return f"p{case['prompt_index']}-{settings}"


def replay(case: dict, decoder: MaskedDecoder) -> Generation:
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    return decoder.generate(denoiser(), request)


def lives(generation: Generation) -> Iterator[tuple[int, int, int, int]]:
    """(position behind the prompt, token, forward that wrote it, forward that revised it)."""
    never = len(generation.trace)
    for position, (token, born) in enumerate(zip(generation.ids, generation.born, strict=True)):
        if born >= 0:
            yield position, token, born, never
    for index, forward in enumerate(generation.trace.forwards):
        for change in forward.changes:
            yield change.position, change.before, change.born, index


def canvases(generation: Generation, case: dict) -> list[list[int]]:
    """The canvas before every forward and after the last, rebuilt from the trace alone."""
    mask, prompt = denoiser().special.mask, case["prompt"]
    made = [[*prompt, *[mask] * len(generation.ids)] for _ in range(len(generation.trace) + 1)]
    for position, token, born, revised in lives(generation):
        for step in range(born + 1, revised + 1):
            made[step][len(prompt) + position] = token
    return made


def check(case: dict, decoder: MaskedDecoder, last: int = 0) -> Generation:
    """Replay `case`; compare tokens, forwards and canvases, or their `last` positions."""
    generation = replay(case, decoder)
    made = canvases(generation, case)
    ours = [canvas[: len(theirs)] for canvas, theirs in zip(made, case["states"], strict=False)]
    assert [canvas[-last:] for canvas in ours] == [canvas[-last:] for canvas in case["states"]]
    assert len(generation.trace) == case["nfe"]
    masks = [denoiser().special.mask] * len(case["output"])  # blocks that were never opened
    assert [*generation.ids, *masks][: len(case["output"])] == case["output"]
    assert made[-1][len(case["prompt"]) :] == list(generation.ids)
    return generation


def llada21(params: dict, revise: Edit, cache: Cache) -> MaskedDecoder:
    return MaskedDecoder(
        Confidence(),
        Union(Threshold(params["threshold"], strict=True), Best(params["num_to_transfer"])),
        Blocks(params["block_length"], sees_future=False, absolute=True, whole=True),
        cache,
        stop=Eos() if params.get("eos_early_stop") else Filled(),
        revise=revise,
        forbid_mask=False,
    )


def blocks(params: dict, select: Select, revise: Revise) -> MaskedDecoder:
    """Blocks from the end of the prompt, full attention."""
    schedule = Blocks(params.get("block_length"))
    return MaskedDecoder(
        Confidence(), select, schedule, NoCache(), revise=revise, forbid_mask=False
    )


T2T = cases("llada21_t2t")
JOINT = cases("joint_threshold")
REFINED = cases("llada2_block_refinement")
T2M = cases("t2m_remask")
WINO = cases("wino")
REMDM = cases("remdm_llada")
REMDM_LOOP = cases("remdm_loop")
SABER = cases("saber")
REMEDI = cases("remedi_loop")


@absent(T2T)
@DENSE
@pytest.mark.parametrize("case", covering(6, T2T, often=2), ids=name)
def test_llada21_generate(case: dict, cache: Cache) -> None:
    params = case["params"]
    revise = Edit(tau=params["editing_threshold"], rounds=params["max_post_steps"])
    check(case, llada21(params, revise, cache))


@absent(JOINT)
@DENSE
@pytest.mark.parametrize("case", covering(6, JOINT, often=2), ids=name)
def test_joint_threshold(case: dict, cache: Cache) -> None:
    """SGLang's form; the forward that stores a finished block's K/V is not part of the traces."""
    params = case["params"]
    revise = Edit(
        tau=params["edit_threshold"], rounds=params["max_post_edit_steps"], ignores_last=True
    )
    decoder = llada21(params | {"num_to_transfer": 1}, revise, cache)
    penalty = params["penalty_lambda"]
    score = RepeatPenalty(decoder.score, penalty) if penalty else decoder.score
    check(case, replace(decoder, score=score))


@absent(REFINED)
@DENSE
@pytest.mark.parametrize("case", covering(3, REFINED), ids=name)
def test_block_refinement(case: dict, cache: Cache) -> None:
    """diffusers' form; editing from 0 is none there, and one more forward of edits is made."""
    params = case["params"]
    steps = min(params["num_inference_steps"], params["gen_length"] // params["minimal_topk"])
    revise = Edit(
        tau=params["editing_threshold"] or 1, rounds=params["max_post_steps"] + 1, steps=steps
    )
    decoder = llada21(params | {"num_to_transfer": 1}, revise, cache)
    select = Union(Share(steps, idle=True), Threshold(params["threshold"], strict=True))
    stop = Eos("write", turn_end=False) if params["eos_early_stop"] else Filled()
    schedule = replace(decoder.schedule, sees_rest=False)
    check(case, replace(decoder, select=select, schedule=schedule, stop=stop))


@absent(T2M)
@pytest.mark.parametrize("case", covering(6, T2M, often=2), ids=name)
def test_t2m_remask(case: dict) -> None:
    """Keys and values of earlier blocks are those of the block's last forward, as released; the
    recorded canvases hold the tokens of that forward there.
    """
    params = case["params"]
    judge = {"low_prob": "probability", "t2t_remask": "candidate", "logit_diff": "drop"}
    revise = Remask(
        judge=judge[params["remask_strategy"]],
        tau=params["remask_threshold"],
        ratio=params["max_remask_ratio"],
        per_position=params["max_remask_per_pos"],
        rounds=params["max_post_steps"],
        edits_end=not params.get("eos_early_stop"),
        forgets=True,
    )
    check(case, llada21(params, revise, BlockCache(renews=False)), last=params["block_length"])


@absent(WINO)
@pytest.mark.parametrize("case", covering(6, WINO, often=2), ids=name)
def test_wino(case: dict) -> None:
    params = case["params"]
    select = Capped(Threshold(params["threshold"], strict=True))
    decoder = blocks(params, select, Wino(tau=params["threshold_back"]))
    generation = check(case, replace(decoder, score=Confidence(precision="float64")))
    assert {forward.fed for forward in generation.trace.forwards} == {case["forward_rows"]}


@dataclass(frozen=True)
class GlobalGumbel(Score):
    """ReMDM's sampler: argmax of p / (eps - ln(u + eps)), from torch's global generator."""

    inner: Confidence
    prompt_len: int

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        probability_KWV = logits_KWV.double().softmax(-1)
        shape = (1, state.length, logits_KWV.shape[-1])
        uniform = window.of(torch.rand(shape, dtype=torch.float64))
        ids_KW = (probability_KWV / (1e-10 - (uniform + 1e-10).log())).argmax(-1)
        return self.inner.of(logits_KWV, ids_KW, state)


@absent(REMDM)
@pytest.mark.parametrize("case", covering(6, REMDM, often=2), ids=name)
def test_remdm_llada(case: dict) -> None:
    params = case["params"]
    number = params["gen_length"] // params["steps"]
    revise = ReMDM(
        number=params["remdm_number"],
        steps=params["steps"] * params["block_length"] // params["gen_length"],
    )
    decoder = blocks(params, Best(number, refills=True), revise)
    score: Score = Confidence(precision="float64")
    if params["seed"] is not None:
        torch.manual_seed(params["seed"])
        score = GlobalGumbel(score, len(case["prompt"]))
    check(case, replace(decoder, score=score, stop=Eos()))


@absent(REMDM_LOOP)
@pytest.mark.parametrize("case", covering(6, REMDM_LOOP, often=2), ids=name)
def test_remdm_loop(case: dict) -> None:
    params = case["params"]
    revise = ReMDMLoop(
        number=params["unmask_k"], loops=params["loop_steps"], start=params["init_unmask_ratio"]
    )
    check(case, blocks(params, Best(params["unmask_k"]), revise))


@absent(SABER)
@pytest.mark.parametrize("case", covering(6, SABER, often=2), ids=name)
def test_saber(case: dict) -> None:
    n = case["params"]["n"]
    check(case, blocks(case["params"], AcceptedMean(n), ConfidenceDrop(number=n)))


@absent(REMEDI)
@DENSE
@pytest.mark.parametrize("case", covering(6, REMEDI, often=2), ids=name)
def test_remedi_loop(case: dict, cache: Cache) -> None:
    """The forwards that store the prompt and a finished block are part of the next one here."""
    params = case["params"]
    revise = KeepBest(steps=params["steps"])
    schedule = Blocks(params["block_length"], sees_future=False)
    decoder = replace(blocks(params, Threshold(0.0), revise), schedule=schedule, cache=cache)
    states = zip(case["states"], case["calls"], strict=True)
    steps = [state for state, call in states if call == "step"]
    check(case | {"states": steps, "nfe": len(steps)}, decoder)
