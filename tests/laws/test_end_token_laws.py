"""Laws of LLaDA's two options about end tokens and of Dream's drawn positions.

LLaDA's sampler is restated from its description (`logits_eos_inf`, `confidence_eos_eot_inf`,
temperature 0), step by step in float64; Dream's draw of positions is tested against the law of
drawing without replacement by chi-square.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores
from dllm_bench.core.request import Request, SpecialTokens
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold, TopK
from dllm_bench.methods.dream import Epsilon, Gumbel, Sampled
from dllm_bench.methods.history import Credit
from tests.helpers import ROLES
from tests.pieces import Table

MODEL = Table()
EOS, ENDS = [ROLES["eos"]], [ROLES["eos"], ROLES["eot"]]
REQUESTS = [Request(str(n), tuple(range(3, 3 + n)), 16) for n in (1, 4, 9)]
LLADA = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
DRAWN = 2_000


class Talkative(Table):
    """A table that likes to end its texts, with either token."""

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
            seen_V = table.token[canvas].mean(1)
            logits_LV = (table.place[: canvas.shape[1]] + seen_V).double()
            logits_LV[:, [ROLES["mask"], *never]] = -torch.inf
            candidate_L = logits_LV.argmax(-1)
            logits_LV[:, last] = -torch.inf
            sure_L = logits_LV.softmax(-1).gather(1, candidate_L[:, None])[:, 0]
            block = torch.arange(start, start + 8)
            sure_L[canvas[0] != ROLES["mask"]] = -torch.inf
            many = 8 // steps + (step < 8 % steps)
            for place in sorted(block.tolist(), key=lambda at: -float(sure_L[at]))[:many]:
                canvas[0, place] = candidate_L[place]
    return canvas[0, prompt:].tolist()


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: f"p{len(r.prompt_ids)}")
@pytest.mark.parametrize("steps", [8, 3])
@pytest.mark.parametrize(
    ("forbid", "last"), [(None, None), ("eos", None), (None, "ends"), ("eos", "ends")]
)
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
    assert set(ids) & set(gone)
    assert not set(without) & set(gone)


@pytest.mark.parametrize("score", [Confidence(last="ends"), Gumbel(Confidence(last="ends"))])
def test_a_last_end_is_committed_after_all_else_of_its_block(score) -> None:
    """One token per forward: from its first end token on, a block's later forwards hold ends."""
    found = 0
    for request in REQUESTS:
        generation = replace(LLADA, score=score).generate(Talkative(), request)
        for start in range(0, 16, 8):
            pairs = zip(generation.born[start : start + 8], generation.ids[start:], strict=False)
            ends = [token in ENDS for _, token in sorted(pairs)]
            assert ends == sorted(ends)
            found += sum(ends)
    assert found


def test_a_last_end_passes_no_threshold_and_is_no_less_a_candidate() -> None:
    state = DecodeState.start(REQUESTS[0], MODEL.special)
    logits_KWV = Talkative().place[None, :17].clone()
    window = Window(1, 17, 17, 0, 8, 1, state.masked_KL[:, 1:], torch.ones(1, 2, dtype=torch.bool))
    plain, held = (s(logits_KWV[:, 1:], state, window) for s in (Confidence(), LAST))
    ends_KW = torch.isin(plain.ids_KW, torch.tensor(ENDS))
    assert 0 < int(ends_KW.sum()) < 16
    assert torch.equal(plain.ids_KW, held.ids_KW)
    assert (held.probability_KW[ends_KW] == 0).all()
    assert (held.probability_KW > plain.probability_KW)[~ends_KW].all(), "shares of the rest grow"
    assert not Threshold(1e-9)(held, window, state)[ends_KW].any()


LAST = Confidence(last="ends")


def test_eot_alone_may_come_last() -> None:
    logits_KWV = torch.zeros(1, 2, len(ROLES) + 91)
    logits_KWV[0, 0, ROLES["eos"]] = logits_KWV[0, 1, ROLES["eot"]] = 9.0
    state = DecodeState.start(Request("x", (3,), 2), MODEL.special)
    found = Confidence(last="eot").of(logits_KWV, logits_KWV.argmax(-1), state)
    assert found.probability_KW[0, 0] > 0.5 and found.probability_KW[0, 1] == 0


def drawn(alg_temp: float | None, steps: int, seed: int) -> tuple[int, ...]:
    """Positions that the first forward of a time schedule commits, of six masks and a token."""
    ids_KL = torch.full((1, 7), ROLES["mask"])
    state = DecodeState(ids_KL, torch.full_like(ids_KL, MASKED), 0, SpecialTokens(**ROLES))
    state.seed = seed
    eligible_KW = torch.arange(7)[None] != 2
    window = Window(0, 7, 7, 0, 7, 0, eligible_KW, eligible_KW.any(1, keepdim=True))
    scores = Scores(ids_KL, CONFIDENCE[None], CONFIDENCE[None])
    where_KW = Epsilon(steps, eps=0.01, alg_temp=alg_temp)(scores, window, state)
    return tuple(where_KW[0].nonzero()[:, 0].tolist())


CONFIDENCE = torch.tensor([0.9, 0.5, 1.0, 0.2, 0.8, 0.1, 0.6])


def chance(found: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chance of counts at least as far from the law (chi-square)."""
    assert set(found) <= set(law)
    total, share = found.total(), sum(law.values())
    expected = [total * p / share for p in law.values()]
    return float(chisquare([found[key] for key in law], expected).pvalue)


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
    assert [drawn(0.5, 3, seed) for seed in range(20)] == draws
    assert len(set(draws)) > 1


@pytest.mark.parametrize("score", [Confidence(), Gumbel(temperature=1.0)], ids=str)
def test_a_time_schedule_with_drawn_positions_commits_its_counts(score) -> None:
    whole = replace(LLADA, score=score, schedule=Blocks(None))
    drawn_, plain = (
        replace(whole, select=Epsilon(4, alg_temp=t)).generate(MODEL, REQUESTS[1])
        for t in (0.3, None)
    )
    assert Counter(drawn_.born) == Counter(plain.born)
    assert drawn_.born != plain.born
