"""Laws of the scores: precision is what it names, candidates the argmax, credit its equations."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import Condition
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState, MemoKey
from dllm_bench.decoding.defaults import Filled, Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.numerics import Precision
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.causal_masks import Tempered
from dllm_bench.methods.common import (
    Blocks,
    Confidence,
    Margin,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin
from dllm_bench.methods.fast_dllm import Factor, FirstOfBlock, Hierarchy, Ration
from dllm_bench.methods.history import Credit
from dllm_bench.methods.revising import RepeatPenalty
from tests.helpers import ROLES, VOCAB, noting
from tests.pieces import BLOCK, CutAt, Table, decoders, opened, pieces
from tests.tiers import covering_pairs

DENSE = MemoKey[Tensor]("dense")
SPECIAL = SpecialTokens(**ROLES)
PRECISIONS = ("float32", "bfloat16", "float64", "model")
EVIDENCE = ("credit", "density")  # in the names of scores whose probabilities are not the model's
PLAIN = (Confidence(), Margin(), NegEntropy(), NegEntropy(eps=1e-10))
BY_STEPS = Union(FirstOfBlock(Epsilon(3)), Ration(Union(TopK(3), Origin(5)), steps=4))
SELECTS = (Threshold(0.6), Threshold(0.6, band=1e-5), Factor(1.0), Hierarchy(0.9), BY_STEPS)
MODEL = Table()
REQUEST = Request("scores", (5, 9, 2, 7, 1), 32, seed=1)
BASE = MaskedDecoder(Confidence(), Threshold(0.6), Blocks(8), NoCache())


def logits_of(seed: int, width: int, branches: int = 1, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_KWV = spread * torch.randn(branches, width, VOCAB, generator=generator)
    logits_KWV[..., ROLES["mask"]] = -torch.inf
    return logits_KWV


def masks(width: int, branches: int = 1) -> tuple[DecodeState, Window]:
    return opened(torch.ones(branches, width, dtype=torch.bool))


def test_scores_of_single_rows_read_masks_alone() -> None:
    """Caches that leave masks out need the one, and the loop leaves out rows by the other."""
    for name, score in pieces("score").items():
        assert (Condition.ROW_BY_ROW in score.gives) == (score.reads_rows == "masked"), name


@pytest.mark.parametrize("name", pieces("score"))
def test_without_chance_every_score_proposes_the_argmax(name: str) -> None:
    score = pieces("score")[name]
    if hasattr(score, "temperature") and not isinstance(score, Tempered):  # which draws nothing
        score = replace(score, temperature=0.0)  # type: ignore[type-var]
    logits_KWV = logits_of(0, 20, branches=3)
    given_KWV = logits_KWV.clone()
    found = score(logits_KWV, *masks(20, branches=3))  # type: ignore[operator]
    assert torch.equal(found.ids_KW, logits_KWV.argmax(-1))
    if not any(word in name for word in EVIDENCE):
        best_KW = logits_KWV.softmax(-1).amax(-1)
        assert torch.allclose(found.probability_KW.float(), best_KW, atol=1e-4)
    assert torch.equal(logits_KWV, given_KWV), "a score leaves the logits alone"


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_what_the_published_samplers_compute(precision, logits_dtype) -> None:
    """Softmax in the dtype, then the operations on probabilities one by one in that dtype."""
    logits_KWV = logits_of(1, 50).to(logits_dtype)
    dtype = logits_dtype if precision == "model" else getattr(torch, precision)
    softmax_KWV = logits_KWV.to(dtype).softmax(-1)
    best_KW2 = softmax_KWV.sort(dim=-1, descending=True).values[..., :2]
    expected = {
        Confidence(precision): best_KW2[..., 0],
        Margin(precision): best_KW2[..., 0] - best_KW2[..., 1],
        NegEntropy(precision, eps=1e-10): (softmax_KWV * (softmax_KWV + 1e-10).log()).sum(-1),
    }
    close = {torch.float32: 2e-6, torch.bfloat16: 0.0, torch.float64: 1e-14}[dtype]
    for score, value_KW in expected.items():
        found = score(logits_KWV, *masks(50))
        assert found.confidence_KW.dtype == found.probability_KW.dtype == dtype
        assert torch.allclose(found.confidence_KW, value_KW, rtol=0, atol=close)
        assert torch.allclose(found.probability_KW, best_KW2[..., 0], rtol=0, atol=close)


def test_thresholds_compare_in_the_precision_of_the_score() -> None:
    """230/256 is the bfloat16 nearest to 0.9: it passes there, as published, and not in float32."""
    logits_KWV = torch.full((1, 1, 2), math.log((256 - 230) / 230))
    logits_KWV[..., 0] = 0.0
    state, window = masks(1)
    for precision, passes in (("bfloat16", True), ("float32", False), ("float64", False)):
        scores = Confidence(precision)(logits_KWV, state, window)
        assert bool(Threshold(0.9)(scores, window, state)) == passes


@pytest.mark.parametrize("select", SELECTS, ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_every_selector_takes_every_precision(precision: Precision, select) -> None:
    decoder = replace(BASE, score=NegEntropy(precision), select=select)
    for explore in (Greedy(), Lookahead(2, alpha=0.5)):
        generation = replace(decoder, explore=explore).generate(MODEL, REQUEST)
        assert MASKED not in generation.born and max(generation.born) == len(generation.trace) - 1


@dataclass(frozen=True)
class Dense(Score):
    """Eq. 6 and 7 of a credit with a table over canvas and vocabulary; blocks play no part but in
    adaptive."""

    credit: Credit
    origin: int

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        credit, law_KWV = self.credit, logits_KWV.softmax(-1)
        gained_KWV = law_KWV if credit.adaptive else law_KWV.pow(credit.gamma)
        if not credit.full_distribution:
            top_KW1 = law_KWV.argmax(-1, keepdim=True)
            gained_KWV = gained_KWV * torch.zeros_like(law_KWV).scatter(-1, top_KW1, 1.0)
        alpha_KL1, beta_KL1 = self.numbers(state)
        table_KLV = state.memo.get(DENSE)
        if table_KLV is None:
            table_KLV = torch.zeros(state.branches, state.length, VOCAB)
        table_KLV = beta_KL1 * table_KLV[:, : state.length] * state.masked_KL[..., None]
        span = slice(window.start, window.stop)
        table_KLV[:, span] += gained_KWV * window.eligible_KW[..., None]
        state.memo[DENSE] = table_KLV
        return credit.inner(logits_KWV + (alpha_KL1 * table_KLV.log1p())[:, span], state, window)

    def numbers(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        ones_KL1 = torch.ones(state.branches, state.length, 1)
        if not self.credit.adaptive:
            return self.credit.alpha * ones_KL1, self.credit.beta * ones_KL1
        by_block = self.credit.scope == "block"
        size = BLOCK if by_block else state.length
        share_KL = torch.zeros(state.branches, state.length)
        for start in range(self.origin if by_block else 0, state.length, size):
            span = slice(start, start + size)
            new_KB = state.born_KL[:, span] != PROMPT
            masks_K = state.masked_KL[:, span].sum(1)
            share_KL[:, span] = 1 - (masks_K / new_KB.sum(1).clamp(min=1))[:, None]
        return share_KL[..., None], share_KL[..., None]


CREDIT = Credit(Confidence(), alpha=1.0, beta=0.8, gamma=0.2)
CREDITS = {
    "fixed": CREDIT,
    "adaptive": replace(CREDIT, adaptive=True),
    "adaptive by the whole text": replace(CREDIT, adaptive=True, scope="sequence"),
    "full": replace(CREDIT, full_distribution=True),
    "drawn": replace(CREDIT, inner=Gumbel(temperature=1.0)),  # the raw top-1 is credited still
}
PROMPT_LEN = len(REQUEST.prompt_ids)
AFTER_PROMPT = (Blocks(8), Pipeline(8, 0.1, 0.5), Pipeline(8, 0.5, 1.0))
ABSOLUTE = (Blocks(8, absolute=True), Blocks(8, absolute=True, sees_future=False))
ORIGINS = {**dict.fromkeys(AFTER_PROMPT, PROMPT_LEN), **dict.fromkeys(ABSOLUTE, 0)}
BRANCHES, STOPS = [Greedy(), Lookahead(3)], [Filled(), CutAt(PROMPT_LEN + 19)]
PAIRS = covering_pairs(CREDITS, ORIGINS, BRANCHES, STOPS)


@pytest.mark.parametrize(("name", "schedule", "explore", "stop"), PAIRS, ids=str)
def test_credit_is_a_dense_table_whatever_is_open(name, schedule, explore, stop) -> None:
    """In branches that have opened another number of blocks, and in a block that is cut."""
    credit = CREDITS[name]
    decoder = replace(BASE, select=Threshold(0.95), schedule=schedule, explore=explore, stop=stop)
    scores = (credit, Dense(credit, ORIGINS[schedule]), credit.inner)
    found, expected, plain = (noted(decoder, score) for score in scores)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sum(float(p.sum()) for p in found) != sum(float(p.sum()) for p in plain), "no say"


@pytest.mark.parametrize("name", ["fixed", "full"])
def test_a_position_that_is_masked_again_begins_without_credit(name: str) -> None:
    credit, decoder = CREDITS[name], decoders()["t2m"]
    found, expected = (noted(decoder, score) for score in (credit, Dense(credit, PROMPT_LEN)))
    assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-5)
    assert any(one.changes for one in decoder.generate(MODEL, REQUEST).trace.forwards), "no say"


def noted(decoder: MaskedDecoder, score: Score) -> list[Tensor]:
    watched, calls = noting(score, keep=lambda logits, state, window: window.eligible_KW.clone())
    replace(decoder, score=watched).generate(MODEL, REQUEST)
    return [scores.probability_KW * eligible_KW for eligible_KW, scores in calls]


@pytest.mark.parametrize("inner", PLAIN, ids=str)
def test_raw_confidence_is_the_inner_ranking(inner) -> None:
    logits_KWV = logits_of(9, 20)
    found = Credit(inner, keep_raw=True)(logits_KWV, *masks(20))
    plain = inner(logits_KWV, *masks(20))
    assert torch.equal(found.raw_KW, plain.confidence_KW)
    assert not torch.equal(found.confidence_KW, plain.confidence_KW)
    assert Credit(inner)(logits_KWV, *masks(20)).raw_KW is None


def test_a_repeat_penalty_is_restricted_to_tokens_of_the_same_block() -> None:
    """SGLang's JointThreshold: rows 1 and later of a block of 2, each by the token on its left."""
    logits_1WV = torch.zeros(1, 4, VOCAB)
    logits_1WV[..., 5], logits_1WV[..., 0] = 2.0, 1.0
    state = DecodeState.start(Request("r", (5,), 4), SPECIAL)
    state.commit(torch.tensor([[False, True, False, True]]), torch.full((1, 4), 5), 1)
    window = Window(1, 5, 5, 2, 1, state.masked_KL[:, 1:])
    penalised = RepeatPenalty(Confidence(), 1.5)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 5, 5, 5]]
    state.commit(torch.tensor([[True, False, True, False]]), torch.full((1, 4), 5), 1)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 0, 5, 0]]
    later = replace(window, start=3, eligible_KW=window.eligible_KW[:, 2:])
    assert penalised(logits_1WV[:, 2:], state, later).ids_KW.tolist() == [[5, 0]]
