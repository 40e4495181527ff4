"""Measure the step times that the verification scheduler reads: `dllm-bench train sps MODEL`.

A step of R tokens is one forward that feeds R positions after a cached context and takes the best
token of every row, as verification does. The sizes are timed in turn, so that a drift of the
machine affects all of them alike; the first turns are warm-up; the device is synchronised before
and after each step; medians are kept. All R positions share one context: the cost of reading one
context per request, drafting and prefill are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.decoder import CAUSAL_MODEL, abilities, require
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods.drafting import StepProfile
from dllm_bench.models import load as loading
from dllm_bench.store import inputs, provenance
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.inputs import wait_for


@dataclass(frozen=True)
class ProfileJob:
    """What is measured."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Tokens of a step, in increasing order."""
    context: int = 256
    """Positions of the cached context."""
    repeats: int = 20
    """Timed steps of each size."""
    warmup: int = 3
    """Steps of each size before those."""

    def __post_init__(self) -> None:
        StepProfile(
            self.batches, (1.0,) * len(self.batches)
        )  # raises an error for impossible sizes


def measure(model: Any, job: ProfileJob) -> list[list[float]]:
    """Return seconds of every timed step, one list per size."""
    given = {"model": abilities(model)}
    require("a profile of verifying steps", frozenset({CAUSAL_MODEL}), given, "model")
    kv, canvas_1L = _context(model, job)
    seconds: list[list[float]] = [[] for _ in job.batches]
    for turn in range(job.warmup + job.repeats):
        for size, timed_s in zip(job.batches, seconds, strict=True):
            step_s = _step_s(model, canvas_1L, kv, size)
            if turn >= job.warmup:
                timed_s.append(step_s)
    return seconds


@torch.inference_mode()
def _context(model: Denoiser, job: ProfileJob) -> tuple[KVCache, Tensor]:
    """Return a cache that holds the context, and a canvas with room for the largest step."""
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
    """Return seconds of one step; the cache is not changed."""
    start = kv.length
    feed, rows = (start, start + size), (start + 1, start + size + 1)
    plan = ForwardPlan(
        ForwardKind.VERIFY, feed, rows, store=feed, attention="block_causal", block=1
    )
    wait_for(model.device)
    before = time.perf_counter()
    model.forward(canvas_1L, plan, kv).argmax(-1)
    wait_for(model.device)
    return time.perf_counter() - before


def profile_of(job: ProfileJob, seconds: Sequence[Sequence[float]]) -> StepProfile:
    """Return steps per second of each size, from the median times."""
    return StepProfile(job.batches, tuple(1 / median(timed_s) for timed_s in seconds))


def run(job: ProfileJob, config: RunConfig) -> dict[str, Any]:
    """Load the configured model and measure it.

    Returns what the profile's file holds: the table, its spread in milliseconds, the settings, and
    facts about model and machine.
    """
    hardware = inputs.resolve_hardware(config.hardware)
    torch.set_num_threads(hardware.threads)
    model = loading.load_model(inputs.model_spec(inputs.resolve_model(config.model, hardware)))
    seconds = measure(model.denoiser, job)
    settings = asdict(job)
    return {
        **{name: list(column) for name, column in asdict(profile_of(job, seconds)).items()},
        "spread_ms": [[round(1000 * s, 4) for s in (min(each), max(each))] for each in seconds],
        **{name: settings[name] for name in ("context", "repeats", "warmup")},
        "model": asdict(model.metadata),
        "hardware": dict(hardware),
        "machine": provenance.machine(str(model.denoiser.device)),
        "torch": torch.__version__,
    }
