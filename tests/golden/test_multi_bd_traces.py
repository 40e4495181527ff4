"""MultiBD's engine, forward for forward, until a serving guard ends the request.

Guards (allocated positions, an automatic limit of forwards) end most recorded requests while blocks
are open; these are compared up to there. The others end with their text. Forwards in which no block
is open only store K/V, and are not made here.
"""

from __future__ import annotations

from itertools import pairwise

from dllm_bench.core.request import Request
from tests.golden.cases import Case, agreement, canvases_of, composed, replayed, with_end
from tests.helpers import Watched


def changes(before: list[int], after: list[int]) -> list[list[int]]:
    """Positions whose tokens differ, and the tokens afterwards."""
    pairs = enumerate(zip(before, after, strict=False))
    return [[place, token] for place, (old, token) in pairs if old != token]


@replayed("new2026/multi_bd_cases.json")
def test_multi_bd(case: Case) -> None:
    params, prompt = case["params"], case["prompt"]
    block = params["block_size"]
    edits = params["sampling_mode"] == "edit"
    settings = {
        "forbid_mask": not edits,
        "select.tau": params["accept_threshold"],
        "schedule.block": block,
        "schedule.size": params["buffer_size"],
        "schedule.tau_add": params["add_block_threshold"],
        "schedule.tau_act": 0.0 if edits else params["semi_complete_threshold"],
        "stop.turn_end": False,
    }
    if edits:
        settings["revise.released"] = True
        settings["revise.tau"] = params["edit_threshold"]
        settings["revise.rounds"] = params["max_post_edit_steps"]
        settings["revise.stable"] = params.get("token_stability_threshold", 0.0)
    watched = Watched(with_end("llada", params.get("eos_id", -1)))
    length = len(case["canvas"]) - len(prompt) + 4 * block
    generation = composed("multi_bd_edit" if edits else "multi_bd", settings).generate(
        watched, Request("golden", tuple(prompt), length)
    )
    canvases = [*canvases_of(watched), [*prompt, *generation.ids]]
    ours = [
        (plan.feed[1], changes(*pair))
        for plan, pair in zip(watched.plans, pairwise(canvases), strict=True)
    ]
    rounds = zip(case["calls"], case["steps"], strict=True)
    wanted = [
        (
            call["start"] + call["valid"],
            sorted([*step["filled"], *([at, new] for at, _, new in step["overwritten"])]),
        )
        for call, step in rounds
        if any(state == "ACTIVE" for _, state in call["blocks"])
    ]
    with agreement(case):
        assert ours[: len(wanted)] == wanted
        if case["reason"] == "eos_token_generated":
            assert len(ours) == len(wanted)
            ids = list(generation.ids)
            assert ids[: ids.index(params["eos_id"])] == case["output"]
