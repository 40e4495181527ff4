"""Training of Learn2PD's filter (arXiv 2509.25188, Eq. 6, Algorithm 1): `dllm-bench train filter`.

Binary cross-entropy on "this candidate equals the reference", full batch, AdamW; the weights with
the best validation loss are kept. Prompts, not rows, are split 80/10/10. The loss reads only
positions that are masked at a step, since the filter decides nowhere else; `labels="all"` reads the
whole block, as the authors' code does. Collecting traces can be resumed; fitting takes seconds and
starts over.

Shapes: S steps of the oracle's decoding, W positions of a block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from dllm_bench.core.declared import CheckedFields
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import filters as filter_files
from dllm_bench.models import load as loading
from dllm_bench.store.files import write_atomic
from dllm_bench.store.groups import ModelGroup
from dllm_bench.store.inputs import model_hashes, model_spec
from dllm_bench.store.nolinks import is_file, make_folder
from dllm_bench.training import FILTER_BENCHMARKS, prompts, reports, traces
from dllm_bench.training.reports import Countdown, Report
from dllm_bench.training.traces import Traces, TraceSource

Labels = Literal["masked", "all"]
Rates = dict[str, float]

SHARES = (0.8, 0.1)  # of prompts: training, validation; the rest is for testing
FEWEST_PROMPTS = 10
FLAN_PER_TASK = 40  # paper, section 4.1
SOURCE = "decoder.select.first.head.source"  # where decoder=learn2pd names its filter
MEASURE_EVERY = 50  # epochs
ALARM = 0.9  # false positives are counted above this probability
TAU = 0.96  # threshold of the decoder


# --- what to train -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FilterJob(CheckedFields):
    """One filter to train: its size, its prompts and its optimisation."""

    block: int = 32
    """Positions of a block, the filter's inputs and outputs."""
    gen_length: int = 64
    """New tokens of each prompt (the paper: 256)."""
    layers: int = 2
    """Linear layers."""
    labels: Labels = "masked"
    """Positions that the loss reads; "all" as in the authors' code."""
    epochs: int = 5000
    lr: float = 1e-3
    seed: int = 0
    prompts: int = 400
    benchmarks: tuple[str, ...] = FILTER_BENCHMARKS
    """Embedded tasks whose train splits give the prompts, in turn."""
    flan: Path | None = None
    """A directory of FLAN rows that gives the prompts instead, 40 of every task."""
    all_blocks: bool = False
    """Whether blocks after the one in which the text ends are kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gen_length % self.block:
            raise DllmBenchError(
                f"A block of {self.block} does not divide the generation length "
                f"{self.gen_length}; give a multiple."
            )

    def name(self, model: str) -> str:
        """Return the folder name of the filter."""
        layers = "" if self.layers == 2 else f"-layers{self.layers}"
        return f"{model}-block{self.block}{layers}" + ("" if self.labels == "masked" else "-all")

    def texts(self) -> list[str]:
        """Return the prompts."""
        if self.flan is not None:
            return prompts.flan_prompts(self.flan, FLAN_PER_TASK, self.seed)
        return prompts.train_prompts(self.benchmarks, self.prompts, self.seed)

    def prompt_source(self) -> str:
        """Return where the prompts come from, for the card."""
        if self.flan is not None:
            return f"FLAN, {FLAN_PER_TASK} prompts of every task"
        return f"train splits of {', '.join(self.benchmarks)}, in turn"

    def command(self, model: str) -> str:
        """Return the command that trains this filter; settings at their defaults are left out."""
        options = reports.changed(self, FilterJob())
        return reports.command(f"dllm-bench train filter {model}", options)


@dataclass(frozen=True)
class FittedFilter:
    """The result of fitting."""

    tensors: dict[str, Tensor]
    """The weights with the best validation loss."""
    epoch: int
    """Their epoch."""
    rates: dict[str, Rates]
    """Part of the split -> loss and decisions; "confidence": the test part with the plain
    confidences in place of the filter's probabilities."""
    curve: list[dict[str, float]]
    seconds: float


def train(
    job: FilterJob,
    model: ModelGroup,
    out: Path,
    traces_folder: Path,
    report: Report = print,
) -> filter_files.LearnedFilter:
    """Collect missing traces, fit, and write the filter with its curve and card to `out`.

    `model` is a resolved configuration group.
    """
    texts = job.texts()
    source = trace_source(job, model, texts)
    found = stored_or_collected(source, model, texts, traces_folder, report)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fitted = fit(found.to(device), job, report)
    facts = filter_files.FilterMetadata(
        labels=job.labels,
        gen_length=job.gen_length,
        model=source.model,
        weights=source.weights,
        tokenizer=source.tokenizer,
    )
    make_folder(out)
    learned = filter_files.save_filter(out, fitted.tensors, facts)
    curve = "".join(json.dumps(point) + "\n" for point in fitted.curve)
    write_atomic(out / "curve.jsonl", curve)
    reports.plot_losses(out / "curve.png", fitted.curve, fitted.epoch)
    parts = {"job": job, "learned": learned, "facts": facts, "found": found, "fitted": fitted}
    write_atomic(out / "CARD.md", reports.card("filter", out.name, parts))
    return learned


# --- traces --------------------------------------------------------------------------------------


def collect(job: FilterJob, model: ModelGroup, traces_folder: Path, report: Report = print) -> Path:
    """Collect the traces of a job and return their file."""
    texts = job.texts()
    source = trace_source(job, model, texts)
    stored_or_collected(source, model, texts, traces_folder, report)
    return source.file(traces_folder)


