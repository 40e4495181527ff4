"""Every shipped model is read by its own yaml and answers items of the test split.

Items are those of the task its recipe names first; two of three must be right, which no model that
was read wrongly reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from dllm_bench.api.compose import compose
from dllm_bench.models import load as loading
from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import assets_dir, options
from dllm_bench.registry import instantiate
from dllm_bench.store.inputs import decoder_of
from scripts.embedded.recipes import RECIPES
from tests.tiers import covering

PLAIN = {
    "full": ["decoder=fast_dllm"],
    "block_causal": ["decoder=d2f"],
    "causal": ["decoder=ar"],
    "canvas": ["decoder=diffusion_gemma", "benchmark.split=copy"],  # tokens follow from the prompt
}


def _decoder(model: Mapping[str, Any]) -> list[str]:
    """Return the plain decoder of an attention form; blocks of one length have their own."""
    if model.get("block") and model["shifted"]:
        return ["decoder=fast_dllm_v2"]
    if model.get("block"):
        return ["decoder=block_diffusion", f"decoder.schedule.block={model['block']}"]
    return PLAIN[model["attention_form"]]


@pytest.mark.parametrize("name", covering(7, SHIPPED_MODELS, often=4))
def test_a_shipped_model_answers(name: str) -> None:
    recipe = RECIPES[name]
    # of D2F's answers of free wording half are right
    items, right = (6, 2) if recipe.free_wording and recipe.lora_rank else (3, 2)
    overrides = [f"model={name}", f"benchmark={recipe.tasks[0]}", f"+benchmark.limit={items}"]
    model = compose([f"model={name}"])["model"]
    config = compose([*overrides, *_decoder(model), "benchmark.allow_code_execution=true"])
    decode = decoder_of(config["decoder"])
    loaded = loading.load_model(ModelSpec(**model, dtype="float32", device="cpu"))
    assert loaded.metadata.adapter == recipe.layout
    benchmark = instantiate(config["benchmark"], "benchmark")
    texts = {
        request.id: loaded.decode(decode.generate(loaded.denoiser, request).ids)
        for request in benchmark.requests(loaded.encode)
    }
    assert sum(score.value for score in benchmark.score(texts).values()) >= right


def test_models_that_ship_have_a_recipe_and_a_yaml() -> None:
    for name in SHIPPED_MODELS:
        assert name in RECIPES
        assert name in options("model")
        assert (assets_dir() / name / "CARD.md").exists()
