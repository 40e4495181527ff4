"""Laws of uniform-state diffusion, on random models: what holds whatever the weights are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.api.generation import composed_decoder
from dllm_bench.api.preflight import check_attention
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Option, Request
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import count_sample
from dllm_bench.models.load import denoiser_class
from tests.canvas import FULL, SLIDING, canvas_decoder, tiny_canvas_model
from tests.helpers import tiny_denoiser
from tests.sample_stats import sample

CANVAS, STEPS = 8, 6
SHAPE: dict[str, Any] = {"canvas": CANVAS, "layers": (SLIDING, FULL), "window": 8}
WIDE = {"accept__gamma": 1e9}
NEVER = {"settle__entropy": 1e-9}
COLD = {"anneal__first": 2e-6, "anneal__last": 1e-6}


def request(canvases: float = 2, seed: int = 3, prompt: int = 5) -> Request:
    ids = torch.randint(3, 500, (prompt,), generator=torch.Generator().manual_seed(prompt))
    return Request(f"r{seed}", (*ids.tolist(),), int(canvases * CANVAS), seed=seed)


def model() -> Any:
    return tiny_canvas_model(2, **SHAPE)


def decoded(asked: Request | None = None, **settings: Any) -> Generation:
    decoder = canvas_decoder(**{"anneal__steps": STEPS, **settings})
    return decoder.generate(model(), asked or request())


def denoising(generation: Generation) -> list[Forward]:
    return [one for one in generation.trace.forwards if one.kind is ForwardKind.DENOISE]


def facts(generation: Generation) -> tuple[Any, ...]:
    rows = [replace(one, ms=0.0) for one in generation.trace.forwards]
    return generation.ids, generation.born, generation.cut, rows


def test_equal_seeds_give_equal_texts_and_other_seeds_others() -> None:
    assert facts(decoded(request())) == facts(decoded(request()))
    assert decoded(request(seed=3)).ids != decoded(request(seed=4)).ids


@pytest.mark.parametrize("canvases", [0.4, 1, 1.2, 3])
def test_every_position_of_whole_canvases_is_filled(canvases: float) -> None:
    generation = decoded(request(canvases), **NEVER)
    whole = -int(-canvases // 1)
    assert len(generation.ids) == len(generation.born) == whole * CANVAS
    assert generation.cut == {"length": int(canvases * CANVAS)}
    assert all(1 <= one.accepted <= CANVAS for one in denoising(generation))
    accepted = [one.accepted for one in denoising(decoded(request(canvases), **WIDE))]
    assert set(accepted) == {CANVAS}
    assert all(0 <= token < model().vocab_size for token in generation.ids)


def test_forwards_are_counted_and_tell_what_they_read() -> None:
    generation = decoded(request(3), **NEVER)
    kinds = [one.kind.value for one in generation.trace.forwards]
    assert kinds == ["prefill", *["denoise"] * STEPS] * 3
    first, again = generation.trace.forwards[0], generation.trace.forwards[STEPS + 1]
    assert (first.fed, first.cached, again.fed, again.cached) == (5, 0, CANVAS, 5)
    assert {(one.fed, one.cached) for one in denoising(generation)} == {
        (CANVAS, 5 + CANVAS * number) for number in range(3)
    }
    each = first.kept_bytes // 5
    assert each > 0
    for one in generation.trace.forwards:
        assert one.read_bytes == each * one.cached
        grows = one.kind is ForwardKind.PREFILL
        assert one.kept_bytes == each * (one.cached + one.fed * grows)


def test_the_trace_tells_every_change_of_every_position() -> None:
    """Played backwards it ends with the first prediction, and counts of writes add up."""
    generation = decoded(request(2), **NEVER)
    ids, born = list(generation.ids), list(generation.born)
    index_of = {id(one): index for index, one in enumerate(generation.trace.forwards)}
    changed = set()
    for one in reversed(generation.trace.forwards):
        for change in one.changes:
            assert (ids[change.position], born[change.position]) == (
                change.after,
                index_of[id(one)],
            )
            ids[change.position], born[change.position] = change.before, change.born
            changed.add(change.position)
    assert set(born) == {1, STEPS + 2}
    assert changed == set(range(2 * CANVAS)), "a random model changes its mind everywhere"
    writes = generation.trace.writes(generation.born)
    assert sum(one.committed for one in writes) == len(generation.ids)
    assert [one.committed for one in writes if one.committed] == [CANVAS, CANVAS]
    stored = Trace.from_columns(generation.trace.columns())
    assert stored.forwards == generation.trace.forwards


def test_a_longer_limit_only_adds_canvases() -> None:
    assert decoded(request(3)).ids[: CANVAS * 2] == decoded(request(2)).ids


def test_an_end_token_ends_after_its_canvas() -> None:
    free = decoded(request(3))
    target = model()
    ended = replace(target.special, eos=free.ids[CANVAS + 2])
    found = next(i for i, token in enumerate(free.ids) if token == ended.eos)
    before, target.special = target.special, ended
    try:
        generation = decoded(request(3))
    finally:
        target.special = before
    assert generation.ids == free.ids[: (found // CANVAS + 1) * CANVAS]
    assert generation.cut["eos"] == found


def test_one_step_is_the_most_probable_token_of_noise() -> None:
    generation = decoded(request(1), anneal__steps=1)
    numbers = torch.Generator().manual_seed(3)
    noise_C = torch.randint(model().vocab_size, (CANVAS,), generator=numbers)
    assert [one.kind.value for one in generation.trace.forwards] == ["prefill", "denoise"]
    assert generation.ids != tuple(noise_C.tolist())
    assert generation.ids == decoded(request(1), anneal__steps=1, **COLD).ids


def test_an_infinite_bound_accepts_all_and_a_small_one_a_position() -> None:
    entropy_C = torch.tensor([3.0, 0.5, 2.0, 0.1])
    scores = Scores(entropy_C)
    for gamma, accepted in (
        (1e-9, [False, False, False, True]),
        (0.2, [False, True, False, True]),
        (0.7, [False, True, True, True]),
        (1e9, [True] * 4),
    ):
        assert canvas_decoder(accept__gamma=gamma).accept(scores).tolist() == accepted


class Scores:
    """Scores that are nothing but entropies."""

    def __init__(self, entropy_C: torch.Tensor) -> None:
        self.entropy_C, self.top_C = entropy_C, entropy_C.argsort()


def test_settling_wants_the_same_tokens_and_little_entropy() -> None:
    sure, unsure = Scores(torch.full((4,), 1e-4)), Scores(torch.ones(4))
    same, other = sure.top_C, sure.top_C.flip(0)
    for rounds, before, settles in (
        (0, [], True),
        (1, [], False),
        (1, [other, same], True),
        (2, [other, same], False),
        (2, [same, same], True),
    ):
        settle = canvas_decoder(settle__rounds=rounds).settle
        assert bool(settle(before, sure)) is settles
        assert not settle(before, unsure)


def test_a_canvas_that_has_settled_takes_no_more_forwards() -> None:
    fast = decoded(settle__entropy=1e9, settle__rounds=0)
    assert len(denoising(fast)) == 2
    assert not any(one.changes for one in fast.trace.forwards)


def test_without_its_network_self_conditioning_changes_nothing() -> None:
    """The mean embedding of the last prediction is all that a step remembers of those before."""
    target, decoder = tiny_canvas_model(5, **SHAPE), canvas_decoder(anneal__steps=STEPS, **NEVER)
    weight = target.module.self_conditioning.down_proj.weight
    expected = decoder.generate(target, request())
    weight.data.zero_()
    without = decoder.generate(target, request())
    target.mean_embeddings = lambda logits_1CV: None
    assert decoder.generate(target, request()).ids == without.ids != expected.ids


def test_a_cold_temperature_draws_the_most_probable_tokens() -> None:
    """Then only noise is random, and with all positions accepted there is none after the first."""
    generation = decoded(request(2), **COLD, **WIDE)
    assert facts(generation) == facts(decoded(request(2), **COLD, **WIDE))
    first = denoising(generation)[0]
    assert not first.changes


@pytest.mark.parametrize("batch", [2, 3])
def test_batched_requests_are_decoded_as_alone(batch: int) -> None:
    decoder = canvas_decoder(anneal__steps=STEPS)
    asked = [request(1 + seed % 3, seed, 3 + seed) for seed in range(5)]
    alone = {one.id: facts(decoder.generate(model(), one)) for one in asked}
    found = {g.request_id: facts(g) for g in decoder.generate_stream(model(), asked, batch)}
    assert found == alone


def test_a_request_does_not_change_the_next_one() -> None:
    alone = facts(decoded(request(seed=9)))
    decoded(request(seed=1))
    assert facts(decoded(request(seed=9))) == alone


def test_its_own_count_of_tokens_per_forward_leaves_encoding_out() -> None:
    generation = decoded(request(1.5), **NEVER)
    counts = count_sample(generation, model().special)
    assert (counts["encoding"], counts["through_end"]) == (2, 2 * CANVAS)
    stats = sample(**counts)
    assert measure("tpf/diffusion_gemma", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS))
    assert measure("tpf/committed", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS + 2))
    assert measure("tpf/emitted", [stats]) == pytest.approx(1.5 * CANVAS / (2 * STEPS + 2))


# --- what does not fit ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vanilla", "ar", "fast_dllm_dual", "lopa", "dmax", "oracle"])
def test_a_decoder_of_masks_refuses_a_model_without_a_mask(name: str) -> None:
    decoder = composed_decoder(name, [])
    with pytest.raises(DllmBenchError, match="decoder=masked needs a model with a mask token"):
        decoder.generate(model(), request())


def test_other_loops_refuse_it_too() -> None:
    with pytest.raises(DllmBenchError, match="decoder=speculative needs a model with causal"):
        composed_decoder("ngram_speculative", []).generate(model(), request())
    options = replace(request(), options=(Option((5, 6), (7,)),))
    with pytest.raises(DllmBenchError, match="decoder=likelihood needs a model with a mask token"):
        composed_decoder("likelihood", []).generate(model(), options)


@pytest.mark.parametrize("layout", ["llada", "dream", "sdar", "qwen3"])
def test_it_refuses_models_that_denoise_no_canvas_of_random_tokens(layout: str) -> None:
    with pytest.raises(
        DllmBenchError, match="decoder=canvas needs a model with a canvas of random"
    ):
        canvas_decoder().generate(tiny_denoiser(layout, seed=1), Request("r", (5, 6), 8))


def test_it_refuses_tokens_that_stand_from_the_start() -> None:
    with pytest.raises(DllmBenchError, match="pinned tokens needs a model with a mask token"):
        decoded(replace(request(), pinned=((1, 7),)))


def test_a_mismatch_is_said_before_anything_is_loaded() -> None:
    canvas, masked = {"settle": {}, "name": "canvas"}, {"score": {}, "name": "vanilla"}
    with pytest.raises(DllmBenchError, match="no mask token; choose decoder=diffusion_gemma"):
        check_attention({"attention_form": "canvas", "name": "m"}, masked)
    for form in ("full", "block_causal", "causal"):
        with pytest.raises(DllmBenchError, match=f"has {form} attention, and the decoder denoises"):
            check_attention({"attention_form": form, "name": "m"}, canvas)
    check_attention({"attention_form": "canvas", "name": "m"}, canvas)


def test_a_temperature_that_does_not_fall_is_refused() -> None:
    with pytest.raises(DllmBenchError, match=r"decoder\.anneal\.last"):
        canvas_decoder(anneal__last=0.8)


def test_compiled_forms_of_the_model_are_refused() -> None:
    with pytest.raises(DllmBenchError, match="set hardware.compile=none"):
        denoiser_class("max", "canvas")
