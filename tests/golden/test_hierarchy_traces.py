"""Hierarchical decoding reproduces dInfer's decoder on the tiny LLaDA checkpoint and by itself.

Runs: the same tokens committed in each forward; as in test_dinfer_traces.py, official forwards
that had nothing to decode are not made (`masked_before` 0: a cached forward after the one that
filled the block, and what was left of unrolled forwards). Units: the recorded decoder class
and its transfer rule on explicit logits, candidates that are the mask token included.
"""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from dllm_bench.core.protocols import Stop, Window
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState
from dllm_bench.decoding.cache.dual import DualCache
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.cache.prefix import PrefixCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.select.hierarchy import Hierarchy
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from tests.golden.test_dinfer_traces import FOLDER, denoiser, runs

CACHES = {None: NoCache(), "none": NoCache(), "prefix": PrefixCache(), "dual": DualCache()}
OFF = 1.0  # no probability is above it
DEFAULT_LOW = 0.4


def hierarchy(case: dict) -> Hierarchy:
    """A recorded null switches that rule off; where `low_threshold` is not recorded, dInfer's."""
    tau, low = case["threshold"], case.get("low_threshold", DEFAULT_LOW)
    return Hierarchy(OFF if tau is None else tau, low=0.0 if low is None else low)


def decode(run: dict, stop: Stop):
    decoder = MaskedDecoder(
        score=Confidence(),
        select=hierarchy(run),
        schedule=Blocks(run["block_length"]),
        cache=CACHES[run.get("cache")],
        stop=stop,
        forbid_mask=False,
    )
    request = Request("golden", tuple(run["prompt"]), run["gen_length"])
    return decoder.generate(denoiser(), request)


def name(run: dict) -> str:
    rule = f"{run['threshold']}-{run.get('low_threshold', 'low')}-{run.get('cache')}"
    return f"{rule}-{run['gen_length']}-{run['block_length']}-p{len(run['prompt'])}"


RUNS = [
    run
    for file in ("plain", "detail", "variants")
    for run in runs(f"hierarchy_{file}.json")
    # not here: blocks counted from the start of the canvas, and a renewal clock that counts rounds
    # (a renewing forward and the next one together) across block boundaries
    if not run["start_block_align"] and run["cache_update_freq"] is None
]
LOOPS = runs("generate_hierarchy.json")
UNITS = FOLDER / "decoder_units.json"


@pytest.mark.skipif(not RUNS, reason=f"no golden traces at {FOLDER}")
@pytest.mark.parametrize("run", RUNS, ids=name)
def test_runs(run: dict) -> None:
    generation = decode(run, Eos("block"))
    new = run["final_sequence"][len(run["prompt"]) :]
    assert list(generation.ids) == new[: len(generation.ids)]
    special = denoiser().special
    rest = {special.eos if run["early_stop"] else special.mask}
    assert set(new[len(generation.ids) :]) <= rest
    made = [
        [at for at, born in enumerate(generation.born) if born == forward]
        for forward in range(len(generation.trace))
    ]
    assert made == [
        sorted(position - len(run["prompt"]) for position, _ in step["committed"])
        for step in run["steps"]
        if step["masked_before"]
    ]


@pytest.mark.skipif(not LOOPS, reason=f"no golden traces at {FOLDER}")
@pytest.mark.parametrize("run", LOOPS, ids=name)
def test_reference_loop(run: dict) -> None:
    """A plain loop without cache and without a stop at EOS."""
    generation = decode(run, Filled())
    assert list(generation.ids) == run["output"]
    assert len(generation.trace) == run["nfe"]


def unit_cases() -> list[dict]:
    """(select, mask, before, logits, after) of every recorded call, over the block alone."""
    if not UNITS.exists():
        return []
    whole = json.loads(UNITS.read_text())
    functions = [
        case | {"logits": case["logits"], "before": case["x"], "after": case["fast_v2"]["x_after"]}
        for case in whole["functions"]["cases"]
    ]
    decoders = [
        case
        | {
            "logits": step["logits"],
            "before": step["before"][slice(*case["block"])],
            "after": step["after"][slice(*case["block"])],
        }
        for case in whole["cases"]
        if case["decoder"] == "HierarchyDecoder"
        for step in case["steps"]
    ]
    return functions + decoders


@pytest.mark.skipif(not unit_cases(), reason=f"no golden traces at {FOLDER}")
@pytest.mark.parametrize("case", unit_cases())
def test_units(case: dict) -> None:
    assert commit(hierarchy(case), case) == case["after"]


def commit(select: Hierarchy, case: dict) -> list[int]:
    """One round of the loop on explicit logits: the rule, then its stall rule."""
    before_KL = torch.tensor([case["before"]])
    masked_KL = before_KL == case["mask_id"]
    length = before_KL.shape[1]
    state = DecodeState(before_KL, born(masked_KL), 0, SpecialTokens(case["mask_id"], -1))
    window = Window(0, length, length, 0, length, masked_KL, masked_KL.any(1, keepdim=True))
    scores = Confidence()(torch.tensor([case["logits"]]), state, window)
    where_KW = select(scores, window, state) & masked_KL
    rescue_KW, _ = select.on_stall(scores, window, state)
    state.commit(where_KW | (rescue_KW & window.stalled(where_KW)), scores.ids_KW)
    return state.tokens_KL[0].tolist()


def born(masked_KL: Tensor) -> Tensor:
    return torch.where(masked_KL, MASKED, PROMPT).int()
