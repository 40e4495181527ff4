"""Training of drafters for a target model: `dllm-bench train drafter MODEL KIND`.

DFlash and DSpark share one configuration: DFlash has no heads and learns from cross-entropy alone.
DFlash 2, for which no loss is published, does too: cross-entropy over the whole vocabulary, of the
logits with the path selector's bias. EAGLE-3 is the unrolled chain. AdamW in float32, linear
warm-up and cosine to 0, as in DeepSpec. Left out: several devices, reduced precision, targets with
sliding-window attention.

Texts are prompts of embedded tasks (train splits) or of files, with the target's own answers,
sampled as DeepSpec does or greedy, or with the gold answers. The answers that the target generated
are stored. Its hidden states are computed in the step that reads them, or stored as well
(`StoredRows`). The loss never reads prompt tokens; it does read the end token.

Shapes: B texts, L positions of a text, H hidden size, C width of the features (H times the number
of feature layers).
"""

from __future__ import annotations

import hashlib
import heapq
import json
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dllm_bench.core.declared import UNBOUNDED, Amount, CheckedFields, Range
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request, first_end
from dllm_bench.decoding.speculative import SpeculativeDecoder
from dllm_bench.methods.drafting import NoDraft
from dllm_bench.models import drafters as drafter_files
from dllm_bench.models.drafter_config import DRAFT_IDS, TARGET_TABLES
from dllm_bench.models.drafter_networks import BlockDraftNetwork, ChainDraftNetwork, DraftNetwork
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.text import library_errors_named
from dllm_bench.models.transformer import EMBEDDING_TAP, TransformerDenoiser
from dllm_bench.store import files
from dllm_bench.store.files import Appender, is_file, lstat, make_folder, matching
from dllm_bench.store.lock import BusyError, Lock
from dllm_bench.training import DRAFTER_BENCHMARKS, loop, prompts
from dllm_bench.training import drafter_objectives as objectives
from dllm_bench.training.drafter_objectives import LossShares, TargetRows
from dllm_bench.training.loop import Numbers, Point, Report, Seed, Training, TrainingText

Texts = Literal["target", "gold"]

BATCH = 32  # requests that are answered at a time
HELD_OUT = 64  # texts, or a tenth where there are few
MANY_LAYERS = 8  # targets with fewer layers give features of all layers but the last one
FEATURE_LAYERS = 5
TAPS, GROUP, CANDIDATES = 2, 16, 16  # of DFlash 2, as published
COPIED_FROM_TARGET = (
    "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads hidden_act "
    "rms_norm_eps rope_parameters max_position_embeddings"
).split()
"""Settings of the target's config.json that the drafter's has too."""


# --- what to train -------------------------------------------------------------------------------


