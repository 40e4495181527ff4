"""Optional speed-ups: layers under torch.compile (`CompiledDenoiser`) and quantised linear layers.

torch.compile compiles once for lengths that vary; logits are equal up to rounding. Graphs of fixed
shapes are in `graphs`.

Quantisation (torchao): w8a8 (int8 weights and activations) or fp8, with dynamic scales. Linear
layers inside the transformer layers are replaced after loading; embedding, head, norms, routers and
stacked experts keep the run's dtype. Not here: calibration, quantised checkpoints, quantised K/V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.kv import KeysValues, PositionCache
from dllm_bench.models.layer_ops import Rotation
from dllm_bench.models.transformer import TransformerDenoiser

CONFIGS: dict[str, tuple[str, dict[str, str]]] = {  # torchao's names: a class, and its arguments
    "w8a8": ("Int8DynamicActivationInt8WeightConfig", {}),
    "fp8": ("Float8DynamicActivationFloat8WeightConfig", {"granularity": "PerRow"}),
}
FP8_CAPABILITY = (8, 9)  # CUDA compute capability of the first devices with fp8 products (Ada)


class CompiledDenoiser(TransformerDenoiser):
    """A `TransformerDenoiser` whose layers run as one compiled function of tensors."""

    owns_layers = False

    def _set_up(self) -> None:
        self.chooses_rows = False
        self._run = torch.compile(run_layers, dynamic=True)

    def _layers(self, tokens_KF: Tensor, plan: ForwardPlan, kv: PositionCache) -> Tensor:
        if plan.feature_layers:
            raise DllmBenchError(
                "The drafter reads outputs of the target's layers, which a compiled model does not "
                "give; set hardware.compile=max or none."
            )
        if plan.sets is not None:
            raise DllmBenchError(
                "The cache feeds single positions, and compiled layers are made for spans; set "
                "hardware.compile=none, or choose another decoder.cache."
            )
        branches = len(tokens_KF)
        model = self.module.model
        masks = {kind: self._mask(kind, plan, branches, kv) for kind in set(self._kinds)}
        hidden = self._embed_fed(tokens_KF.reshape(1, -1), plan.added_KFH)
        position_F = plan.positions(self.device)
        rotations = self._rotations(hidden, position_F.repeat(branches)[None])
        stored = [[layer.read(*span) for span in kv.spans] for layer in kv.positions]
        hidden, fresh = self._run(model.layers, self._kinds, hidden, masks, rotations, stored)
        for layer, keys_values in zip(kv.positions, fresh, strict=True):
            if layer.stores:
                layer.fresh, layer.at = keys_values, None
        return hidden.view(*tokens_KF.shape, -1)


class _CacheView:
    """The cache as the layers see it inside of the compiled function."""

    def __init__(self, stored: list[list[KeysValues]]) -> None:
        self.stored = stored
        self.fresh: list[KeysValues] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *rest: object
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values to attend to, and collect the fresh ones."""
        self.fresh.append((keys, values))
        spans = self.stored[layer]
        if not spans:
            return keys, values
        old_keys, old_values = zip(*spans, strict=True)
        return torch.cat([*old_keys, keys], 2), torch.cat([*old_values, values], 2)


def run_layers(
    layers: Any,
    kinds: Sequence[str],
    hidden: Tensor,
    masks: dict[str, Tensor | None],
    rotations: dict[str, Rotation],
    stored: list[list[KeysValues]],
) -> tuple[Tensor, list[KeysValues]]:
    """Run all layers in order; return the last hidden states, and each layer's fresh K/V."""
    cache = _CacheView(stored)
    for layer, kind in zip(layers, kinds, strict=True):
        hidden = layer(
            hidden,
            attention_mask=masks[kind],
            position_embeddings=rotations[kind],
            past_key_values=cache,
        )
    return hidden, cache.fresh


def quantize(module: Any, kind: str, device: torch.device) -> None:
    """Quantise the layers of a `*ForCausalLM` module in place, by a kind of `CONFIGS`.

    A row of activations has its own scale, so that it does not depend on the rows it is fed with.
    DllmBenchError where the device or torchao is missing, or does not take the weights' dtype.
    """
    if kind == "fp8" and not has_fp8(device):
        raise DllmBenchError(
            f"quantization=fp8 needs a CUDA device of compute capability 8.9 or more, "
            f"found {device}; use quantization=w8a8 or none."
        )
    if kind == "fp8" and module.dtype != torch.bfloat16:
        raise DllmBenchError(
            f"quantization=fp8 has a scale for each row of bfloat16 weights, and the model is in "
            f"{str(module.dtype)[6:]}; use dtype=bfloat16, or quantization=w8a8 or none."
        )
    try:
        from torchao import quantization  # optional dependency
    except ImportError:
        raise DllmBenchError(
            f"quantization={kind} needs torchao, which is not installed; install it with: pip "
            f"install 'dllm-bench[quant]'"
        ) from None
    name, named = CONFIGS[kind]
    arguments = {key: getattr(quantization, one)() for key, one in named.items()}
    quantization.quantize_(module.model.layers, getattr(quantization, name)(**arguments))


def has_fp8(device: torch.device) -> bool:
    """Return whether the device multiplies fp8 matrices."""
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= FP8_CAPABILITY
