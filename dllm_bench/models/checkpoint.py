"""Read the tensors of a checkpoint folder.

Tensors are read one at a time, merged with an optional LoRA adapter, cast, moved to the device and
put where the layout says. Pickled weights raise an error, and missing, unexpected and mis-shaped
tensors are listed by their published names before any tensor is read.

LoRA adapters in peft's format: W <- W + s B A on load, or s B (A x) added in every forward.

When merged, the product is added in float32 before the cast to the run's dtype; unmerged, peft's
own layers hold A and B. Scale s = alpha / r (alpha / sqrt(r) for rsLoRA). DoRA, trained biases,
saved modules, per-layer ranks and transposed (fan-in) weights raise an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dllm_bench.core.declared import fits, refusal
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import CheckpointLayout, PublishedTensor, Shapes, unsupported, value
from dllm_bench.models.sources import LORA_CONFIG, LORA_STEM, first_names, read_json, weight_files
from dllm_bench.models.text import library_errors_named

# --- tensors --------------------------------------------------------------------------------------

MAPPED_BYTES = 2**26  # that one mapping of a file may have in memory, or one tensor
FLOATING = re.compile(r"B?F\d")  # BF16, F32, F8_E4M3
DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # computed from the config, sometimes stored


class Weights:
    """The tensors of safetensors files; only headers are read until `read` is called.

    `ignored` is a regular expression of tensor names to leave out. Files are mapped into memory,
    and pages that were read stay there until the mapping is closed. `read` therefore starts a new
    mapping from time to time, so that copied tensors do not occupy memory twice.
    """

    def __init__(self, files: Iterable[Path], ignored: str | None = None) -> None:
        self._places: dict[str, tuple[Path, Any]] = {}
        self._mapped: tuple[Path, Any] | None = None  # what `read` reads from
        self._left = 0  # bytes that it may still read
        for file in files:
            handle = _open(file)
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if not (DERIVED.search(key) or (ignored and re.match(ignored, key))):
                    self._places[key] = file, handle
        self.names = self._places.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return tuple(self._places[name][1].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the file names it: F32, BF16, ..."""
        return str(self._places[name][1].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """Return the tensor, on the CPU."""
        file, _ = self._places[name]
        if self._mapped is None or self._mapped[0] != file or self._left <= 0:
            self._mapped, self._left = (file, _open(file)), MAPPED_BYTES
        tensor = self._mapped[1].get_tensor(name)
        self._left -= tensor.nbytes
        return tensor

    def count(self, part: str) -> int:
        """Return how many numbered parts the names have: one more than the highest N of
        `part.N.`."""
        numbered = re.compile(rf"\b{re.escape(part)}\.(\d{{1,9}})\.")
        found = (numbered.search(name) for name in self.names)
        return max((int(match[1]) + 1 for match in found if match), default=0)


def _open(file: Path) -> Any:
    """Return a safetensors file; DllmBenchError where it is damaged."""
    todo = "it is cut short or damaged, fetch it again"
    with library_errors_named(f"{file} cannot be read", todo):
        return safe_open(file, framework="pt")


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter and buffer that a module stores, by its own names."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def tied(module: Any) -> tuple[str, ...]:
    """Return the names of embedding and head, if config.json says that they are one weight."""
    names = "model.embed_tokens.weight", "lm_head.weight"
    return names if module.config.tie_word_embeddings else ()


def published_shapes(layout: CheckpointLayout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return published name and shape of every tensor for a module with these parameters."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        for part in layout.parts(name, shapes):
            own = tuple(torch.empty(shape, device="meta")[part.place].shape)
            if part.rows is not None:
                own = (max(part.rows[1], expected.get(part.name, own)[0]), *own[1:])
            expected[part.name] = own
    return expected


def check_tensors(
    weights: Weights, expected: dict[str, tuple[int, ...]], optional: set[str], where: str
) -> None:
    """Raise DllmBenchError listing tensors that are missing, unexpected, mis-shaped or integer.

    An integer tensor under a weight's own name is quantised and lacks its scale. `optional` names
    may be missing (tied weights); `where` names the checkpoint in the error.
    """
    both = expected.keys() & weights.names
    shapes = {name: weights.shape(name) for name in both}
    kinds = {name: weights.dtype(name) for name in both}
    wrong = {
        f"{n} {own} instead of {expected[n]}" for n, own in shapes.items() if own != expected[n]
    }
    integers = {f"{n} ({kind})" for n, kind in kinds.items() if not FLOATING.match(kind)}
    problems = {
        "missing": expected.keys() - weights.names - optional,
        "unexpected": weights.names - expected.keys(),
        "mis-shaped": wrong,
        "integers": integers,
    }
    listed = [f"{kind}: {first_names(names)}" for kind, names in problems.items() if names]
    if listed:
        raise DllmBenchError(
            f"The tensors of {where} do not fit its config.json ({'; '.join(listed)}); use the "
            f"files of one checkpoint, or the adapter of its architecture."
        )


def fill(
    module: Any,
    layout: CheckpointLayout,
    weights: Weights,
    merge: Callable[[str, Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
    copied: bool = False,
) -> None:
    """Load the weights, tensor by tensor, into a module built on the meta device.

    `merge` maps (published name, tensor) to the tensor that is used. Parameters are cast to
    `dtype`; buffers (a router's selection bias) keep their own dtype. On the CPU a tensor that is
    used as it is in the file stays a part of the file's mapping unless it is to be `copied`, which
    takes less memory where a merge replaces other tensors of the mapping.
    """

    def read(part: PublishedTensor, dtype: torch.dtype) -> Tensor:
        """Return a published tensor, or the rows of it that are wanted."""
        stored = weights.read(part.name)
        tensor = merge(part.name, stored.to(device))
        if part.rows is not None:
            tensor = tensor[slice(*part.rows)].clone()
        tensor = tensor.to(device=device, dtype=dtype)
        if copied and tensor.data_ptr() == stored.data_ptr():
            tensor = tensor.clone()
        return require_finite(part.name, tensor)

    _compute_buffers(module, device)
    empty, shapes = module.state_dict(), shapes_of(module)
    buffers = {name for name, _ in module.named_buffers()}
    state = {}
    for name, like in empty.items():
        parts = layout.parts(name, shapes)
        if all(part.name in weights.names for part in parts):
            wanted = like.dtype if name in buffers else dtype
            if not parts[0].place:
                state[name] = read(parts[0], wanted)
                continue
            state[name] = torch.empty(shapes[name], dtype=wanted, device=device)
            for part in parts:
                state[name][part.place] = read(part, wanted)
    ends = [state[name] for name in tied(module) if name in state]
    if len(ends) == 2 and not torch.equal(*ends):
        raise DllmBenchError(
            "config.json says that embedding and head are one weight, and the weights hold another "
            f"{layout.to_published('lm_head.weight')}; use files of one checkpoint, or set "
            "tie_word_embeddings (LLaDA: weight_tying) to false if the head is to be used."
        )
    module.load_state_dict(state, strict=False, assign=True)
    module.tie_weights()
    module.requires_grad_(False)


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor; DllmBenchError if one of its numbers is NaN or infinite."""
    # the extremes, since a flag for every number takes half as much memory as a bfloat16 tensor
    if tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise DllmBenchError(
            f"Tensor {name} holds numbers that are NaN or infinite in {dtype}; fetch the weights "
            "again, or set hardware.dtype=float32 if they are finite there."
        )
    return tensor


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Compute on the device what transformers derives from the config (rotary frequencies)."""
    for part in module.modules():
        names = [name for name in part._non_persistent_buffers_set if part._buffers[name].is_meta]
        for name in names:
            like = part._buffers[name]  # not empty_like, which imports sympy for a meta tensor
            part._buffers[name] = torch.empty(like.shape, dtype=like.dtype, device=device)
        if names:
            module._init_weights(part)


# --- LoRA adapters --------------------------------------------------------------------------------

LORA_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")
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


def read_lora(folder: Path) -> LoraAdapter:
    """Read a LoRA adapter from its folder; DllmBenchError where it is more than a plain LoRA."""
    config = read_json(folder / LORA_CONFIG)
    if wrong := unsupported("LoraAdapter", {"peft_type": None, **config}):
        raise DllmBenchError(
            f"The LoRA adapter in {folder} has {', '.join(wrong)}, which a plain LoRA merge would "
            f"ignore; merge it with peft and load the merged checkpoint."
        )
    pairs = _read_pairs(folder)
    for key, declared in (("r", int), ("lora_alpha", float)):
        if not fits(value(config, key, LORA_CONFIG), declared):
            raise refusal(str(folder / LORA_CONFIG), key, declared, config[key])
    rank, alpha = config["r"], config["lora_alpha"]
    ranks = {size for down, up in pairs.values() for size in (down.shape[0], up.shape[1])}
    if ranks != {rank}:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} says r={rank} and holds {len(pairs)} pairs of rank "
            f"{', '.join(map(str, sorted(ranks))) or 'none'}; fetch it again, config and weights "
            f"of one adapter."
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    listed, partial = config.get("target_modules"), any(config.get(key) for key in PARTIAL)
    names = listed if isinstance(listed, list) and not partial else []
    return LoraAdapter(scale, pairs, tuple(f".{name}.weight" for name in names))


def _read_pairs(folder: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B by published weight name; DllmBenchError for tensors that form no pair."""
    weights = Weights(weight_files(folder, LORA_STEM))
    sides: dict[str, dict[str, Tensor]] = {}
    unpaired = set()
    for key in weights.names:
        match = LORA_KEY.fullmatch(key)
        if match is None:
            unpaired.add(key)
            continue
        sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = require_finite(
            key, weights.read(key)
        )
    matrices = {name: sum(side.ndim == 2 for side in pair.values()) for name, pair in sides.items()}
    unpaired |= {name for name, count in matrices.items() if count != 2}
    if unpaired:
        raise DllmBenchError(
            f"The LoRA adapter in {folder} has tensors that are no LoRA pair "
            f"({first_names(unpaired)}); merge it with peft and load the merged checkpoint."
        )
    return {name: (pair["A"], pair["B"]) for name, pair in sides.items()}


def check_lora_targets(
    adapter: LoraAdapter, shapes: Shapes, folder: Path, one_weight: Set[str] = frozenset()
) -> None:
    """Raise DllmBenchError where the adapter does not fit a model with these published weights.

    Every pair must fit a weight of the model, and every weight of the modules that the adapter
    lists must have a pair. `one_weight` names embedding and head of a model that ties them; a pair
    would change one of them only.
    """
    if changed := one_weight & adapter.pairs.keys():
        raise DllmBenchError(
            f"The LoRA adapter in {folder} changes {first_names(changed)}, and embedding and head "
            "of the model are one weight; merge it with peft into a checkpoint with "
            "tie_word_embeddings: false."
        )
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


def attach_lora(adapter: LoraAdapter, module: Any, layout: CheckpointLayout) -> None:
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
