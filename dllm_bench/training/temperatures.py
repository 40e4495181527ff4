"""Fit temperatures that calibrate a confidence head: `dllm-bench train temperatures RUN …`.

Sequential Temperature Scaling (DSpark, section 3.2.1) on the stored samples of sealed runs: fitted
on the first half of every run's samples, measured on the second half. In a greedy run the text
shows how much of every draft is right, whatever was verified; in a sampled run only verified tokens
count, so their number must be fixed. All runs are of one drafter with one target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.decoding.speculative import FixedLength
from dllm_bench.metrics import drafts
from dllm_bench.metrics.drafts import ObservedDraft
from dllm_bench.registry import find
from dllm_bench.serving.load_simulation import StoredDrafts
from dllm_bench.store.groups import setting_in
from dllm_bench.store.spec import Role, RunSpec, digest, split
from dllm_bench.store.store import RunEntry, read_record, read_samples

Halves = tuple[list[ObservedDraft], list[ObservedDraft]]


def fit(entries: Sequence[RunEntry]) -> dict[str, Any]:
    """Return temperatures by position, what they were fitted on, and calibration before and
    after."""
    check_one_drafter(entries)
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


def check_one_drafter(entries: Sequence[RunEntry]) -> None:
    """Raise an error unless all runs have the same drafter and target."""
    drafters = {digest([drafter_identity(e.spec), e.spec.inputs["weights"]]) for e in entries}
    if len(drafters) > 1:
        raise DllmBenchError(
            f"The {len(entries)} runs are of {len(drafters)} drafters or targets; temperatures "
            "belong to one drafter with one target, name runs of one."
        )


def drafter_identity(spec: RunSpec) -> dict[str, Any]:
    """Return the drafter of a run by its content; the path of its files is left out."""
    if "draft" not in spec.decoder:
        raise DllmBenchError(
            f"Run {spec.short} has no speculative decoder; name runs of a drafter with a "
            "confidence head (decoder=dspark)."
        )
    identity = split({"decoder": spec.decoder})[Role.IDENTITY]
    return dict(setting_in(identity, "decoder.draft"))


def observed_halves(entry: RunEntry) -> Halves:
    """Return confidences and outcomes of the first and of the second half of a run's samples."""
    record, decoder = read_record(entry.path), entry.spec.decoder
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it."
        )
    if not setting_in(decoder, "temperature"):
        stored = read_samples(entry.path)
        samples = [stored[name] for name in record.columns["id"]]
        halves = StoredDrafts.of(
            (Trace.from_columns(s.trace), s.born, s.ids) for s in samples
        ).halves()
        return halves[0].observed(), halves[1].observed()
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
    before = drafts.calibration_by_position(second)
    after = drafts.calibration_by_position(second, temperatures)
    for k, (raw, scaled) in enumerate(zip(before, after, strict=True), start=1):
        yield {
            "position": k,
            "rounds": raw.count,
            "ece": round(raw.ece, 5),
            "ece_scaled": round(scaled.ece, 5),
            "auroc": raw.auroc and round(raw.auroc, 5),
            "auroc_scaled": scaled.auroc and round(scaled.auroc, 5),
        }


def lines(fitted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result as text, one line per position."""
    for temperature, row in zip(fitted["temperatures"], fitted["positions"], strict=False):
        yield (
            f"position {row['position']}  T {temperature:.3f}  ECE {row['ece']:.4f} -> "
            f"{row['ece_scaled']:.4f}  ({row['rounds']} drafts)"
        )
