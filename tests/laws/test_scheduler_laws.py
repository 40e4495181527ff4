"""Laws of the verification scheduler: its choice is best, and it keeps the output distribution.

Exact: the distribution of what one round commits, summed over every draft and every outcome, is the
target's with early stop and is not with the global maximum (DSpark, Appendix A with its constants).
Against brute force over all prefixes, the chosen lengths are best if the throughput has one peak.
"""

from __future__ import annotations

import csv
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
from tests.helpers import golden_dir

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


@st.composite
def convex_profiles(draw: st.DrawFn) -> StepProfile:
    """Step times that grow by more and more, as of a device that fills up: Θ then has one peak."""
    rises = sorted(draw(st.lists(st.floats(0, 2), min_size=15, max_size=15)))
    return from_steps(list(accumulate(rises, initial=draw(st.floats(0.1, 5)))))


def value(probabilities: Probabilities, lengths: Sequence[int], profile: StepProfile) -> float:
    """Expected tokens per second of any lengths, from the definition."""
    tokens = sum(
        1 + sum(accumulate(row[:n], mul)) for row, n in zip(probabilities, lengths, strict=True)
    )
    return tokens * profile.rate(len(probabilities) + sum(lengths))


def best(probabilities: Probabilities, profile: StepProfile) -> float:
    """Brute force over all prefixes."""
    every = product(*(range(len(row) + 1) for row in probabilities))
    return max(value(probabilities, lengths, profile) for lengths in every)


@given(batches, convex_profiles())
@settings(max_examples=150, deadline=None)
def test_early_stop_is_best_where_the_throughput_has_one_peak(
    probabilities: list[list[float]], profile: StepProfile
) -> None:
    found = value(probabilities, early_stop(probabilities, profile), profile)
    assert found == pytest.approx(best(probabilities, profile), rel=1e-9)


@st.composite
def jagged_profiles(draw: st.DrawFn) -> StepProfile:
    """Step times with cliffs and plateaus that never fall."""
    rises = draw(st.lists(st.floats(0, 2), min_size=15, max_size=15))
    return from_steps(list(accumulate(rises, initial=draw(st.floats(0.1, 5)))))


@given(batches, jagged_profiles())
@settings(max_examples=150, deadline=None)
def test_the_global_maximum_is_best_on_any_profile(
    probabilities: list[list[float]], profile: StepProfile
) -> None:
    lengths = anywhere(probabilities, profile)
    assert value(probabilities, lengths, profile) == pytest.approx(
        best(probabilities, profile), rel=1e-9
    )
    assert (
        value(probabilities, early_stop(probabilities, profile), profile)
        <= best(probabilities, profile) + 1e-9
    )


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.25, 1.0, 3.0]), max_size=3),
    convex_profiles(),
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
    found = [
        HardwareAwareLength(profile, temperatures)(proposals),
        *(two_ahead(proposals) for _ in "abc"),
    ]
    for lengths in found:
        assert value(probabilities, lengths, profile) == pytest.approx(
            best(probabilities, profile), rel=1e-9
        )


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


@given(batches, convex_profiles())
@settings(deadline=None)
def test_steady_probabilities_make_the_asynchronous_choice_the_synchronous_one(
    probabilities: list[list[float]], profile: StepProfile
) -> None:
    rule = TwoStepsAhead(profile)
    for _ in range(5):
        lengths = rule(probabilities)
        assert value(probabilities, lengths, profile) == pytest.approx(
            value(probabilities, early_stop(probabilities, profile), profile), rel=1e-9
        )


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


# --- the output distribution: Appendix A ----------------------------------------------------------

TARGET = np.array([0.7, 0.3])
DRAFT = np.array([0.5, 0.5])


def appendix(choose: Choose, first: int) -> int:
    """Length chosen when the first draft token is A (0) or B (1)."""
    return choose([[0.8, 0.9 if first == 0 else 0.0]], APPENDIX_A)[0]


def first_token_distribution(choose: Choose) -> np.ndarray:
    """Exact distribution of the first committed token."""
    distribution = np.zeros(2)
    residual = np.maximum(TARGET - DRAFT, 0) / np.maximum(TARGET - DRAFT, 0).sum()
    for x in (0, 1):
        if appendix(choose, x) == 0:
            distribution += DRAFT[x] * TARGET
            continue
        accepted = min(1.0, TARGET[x] / DRAFT[x])
        distribution[x] += DRAFT[x] * accepted
        distribution += DRAFT[x] * (1 - accepted) * residual
    return distribution


def test_appendix_a_to_the_digit() -> None:
    assert throughputs([[0.8, 0.9]], APPENDIX_A) == pytest.approx([1.0, 0.9, 1.134])
    assert throughputs([[0.8, 0.0]], APPENDIX_A) == pytest.approx([1.0, 0.9])  # a = 0: no candidate
    assert [appendix(early_stop, x) for x in (0, 1)] == [0, 0]
    assert [appendix(anywhere, x) for x in (0, 1)] == [2, 0]
    assert first_token_distribution(early_stop) == pytest.approx([0.7, 0.3])
    assert first_token_distribution(anywhere) == pytest.approx([0.85, 0.15])


def test_the_published_constants_are_these() -> None:
    path = golden_dir().parent / "paper_tables" / "dspark" / "appendixA_counterexample.csv"
    if not path.exists():
        pytest.skip("the published tables are not on this machine")
    rows = {row["item"]: float(row["value"]) for row in csv.DictReader(path.open())}
    assert tuple(rows[f"SPS({n})"] for n in APPENDIX_A.tokens) == APPENDIX_A.steps_per_s
    found = throughputs([[rows["a1"], rows["case1 c2"]]], APPENDIX_A)
    assert found == pytest.approx([rows["Theta0"], rows["Theta1"], rows["case1 Theta2"]])
    assert [appendix(anywhere, x) for x in (0, 1)] == [
        rows["case1 global-search length"],
        rows["case2 global-search length"],
    ]
    assert first_token_distribution(anywhere)[0] == pytest.approx(
        rows["biased Pr(Y=A) without early stop"]
    )


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
