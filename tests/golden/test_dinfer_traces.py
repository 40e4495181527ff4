"""Every recorded run of dInfer's decoders, replayed on the tiny LLaDA checkpoint.

Each forward commits the same tokens at the same positions and feeds as many; forwards over a block
without masks are counted (`idle_forwards`) and not made. Runaway runs are replayed up to the
forward after which theirs commits nothing for ever; there the loop raises. The decoder classes are
also called on explicit logits: near and exact ties, mask tokens, runs of masks.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState, Memo
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import AnyOf, Blocks, Budget
from dllm_bench.methods.history import CREDIT as CREDIT_VALUES
from dllm_bench.methods.history import IDS, Credit
from dllm_bench.metrics.sample_stats import count_sample, idle_forwards
from tests.golden.cases import (
    GOLDEN,
    ROUNDING,
    Case,
    agreement,
    cases,
    composed,
    each,
    model_of,
    request,
)
from tests.helpers import DEVICE, noting

FIRST = torch.tensor([0], device=DEVICE)  # branch
CREDIT = {"credit_alpha": "score.alpha", "decay_beta": "score.beta", "boost_gamma": "score.gamma"}
METHODS = ("threshold", "credit", "hierarchy")
LOW = 0.4  # dInfer's default
RELEASED = (4, 8)  # dInfer's unrolling
OFF = 1.0  # no probability is above it


def rule(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the decoder, and what scores and selects; a null switches that threshold off."""
    tau, name = case["threshold"], case.get("decoder", "hierarchy").lower()
    if name.startswith("hierarchy"):
        low = case.get("low_threshold", LOW)
        low = 0.0 if low is None else low
        return "hierarchy", {"select.tau": OFF if tau is None else tau, "select.low": low}
    select = {"select.tau": case.get("iter_threshold") or tau}
    if name.startswith("credit"):
        credit = {setting: case[key] for key, setting in CREDIT.items() if key in case}
        return "credit_dinfer", select | credit
    return "dinfer_vicinity" if "warmup_steps" in case else "dinfer", select


def cache(run: Case) -> dict[str, Any]:
    """Return the settings of the cache."""
    if "warmup_steps" in run:
        return {
            "cache": "vicinity",
            "cache.before": run["prefix_look"],
            "cache.after": run["after_look"],
            "cache.warmup": run["warmup_steps"],
            "cache.renews_twice": True,
        }
    every = run["cache_update_freq"]
    renewal = {} if every is None else {"cache.every": every, "cache.clock": "request"}
    return {"cache": run["cache"]} | renewal


def decoder(run: Case) -> MaskedDecoder:
    name, settings = rule(run)
    schedule = {"schedule.block": run["block_length"]}
    schedule["schedule.absolute"] = run.get("start_block_align", False)
    return composed(name, {"stop": "eos"} | settings | schedule | cache(run))


def replay(run: Case, decoder: MaskedDecoder) -> Generation:
    return decoder.generate(model_of(run).model, request(run))


def is_runaway(run: Case) -> bool:
    return run["status"] == "runaway"


def useful(run: Case) -> list[Case]:
    """Return the decode calls that had something to decode, of a runaway run up to its stall."""
    steps = [step for step in run["steps"] if step["masked_before"]]
    while is_runaway(run) and len(steps) > 1 and not steps[-1]["committed"]:
        steps.pop()
    return steps


def committed(run: Case) -> list[dict[int, int]]:
    """Return what each of those calls committed: position after the prompt -> token."""
    prompt = len(run["prompt"])
    return [{at - prompt: token for at, token in step["committed"]} for step in useful(run)]


def made(generation: Generation) -> list[dict[int, int]]:
    """Return the same of each forward of a generation."""
    found: list[dict[int, int]] = [{} for _ in generation.trace.forwards]
    for at, (token, born) in enumerate(zip(generation.ids, generation.born, strict=True)):
        if born >= 0:
            found[born][at] = token
    return found


def check(run: Case, decoder: MaskedDecoder) -> Generation:
    """Replay `run` and compare all that is recorded of its forwards."""
    steps, prompt = useful(run), len(run["prompt"])
    if is_runaway(run):
        decoder = replace(decoder, stop=AnyOf((decoder.stop, Budget(len(steps)))))
    generation = replay(run, decoder)
    assert made(generation) == committed(run)
    forwards = generation.trace.forwards
    fed = [run["forward_calls"][step["call"]][0] for step in steps]
    assert [forward.fed for forward in forwards] == fed
    if run["cache"] != "none" and "warmup_steps" not in run:
        assert {f.fed + f.cached for f in forwards} == {prompt + run["gen_length"]}
    return generation


