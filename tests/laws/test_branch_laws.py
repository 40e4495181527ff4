"""Laws of branches: lookahead, and drafts that a masked model makes for itself (FreeDave, SSD,
S2D2).

Confidences are compared with their definition, drafting decoders with themselves without drafts;
which draft continues is recorded for FreeDave's own code (`tests/golden`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.request import Generation, Request, SpecialTokens
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import CREATION, Lookahead, SelfDraft
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    Best,
    Blocks,
    Confidence,
    Eos,
    Margin,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.confidence_rules import GAP
from dllm_bench.methods.fast_dllm import FirstOfBlock, VicinityCache
from dllm_bench.methods.history import HISTORY
from dllm_bench.methods.s2d2 import SelfVerified, drawn
from tests.helpers import ROLES, Watched, same, tiny_denoiser
from tests.pieces import opened, pieces
from tests.tiers import covering

REQUEST = Request("laws", tuple(range(3, 14)), 32)
SCHEDULES = (Blocks(8), Pipeline(8, 0.1, 0.5))
BASE = MaskedDecoder(NegEntropy(), Threshold(0.6), Blocks(8), NoCache())


def generate(model, explore: Any, **changes: Any) -> Generation:
    return replace(BASE, explore=explore, **changes).generate(model, REQUEST)


BY_BASE = [  # the same branches, with the base counted among them or alone
    (Lookahead(2, counts_base=True), Lookahead(1)),
    (Lookahead(4, counts_base=True), Lookahead(3)),
    (Lookahead(1, counts_base=True), Greedy()),
    (Lookahead(0, counts_base=True), Greedy()),
    (Lookahead(0), Greedy()),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(("explore", "plain"), BY_BASE, ids=str)
def test_the_base_may_be_counted_as_a_branch(model, explore, plain, schedule) -> None:
    found, wanted = (generate(model, one, schedule=schedule) for one in (explore, plain))
    assert same(found, wanted)
    branches = [[f.branches for f in one.trace.forwards] for one in (found, wanted)]
    assert (branches[0], max(branches[0])) == (branches[1], getattr(plain, "k", 0) + 1)


def picked(explore: Lookahead, confidence_KW: Tensor, masked_KW: Tensor) -> int:
    state, window = opened(masked_KW)
    ids_KW = torch.zeros_like(confidence_KW, dtype=torch.long)
    return winner_of(explore, Scores(ids_KW, confidence_KW, confidence_KW), window, state)


def winner_of(explore: Lookahead, scores: Scores, window: Window, state: DecodeState) -> int:
    return int(explore.pick(explore.rate(scores, window, state)))


def by_hand(explore: Lookahead, confidence_W: Tensor, masked_W: Tensor) -> float:
    masked = [float(c) for c, m in zip(confidence_W, masked_W, strict=True) if m]
    if not masked:
        return 1.0
    if explore.sliding is not None:
        n = min(explore.sliding, len(masked))
        return min(sum(masked[i : i + n]) / n for i in range(len(masked) - n + 1))
    lowest = sorted(masked)[: max(1, int(len(masked) * explore.fraction))]
    return sum(lowest) / len(lowest)


PARTS = [{}, *({"fraction": share} for share in (0.5, 0.01)), *({"sliding": n} for n in (1, 4, 99))]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_the_surest_branch_wins(part) -> None:
    generator, explore = torch.Generator().manual_seed(0), Lookahead(3, **part)
    winners = set()
    for share in (0.1, 0.3, 0.6, 1.0) * 25:
        confidence_KW = -torch.rand(4, 12, generator=generator)
        masked_KW = torch.rand(4, 12, generator=generator) < share
        expected = [by_hand(explore, *pair) for pair in zip(confidence_KW, masked_KW, strict=True)]
        winner = picked(explore, confidence_KW, masked_KW)
        assert expected[winner] == pytest.approx(max(expected), abs=1e-6)
        winners.add(winner)
    assert winners == {0, 1, 2, 3}


def test_ties_go_to_the_earlier_lookahead_and_the_base_is_last() -> None:
    level_KW, masked_KW = torch.full((3, 4), 0.5), torch.ones(3, 4, dtype=torch.bool)
    for explore in (Lookahead(2), Lookahead(2, sliding=2), Lookahead(2, fraction=0.5)):
        assert picked(explore, level_KW, masked_KW) == 0
    level_KW[1] += 0.1
    assert picked(Lookahead(2), level_KW, masked_KW) == 1


def test_branch_confidence_is_rounded_once_to_the_precision_of_the_scores() -> None:
    """A difference of the means below bfloat16's resolution is a tie there."""
    close_KW = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.502]])
    masked_KW = torch.ones(2, 4, dtype=torch.bool)
    assert picked(Lookahead(1), close_KW, masked_KW) == 1
    assert picked(Lookahead(1), close_KW.bfloat16(), masked_KW) == 0


