"""Modelled time of a round on a device that is not here, from bytes, operations and launches.

    .venv/bin/python -m scripts.perf.model

Assumed: weights, cached K/V and logits are read or written once, from memory; operations and
memory traffic overlap; every launch adds a gap on the device and its time on the host; host and
device overlap, so that the slower of them decides. Launches are those of the plain loop, without
compilation: what one layer and what the rest of a forward start is counted on the CPU, a Triton
kernel as one. Left out are activations, the copies of K/V that the attention makes, and the loop
beside the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dllm_bench.api.random_model import DREAM_7B, layer_parameters, random_model, random_request
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models import attention, layer_ops
from dllm_bench.models import layers as layers_module
from dllm_bench.models.acceleration import FixedShapeDenoiser
from dllm_bench.models.layers import module_layers, own_layers

VOCAB, PREFIX = 152_064, 1024
PROBE = {"width": 64, "heads": 4, "kv_heads": 2, "mlp": 128}


@dataclass(frozen=True)
class DeviceConstants:
    """What a device is assumed to do."""

    bytes_per_s: float
    """Memory bandwidth, in bytes a second."""
    flop_per_s: float
    """Rate of large matrix products, in operations a second."""
    gap_s: float
    """Seconds between two kernels on the device."""
    launch_s: float
    """Seconds of the host for a launch."""


H200 = DeviceConstants(bytes_per_s=4.8e12, flop_per_s=8e14, gap_s=2e-6, launch_s=6e-6)
"""Bandwidth of the data sheet; bfloat16 at four fifths of its rate; gap and launch estimated.

