"""Masked decoders whose runs are recorded in a form of their own: Fast-dLLM v2, FreeDave, DMax, the
engines of MultiBD and WeDLM, S2D2 with the recorded random numbers; and DiffusionGemma.

Forwards over the prompt alone, and those that only store finished tokens, are not made here. Guards
of MultiBD's engine end most of its requests while blocks are open; they are compared up to there.
DiffusionGemma's random numbers are those of torch's stream after the same seed, so every step of
transformers' own loop is equal, recorded and by `generate` itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.canvas import CanvasDecoder
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods import s2d2
from dllm_bench.methods.branches import SelfDraft
from dllm_bench.methods.common import Confidence, NegEntropy
from tests.canvas import (
    FULL,
    NO_TOKEN,
    SLIDING,
    canvas_decoder,
    published,
    read_here,
    scaled_apart,
    tiny_canvas_model,
)
from tests.golden.cases import (
    Case,
    Settings,
    agreement,
    canvases_of,
    cases,
    composed,
    decoder_of,
    each,
    forwards_made,
    model_of,
    replayed,
    request,
)
from tests.helpers import DEVICE, Watched, noting


def replay(
    case: Case, decoder: MaskedDecoder, new: int | None = None, eos: int | None = None
) -> tuple[Generation, Watched]:
    model = model_of(case, eos)
    return decoder.generate(model, request(case, new)), model


# --- Fast-dLLM v2 ---------------------------------------------------------------------------------


def length(case: Case, prompt: list[int]) -> int:
    """Return how many tokens a request asks for. The released loops decode whole blocks from the
    prompt's own on, and one token more."""
    block = case["params"]["block_size"]
    blocks = len(prompt) // block + case["params"]["max_new_tokens"] // block
    return blocks * block + 1 - len(prompt)


def v2_calls(case: Case) -> list[tuple[int, list[int]]]:
    """Return the recorded calls, the prompt's whole blocks with the first call that decodes."""
    calls = [(call["start"], call["ids"]) for call in case["calls"]]
    prompt, block = case["prompt"], case["params"]["block_size"]
    if len(prompt) > block and len(prompt) % block:
        (first, ids), (_, more) = calls[:2]
        calls[:2] = [(first, ids + more)]
    return calls


def text(ids: Iterable[int], end: int) -> list[int]:
    """Return the tokens up to the end token, that one included."""
    ids = list(ids)
    return ids[: ids.index(end) + 1] if end in ids else ids


@each([case for case in cases("caches/fast_dllm_v2_cases.json") if not case["batched"]])
def test_fast_dllm_v2(case: Case) -> None:
    """`batch_sample` misses an end token that begins a block and goes on; here it ends there."""
    generation, model = replay(case, decoder_of(case), length(case, case["prompt"]))
    ours = [(one["positions"][0], one["ids"]) for one in forwards_made(generation, model)]
    end, theirs = model.special.eos, v2_calls(case)
    output = text(case["output"], end)
    last = len(case["prompt"] + output) - 1
    missed = output[-1] == end and last % case["params"]["block_size"] == 0
    assert text(generation.ids, end)[: len(output)] == output
    assert ours == (theirs[: len(ours)] if missed else theirs)


@each([case for case in cases("caches/fast_dllm_v2_cases.json") if case["batched"]])
def test_fast_dllm_v2_in_batches(case: Case) -> None:
    """A row may differ: a released batch stores all rows' open block again if one needs it."""
    model, decoder, prompts = model_of(case).model, decoder_of(case), enumerate(case["prompt"])
    requests = [Request(str(i), tuple(ids), length(case, ids)) for i, ids in prompts]
    batched = {one.request_id: one.ids for one in decoder.generate_stream(model, requests, 2)}
    assert batched == {one.id: decoder.generate(model, one).ids for one in requests}
    with agreement(case):
        for one, output in zip(requests, case["output"], strict=True):
            ours, theirs = (text(ids, model.special.eos) for ids in (batched[one.id], output))
            assert ours[: len(theirs)] == theirs


