"""WeDLM's own loops, forward for forward: what is fed, in which order, and what it fills.

Tokens that were drawn are replayed. The engine's first forward, over the prompt alone, and its last
one, which only stores K/V, are not made here.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.common import NegEntropy
from tests.golden.cases import Case, agreement, composed, replayed, with_end
from tests.helpers import DEVICE, Watched

Call = tuple[list[int], list[int]]
"""Tokens and positions of a forward, in the order in which they are fed."""


@dataclass(frozen=True)
class Recorded(Score):
    """The entropy of the logits, and the recorded tokens at the masks."""

    tokens: deque[list[int]] = field(compare=False)
    gives = NegEntropy.gives

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        ids_KW = torch.zeros_like(window.eligible_KW, dtype=torch.long)
        ids_KW[window.eligible_KW] = torch.tensor(self.tokens.popleft(), device=DEVICE)
        return NegEntropy().of(logits_KWV, ids_KW, state)


def run(
    case: Case, decoder: MaskedDecoder, length: int, eos: int = -1
) -> tuple[Generation, list[Call], list[list[list[int]]]]:
    """Return the generation, the rows of every forward, and what it filled."""
    prompt, model = tuple(case["prompt"]), with_end("llada", eos)
    watched = Watched(model)
    generation = decoder.generate(watched, Request("golden", prompt, length))
    calls: list[Call] = []
    filled: list[list[list[int]]] = []
    after = [*watched.canvases[1:], torch.tensor([[*prompt, *generation.ids]], device=DEVICE)]
    for canvas_KL, plan, next_KL in zip(watched.canvases, watched.plans, after, strict=True):
        tokens = canvas_KL[0].tolist()
        masked = [token == model.special.mask for token in tokens]
        order = sorted(range(*plan.feed), key=lambda position: masked[position])
        calls.append(([tokens[position] for position in order], order))
        end = min(plan.feed[1], next_KL.shape[1])
        new = ((p, int(next_KL[0, p])) for p in range(plan.feed[0], end) if masked[p])
        filled.append([[p, token] for p, token in new if token != model.special.mask])
    return generation, calls, filled


@replayed("new2026/wedlm_cases.json", "wedlm_hf")
def test_wedlm_blocks(case: Case) -> None:
    params = case["params"]
    tau = params["confidence_threshold"]
    settings: dict[str, Any] = {
        "stop": "filled",
        "score": "tempered",
        "score.temperature": params["temperature"],
        "schedule.block": params["block_size"],
    }
    settings |= {"select.tau": tau} if tau else {"select.tau": 1, "select.strict": True}
    with agreement(case):
        generation, calls, filled = run(
            case, composed("wedlm_blocks", settings), params["max_new_tokens"]
        )
        prompt, rows = [*case["prompt"]], []
        for (ids, places), theirs in zip(calls, case["calls"], strict=True):
            cached = [*prompt, *generation.ids][: min(places)]
            rows.append({"ids": cached + ids, "positions": [*range(min(places)), *places]})
            assert rows[-1] == theirs
        assert filled == case["steps"]
        assert list(generation.ids) == case["output"]


@replayed("new2026/wedlm_cases.json", "wedlm_engine")
def test_wedlm(case: Case) -> None:
    params, first = case["params"], len(case["prompt"])
    (eos,) = params["stop_token_ids"]
    settings = {
        "select.tau": params["entropy_threshold"],
        "select.penalty": params["pos_penalty_factor"],
        "schedule.window": params["window"],
        "schedule.overruns": True,
        "stop.turn_end": False,
    }
    decoder = composed("wedlm", settings)
    if case["multinomials"]:
        decoder = replace(decoder, score=Recorded(deque(case["multinomials"])))
    with agreement(case):
        generation, calls, filled = run(case, decoder, params["max_tokens"], eos)
        calls[0] = (calls[0][0][first:], calls[0][1][first:])
        assert [*calls] == [(call["ids"], call["positions"]) for call in case["calls"][1:-1]]
        end = first + len(generation.ids)  # what the window holds beyond the limit is given up
        *steps, last = [step["filled"] for step in case["steps"][:-1]]
        assert filled == [*steps, [one for one in last if one[0] < end]]
        text = list(generation.ids)[: case["returned_by_decoder"]]
        assert text[: params["max_tokens"]] == case["output"]
