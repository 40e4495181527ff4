"""Training of the embedded models by recipe: `train("tiny-llada", out_dir)`.

One process with one or a few CPU threads. Its state is written every two minutes; a resumed
training draws the same data and masks as one that was never interrupted, since both depend only on
(seed, phase, step). During training it measures accuracy on content tokens given only the text to
their left, on the test split; scores of decoding are left to the benchmarks.

Shapes: B rows of a batch, L positions of a row, N scored positions, H hidden size, V vocabulary,
E equations, P people, F facts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.sources import SHIPPED_MODELS
from dllm_bench.paths import assets_dir
from dllm_bench.store.files import atomic_path
from dllm_bench.training.loop import Countdown, Report
from scripts.embedded import adapt, canvas, card, data, export, network, objectives, tokenizer
from scripts.embedded.items import task_pairs
from scripts.embedded.optim import Optimizer, learning_rate_factor
from scripts.embedded.recipes import DRILL, RECALL, RECIPES, Phase, Recipe
from scripts.embedded.tasks import minigsm

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

LORA_TARGETS = ("q", "k", "v", "o")
PROBE_ROWS = 256  # texts of a task whose content tokens are predicted during training
PROBE_SEED = 99
LOG_EVERY = 200  # steps
TOKEN_CAUSAL = ("causal", "feed_order", "strides")  # objectives in which text sees its past alone
IN_BLOCKS: dict[str, Callable[..., objectives.Example]] = {
    "blocks": objectives.blocks,
    "edits": objectives.blocks,
    "complementary": objectives.complementary,
    "feed_order": objectives.feed_order,
    "strides": objectives.strides,
}
COUNTED = ("phase", "step", "log", "seconds")  # fields of a training in its state file


@dataclass
class ModelTraining:
    """A training in memory."""

    recipe: Recipe
    sizes: network.NetworkSizes
    vocabulary: objectives.Vocabulary
    pools: dict[str, data.Pool]
    """Task -> tokenised train split."""
    probes: dict[str, data.Batch]
    """Task -> rows of the test split."""
    equations_E6: Tensor
    """For the arithmetic drill (`data.equation_table`)."""
    facts_P4F6: Tensor
    """For the recall drill (`data.fact_table`)."""
    base: network.Weights
    """The weights at the start; an adapter is added to them."""
    trained: network.Weights
    """The tensors that learn: all weights, or the matrices of an adapter."""
    log: list[dict[str, float]] = field(default_factory=list)
    phase: int = 0
    step: int = 0
    """Steps done in the current phase."""
    seconds: float = 0.0


def train(
    name: str,
    out_dir: Path,
    steps: int | None = None,
    resume: bool = True,
    threads: int = 1,
    save_every_s: float = 120.0,
    report: Report = print,
    recipe: Recipe | None = None,
) -> Path:
    """Train an embedded model and write its folder; returns the folder.

    `steps` caps every phase (for a quick check); `resume` continues from `out_dir`/state.pt;
    `recipe` replaces the one in `recipes.yaml`. A model that starts from another one reads it from
    the folder next to `out_dir`, else from the package; a start that does not ship is trained in
    that folder first.
    """
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = 64
    recipe = recipe or RECIPES[name]
    if recipe.layout == canvas.LAYOUT:
        canvas.train(recipe, out_dir, steps, report)
        return out_dir
    start_dir = _start_folder(recipe, out_dir)
    if start_dir and not (start_dir / "model.safetensors").exists():
        train(str(recipe.start), start_dir, steps, resume, threads, save_every_s, report)
    state_file = out_dir / "state.pt"
    saved = torch.load(state_file) if resume and state_file.exists() else None
    if saved and saved.get("model", recipe.name) != recipe.name:
        raise DllmBenchError(
            f"{out_dir} holds the unfinished training of {saved['model']}, and {recipe.name} is to "
            "be trained there; give each a folder of its own (--out)."
        )
    training = prepare(recipe, out_dir.parent / "pools", start_dir)
    if saved:
        _restore(training, saved)
    compiled = torch.compile(network.hidden_states, dynamic=False)
    for index in range(training.phase, len(training.recipe.phases)):
        phase = training.recipe.phases[index]
        phase = replace(phase, steps=min(phase.steps, steps)) if steps else phase
        optimizer = Optimizer(training.trained, phase.lr, lambda n: is_muon_matrix(training, n))
        if saved and saved["phase"] == index:
            optimizer.load(saved["optimizer"])
        training.phase = index
        _run_phase(training, phase, optimizer, compiled, Output(out_dir, save_every_s, report))
        training.trained = {n: t.clone().requires_grad_() for n, t in optimizer.average.items()}
        training.step = 0
    write(training, out_dir, training.trained)
    return out_dir


# --- the start -----------------------------------------------------------------------------------


def _start_folder(recipe: Recipe, out_dir: Path) -> Path | None:
    """Return the folder of the model that a recipe starts from; None for random weights."""
    if recipe.start is None:
        return None
    sibling = out_dir.parent / recipe.start
    if (sibling / "model.safetensors").exists() or recipe.start not in SHIPPED_MODELS:
        return sibling
    return assets_dir() / recipe.start


def prepare(recipe: Recipe, cache: Path | None, start_dir: Path | None = None) -> ModelTraining:
    """Build vocabulary, pools, probes and starting weights; `cache` keeps the pools."""
    words = tokenizer.build_tokenizer(recipe.chat, recipe.first_vocabulary)
    sizes = network.sizes_of_layout(recipe.layout, len(words))
    tasks = recipe.tasks
    pools = {
        t: data.load_pool(t, recipe.pool_size, recipe.pool_seed, recipe.chat, cache) for t in tasks
    }
    large = not {"minimath", "ministory"}.isdisjoint(tasks)
    operands = data.ALL_OPERANDS if large else data.SMALL_OPERANDS
    equations = data.equation_table(words, operands)
    facts = data.fact_table(words) if RECALL in recipe.drills else torch.empty(0)
    base = _starting_weights(recipe, sizes, start_dir, words.convert_tokens_to_ids)
    trained = _new_lora(base, recipe) if recipe.lora_rank else base
    training = ModelTraining(
        recipe, sizes, vocabulary_of(words, recipe.free_wording), pools, {}, equations, facts, base,
        {n: t.requires_grad_() for n, t in trained.items()},
    )  # fmt: skip
    training.probes = {t: _probe_batch(recipe, t, training.vocabulary.eos_id) for t in tasks}
    return training


def _starting_weights(
    recipe: Recipe, sizes: network.NetworkSizes, start_dir: Path | None, to_ids: Callable
) -> network.Weights:
    """Random weights, or those of the start, fitted to another layout where it differs."""
    if start_dir is None:
        number_ids = to_ids([" " + number for number in tokenizer.NUMBERS])
        return network.initial_weights(sizes, recipe.seed, number_ids)
    start = RECIPES[str(recipe.start)]
    words = tokenizer.build_tokenizer(first=start.first_vocabulary)
    source = network.sizes_of_layout(start.layout, len(words))
    weights = export.read_weights(start_dir, source, start.layout)
    if len(weights["wte"]) != source.vocab_size:
        raise DllmBenchError(
            f"{recipe.name} starts from a {start.name} of {source.vocab_size} words, the one in "
            f"{start_dir} has {len(weights['wte'])}; train {start.name} first, with --out next to "
            "this model's folder."
        )
    return weights if source == sizes else adapt.adapted(weights, source, sizes, recipe.seed)


def _new_lora(base: network.Weights, recipe: Recipe) -> network.Weights:
    """Adapter matrices `{name}.A` [rank, in], random, and `{name}.B` [out, rank], zero."""
    rng = torch.Generator().manual_seed(recipe.seed)
    lora: network.Weights = {}
    for name, weight in base.items():
        if name.split(".")[-1] in LORA_TARGETS and weight.ndim == 2:
            rows, columns = weight.shape
            down = torch.randn(recipe.lora_rank, columns, generator=rng) / columns**0.5
            lora |= {f"{name}.A": down, f"{name}.B": torch.zeros(rows, recipe.lora_rank)}
    return lora


def vocabulary_of(
    words: PreTrainedTokenizerFast, free_wording: bool = False
) -> objectives.Vocabulary:
    """Special ids, and which tokens carry the content of a problem; numbers alone if
    `free_wording`.
    """
    hard = [" " + n for n in tokenizer.NUMBERS]
    if not free_wording:
        hard += [*"abcxry", "xs", "ys", "zs"]
        hard += [" " + w for w in "a b c x r y xs ys zs + - * % > < == max min".split()]
    if len(words) > len(tokenizer.first_pieces()) and not free_wording:
        hard += [" " + word for word in (*tokenizer.LATER_WORDS, *minigsm.NAMES, *minigsm.ITEMS)]
    hard_V = torch.zeros(len(words), dtype=torch.bool)
    hard_V[torch.tensor(words.convert_tokens_to_ids(hard))] = True
    return objectives.Vocabulary(words.mask_token_id, words.eos_token_id, hard_V)


def _probe_batch(recipe: Recipe, task: str, eos: int) -> data.Batch:
    """Return rows of the test split for `probe`."""
    pool = data.make_pool(task_pairs(task, "test", PROBE_ROWS, PROBE_SEED), recipe.chat)
    rng = torch.Generator().manual_seed(0)
    length = int(pool.total_N.max()) + 1
    return data.draw_rows(pool, PROBE_ROWS, length, rng, eos, False)


# --- a step --------------------------------------------------------------------------------------


def is_muon_matrix(training: ModelTraining, name: str) -> bool:
    """Return whether Muon optimises the tensor: matrices of the blocks, except routers and
    adapters."""
    small = name.split(".")[-1] in ("wte", "head", "router")
    return not training.recipe.lora_rank and not small and training.trained[name].ndim == 2


def effective_weights(training: ModelTraining, trained: network.Weights) -> network.Weights:
    """Return the weights of the forward pass: the trained ones, or base + B A with an adapter."""
    if not training.recipe.lora_rank:
        return trained
    merged = dict(training.base)
    for name in {n.rsplit(".", 1)[0] for n in trained}:
        update = trained[f"{name}.B"] @ trained[f"{name}.A"] * export.LORA_ALPHA_PER_RANK
        merged[name] = training.base[name].detach() + update
    return merged


def draw_batch(training: ModelTraining, phase: Phase, rng: torch.Generator) -> data.Batch:
    """Return rows of all tasks and drills at one drawn length."""
    lengths, shares = zip(*phase.lengths.items(), strict=True)
    length = lengths[int(torch.multinomial(torch.tensor(shares), 1, generator=rng))]
    rows = training.recipe.batch_tokens // length
    counts = {name: round(rows * share) for name, share in phase.data.items()}
    counts[next(iter(counts))] += rows - sum(counts.values())
    eos, long = training.vocabulary.eos_id, phase.prefer_long
    drills: dict[str, Callable[..., data.Batch]] = {
        DRILL: partial(data.draw_drills, training.equations_E6),
        RECALL: partial(data.draw_recalls, training.facts_P4F6),
    }
    return data.join(
        [
            drills[name](count, length, rng, eos)
            if name in drills
            else data.draw_rows(training.pools[name], count, length, rng, eos, long)
            for name, count in counts.items()
        ]
    )


def make_example(training: ModelTraining, phase: Phase, rng: torch.Generator) -> objectives.Example:
    """Inputs and targets of one step under the phase's objective."""
    batch, shift = draw_batch(training, phase, rng), training.recipe.shift
    functions: dict[str, Callable[..., objectives.Example]] = {
        "causal": objectives.causal,
        "masked": partial(objectives.masked, shares=phase.states, padding=phase.padding),
        "rising": objectives.rising,
    }
    for name, function in IN_BLOCKS.items():
        functions[name] = partial(function, size=phase.block, padding=phase.padding)
    return functions[phase.objective](batch, training.vocabulary, rng, shift)