# --- FreeDave, round by round ---------------------------------------------------------------------


def rounds_fed(case: Case, mask: int) -> list[Case]:
    """Return the recorded rounds that have something to verify: drafts differ, and the first has a
    mask. "++" drafts a full block as often as `draft_steps` says."""
    found = []
    for one in case["rounds"]:
        drafts = one["drafts"]
        new = [i for i, draft in enumerate(drafts) if draft not in drafts[:i]]
        kept = {name: [one[name][i] for i in new] for name in ("drafts", "targets")}
        if mask in drafts[0]:
            found.append({**kept, "accepted": drafts[one["accepted"]]})
    return found


def rounds_made(generation: Generation, model: Watched, targets: list[Tensor]) -> list[Case]:
    """Return the same of forwards with several branches; the base (draft 1) is the last."""
    left, found, forwards = iter(targets), [], generation.trace.forwards
    for forward, plan, canvas_KL in zip(forwards, model.plans, model.canvases, strict=True):
        if forward.branches > 1:
            drafts = canvas_KL[:, slice(*plan.rows)].roll(1, 0).tolist()
            target_KW, accepted = next(left).roll(1, 0), drafts[forward.accepted]
            found.append({"drafts": drafts, "targets": target_KW.tolist(), "accepted": accepted})
    return found


def steps_of(generation: Generation, model: Watched, prompt_len: int) -> list[int]:
    """Return the step of every position, that of the round that verified it: what a forward
    commits is a draft of the next one, and what it verifies was masked before."""
    winners = [forward.winner for forward in generation.trace.forwards]
    shown = [canvas_KL[j].tolist() for canvas_KL, j in zip(model.canvases, winners, strict=True)]
    born, mask = enumerate(generation.born, prompt_len), model.special.mask
    steps = [forward + (shown[forward][place] == mask) for place, forward in born]
    return [sorted(set(steps)).index(step) for step in steps]


@replayed("caches/freedave_cases.json")
def test_freedave(case: Case) -> None:
    """A block that the threshold fills is not fed again, and equal drafts are fed once. In the
    recorded "debug" mode a forward has one draft."""
    params, plain = case["params"], decoder_of(case)
    drafts = SelfDraft(params["draft_steps"])
    explore, noted = noting(drafts, "rate", lambda _, window, made: window.of(made.tokens_KL))
    with agreement(case):
        generation, model = replay(case, replace(plain, explore=explore))
        expected = rounds_fed(case, model.special.mask)
        assert list(generation.ids) == case["output"]
        assert rounds_made(generation, model, [target_KW for target_KW, _ in noted]) == expected
        assert steps_of(generation, model, len(case["prompt"])) == case["step_map"]
        rows = [len(one["drafts"]) for one in case["rounds"]]
        forwards = sum(rows) if params["draft_mode"] == "debug" else len(rows)
        assert len(generation.trace) == case["nfe"] - forwards + len(expected)
        static, _ = replay(case, replace(plain, explore=Greedy()))
        assert (list(static.ids), len(static.trace)) == (case["static_output"], case["static_nfe"])
        assert (static.ids == generation.ids) == case["equals_static"]


# --- DMax, MultiBD --------------------------------------------------------------------------------


@replayed("new2026/dmax_cases.json")
def test_dmax(case: Case) -> None:
    """End tokens stay in the text."""
    generation, model = replay(case, decoder_of(case))
    prompt, end = case["prompt"], case["params"]["eos_id"]
    canvas = [*prompt, *[model.special.mask] * (len(model.canvases[0][0]) - len(prompt))]
    calls = zip(case["calls"][1:], case["steps"], canvases_of(model), model.plans, strict=True)
    with agreement(case):
        for index, (call, step, ours, plan) in enumerate(calls):
            assert ours == canvas
            assert plan.feed == (call["start"] * (index > 0), call["start"] + call["rows"])
            for at, before, after in step["changed"]:
                assert canvas[at] == before
                canvas[at] = after
        assert list(generation.ids) == canvas[len(prompt) :][: len(generation.ids)]
        assert [token for token in generation.ids if token != end] == case["output"]


