"""Laws of drawing tokens and positions, and of end tokens that are forbidden or come last.

Distributions are tested by chi-square on many positions with equal logits; the same test rejects a
distribution of another temperature, so it can fail.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Margin, NegEntropy, Threshold, TopK
from dllm_bench.methods.dream import Epsilon, Gumbel, Sampled
from dllm_bench.methods.history import Credit
from tests.helpers import ROLES
from tests.pieces import Table, opened

PLAIN = (Confidence(), Margin(), NegEntropy())
SAMPLERS = (Gumbel, Sampled)
POSITIONS = 20_000
LAW = torch.tensor([0.45, 0.2, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])


def asked(width: int, branches: int = 1, seed: int = 3) -> tuple[DecodeState, Window]:
    return opened(torch.ones(branches, width, dtype=torch.bool), seed=seed)


def scores_of(score: Score, logits_KWV: Tensor, seed: int = 3) -> Scores:
    return score(logits_KWV, *asked(logits_KWV.shape[1], len(logits_KWV), seed))


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


MODEL = Table()
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


def random_logits(branches: int = 2, width: int = 30, vocab: int = 96) -> Tensor:
    logits_KWV = 4 * torch.randn(branches, width, vocab, generator=torch.Generator().manual_seed(1))
    logits_KWV[..., ROLES["mask"]] = -torch.inf
    return logits_KWV


@pytest.mark.parametrize("inner", PLAIN, ids=str)
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_temperature_zero_is_the_inner_score(sampler, inner) -> None:
    found, plain = (scores_of(s, random_logits()) for s in (sampler(inner), inner))
    for name in ("ids_KW", "probability_KW", "confidence_KW"):
        assert torch.equal(getattr(found, name), getattr(plain, name))


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.6}], ids=str)
def test_cuts_work_without_temperature(cut) -> None:
    """The surest token is the same, its probability is that among the tokens that stay."""
    found, plain = (scores_of(s, random_logits()) for s in (Sampled(**cut), Confidence()))
    assert torch.equal(found.ids_KW, plain.ids_KW)
    assert (found.probability_KW > plain.probability_KW).any()
    assert (found.probability_KW >= plain.probability_KW - 1e-6).all()


def test_probabilities_of_gumbel_are_those_without_temperature() -> None:
    logits_KWV = random_logits(branches=1)
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
    logits_KWV = random_logits()
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
    score, logits_KWV = sampler(temperature=1.0), random_logits(branches=4)
    together, alone = scores_of(score, logits_KWV), scores_of(score, logits_KWV[-1:])
    assert torch.equal(together.ids_KW[-1:], alone.ids_KW)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_draws_follow_from_seed_and_forward_alone(sampler) -> None:
    score, logits_KWV = sampler(temperature=1.0), random_logits(branches=1)
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


def restated(request: Request, steps: int, never: list[int], last: list[int]) -> list[int]:
    """LLaDA's loop over blocks of 8, `steps` forwards each: the new tokens."""
    table, prompt = Talkative(), len(request.prompt_ids)
    canvas = torch.full((1, prompt + request.max_new_tokens), ROLES["mask"])
    canvas[0, :prompt] = torch.tensor(request.prompt_ids)
    for start in range(prompt, canvas.shape[1], 8):
        for step in range(steps):
            logits_LV = (table.place[: canvas.shape[1]] + table.token[canvas].mean(1)).double()
            logits_LV[:, [ROLES["mask"], *never]] = -torch.inf
            candidate_L = logits_LV.argmax(-1)
            logits_LV[:, last] = -torch.inf
            sure_L = logits_LV.softmax(-1).gather(1, candidate_L[:, None])[:, 0]
            sure_L[canvas[0] != ROLES["mask"]] = -torch.inf
            many = 8 // steps + (step < 8 % steps)
            for place in sorted(range(start, start + 8), key=lambda at: -float(sure_L[at]))[:many]:
                canvas[0, place] = candidate_L[place]
    return canvas[0, prompt:].tolist()


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"p{len(r.prompt_ids)}")
@pytest.mark.parametrize("steps", [8, 3])
@pytest.mark.parametrize("forbid", [None, "eos"])
@pytest.mark.parametrize("last", [None, "ends"])
def test_end_tokens_as_in_the_published_sampler(request_, steps, forbid, last) -> None:
    decoder = replace(LLADA, score=Confidence(last=last), select=TopK(steps), forbid=forbid)
    expected = restated(request_, steps, EOS if forbid else [], ENDS if last else [])
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