def plant_guesses(
    training: ModelTraining, example: objectives.Example, rng: torch.Generator, forward: Callable
) -> objectives.Example:
    """Objective `edits`: some masked positions hold a token drawn from the model's own prediction.

    The loss stays that of `blocks`, at every position that was masked, so a planted token is to be
    kept where it is right and replaced where it is wrong (LLaDA2.1, arXiv 2602.08676).
    """
    logits_NV = logits_of(training, training.trained, example, forward).detach()
    logits_NV[:, training.vocabulary.mask_id] = -torch.inf
    guess_N = torch.multinomial(logits_NV.softmax(-1), 1, generator=rng)[:, 0]
    return objectives.with_guesses(example, guess_N, rng)


def loss_of(
    training: ModelTraining,
    weights: network.Weights,
    example: objectives.Example,
    forward: Callable,
) -> Tensor:
    """Weighted cross-entropy (nats) at the scored positions; `forward` is
    `network.hidden_states`, compiled or not.
    """
    logits_NV = logits_of(training, weights, example, forward)
    losses_N = F.cross_entropy(logits_NV, example.targets_N, reduction="none")
    return (losses_N * example.weights_N).sum()


def logits_of(
    training: ModelTraining,
    weights: network.Weights,
    example: objectives.Example,
    forward: Callable,
) -> Tensor:
    """Return float32 logits (N, V) at the scored positions."""
    positions_L = example.positions_L
    if positions_L is None:
        positions_L = torch.arange(example.inputs_BL.shape[1])
    rope = network.rotary(training.sizes, positions_L)
    states = forward(weights, training.sizes, example.inputs_BL, rope, example.bias)
    rows_NH = states.reshape(-1, training.sizes.d_model)[example.rows_N]
    return F.linear(rows_NH, weights["head"].to(rows_NH.dtype)).float()


