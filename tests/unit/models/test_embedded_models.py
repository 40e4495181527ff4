"""Every shipped model is read by its own yaml and answers items of the test split.

Items are those of the task its recipe names first; two of three must be right, which no model that
was read wrongly reaches.
"""

from __future__ import annotations

from collections.abc import Mapping

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

ITEMS, RIGHT = 3, 2
OF_WORDING, RIGHT_OF_WORDING = 6, 2  # D2F on free wording: half of its answers are right
DECODERS: Mapping[str, str] = {
    "full": "fast_dllm",
    "block_causal": "d2f",
    "causal": "ar",
    "canvas": "diffusion_gemma",
}
SPLITS = {"canvas": ["benchmark.split=copy"]}  # whose tokens each follow from the prompt alone


def _decoder(model: Mapping[str, object]) -> list[str]:
    """Return the plain decoder of an attention form; blocks of one length have their own."""
    if model.get("block") and model["shifted"]:
        return ["decoder=fast_dllm_v2"]
    if model.get("block"):
        return ["decoder=block_diffusion", f"decoder.schedule.block={model['block']}"]
    return [f"decoder={DECODERS[str(model['attention_form'])]}"]


@pytest.mark.parametrize("name", covering(7, SHIPPED_MODELS, often=4))
def test_a_shipped_model_answers(name: str) -> None:
    recipe = RECIPES[name]
    hard = recipe.free_wording and recipe.lora_rank
    items, right = (OF_WORDING, RIGHT_OF_WORDING) if hard else (ITEMS, RIGHT)
    overrides = [f"model={name}", f"benchmark={recipe.tasks[0]}", f"+benchmark.limit={items}"]
    model = compose([f"model={name}"])["model"]
    overrides += [*SPLITS.get(model["attention_form"], ()), *_decoder(model)]
    config = compose([*overrides, "benchmark.allow_code_execution=true"])
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
