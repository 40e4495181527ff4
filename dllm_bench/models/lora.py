"""LoRA adapters in peft's format: W <- W + s B A on load, or s B (A x) added in every forward.

When merged, the product is added in float32 before the cast to the run's dtype; unmerged, peft's
own layers hold A and B. Scale s = alpha / r (alpha / sqrt(r) for rsLoRA). DoRA, trained biases,
saved modules, per-layer ranks and transposed (fan-in) weights raise an error.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import CheckpointLayout, Shapes, value
from dllm_bench.models.checkpoint import (
    Weights,
    first_names,
    require_finite,
    shapes_of,
    weight_files,
)
from dllm_bench.models.folder import LORA_CONFIG as CONFIG
from dllm_bench.models.folder import read_json

STEM = "adapter_model"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
SUPPORTED: dict[str, tuple[Any, ...]] = {  # config key -> values for which the formula above holds
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
}
PARTIAL = ("layers_to_transform", "layers_pattern", "exclude_modules")  # leave some layers out


@dataclass(frozen=True)
class LoraAdapter:
    """The matrices of a LoRA adapter."""

    scale: float
    """s in W + s B A."""
    pairs: dict[str, tuple[Tensor, Tensor]]
    """Published name of a weight (out, in) -> A (r, in) and B (out, r)."""
    targets: tuple[str, ...] = ()
    """Ends of the names of all weights that have a pair, if the adapter lists them."""

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return the adapted weight in float32, on its device; `weight` itself if it has no
        pair."""
        if name not in self.pairs:
            return weight
        down_RI, up_OR = (side.to(weight.device, torch.float32) for side in self.pairs[name])
        return (up_OR @ down_RI).mul_(self.scale).add_(weight)  # in place: one float32 copy


NO_LORA = LoraAdapter(0.0, {})


def adapter_files(folder: Path) -> list[Path]:
    """Return the files that define a LoRA adapter."""
    return [folder / CONFIG, *weight_files(folder, STEM)]


def read_lora(folder: Path) -> LoraAdapter:
    """Read a LoRA adapter from its folder; DllmBenchError where it is more than a plain LoRA."""
    config = read_json(folder / CONFIG)
    _check_config(config, folder)
    pairs = _read_pairs(folder)
    rank, alpha = value(config, "r", CONFIG), value(config, "lora_alpha", CONFIG)
    ranks = {size for down, up in pairs.values() for size in (down.shape[0], up.shape[1])}
    if ranks != {rank}:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} says r={rank} and holds {len(pairs)} pairs of rank "
            f"{', '.join(map(str, sorted(ranks))) or 'none'}; fetch it again, config and weights "
            f"of one adapter."
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LoraAdapter(scale, pairs, _targets(config))


def _check_config(config: dict[str, Any], folder: Path) -> None:
    """Raise DllmBenchError for settings that W + s B A would ignore."""
    wrong = [
        f"{key}={config[key]!r}" for key, known in SUPPORTED.items() if config.get(key) not in known
    ]
    if wrong:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} has {', '.join(wrong)}, which a plain LoRA merge would "
            f"ignore; merge it with peft and load the merged checkpoint."
        )


def _read_pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by published weight name; DllmBenchError for tensors that form no pair."""
    weights = Weights(weight_files(folder, STEM))
    sides: dict[str, dict[str, Tensor]] = {}
    unpaired = set()
    for key in weights.names:
        match = KEY.fullmatch(key)
        if match is None:
            unpaired.add(key)
            continue
        sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = require_finite(
            key, weights.read(key)
        )
    unpaired |= {name for name, pair in sides.items() if len(pair) != 2}
    if unpaired:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} has tensors that are no LoRA pair "
            f"({first_names(unpaired)}); merge it with peft and load the merged checkpoint."
        )
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def _targets(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the suffixes of the target weights' names; none if the adapter gives a pattern or
    skips layers."""
    listed = config.get("target_modules")
    if not isinstance(listed, list) or any(config.get(key) for key in PARTIAL):
        return ()
    return tuple(f".{name}.weight" for name in listed)


def check_targets(adapter: LoraAdapter, shapes: Shapes, folder: Path) -> None:
    """Raise DllmBenchError where the adapter does not fit a model with these published weights.

    Every pair must fit a weight of the model, and every weight of the modules that the adapter
    lists must have a pair.
    """
    wrong = [
        f"{name} ({up.shape[0]}, {down.shape[1]})"
        for name, (down, up) in adapter.pairs.items()
        if shapes.get(name) != (up.shape[0], down.shape[1])
    ]
    if wrong:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} changes weights that the model does not have in that "
            f"shape: {first_names(wrong)}; use it with the checkpoint it was trained on."
        )
    listed = {name for name in shapes if f".{name}".endswith(adapter.targets)}
    missing = listed - adapter.pairs.keys()
    if adapter.targets and missing:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} lists modules it holds no pair for "
            f"({first_names(missing)}); fetch it again, completely."
        )


def attach(adapter: LoraAdapter, module: Any, layout: CheckpointLayout) -> None:
    """Wrap the adapted layers in peft's LoRA layers; the module's own weights stay as they are."""
    if not adapter.pairs:
        return
    from peft import LoraConfig, inject_adapter_in_model  # slow to import, rarely needed

    shapes = shapes_of(module)
    one_to_one = {
        parts[0].name: name.removesuffix(".weight")
        for name in shapes
        if len(parts := layout.parts(name, shapes)) == 1 and parts[0].rows is None
    }
    fused = adapter.pairs.keys() - one_to_one.keys()
    if fused:
        raise DllmBenchError(
            f"The LoRA adapter changes tensors that the module joins with others in one parameter "
            f"({first_names(fused)}) and so cannot be kept separate; set merge_lora: true."
        )
    targets = {one_to_one[name]: pair for name, pair in adapter.pairs.items()}
    rank = next(iter(adapter.pairs.values()))[0].shape[0]
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=list(targets)), module)
    for name, pair in targets.items():
        layer = module.get_submodule(name)
        layer.scaling["default"] = adapter.scale
        like = layer.base_layer.weight
        for side, values in zip((layer.lora_A, layer.lora_B), pair, strict=True):
            side["default"].weight.data = values.to(like)
    module.requires_grad_(False)
