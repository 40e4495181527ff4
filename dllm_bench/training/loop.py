"""The loop that trains adapters and drafters, and what every training reports: lines while it runs,
and a model card when it is done.

Texts and random draws of a step depend only on (seed, step), so a training resumed from its state
file gives the same weights as one that was never interrupted.

A card is a template in `cards`; those of embedded models are made by `scripts/embedded/card.py`.
Cards contain measurements of training; scores of decoding come from runs.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from safetensors.torch import save
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dllm_bench.core.declared import Count, Positive, Range, made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.text import library_errors_named
from dllm_bench.runs.progress import duration
from dllm_bench.store import files
from dllm_bench.store.files import atomic_path, is_file, make_folder, write_atomic
from dllm_bench.training import prompts

WARMUP, CLIP_NORM = 0.04, 1.0  # DeepSpec
LINE_EVERY_S = 5.0
Seed = Annotated[int, Range(0, 10**11)]  # 10 million times as much fits into 64 bits
Report = Callable[[str], None]
"""Receives a progress line, for example `print`."""
Point = dict[str, float]
Numbers = Callable[[Tensor], Point]
"""Loss -> a point of the curve. Reading it waits for the device, so most steps leave it out."""


# --- what is reported ----------------------------------------------------------------------------


class Countdown:
    """Time left of a loop of `total` steps, at the pace since the countdown was made.

    `first` steps were done by an earlier, interrupted call and do not count for the pace.
    """

    def __init__(self, total: int, first: int = 0) -> None:
        self.total, self.first = total, first
        self._started = self._last_line = time.monotonic()

    def due(self, done: int) -> bool:
        """Return whether the next line should be printed: after five seconds, and at the end."""
        now = time.monotonic()
        if now - self._last_line <= LINE_EVERY_S and done < self.total:
            return False
        self._last_line = now
        return True

    def eta(self, done: int) -> str:
        """Return the time left after `done` steps, as `ETA 0:31`."""
        pace_s = (time.monotonic() - self._started) / (done - self.first)
        return f"ETA {duration(pace_s * (self.total - done))}"

    def line(self, point: Mapping[str, float]) -> str:
        """Return `step 200 of 2000: loss 1.2, ETA 0:31`; the first entry of the point is its
        step."""
        (unit, done), *rest = point.items()
        numbers = ", ".join(f"{name} {value:g}" for name, value in rest)
        return f"{unit} {done:g} of {self.total}: {numbers}, {self.eta(int(done))}"


def write_report(out: Path, kind: str, curve: Sequence[Point], parts: Mapping[str, Any]) -> None:
    """Write the curve of a training, and the model card: the template of `cards` for this kind,
    filled with `parts`.

    What decoding with the model gives is measured by runs.
    """
    write_atomic(out / "curve.jsonl", "".join(json.dumps(point) + "\n" for point in curve))
    template = Path(__file__).parent / "cards" / f"{kind}.md"
    write_atomic(out / "CARD.md", rendered(template, {"title": out.name, **parts}))


def rendered(template: Path, parts: Mapping[str, Any]) -> str:
    """Return the model card that a template gives; every name in it has to be among `parts`."""
    templates = Environment(
        loader=FileSystemLoader(template.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["f"] = format
    return templates.get_template(template.name).render(parts)


def command(start: str, job: Any, usual: Any, shown: Mapping[str, Any]) -> str:
    """Return the command line that trains a job: `start`, then `--name value` for every setting in
    which it differs from the usual one.

    A tuple repeats its option for each value. shown: values to be written in place of the job's.
    """
    words = [start]
    for name, own in vars(job).items():
        if own == getattr(usual, name):
            continue
        flag = "--benchmark" if name == "benchmarks" else f"--{name.replace('_', '-')}"
        value = shown.get(name, own)
        values = value if isinstance(value, tuple) else (value,)
        words += [flag if item is True else f"{flag} {item}" for item in values]
    return " ".join(words)


# --- texts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingText:
    """One text to learn from."""

    ids: tuple[Count, ...]
    """Tokens of the prompt and of the answer, the end token last."""
    prompt: Positive
    """Number of prompt tokens."""


def padded(texts: Sequence[TrainingText], end: int) -> tuple[Tensor, Tensor]:
    """Return (ids_BL, answer_BL): texts filled up with the end token, and their answer
    positions."""
    ids = [torch.tensor(text.ids) for text in texts]
    answers = [torch.arange(len(text.ids)) >= text.prompt for text in texts]
    return pad_sequence(ids, True, end), pad_sequence(answers, True)


def stored_texts(file: Path, vocab: int) -> list[TrainingText]:
    """Return the texts of a file of answers, one a line; a last line cut short by a kill is left
    out.

    vocab: number of the model's tokens. DllmBenchError for a line that holds no text of these.
    """
    texts = []
    *lines, last = (files.stored_bytes(file) or b"").split(b"\n")
    for number, line in enumerate([*lines, last] if last.endswith(b"}") else lines, start=1):
        todo = f"give JSON with ids below {vocab}, and prompt, the number of the prompt's own ids"
        with library_errors_named(f"Line {number} of {file} is no text of this model", todo):
            text = made_from(TrainingText, files.parse(line))
            if text.prompt > len(text.ids) or max(text.ids) >= vocab:
                raise ValueError("an id or the prompt is too large")
        texts.append(TrainingText(tuple(text.ids), text.prompt))
    return texts


# --- the loop ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Training(ABC):
    """A training in memory."""

    part: ClassVar[str]
    """What is trained: the name of its card in `cards`."""
    measure_every: ClassVar[int]
    """Steps between two points of the curve."""
    digits: ClassVar[int]
    """Of the numbers of a point, after the decimal point."""
    save_every_s: ClassVar[float]

    job: Any
    """What to train; has `rows` (texts of a step), `steps`, `lr` and `seed`."""
    loaded: LoadedModel
    """The model that is adapted, or the target of the drafter."""
    optimizer: torch.optim.AdamW
    texts: list[TrainingText]
    held_out: list[TrainingText]
    """Texts that are measured and never trained on."""
    named: tuple[str, ...]
    """Words of the command: the model, and its settings."""
    step: int = 0
    seconds: float = 0.0
    """Processor time on a CPU, otherwise elapsed time."""
    curve: list[Point] = field(default_factory=list)

    @property
    @abstractmethod
    def weights(self) -> Mapping[str, Tensor]:
        """The weights in memory, by name."""

    @abstractmethod
    def loss_of(self, texts: list[TrainingText], rng: torch.Generator) -> tuple[Tensor, Numbers]:
        """Return the loss of a batch, and how to read its parts."""

    @abstractmethod
    def measure_held_out(self) -> Point:
        """Return the numbers of the curve on the held-out texts."""

    @abstractmethod
    def write(self, out: Path) -> None:
        """Write what is trained, as it is published."""

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return what the model card names besides the job and this training."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.loaded.denoiser.device

    @property
    def settings(self) -> str:
        """Job, model and hash of the texts as JSON, since a state file holds no objects such as
        paths."""
        made, special = self.loaded.metadata, self.loaded.special
        texts = prompts.hash_of([*map(repr, (*self.texts, *self.held_out))])
        facts = made.weights_sha256, made.dtype, asdict(special), texts
        return json.dumps([asdict(self.job), *facts], default=str)

    @property
    def clock(self) -> Callable[[], float]:
        """Seconds: of the processor on a CPU, which others may use too; else those that pass."""
        return time.process_time if self.device.type == "cpu" else time.monotonic

    def write_weights(self, file: Path, metadata: dict[str, str] | None = None) -> None:
        """Write the weights in bfloat16, as they are published."""
        stored = {n: w.to("cpu", torch.bfloat16).contiguous() for n, w in self.weights.items()}
        write_atomic(file, save(stored, metadata))  # `save_file` hides it from other users

    def optimizer_step(self) -> tuple[Tensor, Numbers]:
        """Take one step on randomly drawn texts; return the loss, and how to read its parts."""
        job = self.job
        rng = torch.Generator().manual_seed(job.seed * 10_000_000 + self.step)
        drawn = torch.randint(len(self.texts), (job.rows,), generator=rng).tolist()
        loss, numbers = self.loss_of([self.texts[index] for index in drawn], rng)
        self.optimizer.zero_grad()
        loss.backward()
        for group in self.optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], CLIP_NORM)
            group["lr"] = job.lr * learning_rate_factor(self.step, job.steps)
        self.optimizer.step()
        self.step += 1
        return loss.detach(), numbers

    def restore(self, file: Path) -> None:
        """Continue from the state file that `save` wrote."""
        with library_errors_named(f"{file} cannot be read", "remove it to train from the start"):
            saved = torch.load(file, map_location=self.device)
            if saved["job"] != self.settings:
                raise DllmBenchError(
                    f"{file} belongs to a training of the {self.part} with other settings, another "
                    "model or other texts; give the same ones, another --out, or remove the folder."
                )
            self.step, self.seconds, self.curve = saved["step"], saved["seconds"], saved["curve"]
        for name, weight in self.weights.items():
            weight.copy_(saved["weights"][name])
        self.optimizer.load_state_dict(saved["optimizer"])

    def require_finite(self) -> None:
        """Raise DllmBenchError if a weight or a measured number is NaN or infinite."""
        last = self.curve[-1].items() if self.curve else ()
        # the loss of a batch without masks is NaN
        measured = torch.tensor([number for name, number in last if name != "loss"])
        if not all(bool(one.isfinite().all()) for one in (measured, *self.weights.values())):
            raise DllmBenchError(
                f"At step {self.step} of {self.job.steps}, weights or losses are NaN or infinite, "
                f"and were not written; give a lower --lr than {self.job.lr:g}."
            )

    def save(self, out: Path) -> None:
        """Write what is trained as it is now, its curve and card, and the state to resume from."""
        self.require_finite()
        self.write(out)
        minutes = "core-minutes" if self.device.type == "cpu" else "minutes"
        parts = {"job": self.job, "training": self, "minutes": minutes, **self.facts()}
        write_report(out, self.part, self.curve, parts)
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
            "weights": dict(self.weights),
            "optimizer": self.optimizer.state_dict(),
            "job": self.settings,
        }
        with atomic_path(out / "state.pt") as temporary:
            torch.save(state, temporary)

    def run(self, out: Path, report: Report = print) -> Self:
        """Train and write the folder `out`; resumes from its state.pt where there is one."""
        with files.explain_write_errors(out):
            make_folder(out)
        if is_file(file := out / "state.pt"):
            self.restore(file)
        countdown, saved_at = Countdown(self.job.steps, self.step), time.monotonic()
        counted_at = self.clock()
        while self.step < self.job.steps:
            loss, numbers = self.optimizer_step()
            if self.step % self.measure_every == 0 or self.step == self.job.steps:
                point = {"step": self.step} | numbers(loss) | self.measure_held_out()
                self.curve.append({name: round(n, self.digits) for name, n in point.items()})
                report(countdown.line(self.curve[-1]))
            now = time.monotonic()
            if now - saved_at >= self.save_every_s or self.step == self.job.steps:
                counted_at, before, saved_at = self.clock(), counted_at, now
                self.seconds += counted_at - before
                self.save(out)
        return self


def learning_rate_factor(step: int, steps: int) -> float:
    """Return a factor that rises linearly over 4 % of the steps, then falls by cosine to 0."""
    warm = max(1, round(WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.5 + 0.5 * math.cos(math.pi * (step - warm) / max(1, steps - warm))
