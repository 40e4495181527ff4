"""Lookahead over token filling orders (LoPA, arXiv 2512.16229, §3.2 and Eq. 1–2).

From the state after a commit (the anchor, "base"), branch j of k also commits the j-th surest
position that is still masked, ranked by the scores of the forward just made; all branches and the
base go through the next forward together, and the branch that leaves the surest masked positions
goes on. The winner's logits are the next scores: a round costs one forward.
Branch confidence = alpha * creation + (1 - alpha) * mean over the lowest `fraction` of the masked
positions' confidences (released scripts: alpha 0, fraction 1), 1 where nothing is masked; ties go
to the earlier lookahead, the base last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.protocols import Explore, Scores, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import stable_top

VALID = "lookahead.valid"
CREATION = "lookahead.creation"


@dataclass(frozen=True)
class Lookahead(Explore):
    """`k` lookahead branches beside the base: a forward carries up to k + 1 branches."""

    k: int
    alpha: float = 0.0
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.k < 0:
            raise DllmBenchError(f"Lookahead k is {self.k}; give 0 or more branches.")
        if not 0 <= self.alpha <= 1 or not 0 < self.fraction <= 1:
            raise DllmBenchError(
                f"Lookahead has alpha {self.alpha} and fraction {self.fraction}; "
                "both are shares, alpha in [0, 1] and fraction in (0, 1]."
            )

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        if last is None or self.k == 0:
            return state
        scores, window = last
        open_1W = window.eligible_KW & window.of(state.masked_KL)
        confidence_1W = scores.confidence_KW.masked_fill(~open_1W, -torch.inf)
        k = min(self.k, confidence_1W.shape[1])
        best_k = stable_top(confidence_1W, k)[0]
        branches = state.fork(k + 1)
        where_KL = torch.zeros_like(branches.tokens_KL, dtype=torch.bool)
        where_KL[torch.arange(k, device=best_k.device), best_k + window.start] = True
        ids_KL = state.tokens_KL.clone()
        ids_KL[:, window.start : window.stop] = scores.ids_KW
        branches.commit(where_KL, ids_KL)
        creation_K = torch.cat([confidence_1W[0, best_k], confidence_1W.new_ones(1)])
        branches.memo[CREATION] = creation_K
        branches.memo[VALID] = open_1W.sum().clamp(max=k).expand(k + 1)
        return branches

    def valid(self, branches: DecodeState) -> Tensor:
        if branches.branches == 1:
            return super().valid(branches)
        return branches.memo[VALID][0]

    def pick(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        if branches.branches == 1:
            return branches.tokens_KL.new_zeros(())
        confidence_K = self._mean_lowest(scores.confidence_KW, window.eligible_KW)
        if self.alpha > 0:
            creation_K = branches.memo[CREATION]
            confidence_K = self.alpha * creation_K + (1 - self.alpha) * confidence_K
        done_K = ~window.eligible_KW.any(1)
        return confidence_K.masked_fill(done_K, 1.0).argmax()

    def _mean_lowest(self, confidence_KW: Tensor, masked_KW: Tensor) -> Tensor:
        """Mean of the lowest `fraction` (at least one) of the masked confidences, (K,)."""
        count_K = masked_KW.sum(1).clamp(min=1)
        if self.fraction == 1.0:
            return (confidence_KW * masked_KW).sum(1) / count_K
        take_K = (count_K * self.fraction).long().clamp(min=1)
        low_KW = confidence_KW.masked_fill(~masked_KW, torch.inf).sort(dim=1).values
        rank_W = torch.arange(low_KW.shape[1], device=low_KW.device)
        taken_KW = rank_W < take_K[:, None]
        return torch.where(taken_KW, low_KW, 0.0).sum(1) / take_K
