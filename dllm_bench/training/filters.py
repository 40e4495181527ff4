"""Training of Learn2PD's filter (arXiv 2509.25188, Eq. 6, Algorithm 1): `dllm-bench train filter`.

Binary cross-entropy on "this candidate equals the reference", full batch, AdamW; the weights with
the best validation loss are kept. Prompts, not rows, are split 80/10/10. The loss reads only
positions that are masked at a step, since the filter decides nowhere else; `labels="all"` reads the
whole block, as the authors' code does.

Each prompt is answered by the model's own decoding, one token per forward, then decoded again under
the oracle with that answer as reference (§3.1.3); every step of the second decoding is a row.
Blocks after the one in which the text ends are left out by default, because they are many and easy.
Traces are stored under a hash of their inputs, and resumed; fitting takes seconds and starts over.

Shapes: S steps of the oracle's decoding, W positions of a block, K branches (one).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from dllm_bench import DECODING_VERSION
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Scores, Select
from dllm_bench.core.declared import CheckedFields, Range
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, TopK
from dllm_bench.methods.learn2pd import Oracle
from dllm_bench.models import filters as filter_files
from dllm_bench.models import load as loading
from dllm_bench.models.text import library_errors_named
from dllm_bench.store.files import is_file, stored_bytes, write_atomic
from dllm_bench.store.groups import ModelGroup
from dllm_bench.store.inputs import model_hashes, model_spec
from dllm_bench.store.spec import digest, slug
from dllm_bench.training import FILTER_BENCHMARKS, prompts
from dllm_bench.training.loop import Countdown, Point, Report, Seed, command, write_report

SAVE_EVERY_S = 60.0
Row = tuple[Tensor, Tensor, Tensor]
"""Confidence, right, masked: each (W,)."""
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
    """New tokens per prompt (the paper states a length for its oracle alone: 256, §3.1.3)."""
    layers: int = 2
    """Linear layers."""
    labels: Labels = "masked"
    """Positions that the loss reads; "all" as in the authors' code."""
    epochs: int = 5000
    lr: Annotated[float, Range(0, 1e6, above=True)] = 1e-3
    seed: Seed = 0
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

    def command(self, model: str) -> str:
        """Return the command that trains this filter; settings at their defaults are left out."""
        return command(f"dllm-bench train filter {model}", self, FilterJob(), {"flan": "DIR"})


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
    curve: list[Point]
    seconds: float


def train(
    job: FilterJob, model: ModelGroup, out: Path, traces_folder: Path, report: Report = print
) -> filter_files.LearnedFilter:
    """Collect missing traces, fit, and write the filter with its curve and card to `out`.

    `model` is a resolved configuration group. DllmBenchError if `out` holds another filter.
    """
    weights = model_hashes(model)["weights"][:10]  # two folders may have one name
    require_free(out, "CARD.md", f"`{job.command(model.name)}`".encode(), weights.encode())
    source, found = traces_of(job, model, traces_folder, report)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    fitted = fit(found.each(lambda tensor: tensor.to(device)), job, report)
    facts = filter_files.FilterMetadata(
        labels=job.labels,
        gen_length=job.gen_length,
        model=source.model,
        weights=source.weights,
        tokenizer=source.tokenizer,
    )
    learned = save_filter(out, fitted.tensors, facts)
    parts = {"job": job, "learned": learned, "facts": facts, "found": found, "fitted": fitted}
    write_report(out, "filter", fitted.curve, {**parts, "per_task": FLAN_PER_TASK})
    return learned


def convert(file: Path, model: ModelGroup, folder: Path, out: Path | None = None) -> Path:
    """Write a filter that torch saved for a model to `out`, by default to a folder in `folder`
    named after the file, and return it; DllmBenchError if it holds another filter."""
    tensors, hashes = filter_files.read_state_dict(file), model_hashes(model)
    block = tensors["0.weight"].shape[1]
    out = out or folder / f"{model.name}-block{block}-{slug(file.stem)}"
    facts = filter_files.FilterMetadata(
        model=model.name, weights=hashes["weights"], tokenizer=hashes.get("tokenizer", "")
    )
    require_free(out, filter_files.WEIGHTS, filter_files.filter_bytes(tensors, facts))
    save_filter(out, tensors, facts)
    return out


