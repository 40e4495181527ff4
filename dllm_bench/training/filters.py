"""Training of Learn2PD's filter (arXiv 2509.25188, Eq. 6, Algorithm 1): `dllm-bench train filter`.

Binary cross-entropy on "this candidate is the reference", full batch, AdamW; the weights of the
best validation loss are kept. Prompts, not rows, are split 80/10/10. The loss reads the positions
that are masked at a step, since nothing is decided elsewhere; `labels="all"` reads the whole block,
as the authors' code does. Collecting traces resumes; fitting takes seconds and starts anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import filters as filter_files
from dllm_bench.training import filter_card, progress, prompts, traces
from dllm_bench.training.traces import Plan, Traces

Labels = Literal["masked", "all"]
Report = Callable[[str], None]
Rates = dict[str, float]

SHARES = (0.8, 0.1)  # of the prompts: training, validation; the rest is the test part
FEWEST_PROMPTS = 10
FLAN_PER_TASK = 40  # paper, section 4.1
SOURCE = "decoder.select.first.head.source"  # where decoder=learn2pd names its filter
MEASURE_EVERY = 50  # epochs
REPORT_EVERY_S = 5.0
ALARM, TAU = 0.9, 0.96  # false positives are counted at ALARM; TAU is the decoder's threshold


@dataclass(frozen=True)
class FilterJob:
    """What is asked for. prompts are drawn from the train splits of `benchmarks`, in turn; with
    `flan` they come from that directory, 40 of every task.
    """

    block: int = 32
    gen_length: int = 64
    layers: int = 2
    labels: Labels = "masked"
    epochs: int = 5000
    lr: float = 1e-3
    seed: int = 0
    prompts: int = 400
    benchmarks: tuple[str, ...] = ("minigsm", "minicode", "minimath")
    flan: Path | None = None
    all_blocks: bool = False

    def __post_init__(self) -> None:
        if self.labels not in get_args(Labels):
            raise DllmBenchError(
                f"labels is {self.labels!r}; choose one of {', '.join(get_args(Labels))}."
            )
        if self.gen_length % self.block:
            raise DllmBenchError(
                f"A block of {self.block} does not divide the generation length "
                f"{self.gen_length}; give a multiple."
            )

    def name(self, model: str) -> str:
        """Folder name of the filter."""
        layers = "" if self.layers == 2 else f"-layers{self.layers}"
        return f"{model}-block{self.block}{layers}" + ("" if self.labels == "masked" else "-all")

    def texts(self) -> list[str]:
        """The prompts."""
        if self.flan is not None:
            return prompts.flan_prompts(self.flan, FLAN_PER_TASK, self.seed)
        return prompts.train_prompts(self.benchmarks, self.prompts, self.seed)

    def source(self) -> str:
        """Where the prompts come from, for the card."""
        if self.flan is not None:
            return f"FLAN, {FLAN_PER_TASK} prompts of every task"
        return f"train splits of {', '.join(self.benchmarks)}, in turn"


@dataclass(frozen=True)
class Fitted:
    """The best weights, the epoch they are of, rates per part of the split, and the curve."""

    tensors: dict[str, Tensor]
    epoch: int
    rates: dict[str, Rates]
    curve: list[dict[str, float]]
    seconds: float


def train(
    job: FilterJob,
    model: Mapping[str, Any],
    out: Path,
    traces_folder: Path,
    report: Report = print,
) -> filter_files.LearnedFilter:
    """Collect what is missing, fit, write the filter with curve and card to `out`.

    `model` is a resolved configuration group.
    """
    texts = job.texts()
    plan = plan_of(job, model, texts)
    found = traces_of(plan, model, texts, traces_folder, report)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fitted = fit(found.to(device), job, report)
    facts = filter_files.FilterMetadata(
        labels=job.labels,
        gen_length=job.gen_length,
        model=plan.model,
        weights=plan.weights,
        tokenizer=plan.tokenizer,
    )
    learned = filter_files.save_filter(out, fitted.tensors, facts)
    curve = "".join(json.dumps(point) + "\n" for point in fitted.curve)
    (out / "curve.jsonl").write_text(curve)
    filter_card.plot(out / "curve.png", fitted.curve, fitted.epoch)
    (out / "CARD.md").write_text(filter_card.render(out.name, learned, job, found, fitted))
    return learned


def collect(
    job: FilterJob, model: Mapping[str, Any], traces_folder: Path, report: Report = print
) -> Path:
    """Collect the traces of a job; the file they lie in."""
    texts = job.texts()
    plan = plan_of(job, model, texts)
    traces_of(plan, model, texts, traces_folder, report)
    return plan.file(traces_folder)


def check_prompts(texts: Sequence[str]) -> None:
    """Enough for the three parts of the split."""
    if len(texts) < FEWEST_PROMPTS:
        raise DllmBenchError(
            f"A filter is trained, validated and tested on different prompts, {len(texts)} were "
            f"given; give {FEWEST_PROMPTS} or more."
        )


def plan_of(job: FilterJob, model: Mapping[str, Any], texts: Sequence[str]) -> Plan:
    """What the traces of a job depend on."""
    from dllm_bench.store.inputs import model_hashes

    check_prompts(texts)
    hashes = model_hashes(model)
    return Plan(
        model=str(model["name"]),
        weights=hashes["weights"],
        tokenizer=hashes.get("tokenizer", ""),
        prompts=prompts.hash_of(texts),
        block=job.block,
        gen_length=job.gen_length,
        all_blocks=job.all_blocks,
    )


def traces_of(
    plan: Plan, model: Mapping[str, Any], texts: Sequence[str], folder: Path, report: Report
) -> Traces:
    """Stored traces where they are complete; the model is loaded only where they are not."""
    from dllm_bench.models import load as loading
    from dllm_bench.store.inputs import model_spec

    file = plan.file(folder)
    if file.exists() and (stored := traces.load(file)).done == len(texts):
        report(f"traces: {file}")
        return stored
    spec = model_spec(model)
    loaded = loading.load_model(spec)
    encode = prompts.encoder(loaded.encode, spec.chat)
    return traces.collect(loaded.denoiser, encode, texts, plan, folder, report)


def parts_of(found: Traces, seed: int) -> dict[str, Traces]:
    """Training, validation and test rows; all rows of a prompt are in one part."""
    order = torch.randperm(found.done, generator=torch.Generator().manual_seed(seed))
    first, second = (round(share * found.done) for share in SHARES)
    prompts = (order[:first], order[first : first + second], order[first + second :])
    names = ("train", "validation", "test")
    device = found.prompt_R.device
    return {n: found.of(p.to(device)) for n, p in zip(names, prompts, strict=True)}


def network_of(block: int, layers: int, seed: int) -> nn.Sequential:
    """Linear layers with ReLU between them, so that their names are 0, 2, 4, …"""
    stack: list[nn.Module] = []
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for index in range(layers):
            stack += [nn.ReLU()] * (index > 0) + [nn.Linear(block, block)]
    return nn.Sequential(*stack)


def loss_of(logits_RB: Tensor, part: Traces, labels: Labels) -> Tensor:
    """Mean binary cross-entropy over the positions the labels are read at."""
    losses_RB = nn.functional.binary_cross_entropy_with_logits(
        logits_RB, part.right_RB.float(), reduction="none"
    )
    return losses_RB.mean() if labels == "all" else losses_RB[part.masked_RB].mean()


def fit(found: Traces, job: FilterJob, report: Report = print) -> Fitted:
    """Full-batch training; measured now and then, the best on the validation part is kept."""
    parts = parts_of(found, job.seed)
    network = network_of(job.block, job.layers, job.seed).to(found.confidence_RB.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=job.lr)
    curve: list[dict[str, float]] = []
    best, best_epoch, best_tensors = float("inf"), 0, {}
    started = told = time.monotonic()
    for epoch in range(1, job.epochs + 1):
        optimizer.zero_grad()
        loss = loss_of(network(parts["train"].confidence_RB), parts["train"], job.labels)
        loss.backward()
        optimizer.step()
        if epoch % MEASURE_EVERY and epoch not in (1, job.epochs):
            continue
        rates = measure(network, parts["validation"], job.labels)
        curve.append({"epoch": epoch, "train": round(loss.item(), 5), **rounded(rates)})
        if rates["loss"] < best:
            best, best_epoch = rates["loss"], epoch
            best_tensors = {n: t.detach().clone() for n, t in network.state_dict().items()}
        now = time.monotonic()
        if now - told > REPORT_EVERY_S or epoch == job.epochs:
            told = now
            eta_s = (job.epochs - epoch) * (now - started) / epoch
            report(progress.line(curve[-1], job.epochs, eta_s))
    network.load_state_dict(best_tensors)
    rates_by_part = {name: measure(network, part, job.labels) for name, part in parts.items()}
    rates_by_part["confidence"] = decisions(parts["test"].confidence_RB, parts["test"])
    seconds = time.monotonic() - started
    return Fitted(best_tensors, best_epoch, rates_by_part, curve, seconds)


@torch.no_grad()
def measure(network: nn.Module, part: Traces, labels: Labels) -> Rates:
    """Loss and decisions of the network on a part of the split."""
    logits_RB = network(part.confidence_RB)
    return {"loss": loss_of(logits_RB, part, labels).item()} | decisions(logits_RB.sigmoid(), part)


def decisions(probability_RB: Tensor, part: Traces) -> Rates:
    """At masked positions: false positives at ALARM (share of the wrong candidates), and at TAU the
    share of the right ones accepted and of wrong ones among the accepted.
    """
    right_RB, wrong_RB = part.masked_RB & part.right_RB, part.masked_RB & ~part.right_RB
    accepted_RB = part.masked_RB & (probability_RB > TAU)
    return {
        "false_positive": share(probability_RB > ALARM, wrong_RB),
        "accepted": share(accepted_RB, right_RB),
        "wrong_accepted": share(wrong_RB, accepted_RB),
    }


def share(flags_RB: Tensor, among_RB: Tensor) -> float:
    """Share of `among` that are flagged; 0 where there are none."""
    return (flags_RB & among_RB).sum().item() / max(1, int(among_RB.sum()))


def rounded(rates: Mapping[str, float]) -> Rates:
    """Rates as the curve stores them; the loss is called by the part it is of."""
    named = {"validation" if name == "loss" else name: value for name, value in rates.items()}
    return {name: round(value, 5) for name, value in named.items()}
