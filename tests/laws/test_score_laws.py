"""Laws of the scores: precision is what it names, candidates the argmax, credit its equations; of
tokens and positions that are drawn; and of end tokens that are forbidden or come last.

Distributions are tested by chi-square on many positions with equal logits; the same test rejects a
distribution of another temperature, so it can fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.decoder import Condition
from dllm_bench.core.request import Request
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
from dllm_bench.methods.dream import Epsilon, Gumbel, Origin, Sampled
from dllm_bench.methods.fast_dllm import Factor, FirstOfBlock, Hierarchy, Ration
from dllm_bench.methods.history import Credit
from dllm_bench.methods.revising import RepeatPenalty
from tests.helpers import ROLES, VOCAB, noting, whole_forward
from tests.pieces import BLOCK, CutAt, Table, decoders, opened, pieces
from tests.tiers import covering_pairs

DENSE = MemoKey[Tensor]("dense")
PRECISIONS = ("float32", "bfloat16", "float64", "model")
EVIDENCE = ("credit", "density")  # in the names of scores whose probabilities are not the model's
PLAIN = (Confidence(), Margin(), NegEntropy(), NegEntropy(eps=1e-10))
BY_STEPS = Union(FirstOfBlock(Epsilon(3)), Ration(Union(TopK(3), Origin(5)), steps=4))
SELECTS = (Threshold(0.6), Threshold(0.6, band=1e-5), Factor(1.0), Hierarchy(0.9), BY_STEPS)
MODEL = Table()
REQUEST = Request("scores", (5, 9, 2, 7, 1), 32, seed=1)
BASE = MaskedDecoder(Confidence(), Threshold(0.6), Blocks(8), NoCache())


def logits_of(width: int, branches: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    logits_KWV = 4 * torch.randn(branches, width, VOCAB, generator=generator)
    logits_KWV[..., ROLES["mask"]] = -torch.inf
    return logits_KWV


def asked(width: int, branches: int = 1, seed: int = 3) -> tuple[DecodeState, Window]:
    return opened(torch.ones(branches, width, dtype=torch.bool), seed=seed)


def scores_of(score: Score, logits_KWV: Tensor, seed: int = 3) -> Scores:
    return score(logits_KWV, *asked(logits_KWV.shape[1], len(logits_KWV), seed))


def test_scores_of_single_rows_read_masks_alone() -> None:
    """Caches that leave masks out need the one, and the loop leaves out rows by the other."""
    for name, score in pieces("score").items():
        assert (Condition.ROW_BY_ROW in score.gives) == (score.reads_rows == "masked"), name


@pytest.mark.parametrize("name", pieces("score"))
def test_without_chance_every_score_proposes_the_argmax(name: str) -> None:
    score = pieces("score")[name]
    if hasattr(score, "temperature") and not isinstance(score, Tempered):  # which draws nothing
        score = replace(score, temperature=0.0)  # type: ignore[type-var]
    logits_KWV = logits_of(20, branches=3)
    given_KWV = logits_KWV.clone()
    found = scores_of(score, logits_KWV)
    assert torch.equal(found.ids_KW, logits_KWV.argmax(-1))
    if not any(word in name for word in EVIDENCE):
        best_KW = logits_KWV.softmax(-1).amax(-1)
        assert torch.allclose(found.probability_KW.float(), best_KW, atol=1e-4)
    assert torch.equal(logits_KWV, given_KWV), "a score leaves the logits alone"


@pytest.mark.parametrize("logits_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_precision_is_what_the_published_samplers_compute(precision, logits_dtype) -> None:
    """Softmax in the dtype, then the operations on probabilities one by one in that dtype."""
    logits_KWV = logits_of(50).to(logits_dtype)
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
        found = scores_of(score, logits_KWV)
        assert found.confidence_KW.dtype == found.probability_KW.dtype == dtype
        assert torch.allclose(found.confidence_KW, value_KW, rtol=0, atol=close)
        assert torch.allclose(found.probability_KW, best_KW2[..., 0], rtol=0, atol=close)


def test_thresholds_compare_in_the_precision_of_the_score() -> None:
    """230/256 is the bfloat16 nearest to 0.9: it passes there, as published, and not in float32."""
    logits_KWV = torch.full((1, 1, 2), math.log((256 - 230) / 230))
    logits_KWV[..., 0] = 0.0
    state, window = asked(1)
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
    logits_KWV = logits_of(20)
    found = scores_of(Credit(inner, keep_raw=True), logits_KWV)
    plain = scores_of(inner, logits_KWV)
    assert torch.equal(found.raw_KW, plain.confidence_KW)
    assert not torch.equal(found.confidence_KW, plain.confidence_KW)
    assert scores_of(Credit(inner), logits_KWV).raw_KW is None


def test_a_repeat_penalty_is_restricted_to_tokens_of_the_same_block() -> None:
    """SGLang's JointThreshold: rows 1 and later of a block of 2, each by the token on its left."""
    logits_1WV = torch.zeros(1, 4, VOCAB)
    logits_1WV[..., 5], logits_1WV[..., 0] = 2.0, 1.0
    state = DecodeState.start(Request("r", (5,), 4), MODEL.special)
    state.commit(torch.tensor([[False, True, False, True]]), torch.full((1, 4), 5), 1)
    window = Window(1, 5, 5, 2, 1, state.masked_KL[:, 1:])
    penalised = RepeatPenalty(Confidence(), 1.5)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 5, 5, 5]]
    state.commit(torch.tensor([[True, False, True, False]]), torch.full((1, 4), 5), 1)
    assert penalised(logits_1WV, state, window).ids_KW.tolist() == [[5, 0, 5, 0]]
    later = replace(window, start=3, eligible_KW=window.eligible_KW[:, 2:])
    assert penalised(logits_1WV[:, 2:], state, later).ids_KW.tolist() == [[5, 0]]


