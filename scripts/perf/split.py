"""Split the time of a step into forward, score, select, and the rest of the loop.

Model, score and select are wrapped and timed; all else is bookkeeping: opening blocks, spawning
branches, planning, keeping K/V, committing, the copy to the host. On a CUDA device every reading of
the clock waits for the device, so the sum is longer than a step without timing. On the CPU with one
thread the clock is the CPU time of the process, which other processes disturb least.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder

PARTS = ("forward", "score", "select", "bookkeeping")


@dataclass
class Watch:
    """Collects seconds by part."""

    cuda: bool = False
    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def now(self) -> float:
        """The clock in seconds, read after the device has finished its work."""
        if self.cuda:
            torch.cuda.synchronize()
        elif torch.get_num_threads() == 1:
            return time.process_time()
        return time.perf_counter()

    def on(self, part: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Call `work` and return its result; its time is added to `part`."""
        started = self.now()
        result = work(*arguments)
        self.spent_s[part] += self.now() - started
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


@dataclass(frozen=True)
class TimedScore(Score):
    """A score that is timed."""

    inner: Score
    watch: Watch = field(compare=False)

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        return self.inner.gives

    @property
    def costly(self) -> bool:  # type: ignore[override]
        return self.inner.costly

    @property
    def row_by_row(self) -> bool:  # type: ignore[override]
        return self.inner.row_by_row

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        scores: Scores = self.watch.on("score", self.inner, logits_KWV, state, window)
        return scores


@dataclass(frozen=True)
class TimedSelect(Select):
    """A selector that is timed, its stall rule included."""

    inner: Select
    watch: Watch = field(compare=False)

    @property
    def never_stalls(self) -> bool:  # type: ignore[override]
        return self.inner.never_stalls

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        chosen_KW: Tensor = self.watch.on("select", self.inner, scores, window, state)
        return chosen_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self.watch.on(
            "select", self.inner.on_stall, scores, window, state
        )
        return found

    def accepted(self, state: DecodeState) -> Tensor | None:
        return self.inner.accepted(state)


def split(
    decoder: MaskedDecoder, model: Denoiser, request: Request
) -> tuple[dict[str, float], Generation]:
    """Milliseconds per step by part, and the generation."""
    watch = Watch(model.device.type == "cuda")
    score, select = TimedScore(decoder.score, watch), TimedSelect(decoder.select, watch)
    timed: Any = TimedModel(model, watch)
    request = decoder.prepare(model, request)
    started = watch.now()
    generation = replace(decoder, score=score, select=select).generate(timed, request)
    whole_s = watch.now() - started
    parts = {part: watch.spent_s[part] for part in PARTS[:3]}
    parts["bookkeeping"] = whole_s - sum(parts.values())
    return {part: 1000 * s / len(generation.trace) for part, s in parts.items()}, generation
