"""Scores that remember earlier forwards: CreditDecoding, KLASS."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Amount, Probability, Proportion, Size
from dllm_bench.core.decoder import FIXED_CANVAS, Condition, Conditions, Needs, needing, parts_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import PROMPT, DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision, probabilities, top1
from dllm_bench.methods import common
from dllm_bench.registry import register

# --- CreditDecoding -------------------------------------------------------------------------------

START = MemoKey[int]("credit.start")  # canvas position of the first remembered row
CREDIT = MemoKey[Tensor]("credit.values")  # (K, W, X) for X slots, or X = V ids if dense
IDS = MemoKey[Tensor]("credit.ids")
"""Token id of each slot, (K, W, X). Of equal ones the first has the credit, the others have 0."""


@register("score.credit")
@dataclass(frozen=True)
class Credit(Score):
    """CreditDecoding (arXiv 2510.06133, Eq. 6, 7, 13; Algorithm 1): evidence of earlier steps.

    Scores the logits after adding credits; alpha = 0 leaves `inner` unchanged. C_t = beta C_{t+1} +
    p^gamma at the raw top-1 token of every open mask; another score then reads the fused logits l +
    alpha log(1 + C). The credits of the window's positions are in the state's memo, so they follow
    their branch and end with their block. A position stores only the ids it has credited, which is
    exact; `full_distribution` (Eq. 13) credits every id and needs a dense table. `adaptive` (§4.3)
    sets gamma = 1 and alpha = beta = 1 - masked share, computed before this step's commits.
    """

    inner: Score
    alpha: Amount = 0.65  # weight of the credits
    beta: Proportion = 0.7  # decay of a credit per step
    gamma: Amount = 0.2  # exponent of the probability that is credited
    adaptive: bool = False  # derive alpha, beta and gamma from the masked share
    scope: Literal["block", "sequence"] = "block"  # where `adaptive` counts masks: the block or the
    # whole generation
    full_distribution: bool = False  # credit every id instead of the top-1 token
    keep_raw: bool = False  # also score the raw logits, for a lookahead that reads them
    needs = needing(FIXED_CANVAS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(isinstance(part, Credit) for part in parts_of(self)):
            raise DllmBenchError(
                "Credit has another Credit as its inner score, both with the same memory; use one."
            )

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score; the confidence before fusion only if it is kept."""
        raw, given = {Condition.RAW_CONFIDENCE}, self.inner.gives - common.OF_LOGITS
        return given | raw if self.keep_raw else given - raw

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        fused_KWV = logits_KWV.to(torch.float32, copy=True)
        raw_KW = self.inner(fused_KWV, state, window).confidence_KW if self.keep_raw else None
        fuse = self._fuse_all if self.full_distribution else self._fuse_top
        fuse(fused_KWV, state, window)
        return replace(self.inner(fused_KWV, state, window), raw_KW=raw_KW)

    def _numbers(
        self, state: DecodeState, window: Window
    ) -> tuple[float | Tensor, float | Tensor, float]:
        """Return alpha, beta and gamma of this step; adaptive values differ by branch (and
        block)."""
        if not self.adaptive:
            return self.alpha, self.beta, self.gamma
        masked_KL, new_KL = state.masked_KL, state.born_KL != PROMPT
        if self.scope == "block":
            masks_KX, of_KX = (count(window, window.of(flags)) for flags in (masked_KL, new_KL))
        else:
            masks_KX, of_KX = (flags.sum(1, keepdim=True) for flags in (masked_KL, new_KL))
        committed_KX1 = (1 - masks_KX / of_KX.clamp(min=1))[..., None]
        return committed_KX1, committed_KX1, 1.0

    def _fuse_top(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> None:
        """Update the credits of the top-1 tokens, add all credits to the logits in place."""
        alpha, beta, gamma = self._numbers(state, window)
        ids_KW, probability_KW = top1(logits_KWV)
        ids_KWX = ids_KW1 = ids_KW[..., None]
        credit_KWX = gained_KW1 = (probability_KW.pow(gamma) * window.eligible_KW)[..., None]
        known_KWX, before_KWX = recall(state, window, IDS), credits_of(state, window, 1)
        if known_KWX is not None and before_KWX is not None:
            ids_KWX = torch.cat([known_KWX, ids_KW1], 2)
            slot_KW1 = (ids_KWX == ids_KW1).view(torch.uint8).argmax(2, keepdim=True)
            credit_KWX = (beta * before_KWX).scatter_add_(2, slot_KW1, gained_KW1)
        state.memo[START], state.memo[IDS], state.memo[CREDIT] = window.start, ids_KWX, credit_KWX
        logits_KWV.scatter_add_(2, ids_KWX, alpha * credit_KWX.log1p())

    def _fuse_all(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> None:
        """Update and add credits as `_fuse_top` does, with a credit for every id."""
        alpha, beta, gamma = self._numbers(state, window)
        credit_KWV = logits_KWV.softmax(-1).pow(gamma) * window.eligible_KW[..., None]
        before_KWV = credits_of(state, window)
        if before_KWV is not None:
            credit_KWV += beta * before_KWV
        state.memo[START], state.memo[CREDIT] = window.start, credit_KWV
        logits_KWV += alpha * credit_KWV.log1p()


def credits_of(state: DecodeState, window: Window, slots: int = 0) -> Tensor | None:
    """Return the credits of earlier forwards; committed positions have none, so one that is masked
    again begins without."""
    credits_KWX = recall(state, window, CREDIT, slots)
    if credits_KWX is None or state.changes_KL is None:  # without a reviser none is masked again
        return credits_KWX
    return credits_KWX * window.eligible_KW[..., None]


def count(window: Window, flags_KW: Tensor) -> Tensor:
    """Return the number of true values in each position's block, (K, W)."""
    count_KN1 = window.blocks(flags_KW).sum(2, keepdim=True)
    return window.flat(count_KN1.expand(-1, -1, window.block))


def recall(
    state: DecodeState, window: Window, key: MemoKey[Tensor], slots: int = 0
) -> Tensor | None:
    """Return the remembered values, aligned to this window's positions, with more slots; None if
    there are none for it.

    Positions before the window are final and forgotten, those without memory hold 0.
    """
    if key not in state.memo:
        return None
    return moved(state.memo[key], window.start - state.memo[START], window.width, 0, slots)


def moved(
    values_KWX: Tensor, behind: int, width: int, fill: float, slots: int = 0
) -> Tensor | None:
    """Return values without the first `behind` positions, cut or padded to `width` positions, and
    with `slots` more in the last dimension.

    None if no position is left.
    """
    values_KWX = values_KWX[:, behind : behind + width]
    missing = width - values_KWX.shape[1]
    if missing == width:
        return None
    if missing == slots == 0:
        return values_KWX
    return torch.nn.functional.pad(values_KWX, (0, slots, 0, missing), value=fill)


# --- KLASS ----------------------------------------------------------------------------------------

EPS = 1e-12  # inside the logarithms (KLASS, released code)
KL_START = MemoKey[int]("kl_history.start")  # canvas position of the first remembered row
BEFORE = MemoKey[Tensor]("kl_history.before")  # probabilities of the last forward, (K, R, V)
HISTORY = MemoKey[Tensor]("kl_history.divergence")
"""KL in nats from the previous forward, for the last H forwards, newest last, (K, R, H)."""


@register("score.kl_history")
@dataclass(frozen=True)
class KLHistory(Score):
    """Scores by `inner`, and remembers how each distribution changed over the last forwards.

    KL(p, q) = sum p (ln(p + eps) - ln(q + eps)), where q is the distribution of the previous
    forward, or 0 if there was none, which makes the first divergence large. Positions after the
    open block are tracked too, so that they have a history when their block opens. The memo holds
    one distribution of V numbers per position.
    """

    inner: Score = field(default_factory=common.Confidence)
    length: Size = 2  # H, forwards that are remembered
    precision: Precision = "float32"  # precision of the compared distributions
    reads_rows = "fed"
    needs = needing(FIXED_CANVAS)

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, and the divergences."""
        return self.inner.gives - common.OF_LOGITS | {Condition.DIVERGENCES}

    def __call__(self, logits_KRV: Tensor, state: DecodeState, window: Window) -> Scores:
        now_KRV = probabilities(logits_KRV, self.precision)
        before_KRV = recalled(state, BEFORE, now_KRV, window, 0.0)
        moved_KR = (now_KRV * ((now_KRV + EPS).log() - (before_KRV + EPS).log())).sum(-1)
        history_KRH = moved_KR[..., None].expand(-1, -1, self.length)
        history_KRH = recalled(state, HISTORY, history_KRH, window, torch.inf)
        history_KRH = torch.cat([history_KRH[..., 1:], moved_KR[..., None]], -1)
        state.memo[KL_START], state.memo[BEFORE] = window.start, now_KRV
        state.memo[HISTORY] = history_KRH
        return self.inner(logits_KRV[:, : window.width], state, window)


def recalled(
    state: DecodeState, key: MemoKey[Tensor], like_KRX: Tensor, window: Window, fill: float
) -> Tensor:
    """Return the remembered values of the rows from the window's start on, in the shape of `like`.

    Rows without remembered values hold `fill`.
    """
    values_KRX = state.memo.get(key)
    if values_KRX is not None:
        behind = window.start - state.memo[KL_START]
        values_KRX = moved(values_KRX, behind, like_KRX.shape[1], fill)
    return torch.full_like(like_KRX, fill) if values_KRX is None else values_KRX


@register("select.stable")
@dataclass(frozen=True)
class Stable(Select):
    """KLASS (arXiv 2511.05664): commits what is probable and has stopped moving.

    A position is ready if its candidate reaches `tau` and its distribution moved by less than `eps`
    in each of the remembered forwards. If a block must progress but has no ready position,
    `fallback` chooses in it. The released code for LLaDA is strict, and treats no position as ready
    before its block has had as many forwards as are remembered (`warm_up`), even though divergences
    exist from before. The code for Dream does neither.
    """

    fallback: Select  # chooses if no position is ready
    tau: Probability  # probability; 1 and `strict`: `fallback` alone
    eps: Amount  # nats; the divergences of a ready position are below it
    strict: bool = False  # > tau instead of >=
    commits: Literal["all", "most_probable", "most_stable"] = "all"  # which of the ready positions
    # (KLASS's unmask_strategy)
    warm_up: bool = False  # whether `fallback` decides a block's first H - 1 forwards

    @property
    def needs(self) -> Needs:
        """Divergences and, for the warm-up, a count of the block's forwards."""
        needs = needing({"score": Condition.DIVERGENCES})
        return common.COUNTS_STEPS | needs if self.warm_up else needs

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        moved_KWH = state.memo[HISTORY][:, : window.width]
        chance_KW = scores.probability_KW
        sure_KW = chance_KW > self.tau if self.strict else chance_KW >= self.tau
        ready_KW = window.eligible_KW & sure_KW & (moved_KWH < self.eps).all(-1)
        if self.warm_up:
            step, _ = common.step_in_block(state, window)
            ready_KW = ready_KW & (common.column(step) >= moved_KWH.shape[2] - 1)
        if self.commits == "all":
            return ready_KW
        order_KW = chance_KW if self.commits == "most_probable" else -moved_KWH[..., -1]
        return common.largest(order_KW, ready_KW)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW = self.fallback(scores, window, state) & window.eligible_KW
        best_KW, ids_KW = self.fallback.on_stall(scores, window, state)
        return where_KW | window.forced(where_KW, best_KW), ids_KW
