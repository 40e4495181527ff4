"""Training of drafters beside their target: `dllm-bench train drafter MODEL KIND`.

DFlash and DSpark are one configuration, DFlash without heads and with cross-entropy alone; EAGLE-3
is the unrolled chain. AdamW in float32, linear warm-up and cosine to 0, as in DeepSpec; batches and
anchors follow from (seed, step), so a run goes on from its state file as if it had not stopped.
Left out: several devices, reduced precision, sliding-window targets.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.models import drafters as drafter_files
from dllm_bench.models.drafter_networks import BlockDraftNetwork, ChainDraftNetwork, DraftNetwork
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.transformer import TransformerDenoiser
from dllm_bench.store.files import atomic_path
from dllm_bench.training import (
    drafter_blocks,
    drafter_card,
    drafter_chain,
    drafter_loss,
    progress,
    prompts,
)
from dllm_bench.training import drafter_target as sources
from dllm_bench.training.drafter_loss import Shares
from dllm_bench.training.drafter_target import Text

Texts = Literal["target", "gold"]
Report = Callable[[str], None]
Point = dict[str, float]

MEASURE_EVERY = 50  # steps
HELD_OUT = 64  # texts, or a tenth where there are few
WARMUP, CLIP_NORM = 0.04, 1.0  # DeepSpec
FAR = 8  # targets with fewer layers are tapped everywhere but at the last one
TAPS = 5
HEADS = {"": "dflash", "vanilla": "dspark-markov", "gated": "dspark-gated", "rnn": "dspark-rnn"}


@dataclass(frozen=True)
class DrafterJob:
    """What is asked for. slots: of a block, anchor included, or steps of a chain; head: of
    transitions, "" for none; texts: whose answers the rows hold; temperature: of the target's.
    """

    chain: bool = False
    layers: int = 2
    slots: int = 7
    head: str = ""
    confidence: bool = False
    rank: int = 32
    shares: Shares = field(default_factory=Shares)
    texts: Texts = "target"
    temperature: float = 0.7  # DeepSpec, which cuts the tail too (top-p 0.8, top-k 20)
    prompts: int = 2000
    max_new_tokens: int = 96
    rows: int = 32
    anchors: int = 16
    steps: int = 2000
    lr: float = 6e-4
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.texts not in get_args(Texts):
            raise DllmBenchError(
                f"texts is {self.texts!r}; choose one of {', '.join(get_args(Texts))}."
            )
        if self.prompts < 2:
            raise DllmBenchError(f"{self.prompts} prompts leave none to hold out; give 2 or more.")
        if self.chain and self.layers != 1:
            raise DllmBenchError(f"EAGLE-3 has one layer, {self.layers} were asked for; give 1.")
        if self.chain and self.shares != Shares():
            raise DllmBenchError("EAGLE-3 learns from a loss of its own; leave out --shares.")

    @property
    def kind(self) -> str:
        """Name of the kind, one of `KINDS`."""
        return "eagle3" if self.chain else HEADS[self.head]

    @property
    def decoder(self) -> str:
        """The decoder that uses it."""
        return self.kind.partition("-")[0]

    def published(self, target: TransformerDenoiser) -> dict[str, Any]:
        """config.json of the drafter, in DeepSpec's dialect."""
        config = target.module.config
        sizes = {name: getattr(config, name) for name in SIZES}
        shared = {
            **sizes,
            "model_type": "qwen3",
            "head_dim": getattr(config, "head_dim", None)
            or config.hidden_size // config.num_attention_heads,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "num_hidden_layers": self.layers,
            "num_target_layers": config.num_hidden_layers,
            "target_layer_ids": list(feature_layers(config.num_hidden_layers)),
            "dtype": "bfloat16",
        }
        if self.chain:
            return shared | {"architectures": ["Qwen3Eagle3Model"], "ttt_length": self.slots}
        return shared | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": self.slots,
            "mask_token_id": target.special.mask,
            "markov_rank": self.rank if self.head else 0,
            "markov_head_type": self.head or "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": bool(self.head),
        }


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "max_position_embeddings",
)
_DSPARK = DrafterJob(head="vanilla", confidence=True)
KINDS: Mapping[str, DrafterJob] = {
    "dflash": DrafterJob(shares=Shares(ce=1.0, l1=0.0, confidence=0.0)),
    "dspark-markov": _DSPARK,
    "dspark-gated": replace(_DSPARK, head="gated"),
    "dspark-rnn": replace(_DSPARK, head="rnn"),
    "eagle3": DrafterJob(chain=True, layers=1),
}


