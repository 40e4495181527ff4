"""Forwards as the published loops count them, from what a run stores, against what they recorded.

Fast-dLLM's cached loops make a windowed forward over a block that its first forward filled; LoPA
counts its last round, which finds nothing to do (its DiffuCoder copy does not). dInfer's count is
checked where its runs are replayed.
"""

from __future__ import annotations

import json

import pytest

from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import SampleStats, count_sample
from tests.golden import test_dream_traces as dream
from tests.golden import test_masked_traces as masked
from tests.tiers import covering

TIMES = {"seconds": 1.0, "steps_s": 1.0, "first_step_s": 0.5, "truncated": True, "empty": False}
CACHED = [(case, masked.block_cached(case)) for case in masked.LLADA_CACHED] + [
    (case, dream.block_cached(case["params"])) for case in dream.BLOCKS
]
LOPA = masked.LOPA
absent = pytest.mark.skipif(not CACHED, reason=f"no golden traces at {masked.GOLDEN}")


def facts(generation: Generation, special: SpecialTokens) -> SampleStats:
    """What a record keeps of one sample, by way of plain JSON."""
    return SampleStats(**json.loads(json.dumps(count_sample(generation, special) | TIMES)))


@absent
@pytest.mark.parametrize("method", covering(2, sorted({case["method"] for case, _ in CACHED})))
def test_fast_dllm_counts_a_forward_over_a_full_block(method: str) -> None:
    for case, decoder in CACHED[::3]:
        if case["method"] == method:
            folder = "dream" if "dream" in method else "llada"
            generation = masked.replay(case, folder, decoder)
            fact = facts(generation, masked.denoiser(folder).special)
            assert measure("forwards/fast_dllm", [fact]) == case["nfe"]


@pytest.mark.skipif(not LOPA, reason=f"no golden traces at {masked.GOLDEN}")
def test_lopa_counts_its_last_round_but_not_for_diffucoder() -> None:
    special = masked.denoiser("dream").special
    for case in LOPA[:: max(1, len(LOPA) // 24)]:
        fact = facts(masked.replay(case, "dream", masked.pipelined(case)), special)
        if case["method"] == "lopa_coder":
            assert fact.content / case["rounds_with_forward"] == measure("tpf/lopa_coder", [fact])
        else:
            assert len(case["output"]) / case["reported_steps"] == measure("tpf/lopa", [fact])
