"""Reading a checkpoint folder: config.json, safetensors (one file or an indexed set), content hash.

Tensors are read one by one, renamed by the layout, merged with an optional LoRA adapter, cast and
put on the device. Pickled weights are refused. Missing, unexpected and mis-shaped tensors are
listed by name before anything is read.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.request import DllmBenchError

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN = 6  # names listed per kind of problem
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
        files = [folder / name for name in sorted(set(read_json(index)["weight_map"].values()))]
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


def named(names: Iterable[str]) -> str:
    """Names for a message: the first few and how many more."""
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


class Weights:
    """Lazy view of safetensors files under the names of a module."""

    def __init__(self, files: Iterable[Path], rename: Callable[[str], str]) -> None:
        from safetensors import safe_open

        self._where: dict[str, tuple[Any, str]] = {}
        for file in files:
            handle = safe_open(file, framework="pt")
            for key in handle.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                self._where[rename(key)] = (handle, key)

    @property
    def names(self) -> set[str]:
        return {name for name in self._where if not DERIVED.search(name)}

    def shape(self, name: str) -> tuple[int, ...]:
        handle, key = self._where[name]
        return tuple(handle.get_slice(key).get_shape())

    def read(self, name: str) -> Tensor:
        handle, key = self._where[name]
        tensor: Tensor = handle.get_tensor(key)
        return tensor

    def published(self, name: str) -> str:
        """The name in the file."""
        return self._where[name][1] if name in self._where else name


def check_tensors(
    weights: Weights, shapes: dict[str, tuple[int, ...]], optional: set[str], where: str
) -> None:
    """Raise one sentence listing every tensor that is missing, unexpected or mis-shaped.

    `shapes` is what the module holds; `optional` names may be absent (tied weights).
    """
    wrong = {
        name: f"{weights.published(name)} {weights.shape(name)} instead of {shapes[name]}"
        for name in shapes.keys() & weights.names
        if weights.shape(name) != shapes[name]
    }
    problems = {
        "missing": shapes.keys() - weights.names - optional,
        "unexpected": {weights.published(name) for name in weights.names - shapes.keys()},
        "mis-shaped": wrong.values(),
    }
    found = [f"{kind}: {named(names)}" for kind, names in problems.items() if names]
    if found:
        raise DllmBenchError(
            f"The tensors of {where} do not fit its config.json ({'; '.join(found)}); use the "
            f"files of one checkpoint, or the adapter of its architecture."
        )


def fill(
    module: Any,
    weights: Weights,
    merge: Callable[[str, Tensor], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a module built on the meta device its weights, tensor by tensor."""
    state = {
        name: merge(name, weights.read(name)).to(device=device, dtype=dtype)
        for name in weights.names & module.state_dict().keys()
    }
    module.load_state_dict(state, strict=False, assign=True)
    module.tie_weights()
    rotary = type(module.model.rotary_emb)  # its frequencies are not stored but computed
    module.model.rotary_emb = rotary(module.config).to(device)
    module.requires_grad_(False)


def content_hash(files: Iterable[Path]) -> str:
    """sha256 over names and contents of files."""
    lines = [f"{file.name} {_sha256(file)}" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str:
    blob = file.resolve().name
    if BLOB.fullmatch(blob):
        return blob
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
