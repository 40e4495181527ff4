"""Commit every position whose candidate is probable enough (Fast-dLLM §3; D2F with `strict`).

{p >= tau}, or {p > tau} when strict. A block that must progress and has none commits its most
confident position (the inherited stall rule). That equals Fast-dLLM's "the best one always, the
others by threshold", because whenever a position passes, the most probable one passes.
dInfer instead lowers the threshold to just below the most probable position, so that everything
within 1e-5 of it is committed too: `band`. With `fall` the threshold begins at 1 and falls to tau
(`iter_threshold` of dInfer's iteration smoothing, where it falls by 0.02).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_probabilities
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.threshold")
@dataclass(frozen=True)
class Threshold(Select):
    """Commits positions by the probability of their candidate."""

    tau: float  # probability; 1 and `strict`: one token per forward
    strict: bool = False  # > instead of >=
    band: float | None = None  # lowers tau to this much below the largest probability
    fall: float | None = field(default=None, metadata=DEFAULT_LEFT_OUT)  # see `falling`

    def __post_init__(self) -> None:
        check_probabilities(self, "tau")
        check_fall(self, self.fall)

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KW, tau = scores.probability_KW, falling(self.tau, self.fall, state)
        if self.band is None:
            return probability_KW > tau if self.strict else probability_KW >= tau
        open_KW = window.eligible_KW & (scores.ids_KW != state.special.mask)
        best_K1 = probability_KW.masked_fill(~open_KW, 0).amax(1, keepdim=True)
        return open_KW & (probability_KW >= (best_K1 - self.band).clamp(max=tau))


def falling(tau: float, fall: float | None, state: DecodeState) -> float:
    """The threshold of a request's forward i: max(1 - fall * i, tau); None: always tau."""
    return tau if fall is None else max(1 - fall * state.forwards, tau)


def check_fall(select: Select, fall: float | None) -> None:
    """Refuse a threshold that rises."""
    if fall is not None and fall < 0:
        raise DllmBenchError(
            f"{type(select).__name__} has fall {fall}; give 0 or more, or null for a constant tau."
        )
