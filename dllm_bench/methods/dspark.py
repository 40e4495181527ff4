"""DSpark: DFlash's block with a sequential head, and a scheduler of verification.

DSpark's hardware-aware prefix scheduler (Algorithm 1), and its asynchronous form (section 5.2).

A draft token is verified if it increases the expected tokens per second of the whole batch on this
machine. c[r][j] is the probability that token j of request r is accepted if all before it are;
a[r][j], the product of c[r][0..j], is the probability that it is reached and accepted. Verifying
the n tokens with the largest a gives Θ_n = (R + Σ a) · SPS(R + n) expected tokens per second for R
requests. Stopping at the first descent of Θ keeps the output distribution, because the decision
about a token depends only on earlier draft tokens; the global maximum over the same step does not
(Appendix A). The asynchronous form computes the size of a step from the probabilities of two steps
before, so it may use the global maximum. Confidences are treated as probabilities, so calibrate
them first. The cost of drafting is not included. The algorithm is plain Python; the two pieces at
the end apply it to proposals.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul

import torch

from dllm_bench.core.decoder import Condition, Conditions, holding, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import (
    HeadState,
    LengthRule,
    Proposal,
    Sampler,
    VerifyLength,
)
from dllm_bench.methods.dflash import DFlash, DrawnTokens, SlotBlock
from dllm_bench.methods.drafting import StepProfile, Temperatures, acceptance_probabilities
from dllm_bench.registry import register


@register("draft.dspark")
@dataclass(frozen=True)
class DSpark(DFlash):
    """A block of draft tokens whose drafter has a transition head (Markov, gated or RNN).

    DSpark (§3.1): the block of DFlash, its tokens drawn one after the other.

    p_k = softmax(U_k + B_k): a small sequential head reads the token before slot k and adds B_k to
    the block's logits U_k, so the block still takes one forward. A confidence head estimates how
    likely each token is accepted, given the token before it.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.has_transition_head:
            raise DllmBenchError(
                "DSpark needs a drafter with a transition head, and this one has none; choose "
                "another drafter, or decoder/draft=dflash."
            )

    @property
    def gives(self) -> Conditions:
        return holding({Condition.SURVIVAL_ESTIMATES: self.drafter.has_confidence_head})

    def _draw(self, block: SlotBlock, sampler: Sampler) -> DrawnTokens:
        network, context, hidden_NH, logits_NV = block
        context.head_begins()
        tokens, distributions = [context.tokens_L[-1:]], []
        state: HeadState = None
        for hidden_H, logits_1V in zip(hidden_NH, logits_NV.split(1), strict=True):
            state = network.transition(logits_1V, tokens[-1][0], hidden_H, state)
            token_1, probabilities_1V = sampler.sample(logits_1V)
            tokens.append(token_1)
            distributions.append(probabilities_1V)
        text_R, survival_D = torch.cat(tokens), None
        if self.drafter.has_confidence_head:
            survival_D = network.survival(text_R[:-1], hidden_NH)
        return DrawnTokens(text_R[1:], sampler.joined(distributions), survival_D)


Probabilities = Sequence[Sequence[float]]
"""c[r][j] of the module's text; requests may have different numbers of tokens."""


def ranked(probabilities: Probabilities) -> list[tuple[float, int, int]]:
    """Return (a, j, r) of all tokens with a > 0, the most likely first.

    A token is ranked after all earlier ones of its request, so the first n tokens of the list are
    a prefix of every draft, and whether a token is among them depends only on tokens before it.
    """
    survivals = [list(accumulate(row, mul)) for row in probabilities]
    tokens = [(a, j, r) for r, row in enumerate(survivals) for j, a in enumerate(row) if a > 0]
    return sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))


def admit(probabilities: Probabilities, n: int) -> list[int]:
    """Return the number of verified tokens per request if the n most likely of all are verified."""
    counts = Counter(r for _, _, r in ranked(probabilities)[:n])
    return [counts[r] for r in range(len(probabilities))]


def throughputs(probabilities: Probabilities, profile: StepProfile) -> list[float]:
    """Return Θ_0, Θ_1, …: expected tokens per second with the n most likely tokens verified.

    The list ends at the largest step in the profile; DllmBenchError if there are more requests than
    that.
    """
    requests = len(probabilities)
    expected = accumulate((a for a, _, _ in ranked(probabilities)), initial=float(requests))
    room = max(0, profile.largest - requests)
    return [tokens * profile.rate(requests + n) for n, tokens in enumerate(expected) if n <= room]


def first_peak(probabilities: Probabilities, profile: StepProfile) -> int:
    """Return n before the first descent of Θ."""
    rates = throughputs(probabilities, profile)
    descents = (n for n, (here, after) in enumerate(pairwise(rates)) if after <= here)
    return next(descents, len(rates) - 1)


def highest_peak(probabilities: Probabilities, profile: StepProfile) -> int:
    """Return n of the largest Θ; of equal ones the smallest n."""
    rates = throughputs(probabilities, profile)
    return rates.index(max(rates))


def early_stop(probabilities: Probabilities, profile: StepProfile) -> list[int]:
    """Return the lengths at the first peak of Θ (Algorithm 1), which is the global one if Θ has a
    single peak."""
    return admit(probabilities, first_peak(probabilities, profile))


class TwoStepsAhead:
    """Scheduler for an engine that must know the size of a step two steps ahead.

    The size of step t is the best one for the probabilities of step t - 2; it is filled with the
    most likely tokens of step t. The first two steps have no such size and use the early stop. A
    request that joined since then uses one token of the size; a request that left frees one.
    """

    def __init__(self, profile: StepProfile, delay: int = 2) -> None:
        self.profile = profile
        self.sizes: deque[int] = deque()
        self.delay = delay

    def __call__(self, probabilities: Probabilities) -> list[int]:
        """Return the lengths of the current step."""
        self.sizes.append(len(probabilities) + highest_peak(probabilities, self.profile))
        if len(self.sizes) <= self.delay:
            return early_stop(probabilities, self.profile)
        return admit(probabilities, max(0, self.sizes.popleft() - len(probabilities)))


@register("length.hardware_aware")
@dataclass(frozen=True)
class HardwareAwareLength(VerifyLength):
    """Algorithm 1: lengths at the first peak of the expected tokens per second."""

    profile: StepProfile
    """Speed of this machine with this model."""
    temperatures: Temperatures = field(default_factory=Temperatures)
    """Calibration of the confidence head."""

    needs = needing({"draft": Condition.SURVIVAL_ESTIMATES})

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return early_stop(acceptance_probabilities(proposals, self.temperatures), self.profile)


@register("length.asynchronous")
@dataclass(frozen=True)
class AsynchronousLength(HardwareAwareLength):
    """Section 5.2, for an engine that overlaps steps: the number of tokens is the best one for the
    probabilities of two steps before; the first two steps of a batch use the early stop.
    """

    def begin(self) -> LengthRule:
        rule = TwoStepsAhead(self.profile)

        def lengths(proposals: Sequence[Proposal]) -> list[int]:
            return rule(acceptance_probabilities(proposals, self.temperatures))

        return lengths