FILES = ["vicinity_cache", *map("_".join, product(METHODS, ("plain", "detail", "variants")))]
RUNS = [run for file in FILES for run in cases(f"dinfer/{file}.json")]
REUSED = cases("dinfer/credit_state_leak.json")
LOOPS = cases("dinfer/generate_hierarchy.json")


@each(RUNS)
def test_runs(case: Case) -> None:
    whole, *scores = watched(case) if case["file"].endswith("detail.json") else (decoder(case),)
    with agreement(case, lambda: near_tie(case)):
        generation = check(case, whole)
        if scores:
            check_steps(case, *scores)
        if is_runaway(case):
            return
        renewals = sum(f.kind is not ForwardKind.DENOISE for f in generation.trace.forwards)
        assert renewals == case["cache_updates"]
        unrolling = (case.get("maximum_unroll", 1), case.get("expected_tpf", 1))
        idle = idle_forwards(generation, *unrolling)
        assert len(generation.trace) + idle == case["num_forwards"]
        if unrolling == RELEASED:
            assert count_sample(generation, model_of(case).special)["idle_dinfer"] == idle
        if "final_sequence" in case:
            check_sequence(case, generation)


def check_sequence(run: Case, generation: Generation) -> None:
    """The whole canvas, with what dInfer writes beyond the block that holds the end."""
    new = run["final_sequence"][len(run["prompt"]) :]
    special = model_of(run).special
    rest = special.eos if run["early_stop"] else special.mask
    assert [*generation.ids, *[rest] * (len(new) - len(generation.ids))] == new


@each([run for run in RUNS if is_runaway(run)])
def test_runaway_runs_are_refused_or_decoded(case: Case) -> None:
    """Where dInfer never ends, so would the same rule; without the mask token it goes on."""
    with pytest.raises(DllmBenchError, match=r"set decoder\.forbid_mask=true"):
        replay(case, decoder(case))
    sane = replay(case, replace(decoder(case), forbid_mask=True))
    assert min(sane.born) >= 0 or "eos" in sane.cut


@each(REUSED)
def test_no_request_leaks_into_the_next(case: Case) -> None:
    """dInfer's decoder object carries credit to the next request, ours never. Runs are recorded
    in threes: a first use, a second of the same object, and a fresh object."""
    fresh = REUSED[case["index"] + (case["index"] % 3 == 1)]
    one = decoder(fresh)
    replay(fresh, one)
    with agreement(fresh):
        check_sequence(fresh, check(fresh, one))


def test_the_yamls_have_the_numbers_of_dinfers_evaluation() -> None:
    run = {"threshold": 0.9, "block_length": 32, "start_block_align": True, "decoder": "threshold"}
    vicinity = run | {"prefix_look": 16, "after_look": 16, "warmup_steps": 4}
    assert composed("dinfer", {}) == decoder(run | {"cache": "dual", "cache_update_freq": None})
    assert composed("dinfer_vicinity", {"cache.renews_twice": True}) == decoder(vicinity)


@each(LOOPS)
def test_reference_loop_of_hierarchical_decoding(case: Case) -> None:
    """A plain loop without cache and without a stop at EOS."""
    plain = replace(decoder(case | {"cache": "none", "cache_update_freq": None}), stop=Filled())
    if is_runaway(case):
        with pytest.raises(DllmBenchError, match=r"set decoder\.forbid_mask=true"):
            replay(case, plain)
        return
    with agreement(case):
        generation = replay(case, plain)
        assert (list(generation.ids), len(generation.trace)) == (case["output"], case["nfe"])


Asked = list[tuple[tuple[Tensor, list[int], Memo], Scores]]
"""Of each call of a score logits, tokens before the forward and the methods' memory; its result."""


def asked(logits_KWV: Tensor, state: DecodeState, window: Window) -> tuple[Tensor, list[int], Memo]:
    tokens_W = window.of(state.tokens_KL)[0].tolist()
    return logits_KWV[0].float().clone(), tokens_W, state.memo.take(FIRST)


def watched(run: Case) -> tuple[MaskedDecoder, Asked, Asked]:
    """Return the run's decoder with its raw logits and those it selects from laid open."""
    whole = decoder(run)
    score, raw = noting(whole.score, keep=asked)
    if not isinstance(score, Credit):
        return replace(whole, score=score), raw, raw
    inner, fused = noting(score.inner, keep=asked)
    return replace(whole, score=replace(score, inner=inner)), raw, fused


