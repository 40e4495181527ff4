"""Another score, and by how much the answer's best logits lead (Prophet, arXiv 2508.19982).

The mean over the answer's positions, masked or not, of the difference of their two largest logits.
The released code reads five positions from where the answer begins, which it knows from the tokens
that it pins; without an answer's place it reads nothing. Here the gap is then that of all masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.registry import register


@register("score.answer_gap")
@dataclass(frozen=True)
class AnswerGap(Score):
    """The scores of `inner`, with the gap of the answer's logits."""

    inner: Score = field(default_factory=Confidence)
    answer: int | None = None  # first new position of the answer; None: all masked positions
    width: int = 5  # positions of the answer

    def __post_init__(self) -> None:
        if (self.answer is not None and self.answer < 0) or self.width < 1:
            raise DllmBenchError(
                f"AnswerGap has answer {self.answer} and width {self.width}; give a position "
                "behind the prompt, or null, and 1 or more positions."
            )

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """The answer in the window, and its logits where it is committed."""
        whole = Need("schedule", Condition.WHOLE_GENERATION)
        reads = set() if self.answer is None else {Need("cache", Condition.FED_WINDOW)}
        return frozenset({whole, *reads})

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives, and the gap."""
        return self.inner.gives | {Condition.ANSWER_GAP}

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        read_KW, logits_KRV = window.eligible_KW, logits_KWV
        if self.answer is not None:
            logits_KRV = logits_KWV[:, self.answer : self.answer + self.width]
            read_KW = torch.ones_like(logits_KRV[..., 0], dtype=torch.bool)
        two_KR2 = logits_KRV.topk(2, dim=-1).values.float()
        gap_KR = (two_KR2[..., 0] - two_KR2[..., 1]) * read_KW
        gap_K = gap_KR.sum(1) / read_KW.sum(1)
        return replace(self.inner(logits_KWV, state, window), answer_gap_K=gap_K)
