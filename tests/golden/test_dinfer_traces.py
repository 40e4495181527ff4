"""Every recorded run of dInfer's decoders, replayed on the tiny LLaDA checkpoint.

Each forward commits the same tokens at the same positions and feeds as many. Forwards over a block
without masks are not made here; dInfer counts them, and so does `facts.idle_forwards`. An end token
in a finished block ends a generation; later blocks stay masked, or hold EOS with early_stop.
Runaway runs are replayed up to the forward after which theirs commits nothing for ever; there the
loop raises. Left out: runs with a decision within float32 rounding of its threshold, and two
whose 14th forward has two positions in a run of masks that are equally probable but for rounding.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.api.compose import compose
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Score, Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState, Memo
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.cache.vicinity import VicinityCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.credit import CREDIT as CREDIT_VALUES
from dllm_bench.decoding.score.credit import IDS, Credit
from dllm_bench.decoding.select.hierarchy import Hierarchy
from dllm_bench.decoding.select.threshold import Threshold
from dllm_bench.decoding.stop.any_of import AnyOf
from dllm_bench.decoding.stop.budget import Budget
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from dllm_bench.metrics.sample_stats import count_sample, idle_forwards
from dllm_bench.registry import instantiate
from tests.helpers import golden_dir, load_denoiser
from tests.tiers import covering

FIRST = torch.tensor([0])  # branch
FOLDER = golden_dir() / "dinfer"
ROUNDING = 5e-6  # top-1 probabilities in float32 and in float64 differ by up to 4.5e-6 here
TIED = {
    "prompt_index": 2,
    "threshold": 0.9,
    "cache": "none",
    "gen_length": 64,
    "block_length": 16,
    "start_block_align": False,
}
BAND = 1e-5  # dInfer commits what is that close to the surest
CREDIT = {"credit_alpha": 0.7, "decay_beta": 0.8, "boost_gamma": 0.2}  # dInfer's defaults
LOW = 0.4  # dInfer's default
RELEASED = (4, 8)  # dInfer's unrolling
OFF = 1.0  # no probability is above it
CACHES = {"none": NoCache, "prefix": PrefixCache, "dual": DualCache}


@lru_cache
def denoiser(eos: int | None = None):
    """The tiny checkpoint, in some runs with another end token."""
    model = load_denoiser(golden_dir() / "llada")
    if eos is not None:
        model.special = SpecialTokens(mask=model.special.mask, eos=eos)
    return model


def runs(name: str) -> list[dict]:
    """The recorded runs of one file, prompts filled in; empty without the reference data."""
    path = FOLDER / name
    whole = json.loads(path.read_text()) if path.exists() else {"runs": []}
    return [
        {"prompt": whole["prompts"][run["prompt_index"]], "file": path.stem} | run
        for run in whole["runs"]
        if (run.get("min_gap_prob_to_threshold") or 1) > ROUNDING and not is_tied(name, run)
    ]


def is_tied(name: str, run: dict) -> bool:
    """Whether two probabilities, 8e-7 apart, decide which position a run of masks commits."""
    return name.startswith("hierarchy") and all(run[key] == TIED[key] for key in TIED)


def rule(case: dict) -> tuple[Score, Select]:
    """What scores and selects; a recorded null switches that threshold off."""
    tau, name = case["threshold"], case.get("decoder", "hierarchy").lower()
    if name.startswith("hierarchy"):
        low = case.get("low_threshold", LOW)
        return Confidence(), Hierarchy(OFF if tau is None else tau, 0.0 if low is None else low)
    select = Threshold(case.get("iter_threshold") or tau, band=BAND)
    if not name.startswith("credit"):
        return Confidence(), select
    alpha, beta, gamma = (case.get(key, default) for key, default in CREDIT.items())
    return Credit(Confidence(), alpha=alpha, beta=beta, gamma=gamma), select


def cache(run: dict) -> Cache:
    if "warmup_steps" in run:
        around = {"before": run["prefix_look"], "after": run["after_look"]}
        return VicinityCache(**around, warmup=run["warmup_steps"], renews_twice=True)
    found = CACHES[run["cache"]]()
    if run["cache_update_freq"] is None:
        return found
    return replace(found, every=run["cache_update_freq"], clock="request")


def decoder(run: dict) -> MaskedDecoder:
    score, select = rule(run)
    return MaskedDecoder(
        score=score,
        select=select,
        schedule=Blocks(run["block_length"], absolute=run.get("start_block_align", False)),
        cache=cache(run),
        stop=Eos("block"),
        forbid_mask=False,
    )


def ask(run: dict) -> Request:
    return Request("golden", tuple(run["prompt"]), run["gen_length"])


def model_of(run: dict):
    return denoiser(run.get("eos_id"))


def is_runaway(run: dict) -> bool:
    return run["status"] == "runaway"


def useful(run: dict) -> list[dict]:
    """The decode calls that had something to decode; of a runaway run those up to its stall."""
    steps = [step for step in run["steps"] if step["masked_before"]]
    while is_runaway(run) and len(steps) > 1 and not steps[-1]["committed"]:
        steps.pop()
    return steps


def made(generation: Generation) -> list[dict[int, int]]:
    """What each forward committed: position after the prompt -> token."""
    drawn = list(enumerate(zip(generation.ids, generation.born, strict=True)))
    return [
        {at: token for at, (token, born) in drawn if born == forward}
        for forward in range(len(generation.trace))
    ]


def check(run: dict, decoder: MaskedDecoder) -> Generation:
    """Replay `run` and compare all that is recorded of its forwards."""
    model, steps, prompt = model_of(run), useful(run), len(run["prompt"])
    if is_runaway(run):
        decoder = replace(decoder, stop=AnyOf((decoder.stop, Budget(len(steps)))))
    generation = decoder.generate(model, ask(run))
    assert made(generation) == [
        {position - prompt: token for position, token in step["committed"]} for step in steps
    ]
    forwards = generation.trace.forwards
    fed = [run["forward_calls"][step["call"]][0] for step in steps]
    assert [forward.fed for forward in forwards] == fed
    if run["cache"] != "none" and "warmup_steps" not in run:
        assert {f.fed + f.cached for f in forwards} == {prompt + run["gen_length"]}
    return generation


RUNS = [
    run
    for method in ("threshold", "credit", "hierarchy")
    for kind in ("plain", "detail", "variants")
    for run in runs(f"{method}_{kind}.json")
] + runs("vicinity_cache.json")
REUSED = runs("credit_state_leak.json")
TRIPLES = list(zip(REUSED[::3], REUSED[1::3], REUSED[2::3], strict=True))
LOOPS = runs("generate_hierarchy.json")
DETAILED = [run for run in RUNS if run["file"].endswith("detail")]
absent = pytest.mark.skipif(not RUNS, reason=f"no golden traces at {FOLDER}")


def name(run: dict) -> str:
    rule = f"{run['file']}-{run['threshold']}-{run.get('low_threshold', '')}-{run.get('cache')}"
    return f"{rule}-{run['gen_length']}-{run['block_length']}-p{len(run['prompt'])}"


@absent
@pytest.mark.parametrize("run", covering(24, RUNS, often=2), ids=name)
def test_runs(run: dict) -> None:
    generation = check(run, decoder(run))
    if is_runaway(run):
        return
    renewals = sum(f.kind is not ForwardKind.DENOISE for f in generation.trace.forwards)
    assert renewals == run["cache_updates"]
    idle = idle_forwards(generation, run.get("maximum_unroll", 1), run.get("expected_tpf", 1))
    assert len(generation.trace) + idle == run["num_forwards"]
    if "final_sequence" in run:
        check_sequence(run, generation)


def check_sequence(run: dict, generation: Generation) -> None:
    """The whole canvas, with what dInfer writes beyond the block that holds the end."""
    new = run["final_sequence"][len(run["prompt"]) :]
    special = model_of(run).special
    rest = special.eos if run["early_stop"] else special.mask
    assert [*generation.ids, *[rest] * (len(new) - len(generation.ids))] == new


@absent
@pytest.mark.parametrize("run", [run for run in RUNS if is_runaway(run)], ids=name)
def test_runaway_runs_are_refused_or_decoded(run: dict) -> None:
    """Where dInfer never ends, so would the same rule; without the mask token it goes on."""
    with pytest.raises(DllmBenchError, match=r"set decoder\.forbid_mask=true"):
        decoder(run).generate(model_of(run), ask(run))
    sane = replace(decoder(run), forbid_mask=True).generate(model_of(run), ask(run))
    assert min(sane.born) >= 0 or "eos" in sane.cut


@absent
@pytest.mark.parametrize("triple", TRIPLES, ids=lambda triple: name(triple[0]))
def test_no_request_leaks_into_the_next(triple: tuple[dict, dict, dict]) -> None:
    """dInfer's decoder object carries credit from one request to the next; one value here never."""
    first, _, fresh = triple
    one = decoder(first)
    assert one == decoder(fresh)
    for run in (first, fresh, first):
        check_sequence(run, check(run, one))


