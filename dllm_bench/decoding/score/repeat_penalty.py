"""A penalty for repeating the token to the left (SGLang's JointThreshold, `penalty_lambda`).

At every row of a block but its first, `penalty` is subtracted from the logit of the token that
stands one position before, prompt tokens and the mask token included. The first row has none: the
released step sees one block at a time. Another score reads the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("score.repeat_penalty")
@dataclass(frozen=True)
class RepeatPenalty(Score):
    """Scores the logits after the penalty."""

    inner: Score
    penalty: float = 0.0  # subtracted from a logit

    def __post_init__(self) -> None:
        if self.penalty < 0:
            raise DllmBenchError(
                f"RepeatPenalty has penalty {self.penalty}; give 0 (none) or a positive number."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives."""
        return self.inner.gives

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        before_KW1 = window.of(state.tokens_KL.roll(1, 1))[..., None]
        penalty_KW1 = torch.full_like(before_KW1, -self.penalty, dtype=logits_KWV.dtype)
        penalty_KW1[:, :: window.block] = 0  # a window begins with a block
        return self.inner(logits_KWV.scatter_add(2, before_KW1, penalty_KW1), state, window)
