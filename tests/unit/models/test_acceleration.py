"""Graphs of fixed shapes, compiled and quantised models: equal logits, or what to do instead.

A CPU records nothing: the same function runs on the same padded shapes, over the same store. Logits
of fixed shapes and of the compiled function, which one test traces, are compared in `test_layers`.
"""

from __future__ import annotations

import random
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dllm_bench.api.compose import compose
from dllm_bench.api.generation import decoder as decoder_named
from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.errors import FALLBACKS, DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models import acceleration, attention
from dllm_bench.models.acceleration import CompiledDenoiser, FixedShapeDenoiser
from dllm_bench.models.load import load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.store.inputs import decoder_of
from tests.helpers import load_denoiser, tiny_checkpoint, tiny_denoiser, whole_forward
from tests.speculative import with_drafter
from tests.tiers import covering
from tests.unit.models.common import spec
from tests.unit.models.test_layers import TOKENS, WINDOW, cached

BLOCK = 8
FIRST = torch.tensor(0)
MOST = 6  # shapes of a run
DECODERS = {  # decoder -> the layout that it decodes
    "lopa": "dream",
    "lopa_dream": "dream",
    "d2f": "dream",
    "fast_dllm_dual": "llada",
    "fast_dllm_prefix": "llada",
    "sdar": "sdar",
    "vanilla": "llada",
    "ar": "qwen3",
    "eagle3": "qwen3",
    "dspark": "qwen3",
}


def fixed(model: TransformerDenoiser) -> FixedShapeDenoiser:
    return FixedShapeDenoiser(
        model.module, model.special, model.shifted, attention_form=model.attention_form
    )


def generations(model: TransformerDenoiser, decoder: object, count: int) -> list[Generation]:
    chosen = random.Random(7)
    made = []
    for index in range(count):
        ids = tuple(chosen.randrange(1, 20) for _ in range(chosen.randrange(20, 300)))
        made.append(decoder.generate(model, Request(f"r{index}", ids, 32, seed=index)))
    return made


@pytest.mark.parametrize("name", covering(4, list(DECODERS), often=2))
def test_a_run_of_prompts_has_few_shapes_and_the_same_tokens(name: str, tmp_path: Path) -> None:
    branches = ["decoder.explore.k=7"] if name == "lopa_dream" else []
    plain = with_drafter(compose([f"decoder={name}", *branches])["decoder"], tmp_path)
    decoder = decoder_of(plain)
    model = tiny_denoiser(DECODERS[name], 1)
    one = fixed(model)
    one.expect_canvas(300 + 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = generations(one, decoder, 8)
    assert 1 <= len(one.shapes_met) <= MOST
    one._most_branches = 8  # as a run of this decoder says
    features = next(iter(one.shapes_met)).feature_layers
    assert one.shapes_met <= set(one.run_shapes(features)), "a shape is recorded within a request"
    expected = generations(model, decoder, 2)
    assert [(g.ids, g.born) for g in found[:2]] == [(g.ids, g.born) for g in expected]


def test_long_forwards_and_other_plans_run_as_they_are() -> None:
    model = fixed(tiny_denoiser("dream", 3))
    length = acceleration.ROWS + 8
    tokens_1L, kv = torch.arange(length)[None] % 20, model.new_cache(length)
    plan = ForwardPlan(ForwardKind.PREFILL, (0, length), (0, length), (0, length))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a long forward is as fast without a graph
        model.forward(tokens_1L, plan, kv)
        kv.keep(plan, FIRST)
    assert not model.shapes_met
    fed_F = torch.arange(4, 9)
    part = ForwardPlan(ForwardKind.DENOISE, (4, 9), (5, 9), (4, 9))
    for words, plan in (
        ("feeds single", replace(part, sets=PositionSets(fed_F, torch.arange(4), fed_F))),
        ("in front of cached ones", replace(part, attention="block_causal", block=BLOCK)),
    ):
        with pytest.warns(UserWarning, match=f"run without CUDA graphs, because .*{words}"):
            model.forward(tokens_1L, plan, kv)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it was said once
            model.forward(tokens_1L, plan, kv)


def test_a_spec_chooses_it_and_other_layers_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("dream", tmp_path / "own", seed=3)
    assert isinstance(load_model(spec(folder, compile="max")).denoiser, FixedShapeDenoiser)
    assert type(load_denoiser(folder)) is TransformerDenoiser
    folder = tiny_checkpoint("llada2", tmp_path / "theirs", seed=3)
    with pytest.raises(DllmBenchError, match=r"graphs of the package's own layers.*default"):
        load_model(spec(folder, compile="max"))


def test_the_kernel_without_a_mask_is_tried_with_the_heads_of_the_model(monkeypatch) -> None:
    """A kernel that takes no heads of K/V that several heads of queries share is not used for them,
    with one warning, which records repeat.
    """

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Any:
        assert query.shape[1] == key.shape[1], "heads differ"
        scores = query.float() @ key.float().mT * query.shape[-1] ** -0.5
        return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1), None, None

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", kernel)
    attention.mass_kernel_works.cache_clear()
    assert attention.mass_kernel_works(torch.bfloat16, (4, 4, 16), "cpu")
    with pytest.warns(UserWarning, match=r"4 over 2 heads of 16 in torch.bfloat16.*heads differ"):
        assert not attention.mass_kernel_works(torch.bfloat16, (4, 2, 16), "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not attention.mass_kernel_works(torch.bfloat16, (4, 2, 16), "cpu")
    assert any("4 over 2 heads of 16" in fallback for fallback in FALLBACKS)
    query, key = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 7, 16)
    attended, mass = attention._attend_by_products(query, key, key)
    law = torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    torch.testing.assert_close(attended.transpose(1, 2), law)
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    torch.testing.assert_close(mass, scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("branches", "fed", "recorded"),
    [(8, 64, True), (8, 32, True), (3, 64, True), (5, 64, False), (8, 96, False), (1, 500, True)],
)
def test_rows_of_eight_branches_over_two_blocks_are_recorded(branches, fed, recorded) -> None:
    """LoPA's with k = 7; five such branches would be padded by 60 %, where each row costs time."""
    model = fixed(tiny_denoiser("dream", 3))
    plan = ForwardPlan(ForwardKind.DENOISE, (0, fed), (1, fed), (0, 0))
    shape = model._shape(branches, fed, plan, model.new_cache(fed))
    assert (shape is not None) == recorded


