"""LoRA adapters in peft's layout: W <- W + s B A on load, or s B (A x) beside W x in every forward.

Merged, the product is added in float32 before the cast to the run's dtype; unmerged, peft's own
layers hold the pair. Scale s = alpha / r. Refused, not ignored: DoRA, trained biases, saved
modules, per-layer ranks, transposed (fan-in) weights.
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
from dllm_bench.models.checkpoint import Weights, named, read_json, shapes_of, weight_files
from dllm_bench.models.layouts import CheckpointLayout, Shapes, value

STEM = "adapter_model"
CONFIG = "adapter_config.json"
KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
PLAIN: dict[str, tuple[Any, ...]] = {  # config key -> values that leave the formula above intact
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
}
PARTIAL = ("layers_to_transform", "layers_pattern", "exclude_modules")  # not all of a target


@dataclass(frozen=True)
class Lora:
    """Pairs (A, B) by published tensor name, and their common scale; `targets` are the ends of all
    module names that have a pair, where the adapter lists them.
    """

    scale: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    targets: tuple[str, ...] = ()

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """The adapted weight in float32, or `weight` itself where there is no pair."""
        if name not in self.pairs:
            return weight
        down_RI, up_OR = (side.to(torch.float32) for side in self.pairs[name])
        return weight.to(torch.float32) + self.scale * (up_OR @ down_RI)


NONE = Lora(0.0, {})


def adapter_files(folder: Path) -> list[Path]:
    """Files that decide what an adapter does."""
    return [folder / CONFIG, *weight_files(folder, STEM)]


def read_lora(folder: Path) -> Lora:
    """An adapter folder."""
    config = read_json(folder / CONFIG)
    wrong = [f"{key}={config[key]!r}" for key in PLAIN if config.get(key) not in _allowed(key)]
    if wrong:
        raise DllmBenchError(
            f"The adapter in {folder} has {', '.join(wrong)}, which a plain LoRA merge would "
            f"ignore; merge it with peft and load the merged checkpoint."
        )
    weights = Weights(weight_files(folder, STEM))
    sides: dict[str, dict[str, Tensor]] = {}
    strange = set()
    for key in weights.names:
        match = KEY.fullmatch(key)
        if match is None:
            strange.add(key)
            continue
        sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = weights.read(key)
    strange |= {name for name, pair in sides.items() if len(pair) != 2}
    if strange:
        raise DllmBenchError(
            f"The adapter in {folder} has tensors that are no LoRA pair ({named(strange)}); "
            f"merge it with peft and load the merged checkpoint."
        )
    pairs = {name: (pair["A"], pair["B"]) for name, pair in sides.items()}
    rank, alpha = value(config, "r", CONFIG), value(config, "lora_alpha", CONFIG)
    found = {size for down, up in pairs.values() for size in (down.shape[0], up.shape[1])}
    if found != {rank}:
        raise DllmBenchError(
            f"The adapter in {folder} says r={rank} and holds "
            f"{len(pairs)} pairs of rank {', '.join(map(str, sorted(found))) or 'none'}; fetch it "
            f"again, config and weights of one adapter."
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Lora(scale, pairs, _targets(config))


def _targets(config: dict[str, Any]) -> tuple[str, ...]:
    """The modules an adapter lists; none where it names a pattern or leaves layers out."""
    listed = config.get("target_modules")
    if not isinstance(listed, list) or any(config.get(key) for key in PARTIAL):
        return ()
    return tuple(f".{name}.weight" for name in listed)


def _allowed(key: str) -> tuple[Any, ...]:
    return PLAIN[key] if key == "peft_type" else (*PLAIN[key], None)


def check_targets(lora: Lora, shapes: Shapes, folder: Path) -> None:
    """Every pair must fit a published weight of the model it changes, and every weight of the
    modules the adapter lists must have one.
    """
    wrong = [
        f"{name} ({up.shape[0]}, {down.shape[1]})"
        for name, (down, up) in lora.pairs.items()
        if shapes.get(name) != (up.shape[0], down.shape[1])
    ]
    if wrong:
        raise DllmBenchError(
            f"The adapter in {folder} changes weights that the model does not have in that shape: "
            f"{named(wrong)}; use it with the checkpoint it was trained on."
        )
    absent = {name for name in shapes if f".{name}".endswith(lora.targets)} - lora.pairs.keys()
    if lora.targets and absent:
        raise DllmBenchError(
            f"The adapter in {folder} lists modules it holds no pair for ({named(absent)}); fetch "
            f"it again, completely."
        )


def attach(lora: Lora, module: Any, layout: CheckpointLayout) -> None:
    """Leave the weights as they are and put peft's layers around them."""
    from peft import LoraConfig, inject_adapter_in_model

    if not lora.pairs:
        return
    shapes = shapes_of(module)
    whole = {
        parts[0].name: name.removesuffix(".weight")
        for name in shapes
        if len(parts := layout.parts(name, shapes)) == 1 and parts[0].rows is None
    }
    stacked = lora.pairs.keys() - whole.keys()
    if stacked:
        raise DllmBenchError(
            f"The adapter changes tensors that the module holds together with others "
            f"({named(stacked)}); set merge_lora: true."
        )
    targets = {whole[name]: pair for name, pair in lora.pairs.items()}
    rank = next(iter(lora.pairs.values()))[0].shape[0]
    inject_adapter_in_model(LoraConfig(r=rank, target_modules=list(targets)), module)
    for name, pair in targets.items():
        layer = module.get_submodule(name)
        layer.scaling["default"] = lora.scale
        like = layer.base_layer.weight
        for side, values in zip((layer.lora_A, layer.lora_B), pair, strict=True):
            side["default"].weight.data = values.to(like)
    module.requires_grad_(False)
