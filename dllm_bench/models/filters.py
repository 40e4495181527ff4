"""Trained filters of Learn2PD (arXiv 2509.25188, §3.2): one logit per position of a block.

A filter is a stack of linear layers over the confidences of a block, stored in one safetensors file
as `0.weight, 0.bias, 2.weight, …` with an activation between them; the file's header says which
model it was trained for, and how. A filter is identified by its content (sha256), not by its path.
It is trained in `training/filters.py` and used in `methods/learn2pd.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.checkpoint import require_finite
from dllm_bench.models.sources import digest, require_sha256
from dllm_bench.models.text import library_errors_named
from dllm_bench.paths import ASSETS, place_of
from dllm_bench.registry import register

WEIGHTS = "filter.safetensors"
HEADER = "filter"  # key of the file's header under which the metadata are stored, as JSON
SHIPPED = ASSETS + "filters/"
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}

Layers = tuple[tuple[Tensor, Tensor], ...]  # weight (out, in) and bias (out,) of each layer


@dataclass(frozen=True)
class FilterMetadata:
    """What a filter was trained for; "" and 0 where its file does not say."""

    activation: str = "relu"
    """Activation between the layers, a name in `ACTIVATIONS`."""
    labels: str = ""
    """Positions of a block that entered the loss: "masked" or "all"."""
    gen_length: int = 0
    """New tokens per request in training."""
    model: str = ""
    """Name of the model whose confidences it reads."""
    weights: str = ""
    """Content hash of that model's weights, as a run records it."""
    tokenizer: str = ""
    """Content hash of that model's tokenizer, as a run records it."""


@register("filter.learned")
@dataclass(frozen=True)
class LearnedFilter:
    """A trained network that judges candidates by the confidences of their block (Learn2PD)."""

    source: str = field(compare=False)
    """assets/filters/<name>, a folder, or a safetensors file."""
    sha256: str = ""
    """Hash of the file: filled in if empty, else compared with the file."""
    any_model: bool = field(default=False, compare=False)
    """Allow a run with another model than the one the filter was trained for."""

    def __post_init__(self) -> None:
        found = digest(filter_file(self.source))
        sha256 = require_sha256(f"Filter {self.source!r}", self.sha256, found)
        object.__setattr__(self, "sha256", sha256)

    def _read(self, device: torch.device) -> tuple[Layers, FilterMetadata]:
        return _read(filter_file(self.source), self.sha256, device)

    @property
    def block(self) -> int:
        """Positions of the blocks it reads."""
        return self._read(torch.device("cpu"))[0][0][0].shape[1]

    @property
    def metadata(self) -> FilterMetadata:
        """What it was trained for."""
        return self._read(torch.device("cpu"))[1]

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        layers, _ = self._read(torch.device("cpu"))
        return sum(weight.numel() + bias.numel() for weight, bias in layers)

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        """Return logits, float32, in the shape of the confidences (K, N, positions of a block)."""
        layers, metadata = self._read(confidence_KNB.device)
        between, values = ACTIVATIONS[metadata.activation], confidence_KNB.float()
        for index, (weight, bias) in enumerate(layers):
            values = F.linear(between(values) if index else values, weight, bias)
        return values

    def check_model(self, name: str, weights: str) -> None:
        """Raise DllmBenchError for a run with another model than the filter was trained for."""
        metadata = self.metadata
        if self.any_model or metadata.weights in ("", weights):
            return
        raise DllmBenchError(
            f"Filter {self.source!r} was trained for the weights of {metadata.model}, the run's "
            f"model is {name} with other weights; choose its filter with head.source, train one "
            f"with `dllm-bench train filter {name}`, or set head.any_model=true."
        )


def filter_file(source: str) -> Path:
    """Return the safetensors file of a source; DllmBenchError says how to get a missing one."""
    path = place_of(source)
    file = path / WEIGHTS if path.is_dir() else path
    if file.is_file():
        return file
    shipped = sorted(SHIPPED + path.parent.name for path in place_of(SHIPPED).glob(f"*/{WEIGHTS}"))
    raise DllmBenchError(
        f"There is no filter {source!r}; choose one of {', '.join(shipped) or 'none'}, or train "
        "one with `dllm-bench train filter MODEL` and name its folder."
    )


