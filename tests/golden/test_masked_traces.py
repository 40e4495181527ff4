"""Masked decoders reproduce the authors' code token for token on the tiny golden checkpoints.

They are LLaDA's and Dream's samplers, Fast-dLLM, D2F, LoPA, Learn2PD and FreeDave.

Every case of the recorded methods is replayed by the decoder of its yaml: output ids, the number of
forwards (branches of a round count as one forward), where stored the canvas before or after each
step, and the branch that each round of LoPA continued with. Learn2PD's filters are read as a run
reads them; its canvas shrinks where it is cut. Of FreeDave, every round's drafts and targets are
compared. The published samplers leave the mask token in the distribution, so these decoders do too
(`forbid_mask=False`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import SelfDraft
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import SampleStats, count_sample
from dllm_bench.models.filters import FilterMetadata, save_filter
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
    rebuilt,
    replayed,
    request,
    steps_per_block,
)
from tests.helpers import DEVICE, Watched, whole_forward

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
RANKINGS = {"default": "confidence", "neg_entropy": "neg_entropy", "margin": "margin"}


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
        "score": RANKINGS[params.get("sampling_strategy", "default")],
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


# --- Learn2PD's authors' loop: filter with top-k, their canvas cut, and both ----------------------


@pytest.fixture(scope="module")
def filters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the recorded filters, one folder a block length."""
    from safetensors.torch import load_file

    folder = tmp_path_factory.mktemp("filters")
    recorded = load_file(GOLDEN / "llada" / "learn2pd_filters.safetensors")
    for block in {name.partition(".")[0] for name in recorded}:
        prefix = f"{block}."
        own = {n.removeprefix(prefix): t for n, t in recorded.items() if n.startswith(prefix)}
        save_filter(folder / block, own, FilterMetadata())
    return folder


def decoder(case: Case, filters: Path) -> MaskedDecoder:
    params, method = case["params"], case["method"]
    block = {"schedule.block": params["block_length"]}
    if method == "eotp_authors":
        steps = {"select": "topk", "select.steps": steps_per_block(params)}
        return composed("learn2pd_eotp", block | steps)
    select = {
        "select.first.head.source": str(filters / f"block{params['block_length']}"),
        "select.first.tau": params["threshold"],
        "select.second.steps": steps_per_block(params),
    }
    return composed("learn2pd_eotp" if "eotp" in method else "learn2pd", block | select)


@replayed("llada/learn2pd_cases.json")
def test_the_authors_loop(case: Case, filters: Path) -> None:
    model = Watched(denoiser("llada"))
    generation = decoder(case, filters).generate(model, request(case))
    assert list(generation.ids) == case["output"]
    assert canvases_of(model) == case["states"]
    fed = [forward.fed for forward in generation.trace.forwards]
    assert fed == [len(state) for state in case["states"]]
    assert len(generation.trace) == case["nfe"]


# --- FreeDave, round by round ---------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(SelfDraft):
    """Drafts of the model itself, with the targets of every round."""

    targets: list[Tensor] = field(default_factory=list, compare=False)

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        self.targets.append(window.of(branches.tokens_KL))
        return super().rate(scores, window, branches)


def replay_watched(case: Case, decoder: MaskedDecoder) -> tuple[Generation, Watched]:
    model = Watched(denoiser(f"caches/{case['checkpoint']}"))
    return decoder.generate(model, request(case, "max_gen_length")), model


def freedave(params: Settings) -> MaskedDecoder:
    tau = params["confidence_threshold"]
    settings = {
        "schedule.block": params["block_length"],
        "cache": "dual" if params["dual_cache"] else "prefix",
        "stop": "filled",
    }
    plain, plus = ("freedave", {}), ("freedave_plus", {"select.tau": tau})
    name, select = plain if tau is None else plus
    decoder = composed(name, settings | select)
    return replace(decoder, explore=Recorded(params["draft_steps"]))


def rounds_fed(case: Case, mask: int) -> list[dict]:
    """Return the recorded rounds that have something to verify: drafts differ, and the first has a
    mask.

    "++" drafts a full block as often as `draft_steps` says.
    """
    found = []
    for one in case["rounds"]:
        drafts = one["drafts"]
        new = [i for i, draft in enumerate(drafts) if draft not in drafts[:i]]
        kept = {name: [one[name][i] for i in new] for name in ("drafts", "targets")}
        if mask in drafts[0]:
            found.append({**kept, "accepted": drafts[one["accepted"]]})
    return found


