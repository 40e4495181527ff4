"""What a learned filter is trained on: confidences of a block and which candidates were right.

Each prompt is answered by the model's own decoding, one token per forward, then decoded again under
the oracle with that answer as reference (Learn2PD, arXiv 2509.25188, §3.1.3); every step of the
second pass is a row. Blocks after the one in which the text ends are left out unless asked for:
they are easy and many. Traces are stored, found again by what they depend on, and resumed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench import DECODING_VERSION
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.request import Request
from dllm_bench.core.state import REFERENCE, DecodeState
from dllm_bench.decoding.cache.none import NoCache
from dllm_bench.decoding.masked import MaskedDecoder
from dllm_bench.decoding.schedule.blocks import Blocks
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.select.oracle import Oracle
from dllm_bench.decoding.select.topk import TopK
from dllm_bench.decoding.stop.eos import Eos
from dllm_bench.decoding.stop.filled import Filled
from dllm_bench.store.files import atomic_path
from dllm_bench.store.spec import digest, slug

SAVE_EVERY_S = 60.0
REPORT_EVERY_S = 5.0
Row = tuple[Tensor, Tensor, Tensor]  # confidence, right, masked, each (B,)


@dataclass(frozen=True)
class Recording(Select):
    """Does what `oracle` does and keeps a row per open block in `rows`."""

    oracle: Select
    rows: list[Row] = field(default_factory=list, compare=False)
    reads_decoded: ClassVar[bool] = True

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        right_KW = scores.ids_KW == window.of(state.memo[REFERENCE])
        masked_KW = window.of(state.masked_KL)
        self.rows.append((scores.probability_KW[0].float(), right_KW[0], masked_KW[0]))
        return self.oracle(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.oracle.on_stall(scores, window, state)


@dataclass(frozen=True)
class Plan:
    """What traces depend on; equal plans are one file. `prompts` is a hash of the texts."""

    model: str
    weights: str
    tokenizer: str
    prompts: str
    block: int
    gen_length: int
    all_blocks: bool = False
    decoding_version: int = DECODING_VERSION

    def file(self, folder: Path) -> Path:
        """Where the traces of this plan lie."""
        name = f"{slug(self.model)}-block{self.block}-{digest(asdict(self))[:10]}"
        return folder / f"{name}.safetensors"


@dataclass(frozen=True)
class Traces:
    """R steps of blocks of B, of the first `done` prompts.

    right_RB: the candidate is the reference; masked_RB: still masked at that step.
    """

    confidence_RB: Tensor
    right_RB: Tensor
    masked_RB: Tensor
    prompt_R: Tensor
    done: int = 0

    @classmethod
    def empty(cls, block: int) -> Traces:
        """No prompt yet."""
        flags_RB = torch.zeros(0, block, dtype=torch.bool)
        return cls(torch.zeros(0, block), flags_RB, flags_RB, torch.zeros(0, dtype=torch.long))

    def extended(self, prompts: Sequence[Sequence[Row]]) -> Traces:
        """With the rows of the next prompts."""
        rows = [row for steps in prompts for row in steps]
        confidence, right, masked = (torch.stack(part).cpu() for part in zip(*rows, strict=True))
        counts = torch.tensor([len(steps) for steps in prompts])
        index = torch.arange(self.done, self.done + len(prompts)).repeat_interleave(counts)
        return Traces(
            confidence_RB=torch.cat([self.confidence_RB, confidence]),
            right_RB=torch.cat([self.right_RB, right]),
            masked_RB=torch.cat([self.masked_RB, masked]),
            prompt_R=torch.cat([self.prompt_R, index]),
            done=self.done + len(prompts),
        )

    def each(self, change: Callable[[Tensor], Tensor]) -> Traces:
        """With every tensor changed."""
        tensors = (self.confidence_RB, self.right_RB, self.masked_RB, self.prompt_R)
        confidence, right, masked, prompt = map(change, tensors)
        return Traces(confidence, right, masked, prompt, self.done)

    def of(self, prompts: Tensor) -> Traces:
        """The rows of these prompts."""
        keep_R = torch.isin(self.prompt_R, prompts)
        return self.each(lambda tensor: tensor[keep_R])

    def to(self, device: torch.device) -> Traces:
        """On a device."""
        return self.each(lambda tensor: tensor.to(device))

    @property
    def stalled(self) -> int:
        """Steps in which no masked candidate was right."""
        return int((~(self.right_RB & self.masked_RB).any(1)).sum())


def oracle_decoder(plan: Plan, rows: list[Row]) -> MaskedDecoder:
    """The oracle over the model's own one-token-per-forward decoding, recording into `rows`.

    Blocks are decoded in order, so stopping after the last one wanted changes nothing before it.
    """
    stop = Filled() if plan.all_blocks else Eos("block", turn_end=False)
    alone = MaskedDecoder(Confidence(), TopK(), Blocks(plan.block), NoCache(), stop=stop)
    return replace(alone, select=Recording(Oracle(alone), rows))


def collect(
    model: Denoiser,
    encode: Callable[[str], list[int]],
    prompts: Sequence[str],
    plan: Plan,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Traces:
    """The traces of all prompts; what a former call stored in `folder` is not decoded again."""
    file = plan.file(folder)
    traces = load(file) if file.exists() else Traces.empty(plan.block)
    rows: list[Row] = []
    decoder = oracle_decoder(plan, rows)
    started = saved = told = time.monotonic()
    fresh: list[list[Row]] = []
    first = traces.done
    for count, text in enumerate(prompts[first:], start=1):
        rows.clear()
        decoder.generate(model, Request(text[:40], tuple(encode(text)), plan.gen_length))
        fresh.append(list(rows))
        now = time.monotonic()
        left = len(prompts) - first - count
        if now - saved > SAVE_EVERY_S or not left:
            traces, fresh, saved = traces.extended(fresh), [], now
            save(file, traces, plan)
        if now - told > REPORT_EVERY_S or not left:
            told = now
            eta_s = left * (now - started) / count
            report(f"traces: {first + count} of {len(prompts)} prompts, ETA {eta_s:.0f} s")
    return traces


def save(file: Path, traces: Traces, plan: Plan) -> None:
    """Write traces at once, so that a stop leaves the former file."""
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f.name: getattr(traces, f.name) for f in fields(traces) if f.name != "done"}
    header = {"plan": json.dumps(asdict(plan), sort_keys=True), "done": str(traces.done)}
    with atomic_path(file) as temporary:
        save_file(tensors, temporary, header)


def load(file: Path) -> Traces:
    """Stored traces."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        return Traces(**tensors, done=int(handle.metadata()["done"]))