class Recording(TorchDispatchMode):
    """The operations of a forward, which `replay` repeats with the same tensors, as a CUDA graph
    does: no Python of the forward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args, kwargs or {}, func(*args, **(kwargs or {}))))
        return self.calls[-1][-1]

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def check_replays(model: TransformerDenoiser, name: str, count: int) -> None:
    """All forwards but the prefills are replayed, to the same tokens."""
    decoder: Any = decoder_named(name)
    found, expected = generations(fixed(model), decoder, count), generations(model, decoder, count)
    assert [(g.ids, g.born) for g in found] == [(g.ids, g.born) for g in expected]
    replayed = [forward.replayed for g in found for forward in g.trace.forwards]
    assert sum(replayed) == len(replayed) - len(found)


@pytest.mark.parametrize("name", ["lopa", "d2f"])
def test_a_forward_depends_on_nothing_but_what_was_written(name, monkeypatch) -> None:
    def run(self: acceleration.FixedForward, model: FixedShapeDenoiser) -> Any:
        if self.graph is None:
            with Recording() as self.graph:  # type: ignore[assignment]
                self._outputs = model.run_fixed(self)
        self.graph.replay()  # type: ignore[union-attr]
        return self._outputs

    monkeypatch.setattr(acceleration.FixedForward, "run", run)
    model = tiny_denoiser("dream", 3)
    model.attention_form = "block_causal"
    check_replays(model, name, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["lopa", "d2f"])
def test_a_recorded_graph_gives_the_same_tokens(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = tiny_denoiser("dream", 3)
    model = TransformerDenoiser(
        model.module.cuda(), model.special, model.shifted, attention_form="block_causal"
    )
    check_replays(model, name, 6)


@pytest.mark.exhaustive
def test_the_function_can_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an inductor, which takes minutes on a CPU: dynamo alone, whole graphs only."""
    traced = partial(torch.compile, fullgraph=True, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    folder = tiny_checkpoint("dream", tmp_path, seed=3, num_hidden_layers=1)
    models = load_denoiser(folder), load_model(spec(folder, compile="default")).denoiser
    assert isinstance(models[1], CompiledDenoiser)
    expected, found = (one.forward(TOKENS[:1], WINDOW, cached(one, TOKENS)) for one in models)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def quantised(folder: Path, kind: str, dtype: Any = "float32") -> TransformerDenoiser:
    denoiser = load_model(spec(folder, dtype=dtype, quantization=kind)).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser


def test_w8a8_is_close_and_not_equal(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="quantisation needs the extra [quant]")
    folder = tiny_checkpoint("llada", tmp_path, seed=3)
    models = load_denoiser(folder), quantised(folder, "w8a8")
    expected, found = (whole_forward(model, TOKENS) for model in models)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()


QUANTISED = {
    "w8a8": "Int8DynamicActivationInt8WeightConfig",
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_the_layers_are_given_to_torchao(tmp_path, monkeypatch, kind) -> None:
    """A stand-in with torchao's names, for where the extra is not installed."""
    torchao = Mock()
    monkeypatch.setitem(sys.modules, "torchao", Mock(quantization=torchao))
    monkeypatch.setattr(acceleration, "has_fp8", lambda device: True)
    model = quantised(tiny_checkpoint("dream", tmp_path, seed=3), kind, "bfloat16")
    config = getattr(torchao, QUANTISED[kind])
    config.assert_called_once_with(**{"granularity": torchao.PerRow()} if kind == "fp8" else {})
    torchao.quantize_.assert_called_once_with(model.module.model.layers, config())


def test_what_cannot_be_quantised_raises_an_error(tmp_path, monkeypatch) -> None:
    folder = tiny_checkpoint("dream", tmp_path, seed=3)
    with pytest.raises(DllmBenchError, match=r"capability 8\.9 or more, found cpu; use .*w8a8"):
        quantised(folder, "fp8")
    monkeypatch.setattr(acceleration, "has_fp8", lambda device: True)
    with pytest.raises(DllmBenchError, match="model is in float32; use dtype=bfloat16"):
        quantised(folder, "fp8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(DllmBenchError, match=r"needs torchao, .*dllm-bench\[quant\]"):
        quantised(folder, "w8a8")
    with pytest.raises(DllmBenchError, match="quantization 'w8a8' with a LoRA adapter"):
        ModelSpec("tiny", str(folder), lora="x", merge_lora=False, quantization="w8a8")
