"""Train a LoRA adapter that turns a model into a block diffusion model: `dllm-bench train adapter
MODEL`.

A text is fed twice. The clean copy is split into blocks that see themselves and earlier blocks. The
blocks of its answer are fed again with masks; they see themselves and the earlier clean blocks
(BD3-LM, arXiv 2503.09573). Blocks count from the first position of the prompt, as
`decoder=block_diffusion` counts them.

Shapes: B texts, L clean positions, N masked-copy positions, S = L + N rows, R scored rows, H hidden
size, V vocabulary.
"""

from __future__ import annotations

import random
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional

from dllm_bench.core.declared import UNBOUNDED, CheckedFields, Range
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models import checkpoint
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.checkpoint import shapes_of
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.sources import LORA_CONFIG, LORA_STEM
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.paths import expanded, place_of
from dllm_bench.store.files import is_file, write_json
from dllm_bench.training import loop, prompts
from dllm_bench.training.loop import Numbers, Point, Seed, Training, TrainingText

ALL_MASKED, CUT = 0.35, 0.35
"""Shares of blocks that are fully masked, and masked after a random position; others are masked at
random."""
BETAS = (0.9, 0.98)
HELD_OUT = 32  # texts
SHOWN_POINTS = 10  # at most, of the curve
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = "base_model.model."  # begins the names of peft's files
MASKED_SEED = 1_000_003  # seed of the masks of held-out texts


@dataclass(frozen=True)
class AdapterJob(CheckedFields):
    """One adapter to train."""

    block: int = 4
    """Positions of a block."""
    rank: int = 16
    benchmarks: tuple[str, ...] = ("sentences",)
    """The tasks whose train splits give prompts and answers, in turn."""
    texts: tuple[str, ...] = ()
    """Files of answers that `train drafter … --texts-only` wrote, to learn in place of tasks."""
    prompts: Annotated[int, Range(HELD_OUT + 1, UNBOUNDED)] = 4000
    rows: int = 4
    """Texts of a step."""
    steps: int = 400
    lr: float = 2e-3
    """Peak learning rate."""
    seed: Seed = 0
    start: str = ""
    """An adapter of the same rank with the initial weights, a folder or assets/<name>; empty: start
    without effect."""

    def command(self, *named: str) -> str:
        """Return the command that trains this adapter; named: the model, and its settings."""
        shown = {"texts": tuple(Path(file).name for file in self.texts)}
        start = f"dllm-bench train adapter {shlex.join(named)}"
        return loop.command(start, self, AdapterJob(), shown)


def as_block_diffusion(spec: ModelSpec, job: AdapterJob) -> ModelSpec:
    """Return the model as one of block diffusion, which `load_model` refuses without a mask token
    of its own.

    DllmBenchError for a model that has an adapter.
    """
    if spec.lora:
        raise DllmBenchError(
            f"Model {spec.name!r} has an adapter, which a new one would not hold; give "
            f"model.lora=null, and --start {spec.lora} to begin with its weights."
        )
    return replace(spec, attention_form="block_causal", block=job.block)


def texts_of(job: AdapterJob, loaded: LoadedModel, chat: bool) -> list[TrainingText]:
    """Return the prompts of a job with their gold answers and an end token, or the texts of its
    files."""
    if job.texts:
        for file in job.texts:
            if not is_file(expanded(file)):
                raise DllmBenchError(
                    f"{file} is not here; `dllm-bench train drafter MODEL KIND --texts-only` "
                    "writes a file of answers and says where."
                )
        vocab = loaded.denoiser.vocab_size
        stored = [t for file in job.texts for t in loop.stored_texts(expanded(file), vocab)]
        whole = [whole_blocks(text, job.block, loaded.special) for text in stored]
        random.Random(job.seed).shuffle(whole)
        return [text for text in whole if len(text.ids) > text.prompt][: job.prompts]
    encode = prompts.encoder(loaded.text.encode, chat)
    special = loaded.special
    end = special.eot if chat and special.eot is not None else special.eos
    texts = []
    for prompt, answer in prompts.gold_pairs(job.benchmarks, job.prompts, job.seed):
        start = encode(prompt)
        ids = loaded.text.encode(answer.strip() if chat else answer)
        texts.append(TrainingText((*start, *ids, end), len(start)))
    return texts


