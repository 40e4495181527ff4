"""Train the embedded DiffusionGemma: uniform-state diffusion of one canvas after a clean text.

A step encodes rows of prompt and answer causally and denoises, in the same forward, one canvas of
each row: a share of its tokens, drawn for each row, is replaced by random ones. The loss is the
cross-entropy of the clean tokens at every position of the canvas, and a smaller one of the next
token at every position of the answer, from which the encoder learns to look things up. In half of
the steps the canvas is conditioned on the network's own prediction, as in decoding. Layers are
transformers' own modules; numbers of layers that the encoder multiplies by stay 1.

Shapes: B rows, L positions of a row, C of a canvas, X = L + C, V vocabulary, H hidden size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.canvas import CanvasModule
from dllm_bench.models.load import build_module
from dllm_bench.training.loop import Countdown
from scripts.embedded import card, data
from scripts.embedded.items import task_pairs
from scripts.embedded.optim import Optimizer, learning_rate_factor
from scripts.embedded.recipes import Recipe
from scripts.embedded.tokenizer import build_tokenizer

LAYOUT, CANVAS, LENGTH = "diffusion_gemma", 16, 40
"""Layout, positions of a canvas, and of a row: squares of the task do not fit."""
FIRST_CANVAS, WHOLE_NOISE, CONDITIONED = 0.85, 0.25, 0.5
"""Shares: rows whose first canvas is trained, canvases that are all noise, steps that condition."""
NEXT_TOKEN = 0.3
"""Weight of the encoder's loss."""
PROBE_ROWS, LOG_EVERY = 200, 100
SIZES: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 32,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 64,
    "sliding_window": 32,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


@dataclass(frozen=True)
class CanvasRows:
    """Clean rows and a canvas of each."""

    ids_BL: Tensor
    """Prompt, answer, then end tokens."""
    prompt_B: Tensor
    """Where the answer begins."""
    begin_B: Tensor
    """Where the canvas begins."""
    clean_BC: Tensor
    """The canvas without noise."""
    noised_BC: Tensor
    """The canvas that is fed."""
    weight_BC: Tensor
    """Weight of each position in the loss."""