@replayed("new2026/multi_bd_cases.json")
def test_multi_bd(case: Case) -> None:
    params, prompt = case["params"], case["prompt"]
    new = len(case["canvas"]) - len(prompt) + 4 * params["block_size"]
    generation, model = replay(case, decoder_of(case), new)
    canvases, ours = [*canvases_of(model), [*prompt, *generation.ids]], []
    for plan, (before, after) in zip(model.plans, pairwise(canvases), strict=True):
        tokens = enumerate(zip(before, after, strict=False))
        ours.append((plan.feed[1], [[at, new] for at, (old, new) in tokens if old != new]))
    wanted = []
    for call, step in zip(case["calls"], case["steps"], strict=True):
        if any(state == "ACTIVE" for _, state in call["blocks"]):
            changed = [*step["filled"], *([at, new] for at, _, new in step["overwritten"])]
            wanted.append((call["start"] + call["valid"], sorted(changed)))
    with agreement(case):
        assert ours[: len(wanted)] == wanted
        if case["reason"] == "eos_token_generated":
            assert len(ours) == len(wanted)
            ids = list(generation.ids)
            assert ids[: ids.index(params["eos_id"])] == case["output"]


# --- WeDLM ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnTokens(Score):
    """The entropy of the logits, and the recorded tokens at the masks."""

    tokens: deque[list[int]] = field(compare=False)
    gives = NegEntropy.gives

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        ids_KW = torch.zeros_like(window.eligible_KW, dtype=torch.long)
        ids_KW[window.eligible_KW] = torch.tensor(self.tokens.popleft(), device=DEVICE)
        return NegEntropy().of(logits_KWV, ids_KW, state)


def calls_of(generation: Generation, model: Watched, prompt: list[int]) -> tuple[list, list]:
    """Return each forward's tokens and positions in WeDLM's order, masks last; what it filled."""
    calls, filled, mask = [], [], model.special.mask
    canvases = [*canvases_of(model), [*prompt, *generation.ids]]
    for plan, (tokens, after) in zip(model.plans, pairwise(canvases), strict=True):
        order = sorted(range(*plan.feed), key=lambda position: tokens[position] == mask)
        calls.append(([tokens[position] for position in order], order))
        masked = [p for p in range(*plan.feed) if p < len(after) and tokens[p] == mask]
        filled.append([[p, after[p]] for p in masked if after[p] != mask])
    return calls, filled


@replayed("new2026/wedlm_cases.json", "wedlm_hf")
def test_wedlm_blocks(case: Case) -> None:
    prompt = case["prompt"]
    with agreement(case):
        generation, model = replay(case, decoder_of(case), eos=-1)
        calls, filled = calls_of(generation, model, prompt)
        rows = []
        for ids, places in calls:
            cached = [*prompt, *generation.ids][: min(places)]
            rows.append({"ids": cached + ids, "positions": [*range(min(places)), *places]})
        assert (rows, filled) == (case["calls"], case["steps"])
        assert list(generation.ids) == case["output"]


@replayed("new2026/wedlm_cases.json", "wedlm_engine")
def test_wedlm(case: Case) -> None:
    params, prompt, decoder = case["params"], case["prompt"], decoder_of(case)
    if case["multinomials"]:
        decoder = replace(decoder, score=DrawnTokens(deque(case["multinomials"])))
    with agreement(case):
        generation, model = replay(case, decoder, eos=params["stop_token_ids"][0])
        calls, filled = calls_of(generation, model, prompt)
        calls[0] = (calls[0][0][len(prompt) :], calls[0][1][len(prompt) :])
        assert calls == [(call["ids"], call["positions"]) for call in case["calls"][1:-1]]
        end = len(prompt) + len(generation.ids)  # what the window holds beyond is given up
        *steps, last = [step["filled"] for step in case["steps"][:-1]]
        assert filled == [*steps, [one for one in last if one[0] < end]]
        text = list(generation.ids)[: case["returned_by_decoder"]]
        assert text[: params["max_tokens"]] == case["output"]


