"""Masked decoders reproduce the authors' code on the tiny golden checkpoints, forward by forward.

Compared are the text, and of every forward what is recorded of it: the canvas, the positions that
were fed, or only their number. Draws of the released code are replayed. Forwards over a part that
is decoded already are not made here, and so are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.common import AnyOf, Budget, Confidence
from dllm_bench.methods.position_caches import DPadCache, Drawn
from dllm_bench.methods.row_caches import MostChanged
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import SampleStats, count_sample
from tests.golden.cases import (
    BRANCHING,
    METHODS,
    PIPELINED,
    Case,
    agreement,
    canvases_of,
    cases,
    check,
    decoder_of,
    denoiser,
    each,
    known,
    model_of,
    replayed,
    request,
    steps_per_block,
)
from tests.helpers import DEVICE, whole_forward, with_method

DENSE = ("llada21_t2t", "joint_threshold", "llada2_block_refinement", "remedi_loop")
NOISE = 2e-6  # cosines that differ by less are equal up to rounding
TIMES = {"seconds": 1.0, "steps_s": 1.0, "first_step_s": 0.5, "truncated": True, "empty": False}


# --- what is recorded of a forward ----------------------------------------------------------------


def is_useful(case: Case, call: Case) -> bool:
    """Return whether the open part of a call holds masks."""
    new = case["params"]["gen_length"]
    full = call["len"] == len(case["prompt"]) + new
    decided = 0 if full else call["len"] - case["params"].get("block_length", new)
    return bool(call["masked"] > decided)


def forwards_of(case: Case) -> Iterator[dict[str, Any]]:
    """Yield what is recorded of each forward that decodes something, as `forwards_made` has it."""
    method, nothing = case["method"], [None] * (case["nfe"] + 1)
    names = ("states", "calls", "fed", "window", "steps" if method == "slowfast" else "")
    columns = [case.get(name) or nothing for name in names]
    for state, call, fed, window, step in zip(*columns, strict=False):
        if method in PIPELINED:
            yield {"rows": call["len"], "cached": call["cache_len"]}
        elif method == "d3llm_kv":
            cached = call["use_cache"] * call["cache_len"]
            yield {"ids": state, "rows": call["len"], "cached": cached}
        elif method == "fast_dllm_pp":
            end = call["start"] + call["rows"]
            yield {"positions": [*range(call["start"], end)], "ids": call["ids"]}
        elif case["file"].startswith(("llada/llada", "dream/")):
            if is_useful(case, call):
                yield {"rows": call["len"]} | ({"ids": state} if state else {})
        elif method == "t2m_remask":  # earlier blocks hold the tokens of their last forward there
            yield {"open": state[-case["params"]["block_length"] :]}
        elif method == "daedal_llada":
            yield {"canvas": state, "grown": len(state) - len(case["prompt"])}
        elif method in ("freecache_llada", "adablock_llada"):
            yield {"canvas": state, "positions": [*range(call[0], sum(call))]}
        elif "fed" in case or "window" in case:
            fed = fed or [*range(*(window or (0, len(state))))]
            yield {"canvas": state, "positions": fed}
        elif "learn2pd" in case["file"] or method == "wino":
            yield {"canvas": state, "rows": case.get("forward_rows", len(state))}
        elif call != "store" and (step is None or step["filled"]):
            yield {"canvas": state}


# --- draws of the released code -------------------------------------------------------------------


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


def drawing(case: Case) -> MaskedDecoder:
    """Return the decoder of a case, which draws what the recorded run drew."""
    decoder, method, params = decoder_of(case), case["method"], case["params"]

    def block_of(state: DecodeState, window: Window) -> int:
        return (window.start - state.prompt_len) // params["block_length"]

    def draw(self: DPadCache, state: DecodeState, window: Window) -> Tensor:
        stays_1L = torch.ones(1, state.length, dtype=torch.bool)
        stays_1L[:, window.stop :] = False
        stays_1L[:, case["kept_suffix"][block_of(state, window)]] = True
        return stays_1L

    def order(self: Drawn, state: DecodeState, window: Window) -> Tensor:
        return torch.tensor(case["decode_order"][block_of(state, window)]) - window.start

    if method == "dpad_llada":
        return replace(decoder, cache=with_method(decoder.cache, "draw", draw))
    if method == "dkv_cache_greedy_llada":
        select = Drawn(steps_per_block(params))
        return replace(decoder, select=with_method(select, "order", order))
    if method == "remdm_llada":  # without a seed it takes the most probable token
        score = Confidence("float64")
        torch.manual_seed(params["seed"] or 0)
        return replace(decoder, score=score if params["seed"] is None else GlobalGumbel(score))
    if method == "saber":  # one recorded case never ends here
        return replace(decoder, stop=AnyOf((decoder.stop, Budget(case["nfe"] + 1))))
    return decoder


# --- the loops ------------------------------------------------------------------------------------


def overwrites(case: Case) -> int | None:
    """Return the first forward of FreeCache whose canvas holds an end token, with `early_stop`: the
    released loop overwrites what follows, and goes on; here it stands."""
    params, first = case["params"], len(case["prompt"])
    if case["method"] != "freecache_llada" or not params["early_stop"]:
        return None
    ended = [params["eos_token_id"] in state[first:] for state in case["states"]]
    return ended.index(True) if True in ended else None


def counted(generation: Generation, special: SpecialTokens) -> SampleStats:
    """Return what a record keeps of one sample, by way of plain JSON."""
    return SampleStats(**json.loads(json.dumps(count_sample(generation, special) | TIMES)))


def takes_more_than_masked(case: Case, decoder: MaskedDecoder) -> str | None:
    """Return why the case differs if the released top-k has fewer masks to choose from.

    Saber and the fallback of KLASS take their number of positions, at -inf too: which ones is the
    order of `torch.topk`. Looked at is the forward after which the canvases differ first."""
    params = case["params"]
    if case["method"] not in ("saber", "klass"):
        return None
    count = params["n"] if "n" in params else params["block_length"] // steps_per_block(params)
    model = model_of(case)
    decoder = replace(decoder, stop=AnyOf((decoder.stop, Budget(case["nfe"]))))
    generation = decoder.generate(model, request(case))
    ours = [*canvases_of(model), [*case["prompt"], *generation.ids]]
    theirs = [*case["states"], [*case["prompt"], *case["output"]]]
    pairs = enumerate(zip(ours, theirs, strict=False))
    forward = next(i for i, (own, other) in pairs if own[: len(other)] != other) - 1
    masks = ours[forward][: model.plans[forward].rows[1]].count(model.special.mask)
    return f"tie: too few masks ({masks}) for the released top-{count}" if masks < count else None


EVERY = (case for file in known() for case in cases(file))
LOOPS = [one for one in EVERY if one.get("method") in METHODS and overwrites(one) is None]


@each(LOOPS)
def test_the_authors_loop(case: Case) -> None:
    """Fast-dLLM counts forwards over a full block; a run that never ends there is refused here."""
    decoder = drawing(case)
    if case.get("status") == "runaway":
        with pytest.raises(DllmBenchError, match="predicts the mask token.*forbid_mask=true"):
            decoder.generate(model_of(case), request(case))
        return
    proof = partial(takes_more_than_masked, case, decoder)
    generation, model = check(case, decoder, forwards_of(case), proof)
    if case["method"].startswith("fast_dllm") and case["method"].endswith("_cache"):
        assert measure("forwards/fast_dllm", [counted(generation, model.special)]) == case["nfe"]


@each([case for case in LOOPS if case["method"] in DENSE])
def test_without_the_cache(case: Case) -> None:
    without = {"cache": "none", "cache.attention": "block_causal"}
    check(case, decoder_of(case, without), forwards_of(case))


@each([case for case in cases("caches/freecache_cases.json") if overwrites(case) is not None])
def test_freecache_until_it_overwrites_tokens(case: Case) -> None:
    model, count = model_of(case), overwrites(case)
    decoder_of(case).generate(model, request(case))
    assert canvases_of(model)[:count] == case["states"][:count]


@replayed("caches/adablock_cases.json")
def test_adablock(case: Case) -> None:
    _, model = check(case, decoder_of(case), forwards_of(case))
    starts = sorted({plan.rows[0] for plan in model.plans})
    ends = [*starts[1:], len(case["prompt"]) + case["params"]["gen_length"]]
    assert [b - a for a, b in zip(starts, ends, strict=True)] == case["block_lengths"]


@replayed("caches/sparse_dllm_cases.json")
def test_sparse_dllm(case: Case) -> None:
    """The positions that layers keep are recorded where they are chosen, and read one later."""
    _, model = check(case, decoder_of(case), forwards_of(case))
    sets = [plan.sets for plan in model.plans[1:]]
    kept = [one.read_C.tolist() if one and one.read_C.dim() > 1 else None for one in sets]
    pairs = [pair for pair in zip(case["kept"], kept, strict=False) if all(pair)]
    assert pairs and all(theirs == ours for theirs, ours in pairs)


@replayed("caches/dllm_cache_cases.json")
def test_dllm_cache(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are recorded where similarity chose them; the others follow from the intervals."""
    chosen, choose = list[list[int]](), MostChanged.choose

    def noted(self: MostChanged, old_SC: Tensor, new_SC: Tensor) -> Tensor:
        index_R = choose(self, old_SC, new_SC)
        chosen.append(sorted((index_R + self.prompt).tolist()))
        return index_R

    monkeypatch.setattr(MostChanged, "choose", noted)
    check(case, decoder_of(case), forwards_of(case))
    rows, gaps = ([one for f in case[name] for one in f] for name in ("selected", "sel_gap"))
    recorded = [pair for pair in zip(rows, gaps, strict=True) if pair[0] is not None]
    for (theirs, gap), ours in zip(recorded, chosen, strict=True):
        assert gap < NOISE or ours == theirs