def test_ranking_and_vote_read_the_raw_confidence() -> None:
    """Of a score that keeps none it is the confidence."""
    fused_KW = torch.tensor([[0.9, 0.1], [0.2, 0.1]])
    raw_KW = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    state, window = opened(torch.ones(2, 2, dtype=torch.bool))
    for reads, kept_KW, best in (("fused", raw_KW, 0), ("raw", raw_KW, 1), ("raw", None, 0)):
        scores = Scores(torch.ones(2, 2, dtype=torch.long), fused_KW, fused_KW, kept_KW)
        explore = Lookahead(1, reads=reads)
        assert winner_of(explore, scores, window, state) == best
        base, created = torch.tensor(0), replace(explore, alpha=1.0)
        branches = created.spawn(state.pick(base), (scores.pick(base), window.pick(base)))
        assert branches.born_KL[0].tolist().index(0) == best
        assert branches.memo[CREATION][0] == max((raw_KW, fused_KW)[best == 0][0])


# --- drafts of the model's own --------------------------------------------------------------------

REQUESTS = [Request(f"{n}", tuple(range(3, 3 + n)), 32) for n in (1, 8, 11)]
DRAFTS = MaskedDecoder(Confidence(), TopK(), Blocks(8), DualCache(), SelfDraft(4))
SPECIAL = SpecialTokens(**ROLES)
LOSSLESS = {
    "dual": DRAFTS,
    "prefix": replace(DRAFTS, cache=PrefixCache()),
    "prefix, renewed": replace(DRAFTS, cache=PrefixCache(every=1)),
    "vicinity": replace(DRAFTS, cache=VicinityCache(before=2, after=4, warmup=0)),
    "none": replace(DRAFTS, cache=NoCache()),
    "one block": replace(DRAFTS, cache=NoCache(), schedule=Blocks(None)),
    "absolute blocks": replace(DRAFTS, schedule=Blocks(8, absolute=True, whole=True)),
    "exact": replace(DRAFTS, cache=BlockCache(), schedule=Blocks(8, sees_future=False)),
    "approximate": replace(DRAFTS, cache=BlockCache("full"), schedule=Blocks(8, sees_future=False)),
    "more than a block": replace(DRAFTS, explore=SelfDraft(11)),
    "two": replace(DRAFTS, explore=SelfDraft(2)),
    "entropy": replace(DRAFTS, score=NegEntropy()),
    "margin": replace(DRAFTS, score=Margin()),
    "Dream": replace(DRAFTS, select=FirstOfBlock(TopK()), explore=SelfDraft(5)),
    "high threshold": replace(DRAFTS, select=Threshold(1.0, strict=True)),
    "guided": replace(DRAFTS, cache=NoCache(), guidance=0.5),
}
of_layout = lru_cache(partial(tiny_denoiser, seed=1))


def without(decoder: MaskedDecoder) -> MaskedDecoder:
    return replace(decoder, explore=Greedy())


@pytest.mark.parametrize(("name", "layout"), covering(3, product(LOSSLESS, ("llada", "dream"))))
def test_one_token_per_step_is_lossless(name: str, layout: str) -> None:
    decoders, saved = (LOSSLESS[name], without(LOSSLESS[name])), 0
    for request in REQUESTS:
        fast, slow = (one.generate(of_layout(layout), request) for one in decoders)
        assert fast.ids == slow.ids and len(fast.trace) <= len(slow.trace)
        saved += len(slow.trace) - len(fast.trace)
    assert saved > 0, "no draft was accepted"


@pytest.mark.parametrize("stop", [Eos(), Eos("token")], ids=str)
def test_a_text_that_ends_is_the_same_up_to_its_end(stop: Eos) -> None:
    """Drafts may commit what lies behind the end token in the forward that commits it."""
    decoder = replace(DRAFTS, stop=stop)
    for request in REQUESTS:
        ending = len(request.prompt_ids) + 13
        model, both = Watched(of_layout("llada"), ending), (decoder, without(decoder))
        fast, slow = (one.generate(model, request) for one in both)
        end = slow.cut["eos"]
        assert fast.cut["eos"] == end < 32 and fast.ids[:end] == slow.ids[:end]


def chosen(select: Select, scores: Scores, window: Window, state: DecodeState) -> list[Tensor]:
    """Return what a selector commits, and what it would if it chose nothing."""
    chosen_KW = select(scores, window, state)
    return [chosen_KW & window.eligible_KW, *select.on_stall(scores, window, state)]