# --- S2D2 -----------------------------------------------------------------------------------------

Call = tuple[str, list[int]]
"""Its kind, and the tokens of the block, or the drafts that are verified."""


@dataclass
class Numbers:
    """The recorded random numbers of a run, in the order in which they are used."""

    drafts: deque[Any] = field(default_factory=deque)
    """Of each sampled draft: tokens, or numbers."""
    accepting: deque[list[float]] = field(default_factory=deque)
    residual: deque[Any] = field(default_factory=deque)
    """Of each verification a token or a number; None: nothing was sampled."""

    def uniforms(self, state: DecodeState, count: int) -> Tensor:
        given = taken(self.accepting)
        padded = [*given, *[0.0] * (count - len(given))]
        return torch.tensor(padded, dtype=torch.float64, device=DEVICE)

    def drawn(self, law_KV: Tensor, draft_KV: Tensor, state: DecodeState) -> Tensor:
        found = taken(self.residual)
        if not isinstance(found, float):
            return torch.tensor([found or 0], device=DEVICE)
        residual_KV = (law_KV - draft_KV).clamp(min=0)
        number_1 = torch.tensor([found], device=DEVICE)
        return by_number(residual_KV if residual_KV.sum() > 0 else law_KV, number_1)


def taken(numbers: deque[Any]) -> Any:
    assert numbers, "more is drawn than was recorded"
    return numbers.popleft()


def by_number(laws_DV: Tensor, numbers_D: Tensor) -> Tensor:
    """Return the first token of each law whose cumulative probability exceeds a number."""
    cumulative_DV = laws_DV.double().cumsum(-1)
    wanted_D1 = numbers_D.double()[:, None] * cumulative_DV[:, -1:]
    return torch.searchsorted(cumulative_DV, wanted_D1, right=True)[:, 0]


@dataclass(frozen=True)
class Recorded(Score):
    """Draws the recorded drafts at a temperature."""

    temperature: float
    numbers: Numbers = field(compare=False)

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        tempered_KWV = logits_KWV.float() / self.temperature
        if state.memo[s2d2.VERIFIES]:
            return Confidence()(tempered_KWV, state, window)
        given = torch.tensor(taken(self.numbers.drafts), device=DEVICE)
        if given.is_floating_point():
            given = by_number(tempered_KWV[0].softmax(-1), given)
        return Confidence().of(tempered_KWV, given[None], state)


