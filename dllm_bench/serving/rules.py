"""Rules of verification length on plain chances: what a system of the load simulation decides by.

The same decisions as the pieces in `decoding/length` (a test compares them), which read tensors.
Each function returns what makes a fresh rule, since the asynchronous one remembers two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from dllm_bench.decoding.length.prefix import Chances, TwoStepsAhead, early_stop
from dllm_bench.decoding.length.profile import StepProfile
from dllm_bench.decoding.length.threshold import sure_tokens
from dllm_bench.serving.simulation import Rule

NewRule = Callable[[], Rule]


def fixed(tokens: int | None = None) -> NewRule:
    """At most so many tokens of every draft; None: all, 0: autoregressive decoding."""
    return lambda: lambda chances: [len(row[:tokens]) for row in chances]


def threshold(tau: float) -> NewRule:
    """Up to the first token whose own chance is below tau."""
    return lambda: lambda chances: [sure_tokens(row, tau) for row in chances]


def hardware_aware(profile: StepProfile) -> NewRule:
    """DSpark's Algorithm 1 with early stop."""

    def rule(chances: Chances) -> list[int]:
        return early_stop(chances, profile)

    return lambda: rule


def asynchronous(profile: StepProfile) -> NewRule:
    """Sizes of steps chosen two steps ahead, filled with the surest tokens."""
    return partial(TwoStepsAhead, profile)