def published_config(vocabulary: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of config.json."""
    text = {**SIZES, **ids, "model_type": "diffusion_gemma_text", "vocab_size": vocabulary}
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": LAYOUT,
        "canvas_length": CANVAS,
        "tie_word_embeddings": True,
        "text_config": text,
    }


def draw(
    pool: data.Pool, recipe: Recipe, eos: int, vocabulary: int, rng: torch.Generator
) -> CanvasRows:
    """Return the rows of a step."""
    count = recipe.batch_tokens // LENGTH
    rows = data.draw_rows(pool, count, LENGTH, rng, eos, False)
    number_B = (torch.rand(count, generator=rng) >= FIRST_CANVAS).long()
    return with_canvas(rows, number_B, eos, vocabulary, recipe.phases[0].padding, rng)


def with_canvas(
    rows: data.Batch,
    number_B: Tensor,
    eos: int,
    vocabulary: int,
    padding: float,
    rng: torch.Generator,
) -> CanvasRows:
    """Return rows with the noised canvas of each that has this number; `padding`: weight of end
    tokens after the first."""
    begin_B = rows.prompt_B + CANVAS * number_B
    place_BC = begin_B[:, None] + torch.arange(CANVAS)
    longer = torch.nn.functional.pad(rows.ids_BL, (0, 2 * CANVAS), value=eos)
    clean_BC = longer.gather(1, place_BC)
    share_B1 = torch.rand(len(begin_B), 1, generator=rng)
    share_B1[torch.rand(len(begin_B), generator=rng) < WHOLE_NOISE] = 1.0
    is_noise_BC = torch.rand(clean_BC.shape, generator=rng) < share_B1
    noise_BC = torch.randint(vocabulary, clean_BC.shape, generator=rng)
    weight_BC = torch.where(place_BC > rows.total_B[:, None], padding, 1.0)
    noised_BC = torch.where(is_noise_BC, noise_BC, clean_BC)
    return CanvasRows(rows.ids_BL, rows.prompt_B, begin_B, clean_BC, noised_BC, weight_BC)


def masks(rows: CanvasRows, window: int) -> dict[str, Tensor]:
    """Additive masks (B, 1, X, X) by kind of layer: rows of the text, then of the canvas."""
    place_L, size = torch.arange(rows.ids_BL.shape[1]), len(rows.begin_B)
    distance_LL = place_L[:, None] - place_L
    before_BL = place_L < rows.begin_B[:, None]
    near_BL = before_BL & (place_L > rows.begin_B[:, None] - window)
    found = {}
    for kind, text_LL, seen_BL in (
        ("full_attention", distance_LL >= 0, before_BL),
        ("sliding_attention", (distance_LL >= 0) & (distance_LL < window), near_BL),
    ):
        length = len(place_L)
        sees_BXX = torch.zeros(size, length + CANVAS, length + CANVAS, dtype=torch.bool)
        sees_BXX[:, :length, :length] = text_LL
        sees_BXX[:, length:, :length] = seen_BL[:, None]
        sees_BXX[:, length:, length:] = True
        found[kind] = torch.zeros(sees_BXX.shape).masked_fill(~sees_BXX, -torch.inf)[:, None]
    return found


def hidden_states(module: CanvasModule, rows: CanvasRows, mean_BCH: Tensor | None) -> Tensor:
    """Normalised hidden states (B, X, H)."""
    model, config = module.model, module.config
    canvas_BCH = model.embed_tokens(rows.noised_BC)
    mean_BCH = torch.zeros_like(canvas_BCH) if mean_BCH is None else mean_BCH
    canvas_BCH = module.self_conditioning(canvas_BCH, mean_BCH)
    hidden = torch.cat([model.embed_tokens(rows.ids_BL), canvas_BCH], 1)
    place_BL = torch.arange(rows.ids_BL.shape[1]).expand_as(rows.ids_BL)
    place_BX = torch.cat([place_BL, rows.begin_B[:, None] + torch.arange(CANVAS)], 1)
    seen = masks(rows, config.sliding_window)
    turned = {kind: model.rotary_emb(hidden, place_BX, kind) for kind in seen}
    for layer, kind in zip(model.layers, SIZES["layer_types"], strict=True):
        hidden = layer(hidden, position_embeddings=turned[kind], attention_mask=seen[kind])
    normed: Tensor = model.norm(hidden)
    return normed


def logits_of(module: CanvasModule, hidden: Tensor) -> Tensor:
    """Return logits (..., V)."""
    cap = module.config.final_logit_softcapping
    logits: Tensor = module.lm_head(hidden) / cap
    return logits.tanh() * cap


@torch.no_grad()
def own_prediction(module: CanvasModule, rows: CanvasRows) -> Tensor:
    """Return the mean embedding (B, C, H) of what the network predicts without conditioning."""
    canvas_BCH = hidden_states(module, rows, None)[:, -CANVAS:]
    table = module.model.embed_tokens
    share_BCV = logits_of(module, canvas_BCH).softmax(-1)
    mean_BCH: Tensor = share_BCV @ table.weight * table.embed_scale
    return mean_BCH


def loss_of(module: CanvasModule, rows: CanvasRows, conditioned: bool) -> Tensor:
    """Weighted cross-entropy in nats of a step."""
    mean_BCH = own_prediction(module, rows) if conditioned else None
    hidden = hidden_states(module, rows, mean_BCH)
    canvas = logits_of(module, hidden[:, -CANVAS:])
    losses_N = cross_entropy(canvas.flatten(0, 1), rows.clean_BC.flatten(), reduction="none")
    weight_N = rows.weight_BC.flatten()
    place_L = torch.arange(rows.ids_BL.shape[1] - 1)
    ends_B1 = (rows.begin_B + CANVAS)[:, None]
    asked_BL = (place_L >= rows.prompt_B[:, None] - 1) & (place_L < ends_B1)
    asked_BL &= (rows.ids_BL != rows.ids_BL[:, -1:])[:, :-1]  # not after the first end token
    text = logits_of(module, hidden[:, :-CANVAS][:, :-1][asked_BL])
    return (losses_N * weight_N).sum() / weight_N.sum() + NEXT_TOKEN * cross_entropy(
        text, rows.ids_BL[:, 1:][asked_BL]
    )


@torch.no_grad()
def probe(module: CanvasModule, rows: CanvasRows) -> dict[str, float]:
    """Measure, on the test split and from noise alone, the share of tokens and of whole canvases
    that a second forward, conditioned on the first, predicts right.
    """
    mean_BCH = own_prediction(module, rows)
    canvas = logits_of(module, hidden_states(module, rows, mean_BCH)[:, -CANVAS:])
    counted_BC = rows.weight_BC == 1
    right_BC = (canvas.argmax(-1) == rows.clean_BC) | ~counted_BC
    share = float((right_BC & counted_BC).sum() / counted_BC.sum())
    return {"tokens": round(share, 4), "canvases": round(float(right_BC.all(1).float().mean()), 4)}


def new_module(config: Mapping[str, Any], seed: int) -> CanvasModule:
    """Return the module with random weights of unit scale."""
    torch.manual_seed(seed)
    module = build_module(ADAPTERS[LAYOUT], config, "sdpa")
    assert isinstance(module, CanvasModule)
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            width = parameter.shape[-1]
            torch.nn.init.normal_(parameter, std=width**-0.5)
        elif name.endswith("weight") or "scale" in name:
            torch.nn.init.ones_(parameter)
    module.tie_weights()
    return module


def train(recipe: Recipe, out: Path, steps: int | None, report: Callable[[str], None]) -> None:
    """Train and write the folder: weights, config, tokenizer, card and training log.

    `steps` caps the steps. An interrupted training begins anew: it takes minutes.
    """
    (phase,), began, wall = recipe.phases, time.process_time(), time.monotonic()
    total = min(steps or phase.steps, phase.steps)
    words = build_tokenizer()
    ids = {f"{r}_token_id": getattr(words, f"{r}_token_id") for r in ("bos", "eos", "pad")}
    config, eos = published_config(len(words), ids), words.eos_token_id
    module = new_module(config, recipe.seed)
    (task,) = recipe.tasks
    cache = out.parent / "pools"
    pool = data.load_pool(task, recipe.pool_size, recipe.pool_seed, recipe.chat, cache)
    held = probe_rows(task, eos, len(words), recipe)
    trained: dict[str, Tensor] = dict(module.named_parameters())
    optimizer = Optimizer(trained, phase.lr, lambda name: is_muon_matrix(name, trained[name]))
    log, losses, countdown = [], list[float](), Countdown(total)
    for step in range(total):
        rng = torch.Generator().manual_seed(recipe.seed * 1_000_000 + step)
        rows = draw(pool, recipe, eos, len(words), rng)
        loss = loss_of(module, rows, float(torch.rand((), generator=rng)) < CONDITIONED)
        losses.append(loss.item())
        loss.backward()
        optimizer.step(learning_rate_factor(step, total, phase.decay_steps))
        if (step + 1) % LOG_EVERY == 0 or step + 1 == total:
            spent = round((time.process_time() - began) / 60, 2)
            log.append(
                {"step": step + 1, "loss": round(sum(losses) / len(losses), 4)}
                | {"core_minutes": spent, **probe(module, held)}
            )
            report(f"{phase.objective}, {countdown.line(log[-1])}")
            losses = []
    write(out, module, optimizer.average, config)
    (out / "training_log.json").write_text(json.dumps({"curve": log}) + "\n")
    card.write(out, recipe, time.monotonic() - wall)


def is_muon_matrix(name: str, tensor: Tensor) -> bool:
    """Return whether Muon optimises the tensor: matrices of the layers, no routers or experts."""
    return "layers" in name and tensor.dim() == 2 and "router" not in name


def probe_rows(task: str, eos: int, vocabulary: int, recipe: Recipe) -> CanvasRows:
    """First canvases of the test split, as noise."""
    pairs = task_pairs(task, "test", PROBE_ROWS, recipe.pool_seed + 1)
    rng = torch.Generator().manual_seed(recipe.seed)
    rows = data.draw_rows(data.make_pool(pairs, False), PROBE_ROWS, LENGTH, rng, eos, False)
    first_B = torch.zeros(PROBE_ROWS, dtype=torch.long)
    held = with_canvas(rows, first_B, eos, vocabulary, 0.0, rng)
    return replace(held, noised_BC=torch.randint(vocabulary, held.clean_BC.shape, generator=rng))


def write(
    out: Path, module: CanvasModule, average: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write the averaged weights in bfloat16 under their published names, and what reads them."""
    out.mkdir(parents=True, exist_ok=True)
    layout, state = ADAPTERS[LAYOUT], module.state_dict() | dict(average)
    del state["lm_head.weight"]
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    tensors = {
        part.name: state[name][part.place].detach().to(torch.bfloat16).clone()
        for name in state
        for part in layout.parts(name, shapes)
    }
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    build_tokenizer().save_pretrained(str(out))
