"""WINO (arXiv 2507.18578): many tokens at once, verified by leave-one-out rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Scores, Select
from dllm_bench.core.declared import Positive, PositiveProportion, Probability
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.denoiser import AddedRows
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision
from dllm_bench.methods.common import most_confident, open_block
from dllm_bench.methods.revising import (
    REVISES_CANVAS,
    STANDING,
    ReadsStanding,
    Revision,
    largest,
    masking,
)
from dllm_bench.registry import register


@register("select.capped")
@dataclass(frozen=True)
class Capped(Select):
    """Limits `inner` to a share of the masks, the most confident ones (WINO, arXiv 2507.18578).

    Among the positions that `inner` chooses, the max(min(int(share m), most), least) most confident
    ones are committed, where m is the number of masks in the open block.
    """

    inner: Select
    share: PositiveProportion = 0.7  # share of the masks
    least: Positive = 5  # lower limit of the cap
    most: int = 20  # upper limit of the cap

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least > self.most:
            raise DllmBenchError(
                f"Capped has least={self.least}, above most={self.most}; lower least or raise most."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        masks_K = window.eligible_KW.sum(1)
        cap_K = (masks_K.double() * self.share).long().clamp(self.least, self.most)
        return most_confident(scores, window, cap_K) & self.inner(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)


Span = tuple[int, int]
ACCEPTED = MemoKey[Tensor]("wino.accepted")  # (K, 2): open block, commits of its last forward


@register("revise.wino")
@dataclass(frozen=True, kw_only=True)
class Wino(ReadsStanding):
    """WINO (arXiv 2507.18578, Feng-Hong/WINO-DLLM): verifies tokens with leave-one-out rows.

    Every forward also feeds the open block a second time, as masks. The second row of a position
    sees the whole canvas except this position, so it predicts the position from all other tokens.
    Earlier committed tokens of the block with a probability below `tau` in their second row are
    masked again, the least probable first: fewer than the previous forward committed, and none if
    this forward commits a single position. So any two forwards make progress, and decoding ends.
    Selector `capped` is the other half of the method.
    """

    tau: Probability = 0.9  # masked again below this probability; 0: never
    first: int = 30  # upper limit in a block's first forward
    precision: Precision = "float64"  # precision of the second row's probability
    needs = REVISES_CANVAS | needing(
        {"cache": Condition.FULL_ATTENTION, "model": Condition.UNSHIFTED}
    )

    def on_plan(self, round: Round) -> None:
        """Feed the window a second time, as masks."""
        span, state = (round.window.start, round.window.stop), round.state
        rows = leave_one_out(span, round.plan.feed, state.special.mask, state.tokens_KL.device)
        round.plan = replace(round.plan, added=rows)

    def judging_KWV(self, round: Round) -> Tensor:
        """Return the logits of the rows that see everything but their own position."""
        return round.added_KEV

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        support_KW = state.memo[STANDING]
        accepted_K = (window.of(state.born_KL) == state.forwards).sum(1)
        wrong_KW = self.revisable(window, state) & (support_KW < self.tau)
        most_K = (self._last(accepted_K, window, state) - 1) * (accepted_K > 1)
        remask_KW = largest(-support_KW, wrong_KW, most_K)
        return masking(remask_KW, state)

    def _last(self, accepted_K: Tensor, window: Window, state: DecodeState) -> Tensor:
        """Return the number of commits of the block's last forward, (K,); remember that of this
        one."""
        block_K, known_K2 = open_block(window), state.memo.get(ACCEPTED)
        state.memo[ACCEPTED] = torch.stack([block_K, accepted_K], 1)
        if known_K2 is None:
            return torch.full_like(accepted_K, self.first)
        return known_K2[:, 1].masked_fill(known_K2[:, 0] != block_K, self.first)


@lru_cache(maxsize=16)
def leave_one_out(span: Span, feed: Span, mask: int, device: torch.device) -> AddedRows:
    """Return added rows: masks at the positions of a span, each of which sees everything fed except
    its own position."""
    position_E = torch.arange(*span, device=device)
    other_EF = position_E[:, None] != torch.arange(*feed, device=device)
    each_EE = torch.ones_like(other_EF[:, :1]).expand(-1, len(position_E))
    tokens_E = torch.full_like(position_E, mask)
    return AddedRows(tokens_E, position_E, torch.cat([other_EF, each_EE], dim=1))
