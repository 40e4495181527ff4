"""Training of the embedded models by recipe: ``train("tiny-llada", out_dir)``.

One process, one or few CPU threads; state is written every minute or two and a run resumes from
it with the same data and masks, since both depend on (seed, phase, step) alone. Recipes are in
`recipes.py`, objectives in `objectives.py`. Scoring by decoding is left to the benchmark; the live
number here is accuracy on content tokens from the left context alone, on the test split.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.benchmarks.embedded import minigsm
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.paths import assets_dir
from dllm_bench.store.files import atomic_path
from dllm_bench.training import progress
from dllm_bench.training.prompts import task_pairs
from scripts.embedded import adapt, card, data, export, objectives, tokenizer
from scripts.embedded import network as net
from scripts.embedded.optim import Optimizer, learning_rate_factor
from scripts.embedded.recipes import DRILL, RECALL, RECIPES, Phase, Recipe

LORA_TARGETS = ("q", "k", "v", "o")
PROBE_ROWS = 256
DRILL_WIDTH = 6


@dataclass
class Run:
    """Everything one training run holds in memory."""

    recipe: Recipe
    cfg: net.NetConfig
    vocabulary: objectives.Vocabulary
    pools: dict[str, data.Pool]
    probes: dict[str, data.Batch]
    equations_E6: Tensor
    facts_PKF6: Tensor
    base: net.Weights
    trained: net.Weights
    log: list[dict[str, float]] = field(default_factory=list)
    phase: int = 0
    step: int = 0
    seconds: float = 0.0


def train(
    name: str,
    out_dir: Path,
    steps: int | None = None,
    resume: bool = True,
    threads: int = 1,
    save_every_s: float = 120.0,
    report: Callable[[str], None] = print,
    recipe: Recipe | None = None,
) -> Path:
    """Train an embedded model and write its folder; returns the folder.

    `steps` caps every phase (a smoke run); `resume` continues from ``out_dir/state.pt``; models
    that start from another one read it from the folder beside `out_dir`, else from the shipped
    assets, and train it there when it does not ship. `recipe` replaces the shipped one.
    """
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = 64
    recipe = recipe or RECIPES[name]
    start_dir = _start_folder(recipe, out_dir)
    if start_dir and not (start_dir / "model.safetensors").exists():
        train(str(recipe.start), start_dir, steps, resume, threads, save_every_s, report)
    run = prepare(recipe, out_dir.parent / "pools", start_dir)
    state_file = out_dir / "state.pt"
    saved = torch.load(state_file) if resume and state_file.exists() else None
    if saved:
        _restore(run, saved)
    compiled = torch.compile(net.hidden_states, dynamic=False)
    for index in range(run.phase, len(run.recipe.phases)):
        phase = run.recipe.phases[index]
        phase = replace(phase, steps=min(phase.steps, steps)) if steps else phase
        optimizer = Optimizer(run.trained, phase.lr, lambda n: _is_matrix(run, n))
        if saved and saved["phase"] == index:
            optimizer.load(saved["optimizer"])
        run.phase = index
        _run_phase(run, phase, optimizer, compiled, (out_dir, save_every_s, report))
        run.trained = {n: t.clone().requires_grad_() for n, t in optimizer.average.items()}
        run.step = 0
    write(run, out_dir, run.trained)
    return out_dir


def _start_folder(recipe: Recipe, out_dir: Path) -> Path | None:
    if recipe.start is None:
        return None
    beside = out_dir.parent / recipe.start
    trained = (beside / "model.safetensors").exists()
    return beside if trained or recipe.start not in SHIPPED_MODELS else assets_dir() / recipe.start


def prepare(recipe: Recipe, cache: Path | None, start_dir: Path | None = None) -> Run:
    """Build vocabulary, pools, probes and starting weights."""
    words = tokenizer.build_tokenizer(recipe.chat, recipe.first_vocabulary)
    cfg = _net_config(recipe.layout, len(words))
    tasks = recipe.tasks
    pools = {
        t: data.load_pool(t, recipe.pool_size, recipe.pool_seed, recipe.chat, cache) for t in tasks
    }
    operands = data.ANY if "minimath" in tasks else data.SMALL
    equations = data.equation_table(words, operands)
    facts = data.fact_table(words) if RECALL in recipe.drills else torch.empty(0)
    base = _starting_weights(recipe, cfg, start_dir, words.convert_tokens_to_ids)
    trained = _new_lora(base, recipe) if recipe.lora_rank else base
    run = Run(
        recipe, cfg, _vocabulary(words), pools, {}, equations, facts, base,
        {n: t.requires_grad_() for n, t in trained.items()},
    )  # fmt: skip
    run.probes = {t: _probe_batch(recipe, t, run.vocabulary.eos_id) for t in tasks}
    return run


def _starting_weights(
    recipe: Recipe, cfg: net.NetConfig, start_dir: Path | None, to_ids: Callable
) -> net.Weights:
    if start_dir is None:
        return net.initial_weights(cfg, recipe.seed, to_ids([" " + n for n in tokenizer.NUMBERS]))
    start = RECIPES[str(recipe.start)]
    words = tokenizer.build_tokenizer(first=start.first_vocabulary)
    source = _net_config(start.layout, len(words))
    weights = export.read_weights(start_dir, list(net.shapes(source)), start.layout)
    if len(weights["wte"]) != source.vocab_size:
        raise DllmBenchError(
            f"{recipe.name} starts from a {start.name} of {source.vocab_size} words, the one in "
            f"{start_dir} has {len(weights['wte'])}; train it first, into a folder beside."
        )
    return weights if source == cfg else adapt.adapted(weights, source, cfg, recipe.seed)


LAYOUTS: dict[str, dict[str, Any]] = {
    "llada": {"n_kv_heads": 4},
    "llada_moe": {"n_kv_heads": 4, "qk_norm": True,
                  "experts": net.Experts(4, 2, 128, shared=False, dense_layers=0, score="softmax")},
    "llada2": {"n_kv_heads": 2, "qk_norm": True,
               "experts": net.Experts(4, 2, 96, shared=True, dense_layers=1, score="sigmoid",
                                      scale=2.0)},
    "dream": {"n_kv_heads": 2, "qkv_bias": True},
    "sdar": {"n_kv_heads": 2, "qk_norm": True},
    "qwen3": {"n_kv_heads": 2, "qk_norm": True},
}  # fmt: skip
"""What tells the networks apart; LLaDA has as many key/value heads as query heads."""


def _net_config(layout: str, vocab_size: int) -> net.NetConfig:
    return net.NetConfig(vocab_size, **LAYOUTS[layout])


def _new_lora(base: net.Weights, recipe: Recipe) -> net.Weights:
    rng = torch.Generator().manual_seed(recipe.seed)
    lora: net.Weights = {}
    for name, weight in base.items():
        if name.split(".")[-1] in LORA_TARGETS and weight.ndim == 2:
            rows, columns = weight.shape
            down = torch.randn(recipe.lora_rank, columns, generator=rng) / columns**0.5
            lora |= {f"{name}.A": down, f"{name}.B": torch.zeros(rows, recipe.lora_rank)}
    return lora


def _vocabulary(words: Any) -> objectives.Vocabulary:
    hard = [" " + n for n in tokenizer.NUMBERS] + [*"abcxry", "xs", "ys", "zs"]
    hard += [" " + w for w in "a b c x r y xs ys zs + - * % > < == max min".split()]
    if len(words) > len(tokenizer.first_pieces()):
        hard += [" " + word for word in (*tokenizer.LATER_WORDS, *minigsm.NAMES, *minigsm.ITEMS)]
    hard_V = torch.zeros(len(words), dtype=torch.bool)
    hard_V[torch.tensor(words.convert_tokens_to_ids(hard))] = True
    return objectives.Vocabulary(words.mask_token_id, words.eos_token_id, hard_V)


def _probe_batch(recipe: Recipe, task: str, eos: int) -> data.Batch:
    pool = data.make_pool(task_pairs(task, "test", PROBE_ROWS, 99), recipe.chat)
    return data.draw_rows(pool, PROBE_ROWS, 128, torch.Generator().manual_seed(0), eos, False)


def _is_matrix(run: Run, name: str) -> bool:
    small = name.split(".")[-1] in ("wte", "head", "router")
    return not run.recipe.lora_rank and not small and run.trained[name].ndim == 2


def effective_weights(run: Run, trained: net.Weights) -> net.Weights:
    """The weights of the forward pass: the trained ones, or base + B A for an adapter."""
    if not run.recipe.lora_rank:
        return trained
    merged = dict(run.base)
    for name in {n.rsplit(".", 1)[0] for n in trained}:
        update = trained[f"{name}.B"] @ trained[f"{name}.A"] * export.LORA_ALPHA_PER_RANK
        merged[name] = run.base[name].detach() + update
    return merged


def draw_batch(run: Run, phase: Phase, rng: torch.Generator) -> data.Batch:
    """Rows of all tasks and drills at one drawn length."""
    lengths, shares = zip(*phase.lengths, strict=True)
    length = lengths[int(torch.multinomial(torch.tensor(shares), 1, generator=rng))]
    rows = run.recipe.batch_tokens // length
    counts = {name: round(rows * share) for name, share in phase.data}
    counts[phase.data[0][0]] += rows - sum(counts.values())
    eos, long = run.vocabulary.eos_id, phase.prefer_long
    drills: dict[str, Callable[..., data.Batch]] = {
        DRILL: partial(data.draw_drills, run.equations_E6),
        RECALL: partial(data.draw_recalls, run.facts_PKF6),
    }
    return data.join(
        [
            drills[name](count, length, rng, eos)
            if name in drills
            else data.draw_rows(run.pools[name], count, length, rng, eos, long)
            for name, count in counts.items()
        ]
    )


def make_example(run: Run, phase: Phase, rng: torch.Generator) -> objectives.Example:
    """One training example batch under the phase's objective."""
    batch, shift = draw_batch(run, phase, rng), run.recipe.shift
    known: dict[str, Callable[..., objectives.Example]] = {
        "causal": objectives.causal,
        "masked": partial(objectives.masked, shares=phase.states, padding=phase.padding),
        "rising": objectives.rising,
        "blocks": partial(objectives.blocks, size=phase.block, padding=phase.padding),
    }
    return known[phase.objective](batch, run.vocabulary, rng, shift)