# --- a phase -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """Where a training writes, how often, and who receives its progress lines."""

    folder: Path
    save_every_s: float
    report: Report


def _run_phase(
    training: ModelTraining, phase: Phase, optimizer: Optimizer, forward: Callable, output: Output
) -> None:
    """Train until the phase's last step."""
    countdown, saved_at = Countdown(phase.steps, training.step), time.monotonic()
    losses = []
    while training.step < phase.steps:
        key = (training.recipe.seed * 10 + training.phase) * 1_000_000 + training.step
        rng = torch.Generator().manual_seed(key)
        example = make_example(training, phase, rng)
        if phase.objective == "edits":
            example = plant_guesses(training, example, rng, forward)
        loss = loss_of(training, effective_weights(training, training.trained), example, forward)
        losses.append(_finite(loss.item(), training))
        loss.backward()
        optimizer.step(learning_rate_factor(training.step, phase.steps, phase.decay_steps))
        training.step += 1
        last = training.step == phase.steps
        if training.step % LOG_EVERY == 0 or last:
            point = _log_point(training, phase, optimizer.average, sum(losses) / len(losses))
            output.report(f"{phase.objective}, {countdown.line(point)}")
            losses = []
        if time.monotonic() - saved_at > output.save_every_s or last:
            training.seconds += time.monotonic() - saved_at
            saved_at = time.monotonic()
            _save(training, optimizer, output.folder)


