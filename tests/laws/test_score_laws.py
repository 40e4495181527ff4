"""Laws of the scores: precision is what it names, candidates the argmax, credit its equations.

Credit is compared with a dense table over the canvas that knows nothing of blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import Condition
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.state import MASKED, PROMPT, DecodeState, MemoKey
from dllm_bench.decoding.defaults import Greedy
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
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin, Sampled
from dllm_bench.methods.fast_dllm import Factor, FirstOfBlock, Hierarchy, Ration
from dllm_bench.methods.history import CREDIT, IDS, START, Credit
from dllm_bench.methods.revising import RepeatPenalty
from tests.helpers import ROLES, VOCAB
from tests.pieces import BLOCK, Table, pieces

DENSE = MemoKey[Tensor]("dense")
SPECIAL = SpecialTokens(**ROLES)
PRECISIONS = ("float32", "bfloat16", "float64", "model")
EVIDENCE = ("credit", "density")  # in the names of scores whose probabilities are not the model's
PLAIN = (Confidence(), Margin(), NegEntropy(), NegEntropy(eps=1e-10))
SELECTS = (
    Threshold(0.6),
    Threshold(0.6, band=1e-5),
    Factor(1.0),
    Hierarchy(0.9),
    Union(FirstOfBlock(Epsilon(3)), Ration(Union(TopK(3), Origin(5)), steps=4)),
)
MODEL = Table()
REQUEST = Request("scores", (5, 9, 2, 7, 1), 32, seed=1)
BASE = MaskedDecoder(Confidence(), Threshold(0.6), Blocks(8), NoCache())


def logits_of(seed: int, width: int, branches: int = 1, spread: float = 4.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_KWV = spread * torch.randn(branches, width, VOCAB, generator=generator)
    logits_KWV[..., ROLES["mask"]] = -torch.inf
    return logits_KWV


def frame(
    masked_KL: Tensor, block: int, start: int = 0, prompt: int = 0
) -> tuple[DecodeState, Window]:
    """Return a state with these masks and the window from `start` to its end, all masks open."""
    branches, length = masked_KL.shape
    born_KL = torch.where(masked_KL, MASKED, 0).int()
    born_KL[:, :prompt] = PROMPT
    state = DecodeState(torch.zeros_like(born_KL).long(), born_KL, prompt, SPECIAL)
    open_KW = state.masked_KL[:, start:]
    blocks = math.ceil(open_KW.shape[1] / block)
    must_KN = torch.ones(branches, blocks, dtype=torch.bool)
    return state, Window(start, length, length, start, block, 0, open_KW, must_KN)


def masks(width: int, branches: int = 1) -> tuple[DecodeState, Window]:
    return frame(torch.ones(branches, width, dtype=torch.bool), width)


def test_scores_of_single_rows_read_masks_alone() -> None:
    """Caches that leave masks out need the one, and the loop leaves out rows by the other."""
    for name, score in pieces("score").items():
        alone = Condition.ROW_BY_ROW in score.gives
        assert alone == (score.reads_rows == "masked"), name


@pytest.mark.parametrize("name", pieces("score"))
def test_without_chance_every_score_proposes_the_argmax(name: str) -> None:
    score = pieces("score")[name]
    names = {field.name for field in fields(score)}  # type: ignore[arg-type]
    if "temperature" in names and not isinstance(score, Tempered):  # which draws nothing
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
    log_KWV = (softmax_KWV + 1e-10).log()
    expected = {
        Confidence(precision): best_KW2[..., 0],
        Margin(precision): best_KW2[..., 0] - best_KW2[..., 1],
        NegEntropy(precision, eps=1e-10): (softmax_KWV * log_KWV).sum(-1),
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


def test_neg_entropy_has_the_published_term_inside_the_logarithm_only_when_asked() -> None:
    certain_KWV = torch.tensor([[[0.0, -torch.inf, -torch.inf]]])
    exact, published = (NegEntropy(eps=eps)(certain_KWV, *masks(1)) for eps in (0.0, 1e-3))
    assert float(exact.confidence_KW) == 0.0
    assert float(published.confidence_KW) == pytest.approx(math.log1p(1e-3), rel=1e-3)


@pytest.mark.parametrize("select", SELECTS, ids=str)
@pytest.mark.parametrize("precision", ["bfloat16", "float64"])
def test_every_selector_takes_every_precision(precision: Precision, select) -> None:
    decoder = replace(BASE, score=NegEntropy(precision), select=select)
    for explore in (Greedy(), Lookahead(2, alpha=0.5)):
        generation = replace(decoder, explore=explore).generate(MODEL, REQUEST)
        assert MASKED not in generation.born
        assert sorted(set(generation.born))[-1] == len(generation.trace) - 1


@dataclass(frozen=True)
class Dense(Score):
    """Eq. 6 and 7 with a table over canvas and vocabulary; blocks play no part but in adaptive."""

    inner: Score
    alpha: float
    beta: float
    gamma: float
    adaptive: bool = False
    full: bool = False
    block: int = BLOCK
    origin: int = 0

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        law_KWV = logits_KWV.softmax(-1)
        top_KW1 = law_KWV.argmax(-1, keepdim=True)
        credited_KWV = torch.zeros_like(law_KWV).scatter(-1, top_KW1, 1.0)
        gamma = 1.0 if self.adaptive else self.gamma
        alpha_KL1, beta_KL1 = self.numbers(state)
        table_KLV = state.memo.get(DENSE)
        if table_KLV is None:
            table_KLV = torch.zeros(state.branches, state.length, VOCAB)
        table_KLV = beta_KL1 * table_KLV
        span = slice(window.start, window.stop)
        gained_KWV = law_KWV.pow(gamma) * (1.0 if self.full else credited_KWV)
        table_KLV[:, span] += gained_KWV * window.eligible_KW[..., None]
        state.memo[DENSE] = table_KLV
        bonus_KWV = (alpha_KL1 * table_KLV.log1p())[:, span]
        return self.inner(logits_KWV + bonus_KWV, state, window)

    def numbers(self, state: DecodeState) -> tuple[Tensor, Tensor]:
        """alpha and beta of every position."""
        ones_KL1 = torch.ones(state.branches, state.length, 1)
        if not self.adaptive:
            return self.alpha * ones_KL1, self.beta * ones_KL1
        share_KL = torch.zeros(state.branches, state.length)
        for start in range(self.origin, state.length, self.block):
            span = slice(start, start + self.block)
            new_KB = state.born_KL[:, span] != PROMPT
            masks_K = state.masked_KL[:, span].sum(1)
            share_KL[:, span] = 1 - (masks_K / new_KB.sum(1).clamp(min=1))[:, None]
        return share_KL[..., None], share_KL[..., None]


NUMBERS = {"alpha": 1.0, "beta": 0.8, "gamma": 0.2}
PROMPT_LEN = len(REQUEST.prompt_ids)
ORIGINS = {
    Blocks(8): PROMPT_LEN,
    Pipeline(8, 0.1, 0.5): PROMPT_LEN,
    Pipeline(8, 0.5, 1.0): PROMPT_LEN,
    Blocks(8, absolute=True): 0,
    Blocks(8, absolute=True, sees_future=False): 0,
}


@pytest.mark.parametrize("explore", [Greedy(), Lookahead(3)], ids=["greedy", "lookahead"])
@pytest.mark.parametrize("schedule", ORIGINS, ids=str)
@pytest.mark.parametrize("kind", ["fixed", "adaptive", "full"])
def test_credit_is_a_dense_table_whatever_is_open(kind, schedule, explore) -> None:
    credit = Credit(
        Confidence(), **NUMBERS, adaptive=kind == "adaptive", full_distribution=kind == "full"
    )
    dense = Dense(
        Confidence(),
        **NUMBERS,
        adaptive=kind == "adaptive",
        full=kind == "full",
        origin=ORIGINS[schedule],
    )
    decoder = replace(BASE, select=Threshold(0.95), schedule=schedule, explore=explore)
    found, expected, plain = (noted(decoder, score) for score in (credit, dense, Confidence()))
    for one_KW, other_KW in zip(found, expected, strict=True):
        assert torch.allclose(one_KW, other_KW, atol=1e-5)
    assert sum(float(p.sum()) for p in found) != sum(float(p.sum()) for p in plain), "no say"


def noted(decoder: MaskedDecoder, score: Score) -> list[Tensor]:
    """Return the probabilities at the open masks of every branch and forward."""
    seen = []

    @dataclass(frozen=True)
    class Noting(Score):
        inner: Score

        def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
            scores = self.inner(logits_KWV, state, window)
            seen.append(scores.probability_KW * window.eligible_KW)
            return scores

    replace(decoder, score=Noting(score)).generate(MODEL, REQUEST)
    return seen


def test_credit_gains_nothing_where_a_branch_has_not_opened_a_block() -> None:
    """Branch 1 has opened one of two blocks: its second block scores like the inner score."""
    state, window = frame(torch.ones(2, 16, dtype=torch.bool), 8)
    open_KW = window.eligible_KW.clone()
    open_KW[1, 8:] = False
    ahead = replace(window, eligible_KW=open_KW)
    logits_KWV, later_KWV = logits_of(2, 16, 2), logits_of(3, 16, 2)
    credit, plain = Credit(Confidence()), Confidence()
    first, raw = credit(logits_KWV, state, ahead), plain(logits_KWV, state, ahead)
    differs_KW = ~torch.isclose(first.probability_KW, raw.probability_KW)
    assert torch.equal(differs_KW, open_KW)
    fresh_state, fresh = frame(torch.ones(2, 16, dtype=torch.bool), 8)
    later, alone = (credit(later_KWV, *pair) for pair in ((state, window), (fresh_state, fresh)))
    assert torch.equal(later.probability_KW[1, 8:], alone.probability_KW[1, 8:])
    assert not torch.equal(later.probability_KW[0], alone.probability_KW[0])


@pytest.mark.parametrize("full", [False, True], ids=["top-1", "full"])
def test_credit_ends_with_its_block_and_survives_a_cut_within_it(full) -> None:
    credit = Credit(Confidence(), full_distribution=full)
    state, window = frame(torch.ones(1, 16, dtype=torch.bool), 8)
    whole = credit(logits_of(4, 16), state, window)
    state.truncate(13)
    cut = replace(window, stop=13, eligible_KW=state.masked_KL)
    logits_KWV = logits_of(5, 16)
    kept = credit(logits_KWV[:, :13], state, cut)
    again, window = frame(torch.ones(1, 16, dtype=torch.bool), 8)
    credit(logits_of(4, 16), again, window)
    uncut = credit(logits_KWV, again, window)
    assert torch.equal(kept.probability_KW, uncut.probability_KW[:, :13])
    assert not torch.equal(kept.ids_KW, whole.ids_KW[:, :13])
    second = replace(cut, start=8, eligible_KW=state.masked_KL[:, 8:])
    credit(logits_KWV[:, 8:13], state, second)
    keys = (CREDIT,) if full else (CREDIT, IDS)
    assert {state.memo[key].shape[1] for key in keys} == {5}
    third = replace(cut, start=13, stop=21, eligible_KW=torch.ones(1, 8, dtype=torch.bool))
    fresh = credit(logits_of(6, 8), state, third)
    alone = credit(logits_of(6, 8), *masks(8))
    assert torch.equal(fresh.probability_KW, alone.probability_KW)


def test_adaptive_credit_has_no_weight_in_an_untouched_block_over_the_prompt() -> None:
    """Five of the block's positions are prompt: nothing is decoded yet, so alpha is 0."""
    masked_KL = torch.ones(1, 13, dtype=torch.bool)
    state, window = frame(masked_KL, 8, prompt=5)
    window = replace(window, eligible_KW=state.masked_KL)
    logits_KWV = logits_of(7, 13)
    plain = Confidence()(logits_KWV, state, window)
    for scope in ("block", "sequence"):
        found = Credit(Confidence(), adaptive=True, scope=scope)(logits_KWV, state, window)
        assert torch.equal(found.probability_KW, plain.probability_KW)


