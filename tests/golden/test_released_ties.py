"""Recorded cases that a tie decides, with the setting that ranks equal positions as released.

PC-Sampler's clamp gives many positions the same score, and `torch.topk` over the block decides.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dllm_bench.decoding.select.topk import TopK
from tests.golden import test_sampler_traces as samplers

FILE = samplers.GOLDEN / "samplers" / "pc_sampler_cases.json"
TIED = [c for c in json.loads(FILE.read_text()) if c["tie_dependent"]] if FILE.exists() else []


@pytest.mark.skipif(not TIED, reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize("case", TIED, ids=samplers.name)
def test_ties_of_pc_sampler_are_those_of_torch_topk(
    case: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    def released(params: dict):
        plain = samplers.pc_sampler(params)
        return replace(plain, select=TopK(samplers.steps_per_block(params), ties="block"))

    lower = samplers.generate(case)[2]
    monkeypatch.setitem(samplers.DECODERS, "pc_sampler", released)
    generation, _, states = samplers.generate(case)
    assert states == case["states"]
    assert list(generation.ids) == case["output"]
    assert lower != case["states"]
