"""S2D2's own loops, forward for forward: drafts, what verification is fed, and the text.

Acceptance and residual samples are replayed with the recorded numbers. Forwards over the prompt
alone, and those that only store a finished block, are not made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods import s2d2
from dllm_bench.methods.common import Confidence
from tests.golden.cases import Case, Settings, agreement, composed, replayed, request, with_end
from tests.helpers import DEVICE, Watched


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


def settings_of(params: Settings) -> dict[str, Any]:
    """Return the decoder's settings for the parameters of a run of the SDAR loop."""
    tau, policy = params["confidence_threshold"], params.get("do_verify_policy")
    steps = params.get("denoising_steps", params["block_length"])
    number = params.get("num_to_transfer", params["block_length"] // steps)
    causal = "decoded" if params.get("draft_ver") else "finished"
    settings = {
        "select.inner.first.tau": tau,
        "select.inner.second.number": number,
        "select.fill_above": tau,
        "schedule.block": params["block_length"],
        "select.least": params.get("min_ssd_span_length", 1),
        "select.worth": params.get("do_verify_score_threshold", 0.0),
        "select.estimate": ESTIMATES[
            params.get("token_acceptance_estimator", "hard_margin_threshold")
        ],
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


def forwards_of(watched: Watched, block: int) -> Iterator[tuple[str, list[int], list[int]]]:
    """Kind, tokens of the block, and the drafts that were verified."""
    for canvas_KL, plan in zip(watched.canvases, watched.plans, strict=True):
        start, stop = plan.rows
        verifies = plan.kind == ForwardKind.VERIFY
        added = plan.added.tokens_E.tolist() if verifies and plan.added else []
        yield "verify" if verifies else "draft", canvas_KL[0, start:stop].tolist(), added


def replay(
    case: Case,
    decoder: str,
    settings: Settings,
    numbers: Numbers,
    monkeypatch: pytest.MonkeyPatch,
    folder: str = "llada",
    sampled: float | None = None,
) -> tuple[list[tuple[str, list[int], list[int]]], list[int]]:
    """Return the forwards of a case, and its text."""
    params: Mapping[str, Any] = case.get("params") or case["parameters"]
    stops = params.get("stopping_criteria_idx") or []
    ends = stops or ([params["eos_id"]] if params.get("eos_early_stop") else [])
    monkeypatch.setattr(s2d2, "uniforms", numbers.uniforms)
    monkeypatch.setattr(s2d2, "drawn", numbers.drawn)
    made = composed(decoder, {**settings, **({} if ends else {"stop": "filled"})})
    if sampled is not None:
        made = replace(made, score=Recorded(sampled, numbers))
    watched = Watched(with_end(folder, ends[0] if ends else -1))
    given = case if "params" in case else {**case, "params": {"gen_length": case["gen_length"]}}
    generation = made.generate(watched, request(given))
    ids = list(generation.ids)
    at = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    return [*forwards_of(watched, settings["schedule.block"])], ids[: at + ("eos_id" in params)]


def numbers_of(case: Case, verified: list[bool], accepted: list[list[float]]) -> Numbers:
    """Return numbers of the runs with `multinomials`; `accepted`: the loop's order of each
    draft."""
    tokens = deque(case["multinomials"])
    numbers = Numbers(accepting=deque(case["uniforms"]))
    for verifies, order in zip(verified, accepted, strict=True):
        if case["params"].get("do_sample"):
            numbers.drafts.append(tokens.popleft())
        if verifies:
            samples = any(abs(place) % 1 == 0.5 for place in order) and bool(tokens)
            numbers.residual.append(tokens.popleft()[0] if samples else None)
    return numbers


def recorded_calls(case: Case) -> list[tuple[str, list[int], list[int]]]:
    """Drafts and verifications of a run, as `forwards_of` has them."""
    calls = [call for call in case["calls"] if call["kind"] in ("draft", "verify")]
    found: list[tuple[str, list[int], list[int]]] = []
    for call in calls:
        half = case["params"]["block_length"]
        verifies = call["kind"] == "verify"
        block = call["ids"][:half]
        found.append((call["kind"], [] if verifies else block, block if verifies else []))
    return found


def compared(
    found: list[tuple[str, list[int], list[int]]],
) -> list[tuple[str, list[int], list[int]]]:
    """Return a verification without the canvas that it is fed beside."""
    return [(kind, [] if added else block, added) for kind, block, added in found]


def followed_by_verify(case: Case) -> list[bool]:
    """Of each draft, whether it was verified."""
    kinds = [call["kind"] for call in case["calls"] if call["kind"] != "prefill"] + [""]
    return [after == "verify" for kind, after in pairwise(kinds) if kind == "draft"]


@replayed("new2026/s2d2_sdar_cases.json")
def test_s2d2_sdar(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = case["params"]
    numbers = numbers_of(case, followed_by_verify(case), case["steps"])
    sampled = params["temperature"] if params.get("do_sample") else None
    with agreement(case):
        found, ids = replay(
            case, "s2d2", settings_of(params), numbers, monkeypatch, sampled=sampled
        )
        assert compared(found) == recorded_calls(case)
        assert ids == case["output"]


def planned_of(case: Case) -> Numbers:
    """Return numbers of the runs with one list of `uniforms`."""
    given, params = iter(case["uniforms"]), case["parameters"]
    numbers = Numbers()
    for step in (one for one in case["steps"] if "store" not in one):
        if params.get("do_sample"):
            numbers.drafts.append([next(given) for _ in step["block"]])
        if step["do_verify"]:
            numbers.accepting.append([next(given) for _ in step["span"]])
            samples = any(isinstance(place, float) and place % 1 == 0.5 for place in step["order"])
            residual = samples and params.get("allow_resample", True)
            numbers.residual.append(float(next(given)) if residual else None)
    return numbers


@replayed("new2026/s2d2.json")
def test_s2d2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {
        "confidence_threshold": 0.85,
        "block_length": case["block_length"],
        "denoising_steps": case["denoising_steps"],
        **case["parameters"],
    }
    sampled = params["temperature"] if params.get("do_sample") else None
    steps, wanted = [one for one in case["steps"] if "store" not in one], []
    for step in steps:
        wanted.append(("draft", step["block"], []))
        wanted += [("verify", [], step["verify_ids"])] if step["do_verify"] else []
    with agreement(case):
        found, ids = replay(
            case,
            "s2d2",
            settings_of(params),
            planned_of(case),
            monkeypatch,
            "new2026/ckpt/sdar",
            sampled,
        )
        assert compared(found) == wanted
        assert ids == case["output"]


@replayed("new2026/s2d2_llada2_cases.json")
def test_s2d2_llada2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {**case["params"], "confidence_threshold": case["params"]["threshold"]}
    settings = {
        **settings_of({"num_to_transfer": 1, **params}),
        "revise.tau": min(params["editing_threshold"], 1 - 1e-9),  # at 1 no forward looks for edits
        "revise.rounds": params["max_post_steps"],
    }
    order = [step["unmask"] for step in case["steps"]]
    numbers = numbers_of(case, followed_by_verify(case), order)
    with agreement(case):
        found, ids = replay(case, "s2d2_llada21", settings, numbers, monkeypatch)
        assert compared(found) == recorded_calls(case)
        assert ids[: len(case["output"])] == case["output"]
