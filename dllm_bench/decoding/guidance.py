"""Classifier-free guidance (LLaDA §2.4): each forward sees the canvas with and without the prompt.

logits = u + (scale + 1) (c - u), with c from the prompt as it is and u from a prompt that is all
masks. Both come from one forward with twice as many branches. The forward has to feed the whole
canvas, because cached keys and values of the prompt would be those of c.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

import torch
from torch import Tensor

from dllm_bench.core.contracts import Cache
from dllm_bench.core.decoder import Condition
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import PROMPT, DecodeState
from dllm_bench.decoding.batching import Answer, Step, run_forward


def check_guidance(scale: float, cache: Cache) -> None:
    """Refuse negative scales, and caches that do not feed the whole canvas."""
    if scale < 0:
        raise DllmBenchError(f"guidance is {scale}; give a scale of 0 (none) or more.")
    if scale > 0 and Condition.WHOLE_CANVAS not in cache.gives:
        raise DllmBenchError(
            f"guidance {scale} needs a cache with {Condition.WHOLE_CANVAS}, which "
            f"{type(cache).__name__} does not give; choose cache=none or guidance 0."
        )


def guided_forward(
    branches: DecodeState, plan: ForwardPlan, kv: KVCache, scale: float
) -> Generator[Step, Answer, Tensor]:
    """The planned forward: its logits (K, R, V), guided if `scale` is above 0."""
    if scale == 0:
        return (yield from run_forward(branches.tokens_KL, plan, kv))
    masked_KL = branches.tokens_KL.masked_fill(branches.born_KL == PROMPT, branches.special.mask)
    if plan.visible_K is not None:
        plan = replace(plan, visible_K=plan.visible_K.repeat(2))
    both_XRV = yield from run_forward(torch.cat([branches.tokens_KL, masked_KL]), plan, kv)
    conditional_KRV, unconditional_KRV = both_XRV.chunk(2)
    return unconditional_KRV + (scale + 1) * (conditional_KRV - unconditional_KRV)