# --- drawing tokens -------------------------------------------------------------------------------

SAMPLERS = (Gumbel, Sampled)
POSITIONS = 20_000
LAW = torch.tensor([0.45, 0.2, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])


def surprise(ids_W: Tensor, law_V: Tensor) -> float:
    """Return `chance` of these tokens."""
    law = {token: p for token, p in enumerate(law_V.double().tolist()) if p}
    return chance(Counter(ids_W.tolist()), law)


def chance(found: Counter[Any], law: dict[Any, float]) -> float:
    """Chance of counts at least as far from the law (chi-square)."""
    assert set(found) <= set(law), "outside of the support"
    total, share = found.total(), sum(law.values())
    expected = [total * p / share for p in law.values()]
    return float(chisquare([found[key] for key in law], expected).pvalue)


def tempered(temperature: float) -> Tensor:
    return (LAW.log() / temperature).softmax(0)


SAME_LAW = LAW.log().expand(1, POSITIONS, -1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize(
    "score", [Gumbel(precision="float32"), Gumbel(precision="float64"), Sampled()], ids=str
)
def test_tokens_are_drawn_from_the_tempered_softmax(score, temperature) -> None:
    ids_W = scores_of(replace(score, temperature=temperature), SAME_LAW).ids_KW[0]
    assert surprise(ids_W, tempered(temperature)) > 1e-3
    assert surprise(ids_W, tempered(temperature * 1.1)) < 1e-6


CUTS = {(1.0, 3): 3, (1.0, 99): 8, (0.7, None): 3, (0.01, None): 1, (0.97, 6): 6, (0.85, 6): 4}


@pytest.mark.parametrize(("cut", "kept"), CUTS.items(), ids=str)
def test_cut_distributions_have_exactly_their_support(cut, kept) -> None:
    law_V = torch.where(torch.arange(8) < kept, LAW, 0.0)
    ids_W = scores_of(Sampled(Confidence(), 1.0, *cut), SAME_LAW).ids_KW[0]
    assert set(ids_W.tolist()) == set(range(kept))
    assert kept == 1 or surprise(ids_W, law_V / law_V.sum()) > 1e-3


def test_the_token_that_crosses_top_p_stays_and_ties_at_top_k_stay() -> None:
    """0.5 is not above 0.5, so the second token stays; three tokens share the second place."""
    law_V = torch.tensor([0.5, 0.25, 0.125, 0.125])
    ids_W = scores_of(Sampled(temperature=1.0, top_p=0.5), law_V.log().expand(1, 999, -1)).ids_KW[0]
    assert set(ids_W.tolist()) == {0, 1}
    logits_V = torch.tensor([1.0, 0.0, 0.0, 0.0, -1.0])
    ids_W = scores_of(Sampled(temperature=1.0, top_k=2), logits_V.expand(1, 999, -1)).ids_KW[0]
    assert set(ids_W.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("inner", PLAIN, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_zero_is_the_inner_score(sampler, inner) -> None:
    found, plain = (scores_of(s, logits_of(30, branches=2)) for s in (sampler(inner), inner))
    for name in ("ids_KW", "probability_KW", "confidence_KW"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}], ids=str)
def test_cuts_work_without_temperature(cut) -> None:
    """The surest token is the same, its probability is that among the tokens that stay."""
    found, plain = (scores_of(s, logits_of(30, branches=2)) for s in (Sampled(**cut), Confidence()))
    assert torch.equal(found.ids_KW, plain.ids_KW)
    assert (found.probability_KW > plain.probability_KW).any()
    assert (found.probability_KW >= plain.probability_KW - 1e-6).all()


def test_probabilities_of_gumbel_are_those_without_temperature() -> None:
    logits_KWV = logits_of(30)
    found = scores_of(Gumbel(temperature=2.0), logits_KWV)
    expected_KW = logits_KWV.softmax(-1).gather(-1, found.ids_KW[..., None])[..., 0]
    assert torch.allclose(found.probability_KW, expected_KW)
    assert not torch.equal(found.ids_KW, logits_KWV.argmax(-1))


def test_gumbel_does_not_overflow() -> None:
    """exp(800) is infinite even in float64; float32 resolves 800 to 6e-5."""
    logits_KWV = torch.full((1, 50, 4), 800.0)
    logits_KWV[..., 0] = -torch.inf
    found = scores_of(Gumbel(temperature=1.0), logits_KWV)
    assert set(found.ids_KW[0].tolist()) == {1, 2, 3}
    assert torch.allclose(found.probability_KW, torch.tensor(1 / 3), atol=1e-4)


@pytest.mark.parametrize("inner", PLAIN, ids=str)
def test_sampled_ranks_in_the_distribution_it_draws_from(inner) -> None:
    """Dream: probability of the draw, margin and entropy, all after temperature and cuts."""
    logits_KWV = logits_of(30, branches=2)
    found = scores_of(Sampled(inner, temperature=0.7, top_k=5), logits_KWV)
    tempered_KWV = logits_KWV / 0.7
    fifth_KW1 = tempered_KWV.topk(5).values[..., -1:]
    law_KWV = tempered_KWV.masked_fill(tempered_KWV < fifth_KW1, -torch.inf).softmax(-1)
    drawn_KW = law_KWV.gather(-1, found.ids_KW[..., None])[..., 0]
    assert torch.allclose(found.probability_KW, drawn_KW, atol=1e-6)
    first_KW, second_KW = law_KWV.topk(2).values.unbind(-1)
    ranks = {
        Confidence: drawn_KW,
        Margin: first_KW - second_KW,
        NegEntropy: torch.special.xlogy(law_KWV, law_KWV).sum(-1),
    }
    assert torch.allclose(found.confidence_KW, ranks[type(inner)], atol=1e-5)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_the_base_draws_the_same_whatever_stands_beside_it(sampler) -> None:
    score, logits_KWV = sampler(temperature=1.0), logits_of(30, branches=4)
    together, alone = scores_of(score, logits_KWV), scores_of(score, logits_KWV[-1:])
    assert torch.equal(together.ids_KW[-1:], alone.ids_KW)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_follow_from_seed_and_forward_alone(sampler) -> None:
    score, logits_KWV = sampler(temperature=1.0), logits_of(30)
    state, window = asked(logits_KWV.shape[1])
    first = score(logits_KWV, state, window).ids_KW
    torch.rand(5)  # moves the global stream
    assert torch.equal(score(logits_KWV, state, window).ids_KW, first)
    assert not torch.equal(scores_of(score, logits_KWV, seed=4).ids_KW, first)
    state.forwards += 1
    assert not torch.equal(score(logits_KWV, state, window).ids_KW, first)


# --- LLaDA's options about end tokens, and Dream's drawn positions --------------------------------

EOS, ENDS = [ROLES["eos"]], [ROLES["eos"], ROLES["eot"]]
REQUESTS = [Request(str(n), tuple(range(3, 3 + n)), 16) for n in (1, 4, 9)]
LLADA = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
DRAWN = 2_000


class Talkative(Table):
    def __init__(self) -> None:
        super().__init__(seed=2)
        self.place[:, ENDS] += 4.0

    def logits(self, canvas: Tensor) -> Tensor:
        """Return the logits of a canvas, (L, V)."""
        return self.place[: canvas.shape[1]] + self.token[canvas].mean(1)


def published(
    logits_of: Callable[[Tensor], Tensor],
    request: Request,
    steps: int,
    never: Collection[int] = (),
    last: Collection[int] = (),
) -> list[int]:
    """LLaDA's loop over blocks of 8, `steps` forwards each: the new tokens."""
    prompt = len(request.prompt_ids)
    canvas = torch.full((1, prompt + request.max_new_tokens), ROLES["mask"])
    canvas[0, :prompt] = torch.tensor(request.prompt_ids)
    for start in range(prompt, canvas.shape[1], 8):
        for step in range(steps):
            logits_LV = logits_of(canvas).double()
            logits_LV[:, [ROLES["mask"], *never]] = -torch.inf
            candidate_L = logits_LV.argmax(-1)
            logits_LV[:, [*last]] = -torch.inf
            sure_L = logits_LV.softmax(-1).gather(1, candidate_L[:, None])[:, 0]
            sure_L[canvas[0] != ROLES["mask"]] = -torch.inf
            many = 8 // steps + (step < 8 % steps)
            for place in sorted(range(start, start + 8), key=lambda at: -float(sure_L[at]))[:many]:
                canvas[0, place] = candidate_L[place]
    return canvas[0, prompt:].tolist()


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_guidance_is_the_published_formula(model, scale) -> None:
    request = REQUESTS[2]

    def guided(canvas: Tensor) -> Tensor:
        blind = canvas.clone()
        blind[:, : len(request.prompt_ids)] = ROLES["mask"]
        with_prompt, without = whole_forward(model, canvas)[0], whole_forward(model, blind)[0]
        return without + (scale + 1) * (with_prompt - without)

    generation = replace(LLADA, guidance=scale).generate(model, request)
    assert list(generation.ids) == published(guided, request, steps=8)
    assert {forward.branches for forward in generation.trace.forwards} == {2}
    assert LLADA.generate(model, request).ids != generation.ids


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"p{len(r.prompt_ids)}")
@pytest.mark.parametrize("steps", [8, 3])
@pytest.mark.parametrize("forbid", [None, "eos"])
@pytest.mark.parametrize("last", [None, "ends"])
def test_end_tokens_as_in_the_published_sampler(request_, steps, forbid, last) -> None:
    decoder = replace(LLADA, score=Confidence(last=last), select=TopK(steps), forbid=forbid)
    never, late = EOS if forbid else [], ENDS if last else []
    expected = published(Talkative().logits, request_, steps, never, late)
    assert list(decoder.generate(Talkative(), request_).ids) == expected


