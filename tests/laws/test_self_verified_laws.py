"""Laws of S2D2: never verified it is its base, always verified it decodes token by token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chi2

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import BlockCache, DualCache, NoCache
from dllm_bench.methods.common import Best, Blocks, Confidence, Threshold, Union
from dllm_bench.methods.s2d2 import SelfVerified, drawn
from tests.helpers import Watched, tiny_denoiser

REQUESTS = [Request("s2d2", tuple(range(3, 3 + n)), 24, seed=n) for n in (1, 6, 10)]
BASE = Union(Threshold(0.3, strict=True), Best(1))
BY_8 = Blocks(8, sees_future=False, absolute=True, whole=True)
ALWAYS = SelfVerified(inner=BASE, causal="decoded")
PLAIN = MaskedDecoder(Confidence(), BASE, BY_8, BlockCache())


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_denoiser("sdar", 4)


def decode(select: Any, model: Any, **changes: Any) -> list[Generation]:
    decoder = replace(PLAIN, select=select, **changes)
    return [decoder.generate(model, request) for request in REQUESTS]


def facts(generations: list[Generation]) -> list[Any]:
    return [(one.ids, one.born, len(one.trace)) for one in generations]


@pytest.mark.parametrize("never", [{"least": 9}, {"worth": 9.0}], ids=["least", "worth"])
def test_drafts_that_are_never_verified_are_the_base(never: dict[str, Any], model: Any) -> None:
    select = SelfVerified(inner=BASE, **never)
    assert facts(decode(select, model)) == facts(decode(BASE, model))


def test_drafts_that_are_always_verified_are_blocks_of_one_token(model: Any) -> None:
    one_by_one = decode(Best(1), model, schedule=replace(BY_8, block=1))
    found = decode(ALWAYS, model)
    for own, wanted in zip(found, one_by_one, strict=True):
        assert own.ids[: len(wanted.ids)] == wanted.ids
    assert sum(len(one.trace) for one in found) < 2 * sum(len(one.trace) for one in one_by_one)


def test_a_verification_goes_on_from_left_to_right(model: Any) -> None:
    """Every second forward verifies; it commits the first masks there are, one at least."""
    watched = Watched(model)
    for generation in decode(ALWAYS, watched):
        kinds = [forward.kind for forward in generation.trace.forwards]
        assert set(kinds[1::2]) == {ForwardKind.VERIFY}
        assert ForwardKind.VERIFY not in kinds[::2]
        assert set(generation.born) == set(range(1, len(kinds), 2))
        assert list(generation.born) == sorted(generation.born)
    pairs = zip(watched.plans[::2], watched.plans[1::2], strict=True)
    assert all(then.fed == 2 * (first.rows[1] - first.rows[0]) for first, then in pairs)


@pytest.mark.parametrize("causal", ["none", "finished", "decoded"])
def test_an_exact_cache_changes_nothing(causal: Any, model: Any) -> None:
    select = replace(ALWAYS, causal=causal, worth=-0.5)
    cached, none = (decode(select, model, cache=c) for c in (BlockCache(), NoCache("block_causal")))
    assert facts(cached) == facts(none)


def test_a_bandit_verifies_where_that_pays(model: Any) -> None:
    """In blocks of one token, where it takes two forwards instead of one: it only tries."""
    by_1 = replace(BY_8, block=1)
    for weight, wanted in ((0.0, range(1, 3)), (1e9, range(10, 15))):
        select = SelfVerified(inner=BASE, bandit=weight)
        for generation in decode(select, model, schedule=by_1):
            kinds = [forward.kind for forward in generation.trace.forwards]
            assert kinds.count(ForwardKind.VERIFY) in wanted, "once for each case, or every other"


def test_a_verification_is_filled_up(model: Any) -> None:
    """By the best drafts or the first, and by all above a threshold."""
    three = replace(ALWAYS, temperature=1.0, number=3)
    first, best = (decode(replace(three, fill=fill), model) for fill in ("first", "best"))
    above = decode(replace(three, fill_above=0.0), model)
    for request, generation in zip(REQUESTS * 2, (*first, *best), strict=True):
        counts, prompt = Counter(generation.born), len(request.prompt_ids)
        blocks = (generation.born[max(at - prompt, 0) : at + 8 - prompt] for at in range(0, 40, 8))
        ends = {max(block) for block in blocks if block}
        assert all(count >= 3 for born, count in counts.items() if born not in ends)
    for generation in first:
        assert list(generation.born) == sorted(generation.born)
    assert facts(first) != facts(best)
    assert sum(len(one.trace) for one in above) < sum(len(one.trace) for one in best)


def test_no_seed_changes_what_is_not_drawn(model: Any) -> None:
    """The released greedy loop draws."""
    for temperature in (0.0, 1.0):
        decoder = replace(PLAIN, select=replace(ALWAYS, temperature=temperature))
        texts = {decoder.generate(model, replace(REQUESTS[2], seed=seed)).ids for seed in range(4)}
        assert (len(texts) > 1) == decoder.summary().uses_seed == (temperature > 0)


def test_accepted_and_sampled_tokens_have_the_law_of_the_verifier() -> None:
    draft_V, law_V = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.3, 0.2, 0.4]])
    count = 4000
    generator = torch.Generator().manual_seed(0)
    drafts_K = torch.multinomial(draft_V, count, replacement=True, generator=generator)
    accepted_K = torch.rand(count, generator=generator) < (law_V / draft_V)[drafts_K]
    state = DecodeState.start(REQUESTS[0], tiny_denoiser("sdar", 4).special)
    sampled_K = drawn(law_V.expand(count, -1), draft_V.expand(count, -1), state)
    found_V = torch.where(accepted_K, drafts_K, sampled_K).bincount(minlength=4)
    wanted_V = count * law_V
    assert ((found_V - wanted_V) ** 2 / wanted_V).sum() < chi2.ppf(1 - 1e-4, 3)


def test_what_it_does_not_fit_is_refused(model: Any) -> None:
    with pytest.raises(DllmBenchError, match="cache with block-causal attention"):
        replace(PLAIN, select=ALWAYS, cache=DualCache())
    shifted = tiny_denoiser("dream", 4)
    with pytest.raises(DllmBenchError, match="a model with logits of each position at its own row"):
        replace(PLAIN, select=ALWAYS).generate(shifted, REQUESTS[0])
