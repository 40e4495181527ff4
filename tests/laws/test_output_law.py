"""Sampled text has the target's distribution: χ² over the joint distribution of the first tokens.

A target whose next token depends on the last one alone, drafters of fixed distributions, every rule
of verification and length; wrong rules are detected.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler, Verify, VerifyLength
from dllm_bench.decoding.speculative import FixedLength, GreedyMatch, Rejection, SpeculativeDecoder
from dllm_bench.methods.causal_masks import BidirectionalDraft, StridedDraft
from dllm_bench.methods.drafting import (
    AdversarialDraft,
    NGramDraft,
    NoDraft,
    RandomDraft,
    SurvivalThreshold,
)
from dllm_bench.methods.trained_drafts import DDTree
from tests.speculative import Chain, FromDistribution
from tests.tiers import covering

LAWS = torch.tensor(
    [
        [0.10, 0.20, 0.30, 0.40],
        [0.50, 0.10, 0.15, 0.25],
        [0.25, 0.25, 0.40, 0.10],
        [0.10, 0.45, 0.25, 0.20],
    ]
)
DRAWS, LOOKED_AT, SURE = 1500, 3, 1e-4
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
    """Two tokens after the anchor and two after the first of them, whatever the text."""

    needs = DDTree.needs
    longest = 4

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        tokens_D, parents_D = torch.tensor([3, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
        return Proposal(tokens_D, parents_D=parents_D)


LAW_CASES: dict[str, tuple[Draft, Verify, VerifyLength]] = {
    "rejection": (FromDistribution(2, (0.7, 0.1, 0.1, 0.1)), Rejection(), FixedLength()),
    "one_token": (FromDistribution(1, (0.1, 0.2, 0.3, 0.4)), Rejection(), FixedLength()),
    "no_common_ground": (FromDistribution(3, (1.0, 0.0, 0.0, 0.0)), Rejection(), FixedLength()),
    "greedy_draft": (NGramDraft(3, 2), Rejection(), FixedLength()),
    "match": (FromDistribution(2, (0.7, 0.1, 0.1, 0.1)), GreedyMatch(), FixedLength()),
    "tree": (FixedTree(), GreedyMatch(), FixedLength()),
    "cut_tree": (FixedTree(), GreedyMatch(), FixedLength(3)),
    "none": (NoDraft(), Rejection(), FixedLength()),
    "random": (RandomDraft(2), Rejection(), FixedLength()),
    "adversarial": (AdversarialDraft(2), Rejection(), FixedLength()),
    "strided": (StridedDraft(2), Rejection(), FixedLength()),
    "bidirectional": (BidirectionalDraft(2), Rejection(), FixedLength()),
    "cut_by_survival": (Estimated(3, (0.4, 0.3, 0.2, 0.1)), Rejection(), SurvivalThreshold(0.5)),
}


@pytest.mark.parametrize("case", covering(3, LAW_CASES))
def test_the_joint_law_of_the_first_tokens_is_the_targets(case: str) -> None:
    decoder = SpeculativeDecoder(*LAW_CASES[case], temperature=1.0)
    counts = Counter(sampled(decoder, seed) for seed in range(DRAWS))
    assert deviation(counts, joint_law()) < chi2.ppf(1 - SURE, 4**LOOKED_AT - 1)


def sampled(decoder: SpeculativeDecoder, seed: int) -> tuple[int, ...]:
    request = Request("distribution", (0, 2, 0), LOOKED_AT, seed=seed)
    return decoder.generate(Chain(NOBODY, LAWS), request).ids[:LOOKED_AT]  # type: ignore[arg-type]


def joint_law() -> dict[tuple[int, ...], float]:
    found = {}
    for tokens in product(range(4), repeat=LOOKED_AT):
        probability, before = 1.0, 0
        for token in tokens:
            probability *= float(LAWS[before, token])
            before = token
        found[tokens] = probability
    return found


def deviation(counts: Counter, expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's χ² of the counts against the expected probabilities."""
    assert set(counts) <= set(expected)
    return sum((counts[t] - DRAWS * p) ** 2 / (DRAWS * p) for t, p in expected.items())


@dataclass(frozen=True)
class Biased(Rejection):
    """Forgets the residual: what a wrong rule looks like to the test."""

    @staticmethod
    def next_distribution(count: Tensor, draft_DV: Tensor, target_RV: Tensor) -> Tensor:
        return target_RV[count]


@dataclass(frozen=True)
class Anticipating(VerifyLength):
    """Looks at the token it decides about: the selection that is not allowed."""

    def __call__(self, proposals: Any) -> list[int]:
        return [int((proposal.tokens_D != 1).long().cumprod(0).sum()) for proposal in proposals]


@pytest.mark.parametrize(
    "decoder",
    [
        SpeculativeDecoder(FromDistribution(2, (0.7, 0.1, 0.1, 0.1)), Biased(), temperature=1.0),
        SpeculativeDecoder(
            FromDistribution(2, (0.1, 0.5, 0.3, 0.1)), Rejection(), Anticipating(), temperature=1.0
        ),
    ],
    ids=["no_residual", "anticipating_length"],
)
def test_the_law_test_sees_what_is_wrong(decoder: SpeculativeDecoder) -> None:
    counts = Counter(sampled(decoder, seed) for seed in range(DRAWS))
    assert deviation(counts, joint_law()) > chi2.ppf(1 - SURE, 4**LOOKED_AT - 1)
