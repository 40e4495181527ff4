"""Train a LoRA adapter that turns a model into a block diffusion model: `dllm-bench train adapter
MODEL`.

A text is fed twice. The clean copy is split into blocks that see themselves and earlier blocks. The
blocks of its answer are fed again with masks; they see themselves and the earlier clean blocks
(BD3-LM, arXiv 2503.09573). Blocks count from the first position of the prompt, as
`decoder=block_diffusion` counts them. Texts and masks of a step depend only on (seed, step), so
resumed training gives the same weights as uninterrupted training.

Shapes: B texts, L clean positions, N masked-copy positions, S = L + N rows, R scored rows, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import lora
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.checkpoint import published_shapes, shapes_of
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.paths import expanded
from dllm_bench.store.files import atomic_path, write_atomic, write_json
from dllm_bench.store.nolinks import is_file, make_folder
from dllm_bench.training import prompts, reports
from dllm_bench.training.drafter_data import TrainingText, padded
from dllm_bench.training.drafters import CLIP_NORM, Point, learning_rate_factor
from dllm_bench.training.reports import Countdown, Report

ALL_MASKED, CUT = 0.35, 0.35
"""Shares of blocks that are fully masked, and masked after a random position; others are masked at
random."""
BETAS = (0.9, 0.98)
HELD_OUT = 32  # texts
MEASURE_EVERY = 50  # steps
SHOWN_POINTS = 10  # at most, of the curve
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MASKED_SEED = 1_000_003  # seed of the masks of held-out texts


@dataclass(frozen=True)
class AdapterJob:
    """One adapter to train."""

    block: int = 4
    """Positions of a block."""
    rank: int = 16
    benchmarks: tuple[str, ...] = ("sentences",)
    """The tasks whose train splits give prompts and answers, in turn."""
    prompts: int = 4000
    rows: int = 4
    """Texts of a step."""
    steps: int = 400
    lr: float = 2e-3
    """Peak learning rate."""
    seed: int = 0
    start: str = ""
    """Folder of an adapter of the same rank with the initial weights; empty: start without
    effect."""

    def __post_init__(self) -> None:
        if self.prompts <= HELD_OUT:
            raise DllmBenchError(
                f"{self.prompts} prompts leave none beside the {HELD_OUT} that are held out; give "
                "more."
            )

    def command(self, model: str) -> str:
        """Return the command that trains this adapter."""
        usual = AdapterJob()
        options = {
            ("benchmark" if name == "benchmarks" else name): value
            for name, value in vars(self).items()
            if value != getattr(usual, name)
        }
        return reports.command(f"dllm-bench train adapter {model}", options)


def texts_of(job: AdapterJob, loaded: LoadedModel, chat: bool) -> list[TrainingText]:
    """Return the prompts of a job with their gold answers and an end token."""
    encode = prompts.encoder(loaded.text.encode, chat)
    special = loaded.special
    end = special.eot if chat and special.eot is not None else special.eos
    texts = []
    for prompt, answer in prompts.train_pairs(job.benchmarks, job.prompts, job.seed):
        start = encode(prompt)
        ids = loaded.text.encode(answer.strip() if chat else answer)
        texts.append(TrainingText((*start, *ids, end), len(start)))
    return texts


# --- the adapter ---------------------------------------------------------------------------------


def attach_new(loaded: LoadedModel, job: AdapterJob) -> dict[str, torch.nn.Parameter]:
    """Add the adapter that training starts from to the module.

    Return its parameters by published name.
    """
    denoiser = loaded.denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    layout, module = ADAPTERS[loaded.metadata.adapter], denoiser.module
    rng = torch.Generator().manual_seed(job.seed)
    pairs = {}
    for name, shape in published_shapes(layout, shapes_of(module)).items():
        if name.endswith(tuple(f".{target}.weight" for target in TARGETS)):
            down_RI = torch.randn(job.rank, shape[1], generator=rng) / shape[1] ** 0.5
            pairs[name] = (down_RI, torch.zeros(shape[0], job.rank))
    if not pairs:
        raise DllmBenchError(
            f"Model {loaded.metadata.name!r} has no layers named {', '.join(TARGETS)}, which an "
            "adapter is trained for; choose a model of another layout."
        )
    lora.attach(_given(job, pairs) if job.start else lora.LoraAdapter(1.0, pairs), module, layout)
    learned = {
        f"base_model.model.{name.replace('.default', '')}": parameter
        for name, parameter in module.named_parameters()
        if ".lora_" in name
    }
    for parameter in learned.values():
        parameter.requires_grad_(True)
    return learned


def _given(job: AdapterJob, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> lora.LoraAdapter:
    """Return the adapter that a job names as its start; DllmBenchError if its matrices differ."""
    adapter = lora.read_lora(expanded(job.start))
    shapes = {name: [side.shape for side in pair] for name, pair in adapter.pairs.items()}
    wanted = {name: [side.shape for side in pair] for name, pair in pairs.items()}
    if adapter.scale != 1.0 or shapes != wanted:
        raise DllmBenchError(
            f"The adapter in {job.start} is not one of rank {job.rank} and scale 1 for this model; "
            "give its rank with --rank, or leave out --start."
        )
    return adapter


# --- masks and the forward -----------------------------------------------------------------------


@dataclass(frozen=True)
class MaskedBatch:
    """The texts of a step, and which positions of their second copy are masked."""

    clean_BL: Tensor
    noised_BN: Tensor
    """Tokens of the answer's blocks, with masks."""
    token_BN: Tensor
    """Tokens of these blocks without masks."""
    place_BN: Tensor
    """Position of each of them."""
    masked_BN: Tensor
    """Which of them are masked."""


