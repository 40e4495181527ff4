"""DiffusionGemma against transformers' own loop: recorded steps, and `generate` itself.

Random numbers are those of torch's stream after the same seed, so every step is equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.canvas import CanvasDecoder
from tests import canvas
from tests.golden.cases import Case, agreement, replayed
from tests.helpers import Watched, noting

PAD, CANVAS = 0, 16
SETTINGS = {  # of transformers' generation configuration -> of the decoder here
    "max_denoising_steps": "anneal__steps",
    "t_max": "anneal__first",
    "t_min": "anneal__last",
    "entropy_bound": "accept__gamma",
    "stability_threshold": "settle__rounds",
    "confidence_threshold": "settle__entropy",
}


def watched(model: Any, eos: int | None) -> Watched:
    """Return a model with this end token, if any, that keeps its canvases."""
    found = Watched(model)
    found.special = SpecialTokens(canvas.NO_TOKEN, canvas.NO_TOKEN if eos is None else eos, PAD)
    return found


def decoder_for(params: dict[str, Any]) -> CanvasDecoder:
    """Return the decoder with the numbers that `generate` was called with."""
    given = {SETTINGS[key]: params[key] for key in SETTINGS.keys() & params.keys()}
    return canvas.canvas_decoder(**given)


def padded(generation: Generation, pad: int | None) -> list[int]:
    """Return the tokens as the library does: padded after the end, if it has a padding token."""
    ids, end = list(generation.ids), generation.cut.get("eos")
    if end is None or pad is None:
        return ids
    return [*ids[: end + 1], *[pad] * (len(ids) - end - 1)]


def tokens_per_forward(generation: Generation, pad: int | None) -> float:
    """Return the library's count: tokens that are no padding, by forwards over a canvas alone."""
    denoising = sum(one.kind is ForwardKind.DENOISE for one in generation.trace.forwards)
    return sum(token != pad for token in padded(generation, pad)) / denoising


def canvases_over_time(generation: Generation) -> list[list[int]]:
    """Return the most probable tokens of the open canvas after each forward, from the trace."""
    ids, found, end = list(generation.ids), list[list[int]](), len(generation.ids)
    for forward in reversed(generation.trace.forwards):
        if forward.kind is not ForwardKind.DENOISE:
            end -= CANVAS
            continue
        found.append(ids[end - CANVAS : end])
        for change in forward.changes:
            assert ids[change.position] == change.after
            ids[change.position] = change.before
    return found[::-1]


@replayed("new2026/diffusion_gemma_cases.json")
def test_the_recorded_steps(case: Case) -> None:
    params, steps = case["params"], case["steps"]
    pad, plain = params.get("pad_token_id"), decoder_for(params)
    model = watched(canvas.tiny_canvas_model(0, canvas=CANVAS), params["eos_token_id"])
    accept, seen = noting(plain.accept)
    request = Request("golden", tuple(case["prompt"]), params["max_new_tokens"], seed=case["seed"])
    generation = replace(plain, accept=accept).generate(model, request)
    pairs = zip(model.canvases, model.plans, strict=True)
    denoised = [(canvas, plan) for canvas, plan in pairs if plan.kind is ForwardKind.DENOISE]
    fed = [canvas[0, slice(*plan.feed)].tolist() for canvas, plan in denoised]
    rate = pytest.approx(case["tokens_per_forward"], rel=1e-5)
    with agreement(case):
        assert (padded(generation, pad), len(fed)) == (case["output"], case["decoder_forwards"])
        assert len(generation.trace) - len(fed) == case["encoder_forwards"]
        assert tokens_per_forward(generation, pad) == rate
        assert fed == [step["input"] for step in steps]
        accepted = [sorted(step["accepted"]) for step in steps]
        assert [x.nonzero()[:, 0].tolist() for _, x in seen] == accepted
        counts = [one.accepted for one in generation.trace.forwards if one.cached]
        assert [count for count in counts if count] == [len(one) for one in accepted]
        tops = [step["argmax"] for step in steps]
        assert [scores.top_C.tolist() for (scores,), _ in seen] == tops
        assert canvases_over_time(generation) == tops
        entropies = [float(scores.entropy_C.mean()) for (scores,), _ in seen]
        assert entropies == pytest.approx([step["mean_entropy"] for step in steps], abs=2e-5)


SHAPES: tuple[dict[str, Any], ...] = (
    {},
    {"canvas": 8, "layers": (canvas.SLIDING, canvas.FULL), "window": 8},
    {"canvas": 12, "layers": (canvas.SLIDING, canvas.FULL), "window": 32, "spread": 40},
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("heat", [{}, {"t_min": 1e-6, "t_max": 2e-6}], ids=["drawn", "greedy"])
def test_equals_the_librarys_generate(shape: dict[str, Any], heat: dict[str, float]) -> None:
    """Of other shapes than the recorded one, with layers that are scaled differently."""
    from transformers.models.diffusion_gemma import generation_diffusion_gemma as library

    theirs, prompt = canvas.scaled_apart(canvas.published(1, **shape)), [*range(3, 34)]
    settings = {"max_denoising_steps": 12, "entropy_bound": 1.0, "confidence_threshold": 3.0}
    settings |= heat
    model, decoder = canvas.read_here(theirs), decoder_for(settings)
    request = Request("one", tuple(prompt), 2 * model.canvas_length + 1, seed=5)
    ours = decoder.generate(watched(model, None), request)
    bound = library.EntropyBoundSamplerConfig(settings.pop("entropy_bound"))
    torch.manual_seed(request.seed)
    tokens_1L = torch.tensor([prompt])
    lengths = {"max_new_tokens": request.max_new_tokens, "eos_token_id": None, "pad_token_id": None}
    expected = theirs.generate(tokens_1L, sampler_config=bound, **lengths, **settings)
    assert list(ours.ids) == expected.sequences[0, len(prompt) :].tolist()
    rate = pytest.approx(float(expected.tokens_per_forward), rel=1e-5)
    assert tokens_per_forward(ours, None) == rate
