"""Quantised linear layers by torchao: w8a8 (int8 weights and activations) or fp8, dynamic scales.

Linear layers of the blocks are replaced in place after loading; embedding, head, norms, routers and
stacked experts keep the run's dtype. Left out: calibration, quantised checkpoints, KV quantisation.
"""

from __future__ import annotations

from typing import Any

import torch

from dllm_bench.core.errors import DllmBenchError

CONFIGS = {
    "w8a8": "Int8DynamicActivationInt8WeightConfig",
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
}
FP8_CAPABILITY = (8, 9)  # CUDA compute capability of the first devices with fp8 products (Ada)


def quantize(module: Any, kind: str, device: torch.device) -> None:
    """Quantise the blocks of a `*ForCausalLM` module, or say why that cannot be done here."""
    if kind == "fp8" and not has_fp8(device):
        raise DllmBenchError(
            f"quantization=fp8 needs a CUDA device of compute capability 8.9 or more, "
            f"found {device}; use quantization=w8a8 or none."
        )
    try:
        from torchao import quantization
    except ImportError:
        raise DllmBenchError(
            f"quantization={kind} needs torchao, which is not installed; install it with: pip "
            f"install 'dllm-bench[quant]'"
        ) from None
    quantization.quantize_(module.model.layers, getattr(quantization, CONFIGS[kind])())


def has_fp8(device: torch.device) -> bool:
    """Whether the device multiplies fp8 matrices."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
