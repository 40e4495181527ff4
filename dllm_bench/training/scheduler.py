"""What the verification scheduler is given: step times of a model, temperatures of a drafter.

`dllm-bench train sps MODEL`: a step of R tokens is one forward that feeds R positions after a
cached context and takes the best token of every row, as verification does. The sizes are timed in
turn, so that a drift of the machine affects all of them alike; the first turns are warm-up; the
device is synchronised before and after each step; medians are kept. All R positions share one
context: the cost of reading one context per request, drafting and prefill are left out.

`dllm-bench train temperatures RUN …` calibrates a confidence head by Sequential Temperature Scaling
(DSpark, section 3.2.1) on the stored samples of sealed runs: fitted on the first half of every
run's samples, measured on the second half. In a greedy run the text shows how much of every draft
is right, whatever was verified; in a sampled run only verified tokens count, so their number must
be fixed. All runs are of one drafter with one target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.decoder import Condition, abilities, needing, require
from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.decoding.speculative import FixedLength
from dllm_bench.methods.drafting import StepProfile
from dllm_bench.metrics import drafts
from dllm_bench.metrics.drafts import ObservedDraft
from dllm_bench.models import load as loading
from dllm_bench.registry import find
from dllm_bench.runs.runner import timed
from dllm_bench.serving.load_simulation import StoredDrafts
from dllm_bench.store import inputs, provenance
from dllm_bench.store.groups import Role, RunConfig, setting_in
from dllm_bench.store.spec import RunSpec, digest, split
from dllm_bench.store.store import RunEntry, read_samples, sealed_record

# --- step times -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProfileJob:
    """What is measured."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Tokens of a step, in increasing order."""
    context: int = 256
    """Positions of the cached context."""
    repeats: int = 20
    """Timed steps of each size."""
    warmup: int = 3
    """Steps of each size before those."""

    def __post_init__(self) -> None:
        StepProfile(self.batches, (1.0,) * len(self.batches))  # refuses impossible sizes


def measure(model: Any, job: ProfileJob) -> list[list[float]]:
    """Return seconds of every timed step, one list per size."""
    given = {"model": abilities(model)}
    require("a profile of verifying steps", needing({"model": Condition.CAUSAL}), given, "model")
    kv, canvas_1L = _context(model, job)
    seconds: list[list[float]] = [[] for _ in job.batches]
    for turn in range(job.warmup + job.repeats):
        for size, timed_s in zip(job.batches, seconds, strict=True):
            step_s = _step_s(model, canvas_1L, kv, size)
            if turn >= job.warmup:
                timed_s.append(step_s)
    return seconds


@torch.inference_mode()
def _context(model: Denoiser, job: ProfileJob) -> tuple[KVCache, Tensor]:
    """Return a cache that holds the context, and a canvas with room for the largest step."""
    length = job.context + job.batches[-1]
    generator = torch.Generator().manual_seed(0)
    ids_1L = torch.randint(model.vocab_size, (1, length), generator=generator)
    canvas_1L, kv = ids_1L.to(model.device), model.new_cache(length)
    end = job.context
    feed = ForwardPlan(ForwardKind.PREFILL, (0, end), (end, end + 1), (0, end), "block_causal", 1)
    model.forward(canvas_1L, feed, kv)
    kv.keep(feed, torch.zeros((), dtype=torch.long, device=model.device))
    return kv, canvas_1L


@torch.inference_mode()
def _step_s(model: Denoiser, canvas_1L: Tensor, kv: KVCache, size: int) -> float:
    """Return seconds of one step; the cache is not changed."""
    start = kv.length
    feed, rows = (start, start + size), (start + 1, start + size + 1)
    plan = ForwardPlan(ForwardKind.VERIFY, feed, rows, feed, "block_causal", 1)
    return timed(lambda: model.forward(canvas_1L, plan, kv).argmax(-1), model.device)[1]


def profile_of(job: ProfileJob, seconds: Sequence[Sequence[float]]) -> StepProfile:
    """Return steps per second of each size, from the median times."""
    return StepProfile(job.batches, tuple(1 / median(timed_s) for timed_s in seconds))


