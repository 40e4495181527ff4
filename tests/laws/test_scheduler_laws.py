"""Laws of the verification scheduler: its choice is best, and it keeps the output distribution.

Exact: the distribution of what one round commits, summed over every draft and every outcome, is the
target's with early stop and is not with the global maximum (DSpark, Appendix A with its constants).
Against brute force over all prefixes, the chosen lengths are best if the throughput has one peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, product
from math import prod
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Proposal
from dllm_bench.methods.drafting import StepProfile, Temperatures
from dllm_bench.methods.trained_drafts import (
    AsynchronousLength,
    HardwareAwareLength,
    Probabilities,
    TwoStepsAhead,
    admit,
    early_stop,
    highest_peak,
    ranked,
    throughputs,
)

Choose = Callable[[Probabilities, StepProfile], list[int]]
APPENDIX_A = StepProfile((1, 2, 3), (1.0, 0.5, 0.45))  # DSpark, page 32
FLAT = StepProfile((1, 64), (1.0, 1.0))


def anywhere(probabilities: Probabilities, profile: StepProfile) -> list[int]:
    """Return the global maximum of the same step: what Appendix A warns of."""
    return admit(probabilities, highest_peak(probabilities, profile))


def from_steps(seconds: Sequence[float]) -> StepProfile:
    return StepProfile(tuple(range(1, len(seconds) + 1)), tuple(1 / s for s in seconds))


# --- the choice ----------------------------------------------------------------------------------

probability = st.floats(0, 1).map(lambda x: round(x, 2))
batches = st.lists(st.lists(probability, max_size=3), min_size=1, max_size=3)


def profiles(*, convex: bool) -> st.SearchStrategy[StepProfile]:
    """Step times that never fall; convex: that grow by more and more, as of a device that fills up,
    so that Θ has one peak."""
    rises = st.lists(st.floats(0, 2), min_size=15, max_size=15)
    times = st.tuples(st.floats(0.1, 5), rises.map(sorted) if convex else rises)
    return times.map(lambda drawn: from_steps([*accumulate(drawn[1], initial=drawn[0])]))


def value(probabilities: Probabilities, lengths: Sequence[int], profile: StepProfile) -> float:
    """Expected tokens per second of any lengths, from the definition."""
    tokens = sum(
        1 + sum(accumulate(row[:n], mul)) for row, n in zip(probabilities, lengths, strict=True)
    )
    return tokens * profile.rate(len(probabilities) + sum(lengths))


def is_best(lengths: Sequence[int], probabilities: Probabilities, profile: StepProfile) -> bool:
    """Return whether no other lengths have a higher throughput; by brute force over all."""
    every = product(*(range(len(row) + 1) for row in probabilities))
    most = max(value(probabilities, other, profile) for other in every)
    return value(probabilities, lengths, profile) == pytest.approx(most, rel=1e-9)


@given(batches, profiles(convex=True))
@settings(max_examples=150, deadline=None)
def test_early_stop_is_best_where_the_throughput_has_one_peak(
    probabilities: list[list[float]], profile: StepProfile
) -> None:
    assert is_best(early_stop(probabilities, profile), probabilities, profile)


@given(batches, profiles(convex=False))
@settings(max_examples=150, deadline=None)
def test_the_global_maximum_is_best_on_any_profile(
    probabilities: list[list[float]], profile: StepProfile
) -> None:
    assert is_best(anywhere(probabilities, profile), probabilities, profile)


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.25, 1.0, 3.0]), max_size=3),
    profiles(convex=True),
)
@settings(max_examples=50, deadline=None)
def test_the_pieces_are_best_for_scaled_estimates(
    logits: list[list[float]], scales: list[float], profile: StepProfile
) -> None:
    """At once, and two steps ahead where the estimates stay as they are."""
    proposals = [
        Proposal(torch.zeros(len(z)).long(), survival_D=torch.tensor(z).double()) for z in logits
    ]
    divided = [np.array(z) / [*scales, 1.0, 1.0, 1.0][: len(z)] for z in logits]
    probabilities = [(1 / (1 + np.exp(-z))).tolist() for z in divided]
    temperatures = Temperatures(tuple(scales))
    two_ahead = AsynchronousLength(profile, temperatures).begin()
    at_once = HardwareAwareLength(profile, temperatures)
    for rule in (at_once, two_ahead, two_ahead, two_ahead):
        assert is_best(rule(proposals), probabilities, profile)


@given(batches)
def test_any_number_of_the_most_likely_is_prefixes(probabilities: list[list[float]]) -> None:
    order = ranked(probabilities)
    for n in range(len(order) + 1):
        lengths = admit(probabilities, n)
        assert sum(lengths) == n
        assert {(r, j) for _, j, r in order[:n]} == {
            (r, j) for r, length in enumerate(lengths) for j in range(length)
        }


@pytest.mark.parametrize("choose", [early_stop, anywhere])
def test_sure_drafts_are_verified_and_hopeless_ones_are_not(choose: Choose) -> None:
    assert choose([[1.0] * 4, [1.0] * 2, []], FLAT) == [4, 2, 0]
    assert choose([[0.0] * 4, [0.0, 1.0]], FLAT) == [0, 0]
    growing = from_steps([1 + 0.9 * n for n in range(12)])  # a token more costs less than a step
    assert choose([[1.0] * 4, [1.0] * 2], growing) == [4, 2]


def test_nothing_is_scheduled_beyond_the_measured_sizes() -> None:
    assert early_stop([[1.0] * 9], StepProfile((1, 4), (1.0, 1.0))) == [3]
    with pytest.raises(DllmBenchError, match=r"step of 5 tokens.*train sps"):
        early_stop([[1.0]] * 5, StepProfile((1, 4), (1.0, 1.0)))


# --- two steps ahead -----------------------------------------------------------------------------


def test_the_size_of_a_step_follows_from_two_steps_before() -> None:
    profile = from_steps([1, 1, 1, 4, 4, 4, 4])
    rule = TwoStepsAhead(profile)
    low, high = [[0.1, 0.1], [0.1]], [[0.9, 0.9], [0.9]]
    seen = [rule(probabilities) for probabilities in (low, high, high, high, low, low)]
    assert [sum(lengths) for lengths in seen] == [1, 1, 1, 1, 1, 1]
    rule = TwoStepsAhead(FLAT)
    seen = [
        rule(probabilities) for probabilities in ([[0.9]], [[0.9, 0.0]], [[0.9, 0.8]], [[0.5] * 3])
    ]
    assert seen == [[1], [1], [1], [1]], "sizes 2 of the first two steps, 3 comes later"
    assert rule([[0.9] * 5]) == [2]


def test_it_is_global_and_the_most_likely_tokens_fill_the_step() -> None:
    jagged = from_steps([1.0, 2.0, 2.0, 2.0])
    rule = TwoStepsAhead(jagged)
    assert [rule([[0.9] * 3]) for _ in range(3)] == [[0], [0], [3]], "over the cliff"
    rule = TwoStepsAhead(StepProfile((1, 4), (1.0, 1.0)))
    assert rule([[0.9], [0.9, 0.9]]) == rule([[0.9], [0.9, 0.9]]) == [1, 1]
    assert rule([[0.2], [0.9, 0.8]]) == [0, 2]


def test_requests_that_come_and_go_share_the_size() -> None:
    rule = TwoStepsAhead(FLAT)
    sizes = [rule([[0.9]] * 2), rule([[0.9]] * 2)]  # steps of 4 tokens
    assert sizes == [[1, 1], [1, 1]]
    assert rule([[0.9, 0.8]] * 3) == [1, 0, 0]
    assert rule([[0.9, 0.8, 0.7, 0.6]]) == [3]


def test_appendix_a_to_the_digit() -> None:
    assert throughputs([[0.8, 0.9]], APPENDIX_A) == pytest.approx([1.0, 0.9, 1.134])
    assert throughputs([[0.8, 0.0]], APPENDIX_A) == pytest.approx([1.0, 0.9])  # a = 0: no candidate
    chosen = [
        choose([[0.8, after]], APPENDIX_A)
        for choose, after in product((early_stop, anywhere), (0.9, 0.0))
    ]
    assert chosen == [[0], [0], [2], [0]]


# --- the output distribution: every draft of two requests -----------------------------------------

TARGETS = np.array(
    [[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]]
)  # next token by the last one
GUESS = np.array([[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]])
HEADS = np.array([0.95, 0.5, 0.3])  # a confidence by the token before; wrong on purpose
SLOTS, START = 3, 0
JAGGED = from_steps([1.0, 1.3, 1.9, 1.95, 2.9, 2.95, 3.0, 4.5])


def chain(table: np.ndarray, tokens: Sequence[int]) -> float:
    return prod(table[a, b] for a, b in pairwise((START, *tokens)))


def heads(tokens: Sequence[int]) -> list[float]:
    """Probabilities that depend on the tokens before, as a confidence head's do."""
    return [float(HEADS[before]) for before in (START, *tokens[:-1])]


