"""Several requests on their way at once: one copy to the host and one forward a round for all.

A request is a coroutine, `DecodeSteps`. In turns it gives a tensor whose values it wants on the
host, and a `RunForward` whose logits it wants; what it returns is its generation. A place that
falls free is taken by the next request in the same round. Requests share nothing else, so each
gives what it gives alone, up to the rounding of sums that a longer matrix product adds in another
order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Generation


@dataclass(frozen=True)
class RunForward:
    """What a request wants fed: the arguments of `Denoiser.forward`."""

    tokens_KL: Tensor
    plan: ForwardPlan
    kv: KVCache


DecodeSteps = Generator[Any, Any, Generation]


@torch.inference_mode()
def run_batched(
    model: Denoiser, started: Iterable[DecodeSteps], batch: int
) -> Iterator[Generation]:
    """Generations as they are finished, of up to `batch` requests at a time."""
    waiting = iter(started)
    going: list[DecodeSteps] = []
    surveys: list[Tensor] = []
    while True:
        asking: list[tuple[DecodeSteps, RunForward]] = []
        while True:
            fresh = list(islice(waiting, batch - len(asking) - len(going)))
            going, surveys = going + fresh, surveys + [next(steps) for steps in fresh]
            if not going:
                break
            for steps, told in zip(going, on_host(surveys), strict=True):
                try:
                    asking.append((steps, steps.send(told)))
                except StopIteration as over:
                    yield over.value
            going, surveys = [], []
        if not asking:
            return
        logits = forward(model, [ask for _, ask in asking])
        going = [steps for steps, _ in asking]
        surveys = [steps.send(found) for steps, found in zip(going, logits, strict=True)]


def forward(model: Denoiser, asks: Sequence[RunForward]) -> list[Tensor]:
    """The logits (K, rows, V) of each; a request alone is fed as it is."""
    if len(asks) == 1:
        return [model.forward(asks[0].tokens_KL, asks[0].plan, asks[0].kv)]
    tokens, plans, caches = zip(*((ask.tokens_KL, ask.plan, ask.kv) for ask in asks), strict=True)
    return model.forward_batch(tokens, plans, caches)


def on_host(surveys: Sequence[Tensor]) -> list[list[int]]:
    """The values of flat tensors, in one copy."""
    if len(surveys) == 1:
        return [surveys[0].tolist()]
    values = iter(torch.cat(list(surveys)).tolist())
    return [list(islice(values, survey.shape[0])) for survey in surveys]
