"""Adaptive samplers reproduce the authors' code on the tiny golden checkpoints, forward by forward.

Every recorded case is replayed with the mask token left in, as published: output ids, number of
forwards, and the canvas that each forward saw. Cases that a difference below 1e-5 or an exact tie
decided are left out, as their notes advise; what else differs is named in `deviates`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import pytest

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.decoding.cache.delayed import DelayedCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.revise.end_fill import EndFill
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.schedule.multi_block import MultiBlock
from dllm_bench.decoding.score.answer_gap import AnswerGap
from dllm_bench.decoding.score.calibrated import Calibrated, TokenCounts
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.kl_history import KLHistory
from dllm_bench.decoding.score.margin import Margin
from dllm_bench.decoding.score.neg_entropy import NegEntropy
from dllm_bench.decoding.score.with_entropy import WithEntropy
from dllm_bench.decoding.select.dilated import Dilated
from dllm_bench.decoding.select.early_exit import EarlyExit
from dllm_bench.decoding.select.entropy import EntropyThreshold
from dllm_bench.decoding.select.entropy_bound import EntropyBound
from dllm_bench.decoding.select.local_leap import LocalLeap
from dllm_bench.decoding.select.slow_fast import SlowFast
from dllm_bench.decoding.select.stable import Stable
from dllm_bench.decoding.select.topk import TopK
from dllm_bench.decoding.stop.budget import Budget
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from tests.golden.test_masked_traces import GOLDEN, denoiser
from tests.tiers import covering

COUNTS = GOLDEN / "samplers" / "pc_sampler_baseline.json"
NEVER = 10_000  # a refresh interval that means none
CLOSE = 1e-5  # margins below it are decided by rounding
D2CACHE = {"maskgit_plus": Confidence, "entropy": NegEntropy, "topk_margin": Margin}


def plain(score, select, block: int | None) -> MaskedDecoder:
    """A decoder without cache that decodes block by block until nothing is masked."""
    return MaskedDecoder(score, select, Blocks(block), NoCache(), forbid_mask=False)


def eb_sampler(p: dict) -> MaskedDecoder:
    return plain(NegEntropy("model"), EntropyBound(p["gamma"]), None)


def eb_confidence(p: dict) -> MaskedDecoder:
    select = EntropyBound(p["gamma"], p["num_transfer_tokens"], "last")
    return plain(WithEntropy(D2CACHE[p["alg"]]()), select, p["block_length"])


def dparallel(p: dict) -> MaskedDecoder:
    return plain(NegEntropy("float64"), EntropyThreshold(p["threshold"]), p["block_length"])


def localleap(p: dict) -> MaskedDecoder:
    select = LocalLeap(p["threshold"], p["relaxed_threshold"], p["radius"])
    decoder = plain(Confidence("float64"), select, p["block_length"])
    return replace(decoder, stop=Eos(turn_end=False) if p.get("early_stop") else Filled())


def steps_per_block(p: dict) -> int:
    return p["steps"] * p["block_length"] // p["gen_length"]


def klass(p: dict) -> MaskedDecoder:
    return stable(p, TopK(steps_per_block(p)), p["block_length"], strict=True, warm_up=True)


def klass_dream(p: dict) -> MaskedDecoder:
    return replace(stable(p, TopK(), None), stop=Budget(p["steps"]))


def stable(p: dict, fallback, block: int | None, **changes) -> MaskedDecoder:
    commits = {"all": "all", "max_conf": "most_probable", "min_kl": "most_stable"}
    which = commits[p.get("unmask_strategy", "all")]
    select = Stable(fallback, p["conf_threshold"], p["kl_threshold"], commits=which, **changes)
    return plain(KLHistory(Confidence("float64"), p["kl_history_length"], "float64"), select, block)


def dus(p: dict) -> MaskedDecoder:
    """Positions masked again stay masked: a budget of forwards leaves them so."""
    pattern = (p["scheduler"], p["base"], p["base_skip"])
    if p["remasking"] == "none":
        return plain(Confidence(), Dilated(*pattern), p["block_length"])
    select = Dilated(*pattern, p["confidence_threshold"], p["block_length"])
    return replace(plain(Confidence("float64"), select, None), stop=Budget(p["nfe"]))


def d3llm_multi_block(p: dict) -> MaskedDecoder:
    schedule = MultiBlock(p["block_size"], p["block_add_threshold"])
    select = EntropyThreshold(p["threshold"], best=True)
    decoder = replace(plain(NegEntropy("float64"), select, None), schedule=schedule)
    if not p["early_stop"]:
        return decoder
    schedule = replace(schedule, opens_rest=True)
    return replace(decoder, schedule=schedule, stop=Eos("token", turn_end=False), revise=EndFill())


def d3llm_kv(p: dict) -> MaskedDecoder:
    every = p["refresh_interval"] if p["refresh_interval"] < NEVER else None
    return replace(d3llm_multi_block(p), cache=DelayedCache(p["cache_delay_iter"], every))


def pc_sampler(p: dict) -> MaskedDecoder:
    position = {"pc_sampler": "exponential", "linear_position": "linear"}[p["kind"]]
    score = Calibrated(TokenCounts(str(COUNTS)), p["lambd"], p["alpha"], position)
    return plain(score, TopK(steps_per_block(p)), p["block_length"])


def slowfast(p: dict) -> MaskedDecoder:
    select = SlowFast(
        p["high_confidence_threshold"],
        p["cycle_len_confidence_threshold"],
        p["k_exploration_steps"],
        p["cycle_length_stability_window"],
        p["cycle_length_stability_std_dev_threshold"],
    )
    return plain(Confidence("model"), select, p["block_length"])


def prophet(p: dict) -> MaskedDecoder:
    pinned = tuple((int(place), token) for place, token in (p["constraints"] or {}).items())
    steps, thresholds = TopK(steps_per_block(p)), (p["early"], p["mid"], p["late"])
    select = EarlyExit(steps, p["block_length"], *thresholds, idle=True, pinned=pinned)
    return plain(AnswerGap(Confidence("model"), p["answer_offset"]), select, None)


DECODERS: dict[str, Callable[[dict], MaskedDecoder]] = {
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


def cases() -> list[dict]:
    """The recorded cases that are decided by more than rounding; empty without the folder."""
    paths = [GOLDEN / "samplers" / f"{method}_cases.json" for method in DECODERS]
    found = [case for path in paths if path.exists() for case in json.loads(path.read_text())]
    return [case for case in found if is_decided(case) and not deviates(case)]


def is_decided(case: dict) -> bool:
    """Whether no tie, no margin below `CLOSE` and no overwriting by mistake decides."""
    margin = min(case["min_margin"].values(), default=1.0)
    return case["restated"] and not case["tie_dependent"] and margin >= CLOSE


def deviates(case: dict) -> bool:
    """One run of SlowFast never ends: see below."""
    return case["status"] == "runaway"


def name(case: dict) -> str:
    return f"{case['method']}-p{len(case['prompt'])}"


def generate(case: dict) -> tuple[Generation, SpecialTokens, list[list[int]]]:
    """What the case's decoder makes of it, the special tokens, with the end token it names, and the
    canvas of every forward.
    """
    model = copy(denoiser(case["checkpoint"].removeprefix("golden/")))
    if "eos_id" in case["params"]:
        model.special = replace(model.special, eos=case["params"]["eos_id"])
    decoder = DECODERS[case["method"]](case["params"] | {"nfe": case["nfe"]})
    request = Request("golden", tuple(case["prompt"]), case["params"]["gen_length"])
    forward, canvases = model.forward, list[list[int]]()

    def recorded(tokens_KL, plan, kv):
        canvases.append(tokens_KL[0].tolist())
        return forward(tokens_KL, plan, kv)

    model.forward = recorded
    return decoder.generate(model, request), model.special, canvases


@pytest.mark.skipif(not cases(), reason=f"no golden traces at {GOLDEN}")
@pytest.mark.parametrize("case", covering(6, cases()), ids=name)
def test_sampler(case: dict) -> None:
    generation, special, states = generate(case)
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


def useful_states(case: dict) -> list[list[int]]:
    """The canvas of every forward; those of SlowFast over a full block are not made here."""
    made = [case["method"] != "slowfast" or bool(step["filled"]) for step in case["steps"]]
    return [state for state, was_made in zip(case["states"], made, strict=True) if was_made]


@pytest.mark.skipif(not cases(), reason=f"no golden traces at {GOLDEN}")
def test_a_run_that_never_ends_is_refused_with_a_sentence() -> None:
    whole = json.loads((GOLDEN / "samplers" / "slowfast_cases.json").read_text())
    for endless in (case for case in whole if case["status"] == "runaway"):
        with pytest.raises(DllmBenchError, match="predicts the mask token.*forbid_mask=true"):
            generate(endless)
