"""Decode several requests at a time: one copy to the host and one forward per round for all.

Decoding a request is a coroutine, `DecodeSteps`. It yields its next step (a tensor whose values the
host needs, or `RunForward`), receives the answer, and finally returns the generation. When a
request ends, the next one starts in the same round. Requests share nothing else, so batched and
unbatched decoding produce identical tokens, up to the rounding of sums that a longer matrix product
adds in another order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Generation
from dllm_bench.core.transfer import to_host


class RunForward(NamedTuple):
    """A step that requests a forward; the answer is its logits. See `Denoiser.forward`."""

    tokens_KL: Tensor
    plan: ForwardPlan
    kv: KVCache


Step = Tensor | RunForward
"""A tensor (X,) is a step that requests its values, integers, as a list."""
Answer = list[int] | Tensor
Returned = TypeVar("Returned")
Steps = Generator[Step, Answer, Returned]
DecodeSteps = Steps[Generation]


def host_values(values_X: Tensor) -> Steps[list[int]]:
    """Yield the tensor as a step and return its values."""
    answer = yield values_X
    assert isinstance(answer, list)
    return answer


def run_forward(tokens_KL: Tensor, plan: ForwardPlan, kv: KVCache) -> Steps[Tensor]:
    """Yield the step `RunForward` and return its answer, logits (K, R, V)."""
    answer = yield RunForward(tokens_KL, plan, kv)
    assert isinstance(answer, Tensor)
    return answer


@dataclass(eq=False)
class _Active:
    """A request that is being decoded."""

    steps: DecodeSteps
    step: Step  # the step it waits for


@torch.inference_mode()
def run_batched(
    model: Denoiser, requests: Iterable[DecodeSteps], batch: int
) -> Iterator[Generation]:
    """Run up to `batch` coroutines at a time; yield each generation when it is finished."""
    waiting, active = iter(requests), list[_Active]()
    while True:
        active += [_Active(one, next(one)) for one in islice(waiting, batch - len(active))]
        if not active:
            return
        for one, answer in _answers(model, active):
            try:
                one.step = one.steps.send(answer)
            except StopIteration as end:
                active.remove(one)
                yield end.value


def _answers(model: Denoiser, active: Sequence[_Active]) -> list[tuple[_Active, Answer]]:
    """Return the answers to the pending steps: copies first, so that new requests join the next
    forward."""
    copies = [(one, one.step) for one in active if isinstance(one.step, Tensor)]
    if copies:
        values = to_host([values_X for _, values_X in copies])
        return [(one, answer) for (one, _), answer in zip(copies, values, strict=True)]
    forwards = [(one, one.step) for one in active if isinstance(one.step, RunForward)]
    logits = forward(model, [step for _, step in forwards])
    return [(one, answer) for (one, _), answer in zip(forwards, logits, strict=True)]


def forward(model: Denoiser, steps: Sequence[RunForward]) -> list[Tensor]:
    """Return the logits (K, R, V) of each request; a single one is not batched."""
    if len(steps) == 1:
        return [model.forward(*steps[0])]
    tokens, plans, caches = zip(*steps, strict=True)
    return model.forward_batch(tokens, plans, caches)