def rounds_made(generation: Generation, model: Watched, targets: list[Tensor]) -> list[dict]:
    """Return the same of forwards with several branches; the base, which is draft 1, is the
    last."""
    left, found = iter(targets), []
    for forward, plan, canvas_KL in zip(
        generation.trace.forwards, model.plans, model.canvases, strict=True
    ):
        if forward.branches > 1:
            drafts = canvas_KL[:, slice(*plan.rows)].roll(1, 0).tolist()
            target_KW = next(left).roll(1, 0)
            accepted = drafts[forward.accepted]
            found.append({"drafts": drafts, "targets": target_KW.tolist(), "accepted": accepted})
    return found


def steps_of(generation: Generation, model: Watched, prompt_len: int) -> list[int]:
    """Return the step of every position: of the round that verified it, as the authors count.

    What a forward commits is a draft of the next one; what it verifies was masked before.
    """
    winners = [forward.winner for forward in generation.trace.forwards]
    shown = [canvas_KL[j].tolist() for canvas_KL, j in zip(model.canvases, winners, strict=True)]
    steps = [
        born + (shown[born][prompt_len + place] == model.special.mask)
        for place, born in enumerate(generation.born)
    ]
    return [sorted(set(steps)).index(step) for step in steps]


@replayed("caches/freedave_cases.json")
def test_freedave(case: Case) -> None:
    """A block that the threshold fills is not fed again, and equal
    drafts are fed once. In the recorded "debug" mode a forward has one draft.
    """
    with agreement(case):
        check_freedave(case)


def check_freedave(case: Case) -> None:
    params, decoder = case["params"], freedave(case["params"])
    assert isinstance(decoder.explore, Recorded)
    generation, model = replay_watched(case, decoder)
    expected = rounds_fed(case, model.special.mask)
    assert list(generation.ids) == case["output"]
    assert rounds_made(generation, model, decoder.explore.targets) == expected
    assert steps_of(generation, model, len(case["prompt"])) == case["step_map"]
    rows = [len(one["drafts"]) for one in case["rounds"]]
    forwards = sum(rows) if params["draft_mode"] == "debug" else len(rows)
    assert len(generation.trace) == case["nfe"] - forwards + len(expected)
    static, _ = replay_watched(case, replace(decoder, explore=Greedy()))
    assert list(static.ids) == case["static_output"]
    assert len(static.trace) == case["static_nfe"]
    assert (static.ids == generation.ids) == case["equals_static"]


# --- Dream: its time schedules, Fast-dLLM's threshold and entropy schedule for it -----------------

DREAM = "dream/dream_cases.json"
FULL = ("dream_maskgit_plus", "dream_topk_margin", "dream_entropy", "dream_origin")
DREAM_CACHED = tuple(
    f"fast_dllm_dream_{rule}{cache}_cache"
    for rule in ("", "entropy_")
    for cache in ("prefix", "dual")
)


def dream(params: Settings) -> MaskedDecoder:
    """Dream's own sampler: the whole generation at once."""
    schedule = {"select.steps": params["steps"], "select.eps": params["eps"]}
    if params["alg"] != "origin":
        return composed("dream", schedule | {"score": SCORES[params["alg"]]})
    order = {"score": "confidence", "select": "origin", "select.seed": params["seed"]}
    return composed("dream", schedule | order)


def rationed(params: Settings) -> MaskedDecoder:
    """Fast-dLLM without cache: a threshold within a budget."""
    numbers = {"select.inner.tau": params["threshold"], "select.steps": params["steps"]}
    return composed("fast_dllm_dream", numbers)


def block_cached(params: Settings) -> MaskedDecoder:
    """Fast-dLLM's caches, with a threshold or with a time schedule per block."""
    name = "fast_dllm_dream_dual" if params["dual_cache"] else "fast_dllm_dream_prefix"
    block = {"schedule.block": params["block_length"]}
    if "threshold" in params:
        return composed(name, block | {"select.inner.tau": params["threshold"]})
    inner = {"select.inner.steps": steps_per_block(params), "select.inner.idle": True}
    entropy = {"score": "neg_entropy", "select@inner": "epsilon"}
    return composed(name, block | entropy | inner)


