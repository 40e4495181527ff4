"""Decode a position whose candidate is the mask token last (DAEDAL, released fill rule).

For decoders that leave the mask token in the distribution. Where it is the candidate, the next
token stands in for it with a probability of 0, so that no threshold commits it, and ranks behind
all other candidates, by its confidence without the mask token. `Scores.raw_KW` keeps what the inner
score says of the mask token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import forbid
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.registry import register


@register("score.mask_last")
@dataclass(frozen=True)
class MaskLast(Score):
    """The scores of `inner`, in which no candidate is the mask token."""

    inner: Confidence = field(default_factory=Confidence)
    reads_rows: ClassVar[Reads] = "masked"

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        first = self.inner(logits_KWV, state, window)
        others_KWV = logits_KWV.clone()
        forbid(others_KWV, [state.special.mask])
        other = self.inner(others_KWV, state, window)
        masks_KW = first.ids_KW == state.special.mask
        return replace(
            first,
            ids_KW=torch.where(masks_KW, other.ids_KW, first.ids_KW),
            probability_KW=first.probability_KW.masked_fill(masks_KW, 0),
            confidence_KW=torch.where(masks_KW, other.confidence_KW - 1, first.confidence_KW),
            raw_KW=first.confidence_KW,
        )