@pytest.mark.parametrize(
    "score", [Confidence(), Credit(Confidence()), Gumbel(temperature=1.0), Sampled()], ids=str
)
@pytest.mark.parametrize(("forbid", "gone"), [("eos", EOS), ("ends", ENDS)])
def test_a_forbidden_end_is_never_decoded(score, forbid, gone) -> None:
    free = replace(LLADA, score=score)
    ids = [i for r in REQUESTS for i in free.generate(Talkative(), r).ids]
    held = replace(free, forbid=forbid)
    without = [i for r in REQUESTS for i in held.generate(Talkative(), r).ids]
    assert set(ids) & set(gone) and not set(without) & set(gone)


def test_a_last_end_passes_no_threshold_and_is_no_less_a_candidate() -> None:
    state = DecodeState.start(REQUESTS[0], MODEL.special)
    logits_KWV = Talkative().place[None, :17].clone()
    window = Window(1, 17, 17, 8, 1, state.masked_KL[:, 1:], torch.ones(1, 2, dtype=torch.bool))
    scores = Confidence(), Confidence(last="ends")
    plain, held = (score(logits_KWV[:, 1:], state, window) for score in scores)
    ends_KW = torch.isin(plain.ids_KW, torch.tensor(ENDS))
    assert 0 < int(ends_KW.sum()) < 16 and torch.equal(plain.ids_KW, held.ids_KW)
    assert (held.probability_KW[ends_KW] == 0).all()
    assert (held.probability_KW > plain.probability_KW)[~ends_KW].all(), "shares of the rest grow"
    assert not Threshold(1e-9)(held, window, state)[ends_KW].any()


