"""DiffusionGemma's checkpoint: what is read of it, in which forms, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dllm_bench as db
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.load import load_model
from dllm_bench.models.spec import ModelSpec
from tests.canvas import FULL, SLIDING, published, scaled_apart
from tests.helpers import load_denoiser, tiny_tokenizer
from tests.unit.models.common import respelled

CANVAS, TEXT = 8, 21
FIRST = torch.zeros((), dtype=torch.long)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint as transformers writes it, vision tower included."""
    theirs = scaled_apart(published(4, canvas=CANVAS, layers=(SLIDING, FULL), window=8))
    theirs.save_pretrained(str(tmp_path))
    return tmp_path


def logits(model: Any, parts: tuple[int, ...] = (TEXT,)) -> Tensor:
    """Of a canvas behind a text that is encoded in parts which end at these positions."""
    numbers = torch.Generator().manual_seed(1)
    tokens_1L = torch.randint(3, 500, (1, TEXT + CANVAS), generator=numbers)
    mean_1CH = torch.randn(1, CANVAS, model.hidden_size, generator=numbers).to(model.dtype)
    kv = model.new_cache(TEXT + CANVAS)
    for start, stop in zip((0, *parts), parts, strict=False):
        span = (start, stop)
        plan = ForwardPlan(ForwardKind.PREFILL, span, span, span, "block_causal", 1)
        model.forward(tokens_1L, plan, kv)
        kv.keep(plan, FIRST)
    span = (TEXT, TEXT + CANVAS)
    plan = ForwardPlan(ForwardKind.DENOISE, span, span, (0, 0), added_KFH=mean_1CH)
    return model.forward(tokens_1L, plan, kv)


def test_text_encoded_in_parts_is_text_encoded_at_once(folder: Path) -> None:
    model = load_denoiser(folder)
    whole = logits(model)
    for parts in ((1, TEXT), (7, 8, TEXT), (12, 20, TEXT)):
        torch.testing.assert_close(logits(model, parts), whole, atol=2e-5, rtol=1e-5)


def test_settings_may_be_flat_as_in_a_release_or_nested(folder: Path) -> None:
    nested = logits(load_denoiser(folder))
    respelled(folder, per_layer_config="absent", global_head_dim=32, num_global_key_value_heads=1)
    assert torch.equal(logits(load_denoiser(folder)), nested)


def test_kernels_and_dtypes(folder: Path) -> None:
    expected = logits(load_denoiser(folder))
    eager = load_model(ModelSpec("eager", str(folder), dtype="float32", attention="eager"))
    torch.testing.assert_close(logits(eager.denoiser), expected, atol=2e-5, rtol=1e-5)
    half = load_model(ModelSpec("half", str(folder), dtype="bfloat16"))
    assert half.metadata.parameters == sum(p.numel() for p in half.denoiser.module.parameters())
    found = logits(half.denoiser)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_vision_and_an_encoder_that_is_stored_twice_are_not_read(folder: Path) -> None:
    file, before = folder / "model.safetensors", logits(load_denoiser(folder))
    tensors = load_file(file)
    assert any("vision" in name for name in tensors)
    shared = [name for name in tensors if name.startswith("model.decoder.layers.")]
    for name in (name for name in shared if not name.endswith("layer_scalar")):
        encoder = name.replace("model.decoder.", "model.encoder.language_model.")
        tensors[encoder] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, file)
    assert torch.equal(logits(load_denoiser(folder)), before)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"num_experts": "absent"}, "no 'num_experts'"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, and the weights beside it have 2"),
    ],
)
def test_configs_that_would_be_read_wrongly_are_refused(folder, change, named) -> None:
    respelled(folder, **change)
    with pytest.raises(DllmBenchError, match=named):
        load_denoiser(folder)


def test_a_missing_tensor_is_named_as_published(folder: Path) -> None:
    file = folder / "model.safetensors"
    kept = {n: t for n, t in load_file(file).items() if not n.endswith("1.layer_scalar")}
    save_file(kept, file)
    with pytest.raises(DllmBenchError, match=r"encoder\.language_model\.layers\.1\.layer_scalar"):
        load_denoiser(folder)


def test_an_object_of_transformers_class_is_not_wrapped() -> None:
    theirs = published(1, canvas=CANVAS, layers=(FULL,))
    with pytest.raises(DllmBenchError, match="DiffusionGemmaForBlockDiffusion is no class") as no:
        db.wrap(theirs, tiny_tokenizer())
    assert "DiffusionGemmaForCausalLM" not in str(no.value)
