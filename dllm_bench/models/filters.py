"""Trained filters of Learn2PD (arXiv 2509.25188, §3.2): a block's confidences -> one logit each.

One safetensors file of Linear layers `0.weight, 0.bias, 2.weight, …` with an activation between
them; its header says which model it was trained for, and how. A filter is a value: its content
(sha256) decides what it is, the place it lies at does not. How a filter is trained is in
`training/filter.py`, what its logits are used for in `decoding/select/filter.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import ASSETS, place_of
from dllm_bench.registry import register

WEIGHTS = "filter.safetensors"
HEADER = "filter"  # key of the facts in the file's header, JSON
SHIPPED = ASSETS + "filters/"
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}

Layers = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class FilterMetadata:
    """What a filter was trained for and on; "" and 0 where its file does not say.

    labels: which positions of a block the loss read, "masked" or "all"; weights and tokenizer are
    the content hashes that identify the model in a run.
    """

    activation: str = "relu"
    labels: str = ""
    gen_length: int = 0
    model: str = ""
    weights: str = ""
    tokenizer: str = ""


@register("filter.learned")
@dataclass(frozen=True)
class LearnedFilter:
    """The filter in `source`: assets/filters/<name>, a folder, or a safetensors file.

    sha256 of the file is filled in, and compared where it is given. any_model allows a run with
    another model than the one the filter was trained for.
    """

    source: str = field(compare=False)
    sha256: str = ""
    any_model: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        found = hashlib.sha256(filter_file(self.source).read_bytes()).hexdigest()
        if self.sha256 not in ("", found):
            raise DllmBenchError(
                f"Filter {self.source!r} is asked for with sha256 {self.sha256[:10]}…, its file "
                f"has {found[:10]}…; name the file that was meant, or leave sha256 out."
            )
        object.__setattr__(self, "sha256", found)

    def _read(self, device: torch.device) -> tuple[Layers, FilterMetadata]:
        return _read(filter_file(self.source), self.sha256, device)

    @property
    def block(self) -> int:
        """Positions of the blocks it reads."""
        return self._read(torch.device("cpu"))[0][0][0].shape[1]

    @property
    def facts(self) -> FilterMetadata:
        """What it was trained for."""
        return self._read(torch.device("cpu"))[1]

    @property
    def parameters(self) -> int:
        """Number of weights and biases."""
        layers, _ = self._read(torch.device("cpu"))
        return sum(weight.numel() + bias.numel() for weight, bias in layers)

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        """Logits (K, N, B), float32, on the confidences' device."""
        layers, facts = self._read(confidence_KNB.device)
        return apply(layers, facts.activation, confidence_KNB.float())

    def check_model(self, name: str, weights: str) -> None:
        """Refuse a run with another model than the one the filter knows the confidences of."""
        facts = self.facts
        if self.any_model or facts.weights in ("", weights):
            return
        raise DllmBenchError(
            f"Filter {self.source!r} was trained for the weights of {facts.model}, the run's model "
            f"is {name} with other weights; choose its filter with head.source, train one with "
            f"`dllm-bench train filter {name}`, or set head.any_model=true."
        )


def apply(layers: Layers, activation: str, values: Tensor) -> Tensor:
    """Linear layers with an activation between them."""
    for index, (weight, bias) in enumerate(layers):
        values = F.linear(ACTIVATIONS[activation](values) if index else values, weight, bias)
    return values


def filter_file(source: str) -> Path:
    """The safetensors file of a source, or a sentence that says how to get it."""
    path = place_of(source)
    file = path / WEIGHTS if path.is_dir() else path
    if file.is_file():
        return file
    shipped = sorted(SHIPPED + path.parent.name for path in place_of(SHIPPED).glob(f"*/{WEIGHTS}"))
    raise DllmBenchError(
        f"There is no filter {source!r}; choose one of {', '.join(shipped) or 'none'}, or train "
        "one with `dllm-bench train filter MODEL` and name its folder."
    )


def save_filter(
    folder: Path, tensors: Mapping[str, Tensor], facts: FilterMetadata
) -> LearnedFilter:
    """Write a filter; the folder's other files are the trainer's business."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    header = {HEADER: json.dumps(asdict(facts), sort_keys=True)}
    save_file({n: t.cpu().contiguous() for n, t in tensors.items()}, folder / WEIGHTS, header)
    return LearnedFilter(str(folder))


@lru_cache(maxsize=32)
def _read(file: Path, sha256: str, device: torch.device) -> tuple[Layers, FilterMetadata]:
    """The layers on a device; `sha256` keeps a changed file apart."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as handle:
            header = (handle.metadata() or {}).get(HEADER, "{}")
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise DllmBenchError(
            f"{file} is no safetensors file ({error}); convert the filter's weights."
        ) from error
    return _layers(file, tensors, device), _facts(file, json.loads(header))


def _layers(file: Path, tensors: Mapping[str, Tensor], device: torch.device) -> Layers:
    """Layers in order; their widths have to fit, and the last one gives what the first one reads.

    The activations between them have no weights: layers are numbered 0, 2, 4, …
    """
    numbers = range(0, len(tensors), 2)
    wanted = {f"{number}.{part}" for number in numbers for part in ("weight", "bias")}
    if not tensors or set(tensors) != wanted:
        found = ", ".join(sorted(tensors)) or "nothing"
        raise DllmBenchError(
            f"{file} holds {found}; a filter is a stack of linear layers 0.weight, 0.bias, "
            "2.weight, 2.bias and so on."
        )
    pairs = [(tensors[f"{n}.weight"].float(), tensors[f"{n}.bias"].float()) for n in numbers]
    widths = [pairs[0][0].shape[1], *(len(weight) for weight, _ in pairs)]
    read = [weight.shape[1] for weight, _ in pairs]
    if read != widths[:-1] or widths[0] != widths[-1]:
        raise DllmBenchError(
            f"The layers of {file} read {read} values and give {widths[1:]}; each has to read what "
            "the one before gives, and the last to give one logit per position of the block."
        )
    return tuple((weight.to(device), bias.to(device)) for weight, bias in pairs)


def _facts(file: Path, found: Mapping[str, Any]) -> FilterMetadata:
    known = {f.name for f in fields(FilterMetadata)}
    facts = FilterMetadata(**{name: value for name, value in found.items() if name in known})
    if facts.activation not in ACTIVATIONS:
        raise DllmBenchError(
            f"{file} names the activation {facts.activation!r}; known are {', '.join(ACTIVATIONS)}."
        )
    return facts
