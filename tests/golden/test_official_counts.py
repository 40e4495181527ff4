"""Forwards as the published loops count them, from what a run stores, against what they recorded.

Fast-dLLM's cached loops make a windowed forward over a block that its first forward filled; LoPA
counts its last round, which finds nothing to do (its DiffuCoder copy does not). dInfer's count is
checked where its runs are replayed.
"""

from __future__ import annotations

import json

from dllm_bench.core.request import Generation, SpecialTokens
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import SampleStats, count_sample
from tests.golden import test_dream_traces as dream
from tests.golden import test_masked_traces as masked
from tests.golden.cases import Case, cases, denoiser, each, replayed

TIMES = {"seconds": 1.0, "steps_s": 1.0, "first_step_s": 0.5, "truncated": True, "empty": False}
CACHED = cases(masked.LLADA, *masked.CACHED) + cases(dream.FILE, *dream.CACHED)


def facts(generation: Generation, special: SpecialTokens) -> SampleStats:
    """Return what a record keeps of one sample, by way of plain JSON."""
    return SampleStats(**json.loads(json.dumps(count_sample(generation, special) | TIMES)))


@each(CACHED)
def test_fast_dllm_counts_a_forward_over_a_full_block(case: Case) -> None:
    folder = "dream" if "dream" in case["method"] else "llada"
    decoder = dream.block_cached(case["params"]) if folder == "dream" else masked.llada(case)
    generation = masked.replay(case, folder, decoder)
    fact = facts(generation, denoiser(folder).special)
    assert measure("forwards/fast_dllm", [fact]) == case["nfe"]


@replayed(masked.LOPA, *masked.BRANCHING)
def test_lopa_counts_its_last_round_but_not_for_diffucoder(case: Case) -> None:
    generation = masked.replay(case, "dream", masked.pipelined(case))
    fact = facts(generation, denoiser("dream").special)
    if case["method"] == "lopa_coder":
        assert fact.content / case["rounds_with_forward"] == measure("tpf/lopa_coder", [fact])
    else:
        assert len(case["output"]) / case["reported_steps"] == measure("tpf/lopa", [fact])
