"""Every configured score against recorded forwards: without chance it proposes the argmax.

Whatever a score ranks by, its candidates on a fresh state are the most probable tokens that the
reference recorded for the first forward of a request, and their probabilities are the model's. New
scores are found by their yaml; those that draw tokens are asked at temperature 0.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
import torch

from dllm_bench.core.contracts import Score
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.rounds import WindowTracker
from dllm_bench.methods.causal_masks import Tempered
from dllm_bench.methods.common import Blocks
from tests.golden.test_forward import forward
from tests.helpers import golden_dir, load_denoiser
from tests.pieces import pieces

FILE = golden_dir() / "dinfer" / "threshold_detail.json"
EVIDENCE = "credit", "density"  # in the names of scores whose probabilities are not the model's


def first_forwards() -> list[tuple[list[int], dict]]:
    """(prompt, run) of recorded runs without a cache."""
    if not FILE.exists():
        return []
    whole = json.loads(FILE.read_text())
    runs = [run for run in whole["runs"] if run["cache"] == "none"]
    return [(whole["prompts"][run["prompt_index"]], run) for run in runs]


def greedy(score: Score) -> Score:
    """Return the score without chance."""
    names = {field.name for field in fields(score)}  # type: ignore[arg-type]
    draws = "temperature" in names and not isinstance(score, Tempered)
    return replace(score, temperature=0.0) if draws else score  # type: ignore[type-var]


@pytest.mark.skipif(not FILE.exists(), reason=f"no golden traces at {FILE}")
@pytest.mark.parametrize("name", pieces("score"))
def test_candidates_are_the_recorded_argmax(name: str) -> None:
    model, score = load_denoiser(golden_dir() / "llada"), greedy(pieces("score")[name])
    for prompt, run in first_forwards():
        schedule, request = (
            Blocks(run["block_length"]),
            Request("x", tuple(prompt), run["gen_length"]),
        )
        state = DecodeState.start(request, model.special)
        grid = schedule.grid(len(prompt), run["gen_length"])
        frontier = WindowTracker(schedule, grid)
        branches = frontier.progress(state.length, winner=0, masks=[], closed=[False])
        window = frontier.move(branches, [schedule.opened(branches[0])], state.masked_KL)
        logits_KLV = forward(model, state.tokens_KL)
        scores = score(window.of(logits_KLV), state, window)
        step = run["steps"][0]
        assert scores.ids_KW[0].tolist() == step["top1"]
        if not any(word in name for word in EVIDENCE):
            recorded = torch.tensor(step["top1_prob"])
            assert torch.allclose(scores.probability_KW[0], recorded, atol=1e-4)