def loss_of(
    run: Run, weights: net.Weights, example: objectives.Example, forward: Callable
) -> Tensor:
    """Weighted cross-entropy (nats) at the scored positions."""
    positions_L = example.positions_L
    if positions_L is None:
        positions_L = torch.arange(example.inputs_BL.shape[1])
    rope = net.rotary(run.cfg, positions_L)
    states = forward(weights, run.cfg, example.inputs_BL, rope, example.bias)
    rows_ND = states.reshape(-1, run.cfg.d_model)[example.rows_N]
    logits_NV = F.linear(rows_ND, weights["head"].to(rows_ND.dtype)).float()
    losses_N = F.cross_entropy(logits_NV, example.targets_N, reduction="none")
    return (losses_N * example.weights_N).sum()


def _run_phase(
    run: Run,
    phase: Phase,
    optimizer: Optimizer,
    forward: Callable,
    output: tuple[Path, float, Callable],
) -> None:
    out_dir, save_every_s, report = output
    started = saved_at = time.monotonic()
    first_step, losses = run.step, []
    while run.step < phase.steps:
        key = (run.recipe.seed * 10 + run.phase) * 1_000_000 + run.step
        example = make_example(run, phase, torch.Generator().manual_seed(key))
        loss = loss_of(run, effective_weights(run, run.trained), example, forward)
        loss.backward()
        optimizer.step(learning_rate_factor(run.step, phase.steps, phase.decay_steps))
        run.step += 1
        losses.append(loss.item())
        if run.step % 200 == 0 or run.step == phase.steps:
            rate = (time.monotonic() - started) / (run.step - first_step)
            entry = {"phase": run.phase, "step": run.step, "loss": sum(losses) / len(losses)}
            entry |= {f"left_{t}": probe(run, phase, optimizer.average, t) for t in run.probes}
            run.log.append({k: round(v, 4) for k, v in entry.items()})
            eta_s = (phase.steps - run.step) * rate
            point = {name: value for name, value in run.log[-1].items() if name != "phase"}
            report(f"{phase.objective}, {progress.line(point, phase.steps, eta_s)}")
            losses = []
        if time.monotonic() - saved_at > save_every_s or run.step == phase.steps:
            run.seconds += time.monotonic() - saved_at
            saved_at = time.monotonic()
            _save(run, optimizer, out_dir)


