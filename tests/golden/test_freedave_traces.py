"""FreeDave reproduces the authors' code on the tiny golden checkpoints, round by round.

Compared are output ids, the drafts and targets of every round, the draft that was accepted, the
step of every position, forwards, and the same decoder without drafts. The published loop leaves the
mask token in, and so does this decoder (`forbid_mask` off).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.request import Generation
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import SelfDraft
from tests.golden.cases import (
    Case,
    Settings,
    agreement,
    composed,
    denoiser,
    replayed,
    request,
)
from tests.helpers import Watched


@dataclass(frozen=True)
class Recorded(SelfDraft):
    """Drafts of the model itself, with the targets of every round."""

    targets: list[Tensor] = field(default_factory=list, compare=False)

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        self.targets.append(window.of(branches.tokens_KL))
        return super().rate(scores, window, branches)


def replay(case: Case, decoder: MaskedDecoder) -> tuple[Generation, Watched]:
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
        check(case)


def check(case: Case) -> None:
    params, decoder = case["params"], freedave(case["params"])
    assert isinstance(decoder.explore, Recorded)
    generation, model = replay(case, decoder)
    expected = rounds_fed(case, model.special.mask)
    assert list(generation.ids) == case["output"]
    assert rounds_made(generation, model, decoder.explore.targets) == expected
    assert steps_of(generation, model, len(case["prompt"])) == case["step_map"]
    rows = [len(one["drafts"]) for one in case["rounds"]]
    forwards = sum(rows) if params["draft_mode"] == "debug" else len(rows)
    assert len(generation.trace) == case["nfe"] - forwards + len(expected)
    static, _ = replay(case, replace(decoder, explore=Greedy()))
    assert list(static.ids) == case["static_output"]
    assert len(static.trace) == case["static_nfe"]
    assert (static.ids == generation.ids) == case["equals_static"]
