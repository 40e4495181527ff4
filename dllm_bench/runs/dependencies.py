"""What a run needs from outside: model, decoder, benchmark, clock. Tests replace them with fakes.

The scheduling of the process (cores, niceness, policy) is among them, since timings depend on it.
Everything is made from a `RunSpec`. The last model and benchmark are cached, because the runs of a
table share them; everything else is created for each run. Torch is imported on use, because SLURM
jobs and status lines do not need it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from dllm_bench.core.benchmark import Benchmark, Turns
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.spec import ModelSpec
from dllm_bench.registry import instantiate
from dllm_bench.store import inputs
from dllm_bench.store.spec import RunSpec


@dataclass(frozen=True)
class Scheduling:
    """How the kernel schedules this process."""

    cores: frozenset[int]
    """Processors it may use."""
    nice: int
    policy: int
    """A number of sched(7), 0 by default."""
    priority: int
    """0 for the policies that are not real time."""

    @classmethod
    def now(cls) -> Self | None:
        """Return the current scheduling; None if the system does not report it."""
        if not hasattr(os, "sched_getaffinity"):
            return None
        return cls(
            frozenset(os.sched_getaffinity(0)),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            os.sched_getparam(0).sched_priority,
        )

    def __str__(self) -> str:
        return f"{len(self.cores)} cores, nice {self.nice}, policy {self.policy}"

    def apply(self) -> None:
        """Apply this scheduling to the process, as far as its user is allowed to."""
        with suppress(OSError):
            os.sched_setaffinity(0, self.cores)
        with suppress(OSError):
            os.sched_setscheduler(0, self.policy, os.sched_param(self.priority))
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)


STARTED = Scheduling.now()
"""Scheduling of the process when it began."""


def restore_scheduling() -> None:
    """Restore the scheduling that this process began with; DllmBenchError if that is not
    possible."""
    found = Scheduling.now()
    if STARTED is None or found == STARTED:
        return
    STARTED.apply()
    if Scheduling.now() != STARTED:
        raise DllmBenchError(
            f"A run is timed with the scheduling that its process began with ({STARTED}), and "
            f"something changed it to {found}, which this user may not undo; give the same "
            "command again in a new process."
        )


if TYPE_CHECKING:
    from dllm_bench.core.decoder import Decoder
    from dllm_bench.core.denoiser import Denoiser


class Loaded(Protocol):
    """A model ready to decode: the denoiser and its tokenizer."""

    @property
    def denoiser(self) -> Denoiser: ...

    def encode(self, text: str | Turns, /) -> list[int]:
        """Return the prompt ids of plain text or chat turns."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""

    def attention_warning(self, attention: str, block: int) -> str | None:
        """Return a warning if a decoder's attention differs from that of the weights' training;
        else None."""


class ModelCache(dict[ModelSpec, Loaded]):
    """Keeps the most recently used model loaded.

    The old one is freed before the next is loaded, so two never occupy memory at the same time.
    """

    def __missing__(self, model: ModelSpec) -> Loaded:
        from dllm_bench.models import load as loading

        self.clear()
        self[model] = loading.load_model(model)
        return self[model]


MODEL_CACHE = ModelCache()
PARENT_CACHE = ModelCache()


def real_model(spec: RunSpec) -> Loaded:
    """Return the model of `spec` on its device, kept until another is loaded; or its server's
    client."""
    if spec.model.is_served:
        from dllm_bench.serving.client import Client

        return Client(inputs.engine_of(spec.model))
    model = inputs.model_spec(spec.model)
    if model not in MODEL_CACHE:
        inputs.require_memory(spec.model)
    return MODEL_CACHE[model]


def real_parent(spec: RunSpec) -> Loaded:
    """Return the model that reads the texts of `spec`: the one that decodes them, if it is that, or
    a second one, kept beside it."""
    model = inputs.model_spec(spec.parent)
    return MODEL_CACHE.get(model) or PARENT_CACHE[model]


def real_decoder(spec: RunSpec) -> Decoder:
    """Return the decoder of `spec`; None if a server decodes."""
    decoder: Any = None if spec.model.is_served else instantiate(spec.decoder, "decoder")
    return decoder


def real_benchmark(spec: RunSpec) -> Benchmark:
    """Return the benchmark of `spec`, shared with other runs of this process."""
    return inputs.benchmark_of(spec.benchmark)


def prepare_device(spec: RunSpec) -> None:
    """Set torch's threads and check that the device exists and is the configured one."""
    import torch

    torch.set_num_threads(spec.hardware.threads)
    inputs.require_device(spec.hardware)


@dataclass(frozen=True)
class Dependencies:
    """Functions that give a run what it needs."""

    model: Callable[[RunSpec], Loaded] = real_model
    parent: Callable[[RunSpec], Loaded] = real_parent
    decoder: Callable[[RunSpec], Decoder] = real_decoder
    benchmark: Callable[[RunSpec], Benchmark] = real_benchmark
    prepare: Callable[[RunSpec], None] = prepare_device  # called before the model is loaded
    sync: Callable[[object], None] = inputs.wait_for  # waits for a device
    clock: Callable[[], float] = time.perf_counter  # seconds, for durations
    now: Callable[[], float] = time.time  # seconds since the epoch


REAL: Dependencies = Dependencies()