def profile_model(job: ProfileJob, config: RunConfig) -> dict[str, Any]:
    """Load the configured model and measure it.

    Returns what the profile's file holds: the table, its spread in milliseconds, the settings, and
    facts about model and machine.
    """
    hardware = inputs.resolve_hardware(config.hardware)
    torch.set_num_threads(hardware.threads)
    model = loading.load_model(inputs.model_spec(inputs.resolve_model(config.model, hardware)))
    seconds = measure(model.denoiser, job)
    settings = asdict(job)
    return {
        **{name: list(column) for name, column in asdict(profile_of(job, seconds)).items()},
        "spread_ms": [[round(1000 * s, 4) for s in (min(each), max(each))] for each in seconds],
        **{name: settings[name] for name in ("context", "repeats", "warmup")},
        "model": asdict(model.metadata),
        "hardware": dict(hardware),
        "machine": provenance.machine(str(model.denoiser.device)),
        "torch": torch.__version__,
    }


# --- temperatures ---------------------------------------------------------------------------------


def fit_temperatures(entries: Sequence[RunEntry]) -> dict[str, Any]:
    """Return temperatures by position, what they were fitted on, and calibration before and after.

    Raises DllmBenchError unless all runs have the same drafter and target.
    """
    drafters = {digest([drafter_identity(e.spec), e.spec.inputs["weights"]]) for e in entries}
    if len(drafters) > 1:
        raise DllmBenchError(
            f"The {len(entries)} runs are of {len(drafters)} drafters or targets; temperatures "
            "belong to one drafter with one target, name runs of one."
        )
    halves = [observed_halves(entry) for entry in entries]
    first, second = ([one for half in side for one in half] for side in zip(*halves, strict=True))
    if not first or not second:
        raise DllmBenchError(
            f"The {len(entries)} runs do not hold confidences in both halves of their samples; "
            "name runs of a drafter with a confidence head (decoder=dspark) with more items."
        )
    temperatures = drafts.fit_temperatures(first)
    spec = entries[0].spec
    return {
        "temperatures": list(temperatures),
        "positions": list(calibration_by_position(second, temperatures)),
        "fitted_on": len(first),
        "measured_on": len(second),
        "bins": drafts.BINS,
        "grid": list(drafts.GRID),
        "runs": [entry.spec.identity_hash for entry in entries],
        "target": {"name": spec.model.name, "weights": spec.inputs["weights"]},
        "draft": drafter_identity(spec),
    }


def drafter_identity(spec: RunSpec) -> dict[str, Any]:
    """Return the drafter of a run by its content; the path of its files is left out."""
    if "draft" not in spec.decoder:
        raise DllmBenchError(
            f"Run {spec.short} has no speculative decoder; name runs of a drafter with a "
            "confidence head (decoder=dspark)."
        )
    return dict(setting_in(split({"decoder": spec.decoder})[Role.IDENTITY], "decoder.draft"))


def observed_halves(entry: RunEntry) -> tuple[list[ObservedDraft], list[ObservedDraft]]:
    """Return confidences and outcomes of the first and of the second half of a run's samples."""
    record, decoder = sealed_record(entry), entry.spec.decoder
    if not setting_in(decoder, "temperature"):
        stored = read_samples(entry.path)
        samples = [stored[name] for name in record.columns["id"]]
        texts = ((Trace.from_columns(s.trace), s.born, s.ids) for s in samples)
        first, second = StoredDrafts.of(texts).halves()
        return first.observed(), second.observed()
    is_fixed = find(setting_in(decoder, "length._target_")) is FixedLength
    if not is_fixed or setting_in(decoder, "length.tokens") == 0:
        raise DllmBenchError(
            f"Run {entry.spec.short} is sampled, and its confidences decided how many tokens were "
            "verified; run it with decoder/length=fixed to fit temperatures."
        )
    return drafts.halves(record.samples)


def calibration_by_position(
    second: Sequence[ObservedDraft], temperatures: Sequence[float]
) -> Iterator[Mapping]:
    """Yield calibration of every position (from 1), without and with the temperatures."""
    before = drafts.outcomes_by_position(second)
    after = drafts.outcomes_by_position(second, temperatures)
    for k, (raw, scaled) in enumerate(zip(before, after, strict=True), start=1):
        found = {
            "ece": drafts.ece(raw),
            "ece_scaled": drafts.ece(scaled),
            "auroc": drafts.auroc(raw),
            "auroc_scaled": drafts.auroc(scaled),
        }
        rounded = {name: n if n is None else round(n, 5) for name, n in found.items()}
        yield {"position": k, "rounds": len(raw.predicted), **rounded}


def temperature_lines(fitted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result as text, one line per position."""
    for temperature, row in zip(fitted["temperatures"], fitted["positions"], strict=False):
        yield (
            f"position {row['position']}  T {temperature:.3f}  ECE {row['ece']:.4f} -> "
            f"{row['ece_scaled']:.4f}  ({row['rounds']} drafts)"
        )
