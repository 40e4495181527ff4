"""The recorded Qwen3 target: logits and greedy continuations, with and without a cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import load_denoiser

RELATIVE = 1e-4
FIRST = torch.tensor(0)


@pytest.fixture(scope="module")
def target(golden: Path) -> TransformerDenoiser:
    return load_denoiser(golden / "spec" / "ckpt" / "target")


def causal(feed: tuple[int, int], rows: tuple[int, int], store: tuple[int, int]) -> ForwardPlan:
    return ForwardPlan(ForwardKind.DENOISE, feed, rows, store, "block_causal", 1, 0)


def test_recorded_logits(golden: Path, target: TransformerDenoiser) -> None:
    recorded = load_file(golden / "spec" / "modules.safetensors")
    tokens_1L, expected = recorded["target/input_ids"].long(), recorded["target/logits"]
    length = tokens_1L.shape[1]
    plan = causal((0, length), (1, length + 1), (0, 0))
    found = target.forward(tokens_1L, plan, target.new_cache(length + 1))
    assert (found - expected).abs().max() < RELATIVE * expected.abs().max()


def test_recorded_greedy_tokens(golden: Path, target: TransformerDenoiser) -> None:
    """The prompt is fed once, then each new token: one row ahead of what is fed."""
    cases = json.loads((golden / "spec" / "target_greedy.json").read_text())["cases"]
    assert cases
    for case in cases:
        start, length = len(case["prompt"]), len(case["prompt"]) + len(case["output"])
        tokens_1L = torch.tensor([case["prompt"] + [0] * len(case["output"])])
        kv, probabilities = target.new_cache(length), []
        for position in range(start, length):
            fed = (kv.length, position)
            plan = causal(fed, (position, position + 1), fed)
            logits_V = target.forward(tokens_1L, plan, kv)[0, 0]
            kv.keep(plan, FIRST)
            tokens_1L[0, position] = logits_V.argmax()
            probabilities.append(float(logits_V.softmax(0).amax()))
        assert tokens_1L[0, start:].tolist() == case["output"]
        assert probabilities == pytest.approx(case["top1_prob"], abs=1e-4)


def test_the_targets_ids(target: TransformerDenoiser, golden: Path) -> None:
    config = json.loads((golden / "spec" / "ckpt" / "target" / "config.json").read_text())
    assert target.attention_form == "causal"
    assert target.special.eos == config["eos_token_id"]
    assert target.special.mask not in target.special.ends
