"""MultiBD's engine, forward for forward, until a serving guard ends the request.

Guards (allocated positions, an automatic limit of forwards) end most recorded requests while blocks
are open; these are compared up to there. The others end with their text. Forwards that change
nothing only store K/V, and are not made here.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace

from dllm_bench.core.request import Request
from tests.golden.cases import Case, agreement, composed, denoiser, replayed
from tests.helpers import Watched

EDITS = "not implemented: editing in several open blocks"


@replayed("new2026/multi_bd_cases.json")
def test_multi_bd(case: Case) -> None:
    params, prompt = case["params"], case["prompt"]
    block = params["block_size"]
    settings = {
        "forbid_mask": True,
        "select.tau": params["accept_threshold"],
        "schedule.block": block,
        "schedule.size": params["buffer_size"],
        "schedule.tau_add": params["add_block_threshold"],
        "schedule.tau_act": params["semi_complete_threshold"],
        "stop.turn_end": False,
    }
    model = copy(denoiser("llada"))
    model.special = replace(model.special, eos=params.get("eos_id", -1))
    watched = Watched(model)
    length = len(case["canvas"]) - len(prompt) + 4 * block
    generation = composed("multi_bd", settings).generate(
        watched, Request("golden", tuple(prompt), length)
    )
    found: list[list[list[int]]] = [[] for _ in generation.trace.forwards]
    for place, (token, born) in enumerate(zip(generation.ids, generation.born, strict=True)):
        if born >= 0:
            found[born].append([len(prompt) + place, token])
    rounds = zip(case["calls"], case["steps"], strict=True)
    wanted = [
        (call["start"] + call["valid"], sorted(s["filled"])) for call, s in rounds if s["filled"]
    ]
    ours = [(plan.feed[1], new) for plan, new in zip(watched.plans, found, strict=True)]
    with agreement(case, lambda: EDITS if params["sampling_mode"] == "edit" else None):
        assert ours[: len(wanted)] == wanted
        if case["reason"] == "eos_token_generated":
            assert len(ours) == len(wanted)
            text = list(generation.ids)
            assert text[: text.index(params["eos_id"])] == case["output"]
