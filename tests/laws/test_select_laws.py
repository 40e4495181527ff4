"""Laws of the selectors: schedules of steps, budgets, runs of masks, and the adaptive samplers; and
of Learn2PD's pieces: learned filter, oracle, end-of-text prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.decoder import Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Greedy
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.branches import Lookahead
from dllm_bench.methods.caches import DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    Best,
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
    WithInner,
)
from dllm_bench.methods.confidence_rules import GAP, AnswerGap, EarlyExit, EntropyBound, LocalLeap
from dllm_bench.methods.d3llm import EntropyThreshold, MultiBlock
from dllm_bench.methods.dream import Epsilon, Origin
from dllm_bench.methods.fast_dllm import Hierarchy, Ration
from dllm_bench.methods.fast_dllm_pp import FrechetBound
from dllm_bench.methods.history import KLHistory, Stable
from dllm_bench.methods.learn2pd import EndOfTextPrediction, Filter, Oracle
from dllm_bench.methods.position_rules import Calibrated, Dilated, TokenCounts, pattern
from tests.helpers import ROLES, Watched, same
from tests.pieces import RandomHead, Table, opened
from tests.tiers import covering

REQUEST = Request("laws", tuple(range(3, 14)), 32)
OFF = 1.0  # no probability is above it
WHOLE = MaskedDecoder(Confidence(), TopK(), Blocks(None), NoCache())
BY_8 = replace(WHOLE, schedule=Blocks(8))
PIPED = replace(WHOLE, select=Best(1), schedule=Pipeline(8, 0.0, 0.0))
BY_ENTROPY = replace(BY_8, score=NegEntropy())
SEVERAL = replace(BY_ENTROPY, select=Best(1), schedule=MultiBlock(8, 0.0))
OUT = 1e9  # a gap that no logits reach
NEVER, ALWAYS = -1.0, 1e9  # nats: no entropy is below the first, none above the second


def decoded(model, decoder: MaskedDecoder, request: Request = REQUEST, **pieces) -> Generation:
    return replace(decoder, **pieces).generate(model, request)


def per_forward(generation: Generation) -> list[int]:
    return [generation.born.count(step) for step in range(len(generation.trace))]


@dataclass(frozen=True)
class Head:
    """A filter whose outputs are a function of what it reads."""

    of: Callable[[Tensor], Tensor]
    block: int = 8

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        return self.of(confidence_KNB)


def constant(logit: float) -> Head:
    return Head(lambda confidence_KNB: torch.full_like(confidence_KNB, logit))


REFUSES, STALLS = constant(-torch.inf), ("filter", "confidence")
LAST_FIRST = Head(lambda shown_KNB: torch.arange(8.0).expand_as(shown_KNB) - 99)
"""Trusts nothing, the last positions least of all not."""

REDUCED = [  # a decoder, and two selectors of which it decodes the same
    (WHOLE, Epsilon(), TopK()),
    (BY_8, Ration(Threshold(0.3), 1), Threshold(0.3)),
    (BY_8, FrechetBound(1), TopK()),
    *((BY_8, Hierarchy(tau, low=OFF), Threshold(tau, strict=True)) for tau in (0.3, 0.6, OFF)),
    (BY_ENTROPY, EntropyThreshold(NEVER), TopK()),
    (BY_ENTROPY, EntropyThreshold(NEVER, best=True), TopK()),
    (BY_ENTROPY, EntropyBound(NEVER), TopK()),
    (BY_ENTROPY, EntropyBound(0.0), TopK()),
    (BY_ENTROPY, EntropyBound(0.0, left_out="last"), TopK()),
    *((BY_ENTROPY, LocalLeap(tau, 1 - tau, 4), TopK()) for tau in (0.0, 1.0)),
    (BY_8, LocalLeap(0.6, 0.3, 2**53), LocalLeap(0.6, 0.3, 8)),
    *(  # in order of entropy the largest is the last
        (BY_ENTROPY, EntropyBound(gamma, left_out="largest"), EntropyBound(gamma, left_out="last"))
        for gamma in (0.5, 2.0, 8.0)
    ),
    # of equal logits the surest position counts
    *((BY_8, Filter(head, stall=s), TopK()) for head in (REFUSES, constant(-30.0)) for s in STALLS),
    (BY_8, Filter(constant(0.0), tau=0.5), TopK()),  # the threshold is strict
    (BY_8, Filter(LAST_FIRST, stall="confidence"), TopK()),
    (BY_8, Union(Filter(REFUSES), TopK()), TopK()),
]


@pytest.mark.parametrize(("decoder", "select", "simpler"), REDUCED)
def test_a_selector_may_reduce_to_a_simpler_one(model, decoder, select, simpler) -> None:
    assert same(decoded(model, decoder, select=select), decoded(model, decoder, select=simpler))


COUNTS = [  # a decoder, a selector, and how many positions each forward commits
    *((WHOLE, Epsilon(steps, idle=True), [0] + [1] * 30 + [2]) for steps in (None, 32)),
    (WHOLE, Epsilon(16, idle=True), [1] + [2] * 14 + [3]),
    (WHOLE, Epsilon(1), [32]),
    (WHOLE, Origin(1), [32]),
    (WHOLE, Ration(Threshold(0.0), 8), [4] * 8),
    (WHOLE, Ration(Threshold(0.0), 5), [6, 6, 7, 6, 7]),
    (BY_8, Ration(Threshold(0.0), 3), [2, 3, 3] * 4),
    (BY_ENTROPY, EntropyThreshold(ALWAYS), [8] * 4),
    (BY_ENTROPY, EntropyBound(ALWAYS), [8] * 4),
    (BY_ENTROPY, EntropyBound(NEVER, least=4), [4] * 8),
    (BY_ENTROPY, Dilated(base=1), [8] * 4),
    (BY_ENTROPY, Dilated(), [2, 2, 4] * 4),
    (BY_8, Dilated(least=1.1), [0, 0, 4, 4] * 4),  # levels that wait are committed after the last
    (SEVERAL, EntropyThreshold(9.0), [16, 8, 8]),  # one is open before the first round
    (PIPED, Best(1), [1, 2, 3, *[4] * 5, 3, 2, 1]),
]


@pytest.mark.parametrize(("decoder", "select", "counts"), COUNTS)
def test_each_forward_commits_as_many_as_the_selector_says(model, decoder, select, counts) -> None:
    assert per_forward(decoded(model, decoder, select=select)) == counts


def test_steps_begin_anew_where_lookahead_finished_a_block() -> None:
    """The window still begins with that block; in the next one it does not."""
    sure_W, masked_W = torch.full((16,), 0.8), torch.arange(16) >= 8
    scores, ahead, state = on_scores(sure_W, masked_W, block=8)
    scores_8, first, _ = on_scores(sure_W[:8], ~masked_W[:8], block=8)
    ration = Ration(Threshold(0.5), steps=4)
    assert int(ration(scores_8, first, state).sum()) == 2
    state.forwards += 3
    assert int(ration(scores, ahead, state).sum()) == 2, "the first share of its eight"
    state.forwards += 1
    after = replace(first, start=8, stop=16, eligible_KW=masked_W[None, 8:])
    assert int(ration(scores_8, after, state).sum()) == 4, "two shares, nothing was written"


def on_scores(sure_W: Tensor, masked_W: Tensor, block: int) -> tuple[Scores, Window, DecodeState]:
    """Return what a selector is called with, from one row of probabilities."""
    state, window = opened(masked_W[None], block)
    ids_KW = torch.zeros(1, len(sure_W), dtype=torch.long)
    return Scores(ids_KW, sure_W[None], sure_W[None]), window, state


def test_more_steps_than_can_be_useful_are_refused(model) -> None:
    with pytest.raises(DllmBenchError, match="65 steps for 32 positions.*set steps to 32"):
        decoded(model, WHOLE, select=Epsilon(65, idle=True))
    assert len(decoded(model, WHOLE, select=Epsilon(64, idle=True)).trace) == 64


@dataclass(frozen=True)
class AskedAnyway(WithInner):
    """Does what `inner` does, and is asked for its stall rule in every forward."""

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return self.inner(scores, window, state)


STEADY = [
    *(TopK(steps) for steps in (None, 1, 3, 8, 20)),
    Union(Threshold(OFF, strict=True), TopK()),
    Union(TopK(5), Threshold(0.3)),
]


@pytest.mark.parametrize("select", STEADY, ids=str)
@pytest.mark.parametrize("explore", [Greedy(), Lookahead(2)], ids=["greedy", "lookahead"])
def test_who_never_stalls_has_no_need_of_the_rule(select, explore) -> None:
    assert Condition.NEVER_STALLS in select.gives
    for schedule in (Blocks(8), Blocks(1, False), Blocks(8, False, absolute=True), Blocks(None)):
        spared = replace(WHOLE, select=select, explore=explore, schedule=schedule)
        asked = replace(spared, select=AskedAnyway(select))
        found, wanted = (one.generate(Table(), REQUEST) for one in (spared, asked))
        assert same(found, wanted) and all(forward.forced == 0 for forward in wanted.trace.forwards)
        assert all(per_forward(found))


def test_others_are_asked() -> None:
    others = (Threshold(OFF), Epsilon(4), Ration(TopK(), 4), Union(Threshold(OFF), Epsilon(4)))
    assert not any(Condition.NEVER_STALLS in select.gives for select in others)


# --- adaptive samplers ----------------------------------------------------------------------------


def test_in_order_of_confidence_an_earlier_one_may_have_more_entropy() -> None:
    scores, window, state = on_scores(torch.tensor([0.9, 0.8, 0.7]), torch.ones(3) > 0, block=3)
    scores = replace(scores, neg_entropy_KW=-torch.tensor([[1.0, 0.2, 0.2]]))
    for form, counts in (("largest", [1, 2, 3, 3, 3]), ("last", [1, 1, 1, 2, 3])):
        selects = (EntropyBound(gamma, left_out=form) for gamma in (0.1, 0.3, 0.5, 1.1, 1.3))
        assert [int(one(scores, window, state).sum()) for one in selects] == counts


@pytest.mark.parametrize("warm_up", [False, True])
def test_everything_ready_waits_for_its_history(model, warm_up) -> None:
    """The first divergence of a request is never small; later blocks bring theirs along."""
    select, score = Stable(TopK(4), 0.0, 9.0, warm_up=warm_up), KLHistory(Confidence(), 3)
    generation = decoded(model, BY_ENTROPY, score=score, select=select)
    assert per_forward(generation) == [2, 2, 2, 2] + ([2, 2, 4] * 3 if warm_up else [8] * 3)


@pytest.mark.parametrize("kind", ["dilated", "binary"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 31, 32])
def test_a_pattern_has_every_position_in_spread_levels(kind, size) -> None:
    level_P, levels = pattern(size, kind, 2, 1, torch.device("cpu"))
    sizes = [int((level_P == level).sum()) for level in range(levels)]
    assert sum(sizes) == size and 0 not in sizes
    assert levels == 1 or sizes[-1] >= sizes[-2]
    for level in range(levels - 1):
        apart = (level_P == level).nonzero()[:, 0].diff()
        assert apart.numel() == 0 or apart.min() > 1, "only the last level joins neighbours"


PROPHET = replace(BY_ENTROPY, score=AnswerGap(), schedule=Blocks(None))
NEVER_CLEAR = EarlyExit(TopK(), 8, OUT, OUT, OUT)


def test_an_answer_that_is_never_clear_is_decoded_to_its_end(model) -> None:
    never = decoded(model, PROPHET, select=NEVER_CLEAR)
    assert same(never, decoded(model, BY_ENTROPY, score=Confidence()))
    for when, forwards in {"early": 1, "mid": 11, "late": 22}.items():  # 0, 0.33, 0.67 of 32
        clear = decoded(model, PROPHET, select=replace(NEVER_CLEAR, **{when: 0.0}))
        assert len(clear.trace) == forwards


def test_forwards_over_pinned_tokens_count_and_are_left_out(model) -> None:
    select = replace(NEVER_CLEAR, pinned=((3, 7), (20, 9)))
    generation = decoded(model, PROPHET, select=select)
    assert ([generation.ids[place] for place in (3, 20)], len(generation.trace)) == ([7, 9], 30)
    assert len(decoded(model, PROPHET, select=replace(select, late=0.0)).trace) == 21, "step 22"
    with pytest.raises(DllmBenchError, match="pins a token at new position 32"):
        decoded(model, PROPHET, select=replace(select, pinned=((32, 5),)))
    for token in (-1, model.vocab_size, model.special.mask):
        with pytest.raises(DllmBenchError, match=f"pins token {token}, which is the mask or"):
            decoded(model, PROPHET, select=replace(select, pinned=((3, token),)))


def test_the_gap_is_that_of_the_answer(model) -> None:
    logits_KWV = torch.randn(2, 32, 50, generator=torch.Generator().manual_seed(0))
    eligible_KW = torch.arange(32) % torch.tensor([[2], [3]]) == 0
    two = logits_KWV.topk(2).values
    gap_KW = two[..., 0] - two[..., 1]
    window, state = SimpleNamespace(eligible_KW=eligible_KW), SimpleNamespace(memo={})
    of_masks_K = [gap_KW[k][eligible_KW[k]].mean() for k in range(2)]
    for answer, expected in ((None, of_masks_K), (30, gap_KW[:, 30:].mean(1))):
        AnswerGap(answer=answer)(logits_KWV, state, window)  # type: ignore[arg-type]
        torch.testing.assert_close(state.memo[GAP], torch.stack(list(expected)))


@pytest.mark.parametrize("position", ["exponential", "linear"])
def test_calibration_without_surprise_goes_from_left_to_right(model, position, tmp_path) -> None:
    counts = tmp_path / "counts.json"
    right = {"num_token": 100, "p_baseline_dict": {"5": 50}}
    counts.write_text(json.dumps(right))
    left = Calibrated(TokenCounts(str(counts)), 1.0, 1e-3, position)
    last = left._placed(torch.ones(1, 6), opened(torch.ones(1, 6, dtype=torch.bool), 4)[1])[0, 4:]
    assert position == "exponential" or last.tolist() == [1, 0.5], "a short block after another"
    assert decoded(model, BY_ENTROPY, score=left).born == tuple(range(32))
    pieces = {"score": replace(left, decay=0.5, cap=9.0), "schedule": Blocks(100)}  # 32 positions
    assert same(decoded(model, WHOLE, **pieces), decoded(model, WHOLE, score=pieces["score"]))
    with pytest.raises(DllmBenchError, match="should have sha256 0000"):
        TokenCounts(str(counts), "0000")
    wrong = {"num_token": 0}, {"p_baseline_dict": {"5": -1}}, {"p_baseline_dict": {"-5": 1}}
    for text in ("[" * 100_000, *(json.dumps(right | one) for one in wrong)):
        counts.write_text(text)
        with pytest.raises(DllmBenchError, match="There are no token counts.*above 0"):
            TokenCounts(str(counts))


# --- Learn2PD: filter -----------------------------------------------------------------------------


def test_a_filter_that_accepts_all_needs_one_forward_per_block(model) -> None:
    generation = decoded(model, BY_8, select=Filter(constant(torch.inf)))
    assert generation.born == tuple(i // 8 for i in range(32))


def test_without_acceptance_the_filter_ranks(model) -> None:
    """Last position of a block first."""
    ranked = decoded(model, BY_8, select=Filter(LAST_FIRST))
    assert ranked.born == tuple(8 * (i // 8) + 7 - i % 8 for i in range(32))
    chosen = decoded(model, BY_8, select=Union(Filter(REFUSES), TopK()))
    for generation, forced in ((ranked, 1), (chosen, 0)):
        assert [forward.forced for forward in generation.trace.forwards] == [forced] * 32


def test_the_filter_reads_the_models_probabilities(model) -> None:
    """Of the whole block, whatever ranks; decoded positions may be shown as 1 instead."""

    def shown(score: Score, committed: str) -> list[Tensor]:
        seen: list[Tensor] = []
        looks = Head(lambda shown_KNB: seen.append(shown_KNB) or torch.full_like(shown_KNB, -9.0))
        select = Filter(looks, decoded=committed, stall="confidence")
        decoded(model, BY_8, score=score, select=select)
        return seen

    plain, ones = shown(Confidence(), "model"), shown(Confidence(), "one")
    assert plain[0].shape == (1, 1, 8) and all(((x > 0) & (x < 1)).all() for x in plain)
    for others in (shown(NegEntropy(), "model"), ones):
        assert torch.equal(plain[0], others[0])
    assert [int((seen == 1).sum()) for seen in ones] == [*range(8)] * 4


# --- Learn2PD: oracle -----------------------------------------------------------------------------

LENIENT = Threshold(0.3)
SELECTS: tuple[Select, ...] = (TopK(), TopK(3), LENIENT, Threshold(0.6), Filter(RandomHead()))
REFERENCES = [(TopK(), Blocks(8)), (LENIENT, Blocks(8)), (LENIENT, Pipeline(8, 0.5, 0.5))]


@pytest.mark.parametrize("stall", ["token", "block"])
@pytest.mark.parametrize(("select", "schedule"), REFERENCES)
def test_the_oracle_reproduces_its_reference(model, select, stall, schedule) -> None:
    reference = replace(BY_8, select=select, schedule=schedule)
    wanted = decoded(model, reference)
    found = decoded(model, reference, select=Oracle(reference, stall))
    assert found.ids == wanted.ids and len(found.trace) <= 32
    if select == TopK():
        assert len(found.trace) < len(wanted.trace)


@pytest.mark.parametrize("stall", covering(2, ["token", "block"]))
def test_the_oracle_needs_no_more_forwards_than_any_selector_of_the_same_text(model, stall) -> None:
    """Selectors that are given the text by the same model: what they commit is never wrong."""
    checked = 0
    for seed in range(3):
        request = replace(REQUEST, prompt_ids=tuple((7 * i + seed) % 90 for i in range(1, 12)))
        texts = [decoded(model, BY_8, request, select=one) for one in SELECTS]
        for wanted in texts:
            known = replace(request, reference=wanted.ids)
            oracle = decoded(model, BY_8, known, select=Oracle(stall=stall))
            assert oracle.ids == wanted.ids
            same = [other for other in texts if other.ids == wanted.ids]
            assert all(len(oracle.trace) <= len(other.trace) for other in same)
            checked += len(same)
    assert checked >= 15


def test_stall_rules_of_the_oracle(model) -> None:
    """A reference nothing agrees with: the rule writes one token, or the block, per forward."""
    strange = tuple((token + 1) % 90 for token in decoded(model, BY_8).ids)
    request = replace(REQUEST, reference=strange)
    rules = (Oracle(stall=stall) for stall in ("token", "block"))
    token, block = (decoded(model, BY_8, request, select=rule) for rule in rules)
    assert token.ids == block.ids == strange and len(block.trace) < len(token.trace)
    assert max(forward.forced for forward in token.trace.forwards) == 1
    assert max(forward.forced for forward in block.trace.forwards) > 1


def test_a_reference_that_ends_early_is_followed_as_far_as_it_goes(model) -> None:
    wanted = decoded(model, BY_8).ids
    for stall in ("token", "block"):
        request = replace(REQUEST, reference=wanted[:13])
        found = decoded(model, BY_8, request, select=Oracle(stall=stall))
        assert found.ids[:13] == wanted[:13]
        assert len(found.ids) == 32 and ROLES["mask"] not in found.ids
        assert len(set(found.born[16:])) == 16, "beyond it one token per forward"


def test_the_reference_is_made_before_the_clock_starts(model) -> None:
    oracle = replace(BY_8, select=Oracle(BY_8))
    ready, watched = oracle.prepare(model, REQUEST), Watched(model)
    forwards = len(oracle.generate(watched, ready).trace)
    assert len(watched.canvases) == forwards < 32
    assert oracle.prepare(model, ready) is ready


# --- Learn2PD: end-of-text prediction -------------------------------------------------------------


ENDING = 30  # of the 43 positions: in the third block


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [True, False], ids=["all that is fed", "open block"])
def test_without_a_filter_the_surest_end_token_cuts(model, ahead) -> None:
    """Checked on the forwards up to the first cut, written down; blocks of 8."""
    watched, plain = (Watched(model, ending=ENDING) for _ in range(2))
    generation = decoded(watched, BY_8, stop=EndOfTextPrediction(ahead))
    for plan, (state, after) in zip(watched.plans, pairwise(watched.canvases), strict=False):
        whole = replace(plan, rows=plan.feed)
        logits = plain.forward(state, whole, plain.new_cache(state.shape[1]))
        logits[..., ROLES["mask"]] = -torch.inf
        sure, ids = logits[0].softmax(-1).max(-1)
        ends = (ids == ROLES["eos"]) & (state[0] == ROLES["mask"])
        if not ahead:
            ends[plan.rows[0] + 8 :] = False
        if ends.any():
            break
        assert after.shape == state.shape
    surest = int(sure.masked_fill(~ends, -1).argmax())
    assert after.shape[1] == surest + 1 < state.shape[1]
    assert len(generation.ids) <= surest + 1 - len(REQUEST.prompt_ids)


@pytest.mark.parametrize("cache", [NoCache(), PrefixCache(), DualCache()], ids=str)
def test_the_papers_rule_leaves_the_text_before_the_end_alone(model, cache) -> None:
    decoder = replace(BY_8, select=Union(Filter(RandomHead(), tau=0.8), TopK()), cache=cache)
    watched = [Watched(model, ending=ENDING) for _ in range(2)]
    whole = decoded(watched[0], decoder)
    stopped = decoded(watched[1], decoder, stop=Eos("block", turn_end=False))
    assert stopped.ids == whole.ids[: 8 * (whole.ids.index(ROLES["eos"]) // 8 + 1)]
    assert len(watched[1].canvases) < len(watched[0].canvases)
