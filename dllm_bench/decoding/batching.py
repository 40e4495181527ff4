"""Decode several requests at a time: one copy to the host and one forward per round for all.

Decoding a request is a coroutine, `DecodeSteps`. It yields its next step (a tensor whose values the
host needs, or `RunForward`), receives the answer, and finally returns the generation. When a
request ends, the next one starts in the same round. Requests share nothing else, so batched and
unbatched decoding produce identical tokens, up to the rounding of sums that a longer matrix product
adds in another order.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
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


@torch.inference_mode()
def run_batched(
    model: Denoiser, requests: Iterable[DecodeSteps], batch: int
) -> Iterator[Generation]:
    """Run up to `batch` coroutines at a time; yield each generation when it is finished."""
    waiting, pending = iter(requests), dict[DecodeSteps, Step]()
    while True:
        pending |= {one: next(one) for one in islice(waiting, batch - len(pending))}
        if not pending:
            return
        for one, answer in _answers(model, pending):
            try:
                pending[one] = one.send(answer)
            except StopIteration as end:
                del pending[one]
                yield end.value


def _answers(
    model: Denoiser, pending: Mapping[DecodeSteps, Step]
) -> Iterator[tuple[DecodeSteps, Answer]]:
    """Return the answers to the pending steps: copies first, so that new requests join the next
    forward."""
    copies = {one: step for one, step in pending.items() if isinstance(step, Tensor)}
    if copies:
        return zip(copies, to_host([*copies.values()]), strict=True)
    forwards = {one: step for one, step in pending.items() if isinstance(step, RunForward)}
    return zip(forwards, forward(model, [*forwards.values()]), strict=True)


def forward(model: Denoiser, steps: Sequence[RunForward]) -> list[Tensor]:
    """Return the logits (K, R, V) of each request; a single one is not batched."""
    if len(steps) == 1:
        return [model.forward(*steps[0])]
    tokens, plans, caches = zip(*steps, strict=True)
    return model.forward_batch(tokens, plans, caches)
