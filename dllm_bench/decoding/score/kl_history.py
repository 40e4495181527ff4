"""Another score, and how far each distribution has moved in the last forwards (KLASS, 2511.05664).

KL(p, q) = sum p (ln(p + eps) - ln(q + eps)), with q the distribution of the forward before and 0
where there was none, which makes the first divergence large. Positions behind the open block are
followed too, so that they bring their history into their own block. The memo holds one
distribution per position: V numbers each.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding.numerics import Precision, probabilities
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.credit import moved
from dllm_bench.registry import register

EPS = 1e-12  # inside the logarithms (KLASS, released code)
START = MemoKey[int]("kl_history.start")  # canvas position of the first remembered one
BEFORE = MemoKey[Tensor]("kl_history.before")  # probabilities of the last forward, (K, R, V)
HISTORY = MemoKey[Tensor]("kl_history.divergence")  # of the last H forwards, (K, R, H)


@register("score.kl_history")
@dataclass(frozen=True)
class KLHistory(Score):
    """The scores of `inner`, with the last divergences of every position."""

    inner: Score = field(default_factory=Confidence)
    length: int = 2  # H, forwards that are remembered
    precision: Precision = "float32"  # of the distributions that are compared
    reads_rows: ClassVar[Reads] = "fed"
    by_position: ClassVar[bool] = True

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives, and the divergences."""
        return self.inner.gives | {Condition.DIVERGENCES}

    def __post_init__(self) -> None:
        check_choice(self, "precision", self.precision, Precision)
        if self.length < 1:
            raise DllmBenchError(f"KLHistory length is {self.length}; give 1 or more forwards.")

    def __call__(self, logits_KRV: Tensor, state: DecodeState, window: Window) -> Scores:
        now_KRV = probabilities(logits_KRV, self.precision)
        before_KRV = recalled(state, BEFORE, now_KRV, window, 0.0)
        moved_KR = (now_KRV * ((now_KRV + EPS).log() - (before_KRV + EPS).log())).sum(-1)
        history_KRH = moved_KR[..., None].expand(-1, -1, self.length)
        history_KRH = recalled(state, HISTORY, history_KRH, window, torch.inf)
        history_KRH = torch.cat([history_KRH[..., 1:], moved_KR[..., None]], -1)
        state.memo[START], state.memo[BEFORE] = window.start, now_KRV
        state.memo[HISTORY] = history_KRH
        scores = self.inner(logits_KRV[:, : window.width], state, window)
        return replace(scores, divergence_KWH=history_KRH[:, : window.width])


def recalled(
    state: DecodeState, key: MemoKey[Tensor], like_KRX: Tensor, window: Window, fill: float
) -> Tensor:
    """What was remembered of the rows from the window's start on, in the shape of `like`.

    Rows that nothing is known of hold `fill`.
    """
    values_KRX, start = state.memo.get(key), state.memo.get(START)
    if values_KRX is not None and start is not None:
        values_KRX = moved(values_KRX, window.start - start, like_KRX.shape[1], fill)
    return torch.full_like(like_KRX, fill) if values_KRX is None else values_KRX
