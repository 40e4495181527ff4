"""The embedded DiffusionGemma is trained on the network that decoding runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.canvas import CanvasDenoiser
from scripts.embedded import canvas, data
from scripts.embedded.items import task_pairs
from scripts.embedded.recipes import RECIPES
from scripts.embedded.train import train
from tests.canvas import canvas_decoder
from tests.helpers import load_denoiser

RECIPE = replace(RECIPES["tiny-diffusion-gemma"], pool_size=80, batch_tokens=200)


def logits_in_decoding(model: CanvasDenoiser, rows: canvas.CanvasRows, mean_1CH: Any) -> Any:
    """Of the first row's canvas, behind its encoded text."""
    begin = int(rows.begin_B[0])
    tokens_1L = torch.cat([rows.ids_BL[:1, :begin], rows.noised_BC[:1]], 1)
    kv, text, open_ = model.new_cache(tokens_1L.shape[1]), (0, begin), (begin, tokens_1L.shape[1])
    plan = ForwardPlan(ForwardKind.PREFILL, text, text, text, "block_causal", 1)
    model.forward(tokens_1L, plan, kv)
    kv.keep(plan, torch.tensor(0))
    denoise = ForwardPlan(ForwardKind.DENOISE, open_, open_, (0, 0), added_KFH=mean_1CH)
    return model.forward(tokens_1L, denoise, kv)


def test_a_short_training_writes_a_model_of_the_network_it_trained(tmp_path: Path) -> None:
    lines: list[str] = []
    folder = train(RECIPE.name, tmp_path / "made", steps=3, report=lines.append, recipe=RECIPE)
    (point,) = json.loads((folder / "training_log.json").read_text())["curve"]
    assert point["step"] == 3 and "canvas, step 3 of 3" in lines[0]
    assert "LM in the diffusion_gemma layout" in (folder / "CARD.md").read_text()
    model = load_denoiser(folder)
    assert isinstance(model, CanvasDenoiser)
    assert model.canvas_length == canvas.CANVAS and model.vocab_size > 500
    pool, module = data.load_pool("miniparallel", 80, 1, False, tmp_path / "pools"), model.module
    for seed in range(4):
        rng = torch.Generator().manual_seed(seed)
        rows = canvas.draw(pool, RECIPE, model.special.eos, model.vocab_size, rng)
        for mean_BCH in (None, canvas.own_prediction(module, rows)):
            with torch.no_grad():
                hidden = canvas.hidden_states(module, rows, mean_BCH)[:1, -canvas.CANVAS :]
                expected = canvas.logits_of(module, hidden)
            found = logits_in_decoding(model, rows, None if mean_BCH is None else mean_BCH[:1])
            torch.testing.assert_close(found.clone(), expected, atol=1e-4, rtol=1e-4)
    generation = canvas_decoder(anneal__steps=3).generate(model, Request("r", (20, 21, 22), 20))
    assert len(generation.ids) == 2 * canvas.CANVAS


def test_a_canvas_is_clean_where_it_has_no_noise() -> None:
    pool = data.make_pool(task_pairs("miniparallel", "train", 60, 1), False)
    rows = canvas.draw(pool, RECIPE, 1, 600, torch.Generator().manual_seed(2))
    count = RECIPE.batch_tokens // canvas.LENGTH
    assert rows.noised_BC.shape == rows.clean_BC.shape == (count, canvas.CANVAS)
    for row, begin in enumerate(rows.begin_B.tolist()):
        inside = rows.ids_BL[row, begin : begin + canvas.CANVAS]
        assert torch.equal(rows.clean_BC[row, : len(inside)], inside)
        assert (rows.clean_BC[row, len(inside) :] == 1).all()
    assert ((rows.weight_BC == 1) | (rows.clean_BC == 1)).all()