def test_eot_alone_may_come_last() -> None:
    logits_KWV = torch.zeros(1, 2, len(ROLES) + 91)
    logits_KWV[0, 0, ROLES["eos"]] = logits_KWV[0, 1, ROLES["eot"]] = 9.0
    state = DecodeState.start(Request("x", (3,), 2), MODEL.special)
    found = Confidence(last="eot").of(logits_KWV, logits_KWV.argmax(-1), state)
    assert found.probability_KW[0, 0] > 0.5 and found.probability_KW[0, 1] == 0


def drawn(alg_temp: float | None, steps: int, seed: int) -> tuple[int, ...]:
    """Positions that the first forward of a time schedule commits, of six masks and a token."""
    state, _ = opened(torch.ones(1, 7, dtype=torch.bool), seed=seed)
    eligible_KW = torch.arange(7)[None] != 2
    window = Window(0, 7, 7, 7, 0, eligible_KW, eligible_KW.any(1, keepdim=True))
    scores = Scores(state.tokens_KL, CONFIDENCE[None], CONFIDENCE[None])
    where_KW = Epsilon(steps, eps=0.01, alg_temp=alg_temp)(scores, window, state)
    return tuple(where_KW[0].nonzero()[:, 0].tolist())


CONFIDENCE = torch.tensor([0.9, 0.5, 1.0, 0.2, 0.8, 0.1, 0.6])