@absent
def test_the_recorded_leak_is_there_to_be_avoided() -> None:
    differ = [again["final_sequence"] != fresh["final_sequence"] for _, again, fresh in TRIPLES]
    assert any(differ)


@pytest.mark.skipif(not LOOPS, reason=f"no golden traces at {FOLDER}")
@pytest.mark.parametrize("run", LOOPS, ids=name)
def test_reference_loop_of_hierarchical_decoding(run: dict) -> None:
    """A plain loop without cache and without a stop at EOS."""
    plain = decoder(run | {"cache": "none", "cache_update_freq": None})
    plain = replace(plain, stop=Filled())
    if is_runaway(run):
        with pytest.raises(DllmBenchError, match=r"set decoder\.forbid_mask=true"):
            plain.generate(denoiser(), ask(run))
        return
    generation = plain.generate(denoiser(), ask(run))
    assert list(generation.ids) == run["output"]
    assert len(generation.trace) == run["nfe"]


@dataclass(frozen=True)
class Seen(Score):
    """Any score, and what it was asked: logits, tokens before the forward, the methods' memory."""

    inner: Score
    calls: list[tuple[Tensor, list[int], Memo]] = field(default_factory=list)

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        tokens_W = window.of(state.tokens_KL)[0].tolist()
        self.calls.append((logits_KWV[0].float().clone(), tokens_W, state.memo.take(FIRST)))
        return self.inner(logits_KWV, state, window)