Measured since (docs/perf.md): 4.2e12 copied, 7.7e14, 0.6 us between kernels of a recorded graph,
and 30 us or more of a virtual machine's host for a launch.
"""


@dataclass(frozen=True)
class Round:
    """A forward of K branches over a window after a cached prefix."""

    shape: dict[str, int]
    """Of the model, as `DREAM_7B`."""
    vocab: int
    """Tokens of the vocabulary."""
    prefix: int
    """Cached positions."""
    branches: int
    """K, the base branch included."""
    window: int
    """W, positions that a branch feeds."""
    number_bytes: int = 2
    """Bytes of a weight, key, value or logit."""
    logits: int | None = None
    """Rows whose logits are computed; None: all that are fed."""
    own_layers: bool = True
    """Whether layers are the package's own; else they are transformers' modules."""
    replayed: bool = False
    """Whether the own layers are a recorded graph, which the host starts at once."""

    @property
    def rows(self) -> int:
        """Positions that are fed."""
        return self.branches * self.window

    @property
    def predicted(self) -> int:
        """Return rows whose logits are computed."""
        return self.rows if self.logits is None else self.logits

    @property
    def kv_width(self) -> int:
        """Return numbers in the keys of a position and layer."""
        return self.shape["width"] * self.shape["kv_heads"] // self.shape["heads"]

    @property
    def head(self) -> int:
        """Return weights of the head."""
        return self.shape["width"] * self.vocab

    @property
    def weights(self) -> int:
        """Return weights that rows are multiplied with: linear layers and head."""
        return layer_parameters(self.shape) + self.head

    @property
    def bytes(self) -> int:
        """Bytes of weights, cached K/V and logits."""
        cached = 2 * self.shape["layers"] * self.kv_width * self.prefix
        return self.number_bytes * (self.weights + cached + self.predicted * self.vocab)

    @property
    def operations(self) -> int:
        """Return two per weight and row, four per head dimension, query and key.

        In transformers' modules a query meets the keys of all branches, and a mask hides them; in
        own layers it meets its own branch's.
        """
        met = self.prefix + (self.window if self.own_layers else self.rows)
        scores = 4 * self.shape["layers"] * self.shape["width"] * met
        layers = self.rows * (2 * layer_parameters(self.shape) + scores)
        return layers + 2 * self.predicted * self.head

    @property
    def launches(self) -> int:
        """Kernels that a forward starts, see `launches`."""
        one, two = (launches(n, self.branches, self.own_layers, self.replayed) for n in (1, 2))
        return one + (self.shape["layers"] - 1) * (two - one)

    @property
    def started(self) -> int:
        """Kernels and graphs that the host starts: of a recorded graph, what writes its inputs,
        the graph itself, and head and norm.
        """
        if not self.replayed:
            return self.launches
        return launches(1, self.branches, fixed=True, of_graph=False) + 1


@cache
def launches(
    layers: int, branches: int, own: bool = True, fixed: bool = False, of_graph: bool = True
) -> int:
    """Tensor operations of a forward with a model of `layers` layers, counted on the CPU.

    fixed: whether shapes are those of a graph; of_graph: whether what is recorded counts.
    """
    counter = OperationCounter()
    one = Round({**PROBE, "layers": layers}, 64, 8, branches, window=16, replayed=fixed)
    forward = probe(one, own=own)
    forward()  # makes the masks and angles that later rounds find
    run = FixedShapeDenoiser.run_fixed
    apart = run if of_graph else lambda *given: counter.apart(lambda: run(*given))
    with counter, counter.kernels(), patch.object(FixedShapeDenoiser, "run_fixed", apart):
        forward()
    return counter.count


def probe(one: Round, own: bool = True) -> Callable[[], object]:
    """Return the forward of a round with random weights on the CPU, its prefix cached.

    own: whether layers are as on a CUDA device; else they are transformers' modules.
    """
    model = random_model(one.vocab, one.shape, compile_mode="max" if one.replayed else "none")
    model.layers = own_layers(model.module, joined=True) if own else module_layers(model.module)
    length = one.prefix + one.window
    ids = random_request(length, 1, one.vocab).prompt_ids
    tokens_1L = torch.tensor([ids])
    kv = model.new_cache(length)
    prefill = ForwardPlan(ForwardKind.PREFILL, (0, one.prefix), (0, 1), (0, one.prefix))
    model.forward(tokens_1L, prefill, kv)
    kv.keep(prefill, torch.tensor(0))
    window = (one.prefix, length)
    plan = ForwardPlan(ForwardKind.DENOISE, window, window, (0, 0), forward=1)
    return lambda: model.forward(tokens_1L.expand(one.branches, -1), plan, kv)


class OperationCounter(TorchDispatchMode):
    """Counts operations that compute; one that returns a view of its input starts no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = args[0] if args else None
        both = isinstance(given, torch.Tensor) and isinstance(out, torch.Tensor)
        shared = both and out.data_ptr() == given.data_ptr() and not func._schema.is_mutable
        self.count += not (func.is_view or shared or "empty" in func.__name__)
        return out

    def apart(self, work: Callable[[], Any]) -> Any:
        """Return what `work` gives; what it computes does not count."""
        before = self.count
        result = work()
        self.count = before
        return result

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """In the block layers run as on a device; Triton's kernels start nothing, and count."""

        def start(*args: Any, **options: Any) -> None:
            self.count += 1

        with (
            patch.object(layer_ops, "start", start),
            patch.object(layer_ops, "has_kernels", lambda *given: True),
            patch.object(attention, "WORTH_MASKED", 0),
            patch.object(layers_module, "has_kernels", lambda *given: True),
        ):
            yield


def modelled_ms(one: Round, device: DeviceConstants) -> dict[str, float]:
    """Milliseconds of device, host and round."""
    busy_s = max(one.bytes / device.bytes_per_s, one.operations / device.flop_per_s)
    device_s = busy_s + one.launches * device.gap_s
    host_s = one.started * device.launch_s
    return {
        "device ms": 1000 * device_s,
        "host ms": 1000 * host_s,
        "round ms": 1000 * max(device_s, host_s),
    }


DREAM_ROUND = Round(DREAM_7B, VOCAB, PREFIX, branches=1, window=32)


def main() -> None:
    """Print the modelled rounds of Dream-7B's shape on an H200."""
    ways = {
        "modules": {"own_layers": False},
        "own layers": {"own_layers": True},
        "own layers, replayed": {"own_layers": True, "replayed": True},
    }
    for layers, k, window in product(ways, (0, 3, 7), (32, 96)):
        one = replace(DREAM_ROUND, branches=k + 1, window=window, **ways[layers])
        times = ", ".join(f"{name} {ms:.1f}" for name, ms in modelled_ms(one, H200).items())
        size = f"{one.bytes / 1e9:.1f} GB, {one.operations / 1e12:.2f} TFLOP"
        starts = f"{one.launches} launches, {one.started} by the host"
        print(f"{layers}, k = {k}, window {window}: {size}, {starts}; {times}")


if __name__ == "__main__":
    main()