def without_replacement(many: int, alg_temp: float) -> dict[tuple[int, ...], float]:
    """Chance of every set of `many` masks, drawn one after the other from softmax(c / T)."""
    weight: Tensor = (CONFIDENCE.double() / alg_temp).exp()
    law: Counter[tuple[int, ...]] = Counter()
    masks = (0, 1, 3, 4, 5, 6)
    for order in permutations(masks, many):
        left, p = float(weight[list(masks)].sum()), 1.0
        for place in order:
            p, left = p * float(weight[place]) / left, left - float(weight[place])
        law[tuple(sorted(order))] += p
    return dict(law)


@pytest.mark.parametrize(("steps", "many"), [(3, 1), (2, 2)])
def test_positions_are_drawn_without_replacement(steps, many) -> None:
    found = Counter(drawn(0.5, steps, seed) for seed in range(DRAWN))
    assert {len(places) for places in found} == {many}
    assert chance(found, without_replacement(many, 0.5)) > 1e-3
    assert chance(found, without_replacement(many, 2.0)) < 1e-6


def test_drawn_positions_tend_to_the_surest_and_follow_from_the_seed() -> None:
    assert {drawn(1e-4, 3, seed) for seed in range(20)} == {drawn(None, 3, 0)} == {(0,)}
    draws = [drawn(0.5, 3, seed) for seed in range(20)]
    torch.rand(3)  # moves the global stream
    assert [drawn(0.5, 3, seed) for seed in range(20)] == draws and len(set(draws)) > 1
