"""Prophet (arXiv 2508.19982): commit everything as soon as the answer is clear."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Count, Positive
from dllm_bench.core.decoder import Condition, Conditions, Needs, needing
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.common import OF_LOGITS, Confidence, TopK
from dllm_bench.registry import register

GAP = MemoKey[Tensor]("answer_gap.gap")  # mean difference of the two largest logits, (K,)


@register("score.answer_gap")
@dataclass(frozen=True)
class AnswerGap(Score):
    """Scores by `inner`, and remembers the lead of the answer's best logits.

    The gap is the difference of the two largest logits, averaged over the answer's positions,
    masked or not. The released code reads five positions from the start of the answer, which it
    knows from the tokens it pins; without a known start it reads nothing. Here the gap is then
    averaged over all masks.
    """

    inner: Score = field(default_factory=Confidence)
    answer: Count | None = None  # first new position of the answer; None: all masked positions
    width: Positive = 5  # positions of the answer

    @property
    def needs(self) -> Needs:
        """The answer in the window, and logits at its committed positions."""
        reads = () if self.answer is None else Condition.FED_WINDOW
        return needing({"schedule": Condition.WHOLE_GENERATION, "cache": reads})

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, and the gap."""
        return self.inner.gives - OF_LOGITS | {Condition.ANSWER_GAP}

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        read_KW, logits_KRV = window.eligible_KW, logits_KWV
        if self.answer is not None:
            logits_KRV = logits_KWV[:, self.answer : self.answer + self.width]
            read_KW = torch.ones_like(logits_KRV[..., 0], dtype=torch.bool)
        two_KR2 = logits_KRV.topk(2, dim=-1).values.float()
        gap_KR = (two_KR2[..., 0] - two_KR2[..., 1]) * read_KW
        state.memo[GAP] = gap_KR.sum(1) / read_KW.sum(1)
        return self.inner(logits_KWV, state, window)


MIDDLE, END = 0.33, 0.67  # shares of the forwards at which `mid` and `late` begin (released code)


@register("select.early_exit")
@dataclass(frozen=True)
class EarlyExit(Select):
    """Prophet (arXiv 2508.19982): commits by `inner`, or everything once the answer is clear.

    It takes LLaDA's steps, block by block. In the g-th of all S forwards, all remaining masks are
    committed if the answer's gap has reached a threshold that falls with g / S: `early` below 0.33,
    `mid` below 0.67, then `late`. The whole generation is one window, in which `block` positions
    are open at a time. Pinned tokens are on the canvas from the start; the released code then makes
    forwards over a block that is full before its steps are over (`idle`).
    """

    inner: TopK = field(default_factory=TopK)  # its steps are per block
    block: Positive = 32
    early: float = 7.5  # thresholds of the answer's gap (difference of logits)
    mid: float = 5.0
    late: float = 2.5
    idle: bool = False  # whether forwards may commit nothing, as published
    pinned: tuple[tuple[int, int], ...] = ()  # (new position, token id) known from the start
    needs = needing({"schedule": Condition.WHOLE_GENERATION, "score": Condition.ANSWER_GAP})

    def prepare(self, model: Denoiser, request: Request) -> Request:
        if not self.pinned:
            return request
        return replace(request, pinned=tuple(dict([*request.pinned, *self.pinned]).items()))

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        clear_K = state.memo[GAP] >= self._enough(window, state)
        where_KW = self.inner(scores, self._open(window, state), state)
        return where_KW | (clear_K[:, None] & window.eligible_KW)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = self.inner.on_stall(scores, self._open(window, state), state)
        return torch.zeros_like(where_KW) if self.idle else where_KW, ids_KW

    def _steps(self, window: Window) -> int:
        """Return the number of forwards of a block."""
        return self.inner.steps or min(self.block, window.width)

    def _enough(self, window: Window, state: DecodeState) -> float:
        """Return the threshold of the gap in this forward."""
        steps = self._steps(window) * -(-window.width // self.block)
        share = (state.forwards + 1) / steps
        return self.early if share < MIDDLE else self.mid if share < END else self.late

    def _open(self, window: Window, state: DecodeState) -> Window:
        """Return the window with one open block: the first with masks or, with `idle`, the
        scheduled one."""
        place_W = torch.arange(window.width, device=window.eligible_KW.device) // self.block
        if self.idle:
            open_K1 = place_W.new_tensor([[state.forwards // self._steps(window)]])
        else:
            open_K1 = place_W[window.eligible_KW.int().argmax(1, keepdim=True)]
        eligible_KW = window.eligible_KW & (place_W == open_K1)
        return replace(window, block=self.block, eligible_KW=eligible_KW)