@torch.no_grad()
def probe(run: Run, phase: Phase, trained: net.Weights, task: str) -> float:
    """Share of content tokens right when all left is clean and all right is masked (test split).

    One random content token of each probe row; attention is the phase's own.
    """
    batch, shift = run.probes[task], run.recipe.shift
    offset_BL = torch.arange(batch.ids_BL.shape[1])[None] - batch.prompt_B[:, None]
    hard_BL = run.vocabulary.hard_V[batch.ids_BL] & (offset_BL >= 0)
    generator = torch.Generator().manual_seed(run.step)
    chosen_B = torch.multinomial(hard_BL.float(), 1, generator=generator)[:, 0]
    position_L = torch.arange(batch.ids_BL.shape[1])
    hidden_BL = (position_L[None] >= chosen_B[:, None]) & (offset_BL >= 0)
    inputs_BL = batch.ids_BL.masked_fill(hidden_BL, run.vocabulary.mask_id)
    size = {"causal": 1, "blocks": phase.block}.get(phase.objective)
    bias = objectives.causal_mask(len(position_L), size) if size else None
    weights = effective_weights(run, trained)
    rope = net.rotary(run.cfg, position_L)
    states_BLD = net.hidden_states(weights, run.cfg, inputs_BL, rope, bias)
    picked_BD = states_BLD[torch.arange(len(chosen_B)), chosen_B - shift].float()
    guess_B = (picked_BD @ weights["head"].T).argmax(-1)
    return (guess_B == batch.ids_BL[torch.arange(len(chosen_B)), chosen_B]).float().mean().item()


