"""Laws of sampled speculative text, and of a batch: its requests are decoded as alone.

Token for token for every drafter, greedy and sampled, where a length does not depend on the others.
Where it does (the scheduler, at once or two steps ahead) greedy text is the same still, and sampled
text has the target's distribution: exactly, summed over every draft and outcome of a round, with
early stop, and not with the global maximum (DSpark, Appendix A with its constants). Against brute
force over all prefixes, the chosen lengths are best if the throughput has one peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod
from operator import mul
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.speculative import Context, Draft, LengthRule, Proposal, Sampler, VerifyLength
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.speculative import FixedLength, GreedyMatch, Rejection, SpeculativeDecoder
from dllm_bench.methods import drafting
from dllm_bench.methods.causal_masks import BidirectionalDraft, StridedDraft
from dllm_bench.methods.drafting import StepProfile, SurvivalThreshold
from dllm_bench.methods.trained_drafts import (
    AsynchronousLength,
    DDTree,
    HardwareAwareLength,
    Probabilities,
    TwoStepsAhead,
    admit,
    early_stop,
    highest_peak,
    ranked,
    throughputs,
)
from tests.helpers import with_method
from tests.laws.test_speculative_laws import MAKERS, speculative
from tests.speculative import Chain, FromDistribution, generate_batch
from tests.tiers import covering

REQUESTS = [
    Request("long", tuple(range(2, 40)), 14, seed=1),
    Request("short", (5,), 9, seed=2),
    Request("one", (7, 8), 1, seed=3),  # over with its prefill
    Request("loop", (3, 9, 27, 3, 9), 14, seed=4),
]
KNEE = StepProfile((1, 6, 64), (1.0, 0.95, 0.05))


def outcome(generation: Generation) -> tuple[tuple[int, ...], tuple[int, ...], list[Forward]]:
    """Tokens, when they came, and what was done for them, times and rounded logits left out."""
    rows = [replace(row, ms=0.0, survival=()) for row in generation.trace.forwards]
    return generation.ids, generation.born, rows


DRAWN: dict[str, Any] = {"temperature": 0.8}
CUT: dict[str, Any] = DRAWN | {"verify": GreedyMatch(), "length": FixedLength(2)}
RULES = product(["dspark"], [CUT, DRAWN | {"length": SurvivalThreshold(0.5)}])
ALONE = [*covering(5, product(MAKERS, ({}, DRAWN))), *RULES]


@pytest.mark.parametrize(("name", "settings"), ALONE, ids=str)
def test_requests_side_by_side_are_requests_alone(name, settings, folder, target) -> None:
    decoder = speculative(MAKERS[name](folder), **settings)
    together = generate_batch(decoder, target, REQUESTS)
    alone = [decoder.generate(target, request) for request in REQUESTS]
    assert [*map(outcome, together)] == [*map(outcome, alone)]
    assert len({len(found.ids) for found in together}) > 1, "they leave one after another"


# --- lengths that depend on each other -----------------------------------------------------------


def watching(rule: VerifyLength) -> tuple[VerifyLength, list[list[int]]]:
    """Return the rule, and a list that gets the lengths of each round."""
    seen: list[list[int]] = []

    def begin(self: VerifyLength) -> LengthRule:
        begun = rule.begin()
        return lambda proposals: seen.append(begun(proposals)) or seen[-1]

    return with_method(rule, "begin", begin), seen


JOINT = {"hardware_aware": HardwareAwareLength(KNEE), "asynchronous": AsynchronousLength(KNEE)}


@pytest.mark.parametrize("name", covering(2, JOINT))
def test_joint_lengths_leave_greedy_text_alone(name, folder, target) -> None:
    watched, seen = watching(JOINT[name])
    decoder = SpeculativeDecoder(MAKERS["dspark"](folder), length=watched)
    requests = [*REQUESTS, *(replace(r, id=f"{r.id}-again") for r in REQUESTS)]
    batched = generate_batch(decoder, target, requests)
    plain = SpeculativeDecoder(MAKERS["none"](folder))
    for request, found in zip(requests, batched, strict=True):
        wanted = plain.generate(target, request)
        assert found.ids[: found.cut["length"]] == wanted.ids[: wanted.cut["length"]]
    assert len(seen[0]) == 6, "two requests ended with their prefill"
    together = [*map(len, seen)]
    assert together == sorted(together, reverse=True)
    busy, idle = seen[0], seen[-1]
    assert sum(busy) / len(busy) < sum(idle) / len(idle), "a busy machine verifies less"


@pytest.mark.parametrize("name", covering(2, JOINT))
def test_joint_lengths_keep_the_law_of_every_request(name: str) -> None:
    """Three at a time, all counted: what one verifies depends on the drafts of the others."""
    quick = StepProfile((1, 5, 12), (1.0, 0.8, 0.2))
    watched, seen = watching(replace(JOINT[name], profile=quick))
    draft = Estimated(3, (0.4, 0.3, 0.2, 0.1))
    decoder = SpeculativeDecoder(draft, Rejection(), watched, temperature=1.0)
    assert deviation(sampled(decoder, DRAWS, batch=3)) < LARGEST
    assert {0, 1, 2, 3} <= {n for lengths in seen for n in lengths}


def test_a_rule_that_remembers_begins_anew() -> None:
    """The size a batch chose two steps before its end is nothing to the next batch."""
    piece = AsynchronousLength(KNEE)
    proposals = [Proposal(torch.zeros(3).long(), survival_D=torch.tensor([2.0, 1.0, 0.0]))]
    used, fresh = piece.begin(), piece.begin()
    for _ in range(3):
        used([Proposal(torch.zeros(3).long(), survival_D=torch.full((3,), -9.0))])
    assert used(proposals) != fresh(proposals) == piece(proposals)


# --- sampled text: χ² over the joint distribution of the first tokens -----------------------------

LAWS = torch.tensor([[2, 4, 6, 8], [10, 2, 3, 5], [5, 5, 8, 2], [2, 9, 5, 4]]) / 20
DRAWS, LOOKED_AT = 1500, 3
LARGEST = chi2.ppf(1 - 1e-4, 4**LOOKED_AT - 1)
NOBODY = SpecialTokens(mask=3, eos=-1)  # a target may say what stands for a mask


@dataclass(frozen=True)
class Estimated(FromDistribution):
    """Survival estimates that depend on the tokens drafted before, as a confidence head's do."""

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        proposal = super().propose(context, sampler)
        before_D = torch.cat([context.tokens_L[-1:], proposal.tokens_D[:-1]])
        return replace(proposal, survival_D=before_D.float() - 1.5)

    gives = frozenset({"survival estimates"})


