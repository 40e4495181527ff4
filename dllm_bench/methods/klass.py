"""KLASS (arXiv 2511.05664): commit what is sure and has stopped moving."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Amount, Positive, Probability
from dllm_bench.core.decoder import FIXED_CANVAS, Condition, Conditions, Needs, needing
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision, probabilities
from dllm_bench.methods.common import (
    COUNTS_STEPS,
    OF_LOGITS,
    Confidence,
    most_confident,
    step_in_block,
)
from dllm_bench.methods.credit import moved
from dllm_bench.registry import register

EPS = 1e-12  # inside the logarithms (KLASS, released code)
START = MemoKey[int]("kl_history.start")  # canvas position of the first remembered row
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

    inner: Score = field(default_factory=Confidence)
    length: Positive = 2  # H, forwards that are remembered
    precision: Precision = "float32"  # precision of the compared distributions
    reads_rows = "fed"
    needs = needing(FIXED_CANVAS)

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, and the divergences."""
        return self.inner.gives - OF_LOGITS | {Condition.DIVERGENCES}

    def __call__(self, logits_KRV: Tensor, state: DecodeState, window: Window) -> Scores:
        now_KRV = probabilities(logits_KRV, self.precision)
        before_KRV = recalled(state, BEFORE, now_KRV, window, 0.0)
        moved_KR = (now_KRV * ((now_KRV + EPS).log() - (before_KRV + EPS).log())).sum(-1)
        history_KRH = moved_KR[..., None].expand(-1, -1, self.length)
        history_KRH = recalled(state, HISTORY, history_KRH, window, torch.inf)
        history_KRH = torch.cat([history_KRH[..., 1:], moved_KR[..., None]], -1)
        state.memo[START], state.memo[BEFORE] = window.start, now_KRV
        state.memo[HISTORY] = history_KRH
        return self.inner(logits_KRV[:, : window.width], state, window)


def recalled(
    state: DecodeState, key: MemoKey[Tensor], like_KRX: Tensor, window: Window, fill: float
) -> Tensor:
    """Return the remembered values of the rows from the window's start on, in the shape of `like`.

    Rows without remembered values hold `fill`.
    """
    values_KRX, start = state.memo.get(key), state.memo.get(START)
    if values_KRX is not None and start is not None:
        values_KRX = moved(values_KRX, window.start - start, like_KRX.shape[1], fill)
    return torch.full_like(like_KRX, fill) if values_KRX is None else values_KRX


Commits = Literal["all", "most_probable", "most_stable"]


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
    commits: Commits = "all"  # which ready positions; KLASS's unmask_strategy
    warm_up: bool = False  # whether `fallback` decides a block's first H - 1 forwards

    @property
    def needs(self) -> Needs:
        """Divergences and, for the warm-up, a count of the block's forwards."""
        needs = needing({"score": Condition.DIVERGENCES})
        return COUNTS_STEPS | needs if self.warm_up else needs

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        moved_KWH = state.memo[HISTORY][:, : window.width]
        chance_KW = scores.probability_KW
        sure_KW = chance_KW > self.tau if self.strict else chance_KW >= self.tau
        ready_KW = window.eligible_KW & sure_KW & (moved_KWH < self.eps).all(-1)
        if self.warm_up:
            step_K, _ = step_in_block(state, window)
            ready_KW = ready_KW & (step_K >= moved_KWH.shape[2] - 1)[:, None]
        if self.commits == "all":
            return ready_KW
        order_KW = chance_KW if self.commits == "most_probable" else -moved_KWH[..., -1]
        return most_confident(
            replace(scores, confidence_KW=order_KW), replace(window, eligible_KW=ready_KW)
        )

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW = self.fallback(scores, window, state) & window.eligible_KW
        best_KW, ids_KW = self.fallback.on_stall(scores, window, state)
        return where_KW | window.forced(where_KW, best_KW), ids_KW