def _save(run: Run, optimizer: Optimizer, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    state = {"phase": run.phase, "step": run.step, "log": run.log, "seconds": run.seconds}
    state |= {"trained": run.trained, "optimizer": optimizer.state()}
    with atomic_path(out_dir / "state.pt") as temporary:
        torch.save(state, temporary)
    write(run, out_dir, optimizer.average)


def _restore(run: Run, saved: dict[str, Any]) -> None:
    run.phase, run.step, run.log = saved["phase"], saved["step"], saved["log"]
    run.seconds = saved["seconds"]
    for name, tensor in run.trained.items():
        tensor.data.copy_(saved["trained"][name])


def write(run: Run, out_dir: Path, trained: net.Weights) -> None:
    """Write the model folder (checkpoint or adapter) and the training log."""
    recipe = run.recipe
    words = tokenizer.build_tokenizer(recipe.chat, recipe.first_vocabulary)
    if recipe.lora_rank:
        export.write_adapter(out_dir, trained, str(recipe.start), recipe.lora_rank, words)
    else:
        export.write_checkpoint(out_dir, trained, run.cfg, recipe.layout, words)
    card.write(out_dir, recipe, run.seconds)
    (out_dir / "training_log.json").write_text(json.dumps({"curve": run.log}) + "\n")
