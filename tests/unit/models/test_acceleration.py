"""Compiled and quantised models: equal logits up to rounding, or an error that says what to do.

Compilation itself is torch's: most tests run the function uncompiled, one traces it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import acceleration
from dllm_bench.models.acceleration import CompiledDenoiser
from dllm_bench.models.load import load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import load_denoiser, tiny_checkpoint
from tests.tiers import covering
from tests.unit.models.test_graphs import outputs

Run = Callable[..., Any]


def compiled(folder: Path) -> CompiledDenoiser:
    spec = ModelSpec("tiny", str(folder), dtype="float32", device="cpu", compile="default")
    denoiser = load_model(spec).denoiser
    assert isinstance(denoiser, CompiledDenoiser)
    return denoiser


@pytest.mark.parametrize("branches", [1, 3])
@pytest.mark.parametrize("layout", covering(4, ["llada", "dream", "llada2", "qwen3"]))
def test_a_compiled_model_gives_the_same_logits(
    layout: str, branches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.compile hands the function back."""
    monkeypatch.setattr(torch, "compile", lambda function, *, dynamic: function)
    folder = tiny_checkpoint(layout, tmp_path, seed=3)
    expected, found = outputs(load_denoiser(folder), branches), outputs(compiled(folder), branches)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-4)


def test_the_function_can_be_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an inductor, which takes minutes on a CPU: dynamo alone, whole graphs only."""
    real = torch.compile

    def traced(function: Run, *, dynamic: bool) -> Run:
        return real(function, dynamic=dynamic, fullgraph=True, backend="eager")

    monkeypatch.setattr(torch, "compile", traced)
    folder = tiny_checkpoint("dream", tmp_path, seed=3)
    for one, other in zip(
        outputs(load_denoiser(folder), 1), outputs(compiled(folder), 1), strict=True
    ):
        torch.testing.assert_close(other, one, atol=2e-5, rtol=1e-4)


def quantised(folder: Path, kind: str, dtype: Any = "float32") -> TransformerDenoiser:
    spec = ModelSpec("tiny", str(folder), dtype=dtype, device="cpu", quantization=kind)
    denoiser = load_model(spec).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser


def test_w8a8_is_close_and_not_equal(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="quantisation needs the extra [quant]")
    folder = tiny_checkpoint("llada", tmp_path, seed=3)
    models = load_denoiser(folder), quantised(folder, "w8a8")
    (expected, *_), (found, *_) = (outputs(model, 1) for model in models)
    assert 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("w8a8", "Int8DynamicActivationInt8WeightConfig()"),
        ("fp8", "Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())"),
    ],
)
def test_the_layers_are_given_to_torchao(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: str
) -> None:
    """A stand-in with torchao's names, for where the extra is not installed."""
    handed: list[tuple[int, str]] = []
    module: Any = ModuleType("torchao.quantization")
    for name in ("PerRow", *(name for name, _ in acceleration.CONFIGS.values())):
        fields = [("granularity", Any)] if name.startswith("Float8") else []
        setattr(module, name, make_dataclass(name, fields))
    module.quantize_ = lambda blocks, config: handed.append((len(blocks), repr(config)))
    package: Any = ModuleType("torchao")
    package.quantization = module
    monkeypatch.setitem(sys.modules, "torchao", package)
    monkeypatch.setitem(sys.modules, "torchao.quantization", module)
    monkeypatch.setattr(acceleration, "has_fp8", lambda device: True)
    folder = tiny_checkpoint("dream", tmp_path, seed=3)
    quantised(folder, kind, "bfloat16")
    assert handed == [(2, expected)]


def test_what_cannot_be_quantised_raises_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
