"""Models of someone else: they decode like our own, and stay as they were."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dllm_bench as db
from dllm_bench.core.decoder import Decoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Threshold
from dllm_bench.methods.wino import Wino
from dllm_bench.paths import assets_dir
from tests.api.models import loaded, transformers_object

PROMPTS = ["Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:", "2 + 2 ="]
MASK = {"mask_token": "<|mask|>"}
ALONE = MaskedDecoder(Confidence(), Threshold(0.9), Blocks(32, sees_rest=False), NoCache())
SHADOWED = replace(ALONE, schedule=Blocks(32), revise=Wino())


def flags(module: Any) -> list[Any]:
    """Everything that decoding could have changed."""
    attention = [vars(layer.self_attn).get("is_causal") for layer in module.model.layers]
    return [*attention, module.config.to_dict(), [part.training for part in module.modules()]]


def function(ids: Tensor) -> Tensor:
    """tiny-llada as a function of ids."""
    module = loaded("tiny-llada").denoiser.module
    return module(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("decoder", ["fast_dllm_dual", "lopa_dream"])
def test_a_transformers_object_decodes_like_our_own_and_stays_as_it_was(decoder: str) -> None:
    module, own = transformers_object("tiny-llada"), loaded("tiny-llada")
    before, ids = flags(module), torch.tensor([own.encode(PROMPTS[0])])
    causal = module(input_ids=ids).logits
    model = db.wrap(module, own.text.tokenizer, **MASK)
    for batch in (1, 2):
        theirs = db.generate(model, PROMPTS, decoder, 32, batch=batch)
        ours = db.generate(own, PROMPTS, decoder, 32, batch=batch)
        assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
        assert [len(one.trace) for one in theirs] == [len(one.trace) for one in ours]
    assert flags(module) == before
    assert torch.equal(module(input_ids=ids).logits, causal)


@pytest.mark.parametrize("decoder", ["fast_dllm", "lopa_dream", "vanilla"])
def test_a_function_decodes_like_the_model_behind_it(decoder: str) -> None:
    model = db.wrap(function, loaded("tiny-llada").text.tokenizer, **MASK)
    theirs = db.generate(model, PROMPTS, decoder, 32)
    ours = db.generate(loaded("tiny-llada"), PROMPTS, decoder, 32)
    assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
    assert "without a cache" in repr(model)


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ("fast_dllm_dual", "has no cache"),
        ("block_diffusion", "keeps keys and values|attention"),
        (SHADOWED, "hides positions from each other .*choose another decoder"),
        (ALONE, "hides positions from each other .*choose another decoder"),
    ],
)
def test_what_a_function_cannot_do_is_refused(decoder: Decoder | str, words: str) -> None:
    model = db.wrap(function, loaded("tiny-llada").text.tokenizer, **MASK)
    with pytest.raises(DllmBenchError, match=words):
        db.generate(model, PROMPTS, decoder, 32)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (lambda ids: ids, MASK, "returned"),
        (function, {"mask_token": "<nothing>"}, "no token of the"),
        (function, {**MASK, "attention": "blocks"}, "full, block, causal"),
        (function, {**MASK, "block": 8}, "block=8"),
    ],
)
def test_a_wrong_wrapping_says_what_to_do(model: Any, settings: dict[str, Any], words: str) -> None:
    tokenizer = loaded("tiny-llada").text.tokenizer
    with pytest.raises(DllmBenchError, match=words):
        db.wrap(model, tokenizer, **settings)


def test_a_class_whose_layers_are_unknown_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=2048))
    with pytest.raises(DllmBenchError, match="wrap a function in place of it"):
        db.wrap(module, loaded("tiny-llada").text.tokenizer, **MASK)


def test_a_folder_is_the_model_of_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.symlink_to(assets_dir() / "tiny-llada")
    model = db.load_model(folder, dtype="float32")
    assert model.metadata.name == "mine"
    assert model.metadata.weights_sha256 == loaded("tiny-llada").metadata.weights_sha256


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        ("tiny-lada", {}, "did you mean 'tiny-llada'"),
        ("nobody/nothing", {}, "not in the local Hugging Face cache"),
        ("tiny-llada", {"dtipe": "float32"}, "dtipe"),
        ("tiny-llada", {"dtype": "int3"}, "float32, bfloat16"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_what_to_do(
    source: str, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(DllmBenchError, match=words):
        db.load_model(source, **settings)
