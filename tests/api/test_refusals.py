"""What a call of the Python interface refuses, and what the message says to do instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import dllm_bench as db
from dllm_bench.api.custom_generate import generate_with
from dllm_bench.api.generation import PromptGenerator, spec_of
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.remasking import Wino
from tests.api.models import GAPS, loaded, logits, transformers_object, wrapped

OBJECT = "is an object and stays as it is"
HIDES = "hides positions from each other .*choose another decoder"
ALONE = MaskedDecoder(Confidence(), Threshold(0.9), Blocks(32, sees_rest=False), NoCache())
Call = Callable[[Path], Any]
never = Mock(side_effect=AssertionError("a token was committed before the refusal"))


def generate(*prompts: str, decoder="fast_dllm", model="tiny-llada", **settings: Any) -> Call:
    return lambda _: db.generate(loaded(model), [*prompts], decoder, on_commit=never, **settings)


def decoder(**settings: Any) -> Call:
    return lambda _: db.decoder("fast_dllm", **settings)


def wrap(model: Any, **settings: Any) -> Call:
    return lambda _: wrapped(model, **settings)


def of_function(decoder: Any) -> Call:
    return lambda _: db.generate(wrapped(logits), "2 + 2 =", decoder, 32)


def load(source: str, **settings: Any) -> Call:
    return lambda _: db.load_model(source, **settings)


def run(model: Any = "tiny-llada", **settings: Any) -> Call:
    return lambda results: db.run(model, "vanilla", "minigsm", results=results, **settings)


def of_object(benchmark: Any = "minigsm", **settings: Any) -> Call:
    model, given = transformers_object("tiny-llada"), {"limit": 1, **settings}
    return lambda results: db.run(wrapped(model), "fast_dllm", benchmark, results=results, **given)


def of_transformers(**settings: Any) -> Call:
    asked = {"max_new_tokens": 8, **settings}
    model = transformers_object("tiny-llada")
    return lambda _: generate_with(model, {}, torch.tensor([[5]]), **asked)


def pin(place: int, name: str) -> Call:
    model = loaded("tiny-llada")
    request = Request("", tuple(model.encode("3 + 4 =")), 6, pinned=((place, 5),))
    return lambda _: db.decoder(name).generate(model.denoiser, request)


def prompt_with_masks(_: Path) -> None:
    made = db.decoder("fast_dllm")
    PromptGenerator(spec_of(loaded("tiny-llada"), made), made, loaded("tiny-llada"))(GAPS, 32, ())


def unknown_class(_: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    wrapped(GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=2048)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (generate(GAPS, decoder="ngram_speculative"), "writes a text after the prompt"),
        (generate(GAPS, decoder="daedal"), "keep their places, which schedule Daedal does not"),
        (generate("fast_dllm", decoder="2 + 2 ="), "There is no decoder '2 [+] 2 ='"),
        (generate(GAPS, max_new_tokens=32), "max_new_tokens=32 was given; leave that"),
        (generate(GAPS, "2 + 2 ="), "those with masks in a call of their own"),
        (generate("<|mask|> 4 = 7"), "begin the prompt with a text"),
        (generate("2 + 2 =", "3 =", max_new_tokens=32, batch=2), "batch=2"),
        (generate(GAPS, model="tiny-diffusion-gemma", decoder="diffusion_gemma"), "writes a text"),
        (generate("2 +", batch=0), "batch 0; give a whole number of 1 or more"),
        (generate("2 +", max_new_tokens=0), "max_new_tokens 0; give a whole number of 1"),
        (generate("2 +", stop="."), "stop '.'; give a list"),
        (generate("2 +", "a\udc80b"), "A prompt cannot be encoded .*valid Unicode"),
        (generate("2 +", seed="a"), "seed 'a'; give a whole number of 0 or more"),
        (lambda _: db.generate("", "2", "ar", on_commit=3), "on_commit 3; give a function"),
        (lambda _: db.compare(1, 2), "A run is 1; give a record or the hash"),
        (lambda _: db.compare(), "compare got none; name two or more"),
        (lambda _: db.compare(["a", "b"]), r"compare got \['a', 'b'\]; name two or more, one by"),
        (lambda results: db.table([], results=results), r"There is no table '\[\]'"),
        (lambda results: db.figure([], results=results), r"There is no figure '\[\]'"),
        (lambda results: db.trade_off(3, results=results), "no complete run of 3 on any"),
        (lambda _: db.wrap(logits, None), "given function and NoneType as model and tokenizer"),
        (lambda _: next(db.stream("tiny-llada", "2", "ar", on_commit=never)), "leave it out"),
        (generate("2 +", max_new_tokens=10**12), "lower benchmark.max_new_tokens"),
        (generate("2 +", 5), "A prompt is 5; give a text, a chat"),
        (pin(-1, "fast_dllm"), "new position -1 and has 6 new tokens"),
        (pin(6, "sdar"), "new position 6 and has 6"),  # of a canvas of two whole blocks of 4
        (lambda _: next(db.stream(loaded("tiny-llada"), "2 +", "fast_dllm", batch=2)), "batch=2"),
        (prompt_with_masks, "has 4 mask tokens to fill.*answered, not filled"),
        (decoder(tau=0.7), r"select\.tau"),
        (decoder(**{"select.tau": "x"}), "tau .x.; give a number"),
        (decoder(draft=Threshold(0.9)), "no slot 'draft'"),
        (decoder(schedule={"block": 4}), r'named with a dot: \*\*{"schedule.block": 4}'),
        (of_function("fast_dllm_dual"), "has no cache"),
        (of_function("block_diffusion"), "keeps keys and values|attention"),
        (of_function(replace(ALONE, schedule=Blocks(32), revise=Wino())), HIDES),
        (of_function(ALONE), HIDES),
        (wrap(lambda ids: ids), "returned"),
        (wrap(logits, mask_token="<nothing>"), "no token of the model's tokenizer"),
        (wrap(logits, attention="blocks"), "full, block, causal"),
        (wrap(logits, block=8), "block=8"),
        (wrap(transformers_object("tiny-llada"), weights_hash="v1"), "leave weights_hash out"),
        (unknown_class, "wrap a function in place of it"),
        (load("tiny-lada"), "did you mean 'tiny-llada'"),
        (load("nobody/nothing"), "not in the local Hugging Face cache"),
        (load("tiny-llada", dtipe="float32"), "dtipe"),
        (load("tiny-llada", dtype="int3"), "float32, bfloat16"),
        (lambda results: db.trade_off("tiny-llada", results=results), "`dllm-bench run -m"),
        (run(limit=object()), "limit is <object .*give a number"),
        (run(logits), "The model is a function; give a name.*wrap"),
        (generate("2 +", decoder=None), "The decoder is None; give a name"),
        (lambda _: db.records(5), "The results directory is 5; name one"),
        (of_object(**{"model.chat": True}), OBJECT),
        (of_object(**{"hardware.dtype": "bfloat16"}), OBJECT),
        (of_object(hardware="cpu-dp2"), "asks for several processes"),
        (of_object(3), "use evaluate"),
        (run(wrapped(logits)), "weights_hash=TEXT"),
        (lambda results: db.records(results, by="token"), "by='sample'"),
        (of_transformers(num_beams=4), "num_beams"),
        (of_transformers(max_new_tokens=0), "no max_new_tokens"),
    ],
)
def test_a_refused_call_says_what_to_do(call: Call, words: str, tmp_path: Path) -> None:
    with pytest.raises(DllmBenchError, match=words):
        call(tmp_path)
