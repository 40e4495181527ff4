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
from dllm_bench.core.contracts import Scores, Stop
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.registry import register


@register("stop.eotp")
@dataclass(frozen=True)
class EndOfTextPrediction(Stop):
    """Cuts the canvas behind a predicted end token; without a filter the most probable one."""

    ahead: bool = True  # whether positions behind the open block count too
    by_position: ClassVar[bool] = True

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        """If positions behind the open block count."""
        return self.ahead

    def shorten(
        self, state: DecodeState, scores: Scores, window: Window, accepted_KW: Tensor | None
    ) -> Tensor | None:
        ends_A = self._predicted(state, scores, window)
        probability_A = scores.probability_KW[0].masked_fill(~ends_A, -1.0)
        accepted_A = torch.zeros_like(ends_A)
        if accepted_KW is not None:
            accepted_A[: window.width] = accepted_KW[0] & ends_A[: window.width]
        first, best = accepted_A.long().argmax(), probability_A.argmax()
        last = window.start + torch.where(accepted_A.any(), first, best)
        return torch.where(ends_A.any(), last + 1, state.length)

    def _predicted(self, state: DecodeState, scores: Scores, window: Window) -> Tensor:
        """Positions masked before the last commit whose candidate is the end token, bool (A,)."""
        stop = window.start + scores.ids_KW.shape[1]
        born_A = state.born_KL[0, window.start : stop]
        masked_A = (born_A == MASKED) | (born_A == state.forwards - 1)
        return masked_A & (scores.ids_KW[0] == state.special.eos)