def watched(run: dict) -> tuple[MaskedDecoder, Seen, Seen]:
    """The run's decoder with its raw logits and those it selects from laid open."""
    whole = decoder(run)
    if not isinstance(whole.score, Credit):
        raw = Seen(whole.score)
        return replace(whole, score=raw), raw, raw
    fused = Seen(whole.score.inner)
    raw = Seen(replace(whole.score, inner=fused))
    return replace(whole, score=raw), raw, fused


@absent
@pytest.mark.parametrize("run", covering(4, DETAILED), ids=name)
def test_steps(run: dict) -> None:
    """Tokens, top-1 ids and probabilities of every step before and after credit, and the credit."""
    whole, raw, fused = watched(run)
    check(run, whole)
    for step, before, after in zip(useful(run), raw.calls, fused.calls, strict=True):
        assert before[1] == step["state_before"]
        check_top1(step, "top1", before[0])
        if raw is not fused:
            check_top1(step, "fused_top1", after[0])
            check_credit(step, after[2])


def check_top1(step: dict, ids: str, logits_WV: Tensor) -> None:
    best_W = logits_WV.softmax(-1).max(-1)
    assert best_W.indices.tolist() == step[ids]
    assert best_W.values.tolist() == pytest.approx(step[f"{ids}_prob"], abs=1e-5)


def check_credit(step: dict, memo: Memo) -> None:
    """What the block's positions hold after the update, committed ones included."""
    ids_WS, credit_WS = memo[IDS][0], memo[CREDIT_VALUES][0]
    for ids in ("top1", "fused_top1"):
        match_WS = ids_WS == torch.tensor(step[ids])[:, None]
        of_ids_W = (credit_WS * match_WS).sum(1)
        assert of_ids_W.tolist() == pytest.approx(step[f"credit_of_{ids}"], abs=1e-5)
    assert float(credit_WS.sum()) == pytest.approx(step["credit_total"], abs=1e-4)
    assert int((credit_WS > 0).sum()) == step["credit_nonzero"]


def test_the_configured_decoders_are_the_replayed_ones() -> None:
    """`decoder=dinfer` and `dinfer_vicinity`, but for the mask token."""
    run = {"decoder": "threshold", "threshold": 0.9, "block_length": 32, "start_block_align": True}
    dual = run | {"cache": "dual", "cache_update_freq": None}
    vicinity = run | {"prefix_look": 16, "after_look": 16, "warmup_steps": 4}
    for name_, found in (("dinfer", dual), ("dinfer_vicinity", vicinity)):
        choices = [f"decoder={name_}", "decoder.forbid_mask=false"]
        choices += ["decoder.cache.renews_twice=true"] if name_ == "dinfer_vicinity" else []
        plain = compose(choices)["decoder"]
        made_ = instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")
        assert made_ == decoder(found)


@absent
def test_the_stored_fact_is_the_count_as_released() -> None:
    """`facts.count` stores what the definitions of official forwards are computed from."""
    released = [r for r in RUNS if (r.get("maximum_unroll"), r.get("expected_tpf")) == RELEASED]
    assert released
    for run in released[:: max(1, len(released) // 24)]:
        facts: dict[str, Any] = count_sample(
            decoder(run).generate(denoiser(), ask(run)), denoiser().special
        )
        assert facts["forwards"] + facts["idle_dinfer"] == run["num_forwards"]
