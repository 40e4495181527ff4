"""Split the time of a step into forward, score, select, and the rest of the loop.

Model, score and select are wrapped and timed; all else is bookkeeping: opening blocks, spawning
branches, planning, keeping K/V, committing, the copy to the host. On a CUDA device every reading of
the clock waits for the device, so the sum is longer than a step without timing. On the CPU with one
thread the clock is the CPU time of the process, which other processes disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from dllm_bench.core.decoder import Piece
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Generation, Request
from dllm_bench.decoding.masked import MaskedDecoder

P, T = TypeVar("P", bound=Piece), TypeVar("T")
PARTS = ("forward", "score", "select", "bookkeeping")


@dataclass
class Watch:
    """Collects seconds by part."""

    cuda: bool = False
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def now(self) -> float:
        """Return the clock in seconds, read after the device has finished its work."""
        if self.cuda:
            torch.cuda.synchronize()
        elif torch.get_num_threads() == 1:
            return time.process_time()
        return time.perf_counter()

    def clocked(self, work: Callable[..., T], *arguments: Any) -> tuple[T, float]:
        """Call `work`; return its result, and the seconds it took."""
        started = self.now()
        result = work(*arguments)
        return result, self.now() - started

    def on(self, part: str, work: Callable[..., T], *arguments: Any) -> T:
        """Call `work` and return its result; its time is added to `part`."""
        result, seconds = self.clocked(work, *arguments)
        self.spent_s[part] += seconds
        return result


class TimedModel:
    """A model whose forwards are timed; everything else is the model's own."""

    def __init__(self, model: Denoiser, watch: Watch) -> None:
        self._model, self._watch = model, watch
        self.started: list[float] = []  # when each forward started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *arguments: Any) -> Any:
        self.started.append(self._watch.now())
        return self._watch.on("forward", self._model.forward, *arguments)


def timed(piece: P, watch: Watch, part: str, *methods: str) -> P:
    """Return a copy of a piece whose `methods` are timed; whatever else it declares is unchanged.

    A method that calls another of them calls the piece's own, so that no time counts twice.
    """

    def on_watch(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda _, *arguments: watch.on(part, method, *arguments)

    same, kind = copy(piece), type(piece)
    calls = {name: on_watch(getattr(piece, name)) for name in methods}
    object.__setattr__(same, "__class__", type(kind.__name__, (kind,), calls))
    return same


def split(
    decoder: MaskedDecoder, model: Denoiser, request: Request
) -> tuple[dict[str, float], Generation]:
    """Milliseconds per step by part, and the generation."""
    watch = Watch(model.device.type == "cuda")
    score = timed(decoder.score, watch, "score", "__call__")
    select = timed(decoder.select, watch, "select", "__call__", "on_stall")
    timed_model: Any = TimedModel(model, watch)
    request = decoder.prepare(model, request)
    watched = replace(decoder, score=score, select=select)
    generation, whole_s = watch.clocked(watched.generate, timed_model, request)
    parts = {part: watch.spent_s[part] for part in PARTS[:3]}
    parts["bookkeeping"] = whole_s - sum(parts.values())
    return {part: 1000 * s / len(generation.trace) for part, s in parts.items()}, generation