@dataclass(frozen=True)
class FixedTree(Draft):
    needs = DDTree.needs
    longest = 4

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        tokens_D, parents_D = torch.tensor([3, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
        return Proposal(tokens_D, parents_D=parents_D)


MOSTLY_0 = FromDistribution(2, (0.7, 0.1, 0.1, 0.1))
LAW_CASES: dict[str, tuple[Any, ...]] = {  # a rejection verifies the whole draft unless others do
    "rejection": (MOSTLY_0,),
    "one_token": (FromDistribution(1, (0.1, 0.2, 0.3, 0.4)),),
    "no_common_ground": (FromDistribution(3, (1.0, 0.0, 0.0, 0.0)),),
    "greedy_draft": (drafting.NGramDraft(3, 2),),
    "match": (MOSTLY_0, GreedyMatch()),
    "tree": (FixedTree(), GreedyMatch()),
    "cut_tree": (FixedTree(), GreedyMatch(), FixedLength(3)),
    "none": (drafting.NoDraft(),),
    "random": (drafting.RandomDraft(2),),
    "adversarial": (drafting.AdversarialDraft(2),),
    "strided": (StridedDraft(2),),
    "bidirectional": (BidirectionalDraft(2),),
    "cut_by_survival": (Estimated(3, (0.4, 0.3, 0.2, 0.1)), Rejection(), SurvivalThreshold(0.5)),
}


@pytest.mark.parametrize("case", covering(4, LAW_CASES))
def test_the_joint_law_of_the_first_tokens_is_the_targets(case: str) -> None:
    decoder = SpeculativeDecoder(*LAW_CASES[case], temperature=1.0)
    assert deviation(sampled(decoder, DRAWS)) < LARGEST


def sampled(decoder: SpeculativeDecoder, draws: int, batch: int = 100) -> Counter[tuple[int, ...]]:
    """Return how often the first tokens of a text were drawn; `batch` texts at a time."""
    target: Any = Chain(NOBODY, LAWS)
    requests = [Request(f"{seed}", (0, 2, 0), LOOKED_AT, seed=seed) for seed in range(draws)]
    return Counter(one.ids[:LOOKED_AT] for one in decoder.generate_stream(target, requests, batch))


def deviation(counts: Counter[tuple[int, ...]]) -> float:
    """Pearson's χ² of the counts against the target's probabilities."""
    expected = {
        tokens: counts.total() * prod(float(LAWS[pair]) for pair in pairwise((0, *tokens)))
        for tokens in product(range(4), repeat=LOOKED_AT)
    }
    assert set(counts) <= set(expected)
    return sum((counts[tokens] - n) ** 2 / n for tokens, n in expected.items())


def anticipating(self: VerifyLength, proposals: Any) -> list[int]:
    """Look at the token that is decided about: the selection that is not allowed."""
    return [int((proposal.tokens_D != 1).long().cumprod(0).sum()) for proposal in proposals]


FORGETFUL = staticmethod(lambda count, draft_DV, target_RV: target_RV[count])  # no residual
MOSTLY_1 = FromDistribution(2, (0.1, 0.5, 0.3, 0.1))
WRONG = {
    "no_residual": (MOSTLY_0, with_method(Rejection(), "next_distribution", FORGETFUL)),
    "looks": (MOSTLY_1, Rejection(), with_method(FixedLength(), "__call__", anticipating)),
}


@pytest.mark.parametrize("parts", WRONG.values(), ids=WRONG)
def test_the_law_test_sees_what_is_wrong(parts: tuple[Any, ...]) -> None:
    assert deviation(sampled(SpeculativeDecoder(*parts, temperature=1.0), DRAWS // 2)) > LARGEST


# --- the scheduler's choice is best, and keeps the output distribution ----------------------------

Choose = Callable[[Probabilities, StepProfile], list[int]]
APPENDIX_A = StepProfile((1, 2, 3), (1.0, 0.5, 0.45))  # DSpark, page 32
FLAT = StepProfile((1, 64), (1.0, 1.0))
probability = st.floats(0, 1).map(lambda x: round(x, 2))
batches = st.lists(st.lists(probability, max_size=3), min_size=1, max_size=3)


def anywhere(probabilities: Probabilities, profile: StepProfile) -> list[int]:
    """Return the global maximum of the same step: what Appendix A warns of."""
    return admit(probabilities, highest_peak(probabilities, profile))


def from_steps(seconds: Sequence[float]) -> StepProfile:
    return StepProfile(tuple(range(1, len(seconds) + 1)), tuple(1 / s for s in seconds))


def profiles(*, convex: bool) -> st.SearchStrategy[StepProfile]:
    """Step times that never fall; convex: that grow by more and more, as of a device that fills up,
    so that Θ has one peak."""
    rises = st.lists(st.floats(0, 2), min_size=15, max_size=15)
    times = st.tuples(st.floats(0.1, 5), rises.map(sorted) if convex else rises)
    return times.map(lambda drawn: from_steps([*accumulate(drawn[1], initial=drawn[0])]))


def value(probabilities: Probabilities, lengths: Sequence[int], profile: StepProfile) -> float:
    """Expected tokens per second of any lengths, from the definition."""
    rows = zip(probabilities, lengths, strict=True)
    tokens = sum(1 + sum(accumulate(row[:n], mul)) for row, n in rows)
    return tokens * profile.rate(len(probabilities) + sum(lengths))


def is_best(lengths: Sequence[int], probabilities: Probabilities, profile: StepProfile) -> bool:
    """Return whether no other lengths have a higher throughput; by brute force over all."""
    every = product(*(range(len(row) + 1) for row in probabilities))
    most = max(value(probabilities, other, profile) for other in every)
    return value(probabilities, lengths, profile) == pytest.approx(most, rel=1e-9)


@given(batches, profiles(convex=True), profiles(convex=False))
@settings(max_examples=150, deadline=None)
def test_early_stop_is_best_for_one_peak_and_the_global_maximum_on_any_profile(
    probabilities: list[list[float]], peaked: StepProfile, jagged: StepProfile
) -> None:
    assert is_best(early_stop(probabilities, peaked), probabilities, peaked)
    assert is_best(anywhere(probabilities, jagged), probabilities, jagged)


@given(
    st.lists(st.lists(st.floats(-5, 5), max_size=3), min_size=1, max_size=3),
    st.lists(st.sampled_from([0.25, 1.0, 3.0]), max_size=3),
    profiles(convex=True),
)
@settings(max_examples=50, deadline=None)
def test_the_pieces_are_best_for_scaled_estimates(logits, scales, profile) -> None:
    """At once, and two steps ahead where the estimates stay as they are."""
    survival = (torch.tensor(z).double() for z in logits)
    proposals = [Proposal(torch.zeros_like(z).long(), survival_D=z) for z in survival]
    divided = [np.array(z) / [*scales, 1.0, 1.0, 1.0][: len(z)] for z in logits]
    probabilities = [(1 / (1 + np.exp(-z))).tolist() for z in divided]
    temperatures = drafting.Temperatures(tuple(scales))
    two_ahead = AsynchronousLength(profile, temperatures).begin()
    for rule in (HardwareAwareLength(profile, temperatures), two_ahead, two_ahead, two_ahead):
        assert is_best(rule(proposals), probabilities, profile)


@given(batches)
def test_any_number_of_the_most_likely_is_prefixes(probabilities: list[list[float]]) -> None:
    order = ranked(probabilities)
    for n in range(len(order) + 1):
        lengths = admit(probabilities, n)
        prefixes = {(r, j) for r, length in enumerate(lengths) for j in range(length)}
        assert (len(prefixes), prefixes) == (n, {(r, j) for _, j, r in order[:n]})


def test_nothing_is_scheduled_beyond_the_measured_sizes() -> None:
    assert early_stop([[1.0] * 9], StepProfile((1, 4), (1.0, 1.0))) == [3]
    with pytest.raises(DllmBenchError, match=r"step of 5 tokens.*train sps"):
        early_stop([[1.0]] * 5, StepProfile((1, 4), (1.0, 1.0)))


# --- two steps ahead -----------------------------------------------------------------------------


def test_the_size_of_a_step_follows_from_two_steps_before() -> None:
    rule = TwoStepsAhead(from_steps([1, 1, 1, 4, 4, 4, 4]))
    low, high = [[0.1, 0.1], [0.1]], [[0.9, 0.9], [0.9]]
    assert {sum(rule(p)) for p in (low, high, high, high, low, low)} == {1}
    rule = TwoStepsAhead(FLAT)
    seen = [rule(p) for p in ([[0.9]], [[0.9, 0.0]], [[0.9, 0.8]], [[0.5] * 3], [[0.9] * 5])]
    assert seen == [[1], [1], [1], [1], [2]], "sizes 2 of the first two steps, 3 comes later"


def test_it_is_global_and_the_most_likely_tokens_fill_the_step() -> None:
    rule = TwoStepsAhead(from_steps([1.0, 2.0, 2.0, 2.0]))
    assert [rule([[0.9] * 3]) for _ in range(3)] == [[0], [0], [3]], "over the cliff"
    rule = TwoStepsAhead(StepProfile((1, 4), (1.0, 1.0)))
    assert rule([[0.9], [0.9, 0.9]]) == rule([[0.9], [0.9, 0.9]]) == [1, 1]
    assert rule([[0.2], [0.9, 0.8]]) == [0, 2]


def test_requests_that_come_and_go_share_the_size() -> None:
    rule = TwoStepsAhead(FLAT)
    assert [rule([[0.9]] * 2), rule([[0.9]] * 2)] == [[1, 1], [1, 1]], "steps of 4 tokens"
    assert (rule([[0.9, 0.8]] * 3), rule([[0.9, 0.8, 0.7, 0.6]])) == ([1, 0, 0], [3])


def test_appendix_a_to_the_digit() -> None:
    assert throughputs([[0.8, 0.9]], APPENDIX_A) == pytest.approx([1.0, 0.9, 1.134])
    assert throughputs([[0.8, 0.0]], APPENDIX_A) == pytest.approx([1.0, 0.9])  # a = 0: no candidate
    both = product((early_stop, anywhere), (0.9, 0.0))
    assert [choose([[0.8, after]], APPENDIX_A) for choose, after in both] == [[0], [0], [2], [0]]


# --- the output distribution: every draft of two requests -----------------------------------------

TARGETS = np.array([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.2, 0.7]])  # by the last token
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
    for one, other in product(product(range(3), repeat=SLOTS), repeat=2):
        length = choose([heads(one), heads(other)], JAGGED)[0]
        probability = chain(GUESS, one) * chain(GUESS, other)
        for prefix, mass in outcomes(one[:length]):
            share = probability * mass / chain(TARGETS, prefix)
            for rest in product(range(3), repeat=SLOTS + 1 - len(prefix)):
                distribution[*prefix, *rest] += share * chain(TARGETS, (*prefix, *rest))
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
    found = committed_distribution(choose).items()
    return max(abs(mass - chain(TARGETS, tokens)) for tokens, mass in found)


def test_early_stop_and_a_size_known_before_keep_the_distribution_of_a_batch() -> None:
    """The asynchronous step takes as many of the likeliest as was decided without them."""
    assert farthest(early_stop) < 1e-12
    for n in range(2 * SLOTS + 1):
        assert farthest(lambda probabilities, profile, n=n: admit(probabilities, n)) < 1e-12
    assert farthest(anywhere) > 1e-3, "the global maximum does not"
