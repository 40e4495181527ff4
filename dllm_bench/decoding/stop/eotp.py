"""End-of-text prediction as Learn2PD's authors coded it: cut the canvas where the text will end.

After every forward, the rule looks at the masked positions that were fed and whose candidate is the
end token. The first one that a learned filter accepted ends the canvas, else the most probable one.
This happens before the token is committed, so later forwards see a shorter canvas. The authors'
loops with a cache look at the open block only (`ahead` off). The paper's own rule (Algorithm 3,
Fig. 6: halt after a decoded block with an end token) is `Eos("block", turn_end=False)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Stop
from dllm_bench.core.round import Round
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.decoding.numerics import top1
from dllm_bench.decoding.select.filter import ACCEPTED
from dllm_bench.registry import register

AHEAD_IDS = MemoKey[Tensor]("eotp.ahead_ids")  # candidates behind the window, int64 (K, X)
AHEAD_PROBABILITY = MemoKey[Tensor]("eotp.ahead_probability")  # of them, (K, X)


@register("stop.eotp")
@dataclass(frozen=True)
class EndOfTextPrediction(Stop):
    """Cuts the canvas behind a predicted end token; without a filter the most probable one."""

    ahead: bool = True  # whether positions behind the open block count too
    by_position: ClassVar[bool] = True

    @property
    def reads_rows(self) -> Reads:  # type: ignore[override]
        """What is fed behind the open block, if that counts."""
        return "fed" if self.ahead else "masked"

    def on_scores(self, round: Round) -> None:
        """Remember the candidates behind the window."""
        if self.ahead:
            memo = round.state.memo
            memo[AHEAD_IDS], memo[AHEAD_PROBABILITY] = top1(round.ahead_KXV)

    def on_commit(self, round: Round) -> None:
        ids_KA, probability_KA = round.scores.ids_KW, round.scores.probability_KW
        if self.ahead:
            memo = round.state.memo
            ids_KA = torch.cat([ids_KA, memo[AHEAD_IDS]], 1)
            probability_KA = torch.cat([probability_KA, memo[AHEAD_PROBABILITY]], 1)
        round.cut(self._length(ids_KA[0], probability_KA[0], round.window, round.state))

    def _length(
        self, ids_A: Tensor, probability_A: Tensor, window: Window, state: DecodeState
    ) -> Tensor:
        """The new length of the canvas, 0-d int64."""
        accepted_KW = state.memo.get(ACCEPTED)
        ends_A = self._predicted(ids_A, window, state)
        probability_A = probability_A.masked_fill(~ends_A, -1.0)
        accepted_A = torch.zeros_like(ends_A)
        if accepted_KW is not None:
            accepted_A[: window.width] = accepted_KW[0] & ends_A[: window.width]
        first, best = accepted_A.long().argmax(), probability_A.argmax()
        last = window.start + torch.where(accepted_A.any(), first, best)
        return torch.where(ends_A.any(), last + 1, state.length)

    def _predicted(self, ids_A: Tensor, window: Window, state: DecodeState) -> Tensor:
        """Positions masked before the commit whose candidate is the end token, bool (A,)."""
        born_A = state.born_KL[0, window.start : window.start + len(ids_A)]
        masked_A = (born_A == MASKED) | (born_A == state.forwards)
        return masked_A & (ids_A == state.special.eos)