def filter_bytes(tensors: Mapping[str, Tensor], metadata: FilterMetadata) -> bytes:
    """Return the content of a filter's file."""
    header = {HEADER: json.dumps(asdict(metadata), sort_keys=True)}
    return save(
        {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}, header
    )


def read_state_dict(file: Path) -> dict[str, Tensor]:
    """Return a filter that torch saved (`.pth`: a state dict of linear layers), by the names of a
    filter's file.

    The file is read as tensors alone (weights_only), so that nothing in it is run. Layers are taken
    in the file's order, whatever they are called.
    """
    failed = f"{file} was to be read as a filter, and is no file of tensors alone"
    with library_errors_named(failed, "save it with torch.save(network.state_dict(), FILE)"):
        stored = torch.load(file, map_location="cpu", weights_only=True)
        tensors = dict(stored.get("state_dict", stored))
        parts: dict[str, list[Tensor]] = {
            part: [tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == part]
            for part in ("weight", "bias")
        }
    if len(tensors) != sum(map(len, parts.values())):
        raise DllmBenchError(
            f"{file} holds {', '.join(tensors)}; give the state dict of a stack of linear layers, "
            "with a weight and a bias each."
        )
    named = {
        f"{2 * number}.{part}": tensor
        for part, layers in parts.items()
        for number, tensor in enumerate(layers)
    }
    _layers(file, named, torch.device("cpu"))  # raises if widths do not fit
    return named


@lru_cache(maxsize=32)
def _read(file: Path, sha256: str, device: torch.device) -> tuple[Layers, FilterMetadata]:
    """Return the layers on a device; `sha256` tells a changed file from the one read before."""
    failed, todo = f"{file} is no safetensors file of a filter", "convert the filter's weights"
    with library_errors_named(failed, todo), safe_open(file, framework="pt") as handle:
        header = json.loads((handle.metadata() or {}).get(HEADER, "{}"))
        tensors = {
            name: require_finite(name, handle.get_tensor(name))
            for name in handle.keys()  # noqa: SIM118
        }
        return _layers(file, tensors, device), _metadata(file, header)


def _layers(file: Path, tensors: Mapping[str, Tensor], device: torch.device) -> Layers:
    """Return layers in order; DllmBenchError where their names, types or widths do not fit.

    They are numbered 0, 2, 4, … because the activations between them are counted too. The last
    layer must give as many numbers as the first one reads.
    """
    numbers = range(0, len(tensors), 2)
    wanted = {f"{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not tensors or set(tensors) != wanted:
        held = ", ".join(sorted(tensors)) or "nothing"
        raise DllmBenchError(
            f"{file} holds {held}; give a filter that is a stack of linear layers 0.weight, "
            "0.bias, 2.weight, 2.bias and so on."
        )
    if not all(isinstance(one, Tensor) and one.is_floating_point() for one in tensors.values()):
        raise DllmBenchError(
            f"{file} holds values that are no floating-point tensors; save them as float32."
        )
    pairs = [(tensors[f"{n}.weight"].float(), tensors[f"{n}.bias"].float()) for n in numbers]
    if any(weight.ndim != 2 or bias.shape != weight.shape[:1] for weight, bias in pairs):
        raise DllmBenchError(
            f"{file} holds a layer that is not linear; give each a weight (outputs, inputs) and a "
            "bias (outputs)."
        )
    widths = [pairs[0][0].shape[1], *(len(weight) for weight, _ in pairs)]
    inputs = [weight.shape[1] for weight, _ in pairs]
    if inputs != widths[:-1] or widths[0] != widths[-1]:
        raise DllmBenchError(
            f"The layers of {file} read {inputs} values and give {widths[1:]}; each must read what "
            "the one before it gives, and the last give one logit per position of the block."
        )
    return tuple((weight.to(device), bias.to(device)) for weight, bias in pairs)


def _metadata(file: Path, header: Mapping[str, Any]) -> FilterMetadata:
    known = {f.name for f in fields(FilterMetadata)}
    metadata = made_from(FilterMetadata, {key: header[key] for key in known & header.keys()})
    if metadata.activation not in ACTIVATIONS:
        raise DllmBenchError(
            f"{file} names the activation {metadata.activation!r}; use a filter with one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    return metadata