@pytest.mark.parametrize("name", pieces("select"))
def test_selectors_choose_in_each_branch_by_its_scores(name: str) -> None:
    """Drafts are verified by what the selector does in every branch at once."""
    select, generator = pieces("select")[name], torch.Generator().manual_seed(0)
    masked_KW = torch.rand(3, 8, generator=generator) < 0.7
    values = torch.rand(4, 3, 8, generator=generator)
    ids_KW = torch.randint(0, 80, (3, 8), generator=generator)
    scores = Scores(ids_KW, *values[:2], neg_entropy_KW=-values[2])
    tokens_KW = torch.where(masked_KW, SPECIAL.mask, scores.ids_KW)
    canvas_2KW = torch.stack([tokens_KW, torch.where(masked_KW, -1, 0)])
    state = DecodeState(canvas_2KW, 0, SPECIAL, forwards=1)
    state.reference_KL = torch.randint(0, 80, (3, 8), generator=generator)
    state.memo[GAP], state.memo[HISTORY] = values[3, :, 0], values.permute(1, 2, 0)
    window = Window(0, 8, 8, 8, 0, masked_KW)
    together = chosen(select, scores, window, state.take(torch.arange(3)))
    for k in map(torch.tensor, range(3)):
        alone = chosen(select, scores.pick(k), window.pick(k), state.pick(k))
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[k])


# --- S2D2: never verified it is its base, always verified it decodes token by token ---------------

SURE = Union(Threshold(0.3, strict=True), Best(1))
ALWAYS = SelfVerified(inner=SURE, causal="decoded")
BY_8 = Blocks(8, sees_future=False, absolute=True, whole=True)
VERIFIED = MaskedDecoder(Confidence(), SURE, BY_8, BlockCache())


def verified(select: Select, **changes: Any) -> list[Generation]:
    decoder = replace(VERIFIED, select=select, **changes)
    return [decoder.generate(of_layout("sdar"), request) for request in REQUESTS]


def texts(generations: list[Generation]) -> list[Any]:
    return [(one.ids, one.born, len(one.trace)) for one in generations]


@pytest.mark.parametrize("never", [{"least": 9}, {"worth": 9.0}], ids=["least", "worth"])
def test_drafts_that_are_never_verified_are_the_base(never: dict[str, Any]) -> None:
    assert texts(verified(SelfVerified(inner=SURE, **never))) == texts(verified(SURE))


def test_drafts_that_are_always_verified_are_blocks_of_one_token() -> None:
    one_by_one = verified(Best(1), schedule=replace(BY_8, block=1))
    found = verified(ALWAYS)
    for own, wanted in zip(found, one_by_one, strict=True):
        assert own.ids[: len(wanted.ids)] == wanted.ids
    assert sum(len(one.trace) for one in found) < 2 * sum(len(one.trace) for one in one_by_one)


@pytest.mark.parametrize("causal", ["none", "finished", "decoded"])
def test_an_exact_cache_changes_no_verification(causal: Any) -> None:
    select = replace(ALWAYS, causal=causal, worth=-0.5)
    none = verified(select, cache=NoCache("block_causal"))
    assert texts(verified(select)) == texts(none)


def test_a_verification_is_filled_up() -> None:
    """By the best drafts or the first, and by all above a threshold."""
    three = replace(ALWAYS, temperature=1.0, number=3)
    first, best = (verified(replace(three, fill=fill)) for fill in ("first", "best"))
    above = verified(replace(three, fill_above=0.0))
    for request, generation in zip(REQUESTS * 2, (*first, *best), strict=True):
        counts, prompt = Counter(generation.born), len(request.prompt_ids)
        blocks = (generation.born[max(at - prompt, 0) : at + 8 - prompt] for at in range(0, 56, 8))
        ends = {max(block) for block in blocks if block}
        assert all(count >= 3 for born, count in counts.items() if born not in ends)
    for generation in first:
        assert list(generation.born) == sorted(generation.born)
    assert texts(first) != texts(best)
    assert sum(len(one.trace) for one in above) < sum(len(one.trace) for one in best)


def test_no_seed_changes_what_is_not_drawn() -> None:
    """The released greedy loop draws."""
    for temperature in (0.0, 1.0):
        decoder = replace(VERIFIED, select=replace(ALWAYS, temperature=temperature))
        requests = [replace(REQUESTS[2], seed=seed) for seed in range(4)]
        found = {decoder.generate(of_layout("sdar"), request).ids for request in requests}
        assert (len(found) > 1) == decoder.summary().uses_seed == (temperature > 0)


def test_accepted_and_sampled_tokens_have_the_law_of_the_verifier() -> None:
    draft_V, law_V = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]])
    count, generator = 4000, torch.Generator().manual_seed(0)
    drafts_K = torch.multinomial(draft_V, count, replacement=True, generator=generator)
    accepted_K = torch.rand(count, generator=generator) < (law_V / draft_V)[drafts_K]
    state = DecodeState.start(REQUESTS[0], SPECIAL)
    sampled_K = drawn(law_V.expand(count, -1), draft_V.expand(count, -1), state)
    found_V = torch.where(accepted_K, drafts_K, sampled_K).bincount(minlength=4)
    wanted_V = count * law_V
    assert ((found_V - wanted_V) ** 2 / wanted_V).sum() < chi2.ppf(1 - 1e-4, 3)
