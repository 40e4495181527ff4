"""Training data of a learned filter: confidences of a block and which candidates are right.

Each prompt is answered by the model's own decoding, one token per forward, then decoded again under
the oracle with that answer as reference (Learn2PD, arXiv 2509.25188, §3.1.3); every step of the
second decoding is a row. Blocks after the one in which the text ends are left out by default,
because they are many and easy. Traces are stored under a hash of their inputs, and resumed.

Shapes: S steps, W positions of a block, K branches (one).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dllm_bench import DECODING_VERSION
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Scores, Select
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.defaults import Filled
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Blocks, Confidence, Eos, TopK
from dllm_bench.methods.learn2pd import Oracle
from dllm_bench.store.files import atomic_path
from dllm_bench.store.nolinks import is_file
from dllm_bench.store.spec import digest, slug
from dllm_bench.training.reports import Countdown, Report

SAVE_EVERY_S = 60.0
Row = tuple[Tensor, Tensor, Tensor]
"""Confidence, right, masked: each (W,)."""


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
        confidence, right, masked = (torch.stack(part).cpu() for part in zip(*rows, strict=True))
        counts = torch.tensor([len(steps) for steps in prompts])
        index = torch.arange(self.done, self.done + len(prompts)).repeat_interleave(counts)
        return Traces(
            confidence_SW=torch.cat([self.confidence_SW, confidence]),
            right_SW=torch.cat([self.right_SW, right]),
            masked_SW=torch.cat([self.masked_SW, masked]),
            prompt_S=torch.cat([self.prompt_S, index]),
            done=self.done + len(prompts),
        )

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

    def to(self, device: torch.device) -> Traces:
        """Return the traces on a device."""
        return self.each(lambda tensor: tensor.to(device))

    @property
    def masked(self) -> int:
        """Number of masked positions, over all steps."""
        return int(self.masked_SW.sum())

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


def collect(
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
    traces = load(file) if is_file(file) else Traces.empty(source.block)
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
            save(file, traces, source)
        if countdown.due(done):
            report(f"traces: {done} of {len(prompts)} prompts, {countdown.eta(done)}")
    return traces


def save(file: Path, traces: Traces, source: TraceSource) -> None:
    """Write traces; an interruption leaves the file as it was."""
    header = {"plan": json.dumps(asdict(source), sort_keys=True), "done": str(traces.done)}
    with atomic_path(file) as temporary:
        save_file(traces.tensors, temporary, header)


def load(file: Path) -> Traces:
    """Return stored traces; shape letters after the tensors' names are not read."""
    with safe_open(file, framework="pt") as handle:
        stored = {name.partition("_")[0]: name for name in handle.keys()}  # noqa: SIM118
        names = (f.name for f in fields(Traces) if f.name != "done")
        tensors = {n: handle.get_tensor(stored[n.partition("_")[0]]) for n in names}
        return Traces(**tensors, done=int(handle.metadata()["done"]))