def _finite(loss: float, training: ModelTraining) -> float:
    """Return the loss; DllmBenchError if it is no number, which makes the weights useless."""
    if not math.isfinite(loss):
        raise DllmBenchError(
            f"The loss of {training.recipe.name} is {loss} at step {training.step}. Try again with "
            "TORCHDYNAMO_DISABLE=1 (compiled kernels may overflow), or with a lower rate; the "
            "training resumes from its last saved state."
        )
    return loss


def _log_point(
    training: ModelTraining, phase: Phase, average: network.Weights, loss: float
) -> dict[str, float]:
    """Measure, append to the log, and return what the progress line shows."""
    point = {"step": training.step, "loss": loss}
    point |= {f"left_{t}": probe(training, phase, average, t) for t in training.probes}
    point = {name: round(value, 4) for name, value in point.items()}
    training.log.append({"phase": training.phase, **point})
    return point


@torch.no_grad()
def probe(training: ModelTraining, phase: Phase, trained: network.Weights, task: str) -> float:
    """Share of content tokens predicted right from the text to their left (test split).

    One random content token of each probe row (of any kind, if its answer has none); it and
    everything to its right is masked. Attention is that of the phase's objective.
    """
    batch, shift = training.probes[task], training.recipe.shift
    _, answer_BL = objectives.grid(batch)
    hard_BL = training.vocabulary.hard_V[batch.ids_BL] & answer_BL
    hard_BL = torch.where(hard_BL.any(-1, keepdim=True), hard_BL, answer_BL)
    generator = torch.Generator().manual_seed(training.step)
    chosen_B = torch.multinomial(hard_BL.float(), 1, generator=generator)[:, 0]
    position_L = torch.arange(batch.ids_BL.shape[1])
    hidden_BL = (position_L[None] >= chosen_B[:, None]) & answer_BL
    inputs_BL = batch.ids_BL.masked_fill(hidden_BL, training.vocabulary.mask_id)
    size = 1 if phase.objective in TOKEN_CAUSAL else phase.block
    bias = objectives.causal_mask(len(position_L), size) if size else None
    weights = effective_weights(training, trained)
    rope = network.rotary(training.sizes, position_L)
    states_BLH = network.hidden_states(weights, training.sizes, inputs_BL, rope, bias)
    chosen_BH = states_BLH[torch.arange(len(chosen_B)), chosen_B - shift].float()
    guess_B = (chosen_BH @ weights["head"].T).argmax(-1)
    return (guess_B == batch.ids_BL[torch.arange(len(chosen_B)), chosen_B]).float().mean().item()


def _save(training: ModelTraining, optimizer: Optimizer, out_dir: Path) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    state = {name: getattr(training, name) for name in COUNTED}
    state |= {"trained": training.trained, "optimizer": optimizer.state()}
    state["model"] = training.recipe.name
    with atomic_path(out_dir / "state.pt") as temporary:
        torch.save(state, temporary)
    write(training, out_dir, optimizer.average)


def _restore(training: ModelTraining, saved: dict[str, Any]) -> None:
    for name in COUNTED:
        setattr(training, name, saved[name])
    for name, tensor in training.trained.items():
        tensor.data.copy_(saved["trained"][name])


def write(training: ModelTraining, out_dir: Path, trained: network.Weights) -> None:
    """Write the model folder (checkpoint or adapter) and the training log."""
    recipe = training.recipe
    if recipe.lora_rank:
        export.write_adapter(out_dir, trained, str(recipe.start), recipe.lora_rank, recipe.layout)
    else:
        words = tokenizer.build_tokenizer(recipe.chat, recipe.first_vocabulary)
        export.write_checkpoint(out_dir, trained, training.sizes, recipe.layout, words)
    card.write(out_dir, recipe, training.seconds)
    (out_dir / "training_log.json").write_text(json.dumps({"curve": training.log}) + "\n")