def require_free(out: Path, name: str, *made: bytes) -> None:
    """Raise DllmBenchError if a folder holds a filter, unless its file `name` contains `made`."""
    found = (stored_bytes(out / name) or b"") if is_file(out / filter_files.WEIGHTS) else None
    if found is not None and not all(part in found for part in made):
        raise DllmBenchError(
            f"{out} holds a filter that this command did not make; name another folder with --out, "
            "or remove it."
        )


def save_filter(
    folder: Path, tensors: Mapping[str, Tensor], metadata: filter_files.FilterMetadata
) -> filter_files.LearnedFilter:
    """Write a filter into a folder, which is made if it is missing."""
    write_atomic(folder / filter_files.WEIGHTS, filter_files.filter_bytes(tensors, metadata))
    return filter_files.LearnedFilter(str(folder))


# --- traces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordingOracle(Select):
    """Selects what `oracle` selects and appends a row per step to `rows`."""

    oracle: Select
    rows: list[Row] = field(default_factory=list, compare=False)
    reads_rows: ClassVar[Reads] = "window"

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert state.reference_KL is not None  # by `prepare`
        right_KW = scores.ids_KW == window.of(state.reference_KL)
        masked_KW = window.of(state.masked_KL)
        self.rows.append((scores.probability_KW[0].float(), right_KW[0], masked_KW[0]))
        return self.oracle(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.oracle.on_stall(scores, window, state)


@dataclass(frozen=True)
class TraceSource:
    """Everything that traces depend on; equal sources share one file."""

    model: str
    weights: str
    """Hash of the weights."""
    tokenizer: str
    """Hash of the tokenizer."""
    prompts: str
    """Hash of the prompts."""
    block: int
    gen_length: int
    all_blocks: bool = False
    """Whether blocks after the one in which the text ends are kept."""
    decoding_version: int = DECODING_VERSION

    def file(self, folder: Path) -> Path:
        """Return the file of these traces."""
        name = f"{slug(self.model)}-block{self.block}-{digest(asdict(self))[:10]}"
        return folder / f"{name}.safetensors"


@dataclass(frozen=True)
class Traces:
    """Rows of the first `done` prompts."""

    confidence_SW: Tensor
    """Probability of every candidate, float32."""
    right_SW: Tensor
    """Whether the candidate equals the reference."""
    masked_SW: Tensor
    """Whether the position was still masked at that step."""
    prompt_S: Tensor
    """Index of the prompt."""
    done: int = 0

    @classmethod
    def empty(cls, block: int) -> Traces:
        """Return traces of no prompt."""
        flags_SW = torch.zeros(0, block, dtype=torch.bool)
        return cls(torch.zeros(0, block), flags_SW, flags_SW, torch.zeros(0, dtype=torch.long))

    def extended(self, prompts: Sequence[Sequence[Row]]) -> Traces:
        """Return the traces with the rows of the next prompts."""
        rows = [row for steps in prompts for row in steps]
        done = self.done + len(prompts)
        counts = torch.tensor([len(steps) for steps in prompts])
        prompt_S = torch.arange(self.done, done).repeat_interleave(counts)
        added = [*(torch.stack(part).cpu() for part in zip(*rows, strict=True)), prompt_S]
        whole = map(torch.cat, zip(self.tensors.values(), added, strict=True))
        return Traces(**dict(zip(self.tensors, whole, strict=True)), done=done)

    def each(self, change: Callable[[Tensor], Tensor]) -> Traces:
        """Return the traces with `change` applied to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.tensors.items()}
        return Traces(**changed, done=self.done)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, by name."""
        return {name: value for name, value in vars(self).items() if name != "done"}

    def of_prompts(self, prompts: Tensor) -> Traces:
        """Return the rows of these prompts."""
        keep_S = torch.isin(self.prompt_S, prompts)
        return self.each(lambda tensor: tensor[keep_S])

    @property
    def stalled(self) -> int:
        """Number of steps in which no masked candidate was right."""
        return int((~(self.right_SW & self.masked_SW).any(1)).sum())


def oracle_decoder(source: TraceSource, rows: list[Row]) -> MaskedDecoder:
    """Return the oracle over the model's own one-token-per-forward decoding, recording into `rows`.

    Blocks are decoded in order, so stopping after the last one wanted changes nothing before it.
    """
    stop = Filled() if source.all_blocks else Eos("block", turn_end=False)
    plain = MaskedDecoder(Confidence(), TopK(), Blocks(source.block), NoCache(), stop=stop)
    return replace(plain, select=RecordingOracle(Oracle(plain), rows))


def collect_traces(
    model: Denoiser,
    encode: Callable[[str], list[int]],
    prompts: Sequence[str],
    source: TraceSource,
    folder: Path,
    report: Report = print,
) -> Traces:
    """Return the traces of all prompts; prompts that an earlier call stored are not decoded
    again."""
    file = source.file(folder)
    traces = load_traces(file) if is_file(file) else Traces.empty(source.block)
    rows: list[Row] = []
    decoder = oracle_decoder(source, rows)
    countdown, saved_at = Countdown(len(prompts), traces.done), time.monotonic()
    unsaved: list[list[Row]] = []
    for done, text in enumerate(prompts[traces.done :], start=traces.done + 1):
        rows.clear()
        decoder.generate(model, Request(text[:40], tuple(encode(text)), source.gen_length))
        unsaved.append(list(rows))
        if time.monotonic() - saved_at > SAVE_EVERY_S or done == len(prompts):
            traces, unsaved, saved_at = traces.extended(unsaved), [], time.monotonic()
            save_traces(file, traces, source)
        if countdown.due(done):
            report(f"traces: {done} of {len(prompts)} prompts, {countdown.eta(done)}")
    return traces


def save_traces(file: Path, traces: Traces, source: TraceSource) -> None:
    """Write traces; an interruption leaves the file as it was."""
    header = {"plan": json.dumps(asdict(source), sort_keys=True), "done": str(traces.done)}
    write_atomic(file, save(traces.tensors, header))


def load_traces(file: Path) -> Traces:
    """Return stored traces; DllmBenchError for a file that is damaged or holds something else."""
    failed, todo = f"{file} holds no traces or is damaged", "remove it to collect them again"
    with library_errors_named(failed, todo), safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        return Traces(**tensors, done=int(handle.metadata()["done"]))


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


def traces_of(
    job: FilterJob, model: ModelGroup, folder: Path, report: Report = print
) -> tuple[TraceSource, Traces]:
    """Return the traces of a job, and what they depend on; the model is only loaded if they are not
    stored completely."""
    texts = job.texts()
    source = trace_source(job, model, texts)
    file = source.file(folder)
    if is_file(file) and (stored := load_traces(file)).done == len(texts):
        report(f"traces: {file}")
        return source, stored
    spec = model_spec(model)
    loaded = loading.load_model(spec)
    encode = prompts.encoder(loaded.encode, spec.chat)
    return source, collect_traces(loaded.denoiser, encode, texts, source, folder, report)


def split_by_prompt(found: Traces, seed: int) -> dict[str, Traces]:
    """Return the training, validation and test rows; all rows of a prompt are in one part."""
    order = torch.randperm(found.done, generator=torch.Generator().manual_seed(seed))
    sizes = [round(share * found.done) for share in SHARES]
    parts = order.to(found.prompt_S.device).split([*sizes, found.done - sum(sizes)])
    names = ("train", "validation", "test")
    return {n: found.of_prompts(p) for n, p in zip(names, parts, strict=True)}


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
    curve: list[Point] = []
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
        point = {"train": loss.item(), "validation": rates["loss"], **rates}
        rounded = {name: round(value, 5) for name, value in point.items() if name != "loss"}
        curve.append({"epoch": epoch, **rounded})
        if rates["loss"] < best:
            best, best_epoch = rates["loss"], epoch
            best_tensors = {n: t.detach().clone() for n, t in network.state_dict().items()}
        if countdown.due(epoch):
            report(countdown.line(curve[-1]))
    if not best_tensors:
        raise DllmBenchError(
            f"The validation loss is NaN in all {job.epochs} epochs; lower --lr, or add prompts."
        )
    network.load_state_dict(best_tensors)
    rates_by_part = {name: measure(network, part, job.labels) for name, part in parts.items()}
    rates_by_part["confidence"] = decisions(parts["test"].confidence_SW, parts["test"])
    seconds = time.monotonic() - started
    return FittedFilter(best_tensors, best_epoch, rates_by_part, curve, seconds)


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