def committed_distribution(choose: Choose) -> dict[tuple[int, ...], float]:
    """Exact joint distribution of the first SLOTS + 1 tokens of the first of two requests.

    What the round does not commit is filled in from the target, as later rounds would.
    """
    distribution = dict.fromkeys(product(range(3), repeat=SLOTS + 1), 0.0)
    drafts = list(product(range(3), repeat=SLOTS))
    for one, other in product(drafts, drafts):
        length = choose([heads(one), heads(other)], JAGGED)[0]
        probability = chain(GUESS, one) * chain(GUESS, other)
        for prefix, mass in outcomes(one[:length]):
            for rest in product(range(3), repeat=SLOTS + 1 - len(prefix)):
                whole = (*prefix, *rest)
                distribution[whole] += (
                    probability * mass * chain(TARGETS, whole) / chain(TARGETS, prefix)
                )
    return distribution


def outcomes(draft: tuple[int, ...]) -> list[tuple[tuple[int, ...], float]]:
    """Committed tokens of one verification with their probabilities."""
    found, reached, before = [], 1.0, START
    for k, token in enumerate(draft):
        p, q = TARGETS[before], GUESS[before]
        accepted = min(1.0, p[token] / q[token])
        residual = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
        rejected = reached * (1 - accepted)
        found += [((*draft[:k], y), rejected * residual[y]) for y in range(3) if residual[y]]
        reached, before = reached * accepted, token
    return found + [((*draft, y), reached * TARGETS[before, y]) for y in range(3)]


def farthest(choose: Choose) -> float:
    return max(
        abs(mass - chain(TARGETS, tokens))
        for tokens, mass in committed_distribution(choose).items()
    )


def test_early_stop_keeps_the_distribution_of_a_batch() -> None:
    assert farthest(early_stop) < 1e-12


def test_a_size_known_before_keeps_the_distribution_too() -> None:
    """The asynchronous step: as many of the most likely tokens as was decided without them."""
    for n in range(2 * SLOTS + 1):
        assert farthest(lambda probabilities, profile, n=n: admit(probabilities, n)) < 1e-12


def test_the_global_maximum_changes_the_distribution_of_a_batch() -> None:
    assert farthest(anywhere) > 1e-3
