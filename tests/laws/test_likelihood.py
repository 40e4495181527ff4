"""Laws of likelihoods: draws estimate what all masks give, and blocks of 1 are autoregressive.
Texts that a parent reads stay the run's, and greedy decoding agrees with itself.

Expected values are the chain rule over all orders of an option's tokens, from single forwards.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import sqrt
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.items import request_of
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Likelihood, Option, Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.launch.local import run
from dllm_bench.methods.likelihood import LikelihoodDecoder
from dllm_bench.models.load import load_model
from dllm_bench.runs.runner import Parent, emitted_ids
from dllm_bench.store.inputs import model_spec
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store, read_samples
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
BLOCKWISE = [("sdar", 4, BLOCKS_OF_4), *((one, 1, SINGLE) for one in ("sdar", "llada", "qwen3"))]


@pytest.mark.parametrize(("layout", "block", "spans"), [("llada", None, ((7, 11),)), *BLOCKWISE])
def test_all_masks_give_the_mean_over_all_orders(layout, block, spans) -> None:
    """Of each block, given those before it; for blocks of 1 this is autoregressive, and one forward
    of a causal model."""
    model, ids = tiny_denoiser(layout, seed=3), (*PROMPT, *OPTION)
    expected = sum(in_orders(model, ids[:stop], first, block) for first, stop in spans)
    option = Option(PROMPT, OPTION[: spans[-1][1] - len(PROMPT)])
    generation = replace(EXACT, block=block).generate(model, asked(option))
    (found,) = generation.likelihoods
    assert (found.nats, found.error) == (pytest.approx(expected, abs=1e-4), 0)
    assert layout != "qwen3" or [one.branches for one in generation.trace.forwards] == [1]


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


# --- texts of a run that a parent reads -----------------------------------------------------------

PARENT = "model@parent=tiny-qwen3"


def spec(*overrides: str) -> RunSpec:
    settings = ["model=tiny-qwen3", "decoder=ar", "benchmark=open_text", "limit=3", "hardware=cpu"]
    return RunSpec.from_config(compose([*settings, *overrides]))


@pytest.mark.parametrize("batch", [1, 2])
def test_the_parent_s_own_greedy_text_agrees_and_has_its_likelihood(batch, tmp_path) -> None:
    store, read = Store(tmp_path), spec(PARENT, f"batch={batch}")
    record = run(read, store=store)
    assert record.summary["quality/agreement"] == 1.0
    model = load_model(model_spec(read.parent))
    decoder, nats, tokens, trigrams = replace(EXACT, block=1), 0.0, 0, []
    for sample in read_samples(store.path(read)).values():
        ids = emitted_ids(sample.ids, sample.born, sample.cut, model.special.mask)
        turns = json.loads(sample.prompt) if read.model.chat else sample.prompt
        option = Option(tuple(model.encode(turns)), tuple(ids))
        (found,) = decoder.generate(model.denoiser, request_of("text", [option])).likelihoods
        nats, tokens = nats - found.nats, tokens + len(ids)
        trigrams.append([tuple(ids[i : i + 3]) for i in range(len(ids) - 2)])
    assert record.summary["quality/nll_under_parent"] == pytest.approx(nats / tokens, abs=1e-5)
    distinct = sum(len(set(each)) for each in trigrams) / sum(map(len, trigrams))
    assert record.summary["quality/distinct_3"] == pytest.approx(distinct)
    assert sum(record.columns["emitted"]) == tokens


def test_a_run_that_is_read_is_another_run_with_the_same_texts(tmp_path: Path) -> None:
    store, plain, read = Store(tmp_path), spec(), spec(PARENT)
    assert plain.identity_hash != read.identity_hash and "parent" not in plain.identity()
    texts = []
    for one in (plain, read):
        record = run(one, store=store)
        texts.append([sample.text for sample in read_samples(store.path(one)).values()])
        assert (record.summary["quality/agreement"] is None) == (one is plain)
    assert texts[0] == texts[1]


def test_a_parent_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match="choose an autoregressive model"):
        run(spec("model@parent=tiny-llada"), store=Store(tmp_path))
    model: Any = SimpleNamespace(encode=lambda text: [len(text)])
    with pytest.raises(DllmBenchError, match="another tokenizer"):
        Parent(load_model(model_spec(spec(PARENT).parent)), "tiny-qwen3").check(model)