def near_tie(run: Case) -> str | None:
    """Return why a run differs if its first other forward chose between equal probabilities: up
    to rounding, of the positions that only one of both committed."""
    whole, raw, _ = watched(run)
    pairs = zip(made(replay(run, whole)), committed(run), strict=False)
    forward, (own, other) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    start = useful(run)[forward]["block"][0] - len(run["prompt"])
    rows = [at - start for at in own.keys() ^ other.keys()]
    best_R = raw[forward][0][0].softmax(-1).amax(-1)[rows]
    gap = float(best_R.max() - best_R.min()) if rows else 1.0
    return f"tie: two probabilities are {gap:.1e} apart" if gap <= ROUNDING else None


def check_steps(run: Case, raw: Asked, fused: Asked) -> None:
    """Tokens, top-1 ids and probabilities of every step before and after credit, and the credit."""
    for step, (before, _), (after, _) in zip(useful(run), raw, fused, strict=True):
        assert before[1] == step["state_before"]
        check_top1(step, "top1", before[0])
        if raw is not fused:
            check_top1(step, "fused_top1", after[0])
            check_credit(step, after[2])


def check_top1(step: Case, ids: str, logits_WV: Tensor) -> None:
    best_W = logits_WV.softmax(-1).max(-1)
    assert best_W.indices.tolist() == step[ids]
    assert best_W.values.tolist() == pytest.approx(step[f"{ids}_prob"], abs=1e-5)


def check_credit(step: Case, memo: Memo) -> None:
    """What the block's positions hold after the update, committed ones included."""
    ids_WS, credit_WS = memo[IDS][0], memo[CREDIT_VALUES][0]
    for ids in ("top1", "fused_top1"):
        match_WS = ids_WS == torch.tensor(step[ids], device=DEVICE)[:, None]
        of_ids_W = (credit_WS * match_WS).sum(1)
        assert of_ids_W.tolist() == pytest.approx(step[f"credit_of_{ids}"], abs=1e-5)
    assert float(credit_WS.sum()) == pytest.approx(step["credit_total"], abs=1e-4)
    assert int((credit_WS > 0).sum()) == step["credit_nonzero"]


# --- decoder classes ------------------------------------------------------------------------------

UNITS = GOLDEN / "dinfer" / "decoder_units.json"


def units() -> list[Case]:
    """Decoder classes, and the hierarchical transfer rule as a case of one step."""
    if not UNITS.exists():
        return []
    whole = json.loads(UNITS.read_text())
    for case in whole["functions"]["cases"]:
        step = case | {"before": case["x"], "after": case["fast_v2"]["x_after"]}
        named = {"name": "fast_v2", "block": [0, len(case["x"])], "steps": [step]}
        whole["cases"].append(case | named)
    found: list[Case] = whole["cases"]
    return found


@pytest.mark.skipif(not units(), reason=f"no golden traces at {UNITS}")
@pytest.mark.parametrize("case", units(), ids=lambda case: f"{rule(case)[0]}-{case['name']}")
def test_units(case: Case) -> None:
    """Every recorded call is a round of the loop over one block. Left out are the recorded helper
    that remasks, as nothing does here, and that credit is forgotten when the canvas is full."""
    made, memo = composed(*rule(case)), Memo()
    decoder = MaskedDecoder(made.score, made.select, Blocks(8), NoCache(), forbid_mask=False)
    for step in case["steps"]:
        state, window = before(case, step)
        state.memo = memo
        decoder._commit(state, decoder.score(torch.tensor([step["logits"]]), state, window), window)
        assert state.tokens_KL[0].tolist() == step["after"]
        if step.get("credit_matrix_after"):
            wanted_WV = torch.tensor(step["credit_matrix_after"])
            ids_WS, credit_WS = memo[IDS][0].clamp(min=0), memo[CREDIT_VALUES][0]
            found_WV = torch.zeros_like(wanted_WV).scatter_add_(1, ids_WS, credit_WS)
            torch.testing.assert_close(found_WV, wanted_WV, atol=1e-5, rtol=0)


def before(case: Case, step: Case) -> tuple[DecodeState, Window]:
    """Return the canvas of a recorded call and its block."""
    tokens_KL = torch.tensor([step["before"]])
    masked_KL, (start, stop) = tokens_KL == case["mask_id"], case["block"]
    special = SpecialTokens(case["mask_id"], case.get("eos_id", -1))
    born_KL = torch.where(masked_KL, MASKED, PROMPT)
    state = DecodeState(torch.stack([tokens_KL, born_KL]), 0, special)
    open_KW = masked_KL[:, start:stop]
    must_KN = open_KW.any(1, keepdim=True)
    return state, Window(start, stop, state.length, stop - start, start, open_KW, must_KN=must_KN)