def s2d2_of(params: Settings) -> dict[str, Any]:
    """Return the decoder's settings for the parameters of a run of the SDAR loop."""
    tau, policy = params["confidence_threshold"], params.get("do_verify_policy")
    steps = params.get("denoising_steps", params["block_length"])
    number = params.get("num_to_transfer", params["block_length"] // steps)
    estimate = params.get("token_acceptance_estimator", "hard_margin_threshold")
    causal = "decoded" if params.get("draft_ver") else "finished"
    settings = {
        "select.inner.first.tau": tau,
        "select.inner.second.number": number,
        "select.fill_above": tau,
        "schedule.block": params["block_length"],
        "select.least": params.get("min_ssd_span_length", 1),
        "select.worth": params.get("do_verify_score_threshold", 0.0),
        "select.estimate": ESTIMATES[estimate],
        "select.cost": params.get("score_penalty_coef", 1.0),
        "select.cost_above": None,
        "select.temperature": params.get("temperature") or 1.0,
        "select.temper": params.get("ssd_ratio_tempering_factor", 1.0),
        "select.resamples": params.get("allow_resample", True),
        "select.ratio": params.get("ssd_ratio_threshold"),
        "select.ratio_anywhere": params.get("ssd_threshold_all_spans", False),
        "select.number": number,
        "select.causal": causal if params.get("cache_ver") else "none",
    }
    if params.get("do_verify_score_type", "difference_dynamic") == "difference_dynamic":
        settings["select.cost_above"] = tau
    if policy not in ("score_threshold", "score_hysteresis"):
        settings["select.worth"] = None
    if policy == "contextual_bandit_ucb":
        settings["select.bandit"] = params.get("ucb_beta", 1.0)
    if policy == "score_hysteresis":
        settings["select.worth"] = params["hysteresis_threshold_on"]
        settings["select.worth_off"] = params["hysteresis_threshold_off"]
    if params.get("always_check_high_confidence"):
        settings["select.also_above"] = tau
    return settings | RULES[params.get("remasking_strategy", "low_confidence_dynamic")]


RULES: dict[str, dict[str, Any]] = {
    "low_confidence_dynamic": {},
    "low_confidence_static": {"select.inner.first.tau": 1, "select.fill_above": None},
    "sequential": {
        "select.inner.first.tau": 1,
        "select@inner.second": "in_order",
        "select.fill": "first",
    },
}
ESTIMATES = {
    "hard_margin_threshold": "margin",
    "soft_entropy_negexp": "entropy",
    "soft_renyi_2_entropy": "collision",
}


def s2d2_replay(
    case: Case, decoder: str, settings: Settings, numbers: Numbers, patch: pytest.MonkeyPatch
) -> tuple[list[Call], list[int]]:
    """Return the forwards of a case, and its text."""
    params = case["params"]
    stops = params.get("stopping_criteria_idx") or []
    ends = stops or ([params["eos_id"]] if params.get("eos_early_stop") else [])
    patch.setattr(s2d2, "uniforms", numbers.uniforms)
    patch.setattr(s2d2, "drawn", numbers.drawn)
    made = composed(decoder, {**settings, **({} if ends else {"stop": "filled"})})
    if params.get("do_sample"):
        made = replace(made, score=Recorded(params["temperature"], numbers))
    watched = model_of(case, ends[0] if ends else -1)
    ids, found = list(made.generate(watched, request(case)).ids), list[Call]()
    for canvas_KL, plan in zip(watched.canvases, watched.plans, strict=True):
        if plan.kind == ForwardKind.VERIFY and plan.added:
            found.append(("verify", plan.added.tokens_E.tolist()))
        else:
            found.append(("draft", canvas_KL[0, slice(*plan.rows)].tolist()))
    at = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return found, ids[: at + ("eos_id" in params)]


def numbers_of(case: Case, accepted: Sequence[list[float]]) -> Numbers:
    """Return numbers of runs with `multinomials`; `accepted`: the loop's order of each draft."""
    kinds = [call["kind"] for call in case["calls"] if call["kind"] != "prefill"] + [""]
    verified = [after == "verify" for kind, after in pairwise(kinds) if kind == "draft"]
    tokens, numbers = deque(case["multinomials"]), Numbers(accepting=deque(case["uniforms"]))
    for verifies, order in zip(verified, accepted, strict=True):
        if case["params"].get("do_sample"):
            numbers.drafts.append(tokens.popleft())
        if verifies:
            samples = any(abs(place) % 1 == 0.5 for place in order) and bool(tokens)
            numbers.residual.append(tokens.popleft()[0] if samples else None)
    return numbers


def recorded_calls(case: Case) -> list[Call]:
    """Return the drafts and verifications of a run."""
    calls = [call for call in case["calls"] if call["kind"] in ("draft", "verify")]
    return [(call["kind"], call["ids"][: case["params"]["block_length"]]) for call in calls]


@replayed("new2026/s2d2_sdar_cases.json")
def test_s2d2_sdar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, numbers = s2d2_of(case["params"]), numbers_of(case, case["steps"])
    with agreement(case):
        found, ids = s2d2_replay(case, "s2d2", settings, numbers, monkeypatch)
        assert (found, ids) == (recorded_calls(case), case["output"])


@replayed("new2026/s2d2_llada2_cases.json")
def test_s2d2_llada2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"num_to_transfer": 1, **case["params"]}
    settings = {
        **s2d2_of(params | {"confidence_threshold": params["threshold"]}),
        "revise.tau": min(params["editing_threshold"], 1 - 1e-9),  # at 1 no forward looks for edits
        "revise.rounds": params["max_post_steps"],
    }
    numbers = numbers_of(case, [step["unmask"] for step in case["steps"]])
    with agreement(case):
        found, ids = s2d2_replay(case, "s2d2_llada21", settings, numbers, monkeypatch)
        assert (found, ids[: len(case["output"])]) == (recorded_calls(case), case["output"])