@dataclass(frozen=True)
class DrafterJob(CheckedFields):
    """One drafter to train: its architecture, its texts and its optimisation."""

    chain: bool = False
    """EAGLE-3's chain instead of blocks."""
    layers: int = 2
    slots: int = 7
    """Positions of a block, anchor included; of a chain, its steps."""
    head: str = ""
    """DSpark's transition head (vanilla for Markov, gated or rnn), selector for DFlash 2, or ""
    for DFlash, which has none."""
    confidence: bool = False
    """Whether it has a confidence head."""
    rank: int = 32
    """Rank of the transition head (the paper: 256)."""
    shares: LossShares = field(default_factory=LossShares)
    texts: Texts = "target"
    """Whose answers are learned: the target's own, or the gold ones."""
    temperature: Amount = 0.7  # DeepSpec, which also truncates (top-p 0.8, top-k 20)
    """Of the target's answers; 0 is greedy."""
    benchmarks: tuple[str, ...] = DRAFTER_BENCHMARKS
    """The embedded benchmarks whose train splits give the prompts, in turn."""
    flan: Path | None = None
    """A directory of FLAN rows that takes its turn with the benchmarks."""
    prompts: Annotated[int, Range(2, UNBOUNDED)] = 2000
    """One of them at least is held out."""
    max_new_tokens: Annotated[int, Range(2, UNBOUNDED)] = 96
    """Most tokens of an answer; the first of them is no label."""
    rows: int = 32
    """Texts of a step."""
    anchors: int = 16
    """Most blocks of a text (the paper: 512)."""
    steps: int = 2000
    lr: float = 6e-4
    """Peak learning rate."""
    draft_vocab: int = 0
    """Tokens that can be drafted, the most frequent ones of the answers; 0: all."""
    store_gib: Amount = 0.0
    """What the target's outputs may take on the disk, GiB; 0: they are computed in every step."""
    seed: Seed = 0
    text_seed: Seed | None = None
    """Seed of prompts and answers; None: `seed`."""

    @property
    def answers_seed(self) -> int:
        """The seed of prompts and answers."""
        return self.seed if self.text_seed is None else self.text_seed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.flan is not None and self.texts == "gold":
            raise DllmBenchError("FLAN rows have no answers here; choose texts=target.")
        if self.chain and self.layers != 1:
            raise DllmBenchError(f"EAGLE-3 has one layer, {self.layers} were asked for; give 1.")
        if self.store_gib and not self.draft_vocab:
            raise DllmBenchError("--store-gib needs a draft vocabulary; give --draft-vocab too.")
        if self.head == "selector" and self.slots < 2:
            raise DllmBenchError("DFlash 2 drafts after its first slot; give --slots 2 or more.")
        if self.draft_vocab and self.head == "selector":
            raise DllmBenchError("DFlash 2 has no draft vocabulary; leave out --draft-vocab.")
        if self.chain and self.shares != LossShares():
            raise DllmBenchError("EAGLE-3 learns from a loss of its own; leave out --shares.")

    @property
    def kind(self) -> str:
        """Name of the kind, one of `KINDS`."""
        own = (self.chain, self.head)
        return next(kind for kind, job in KINDS.items() if (job.chain, job.head) == own)

    @property
    def decoder(self) -> str:
        """Name of the decoder that uses the drafter."""
        return self.kind.partition("-")[0]

    def published_config(self, target: TransformerDenoiser) -> dict[str, Any]:
        """Return config.json of the drafter, with DeepSpec's names."""
        config = target.module.config
        shared = {
            **{name: getattr(config, name) for name in COPIED_FROM_TARGET},
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
        if self.head == "selector":
            nested = {
                "block_size": self.slots,
                "mask_token_id": target.special.mask,
                "target_layer_ids": shared.pop("target_layer_ids"),
                "conv_kernel_size": TAPS,
                "conv_group_size": GROUP,
                "selector_rank": self.rank,
                "selector_top_k": CANDIDATES,
            }
            names = {"architectures": ["DFlash2DraftModel"], TARGET_TABLES: False}
            return shared | names | {"dflash_config": nested}
        return shared | {
            "architectures": ["Qwen3DSparkModel"],
            "block_size": self.slots,
            "mask_token_id": target.special.mask,
            "markov_rank": self.rank if self.head else 0,
            "markov_head_type": self.head or "vanilla",
            "enable_confidence_head": self.confidence,
            "confidence_head_with_markov": bool(self.head),
        }

    def command(self, model: str, *settings: str) -> str:
        """Return the command that trains this drafter; settings its kind has anyway are left
        out."""
        shown = {"shares": f"{self.shares.ce:g} {self.shares.l1:g}", "flan": "DIR"}
        start = f"dllm-bench train drafter {shlex.join((model, self.kind, *settings))}"
        return loop.command(start, self, KINDS[self.kind], shown)


_CROSS_ENTROPY = LossShares(ce=1.0, l1=0.0, confidence=0.0)
_DSPARK = DrafterJob(head="vanilla", confidence=True)
KINDS: Mapping[str, DrafterJob] = {
    "dflash": DrafterJob(shares=_CROSS_ENTROPY),
    "dspark-markov": _DSPARK,
    "dspark-gated": replace(_DSPARK, head="gated"),
    "dspark-rnn": replace(_DSPARK, head="rnn"),
    "dflash2": DrafterJob(head="selector", slots=8, shares=_CROSS_ENTROPY),
    "eagle3": DrafterJob(chain=True, layers=1),
}
"""Kinds of drafters with their usual settings."""


def feature_layers(layers: int) -> tuple[int, ...]:
    """Return the target's layers that the drafter reads: evenly spaced from the second one, never
    the last; of a target of one layer its embedding."""
    if layers < MANY_LAYERS:
        return tuple(range(layers - 1)) or (EMBEDDING_TAP,)
    return tuple(round(1 + i * (layers - 4) / (FEATURE_LAYERS - 1)) for i in range(FEATURE_LAYERS))


# --- the texts -----------------------------------------------------------------------------------


def prompts_of(job: DrafterJob) -> list[str]:
    """Return the prompts of a job; a smaller job has the first of the same prompts."""
    each = -(-job.prompts // (len(job.benchmarks) + (job.flan is not None)))
    given = [prompts.train_prompts((name,), each, job.answers_seed) for name in job.benchmarks]
    if job.flan is not None:
        given.append(prompts.hashed_order(job.flan, each, job.answers_seed))
    return [text for turn in zip(*given, strict=True) for text in turn][: job.prompts]


def target_key(weights: str, dtype: str) -> str:
    """Name a target in files of its outputs; `weights` is their hash."""
    return weights[:10] if dtype == "float32" else f"{weights[:10]}-{dtype}"


def texts_file(job: DrafterJob, target: str) -> str:
    """Name the file with a target's answers; `target` is its `target_key`."""
    flan = [] if job.flan is None else [f"flan{prompts.hash_of_rows(job.flan)[:10]}"]
    asked = "-".join([*job.benchmarks, *flan])
    sampling = f"{asked}-temperature{job.temperature:g}-seed{job.answers_seed}-{job.max_new_tokens}"
    return f"texts-{target}-{sampling}.jsonl"


def texts_of(
    job: DrafterJob, loaded: LoadedModel, chat: bool, file: Path, report: Report = print
) -> list[TrainingText]:
    """Return the texts of a job; the target's own answers are kept in `file`."""
    if job.texts == "gold":
        if chat:
            raise DllmBenchError(
                "The target is a chat model, but the gold answers are not written as chat turns; "
                "choose texts=target."
            )
        return gold_texts(loaded, prompts.gold_pairs(job.benchmarks, job.prompts, job.answers_seed))
    encode = prompts.encoder(loaded.text.encode, chat)
    requests = [
        Request(
            str(index), tuple(encode(prompt)), job.max_new_tokens, seed=job.answers_seed + index
        )
        for index, prompt in enumerate(prompts_of(job))
    ]
    return generated_texts(loaded, requests, job.temperature, file, report)


def gold_texts(loaded: LoadedModel, pairs: Sequence[prompts.Pair]) -> list[TrainingText]:
    """Return prompts with their gold answers."""
    encode, end = loaded.text.encode, loaded.special.eos
    return [
        TrainingText((*encode(prompt + answer), end), len(encode(prompt)))
        for prompt, answer in pairs
    ]


def generated_texts(
    loaded: LoadedModel,
    requests: Sequence[Request],
    temperature: float,
    file: Path,
    report: Report = print,
) -> list[TrainingText]:
    """Return prompts with the target's own answers, decoded in batches of `BATCH`.

    Answers that `file` already holds are not decoded again; new ones are appended to it in the
    order of the requests, whose ids are their places. DllmBenchError if it holds those to others,
    or if another process appends to it.
    """
    make_folder(file.parent)
    is_complete = len(loop.stored_texts(file, loaded.denoiser.vocab_size)) >= len(requests)
    try:
        with nullcontext() if is_complete else Lock(file.with_suffix(".lock")):
            return _answered(loaded, requests, temperature, file, report)
    except BusyError as error:
        raise DllmBenchError(
            f"{file} is being written by {error.owner}; wait for it, then give the command again."
        ) from None


def _answered(
    loaded: LoadedModel, requests: Sequence[Request], temperature: float, file: Path, report: Report
) -> list[TrainingText]:
    texts = loop.stored_texts(file, loaded.denoiser.vocab_size)
    for answered, request in zip(texts, requests, strict=False):
        if answered.ids[: answered.prompt] != request.prompt_ids:
            raise DllmBenchError(
                f"{file} holds answers to other prompts than this training has; give tokenizer, "
                "model.chat, model.bos and model.thinking that it was made with, or move it away."
            )
    if len(texts) >= len(requests):
        return texts[: len(requests)]
    # without a line that a kill cut short
    files.write_atomic(file, "".join(f"{json.dumps(vars(text))}\n" for text in texts))
    countdown, early = loop.Countdown(len(requests), len(texts)), dict[int, TrainingText]()
    decoder = SpeculativeDecoder(NoDraft(), temperature=temperature)
    with closing(Appender(file)) as stream:
        for one in decoder.generate_stream(loaded.denoiser, requests[len(texts) :], BATCH):  # type: ignore[arg-type]
            place = int(one.request_id)
            prompt, limit = requests[place].prompt_ids, requests[place].max_new_tokens
            ids, end = one.ids[:limit], first_end(one.ids[:limit], loaded.special)
            answer = ids if end is None else ids[: end + 1]
            early[place] = TrainingText(prompt + answer, len(prompt))
            while text := early.pop(len(texts), None):
                texts.append(text)
                stream.append(json.dumps(vars(text)))
                if countdown.due(len(texts)):
                    report(f"answers: {len(texts)} of {len(requests)}, {countdown.eta(len(texts))}")
    return texts


def frequent_tokens(texts: Sequence[TrainingText], count: int, vocab: int) -> tuple[int, ...]:
    """Return the `count` of `vocab` tokens that occur most often in the answers, ascending.

    Equally frequent ones by the prompts, then by their ids, because learned vocabularies list
    frequent pieces first.
    """
    answers = Counter(token for text in texts for token in text.ids[text.prompt :])
    asked = Counter(token for text in texts for token in text.ids[: text.prompt])
    most = heapq.nsmallest(count, range(vocab), key=lambda token: (-answers[token], -asked[token]))
    return tuple(sorted(most))


# --- the target's outputs -------------------------------------------------------------------------


@dataclass
class StoredRows:
    """What a target computed for texts, kept in bfloat16, one file a text.

    Rows that are not stored are rounded as well, so that training does not depend on the limit.
    """

    folder: Path
    """Of this target and these feature layers alone."""
    limit_bytes: float
    """Nothing is added to a folder of this size."""

    def __post_init__(self) -> None:
        make_folder(self.folder)
        found = map(lstat, matching(self.folder, "*.safetensors"))
        self.size = sum(one.st_size for one in found if one is not None)

    def rows(
        self, texts: Sequence[TrainingText], end: int, compute: Callable[[TrainingText], TargetRows]
    ) -> TargetRows:
        """Return the rows of a batch; `compute` gives those of one text that is not stored."""
        ids_BL, answer_BL = loop.padded(texts, end)
        parts = [self._of_text(text, compute) for text in texts]
        rows = (
            pad_sequence([part[name] for part in parts], batch_first=True).float()
            for name in ("features", "last", "whole")
        )
        return TargetRows(ids_BL, answer_BL, *rows)

    def _of_text(
        self, text: TrainingText, compute: Callable[[TrainingText], TargetRows]
    ) -> dict[str, Tensor]:
        name = hashlib.sha256(f"{text.prompt} {text.ids}".encode()).hexdigest()
        file = self.folder / f"{name}.safetensors"
        if is_file(file):
            with library_errors_named(f"{file} cannot be read", "remove it"):
                return load_file(file)
        rows = compute(text)
        assert rows.whole_BL is not None
        features, last = rows.features_BLC[0].bfloat16(), rows.last_BLH[0].bfloat16()
        part = {"features": features.cpu(), "last": last.cpu(), "whole": rows.whole_BL[0].cpu()}
        size = sum(tensor.nbytes for tensor in part.values())
        if self.size + size <= self.limit_bytes:
            self.size += size
            files.write_atomic(file, save(part))
        return part


# --- training ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class DrafterTraining(Training):
    """A training of a drafter."""

    part = "drafter"
    measure_every, digits, save_every_s = 100, 5, 60.0

    target: TransformerDenoiser
    published: dict[str, Any]
    """config.json of the drafter."""
    network: DraftNetwork
    stored: StoredRows | None
    """Where the target's outputs are kept; None: nowhere."""

    @classmethod
    def start(
        cls,
        job: DrafterJob,
        loaded: LoadedModel,
        texts: list[TrainingText],
        rows: Path | None = None,
        named: tuple[str, ...] = (),
    ) -> DrafterTraining:
        """Return a drafter with random weights, and the target's embedding and head.

        rows: folder for the target's outputs, if the job stores them; see the fields for `named`.
        DllmBenchError for a target that no drafter serves.
        """
        target = loaded.denoiser
        SpeculativeDecoder(NoDraft()).check_run_fits(target)
        assert isinstance(target, TransformerDenoiser)
        few = min(HELD_OUT, max(1, len(texts) // 10))
        published = job.published_config(target)
        if job.draft_vocab:
            frequent = frequent_tokens(texts[few:], job.draft_vocab, target.vocab_size)
            published[DRAFT_IDS] = list(frequent)
        network = drafter_files.new_network(published, target, job.seed)
        stored = None
        if job.store_gib and rows is not None:
            taps = "-".join(map(str, network.drafter_config.feature_layers))
            stored = StoredRows(rows / f"layers-{taps}", job.store_gib * 2**30)
        learned = [weight for weight in network.parameters() if weight.requires_grad]
        return cls(
            job=job,
            loaded=loaded,
            optimizer=torch.optim.AdamW(learned, job.lr, weight_decay=0.0),
            texts=texts[few:],
            held_out=texts[:few],
            named=named or (loaded.metadata.name,),
            target=target,
            published=published,
            network=network,
            stored=stored,
        )

    @property
    def weights(self) -> dict[str, Tensor]:
        """What is learned: all but the target's tables."""
        learned = self.network.named_parameters()
        return {name: weight.data for name, weight in learned if weight.requires_grad}

    def rows(self, texts: list[TrainingText]) -> TargetRows:
        """Return what the target computes for a batch of texts."""
        if self.stored is None:
            return self._computed(texts)
        rows = self.stored.rows(texts, self.target.special.eos, lambda one: self._computed([one]))
        return TargetRows(*(part.to(self.target.device) for part in vars(rows).values()))

    @torch.no_grad()
    def _computed(self, texts: list[TrainingText]) -> TargetRows:
        target = self.target
        parts = loop.padded(texts, target.special.eos)
        ids_BL, answer_BL = (part.to(target.device) for part in parts)
        layers = self.network.drafter_config.feature_layers
        rows = objectives.target_rows(target, ids_BL, answer_BL, layers)
        return objectives.whole_vocabulary(target, rows) if self.job.draft_vocab else rows

    def loss_of(
        self, texts: list[TrainingText], rng: torch.Generator, measured: bool = False
    ) -> tuple[Tensor, Numbers]:
        """Return the loss of one batch; measured: with terms that it does not weigh."""
        network, rows = self.network, self.rows(texts)
        if isinstance(network, ChainDraftNetwork):
            supervised_BL = objectives.supervised_columns(rows.answer_BL)
            logits = objectives.chain_forward(network, rows, supervised_BL)
            before_BL = supervised_BL.roll(1, 1)  # positions before the labels of step 0
            whole_M = None if rows.whole_BL is None else rows.whole_BL[before_BL]
            target_MV = network.lm_head(rows.last_BLH[before_BL])
            steps = objectives.chain_losses(logits, target_MV, supervised_BL, whole_M)
            return objectives.decayed_sum(steps), lambda loss: {"loss": loss.item()}
        assert isinstance(network, BlockDraftNetwork)
        shares, facts = self.job.shares, network.drafter_config
        anchors_BN, kept_BN = objectives.draw_anchors(rows.answer_BL, self.job.anchors, rng)
        predicting = facts.slots - facts.silent
        blocks = objectives.blocks_at(anchors_BN, kept_BN, rows.answer_BL, predicting)
        kernel = objectives.flex if self.target.device.type == "cuda" else objectives.dense
        drafted = objectives.block_forward(network, rows, blocks, kernel)
        target_BNDV = whole_BND = None
        if measured or shares.l1 or facts.confidence:
            target_BNDV = network.lm_head(objectives.at(rows.last_BLH, blocks.labels_BND - 1))
        if rows.whole_BL is not None:
            whole_BND = objectives.at(rows.whole_BL, blocks.labels_BND - 1)
        places_BL = network.places(rows.ids_BL)
        losses = objectives.block_losses(
            drafted, target_BNDV, places_BL, blocks, shares.decay, whole_BND
        )
        return losses.total(shares), lambda loss: losses.numbers(shares)

    @torch.no_grad()
    def measure_held_out(self) -> Point:
        """Measure the curve's numbers on the held-out texts, always at the same anchors."""
        rng = torch.Generator().manual_seed(self.job.seed)
        loss, numbers = self.loss_of(self.held_out, rng, measured=True)
        return {f"held_out_{name}": value for name, value in numbers(loss).items()}

    def write(self, out: Path) -> None:
        """Write config.json and model.safetensors, in bfloat16."""
        config = {**self.published, TARGET_TABLES: True}
        files.write_atomic(out / "config.json", json.dumps(config, indent=1) + "\n")
        self.write_weights(out / "model.safetensors", {"format": "pt"})

    def facts(self) -> dict[str, Any]:
        learned = sum(weight.numel() for weight in self.weights.values())
        model = self.loaded.metadata.name
        return {"model": model, "learned": learned, "facts": self.network.drafter_config}
