"""Fits what a confidence head is off by: `dllm-bench train temperatures RUN …`.

Sequential Temperature Scaling (DSpark, section 3.2.1) on stored facts of sealed runs: fitted on the
first half of every run's samples, measured on the second. A greedy run says of every draft how much
of it is right, whatever was verified; a sampled one says it of what a fixed length verified. One
drafter beside one target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.metrics import calibration
from dllm_bench.metrics.calibration import Observed
from dllm_bench.serving.stored_drafts import StoredDrafts
from dllm_bench.store.spec import Role, RunSpec, digest, split
from dllm_bench.store.store import RunEntry, read_record, read_samples

FIXED = "length.fixed"
Halves = tuple[list[Observed], list[Observed]]


def fit(entries: Sequence[RunEntry]) -> dict[str, Any]:
    """Temperatures by position, what they were fitted on, and the ECE before and after."""
    check_one_drafter(entries)
    halves = [observed(entry) for entry in entries]
    first, second = ([one for half in side for one in half] for side in zip(*halves, strict=True))
    if not first or not second:
        raise DllmBenchError(
            f"The {len(entries)} runs hold no confidences on both sides of their middle; name runs "
            "of a drafter with a confidence head (decoder=dspark) with more items."
        )
    temperatures = calibration.fit_temperatures(first)
    spec = entries[0].spec
    return {
        "temperatures": list(temperatures),
        "positions": list(positions(second, temperatures)),
        "fitted_on": len(first),
        "measured_on": len(second),
        "bins": calibration.BINS,
        "grid": list(calibration.GRID),
        "runs": [entry.spec.identity_hash for entry in entries],
        "target": {"name": spec.model["name"], "weights": spec.inputs["weights"]},
        "draft": drafter(spec),
    }


def check_one_drafter(entries: Sequence[RunEntry]) -> None:
    """Refuse runs whose confidences mean different things."""
    drafters = {digest([drafter(e.spec), e.spec.inputs["weights"]]) for e in entries}
    if len(drafters) > 1:
        raise DllmBenchError(
            f"The {len(entries)} runs are of {len(drafters)} drafters or targets; temperatures "
            "belong to one drafter beside one target, name runs of one."
        )


def drafter(spec: RunSpec) -> dict[str, Any]:
    """The draft of a run by its content, without its place."""
    if "draft" not in spec.decoder:
        raise DllmBenchError(
            f"Run {spec.short} is of no speculative decoder; name runs of a drafter with a "
            "confidence head (decoder=dspark)."
        )
    plain = split({"decoder": {"draft": spec.decoder["draft"]}})[Role.IDENTITY]
    return dict(plain["decoder"]["draft"])


def observed(entry: RunEntry) -> Halves:
    """Confidences and outcomes of the first and of the second half of a run's samples."""
    record, decoder = read_record(entry.path), entry.spec.decoder
    if record is None:
        raise DllmBenchError(
            f"Run {entry.spec.short} is {entry.state.value} ({entry.done} samples); complete it "
            "with the command that started it."
        )
    if not decoder["temperature"]:
        stored = read_samples(entry.path)
        samples = [stored[name] for name in record.columns["id"]]
        halves = StoredDrafts.of(
            (Trace.from_columns(s.trace), s.born, s.ids) for s in samples
        ).halves()
        return halves[0].observed(), halves[1].observed()
    if decoder["length"]["_target_"] != FIXED or decoder["length"].get("tokens") == 0:
        raise DllmBenchError(
            f"Run {entry.spec.short} is sampled and chose by the confidences what it verified; "
            "run it with decoder/length=fixed to fit temperatures."
        )
    return calibration.halves(record.sample_stats)


def positions(second: Sequence[Observed], temperatures: Sequence[float]) -> Iterator[Mapping]:
    """Calibration by position from 1, before and after."""
    before = calibration.positions(second)
    after = calibration.positions(second, temperatures)
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
    """What was fitted, a line per position."""
    for temperature, found in zip(fitted["temperatures"], fitted["positions"], strict=False):
        yield (
            f"position {found['position']}  T {temperature:.3f}  ECE {found['ece']:.4f} -> "
            f"{found['ece_scaled']:.4f}  ({found['rounds']} drafts)"
        )
