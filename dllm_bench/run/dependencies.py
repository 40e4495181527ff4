"""What a run needs from outside: model, decoder, benchmark, clock. Tests replace them with fakes.

Built from a `RunSpec`. The model and the benchmark last used are kept, since the runs of a table
share them; everything else is made anew. The clock waits for the device before it is read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import instantiate
from dllm_bench.store.inputs import benchmark_of, engine_of, is_served, model_spec
from dllm_bench.store.spec import RunSpec

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Benchmark, Turns
    from dllm_bench.core.contracts import Decoder
    from dllm_bench.core.denoiser import Denoiser
    from dllm_bench.models.spec import ModelSpec


PROCESSES = ("branch_parallel", "tensor_parallel", "replicas")  # hardware settings that multiply


class Loaded(Protocol):
    """A model ready to decode: the denoiser and its tokenizer."""

    @property
    def denoiser(self) -> Denoiser: ...

    def encode(self, text: str | Turns, /) -> list[int]:
        """Prompt ids of plain text or chat turns."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""

    def attention_warning(self, attention: str, block: int) -> str | None:
        """A sentence where a decoder uses other attention than the weights were trained with."""


@dataclass
class ModelCache:
    """The model last used; the one before is dropped first, so that two need never fit at once."""

    kept: dict[ModelSpec, Loaded] = field(default_factory=dict)

    def load(self, model: ModelSpec) -> Loaded:
        """The loaded model, from the shelf where it lies there."""
        from dllm_bench.models import load as loading

        if model not in self.kept:
            self.kept.clear()
            self.kept[model] = loading.load_model(model)
        return self.kept[model]


MODEL_CACHE = ModelCache()


def real_model(spec: RunSpec) -> Loaded:
    """The model of `spec` on its device, kept until another one is asked for; or its server."""
    if is_served(spec.model):
        from dllm_bench.serving.client import Client

        return Client(engine_of(spec.model))
    return MODEL_CACHE.load(model_spec(spec.model))


def real_decoder(spec: RunSpec) -> Decoder:
    """The decoder of `spec`."""
    decoder: Decoder = instantiate(spec.decoder)
    return decoder


def real_benchmark(spec: RunSpec) -> Benchmark:
    """The benchmark of `spec`, shared with other runs of this process."""
    return benchmark_of(spec.benchmark)


def prepare_device(spec: RunSpec) -> None:
    """Set torch's threads and check that the device is there and the one asked for."""
    import torch

    hardware = spec.hardware
    torch.set_num_threads(int(hardware.get("threads", 1)))
    if not str(hardware["device"]).startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise DllmBenchError(
            f"hardware={hardware['name']} asks for a CUDA device, none was found; choose "
            "hardware=cpu or hardware=auto."
        )
    found, wanted = torch.cuda.get_device_name(), hardware.get("match")
    if wanted and str(wanted).lower() not in found.lower():
        raise DllmBenchError(
            f"hardware={hardware['name']} asks for a {wanted}, this machine has a {found}; choose "
            "the hardware that is there (hardware=auto finds it)."
        )


def sync(spec: RunSpec) -> None:
    """Wait until the device has done all it was given."""
    if str(spec.hardware["device"]).startswith("cuda"):
        import torch

        torch.cuda.synchronize()


@dataclass(frozen=True)
class Dependencies:
    """Where a run gets its dependencies from."""

    model: Callable[[RunSpec], Loaded] = real_model
    decoder: Callable[[RunSpec], Decoder] = real_decoder
    benchmark: Callable[[RunSpec], Benchmark] = real_benchmark
    prepare: Callable[[RunSpec], None] = prepare_device
    sync: Callable[[RunSpec], None] = sync
    clock: Callable[[], float] = time.perf_counter
    now: Callable[[], float] = time.time


REAL = Dependencies()