@pytest.mark.parametrize(("scope", "shares"), [("block", (0.5, 0.0)), ("sequence", (0.25, 0.25))])
def test_adaptive_credit_weighs_by_what_is_decoded(scope, shares) -> None:
    """One of two masks of the first block is decoded, none of two in the second."""
    masked_KL = torch.tensor([[False, True, True, True]])
    state, window = frame(masked_KL, 2)
    logits_KWV = logits_of(8, 4)
    found = Credit(Confidence(), adaptive=True, scope=scope)(logits_KWV, state, window)
    law_WV = logits_KWV[0].softmax(-1)
    for at, share in ((1, shares[0]), (2, shares[1])):
        top = law_WV[at].max()
        grown = top * (1 + top) ** share
        expected = grown / (1 - top + grown)
        assert float(found.probability_KW[0, at]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("inner", PLAIN, ids=str)
def test_raw_confidence_is_the_inner_ranking(inner) -> None:
    logits_KWV = logits_of(9, 20)
    found = Credit(inner, keep_raw=True)(logits_KWV, *masks(20))
    plain = inner(logits_KWV, *masks(20))
    assert torch.equal(found.raw_KW, plain.confidence_KW)
    assert not torch.equal(found.confidence_KW, plain.confidence_KW)
    assert Credit(inner)(logits_KWV, *masks(20)).raw_KW is None


@pytest.mark.parametrize("sampler", [Gumbel, Sampled])
def test_credit_leaves_its_memory_as_it_is_whatever_reads_it(sampler) -> None:
    """Candidates are drawn from the fused logits, credit goes to the raw top-1 all the same."""
    drawn, plain = Credit(sampler(temperature=2.0)), Credit(Confidence())
    states = [masks(20), masks(20)]
    for seed in range(3):
        ids = [
            s(logits_of(seed, 20), *at).ids_KW for s, at in zip((drawn, plain), states, strict=True)
        ]
        assert not torch.equal(*ids)
    memos = [state.memo for state, _ in states]
    assert set(memos[0]) == set(memos[1]) == {START, CREDIT, IDS}
    assert memos[0][START] == memos[1][START]
    assert all(torch.equal(memos[0][key], memos[1][key]) for key in (CREDIT, IDS))


def test_a_repeat_penalty_is_restricted_to_tokens_of_the_same_block() -> None:
    """SGLang's JointThreshold: rows 1 and later of a block of 2, each by the token on its left."""
    logits_1WV = torch.zeros(1, 4, VOCAB)
    logits_1WV[..., 5], logits_1WV[..., 0] = 2.0, 1.0
    state = DecodeState.start(Request("r", (5,), 4), SPECIAL)
    state.commit(torch.tensor([[False, True, False, True]]), torch.full((1, 4), 5), 1)
    window = Window(1, 5, 5, 1, 2, 1, state.masked_KL[:, 1:])
    penalised = RepeatPenalty(Confidence(), 1.5)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 5, 5, 5]]
    state.commit(torch.tensor([[True, False, True, False]]), torch.full((1, 4), 5), 1)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 0, 5, 0]]
    later = replace(window, start=3, eligible_KW=window.eligible_KW[:, 2:])
    assert penalised(logits_1WV[:, 2:], state, later).ids_KW.tolist() == [[5, 0]]
