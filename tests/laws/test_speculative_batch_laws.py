"""Laws of sampled speculative text, and of a batch: its requests are decoded as alone.

Token for token for every drafter, greedy and sampled, where a length does not depend on the others.
Where it does (the scheduler, at once or two steps ahead) greedy text is the same still, and sampled
text has the target's distribution. Nothing here is timed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.speculative import (
    Context,
    Draft,
    LengthRule,
    Proposal,
    Sampler,
    Verify,
    VerifyLength,
)
from dllm_bench.core.trace import Forward
from dllm_bench.decoding.speculative import FixedLength, GreedyMatch, Rejection, SpeculativeDecoder
from dllm_bench.methods.causal_masks import BidirectionalDraft, StridedDraft
from dllm_bench.methods.drafting import (
    AdversarialDraft,
    ModelDraft,
    NGramDraft,
    NoDraft,
    RandomDraft,
    StepProfile,
    SurvivalThreshold,
)
from dllm_bench.methods.trained_drafts import AsynchronousLength, DDTree, HardwareAwareLength
from dllm_bench.models.drafters import SmallModelDrafter
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import load_denoiser
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
RULES: list[dict[str, Any]] = [
    DRAWN | {"verify": GreedyMatch(), "length": FixedLength(2)},
    DRAWN | {"length": SurvivalThreshold(0.5)},
]


@pytest.mark.parametrize(
    ("name", "settings"),
    [*covering(5, product(MAKERS, ({}, DRAWN))), *product(["dspark"], RULES)],
    ids=str,
)
def test_requests_side_by_side_are_requests_alone(
    name: str, settings: dict[str, Any], folder: Path, target: TransformerDenoiser
) -> None:
    decoder = speculative(MAKERS[name](folder), **settings)
    together = generate_batch(decoder, target, REQUESTS)
    alone = [decoder.generate(target, request) for request in REQUESTS]
    assert [*map(outcome, together)] == [*map(outcome, alone)]
    assert len({len(found.ids) for found in together}) > 1, "they leave one after another"


@pytest.mark.usefixtures("target")  # it writes the checkpoint that is read here anew
def test_an_end_inside_of_a_block_ends_one_of_them(folder: Path) -> None:
    model = load_denoiser(folder / "target")
    decoder = SpeculativeDecoder(ModelDraft(SmallModelDrafter(str(folder / "target")), 4))
    plain = [found.ids for found in generate_batch(decoder, model, REQUESTS)]
    end = plain[0][6]
    model.special = SpecialTokens(mask=model.special.mask, eos=end)
    ended = [found.ids for found in generate_batch(decoder, model, REQUESTS)]
    cut = [ids[: ids.index(end) + 1] if end in ids else ids for ids in plain]
    assert ended == cut and len(ended[0]) <= 7


# --- lengths that depend on each other -----------------------------------------------------------


@dataclass(frozen=True)
class Watched(VerifyLength):
    """Keeps the lengths of every round."""

    inner: VerifyLength
    seen: list[list[int]] = field(default_factory=list, compare=False)
    gives = frozenset()

    def begin(self) -> LengthRule:
        rule = self.inner.begin()

        def lengths(proposals: Sequence[Proposal]) -> list[int]:
            self.seen.append(rule(proposals))
            return self.seen[-1]

        return lengths

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        raise AssertionError("the loop begins a rule")


JOINT = {"hardware_aware": HardwareAwareLength(KNEE), "asynchronous": AsynchronousLength(KNEE)}


@pytest.mark.parametrize("name", covering(2, JOINT))
def test_joint_lengths_leave_greedy_text_alone(
    name: str, folder: Path, target: TransformerDenoiser
) -> None:
    watched = Watched(JOINT[name])
    decoder = SpeculativeDecoder(MAKERS["dspark"](folder), length=watched)
    requests = [*REQUESTS, *(replace(r, id=f"{r.id}-again") for r in REQUESTS)]
    batched = generate_batch(decoder, target, requests)
    plain = SpeculativeDecoder(MAKERS["none"](folder))
    for request, found in zip(requests, batched, strict=True):
        wanted = plain.generate(target, request)
        assert found.ids[: found.cut["length"]] == wanted.ids[: wanted.cut["length"]]
    assert len(watched.seen[0]) == 6, "two requests ended with their prefill"
    together = [*map(len, watched.seen)]
    assert together == sorted(together, reverse=True)
    busy, idle = watched.seen[0], watched.seen[-1]
    assert sum(busy) / len(busy) < sum(idle) / len(idle), "a busy machine verifies less"


@pytest.mark.parametrize("name", covering(2, JOINT))
def test_joint_lengths_keep_the_law_of_every_request(name: str) -> None:
    """Three at a time, all counted: what one verifies depends on the drafts of the others."""
    watched = Watched(replace(JOINT[name], profile=StepProfile((1, 5, 12), (1.0, 0.8, 0.2))))
    draft = Estimated(3, (0.4, 0.3, 0.2, 0.1))
    decoder = SpeculativeDecoder(draft, Rejection(), watched, temperature=1.0)
    assert deviation(sampled(decoder, DRAWS, batch=3)) < LARGEST
    assert {0, 1, 2, 3} <= {n for lengths in watched.seen for n in lengths}


def test_a_rule_that_remembers_begins_anew() -> None:
    """The size a batch chose two steps before its end is nothing to the next batch."""
    piece = AsynchronousLength(KNEE)
    proposals = [Proposal(torch.zeros(3).long(), survival_D=torch.tensor([2.0, 1.0, 0.0]))]
    used, fresh = piece.begin(), piece.begin()
    for _ in range(3):
        used([Proposal(torch.zeros(3).long(), survival_D=torch.full((3,), -9.0))])
    assert used(proposals) != fresh(proposals) == piece(proposals)


# --- sampled text: χ² over the joint distribution of the first tokens -----------------------------

LAWS = torch.tensor(
    [
        [0.10, 0.20, 0.30, 0.40],
        [0.50, 0.10, 0.15, 0.25],
        [0.25, 0.25, 0.40, 0.10],
        [0.10, 0.45, 0.25, 0.20],
    ]
)
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
    """Two tokens after the anchor and two after the first of them, whatever the text."""

    needs = DDTree.needs
    longest = 4

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        tokens_D, parents_D = torch.tensor([3, 0, 1, 0]), torch.tensor([0, 0, 1, 1])
        return Proposal(tokens_D, parents_D=parents_D)


MOSTLY_0 = FromDistribution(2, (0.7, 0.1, 0.1, 0.1))
LAW_CASES: dict[str, tuple[Draft, Verify, VerifyLength]] = {
    "rejection": (MOSTLY_0, Rejection(), FixedLength()),
    "one_token": (FromDistribution(1, (0.1, 0.2, 0.3, 0.4)), Rejection(), FixedLength()),
    "no_common_ground": (FromDistribution(3, (1.0, 0.0, 0.0, 0.0)), Rejection(), FixedLength()),
    "greedy_draft": (NGramDraft(3, 2), Rejection(), FixedLength()),
    "match": (MOSTLY_0, GreedyMatch(), FixedLength()),
    "tree": (FixedTree(), GreedyMatch(), FixedLength()),
    "cut_tree": (FixedTree(), GreedyMatch(), FixedLength(3)),
    "none": (NoDraft(), Rejection(), FixedLength()),
    "random": (RandomDraft(2), Rejection(), FixedLength()),
    "adversarial": (AdversarialDraft(2), Rejection(), FixedLength()),
    "strided": (StridedDraft(2), Rejection(), FixedLength()),
    "bidirectional": (BidirectionalDraft(2), Rejection(), FixedLength()),
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
        SpeculativeDecoder(MOSTLY_0, Biased(), temperature=1.0),
        SpeculativeDecoder(
            FromDistribution(2, (0.1, 0.5, 0.3, 0.1)), Rejection(), Anticipating(), temperature=1.0
        ),
    ],
    ids=["no_residual", "anticipating_length"],
)
def test_the_law_test_sees_what_is_wrong(decoder: SpeculativeDecoder) -> None:
    assert deviation(sampled(decoder, DRAWS // 2)) > LARGEST
