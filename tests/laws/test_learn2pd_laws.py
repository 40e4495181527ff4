"""Laws of Learn2PD's pieces on random models: learned filter, oracle, end-of-text prediction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dllm_bench.core.contracts import Score, Select
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import DualCache, NoCache, PrefixCache
from dllm_bench.methods.common import (
    Blocks,
    Confidence,
    Eos,
    NegEntropy,
    Pipeline,
    Threshold,
    TopK,
    Union,
)
from dllm_bench.methods.learn2pd import EndOfTextPrediction, Filter, Oracle
from tests.helpers import ROLES, Watched
from tests.pieces import RandomHead
from tests.tiers import covering

REQUEST = Request("learn2pd", tuple(range(3, 14)), 32)
VANILLA = MaskedDecoder(Confidence(), TopK(), Blocks(8), NoCache())
LENIENT = Threshold(0.3)
STALLS = ("filter", "confidence")
ENDING = 30  # of the 43 positions: in the third block


@dataclass(frozen=True)
class Head:
    """A filter whose outputs are a function of what it reads."""

    of: Callable[[Tensor], Tensor]
    block: int = 8

    def __call__(self, confidence_KNB: Tensor) -> Tensor:
        return self.of(confidence_KNB)


def constant(logit: float) -> Head:
    return Head(lambda confidence_KNB: torch.full_like(confidence_KNB, logit))


LAST_FIRST = Head(lambda shown_KNB: torch.arange(8.0).expand_as(shown_KNB) - 99)
"""Trusts nothing, the last positions least of all not."""


def generate(decoder: MaskedDecoder, model, request: Request = REQUEST):
    return decoder.generate(model, request)


# --- filter --------------------------------------------------------------------------------------


def test_a_filter_that_accepts_all_needs_one_forward_per_block(model) -> None:
    generation = generate(replace(VANILLA, select=Filter(constant(torch.inf))), model)
    assert generation.born == tuple(i // 8 for i in range(32))


NEVER = constant(-torch.inf)
AS_VANILLA = [  # of equal logits the surest position counts
    *(Filter(filter_, stall=s) for filter_ in (NEVER, constant(-30.0)) for s in STALLS),
    Filter(constant(0.0), tau=0.5),  # the threshold is strict
    Filter(LAST_FIRST, stall="confidence"),
    Union(Filter(NEVER), TopK()),  # which forces nothing
]


@pytest.mark.parametrize("select", AS_VANILLA)
def test_a_filter_that_accepts_nothing_is_vanilla_decoding(model, select) -> None:
    generation, plain = generate(replace(VANILLA, select=select), model), generate(VANILLA, model)
    assert (generation.ids, generation.born) == (plain.ids, plain.born)
    forced = int(isinstance(select, Filter))
    assert [forward.forced for forward in generation.trace.forwards] == [forced] * 32


def test_without_acceptance_the_filter_ranks(model) -> None:
    """Last position of a block first."""
    ranked = generate(replace(VANILLA, select=Filter(LAST_FIRST)), model)
    assert ranked.born == tuple(8 * (i // 8) + 7 - i % 8 for i in range(32))


def test_the_filter_reads_the_models_probabilities(model) -> None:
    """Of the whole block, whatever ranks; decoded positions may be shown as 1 instead."""

    def shown(score: Score, decoded: str) -> list[Tensor]:
        seen: list[Tensor] = []
        looks = Head(lambda shown_KNB: seen.append(shown_KNB) or torch.full_like(shown_KNB, -9.0))
        select = Filter(looks, decoded=decoded, stall="confidence")
        generate(replace(VANILLA, score=score, select=select), model)
        return seen

    plain, ones = shown(Confidence(), "model"), shown(Confidence(), "one")
    assert plain[0].shape == (1, 1, 8) and all(((x > 0) & (x < 1)).all() for x in plain)
    for others in (shown(NegEntropy(), "model"), ones):
        assert torch.equal(plain[0], others[0])
    assert [int((seen == 1).sum()) for seen in ones] == [*range(8)] * 4


# --- oracle --------------------------------------------------------------------------------------

SELECTS: tuple[Select, ...] = (TopK(), TopK(3), LENIENT, Threshold(0.6), Filter(RandomHead()))
REFERENCES = [(TopK(), Blocks(8)), (LENIENT, Blocks(8)), (LENIENT, Pipeline(8, 0.5, 0.5))]


@pytest.mark.parametrize("stall", ["token", "block"])
@pytest.mark.parametrize(("select", "schedule"), REFERENCES)
def test_the_oracle_reproduces_its_reference(model, select, stall, schedule) -> None:
    reference = replace(VANILLA, select=select, schedule=schedule)
    oracle = replace(reference, select=Oracle(reference, stall))
    wanted, found = generate(reference, model), generate(oracle, model)
    assert found.ids == wanted.ids and len(found.trace) <= 32
    if select == TopK():
        assert len(found.trace) < len(wanted.trace)


@pytest.mark.parametrize("stall", covering(2, ["token", "block"]))
def test_the_oracle_needs_no_more_forwards_than_any_selector_of_the_same_text(model, stall) -> None:
    """Selectors that are given the text by the same model: what they commit is never wrong."""
    checked = 0
    for seed in range(3):
        request = replace(REQUEST, prompt_ids=tuple((7 * i + seed) % 90 for i in range(1, 12)))
        texts = [generate(replace(VANILLA, select=one), model, request) for one in SELECTS]
        for wanted in texts:
            known = replace(request, reference=wanted.ids)
            oracle = generate(replace(VANILLA, select=Oracle(stall=stall)), model, known)
            assert oracle.ids == wanted.ids
            same = [other for other in texts if other.ids == wanted.ids]
            assert all(len(oracle.trace) <= len(other.trace) for other in same)
            checked += len(same)
    assert checked >= 15


def test_stall_rules_of_the_oracle(model) -> None:
    """A reference nothing agrees with: the rule writes one token, or the block, per forward."""
    strange = tuple((token + 1) % 90 for token in generate(VANILLA, model).ids)
    request = replace(REQUEST, reference=strange)
    rules = (replace(VANILLA, select=Oracle(stall=stall)) for stall in ("token", "block"))
    token, block = (generate(rule, model, request) for rule in rules)
    assert token.ids == block.ids == strange and len(block.trace) < len(token.trace)
    assert max(forward.forced for forward in token.trace.forwards) == 1
    assert max(forward.forced for forward in block.trace.forwards) > 1


def test_a_reference_that_ends_early_is_followed_as_far_as_it_goes(model) -> None:
    wanted = generate(VANILLA, model).ids
    for stall in ("token", "block"):
        request = replace(REQUEST, reference=wanted[:13])
        found = generate(replace(VANILLA, select=Oracle(stall=stall)), model, request)
        assert found.ids[:13] == wanted[:13]
        assert len(found.ids) == 32 and ROLES["mask"] not in found.ids
        assert len(set(found.born[16:])) == 16, "beyond it one token per forward"


def test_the_reference_is_made_before_the_clock_starts(model) -> None:
    oracle = replace(VANILLA, select=Oracle(VANILLA))
    ready, watched = oracle.prepare(model, REQUEST), Watched(model)
    generation = oracle.generate(watched, ready)
    assert len(watched.canvases) == len(generation.trace) < 32
    assert oracle.prepare(model, ready) is ready


# --- end-of-text prediction ----------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("ahead", [True, False], ids=["all that is fed", "open block"])
def test_without_a_filter_the_surest_end_token_cuts(model, ahead) -> None:
    """Checked on the forwards up to the first cut, written down; blocks of 8."""
    watched, plain = (Watched(model, ending=ENDING) for _ in range(2))
    generation = generate(replace(VANILLA, stop=EndOfTextPrediction(ahead)), watched)
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
    decoder = replace(VANILLA, select=Union(Filter(RandomHead(), tau=0.8), TopK()), cache=cache)
    watched = [Watched(model, ending=ENDING) for _ in range(2)]
    whole = generate(decoder, watched[0])
    stopped = generate(replace(decoder, stop=Eos("block", turn_end=False)), watched[1])
    assert stopped.ids == whole.ids[: 8 * (whole.ids.index(ROLES["eos"]) // 8 + 1)]
    assert len(watched[1].canvases) < len(watched[0].canvases)
