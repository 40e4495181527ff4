"""Measures the profile the verification scheduler reads: `dllm-bench train sps MODEL`.

A step of B tokens is one forward that feeds B positions after a cached context and takes the best
token of every row, as verification does. Sizes take turns, so that a drift of the machine meets
them all alike; the first turns warm up; the device is waited for on both sides; medians are kept.
All B positions share one context: what reading a context per request costs, drafting and prefill
are left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.length.measurements import StepProfile
from dllm_bench.decoding.speculative import check_target
from dllm_bench.store import inputs, provenance


@dataclass(frozen=True)
class ProfileJob:
    """What is measured: sizes of steps, positions of cached context, timed and warm-up turns."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    context: int = 256
    repeats: int = 20
    warmup: int = 3

    def __post_init__(self) -> None:
        StepProfile(self.batches, (1.0,) * len(self.batches))  # refuses sizes no table can have


def measure(model: Any, job: ProfileJob) -> list[list[float]]:
    """Seconds of every timed step, a list per size."""
    check_target(model)
    kv, canvas_1L = _context(model, job)
    spent: list[list[float]] = [[] for _ in job.batches]
    for turn in range(job.warmup + job.repeats):
        for size, found in zip(job.batches, spent, strict=True):
            seconds = _step_s(model, canvas_1L, kv, size)
            if turn >= job.warmup:
                found.append(seconds)
    return spent


@torch.inference_mode()
def _context(model: Denoiser, job: ProfileJob) -> tuple[KVCache, Tensor]:
    """A cache that holds the context, and a canvas with room for the largest step."""
    length = job.context + job.batches[-1]
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(model.vocab_size, (1, length), generator=generator)
    canvas_1L, kv = ids_1L.to(model.device), model.new_cache(length)
    end = job.context
    feed = ForwardPlan(
        ForwardKind.PREFILL, (0, end), (end, end + 1), (0, end), "block_causal", block=1
    )
    model.forward(canvas_1L, feed, kv)
    kv.keep(feed, torch.zeros((), dtype=torch.long, device=model.device))
    return kv, canvas_1L


@torch.inference_mode()
def _step_s(model: Denoiser, canvas_1L: Tensor, kv: KVCache, size: int) -> float:
    """Seconds of one step; the cache stays as it is."""
    start = kv.length
    feed, rows = (start, start + size), (start + 1, start + size + 1)
    plan = ForwardPlan(
        ForwardKind.VERIFY, feed, rows, store=feed, attention="block_causal", block=1
    )
    _wait(model.device)
    before = time.perf_counter()
    model.forward(canvas_1L, plan, kv).argmax(-1)
    _wait(model.device)
    return time.perf_counter() - before


def _wait(device: torch.device) -> None:
    """Until the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def profile_of(job: ProfileJob, spent: Sequence[Sequence[float]]) -> StepProfile:
    """Medians as a table."""
    return StepProfile(job.batches, tuple(1 / median(found) for found in spent))


def run(job: ProfileJob, config: Mapping[str, Any]) -> dict[str, Any]:
    """Load the configured model and measure it: the table, its spread, facts of model, machine."""
    from dllm_bench.models import load as loading

    hardware = inputs.resolve_hardware(config["hardware"])
    torch.set_num_threads(int(hardware.get("threads", 1)))
    model = loading.load_model(inputs.model_spec(inputs.resolve_model(config["model"], hardware)))
    spent = measure(model.denoiser, job)
    asked = asdict(job)
    return {
        **{name: list(column) for name, column in asdict(profile_of(job, spent)).items()},
        "spread_ms": [[round(1000 * s, 4) for s in (min(all_), max(all_))] for all_ in spent],
        **{name: asked[name] for name in ("context", "repeats", "warmup")},
        "model": asdict(model.facts),
        "hardware": hardware,
        "machine": provenance.machine(str(model.denoiser.device)),
        "torch": torch.__version__,
    }
