"""Models of someone else: they decode like our own, and stay as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dllm_bench as db
from dllm_bench.paths import assets_dir
from tests.api.models import loaded, logits, transformers_object

PROMPTS = ["Question: Tom has 3 apples and buys 4 more. How many apples?\nAnswer:", "2 + 2 ="]
MASK = {"mask_token": "<|mask|>"}


def flags(module: Any) -> list[Any]:
    """Everything that decoding could have changed."""
    attention = [vars(layer.self_attn).get("is_causal") for layer in module.model.layers]
    return [*attention, module.config.to_dict(), [part.training for part in module.modules()]]


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
    model = db.wrap(logits, loaded("tiny-llada").text.tokenizer, **MASK)
    theirs = db.generate(model, PROMPTS, decoder, 32)
    ours = db.generate(loaded("tiny-llada"), PROMPTS, decoder, 32)
    assert [one.sample.ids for one in theirs] == [one.sample.ids for one in ours]
    assert "without a cache" in repr(model)


def test_a_folder_is_the_model_of_that_folder(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.symlink_to(assets_dir() / "tiny-llada")
    model = db.load_model(folder, dtype="float32")
    assert model.metadata.name == "mine"
    assert model.metadata.weights_sha256 == loaded("tiny-llada").metadata.weights_sha256
