"""Laws of uniform-state diffusion; `tests/golden` compares it with transformers' own loop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.metrics.definitions import measure
from dllm_bench.metrics.sample_stats import count_sample
from tests.canvas import FULL, SLIDING, canvas_decoder, tiny_canvas_model
from tests.sample_stats import sample

CANVAS, STEPS = 8, 6
SHAPE: dict[str, Any] = {"canvas": CANVAS, "layers": (SLIDING, FULL), "window": 8}
NEVER = {"settle__entropy": 1e-9}


def request(canvases: float = 2, seed: int = 3, prompt: int = 5) -> Request:
    ids = torch.randint(3, 500, (prompt,), generator=torch.Generator().manual_seed(prompt))
    return Request(f"r{seed}", (*ids.tolist(),), int(canvases * CANVAS), seed=seed)


def model() -> Any:
    return tiny_canvas_model(2, **SHAPE)


def decoded(asked: Request | None = None, **settings: Any) -> Generation:
    decoder = canvas_decoder(**{"anneal__steps": STEPS, **settings})
    return decoder.generate(model(), asked or request())


def facts(generation: Generation) -> tuple[Any, ...]:
    rows = [replace(one, ms=0.0) for one in generation.trace.forwards]
    return generation.ids, generation.born, generation.cut, rows


def test_forwards_are_counted_and_tell_what_they_read() -> None:
    generation = decoded(request(3), **NEVER)
    kinds = [one.kind.value for one in generation.trace.forwards]
    assert kinds == ["prefill", *["denoise"] * STEPS] * 3
    first, again = generation.trace.forwards[0], generation.trace.forwards[STEPS + 1]
    assert (first.fed, first.cached, again.fed, again.cached) == (5, 0, CANVAS, 5)
    denoising = [one for one in generation.trace.forwards if one.kind is ForwardKind.DENOISE]
    read = {5 + CANVAS * number for number in range(3)}
    assert {(one.fed, one.cached) for one in denoising} == {(CANVAS, cached) for cached in read}
    each = first.kept_bytes // 5
    assert each > 0
    for one in generation.trace.forwards:
        assert one.read_bytes == each * one.cached
        assert one.kept_bytes == each * (one.cached + one.fed * (one.kind is ForwardKind.PREFILL))


def test_the_trace_tells_every_change_of_every_position() -> None:
    """Played backwards it ends with the first prediction, and counts of writes add up."""
    generation = decoded(request(2), **NEVER)
    ids, born = list(generation.ids), list(generation.born)
    index_of = {id(one): index for index, one in enumerate(generation.trace.forwards)}
    changed = set()
    for one in reversed(generation.trace.forwards):
        for change in one.changes:
            place = change.position
            assert (ids[place], born[place]) == (change.after, index_of[id(one)])
            ids[place], born[place] = change.before, change.born
            changed.add(place)
    assert set(born) == {1, STEPS + 2}
    assert changed == set(range(2 * CANVAS)), "a random model changes its mind everywhere"
    writes = generation.trace.writes(generation.born)
    assert sum(one.committed for one in writes) == len(generation.ids)
    assert [one.committed for one in writes if one.committed] == [CANVAS, CANVAS]
    assert Trace.from_columns(generation.trace.columns()).forwards == generation.trace.forwards


@pytest.mark.parametrize("batch", [2, 3])
def test_batched_requests_are_decoded_as_alone(batch: int) -> None:
    decoder = canvas_decoder(anneal__steps=STEPS)
    asked = [request(1 + seed % 3, seed, 3 + seed) for seed in range(5)]
    alone = {one.id: facts(decoder.generate(model(), one)) for one in asked}
    assert {g.request_id: facts(g) for g in decoder.generate_stream(model(), asked, batch)} == alone


def test_its_own_count_of_tokens_per_forward_leaves_encoding_out() -> None:
    counts = count_sample(decoded(request(1.5), **NEVER), model().special)
    assert (counts["encoding"], counts["through_end"]) == (2, 2 * CANVAS)
    stats = sample(**counts)
    assert measure("tpf/diffusion_gemma", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS))
    assert measure("tpf/committed", [stats]) == pytest.approx(2 * CANVAS / (2 * STEPS + 2))
    assert measure("tpf/emitted", [stats]) == pytest.approx(1.5 * CANVAS / (2 * STEPS + 2))