def trace_source(job: FilterJob, model: ModelGroup, texts: Sequence[str]) -> TraceSource:
    """Return what the traces of a job depend on; at least ten prompts, so that every part has
    some."""
    if len(texts) < FEWEST_PROMPTS:
        raise DllmBenchError(
            f"A filter is trained, validated and tested on different prompts, {len(texts)} were "
            f"given; give {FEWEST_PROMPTS} or more."
        )
    hashes = model_hashes(model)
    return TraceSource(
        model=model.name,
        weights=hashes["weights"],
        tokenizer=hashes.get("tokenizer", ""),
        prompts=prompts.hash_of(texts),
        block=job.block,
        gen_length=job.gen_length,
        all_blocks=job.all_blocks,
    )


def stored_or_collected(
    source: TraceSource,
    model: ModelGroup,
    texts: Sequence[str],
    folder: Path,
    report: Report,
) -> Traces:
    """Return stored traces if they are complete; the model is only loaded if they are not."""
    file = source.file(folder)
    if is_file(file) and (stored := traces.load(file)).done == len(texts):
        report(f"traces: {file}")
        return stored
    spec = model_spec(model)
    loaded = loading.load_model(spec)
    encode = prompts.encoder(loaded.encode, spec.chat)
    return traces.collect(loaded.denoiser, encode, texts, source, folder, report)


def split_by_prompt(found: Traces, seed: int) -> dict[str, Traces]:
    """Return the training, validation and test rows; all rows of a prompt are in one part."""
    order = torch.randperm(found.done, generator=torch.Generator().manual_seed(seed))
    first, second = (round(share * found.done) for share in SHARES)
    parts = (order[:first], order[first : first + second], order[first + second :])
    names = ("train", "validation", "test")
    device = found.prompt_S.device
    return {n: found.of_prompts(p.to(device)) for n, p in zip(names, parts, strict=True)}


# --- fitting -------------------------------------------------------------------------------------


def network_of(block: int, layers: int, seed: int) -> nn.Sequential:
    """Return linear layers with ReLU between them; in the file they are called 0, 2, 4, …"""
    stack: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for index in range(layers):
            stack += [nn.ReLU()] * (index > 0) + [nn.Linear(block, block)]
    return nn.Sequential(*stack)


def loss_of(logits_SW: Tensor, part: Traces, labels: Labels) -> Tensor:
    """Return the mean binary cross-entropy (nats) over the positions that `labels` names."""
    losses_SW = nn.functional.binary_cross_entropy_with_logits(
        logits_SW, part.right_SW.float(), reduction="none"
    )
    return losses_SW.mean() if labels == "all" else losses_SW[part.masked_SW].mean()


def fit(found: Traces, job: FilterJob, report: Report = print) -> FittedFilter:
    """Train on full batches; every 50 epochs the validation loss decides what is kept."""
    parts = split_by_prompt(found, job.seed)
    network = network_of(job.block, job.layers, job.seed).to(found.confidence_SW.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=job.lr)
    curve: list[dict[str, float]] = []
    best, best_epoch, best_tensors = float("inf"), 0, {}
    started, countdown = time.monotonic(), Countdown(job.epochs)
    for epoch in range(1, job.epochs + 1):
        optimizer.zero_grad()
        loss = loss_of(network(parts["train"].confidence_SW), parts["train"], job.labels)
        loss.backward()
        optimizer.step()
        if epoch % MEASURE_EVERY and epoch not in (1, job.epochs):
            continue
        rates = measure(network, parts["validation"], job.labels)
        curve.append(_curve_point(epoch, loss.item(), rates))
        if rates["loss"] < best:
            best, best_epoch = rates["loss"], epoch
            best_tensors = {n: t.detach().clone() for n, t in network.state_dict().items()}
        if countdown.due(epoch):
            report(countdown.line(curve[-1]))
    network.load_state_dict(best_tensors)
    rates_by_part = {name: measure(network, part, job.labels) for name, part in parts.items()}
    rates_by_part["confidence"] = decisions(parts["test"].confidence_SW, parts["test"])
    seconds = time.monotonic() - started
    return FittedFilter(best_tensors, best_epoch, rates_by_part, curve, seconds)


def _curve_point(epoch: int, train_loss: float, validation: Mapping[str, float]) -> Rates:
    """Return a rounded point of the curve; its losses are called train and validation."""
    named = {"validation" if name == "loss" else name: value for name, value in validation.items()}
    point = {"train": train_loss, **named}
    return {"epoch": epoch, **{name: round(value, 5) for name, value in point.items()}}


@torch.no_grad()
def measure(network: nn.Module, part: Traces, labels: Labels) -> Rates:
    """Return loss and decisions of the network on a part of the split."""
    logits_SW = network(part.confidence_SW)
    return {"loss": loss_of(logits_SW, part, labels).item()} | decisions(logits_SW.sigmoid(), part)


def decisions(probability_SW: Tensor, part: Traces) -> Rates:
    """Return rates at masked positions.

    false_positive: share of the wrong candidates above ALARM; accepted: share of the right ones
    above TAU; wrong_accepted: share of wrong ones among those above TAU.
    """
    right_SW, wrong_SW = part.masked_SW & part.right_SW, part.masked_SW & ~part.right_SW
    accepted_SW = part.masked_SW & (probability_SW > TAU)
    return {
        "false_positive": _share(probability_SW > ALARM, wrong_SW),
        "accepted": _share(accepted_SW, right_SW),
        "wrong_accepted": _share(wrong_SW, accepted_SW),
    }


def _share(flags_SW: Tensor, among_SW: Tensor) -> float:
    """Return the share of `among` that are flagged; 0 where there are none."""
    return (flags_SW & among_SW).sum().item() / max(1, int(among_SW.sum()))