def useful(case: Case) -> list[tuple[Case, list[int] | None]]:
    """Calls whose open part holds masks, each with its recorded input."""
    ahead = case["params"].get("block_length", case["params"]["gen_length"])
    total = len(case["prompt"]) + case["params"]["gen_length"]
    states = case["states"] or [None] * len(case["calls"])
    return [
        (call, state)
        for call, state in zip(case["calls"], states, strict=True)
        if call["masked"] > (0 if call["len"] == total else call["len"] - ahead)
    ]


def inputs(generation: Generation, case: Case) -> list[list[int]]:
    """Return the input of every forward."""
    canvases = rebuilt(generation, case, denoiser("dream").special.mask)
    starts = [call.get("start", 0) for call, _ in useful(case)]
    return [
        canvas[start : start + forward.fed]
        for canvas, start, forward in zip(canvases, starts, generation.trace.forwards, strict=True)
    ]


def check_dream(case: Case, decoder: MaskedDecoder) -> None:
    """Official forwards over a part that is decoded already change nothing, and are not made."""
    with agreement(case):
        generation = decoder.generate(denoiser("dream"), request(case))
        assert list(generation.ids) == case["output"]
        fed = [forward.fed for forward in generation.trace.forwards]
        assert fed == [call["len"] for call, _ in useful(case)]
        if case["states"] is not None:
            assert inputs(generation, case) == [state for _, state in useful(case)]


@replayed(DREAM, "forward")
def test_a_forward(case: Case) -> None:
    """The recorded logits are raw: each row is ours of the next position."""
    logits_LV = whole_forward(denoiser("dream"), torch.tensor([case["prompt"]], device=DEVICE))[0]
    raw_LV = torch.tensor(case["logits"], device=DEVICE)
    shifted_LV = torch.cat([raw_LV[:1], raw_LV[:-1]])
    torch.testing.assert_close(logits_LV, shifted_LV, atol=1e-4, rtol=0)
    assert logits_LV[1:].argmax(-1).tolist() == case["output"][:-1]


@replayed(DREAM, *FULL)
def test_dream(case: Case) -> None:
    check_dream(case, dream(case["params"]))


@replayed(DREAM, "fast_dllm_dream_threshold")
def test_fast_dllm(case: Case) -> None:
    check_dream(case, rationed(case["params"]))


@replayed(DREAM, *DREAM_CACHED)
def test_fast_dllm_with_cache(case: Case) -> None:
    check_dream(case, block_cached(case["params"]))


# --- forwards as the published loops count them ---------------------------------------------------

TIMES = {"seconds": 1.0, "steps_s": 1.0, "first_step_s": 0.5, "truncated": True, "empty": False}
EVERY_CACHED = cases(LLADA, *CACHED) + cases(DREAM, *DREAM_CACHED)


def facts(generation: Generation, special: SpecialTokens) -> SampleStats:
    """Return what a record keeps of one sample, by way of plain JSON."""
    return SampleStats(**json.loads(json.dumps(count_sample(generation, special) | TIMES)))


@each(EVERY_CACHED)
def test_fast_dllm_counts_a_forward_over_a_full_block(case: Case) -> None:
    folder = "dream" if "dream" in case["method"] else "llada"
    decoder = block_cached(case["params"]) if folder == "dream" else llada(case)
    generation = replay(case, folder, decoder)
    fact = facts(generation, denoiser(folder).special)
    assert measure("forwards/fast_dllm", [fact]) == case["nfe"]


@replayed(LOPA, *BRANCHING)
def test_lopa_counts_its_last_round_but_not_for_diffucoder(case: Case) -> None:
    generation = replay(case, "dream", pipelined(case))
    fact = facts(generation, denoiser("dream").special)
    if case["method"] == "lopa_coder":
        assert fact.content / case["rounds_with_forward"] == measure("tpf/lopa_coder", [fact])
    else:
        assert len(case["output"]) / case["reported_steps"] == measure("tpf/lopa", [fact])
