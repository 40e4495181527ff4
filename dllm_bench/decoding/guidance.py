"""Classifier-free guidance (LLaDA §2.4): the forward is made with the prompt and with it masked.

logits = u + (scale + 1) (c - u), c with the prompt, u with every prompt position masked. Both go
through one forward, as twice as many branches; that needs a forward that feeds the whole canvas,
since cached prompt positions would be the conditional ones.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from dllm_bench.core.contracts import Cache
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import PROMPT, DecodeState
from dllm_bench.decoding.batching import RunForward

WHOLE = "the whole canvas in every forward"


def check_guidance(scale: float, cache: Cache) -> None:
    """Refuse negative scales, and caches that reuse positions."""
    if scale < 0:
        raise DllmBenchError(f"guidance is {scale}; give a scale of 0 (none) or more.")
    if scale > 0 and WHOLE not in cache.gives:
        raise DllmBenchError(
            f"guidance {scale} needs a cache with {WHOLE}, which {type(cache).__name__} does not "
            "give; choose cache=none or guidance 0."
        )


def guided(
    branches: DecodeState, plan: ForwardPlan, kv: KVCache, scale: float
) -> Generator[RunForward, Tensor, Tensor]:
    """Asks for the planned forward; logits (K, rows, V), guided where `scale` is above 0."""
    if scale == 0:
        return (yield RunForward(branches.tokens_KL, plan, kv))
    masked_KL = branches.tokens_KL.masked_fill(branches.born_KL == PROMPT, branches.special.mask)
    if plan.visible_K is not None:
        plan = replace(plan, visible_K=plan.visible_K.repeat(2))
    both_2KRV = yield RunForward(torch.cat([branches.tokens_KL, masked_KL]), plan, kv)
    conditional_KRV, unconditional_KRV = both_2KRV.chunk(2)
    return unconditional_KRV + (scale + 1) * (conditional_KRV - unconditional_KRV)
