"""Read a checkpoint folder: config.json, safetensors files (one, or several with an index), hashes.

Tensors are read one at a time, merged with an optional LoRA adapter, cast, moved to the device and
put where the layout says. Pickled weights raise an error, and missing, unexpected and mis-shaped
tensors are listed by their published names before any tensor is read.
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
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.layouts import CheckpointLayout, PublishedTensor, Shapes

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN = 6  # names listed per kind of problem
MATCHES_NOTHING = r"$^"
FLOATING = re.compile(r"B?F\d")  # BF16, F32, F8_E4M3
DERIVED = re.compile(r"rotary_emb\.inv_freq$")  # computed from the config, sometimes stored
BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names large files by their sha256


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; DllmBenchError where it is missing or is no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DllmBenchError(
            f"{path.parent} holds no {path.name}; point the model's path at a checkpoint folder."
        ) from None
    except ValueError as error:
        raise DllmBenchError(f"{path} is not valid JSON ({error}); fetch it again.") from None
    if not isinstance(content, dict):
        raise DllmBenchError(f"{path} is not a JSON object; fetch it again.")
    return content


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """The safetensors files of a folder: `<stem>.safetensors`, or the files its index lists."""
    index = folder / f"{stem}.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _files_in_index(index)]
    else:
        files = [folder / f"{stem}.safetensors"]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return files
    pickled = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickled:
        raise DllmBenchError(
            f"{folder} holds pickled weights only ({', '.join(pickled[:SHOWN])}), which can run "
            f"code when read; convert them to safetensors."
        )
    raise DllmBenchError(
        f"{folder} lacks {first_names(missing)}; download the checkpoint again, completely."
    )


def _files_in_index(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DllmBenchError(f"{index} has no weight_map of tensors to files; fetch it again.")
    return sorted(set(weight_map.values()))


def first_names(names: Iterable[str]) -> str:
    """The first names of a list for a message, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


class Weights:
    """The tensors of safetensors files; only headers are read until `read` is called.

    `ignored` is a regular expression of tensor names to leave out.
    """

    def __init__(self, files: Iterable[Path], ignored: str | None = None) -> None:
        self._file_of: dict[str, Any] = {}
        for file in files:
            handle = _open(file)
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                if not DERIVED.search(key) and not re.match(ignored or MATCHES_NOTHING, key):
                    self._file_of[key] = handle
        self.names = self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype of a tensor as the file names it: F32, BF16, ..."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _open(file: Path) -> Any:
    """A safetensors file; DllmBenchError where it is damaged."""
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise DllmBenchError(
            f"{file} cannot be read ({error}); it is cut short or damaged, fetch it again."
        ) from None


def shapes_of(module: Any) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter and buffer that a module stores, by its own names."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def published_shapes(layout: CheckpointLayout, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Published name and shape of every tensor that a module with these parameters needs."""
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
) -> None:
    """Load the weights, tensor by tensor, into a module built on the meta device.

    `merge` maps (published name, tensor) to the tensor that is used. Parameters are cast to
    `dtype`; buffers (a router's selection bias) keep their own dtype.
    """
    _compute_buffers(module, device)
    empty, shapes = module.state_dict(), shapes_of(module)
    buffers = {name for name, _ in module.named_buffers()}
    state = {}
    for name, like in empty.items():
        parts = layout.parts(name, shapes)
        if all(part.name in weights.names for part in parts):
            reader = _Reader(weights, merge, device, like.dtype if name in buffers else dtype)
            state[name] = reader.parameter(parts, shapes[name])
    module.load_state_dict(state, strict=False, assign=True)
    module.tie_weights()
    module.requires_grad_(False)


@dataclass(frozen=True)
class _Reader:
    """Reads published tensors, merged, cast and on the device."""

    weights: Weights
    merge: Callable[[str, Tensor], Tensor]
    device: torch.device
    dtype: torch.dtype

    def tensor(self, part: PublishedTensor) -> Tensor:
        """One published tensor, or the rows of it that are wanted."""
        tensor = self.merge(part.name, self.weights.read(part.name))
        if part.rows is not None:
            tensor = tensor[slice(*part.rows)].clone()
        return tensor.to(device=self.device, dtype=self.dtype)

    def parameter(self, parts: list[PublishedTensor], shape: tuple[int, ...]) -> Tensor:
        """A parameter of the module."""
        if not parts[0].place:
            return self.tensor(parts[0])
        whole = torch.empty(shape, dtype=self.dtype, device=self.device)
        for part in parts:
            whole[part.place] = self.tensor(part)
        return whole


def _compute_buffers(module: Any, device: torch.device) -> None:
    """Compute on the device what transformers derives from the config (rotary frequencies)."""
    for part in module.modules():
        names = [name for name in part._non_persistent_buffers_set if part._buffers[name].is_meta]
        for name in names:
            part._buffers[name] = torch.empty_like(part._buffers[name], device=device)
        if names:
            module._init_weights(part)


def files_hash(files: Iterable[Path]) -> str:
    """sha256 over the names and contents of files."""
    lines = [f"{file.name} {_sha256(file)}" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str:
    """sha256 of a file; in the hub's cache, large files are links to a file named by its hash."""
    blob = file.resolve().name
    return blob if BLOB.fullmatch(blob) else digest(file)


def digest(file: Path) -> str:
    """sha256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