def masked_batch(
    texts: Sequence[TrainingText], block: int, mask: int, end: int, rng: torch.Generator
) -> MaskedBatch:
    """Draw the masks of a batch: only in answers, up to the end of the block of their last
    token."""
    clean_BL = padded(texts, end)[0]
    first = [text.prompt // block * block for text in texts]
    last = [-(-len(text.ids) // block) * block for text in texts]
    clean_BL = functional.pad(clean_BL, (0, max(last) - clean_BL.shape[1]), value=end)
    length = max(stop - start for start, stop in zip(first, last, strict=True))
    place_BN = torch.tensor(first)[:, None] + torch.arange(length)
    prompt_B1 = torch.tensor([[text.prompt] for text in texts])
    inside_BN = (place_BN >= prompt_B1) & (place_BN < torch.tensor(last)[:, None])
    token_BN = clean_BL.gather(1, place_BN.clamp(max=clean_BL.shape[1] - 1))
    masked_BN = _drawn(rng, len(texts), length, block) & inside_BN
    noised_BN = token_BN.masked_fill(masked_BN, mask)
    return MaskedBatch(clean_BL, noised_BN, token_BN, place_BN, masked_BN)


def _drawn(rng: torch.Generator, count: int, length: int, block: int) -> Tensor:
    """Return masks (count, length) of whole blocks, see `ALL_MASKED` and `CUT`."""
    shape = (count, length // block, 1)
    kind = torch.rand(shape, generator=rng)
    cut = torch.randint(block, shape, generator=rng)
    ratio = 1 / block + (1 - 1 / block) * torch.rand(shape, generator=rng)
    drawn = torch.rand(count, length // block, block, generator=rng) < ratio
    behind = torch.arange(block) >= cut
    masked = torch.where(kind < ALL_MASKED + CUT, behind, drawn) | (kind < ALL_MASKED)
    return masked.flatten(1)


def seen(batch: MaskedBatch, block: int) -> Tensor:
    """Return which of S positions (clean, then masked copy) each of them sees, (B, S, S)."""
    texts, length = batch.clean_BL.shape
    clean_BL = (torch.arange(length) // block).expand(texts, -1)
    noised_BN = batch.place_BN // block
    sees_clean = torch.cat(
        [clean_BL[:, :, None] >= clean_BL[:, None], noised_BN[:, :, None] > clean_BL[:, None]], 1
    )
    own = noised_BN[:, :, None] == noised_BN[:, None]
    none = torch.zeros(texts, length, noised_BN.shape[1], dtype=torch.bool)
    return torch.cat([sees_clean, torch.cat([none, own], 1)], 2)


def scored_rows(batch: MaskedBatch, block: int, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return (text, row of S) that predict the masked positions.

    With shifted logits the first position of a block is predicted by the last clean row before it.
    """
    text_R, index_R = batch.masked_BN.nonzero(as_tuple=True)
    place_R = batch.place_BN[text_R, index_R]
    row_R = batch.clean_BL.shape[1] + index_R - int(shifted)
    if shifted:
        row_R = torch.where(place_R % block == 0, place_R - 1, row_R)
    return text_R, row_R


def logits_of(module: Any, batch: MaskedBatch, block: int, shifted: bool) -> tuple[Tensor, Tensor]:
    """Return logits (R, V) of the masked positions, and their tokens (R,)."""
    model, device = module.model, module.lm_head.weight.device
    texts, length = batch.clean_BL.shape
    ids_BS = torch.cat([batch.clean_BL, batch.noised_BN], 1).to(device)
    place_BS = torch.cat([torch.arange(length).expand(texts, -1), batch.place_BN], 1).to(device)
    mask_B1SS = seen(batch, block)[:, None].to(device)
    hidden_BSH = model.embed_tokens(ids_BS)
    rotation = model.rotary_emb(hidden_BSH, place_BS)
    for layer in model.layers:
        hidden_BSH = layer(hidden_BSH, attention_mask=mask_B1SS, position_embeddings=rotation)
    text_R, row_R = scored_rows(batch, block, shifted)
    logits_RV = module.lm_head(model.norm(hidden_BSH[text_R, row_R]))
    return logits_RV, batch.token_BN[batch.masked_BN].to(device)


# --- training ------------------------------------------------------------------------------------


@dataclass
class AdapterTraining:
    """A training in memory."""

    job: AdapterJob
    loaded: LoadedModel
    learned: dict[str, torch.nn.Parameter]
    optimizer: torch.optim.AdamW
    texts: list[TrainingText]
    held_out: list[TrainingText]
    step: int = 0
    seconds: float = 0.0
    """Processor time on a CPU, otherwise elapsed time."""
    curve: list[Point] = field(default_factory=list)

    @classmethod
    def start(
        cls, job: AdapterJob, loaded: LoadedModel, texts: list[TrainingText]
    ) -> AdapterTraining:
        """Return the training at its first step."""
        learned = attach_new(loaded, job)
        optimizer = torch.optim.AdamW(learned.values(), job.lr, BETAS, weight_decay=0.0)
        return cls(job, loaded, learned, optimizer, texts[HELD_OUT:], texts[:HELD_OUT])

    @property
    def denoiser(self) -> TransformerDenoiser:
        """The model that is adapted."""
        assert isinstance(self.loaded.denoiser, TransformerDenoiser)
        return self.loaded.denoiser

    def batch(self, texts: Sequence[TrainingText], rng: torch.Generator) -> MaskedBatch:
        """Return a batch of these texts."""
        special = self.loaded.special
        return masked_batch(texts, self.job.block, special.mask, special.eos, rng)

    def predict(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Return logits and tokens of the masked positions."""
        return logits_of(self.denoiser.module, batch, self.job.block, self.denoiser.shifted)

    def state(self) -> dict[str, Any]:
        """Return everything that a resumed training needs."""
        counted = {"step": self.step, "seconds": self.seconds, "curve": self.curve}
        weights = {name: parameter.data for name, parameter in self.learned.items()}
        parts = {"weights": weights, "optimizer": self.optimizer.state_dict()}
        return counted | parts | {"job": asdict(self.job)}

    def restore(self, saved: dict[str, Any], file: Path) -> None:
        """Continue from what `state` returned."""
        if saved["job"] != asdict(self.job):
            raise DllmBenchError(
                f"{file} belongs to an adapter trained with other settings; give the same ones, "
                "another --out, or remove the folder."
            )
        self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]
        for name, weight in saved["weights"].items():
            self.learned[name].data.copy_(weight)
        self.optimizer.load_state_dict(saved["optimizer"])

    def save(self, out: Path) -> None:
        """Write the adapter as it is now, its curve and card, and the state to resume from."""
        make_folder(out)
        write_json(out / lora.CONFIG, published_config(self.job, self.loaded.metadata.name))
        weights = {name: w.detach().to("cpu", torch.bfloat16) for name, w in self.learned.items()}
        with atomic_path(out / f"{lora.STEM}.safetensors") as temporary:
            save_file({name: w.contiguous() for name, w in weights.items()}, temporary)
        curve = "".join(json.dumps(point) + "\n" for point in self.curve)
        write_atomic(out / "curve.jsonl", curve)
        write_atomic(out / "CARD.md", card(out.name, self))
        with atomic_path(out / "state.pt") as temporary:
            torch.save(self.state(), temporary)


def published_config(job: AdapterJob, model: str) -> dict[str, Any]:
    """Return adapter_config.json, in peft's format."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": job.rank,
        "lora_alpha": job.rank,
        "bias": "none",
        "target_modules": list(TARGETS),
    }


def train(
    job: AdapterJob,
    loaded: LoadedModel,
    texts: list[TrainingText],
    out: Path,
    save_every_s: float = 120.0,
    report: Report = print,
) -> AdapterTraining:
    """Train an adapter and write its folder; resumes from `out`/state.pt where there is one."""
    training, file = AdapterTraining.start(job, loaded, texts), out / "state.pt"
    if is_file(file):
        training.restore(torch.load(file, map_location=training.denoiser.device), file)
    on_cpu = training.denoiser.device.type == "cpu"
    countdown, saved_at = Countdown(job.steps, training.step), time.monotonic()
    clock = time.process_time if on_cpu else time.monotonic
    counted_at = clock()
    while training.step < job.steps:
        loss = optimizer_step(training)
        if training.step % MEASURE_EVERY == 0 or training.step == job.steps:
            point = {"step": training.step, "loss": loss.item()} | measure_held_out(training)
            training.curve.append({name: round(value, 4) for name, value in point.items()})
            report(countdown.line(training.curve[-1]))
        now = time.monotonic()
        if now - saved_at >= save_every_s or training.step == job.steps:
            counted_at, before, saved_at = clock(), counted_at, now
            training.seconds += counted_at - before
            training.save(out)
    return training


def optimizer_step(training: AdapterTraining) -> Tensor:
    """Make one step on randomly drawn texts; return the loss."""
    job = training.job
    rng = torch.Generator().manual_seed(job.seed * 10_000_000 + training.step)
    drawn = torch.randint(len(training.texts), (job.rows,), generator=rng).tolist()
    batch = training.batch([training.texts[index] for index in drawn], rng)
    loss = functional.cross_entropy(*training.predict(batch))
    training.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(training.learned.values(), CLIP_NORM)
    for group in training.optimizer.param_groups:
        group["lr"] = job.lr * learning_rate_factor(training.step, job.steps)
    training.optimizer.step()
    training.step += 1
    return loss.detach()


@torch.no_grad()
def measure_held_out(training: AdapterTraining) -> Point:
    """Return loss on the held-out texts, and the share of right tokens by place in a wholly masked
    block.

    `right_1` is the first position of a block, which matters most for decoding one token per
    forward.
    """
    block = training.job.block
    rng = torch.Generator().manual_seed(MASKED_SEED)
    sums: dict[str, list[float]] = {"held_out_loss": []}
    for texts in _chunks(training.held_out, training.job.rows):
        batch = training.batch(texts, rng)
        logits_RV, target_R = training.predict(batch)
        losses_R = functional.cross_entropy(logits_RV, target_R, reduction="none")
        sums["held_out_loss"] += losses_R.tolist()
        whole_BJ = batch.masked_BN.unflatten(1, (-1, block)).all(2)
        whole_R = whole_BJ.repeat_interleave(block, 1)[batch.masked_BN].tolist()
        place_R = (batch.place_BN[batch.masked_BN] % block).tolist()
        right_R = (logits_RV.argmax(-1) == target_R).tolist()
        for whole, place, right in zip(whole_R, place_R, right_R, strict=True):
            if whole:
                sums.setdefault(f"right_{place + 1}", []).append(float(right))
    return {name: sum(values) / len(values) for name, values in sorted(sums.items()) if values}


def _chunks(texts: list[TrainingText], size: int) -> Iterator[list[TrainingText]]:
    return (texts[start : start + size] for start in range(0, len(texts), size))


# --- the card ------------------------------------------------------------------------------------


def card(title: str, training: AdapterTraining) -> str:
    """Return the adapter's model card; what decoders do with it is measured by runs."""
    job, model = training.job, training.loaded.metadata.name
    count = sum(parameter.numel() for parameter in training.learned.values())
    on_cpu = training.denoiser.device.type == "cpu"
    about = (
        f"A LoRA adapter ({count:,} parameters, rank {job.rank}) that turns {model} into a model\n"
        f"of block diffusion, blocks of {job.block}. Made by this project with\n"
        f"`{job.command(model)}`.\nLicence: that of {model}."
    )
    recipe = (
        f"Cross-entropy of the masked positions; {ALL_MASKED:.0%} of the blocks are masked\n"
        f"wholly, {CUT:.0%} after a random position, the others at random. AdamW, peak rate\n"
        f"{job.lr:g}, 4 % warm-up, cosine to 0; {job.rows} texts a step, {training.step:,} of "
        f"{job.steps:,} steps, seed {job.seed},\n{training.seconds / 60:.0f} "
        f"{'core-minutes' if on_cpu else 'minutes'} on {training.denoiser.device.type}."
    )
    shown = training.curve[:: -max(1, -(-len(training.curve) // SHOWN_POINTS))][::-1]
    rows = [[f"{value:g}" for value in point.values()] for point in shown]
    measured = "Of `curve.jsonl`; `right_N`: place N of wholly masked blocks.\n\n"
    sections = {
        "Data": f"{job.prompts:,} prompts and gold answers of the train splits of "
        f"{', '.join(job.benchmarks)}; {HELD_OUT} are held out.",
        "Recipe": recipe,
        "Measured": measured + reports.table(list(shown[0]), rows) if rows else "Nothing yet.",
    }
    return reports.card(title, about, sections)
