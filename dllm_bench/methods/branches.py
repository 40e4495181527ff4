"""Several candidate states in a forward: LoPA, FreeDave."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Explore, Scores
from dllm_bench.core.declared import Count, Positive, PositiveProportion, Proportion
from dllm_bench.core.decoder import Condition, Conditions, MostBranches, Needs, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import constant, only
from dllm_bench.decoding.numerics import at_least_float32, stable_top
from dllm_bench.methods.common import first_of, order_of
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

# --- LoPA -----------------------------------------------------------------------------------------

CREATION = MemoKey[Tensor]("lookahead.creation")  # confidence that made a branch, (K,)


@register("explore.lookahead")
@dataclass(frozen=True)
class Lookahead(Explore):
    """Lookahead over token filling orders (LoPA, arXiv 2512.16229, §3.2 and Eq. 1–2).

    Makes lookahead branches in addition to the base and picks the most confident branch. The state
    after a commit is the base branch (the paper's anchor). Lookahead branch j of k also commits the
    j-th most confident of the remaining masked positions, by the scores of the forward just made.
    All branches share the next forward, and the branch with the most confident masked positions
    continues. The winner's logits are the next scores, so a round costs one forward. Branch
    confidence = alpha * creation + (1 - alpha) * mean of the masked positions' confidences (with
    `fraction` or `sliding`, of a part of them; 1 if nothing is masked). Creation is the confidence
    of the position that made the branch, 1 for the base; the released scripts use alpha 0. Ties go
    to the earlier lookahead branch; the base is last. The released code has other modes: with
    `branch_verification_mode=false` the base cannot continue (`base_competes` off); with
    `base_branch_competition=false` there are no lookahead branches, which is `Greedy`.
    """

    k: Count  # number of lookahead branches
    alpha: Proportion = 0.0  # weight of the creation confidence
    fraction: PositiveProportion = 1.0  # share of the lowest confidences in the mean
    sliding: Positive | None = None  # instead, lowest mean over this many consecutive masked
    # positions
    counts_base: bool = False  # whether k includes the base (LoPA-Dist)
    base_wins: bool = False
    """Evaluate branches but continue with the base, to measure the gain from picking a branch
    (released as `verification_force_base_winner`)."""
    reads: Literal["fused", "raw"] = "fused"  # read confidences after or before credit
    base_competes: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether the base may continue if there is a lookahead branch. If not, the released code skips
    the base's forward; here it is made, because the base decides which blocks are finished."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_wins and not self.base_competes:
            raise DllmBenchError(
                "Lookahead has base_wins true and base_competes false; the base cannot always and "
                "never continue: change one of the two."
            )
        if self.sliding is not None and self.fraction < 1:
            raise DllmBenchError(
                f"Lookahead has sliding {self.sliding} and fraction {self.fraction}; give only "
                "one of the two (fraction 1 with sliding)."
            )

    @property
    def needs(self) -> Needs:
        """A score that keeps the confidence before credit, if that is read."""
        return needing({"score": Condition.RAW_CONFIDENCE if self.reads == "raw" else ()})

    @property
    def gives(self) -> Conditions:
        """The base and its lookaheads."""
        return frozenset({MostBranches(1 + self.lookaheads)})

    @property
    def lookaheads(self) -> int:
        """Number of branches besides the base."""
        return max(self.k - 1, 0) if self.counts_base else self.k

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        if last is None or self.lookaheads == 0:
            return state
        scores, window = last
        masked_1W = window.eligible_KW & window.of(state.masked_KL)
        confidence_1W = only(self._confidence(scores), masked_1W)
        k = min(self.lookaheads, window.width)
        best_X = stable_top(confidence_1W, k)[0]
        branches = state.fork(k + 1)
        where_XW = best_X[:, None] == constant(range(window.width), best_X.device)
        branches.fill(where_XW & masked_1W, scores.ids_KW, window.start)
        if self.alpha:
            created_X = confidence_1W[0, best_X]
            branches.memo[CREATION] = torch.cat([created_X, created_X.new_ones(1)])
        return branches

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        confidence_KW, masked_KW = self._confidence(scores), window.eligible_KW
        wide_KW = at_least_float32(confidence_KW)
        if self.sliding is not None:
            mean_K = lowest_window(wide_KW, masked_KW, self.sliding)
        elif self.fraction < 1:
            mean_K = mean_lowest(wide_KW, masked_KW, self.fraction)
        else:
            mean_K = mean_of(wide_KW, masked_KW)
        confidence_K = mean_K.to(confidence_KW.dtype)
        if self.alpha == 0 or CREATION not in branches.memo:
            return confidence_K
        return self.alpha * branches.memo[CREATION] + (1 - self.alpha) * confidence_K

    def pick(self, rating_K: Tensor) -> Tensor:
        if self.base_wins:
            return rating_K.new_full((), len(rating_K) - 1, dtype=torch.long)
        if not self.base_competes and len(rating_K) > 1:
            rating_K = rating_K[:-1]
        return super().pick(rating_K)

    def _confidence(self, scores: Scores) -> Tensor:
        """Return the confidences to read, (K, W)."""
        raw_KW = scores.raw_KW if self.reads == "raw" else None
        return scores.confidence_KW if raw_KW is None else raw_KW


def mean_of(confidence_KW: Tensor, masked_KW: Tensor) -> Tensor:
    """Return the mean of the masked confidences (Eq. 2), (K,); 1 if none is masked."""
    mean_K = (confidence_KW * masked_KW).sum(1) / masked_KW.sum(1)
    return mean_K.nan_to_num_(1.0, torch.inf, -torch.inf)


def mean_lowest(confidence_KW: Tensor, masked_KW: Tensor, fraction: float) -> Tensor:
    """Return the mean of the lowest `fraction` (at least one) of the masked confidences, (K,).

    1 if none is masked.
    """
    take_K = (masked_KW.sum(1) * fraction).long().clamp(min=1)
    low_KW = confidence_KW.masked_fill(~masked_KW, torch.inf).sort(dim=1).values
    taken_KW = constant(range(low_KW.shape[1]), low_KW.device) < take_K[:, None]
    mean_K = low_KW.masked_fill(~taken_KW, 0.0).sum(1) / take_K
    return mean_K.masked_fill(~masked_KW.any(1), 1.0)


def lowest_window(confidence_KW: Tensor, masked_KW: Tensor, n: int) -> Tensor:
    """Return the lowest mean over `n` consecutive masked positions (all of them if there are
    fewer), (K,).

    Committed positions between them are skipped (DeepConf's lowest group confidence).
    """
    first_KW = masked_KW.byte().sort(dim=1, descending=True, stable=True).indices
    n = min(n, masked_KW.shape[1])
    means_KX = confidence_KW.gather(1, first_KW).unfold(1, n, 1).mean(-1)
    group_X = constant(range(means_KX.shape[1]), means_KX.device)
    whole_KX = group_X + n <= masked_KW.sum(1)[:, None]
    lowest_K = means_KX.masked_fill(~whole_KX, torch.inf).amin(1)
    return torch.where(whole_KX[:, 0], lowest_K, mean_of(confidence_KW, masked_KW))


# --- FreeDave -------------------------------------------------------------------------------------

PLACES = MemoKey[Tensor]("self_draft.places")
"""Canvas positions of the draft tokens, (K, D)."""
DRAFT = MemoKey[Tensor]("self_draft.draft")
"""The draft tokens, -1 where no mask was left, (K, D)."""


@register("explore.self_draft")
@dataclass(frozen=True)
class SelfDraft(Explore):
    """Drafts of the model's own next steps (FreeDave, arXiv 2510.00294;
    cychomatica/FreeDave@8b48121).

    Makes drafts in addition to the base and continues with the deepest confirmed one. A forward
    proposes a token for every mask, and the selector commits some of them; the result is the next
    state, the base. Draft j also holds the j next most confident of the other tokens, as a guess of
    the state j steps later. All branches share a forward. The target of a branch is the branch
    after the commit that the selector would make. Starting from the base, the walk goes to the
    deepest draft whose tokens all agree with the target of the current branch, as long as there is
    one. The last branch reached continues, with its selector's commit. A round costs one forward,
    like a step without drafts. It is lossless (same tokens as the decoder with `Greedy`, in no more
    forwards) if the selector commits one token per forward, and scores and cache depend only on the
    tokens of the open block: no memory of earlier forwards, no renewal within the block, no random
    numbers, no revision. The drafts are then the greedy verification tree of SSD (arXiv 2510.04147)
    with draft_steps nodes. With a threshold (FreeDave++) it is not lossless: a draft may contain
    only a part of a step's commits, and the rest is decided again. The released eager mode
    (`eager_acceptance_mode`), which drafts into the next block and is not lossless, is left out.
    """

    draft_steps: Positive  # branches of a forward, including the base; 1: no drafts

    @property
    def gives(self) -> Conditions:
        """The base and its drafts."""
        return frozenset({Condition.DRAFTS, MostBranches(self.draft_steps)})

    def spawn(self, state: DecodeState, last: tuple[Scores, Window] | None) -> DecodeState:
        if last is None or self.draft_steps == 1:
            return state
        scores, window = last
        window = replace(window, eligible_KW=window.eligible_KW & window.of(state.masked_KL))
        drafts = min(self.draft_steps - 1, window.width)
        order_1W = order_of(scores.confidence_KW, window.eligible_KW)
        branches = state.fork(drafts + 1)
        depth_K = constant((*range(1, drafts + 1), 0), order_1W.device)  # 0: the base
        where_KW = first_of(order_1W.expand(drafts + 1, -1), depth_K, window.eligible_KW)
        branches.fill(where_KW, scores.ids_KW, window.start)
        place_1D = order_1W[:, :drafts]
        nothing = constant(-1, order_1W.device)
        ids_1D = torch.where(window.eligible_KW, scores.ids_KW, nothing).gather(1, place_1D)
        branches.memo[PLACES] = (place_1D + window.start).expand(drafts + 1, -1)
        branches.memo[DRAFT] = ids_1D.expand(drafts + 1, -1)
        return branches

    def rate(self, scores: Scores, window: Window, branches: DecodeState) -> Tensor:
        """Return the number of draft tokens, from the first on, that agree with a branch's target,
        (K,).

        A stop may have cut the canvas since the drafts were made. Places beyond its end are
        compared at its last position: their tokens are gone, so either result is right.
        """
        place_KD = branches.memo.pop(PLACES).clamp(max=branches.length - 1)
        agrees_KD = branches.tokens_KL.gather(1, place_KD) == branches.memo.pop(DRAFT)
        return agrees_KD.cumprod(1).sum(1)

    def pick(self, rating_K: Tensor) -> Tensor:
        """Return the branch that the walk from the base reaches; draft j is branch j - 1, the base
        is the last one."""
        next_K = (rating_K - 1) % len(rating_K)
        for _ in range((len(rating_K) - 2).bit_length()):  # each pass doubles the number of steps
            next_K = next_K.index_select(0, next_K)
        return next_K[-1]
