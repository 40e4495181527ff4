"""S2D2's own loops, forward for forward, with the recorded random numbers.

Forwards over the prompt alone, and those that only store a finished block, are not made here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
from tests.golden.cases import Case, Settings, agreement, composed, model_of, replayed, request
from tests.helpers import DEVICE

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


def settings_of(params: Settings) -> dict[str, Any]:
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


def replay(
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
    settings, numbers = settings_of(case["params"]), numbers_of(case, case["steps"])
    with agreement(case):
        found, ids = replay(case, "s2d2", settings, numbers, monkeypatch)
        assert (found, ids) == (recorded_calls(case), case["output"])


@replayed("new2026/s2d2_llada2_cases.json")
def test_s2d2_llada2(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"num_to_transfer": 1, **case["params"]}
    settings = {
        **settings_of(params | {"confidence_threshold": params["threshold"]}),
        "revise.tau": min(params["editing_threshold"], 1 - 1e-9),  # at 1 no forward looks for edits
        "revise.rounds": params["max_post_steps"],
    }
    numbers = numbers_of(case, [step["unmask"] for step in case["steps"]])
    with agreement(case):
        found, ids = replay(case, "s2d2_llada21", settings, numbers, monkeypatch)
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
        found, ids = replay(run, "s2d2", settings_of(params), numbers, monkeypatch)
        assert found == wanted
        assert ids == case["output"]
