"""Laws of likelihoods: draws estimate what all masks give, and blocks of 1 are autoregressive.

Expected values are the chain rule over all orders of an option's tokens, from single forwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import sqrt
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Likelihood, Option, Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods.likelihood import LikelihoodDecoder
from tests.helpers import IDS, tiny_denoiser

PROMPT, OPTION = tuple(range(20, 27)), (5, 6, 7, 8, 9, 10)
EXACT = LikelihoodDecoder(exact=True)
FORMS = [("llada", None), ("dream", None), ("sdar", 4), ("sdar", 3), ("llada", 1), ("qwen3", 1)]


def asked(*options: Option, seed: int = 0) -> Request:
    return Request("options", options[0].prompt_ids or (1,), 6, seed=seed, options=options)


def likelihood(decoder: Any, model: Any, option: Option, seed: int = 0) -> Likelihood:
    return decoder.generate(model, asked(option, seed=seed)).likelihoods[0]


def log_probs(model: Any, tokens: Sequence[int], block: int | None) -> Tensor:
    span = (0, len(tokens))
    plan = ForwardPlan(ForwardKind.DENOISE, span, span, (0, 0))
    if block:
        plan = replace(plan, attention="block_causal", block=block)
    if model.shifted:  # a row in front would predict the first position
        plan = replace(plan, rows=(1, len(tokens)))
    logits = model.forward(torch.tensor([tokens]), plan, model.new_cache(len(tokens)))[0]
    return torch.cat([logits[:1]] * int(model.shifted) + [logits]).double().log_softmax(-1)


def in_orders(model: Any, ids: Sequence[int], start: int, block: int | None) -> float:
    """Return the mean of the chain rule over all orders of unmasking the positions from `start`
    on."""
    orders, total = list(permutations(range(start, len(ids)))), 0.0
    for order in orders:
        for at, place in enumerate(order):
            canvas = [IDS["<|mask|>"] if i in order[at:] else token for i, token in enumerate(ids)]
            total += float(log_probs(model, canvas, block)[place, ids[place]])
    return total / len(orders)


BLOCKS_OF_4 = ((7, 8), (8, 12), (12, 13))  # at multiples of 4, the prompt's 7 tokens included


SINGLE = tuple((at, at + 1) for at in range(7, 13))
BLOCKWISE = [("sdar", 4, BLOCKS_OF_4), ("sdar", 1, SINGLE), ("llada", 1, SINGLE)]


@pytest.mark.parametrize(("layout", "block", "spans"), [("llada", None, ((7, 11),)), *BLOCKWISE])
def test_all_masks_give_the_mean_over_all_orders(layout, block, spans) -> None:
    """Of each block, given those before it; for blocks of 1 this is autoregressive."""
    model, ids = tiny_denoiser(layout, seed=3), (*PROMPT, *OPTION)
    expected = sum(in_orders(model, ids[:stop], first, block) for first, stop in spans)
    option = Option(PROMPT, OPTION[: spans[-1][1] - len(PROMPT)])
    found = likelihood(replace(EXACT, block=block), model, option)
    assert (found.nats, found.error) == (pytest.approx(expected, abs=1e-4), 0)


@pytest.mark.parametrize(("layout", "block"), FORMS)
def test_draws_estimate_what_all_masks_give(layout: str, block: int | None) -> None:
    """Within four of their standard errors, for several seeds; and their errors are no excuse."""
    model, option = tiny_denoiser(layout, seed=3), Option(PROMPT, OPTION)
    exact = likelihood(replace(EXACT, block=block), model, option)
    drawing = LikelihoodDecoder(draws=256, block=block)
    found = [likelihood(drawing, model, option, seed) for seed in range(4)]
    for one in found:
        assert abs(one.nats - exact.nats) <= 4 * one.error + 1e-4
        assert one.error < 0.05 * abs(exact.nats)
    error = sqrt(sum(one.error**2 for one in found)) / len(found)
    assert abs(fmean(one.nats for one in found) - exact.nats) <= 3 * error + 1e-4
    if block != 1:
        assert len({one.nats for one in found}) == len(found)


def test_a_causal_model_needs_one_forward() -> None:
    model, ids = tiny_denoiser("qwen3", seed=3), (*PROMPT, *OPTION)
    generation = replace(EXACT, block=1).generate(model, asked(Option(PROMPT, OPTION)))
    whole = log_probs(model, ids, 1)
    expected = sum(float(whole[i, ids[i]]) for i in range(len(PROMPT), len(ids)))
    assert len(generation.trace) == 1
    assert generation.likelihoods[0].nats == pytest.approx(expected, abs=1e-4)


def test_guidance_is_against_the_masked_prompt() -> None:
    model, given = tiny_denoiser("llada", seed=3), [*PROMPT, IDS["<|mask|>"]]
    masked = [IDS["<|mask|>"]] * len(given)
    with_prompt, without = (log_probs(model, one, None)[-1] for one in (given, masked))
    expected = (without + 1.5 * (with_prompt - without)).log_softmax(-1)[OPTION[0]]
    found = likelihood(LikelihoodDecoder(guidance=0.5), model, Option(PROMPT, OPTION[:1]))
    assert found.nats == pytest.approx(float(expected), abs=1e-4)


def test_numbers_follow_from_the_seed_and_the_place_of_an_option() -> None:
    model, option = tiny_denoiser("llada", seed=3), Option(PROMPT, OPTION)
    decoder = LikelihoodDecoder(draws=32)
    twice = [decoder.generate(model, asked(option, option, seed=7)).likelihoods for _ in range(2)]
    assert twice[0] == twice[1] and twice[0][0] != twice[0][1]  # masks of its own
    assert likelihood(decoder, model, option, seed=7) == twice[0][0]
    assert likelihood(decoder, model, option, seed=8) != twice[0][0]


def test_the_tokens_are_those_of_the_likeliest_option() -> None:
    model = tiny_denoiser("llada", seed=3)
    generation = EXACT.generate(model, asked(*[Option(PROMPT, (token,)) for token in OPTION]))
    best = max(zip(generation.likelihoods, OPTION, strict=True), key=lambda pair: pair[0].nats)
    assert generation.ids == best[1:]


def test_greedy_decoding_is_compared_with_the_option() -> None:
    model, masks = tiny_denoiser("llada", seed=3), [*PROMPT, *[IDS["<|mask|>"]] * 3]
    left = list(range(len(PROMPT), len(masks)))
    while left:
        best = {i: log_probs(model, masks, None)[i].max(-1) for i in left}
        at = max(left, key=lambda i: float(best[i].values))
        masks[at] = int(best[at].indices)
        left.remove(at)
    decoded, decoder = tuple(masks[len(PROMPT) :]), LikelihoodDecoder(draws=32, greedy=True)
    assert likelihood(decoder, model, Option(PROMPT, decoded)).greedy
    assert not likelihood(decoder, model, Option(PROMPT, (*decoded[:2], OPTION[0]))).greedy
    assert not likelihood(replace(decoder, greedy=False), model, Option(PROMPT, decoded)).greedy


def test_a_bare_text_begins_behind_the_token_that_begins_texts() -> None:
    model = tiny_denoiser("llada", seed=3)
    assert model.special.bos is not None
    bare, given = (likelihood(EXACT, model, Option(p, OPTION)) for p in ((), (model.special.bos,)))
    assert (bare, likelihood(EXACT, model, Option(PROMPT, ())).nats) == (given, 0)
