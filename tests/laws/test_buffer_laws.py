"""Laws of a buffer of blocks (MultiBD), between block diffusion and D2F's pipeline, and of drafts
that a block-diffusion model verifies itself (S2D2).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, NoCache
from dllm_bench.methods.common import Best, Blocks, Confidence, Pipeline, Threshold, Union
from dllm_bench.methods.revising import BlockBuffer, Edit, EditBlocks
from dllm_bench.methods.s2d2 import SelfVerified, drawn
from tests.helpers import Watched, tiny_denoiser

REQUESTS = [Request("buffer", tuple(range(3, 3 + n)), 40, seed=n) for n in (1, 8, 11)]
BY_8 = Blocks(8, sees_future=False, absolute=True, whole=True)
BUFFER = BlockBuffer(block=8, tau_add=0.1, tau_act=0.5, size=3)
DECODER = MaskedDecoder(Confidence(), Threshold(0.4), BUFFER, BlockCache())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("sdar", 4)


def decode(model: Any, *requests: Request, **changes: Any) -> list[Generation]:
    decoder = replace(DECODER, **changes)
    return [decoder.generate(model, request) for request in requests or REQUESTS]


def facts(generations: list[Generation]) -> list[Any]:
    rows = [[(row.fed, row.cached) for row in one.trace.forwards] for one in generations]
    return [(one.ids, one.born, fed) for one, fed in zip(generations, rows, strict=True)]


def test_a_buffer_of_one_block_is_block_diffusion(model: Any) -> None:
    one = replace(BUFFER, size=1)
    assert facts(decode(model, schedule=one)) == facts(decode(model, schedule=BY_8))


def test_a_buffer_without_a_bound_is_a_pipeline(model: Any) -> None:
    """Behind a prompt of one block, which lies on both grids."""
    wide, pipeline = replace(BUFFER, size=99), Pipeline(8, tau_add=0.1, tau_act=0.5)
    found, wanted = (decode(model, REQUESTS[1], schedule=s) for s in (wide, pipeline))
    assert facts(found) == facts(wanted) and facts(found) != facts(decode(model, REQUESTS[1]))


def test_an_exact_cache_changes_nothing(model: Any) -> None:
    none = decode(model, cache=NoCache("block_causal"))
    for own, wanted in zip(decode(model), none, strict=True):
        assert (own.ids, own.born) == (wanted.ids, wanted.born)


EDITS = EditBlocks(tau=0.2, rounds=3)


def test_editing_a_buffer_of_one_block_is_editing_the_open_block(model: Any) -> None:
    one, edit = replace(BUFFER, size=1), Edit(tau=0.2, rounds=3, ignores_last=True)
    quick = Threshold(0.2)  # or a block is left before it has had its rounds
    found = decode(model, select=quick, schedule=one, revise=EDITS)
    assert facts(found) == facts(decode(model, select=quick, schedule=BY_8, revise=edit))
    assert facts(found) != facts(decode(model, select=quick, schedule=one)), "it edits something"


def test_several_blocks_are_edited_at_once(model: Any) -> None:
    """Also under an exact cache, into which no block gets that is edited afterwards."""
    found = decode(model, revise=EDITS)
    none = decode(model, revise=EDITS, cache=NoCache("block_causal"))
    for generation, plain in zip(found, none, strict=True):
        assert (generation.ids, generation.born) == (plain.ids, plain.born)
        edits = [row.changes for row in generation.trace.forwards]
        assert edits == [row.changes for row in plain.trace.forwards]
        first = -len(generation.ids) % 8
        assert any(len({(first + e.position) // 8 for e in row}) > 1 for row in edits)


def test_no_block_opens_beside_an_unstable_one(model: Any) -> None:
    """Of which every token is to be the candidate of its row; none is in the first forward."""
    watched, request = Watched(model), Request("unstable", (3, 4, 5, 6, 7), 40)
    decode(watched, request, revise=replace(EDITS, stable=1.0))
    assert watched.plans[0].feed[1] == 8
    wide = [plan for plan in watched.plans if plan.rows[1] - plan.rows[0] > 8]
    free = Watched(model)
    decode(free, request, revise=EDITS)
    assert free.plans[0].feed[1] == 16
    assert len(wide) < sum(plan.rows[1] - plan.rows[0] > 8 for plan in free.plans)


class MaskingAgain(Watched):
    """Predicts the mask token at every position in every second forward."""

    def forward(self, tokens_KL: Tensor, plan: Any, kv: Any) -> Tensor:
        logits_KRV = super().forward(tokens_KL, plan, kv)
        logits_KRV[..., self.special.mask] += 99 if len(self.plans) % 2 == 0 else -99
        return logits_KRV


def test_a_block_is_left_after_a_number_of_forwards(model: Any) -> None:
    """As many as its positions and `rounds`, and one that fills it."""
    watched, request = MaskingAgain(model), Request("again", tuple(range(3, 11)), 16)
    edits, one = EditBlocks(tau=0.0, rounds=16), replace(BUFFER, size=1)
    slow = {"select": Threshold(1.0, strict=True), "forbid_mask": False}
    (generation,) = decode(watched, request, schedule=one, revise=edits, **slow)
    assert len(watched.plans) == 2 * (8 + 16 + 1) + 1, "the second begins with a mask"
    assert model.special.mask not in generation.ids


def test_a_canvas_has_whole_blocks() -> None:
    sizes = {(5, 40, False): 48, (5, 40, True): 40, (8, 40, False): 48, (9, 3, True): 16}
    for (prompt, new, floor), length in sizes.items():
        assert replace(BUFFER, floor=floor).grid(prompt, new).length == length


# --- S2D2: never verified it is its base, always verified it decodes token by token ---------------

BASE = Union(Threshold(0.3, strict=True), Best(1))
ALWAYS = SelfVerified(inner=BASE, causal="decoded")
PLAIN = MaskedDecoder(Confidence(), BASE, BY_8, BlockCache())


def verified(select: Any, model: Any, **changes: Any) -> list[Generation]:
    decoder = replace(PLAIN, select=select, **changes)
    return [decoder.generate(model, request) for request in REQUESTS]


def texts(generations: list[Generation]) -> list[Any]:
    return [(one.ids, one.born, len(one.trace)) for one in generations]


@pytest.mark.parametrize("never", [{"least": 9}, {"worth": 9.0}], ids=["least", "worth"])
def test_drafts_that_are_never_verified_are_the_base(never: dict[str, Any], model: Any) -> None:
    assert texts(verified(SelfVerified(inner=BASE, **never), model)) == texts(verified(BASE, model))


def test_drafts_that_are_always_verified_are_blocks_of_one_token(model: Any) -> None:
    one_by_one = verified(Best(1), model, schedule=replace(BY_8, block=1))
    found = verified(ALWAYS, model)
    for own, wanted in zip(found, one_by_one, strict=True):
        assert own.ids[: len(wanted.ids)] == wanted.ids
    assert sum(len(one.trace) for one in found) < 2 * sum(len(one.trace) for one in one_by_one)


@pytest.mark.parametrize("causal", ["none", "finished", "decoded"])
def test_an_exact_cache_changes_no_verification(causal: Any, model: Any) -> None:
    select = replace(ALWAYS, causal=causal, worth=-0.5)
    none = verified(select, model, cache=NoCache("block_causal"))
    assert texts(verified(select, model)) == texts(none)


def test_a_verification_is_filled_up(model: Any) -> None:
    """By the best drafts or the first, and by all above a threshold."""
    three = replace(ALWAYS, temperature=1.0, number=3)
    first, best = (verified(replace(three, fill=fill), model) for fill in ("first", "best"))
    above = verified(replace(three, fill_above=0.0), model)
    for request, generation in zip(REQUESTS * 2, (*first, *best), strict=True):
        counts, prompt = Counter(generation.born), len(request.prompt_ids)
        blocks = (generation.born[max(at - prompt, 0) : at + 8 - prompt] for at in range(0, 56, 8))
        ends = {max(block) for block in blocks if block}
        assert all(count >= 3 for born, count in counts.items() if born not in ends)
    for generation in first:
        assert list(generation.born) == sorted(generation.born)
    assert texts(first) != texts(best)
    assert sum(len(one.trace) for one in above) < sum(len(one.trace) for one in best)


def test_no_seed_changes_what_is_not_drawn(model: Any) -> None:
    """The released greedy loop draws."""
    for temperature in (0.0, 1.0):
        decoder = replace(PLAIN, select=replace(ALWAYS, temperature=temperature))
        found = {decoder.generate(model, replace(REQUESTS[2], seed=seed)).ids for seed in range(4)}
        assert (len(found) > 1) == decoder.summary().uses_seed == (temperature > 0)


def test_accepted_and_sampled_tokens_have_the_law_of_the_verifier() -> None:
    draft_V, law_V = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]])
    count, generator = 4000, torch.Generator().manual_seed(0)
    drafts_K = torch.multinomial(draft_V, count, replacement=True, generator=generator)
    accepted_K = torch.rand(count, generator=generator) < (law_V / draft_V)[drafts_K]
    state = DecodeState.start(REQUESTS[0], tiny_denoiser("sdar", 4).special)
    sampled_K = drawn(law_V.expand(count, -1), draft_V.expand(count, -1), state)
    found_V = torch.where(accepted_K, drafts_K, sampled_K).bincount(minlength=4)
    wanted_V = count * law_V
    assert ((found_V - wanted_V) ** 2 / wanted_V).sum() < chi2.ppf(1 - 1e-4, 3)
