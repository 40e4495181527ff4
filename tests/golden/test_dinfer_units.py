"""dInfer's decoder classes on explicit logits: near and exact ties, mask tokens, runs of masks.

Every recorded call is one round of the loop over one block, after its forward; credit lives from
call to call of a case. Left out: the recorded remasking helper (nothing remasks here, and the mode
that calls it crashes as shipped), and that dInfer's class forgets its credit when the canvas is
full (a request ends there).
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.request import SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState, Memo
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks
from dllm_bench.methods.history import CREDIT, IDS
from tests.golden.cases import GOLDEN, composed
from tests.golden.test_dinfer_traces import rule

UNITS = GOLDEN / "dinfer" / "decoder_units.json"


def cases() -> list[dict]:
    """Decoder classes, and the hierarchical transfer rule as a case of one step."""
    if not UNITS.exists():
        return []
    whole = json.loads(UNITS.read_text())
    functions = [
        case
        | {
            "name": "fast_v2",
            "block": [0, len(case["x"])],
            "steps": [case | {"before": case["x"], "after": case["fast_v2"]["x_after"]}],
        }
        for case in whole["functions"]["cases"]
    ]
    return whole["cases"] + functions


def name(case: dict) -> str:
    rule_name = case.get("decoder", "function")
    return f"{rule_name}-{case['name']}-{case['threshold']}-{case.get('low_threshold', '')}"


@pytest.mark.skipif(not cases(), reason=f"no golden traces at {UNITS}")
@pytest.mark.parametrize("case", cases(), ids=name)
def test_units(case: dict) -> None:
    made = composed(*rule(case))
    score, select = made.score, made.select
    decoder = MaskedDecoder(score, select, Blocks(8), NoCache(), forbid_mask=False)
    memo = Memo()
    for step in case["steps"]:
        state, window = before(case, step)
        state.memo = memo
        scores = decoder.score(torch.tensor([step["logits"]]), state, window)
        decoder._commit(state, scores, window)
        assert state.tokens_KL[0].tolist() == step["after"]
        if step.get("credit_matrix_after"):
            assert dense(memo, step).flatten().tolist() == pytest.approx(
                torch.tensor(step["credit_matrix_after"]).flatten().tolist(), abs=1e-5
            )


def before(case: dict, step: dict) -> tuple[DecodeState, Window]:
    """Return the canvas of a recorded call and its block."""
    tokens_KL = torch.tensor([step["before"]])
    masked_KL = tokens_KL == case["mask_id"]
    special = SpecialTokens(case["mask_id"], case.get("eos_id", -1))
    state = DecodeState(tokens_KL, torch.where(masked_KL, MASKED, PROMPT).int(), 0, special)
    start, stop = case["block"]
    masked_KW = masked_KL[:, start:stop]
    window = Window(
        start=start,
        stop=stop,
        visible=state.length,
        retired=start,
        block=stop - start,
        origin=start,
        eligible_KW=masked_KW,
        must_KN=masked_KW.any(1, keepdim=True),
    )
    return state, window


def dense(memo: Memo, step: dict) -> Tensor:
    """Return the credit of every position and token, (W, V)."""
    ids_WS, credit_WS = memo[IDS][0], memo[CREDIT][0]
    table_WV = torch.zeros(len(ids_WS), len(step["logits"][0]))
    return table_WV.scatter_add_(1, ids_WS.clamp(min=0), credit_WS)
