"""DSpark's hardware-aware prefix scheduler (Algorithm 1), and its asynchronous form (§5.2)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from typing import ClassVar

from dllm_bench.core.speculative import LengthRule, Proposal, VerifyLength
from dllm_bench.decoding.length.measurements import StepProfile, Temperatures, chances
from dllm_bench.registry import register

Chances = Sequence[Sequence[float]]  # c[r][j]; requests may have different numbers of tokens


def ranked(chances: Chances) -> list[tuple[float, int, int]]:
    """(a, j, r) of all tokens that may survive, the surest first.

    A token stands behind all earlier ones of its request, so any head of the list is prefixes.
    Whether a token is in a head depends on no token from itself on.
    """
    survivals = [list(accumulate(row, mul)) for row in chances]
    found = [(a, j, r) for r, row in enumerate(survivals) for j, a in enumerate(row) if a > 0]
    return sorted(found, key=lambda token: (-token[0], token[1], token[2]))


def admit(chances: Chances, n: int) -> list[int]:
    """Tokens verified of each request when the n surest of all are."""
    counts = Counter(r for _, _, r in ranked(chances)[:n])
    return [counts[r] for r in range(len(chances))]


def throughputs(chances: Chances, profile: StepProfile) -> list[float]:
    """Θ_0, Θ_1, …: expected tokens per second with the n surest tokens, as far as is profiled."""
    requests = len(chances)
    expected = accumulate((a for a, _, _ in ranked(chances)), initial=float(requests))
    room = max(0, profile.largest - requests)  # more requests than that are an error of `rate`
    return [tokens * profile.rate(requests + n) for n, tokens in enumerate(expected) if n <= room]


def first_peak(chances: Chances, profile: StepProfile) -> int:
    """n before the first descent of Θ."""
    found = throughputs(chances, profile)
    descents = (n for n, (here, after) in enumerate(pairwise(found)) if after <= here)
    return next(descents, len(found) - 1)


def highest(chances: Chances, profile: StepProfile) -> int:
    """n of the largest Θ, the smallest of equals."""
    found = throughputs(chances, profile)
    return found.index(max(found))


def early_stop(chances: Chances, profile: StepProfile) -> list[int]:
    """Algorithm 1: lengths at the first peak, the best of all where Θ has one peak."""
    return admit(chances, first_peak(chances, profile))


class TwoStepsAhead:
    """The scheduler of one engine that has to know the size of a step two steps before it.

    The size of step t is the best one for the chances of step t - 2; the tokens that fill it are
    the surest of step t. Without a size, in the first two steps, it stops early. Requests that came
    since take their own token from the size, those that left give theirs back.
    """

    def __init__(self, profile: StepProfile, delay: int = 2) -> None:
        self.profile = profile
        self.sizes: deque[int] = deque()
        self.delay = delay

    def __call__(self, chances: Chances) -> list[int]:
        """Lengths of the step that begins."""
        self.sizes.append(len(chances) + highest(chances, self.profile))
        if len(self.sizes) <= self.delay:
            return early_stop(chances, self.profile)
        return admit(chances, max(0, self.sizes.popleft() - len(chances)))


@register("length.hardware_aware")
@dataclass(frozen=True)
class HardwareAwareLength(VerifyLength):
    """Lengths at the first peak of expected tokens per second."""

    profile: StepProfile
    temperatures: Temperatures = field(default_factory=Temperatures)

    needs: ClassVar[frozenset[tuple[str, str]]] = frozenset({("draft", "survival estimates")})

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return early_stop(
            [chances(proposal, self.temperatures) for proposal in proposals], self.profile
        )


@register("length.asynchronous")
@dataclass(frozen=True)
class AsynchronousLength(HardwareAwareLength):
    """Sizes at the highest peak of two steps before; without them, in one round, early stop."""

    def begin(self) -> LengthRule:
        rule = TwoStepsAhead(self.profile)

        def lengths(proposals: Sequence[Proposal]) -> list[int]:
            return rule([chances(proposal, self.temperatures) for proposal in proposals])

        return lengths
