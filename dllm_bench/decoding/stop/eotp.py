"""End-of-text prediction as Learn2PD's authors coded it: cut the canvas where the text will end.

After every forward, among all masked positions that were fed, those whose candidate is the end
token: the first one that the learned filter accepted ends the canvas, else the most probable one
does. Acts before the token is committed, so later forwards see a shorter canvas. The authors' loops
with a cache look at the open block alone (`ahead` off). The paper's own rule (Algorithm 3, Fig. 6:
halt after a decoded block with an end token) is `Eos("block", turn_end=False)`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Stop
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.decoding.select.filter import ACCEPTED
from dllm_bench.registry import register


@register("stop.eotp")
@dataclass(frozen=True)
class EndOfTextPrediction(Stop):
    """Needs no filter: without one the most probable end token decides. ahead: positions beyond
    the open block are looked at too.
    """

    ahead: bool = True

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        """Whether candidates beyond the window are wanted."""
        return self.ahead

    def shorten(self, state: DecodeState, seen: Scores, window: Window) -> Tensor | None:
        ends_A = self._predicted(state, seen, window)
        probability_A = seen.probability_KW[0].masked_fill(~ends_A, -1.0)
        accepted_A = torch.zeros_like(ends_A)
        if ACCEPTED in state.memo:
            accepted_A[: window.width] = state.memo[ACCEPTED][0] & ends_A[: window.width]
        first, surest = accepted_A.long().argmax(), probability_A.argmax()
        last = window.start + torch.where(accepted_A.any(), first, surest)
        return torch.where(ends_A.any(), last + 1, state.length)

    def _predicted(self, state: DecodeState, seen: Scores, window: Window) -> Tensor:
        """Positions masked before the last commit whose candidate is the end token, bool (A,)."""
        stop = window.start + seen.ids_KW.shape[1]
        born_A = state.born_KL[0, window.start : stop]
        masked_A = (born_A == MASKED) | (born_A == state.forwards - 1)
        return masked_A & (seen.ids_KW[0] == state.special.eos)
