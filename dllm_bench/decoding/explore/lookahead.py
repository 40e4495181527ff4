"""Lookahead over token filling orders (LoPA, arXiv 2512.16229, §3.2 and Eq. 1–2).

From the state after a commit (the anchor, "base"), branch j of k also commits the j-th surest
position that is still masked, ranked by the scores of the forward just made; all branches and the
base go through the next forward together, and the branch that leaves the surest masked positions
goes on. The winner's logits are the next scores: a round costs one forward.
Branch confidence = alpha * creation + (1 - alpha) * mean of the masked positions' confidences (or
what `fraction` or `sliding` make of them; 1 where nothing is masked), released scripts: alpha 0;
ties go to the earlier lookahead, the base last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Explore, Scores
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import at_least_float32, check_choice, stable_top
from dllm_bench.registry import register

VALID = "lookahead.valid"
CREATION = "lookahead.creation"

Reads = Literal["fused", "raw"]


@register("explore.lookahead")
@dataclass(frozen=True)
class Lookahead(Explore):
    """`k` lookahead branches beside the base, or k branches with it (`counts_base`, LoPA-Dist).

    fraction: mean over this share of lowest confidences; sliding: lowest mean of so many masked
    positions in a row; base_wins: branches are evaluated in vain, to measure what the vote is worth
    (released as `verification_force_base_winner`); reads: confidences after or before credit.
    """

    k: int
    alpha: float = 0.0
    fraction: float = 1.0
    sliding: int | None = None
    counts_base: bool = False
    base_wins: bool = False
    reads: Reads = "fused"

    def __post_init__(self) -> None:
        check_choice(self, "reads", self.reads, Reads)
        if self.k < 0:
            raise DllmBenchError(f"Lookahead k is {self.k}; give 0 or more branches.")
        if not 0 <= self.alpha <= 1 or not 0 < self.fraction <= 1:
            raise DllmBenchError(
                f"Lookahead has alpha {self.alpha} and fraction {self.fraction}; "
                "both are shares, alpha in [0, 1] and fraction in (0, 1]."
            )
        if self.sliding is not None and (self.sliding < 1 or self.fraction < 1):
            raise DllmBenchError(
                f"Lookahead has sliding {self.sliding} and fraction {self.fraction}; a window "
                "holds 1 position or more and stands in place of a fraction, which is 1 then."
            )

    @property
    def needs(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """A score that keeps what it had before fusion, where that is read."""
        return frozenset({("score", "raw confidence")} if self.reads == "raw" else ())

    @property
    def lookaheads(self) -> int:
        """Branches beside the base."""
        return max(self.k - 1, 0) if self.counts_base else self.k

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        if last is None or self.lookaheads == 0:
            return state
        scores, window = last
        open_1W = window.eligible_KW & window.of(state.masked_KL)
        confidence_1W = self._confidence(scores).masked_fill(~open_1W, -torch.inf)
        k = min(self.lookaheads, window.width)
        best_k = stable_top(confidence_1W, k)[0]
        branches = state.fork(k + 1)
        where_KW = torch.zeros(k + 1, window.width, dtype=torch.bool, device=best_k.device)
        where_KW[:k].scatter_(1, best_k[:, None], True)
        branches.commit(where_KW, scores.ids_KW, window.start)
        creation_K = torch.cat([confidence_1W[0, best_k], confidence_1W.new_ones(1)])
        branches.memo[CREATION] = creation_K
        branches.memo[VALID] = open_1W.sum().clamp(max=k).expand(k + 1)
        return branches

    def valid(self, branches: DecodeState) -> Tensor | None:
        return branches.memo[VALID][0] if branches.branches > 1 else None

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        confidence_K = self._of_branch(self._confidence(scores), window.eligible_KW)
        if self.alpha == 0 or CREATION not in branches.memo:
            return confidence_K
        return self.alpha * branches.memo[CREATION] + (1 - self.alpha) * confidence_K

    def pick(self, rating_K: Tensor) -> Tensor:
        if self.base_wins:
            return rating_K.new_full((), len(rating_K) - 1, dtype=torch.long)
        return super().pick(rating_K)

    def _confidence(self, scores: Scores) -> Tensor:
        """The ranking values that are read, (K, W)."""
        raw_KW = scores.raw_KW if self.reads == "raw" else None
        return scores.confidence_KW if raw_KW is None else raw_KW

    def _of_branch(self, confidence_KW: Tensor, masked_KW: Tensor) -> Tensor:
        """What the masked positions say together, (K,), in the scores' precision; 1 without any."""
        wide_KW = at_least_float32(confidence_KW)
        if self.sliding is not None:
            found_K = lowest_window(wide_KW, masked_KW, self.sliding)
        elif self.fraction < 1:
            found_K = mean_lowest(wide_KW, masked_KW, self.fraction)
        else:
            found_K = mean_of(wide_KW, masked_KW)
        return found_K.to(confidence_KW.dtype).masked_fill(~masked_KW.any(1), 1.0)


def mean_of(confidence_KW: Tensor, masked_KW: Tensor) -> Tensor:
    """Mean of the masked confidences (Eq. 2), (K,)."""
    return (confidence_KW * masked_KW).sum(1) / masked_KW.sum(1).clamp(min=1)


def mean_lowest(confidence_KW: Tensor, masked_KW: Tensor, fraction: float) -> Tensor:
    """Mean of the lowest `fraction` (at least one) of the masked confidences, (K,)."""
    take_K = (masked_KW.sum(1) * fraction).long().clamp(min=1)
    low_KW = confidence_KW.masked_fill(~masked_KW, torch.inf).sort(dim=1).values
    taken_KW = torch.arange(low_KW.shape[1], device=low_KW.device) < take_K[:, None]
    return torch.where(taken_KW, low_KW, 0.0).sum(1) / take_K


def lowest_window(confidence_KW: Tensor, masked_KW: Tensor, n: int) -> Tensor:
    """Lowest mean over `n` masked positions in a row (all of them where there are fewer), (K,).

    Decoded positions between them are passed over (DeepConf's lowest group confidence).
    """
    first_KW = masked_KW.byte().sort(dim=1, descending=True, stable=True).indices
    n = min(n, masked_KW.shape[1])
    means_KG = confidence_KW.gather(1, first_KW).unfold(1, n, 1).mean(-1)
    group_G = torch.arange(means_KG.shape[1], device=means_KG.device)
    whole_KG = group_G + n <= masked_KW.sum(1)[:, None]
    lowest_K = means_KG.masked_fill(~whole_KG, torch.inf).amin(1)
    return torch.where(whole_KG[:, 0], lowest_K, mean_of(confidence_KW, masked_KW))