def planned_of(case: Case) -> tuple[Numbers, list[Call]]:
    """Return numbers of a run with one list of `uniforms`, and its drafts and verifications."""
    given, params, numbers, calls = iter(case["uniforms"]), case["params"], Numbers(), list[Call]()
    for step in (one for one in case["steps"] if "store" not in one):
        calls.append(("draft", step["block"]))
        if params.get("do_sample"):
            numbers.drafts.append([next(given) for _ in step["block"]])
        if step["do_verify"]:
            calls.append(("verify", step["verify_ids"]))
            numbers.accepting.append([next(given) for _ in step["span"]])
            samples = any(isinstance(place, float) and place % 1 == 0.5 for place in step["order"])
            residual = samples and params.get("allow_resample", True)
            numbers.residual.append(float(next(given)) if residual else None)
    return numbers, calls


@replayed("new2026/s2d2.json")
def test_s2d2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {name: case[name] for name in ("block_length", "denoising_steps", "gen_length")}
    params = {"confidence_threshold": 0.85, **lengths, **case["parameters"]}
    run = case | {"params": params, "checkpoint": "new2026/ckpt/sdar"}
    numbers, wanted = planned_of(run)
    with agreement(case):
        found, ids = s2d2_replay(run, "s2d2", s2d2_of(params), numbers, monkeypatch)
        assert found == wanted
        assert ids == case["output"]


# --- DiffusionGemma -------------------------------------------------------------------------------

PAD, CANVAS = 0, 16
SETTINGS = {  # of transformers' generation configuration -> of the decoder here
    "max_denoising_steps": "anneal__steps",
    "t_max": "anneal__first",
    "t_min": "anneal__last",
    "entropy_bound": "accept__gamma",
    "stability_threshold": "settle__rounds",
    "confidence_threshold": "settle__entropy",
}


def ending(model: Any, eos: int | None) -> Watched:
    """Return a model with this end token, if any, that keeps its canvases."""
    found = Watched(model)
    found.special = SpecialTokens(NO_TOKEN, NO_TOKEN if eos is None else eos, PAD)
    return found


def decoder_for(params: dict[str, Any]) -> CanvasDecoder:
    """Return the decoder with the numbers that `generate` was called with."""
    return canvas_decoder(**{SETTINGS[key]: params[key] for key in SETTINGS.keys() & params.keys()})


def padded(generation: Generation, pad: int | None) -> list[int]:
    """Return the tokens as the library does: padded after the end, if it has a padding token."""
    ids, end = list(generation.ids), generation.cut.get("eos")
    if end is None or pad is None:
        return ids
    return [*ids[: end + 1], *[pad] * (len(ids) - end - 1)]


def tokens_per_forward(generation: Generation, pad: int | None) -> float:
    """Return the library's count: tokens that are no padding, by forwards over a canvas alone."""
    denoising = sum(one.kind is ForwardKind.DENOISE for one in generation.trace.forwards)
    return sum(token != pad for token in padded(generation, pad)) / denoising