@replayed("dream/lopa_cases.json", *BRANCHING)
def test_lopa(case: Case) -> None:
    """Branches stand in the order in which they are made, the base last. A last round is counted,
    but not for DiffuCoder."""
    model = model_of(case)
    generation = decoder_of(case).generate(model, request(case))
    rounds = [(forward.branches, forward.winner) for forward in generation.trace.forwards]
    with agreement(case):
        assert list(generation.ids) == case["output"]
        assert rounds == [(len(step["branches"]), step["chosen"]) for step in case["steps"]]
        assert len(rounds) == case["rounds_with_forward"]
    sample, coder = counted(generation, model.special), case["method"] == "lopa_coder"
    tokens = sample.content if coder else len(case["output"])
    tpf = tokens / case["rounds_with_forward" if coder else "reported_steps"]
    assert measure("tpf/lopa_coder" if coder else "tpf/lopa", [sample]) == tpf


@replayed("dream/dream_cases.json", "forward")
def test_a_forward(case: Case) -> None:
    """The recorded logits are raw: each row is ours of the next position."""
    logits_LV = whole_forward(denoiser("dream"), torch.tensor([case["prompt"]], device=DEVICE))[0]
    raw_LV = torch.tensor(case["logits"], device=DEVICE)
    torch.testing.assert_close(logits_LV, torch.cat([raw_LV[:1], raw_LV[:-1]]), atol=1e-4, rtol=0)
    assert logits_LV[1:].argmax(-1).tolist() == case["output"][:-1]
