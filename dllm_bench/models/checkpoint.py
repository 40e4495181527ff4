"""Reading a checkpoint folder: config.json, safetensors (one file or an indexed set), content hash.

Tensors are read one by one, put where the layout says, merged with an optional LoRA adapter, cast
and put on the device. Pickled weights are refused. Missing, unexpected and mis-shaped tensors are
listed by their published names before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.layouts import CheckpointLayout, Part, Shapes

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN = 6  # names listed per kind of problem
NOTHING = r"$^"
FLOATING = re.compile(r"B?F\d")  # BF16, F32, F8_E4M3
DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # computed from the config, sometimes stored
BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names large files by their sha256


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or a sentence about the file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DllmBenchError(
            f"{path.parent} holds no {path.name}; point the model's path at a checkpoint folder."
        ) from None
    except ValueError as error:
        raise DllmBenchError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(found, dict):
        raise DllmBenchError(f"{path} is not a JSON object; fetch it again.")
    return found


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a folder: `<stem>.safetensors` or the files of its index."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _listed(index)]
    else:
        files = [folder / f"{stem}.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if not absent:
        return files
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise DllmBenchError(
            f"{folder} holds pickled weights only ({', '.join(pickled[:SHOWN])}), which can run "
            f"code when read; convert them to safetensors."
        )
    raise DllmBenchError(
        f"{folder} lacks {named(absent)}; download the checkpoint again, completely."
    )


def _listed(index: Path) -> list[str]:
    """The files an index names."""
    found = read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise DllmBenchError(f"{index} has no weight_map of tensors to files; fetch it again.")
    return sorted(set(found.values()))


def named(names: Iterable[str]) -> str:
    """Names for a message: the first few and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


class Weights:
    """Lazy view of safetensors files: nothing but headers is read until a tensor is asked for."""

    def __init__(self, files: Iterable[Path], elsewhere: str | None = None) -> None:
        self._where: dict[str, Any] = {}
        for file in files:
            handle = _open(file)
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if not DERIVED.search(key) and not re.match(elsewhere or NOTHING, key):
                    self._where[key] = handle
        self.names = self._where.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._where[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As the file spells it: F32, BF16, ..."""
        return str(self._where[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)
        return tensor


def _open(file: Path) -> Any:
    """A safetensors file, or a sentence about it."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise DllmBenchError(
            f"{file} cannot be read ({error}); it is cut short or damaged, fetch it again."
        ) from None


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    """Shape of everything a module stores, by its own names."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def published_shapes(layout: CheckpointLayout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The tensors a checkpoint has to hold for a module with these parameters."""
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
    """Raise one sentence listing every tensor that is missing, unexpected, mis-shaped or integer.

    Integers under a weight's own name are quantised and lack their scales. `optional` names may be
    absent (tied weights).
    """
    both = expected.keys() & weights.names
    wrong = {
        f"{name} {weights.shape(name)} instead of {expected[name]}"
        for name in both
        if weights.shape(name) != expected[name]
    }
    integers = {
        f"{name} ({weights.dtype(name)})"
        for name in both
        if not FLOATING.match(weights.dtype(name))
    }
    problems = {
        "missing": expected.keys() - weights.names - optional,
        "unexpected": weights.names - expected.keys(),
        "mis-shaped": wrong,
        "integers": integers,
    }
    found = [f"{kind}: {named(names)}" for kind, names in problems.items() if names]
    if found:
        raise DllmBenchError(
            f"The tensors of {where} do not fit its config.json ({'; '.join(found)}); use the "
            f"files of one checkpoint, or the adapter of its architecture."
        )


def fill(
    module: Any,
    layout: CheckpointLayout,
    weights: Weights,
    merge: Callable[[str, Tensor], Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Give a module built on the meta device its weights, tensor by tensor.

    `merge` may change a published tensor. Buffers (a router's selection bias) keep their own dtype.
    """
    _compute_buffers(module, device)
    empty, shapes = module.state_dict(), shapes_of(module)
    buffers = {name for name, _ in module.named_buffers()}
    state = {}
    for name, like in empty.items():
        parts = layout.parts(name, shapes)
        if all(part.name in weights.names for part in parts):
            read = _Reader(weights, merge, device, like.dtype if name in buffers else dtype)
            state[name] = read.whole(parts, shapes[name])
    module.load_state_dict(state, strict=False, assign=True)
    module.tie_weights()
    module.requires_grad_(False)


@dataclass(frozen=True)
class _Reader:
    """PublishedConfig tensors, changed, cast and put on the device."""

    weights: Weights
    merge: Callable[[str, Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype

    def part(self, part: Part) -> Tensor:
        """One published tensor or its rows."""
        tensor = self.merge(part.name, self.weights.read(part.name))
        own = tensor if part.rows is None else tensor[slice(*part.rows)].clone()
        return own.to(device=self.device, dtype=self.dtype)

    def whole(self, parts: list[Part], shape: tuple[int, ...]) -> Tensor:
        """A parameter of the module."""
        if not parts[0].place:
            return self.part(parts[0])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        for part in parts:
            whole[part.place] = self.part(part)
        return whole


def _compute_buffers(module: Any, device: torch.device) -> None:
    """What transformers computes from the config (rotary frequencies), off the meta device."""
    for part in module.modules():
        names = [name for name in part._non_persistent_buffers_set if part._buffers[name].is_meta]
        for name in names:
            part._buffers[name] = torch.empty_like(part._buffers[name], device=device)
        if names:
            module._init_weights(part)


def files_hash(files: Iterable[Path]) -> str:
    """sha256 over names and contents of files."""
    lines = [f"{file.name} {_sha256(file)}" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str:
    """Hash of a file; the hub's cache has it in the name of the file a link leads to."""
    blob = file.resolve().name
    return blob if BLOB.fullmatch(blob) else digest(file)


def digest(file: Path) -> str:
    """sha256 of a file's bytes, read in full."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