def canvases_over_time(generation: Generation) -> list[list[int]]:
    """Return the most probable tokens of the open canvas after each forward, from the trace."""
    ids, found, end = list(generation.ids), list[list[int]](), len(generation.ids)
    for forward in reversed(generation.trace.forwards):
        if forward.kind is not ForwardKind.DENOISE:
            end -= CANVAS
            continue
        found.append(ids[end - CANVAS : end])
        for change in forward.changes:
            assert ids[change.position] == change.after
            ids[change.position] = change.before
    return found[::-1]


@replayed("new2026/diffusion_gemma_cases.json")
def test_the_recorded_steps(case: Case) -> None:
    params, steps = case["params"], case["steps"]
    pad, plain = params.get("pad_token_id"), decoder_for(params)
    model = ending(tiny_canvas_model(0, canvas=CANVAS), params["eos_token_id"])
    accept, seen = noting(plain.accept)
    request = Request("golden", tuple(case["prompt"]), params["max_new_tokens"], seed=case["seed"])
    generation = replace(plain, accept=accept).generate(model, request)
    pairs = zip(model.canvases, model.plans, strict=True)
    denoised = [(canvas, plan) for canvas, plan in pairs if plan.kind is ForwardKind.DENOISE]
    fed = [canvas[0, slice(*plan.feed)].tolist() for canvas, plan in denoised]
    rate = pytest.approx(case["tokens_per_forward"], rel=1e-5)
    with agreement(case):
        assert (padded(generation, pad), len(fed)) == (case["output"], case["decoder_forwards"])
        assert len(generation.trace) - len(fed) == case["encoder_forwards"]
        assert tokens_per_forward(generation, pad) == rate
        assert fed == [step["input"] for step in steps]
        accepted = [sorted(step["accepted"]) for step in steps]
        assert [x.nonzero()[:, 0].tolist() for _, x in seen] == accepted
        counts = [one.accepted for one in generation.trace.forwards if one.cached]
        assert [count for count in counts if count] == [len(one) for one in accepted]
        tops = [step["argmax"] for step in steps]
        assert [scores.top_C.tolist() for (scores,), _ in seen] == tops
        assert canvases_over_time(generation) == tops
        entropies = [float(scores.entropy_C.mean()) for (scores,), _ in seen]
        assert entropies == pytest.approx([step["mean_entropy"] for step in steps], abs=2e-5)


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"canvas": 8, "layers": (SLIDING, FULL), "window": 8},
    {"canvas": 12, "layers": (SLIDING, FULL), "window": 32, "spread": 40},
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heat", [{}, {"t_min": 1e-6, "t_max": 2e-6}], ids=["drawn", "greedy"])
def test_equals_the_librarys_generate(shape: dict[str, Any], heat: dict[str, float]) -> None:
    """Of other shapes than the recorded one, with layers that are scaled differently."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as library

    theirs, prompt = scaled_apart(published(1, **shape)), [*range(3, 34)]
    settings = {"max_denoising_steps": 12, "entropy_bound": 1.0, "confidence_threshold": 3.0}
    settings |= heat
    model, decoder = read_here(theirs), decoder_for(settings)
    request = Request("one", tuple(prompt), 2 * model.canvas_length + 1, seed=5)
    ours = decoder.generate(ending(model, None), request)
    bound = library.EntropyBoundSamplerConfig(settings.pop("entropy_bound"))
    torch.manual_seed(request.seed)
    tokens_1L = torch.tensor([prompt])
    lengths = {"max_new_tokens": request.max_new_tokens, "eos_token_id": None, "pad_token_id": None}
    expected = theirs.generate(tokens_1L, sampler_config=bound, **lengths, **settings)
    assert list(ours.ids) == expected.sequences[0, len(prompt) :].tolist()
    rate = pytest.approx(float(expected.tokens_per_forward), rel=1e-5)
    assert tokens_per_forward(ours, None) == rate