def feature_layers(layers: int) -> tuple[int, ...]:
    """Layers of the target that are read: spread from the second one on, never the last."""
    if layers < FAR:
        return tuple(range(layers - 1))
    return tuple(round(1 + i * (layers - 4) / (TAPS - 1)) for i in range(TAPS))


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear over the first 4 % of the steps, then a cosine to 0."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


@dataclass
class Run:
    """What one training run holds in memory."""

    job: DrafterJob
    model: str
    target: TransformerDenoiser
    published: dict[str, Any]
    network: DraftNetwork
    optimizer: torch.optim.AdamW
    texts: list[Text]
    held_out: list[Text]
    step: int = 0
    seconds: float = 0.0
    curve: list[Point] = field(default_factory=list)

    @classmethod
    def start(cls, job: DrafterJob, loaded: LoadedModel, texts: list[Text]) -> Run:
        """A new drafter beside its target."""
        target = loaded.denoiser
        assert isinstance(target, TransformerDenoiser)
        published = job.published(target)
        network = drafter_files.new_network(published, target, job.seed)
        learned = [weight for weight in network.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(learned, job.lr, weight_decay=0.0)
        few = min(HELD_OUT, max(1, len(texts) // 10))
        return cls(
            job, loaded.facts.name, target, published, network, optimizer, texts[few:], texts[:few]
        )

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        counted = {"step": self.step, "seconds": self.seconds, "curve": self.curve}
        parts = {"weights": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        return counted | parts | {"job": asdict(self.job)}

    def restore(self, saved: dict[str, Any], file: Path) -> None:
        """Go on from what `state` gave."""
        if saved["job"] != asdict(self.job):
            raise DllmBenchError(
                f"{file} is of a drafter trained with other settings; give the same ones, another "
                "--out, or remove the folder."
            )
        self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]
        self.network.load_state_dict(saved["weights"])
        self.optimizer.load_state_dict(saved["optimizer"])


def train(
    job: DrafterJob,
    loaded: LoadedModel,
    texts: list[Text],
    out: Path,
    save_every_s: float = 60.0,
    report: Report = print,
) -> Run:
    """Train a drafter and write its folder; goes on from `out`/state.pt."""
    run, file = Run.start(job, loaded, texts), out / "state.pt"
    if file.exists():
        run.restore(torch.load(file, map_location=run.target.device), file)
    began, first = time.monotonic(), run.step
    saved_at = began
    while run.step < job.steps:
        total, numbers = advance(run)
        if run.step % MEASURE_EVERY == 0 or run.step == job.steps:
            run.curve.append(rounded({"step": run.step} | numbers(total) | held_out(run)))
            eta_s = (time.monotonic() - began) / (run.step - first) * (job.steps - run.step)
            report(progress.line(run.curve[-1], job.steps, eta_s))
        now = time.monotonic()
        if now - saved_at >= save_every_s or run.step == job.steps:
            run.seconds, saved_at = run.seconds + now - saved_at, now
            save(run, out)
    return run


Numbers = Callable[[Tensor], Point]


def advance(run: Run) -> tuple[Tensor, Numbers]:
    """One step of the optimiser; the loss, and how to read its parts."""
    job = run.job
    rng = torch.Generator().manual_seed(job.seed * 10_000_000 + run.step)
    drawn = torch.randint(len(run.texts), (job.rows,), generator=rng).tolist()
    total, numbers = loss_of(run, [run.texts[index] for index in drawn], rng)
    run.optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(run.network.parameters(), CLIP_NORM)
    for group in run.optimizer.param_groups:
        group["lr"] = job.lr * learning_rate_factor(run.step, job.steps)
    run.optimizer.step()
    run.step += 1
    return total, numbers


def loss_of(run: Run, texts: list[Text], rng: torch.Generator) -> tuple[Tensor, Numbers]:
    """The loss of one batch, the target run for it in the same step."""
    batch, network = sources.batch(texts, run.target.special.eos), run.network
    ids_BS, answer_BS = (values.to(run.target.device) for values in batch)
    rows = sources.read(run.target, ids_BS, answer_BS, network.facts.feature_layers)
    if isinstance(network, ChainDraftNetwork):
        counts_BS = drafter_chain.countable(answer_BS)
        logits = drafter_chain.unroll(network, rows)
        target_BSV = network.lm_head(rows.last_BSD)
        steps = drafter_loss.unrolled_losses(logits, target_BSV, counts_BS)
        return drafter_loss.decayed(steps), lambda total: {"loss": total.item()}
    assert isinstance(network, BlockDraftNetwork)
    facts, shares = network.facts, run.job.shares
    anchors_BA, kept_BA = drafter_blocks.draw_anchors(answer_BS, run.job.anchors, rng)
    blocks = drafter_blocks.blocks_at(anchors_BA, kept_BA, answer_BS, facts.slots)
    kernel = drafter_blocks.flex if run.target.device.type == "cuda" else drafter_blocks.dense
    drafted = drafter_blocks.forward(network, rows, blocks, kernel)
    target_BANV = network.lm_head(drafter_blocks.at(rows.last_BSD, blocks.labels_BAN - 1))
    losses = drafter_loss.block_losses(drafted, target_BANV, ids_BS, blocks, shares.decay)
    return losses.total(shares), lambda total: losses.numbers(shares)


@torch.no_grad()
def held_out(run: Run) -> Point:
    """The same numbers on texts that are not trained on, always at the same anchors."""
    total, numbers = loss_of(run, run.held_out, torch.Generator().manual_seed(run.job.seed))
    return {f"held_out_{name}": value for name, value in numbers(total).items()}


def rounded(point: Point) -> Point:
    """A point as the curve stores it."""
    return {name: round(value, 5) for name, value in point.items()}


def save(run: Run, out: Path) -> None:
    """Write the drafter as it is, its curve and card, and the state to go on from."""
    drafter_files.save_drafter(out, run.published, run.network.state_dict())
    (out / "curve.jsonl").write_text("".join(json.dumps(point) + "\n" for point in run.curve))
    (out / "CARD.md").write_text(drafter_card.render(out.name, run))
    with atomic_path(out / "state.pt") as temporary:
        torch.save(run.state(), temporary)


def texts_file(job: DrafterJob, weights: str) -> str:
    """Name of the file of a target's answers; `weights` is the hash of the target."""
    how = f"temperature{job.temperature:g}-seed{job.seed}-{job.max_new_tokens}"
    return f"texts-{weights[:10]}-{how}.jsonl"


def texts_of(
    job: DrafterJob, loaded: LoadedModel, chat: bool, file: Path, report: Report = print
) -> list[Text]:
    """The rows of a job; the target's own answers are kept in `file`."""
    found = prompts.train_pairs(sources.TASKS, job.prompts, job.seed)
    if job.texts == "gold":
        if chat:
            raise DllmBenchError(
                "The target is a chat model, the gold answers are no turns of a chat; choose "
                "texts=target."
            )
        return sources.gold(loaded, found)
    encode = prompts.encoder(loaded.text.encode, chat)
    requests = [
        Request(str(index), tuple(encode(prompt)), job.max_new_tokens, seed=job.seed + index)
        for index, (prompt, _) in enumerate(found)
    ]
    return sources.own(loaded, requests, job.temperature, file, report)
