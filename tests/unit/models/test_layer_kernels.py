"""The layers' Triton kernels compute what torch's passes compute.

Triton's interpreter runs them on the CPU, in a process of its own, because Triton decides when it
is imported whether it interprets. A second process compiles them for a CUDA device.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dllm_bench.models.layer_ops import compare_kernels
from tests.unit.test_fused import COMPILE, child

if find_spec("triton") is None:
    pytest.skip("Triton is not installed (extra: kernels)", allow_module_level=True)

INTERPRET = """
from dataclasses import replace
import torch
from dllm_bench.models import attention, layer_ops, layers
from tests.helpers import tiny_denoiser
from tests.unit.models.test_layers import PREFIX, TOKENS, WINDOW, cached
compare_windows = layer_ops._compare_windows
for dtype in layer_ops.DTYPES:
    if dtype != torch.float32:  # the interpreter multiplies no bfloat16, and is slow
        layer_ops._compare_windows = lambda *given: None
    layer_ops.compare_kernels("cpu", dtype)
    layer_ops._compare_windows = compare_windows
attention.WORTH_MASKED = 0
layer_ops.has_kernels = layers.has_kernels = attention.has_kernels = lambda *given: True
model = tiny_denoiser("qwen3", seed=4)
plan, sides = replace(WINDOW, store=(PREFIX, PREFIX + 4), feature_layers=(-1, 0, 1)), []
for side in (layers.own_layers(model.module, True), layers.module_layers(model.module)):
    model.layers = side
    kv = cached(model, TOKENS[:2])
    logits = model.forward(TOKENS[:2], plan, kv)
    kv.keep(plan, torch.tensor(1))
    sides.append([logits, kv.features, *(part[:, :, : kv.length] for part in kv._buffers())])
torch.testing.assert_close(*sides, atol=5e-5, rtol=1e-5)
print("equal")
"""

LAYERS = """
from itertools import product
from dllm_bench.models import kernels, layer_ops
ROWS = (1, 3, 16, 48)
watch(kernels.swiglu, kernels.rotate, kernels.join, kernels.attend_parts, kernels.join_parts)
zeros = lambda *shape: torch.zeros(shape, dtype=torch.bfloat16)
layer_ops.swiglu_kernel(zeros(2, 2 * 18944))
for weight, rows in product((None, zeros(32, 128)), ROWS):
    slots = (zeros(1, 4, 60, 128), zeros(1, 4, 60, 128))
    angles = (zeros(1, rows, 128),) * 2
    layer_ops.rotate_kernel(zeros(1, rows, 36, 128), angles, slots, weight, 1e-6)
for rows in ROWS:
    mass = torch.zeros(1, 28, 3 * rows), torch.zeros(3, 28, rows)
    old, own = zeros(1, 3 * rows, 28, 128), zeros(3, rows, 28, 128)
    layer_ops.join_kernel(old, mass[0], own, mass[1])
own, cached = ((zeros(k, 4, n, 128),) * 2 for k, n in ((8, 32), (1, 1280)))
masks = zeros(8, 1, 32, 32), zeros(1280)
layer_ops.windows_kernel(zeros(8, 28, 32, 128), (*own, masks[0]), (*cached, masks[1]))
"""


@pytest.mark.exhaustive
def test_the_kernels_are_torchs_passes() -> None:
    assert child(INTERPRET, TRITON_INTERPRET="1").split() == ["equal"]


@pytest.mark.exhaustive
def test_the_kernels_compile_once_for_any_number_of_rows(tmp_path: Path) -> None:
    """So that the length of a prompt compiles nothing within a timed request."""
    built = child(COMPILE + LAYERS, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))
    assert built.split() == "swiglu rotate rotate join attend_parts join_parts".split()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_agree_on_a_device() -> None:
    compare_kernels("cuda", torch.float32)