def whole_blocks(text: TrainingText, block: int, special: SpecialTokens) -> TrainingText:
    """Return a text without the block that its length limit cut; a text that ends is whole."""
    ends = text.ids[-1] in special.ends
    return text if ends else replace(text, ids=text.ids[: len(text.ids) // block * block])


def texts_held_out(texts: Sequence[TrainingText]) -> list[TrainingText]:
    """Return a text of each of the `HELD_OUT` prompts with the smallest hashes.

    The order is that of the prompts alone, so that an adapter that a training starts from was not
    trained on them either if its texts are among these.
    """
    by_prompt = {text.ids[: text.prompt]: text for text in texts}
    chosen = sorted(by_prompt, key=lambda ids: prompts.hash_of([*map(str, ids)]))[:HELD_OUT]
    return [by_prompt[ids] for ids in chosen]


# --- the adapter ---------------------------------------------------------------------------------


def attach_new(loaded: LoadedModel, job: AdapterJob) -> dict[str, torch.nn.Parameter]:
    """Add the adapter that training starts from to the module.

    Return its parameters by published name.
    """
    denoiser = loaded.denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    layout, module = ADAPTERS[loaded.metadata.adapter], denoiser.module
    rng, shapes = torch.Generator().manual_seed(job.seed), shapes_of(module)
    parts = {name: layout.parts(name, shapes) for name in shapes}
    if not layout.plain_layers or any(len(own) > 1 or own[0].rows for own in parts.values()):
        raise DllmBenchError(
            f"Model {loaded.metadata.name!r} has layers of another kind than an adapter is trained "
            "for (experts, joined matrices, or a canvas); choose a dense model."
        )
    pairs = {}
    for name, shape in shapes.items():
        if name.endswith(tuple(f".{target}.weight" for target in TARGETS)):
            down_RI = torch.randn(job.rank, shape[1], generator=rng) / shape[1] ** 0.5
            pairs[parts[name][0].name] = (down_RI, torch.zeros(shape[0], job.rank))
    checkpoint.attach_lora(
        _given(job, pairs) if job.start else checkpoint.LoraAdapter(1.0, pairs), module, layout
    )
    learned = {
        PEFT + layout.to_published(name.replace(".default", "")): parameter
        for name, parameter in module.named_parameters()
        if ".lora_" in name
    }
    for parameter in learned.values():
        parameter.data = parameter.data.float()  # a shorter dtype would lose small steps
        parameter.requires_grad_(True)
    return learned


def _given(job: AdapterJob, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> checkpoint.LoraAdapter:
    """Return the adapter that a job names as its start; DllmBenchError if its matrices differ."""
    adapter = checkpoint.read_lora(place_of(job.start))
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
    clean_BL = loop.padded(texts, end)[0]
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
    return (torch.where(kind < ALL_MASKED + CUT, behind, drawn) | (kind < ALL_MASKED)).flatten(1)


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
    hidden_BSH = model.embed_tokens(ids_BS)
    unseen_B1SS = ~seen(batch, block)[:, None].to(device)  # eager attention adds its mask
    mask_B1SS = hidden_BSH.new_zeros(unseen_B1SS.shape).masked_fill(unseen_B1SS, -torch.inf)
    rotation = model.rotary_emb(hidden_BSH, place_BS)
    for layer in model.layers:
        hidden_BSH = layer(hidden_BSH, attention_mask=mask_B1SS, position_embeddings=rotation)
    text_R, row_R = scored_rows(batch, block, shifted)
    logits_RV = module.lm_head(model.norm(hidden_BSH[text_R, row_R]))
    return logits_RV, batch.token_BN[batch.masked_BN].to(device)


# --- training ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class AdapterTraining(Training):
    """A training of an adapter."""

    part = "adapter"
    measure_every, digits, save_every_s = 50, 4, 120.0

    learned: dict[str, torch.nn.Parameter]

    @classmethod
    def start(
        cls, job: AdapterJob, loaded: LoadedModel, texts: list[TrainingText], *named: str
    ) -> AdapterTraining:
        """Return the training at its first step; see the fields for `named`."""
        learned = attach_new(loaded, job)
        held_out = texts_held_out(texts)
        asked = {text.ids[: text.prompt] for text in held_out}
        others = [text for text in texts if text.ids[: text.prompt] not in asked]
        if not others:
            raise DllmBenchError(
                f"{len(texts)} texts of {len(asked)} prompts leave none to learn, since those of "
                f"{HELD_OUT} prompts are held out; give texts of more prompts."
            )
        return cls(
            job=job,
            optimizer=torch.optim.AdamW(learned.values(), job.lr, BETAS, weight_decay=0.0),
            texts=others,
            held_out=held_out,
            loaded=loaded,
            learned=learned,
            named=named or (loaded.metadata.name,),
        )

    @property
    def denoiser(self) -> TransformerDenoiser:
        """The model that is adapted."""
        assert isinstance(self.loaded.denoiser, TransformerDenoiser)
        return self.loaded.denoiser

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self.learned.items()}

    def batch(self, texts: Sequence[TrainingText], rng: torch.Generator) -> MaskedBatch:
        """Return a batch of these texts."""
        special = self.loaded.special
        return masked_batch(texts, self.job.block, special.mask, special.eos, rng)

    def predict(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Return logits, in float32, and tokens of the masked positions; products are computed in
        the dtype of the model's weights."""
        denoiser = self.denoiser
        shorter = denoiser.dtype != torch.float32
        with torch.autocast(self.device.type, denoiser.dtype, enabled=shorter):
            logits_RV, token_R = logits_of(denoiser.module, batch, self.job.block, denoiser.shifted)
        return logits_RV.float(), token_R

    def loss_of(self, texts: list[TrainingText], rng: torch.Generator) -> tuple[Tensor, Numbers]:
        loss = functional.cross_entropy(*self.predict(self.batch(texts, rng)))
        return loss, lambda loss: {"loss": loss.item()}

    @torch.no_grad()
    def measure_held_out(self) -> Point:
        """Return loss on the held-out texts, and shares of right tokens in wholly masked blocks.

        `right_1` is the first position of a block, which matters most for decoding one token per
        forward.
        """
        block = self.job.block
        rng = torch.Generator().manual_seed(MASKED_SEED)
        found = defaultdict[str, list[float]](list)
        for first in range(0, len(self.held_out), self.job.rows):
            batch = self.batch(self.held_out[first : first + self.job.rows], rng)
            logits_RV, target_R = self.predict(batch)
            losses_R = functional.cross_entropy(logits_RV, target_R, reduction="none")
            found["held_out_loss"] += losses_R.tolist()
            whole_BJ = batch.masked_BN.unflatten(1, (-1, block)).all(2)
            whole_R = whole_BJ.repeat_interleave(block, 1)[batch.masked_BN]
            place_R = batch.place_BN[batch.masked_BN] % block
            right_R = (logits_RV.argmax(-1) == target_R).cpu()
            for place in range(block):
                found[f"right_{place + 1}"] += right_R[whole_R & (place_R == place)].tolist()
        return {name: sum(v) / len(v) for name, v in sorted(found.items()) if v}

    def write(self, out: Path) -> None:
        layers = [n.removeprefix(PEFT).partition(".lora_A")[0] for n in self.learned if "_A." in n]
        # not so in LLaDA, whose head has the last name of a layer
        has_usual_names = {layer.rpartition(".")[2] for layer in layers} == set(TARGETS)
        published = {  # in peft's format
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.named[0],
            "r": self.job.rank,
            "lora_alpha": self.job.rank,
            "bias": "none",
            "target_modules": list(TARGETS) if has_usual_names else layers,
        }
        write_json(out / LORA_CONFIG, published)
        self.write_weights(out / f"{LORA_STEM}.safetensors")

    def facts(self) -> dict[str, Any]:
        return {
            "model": self.loaded.metadata.name,
            "dtype": self.loaded.metadata.dtype,
            "count": sum(parameter.numel() for parameter in self.learned.values()),
            "shown": self.curve[:: -max(1, -(-len(self.curve) // SHOWN_POINTS))][::-1],
            "all_masked": ALL_MASKED,
            "cut": CUT,
            "held_out": HELD_OUT,
        }
