"""`dllm-bench simulate`: stored drafts under load, as lines of text and csv.

Systems: autoregressive decoding, each drafter with whole drafts, and, where it has a confidence
head, with a threshold and with the scheduler, at once and two steps ahead. `serving/` simulates.
"""

from __future__ import annotations

import csv
import io
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from dllm_bench.cli.views import grid, sealed
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.decoding.length.measurements import (
    StepProfile,
    Temperatures,
    check_step_profile,
    read_step_profile,
    read_temperatures,
)
from dllm_bench.metrics.calibration import fit_temperatures
from dllm_bench.serving.load_simulation import (
    FrontierPoint,
    ServicePoint,
    ServingSystem,
    asynchronous_rule,
    fixed_rule,
    frontier,
    hardware_aware_rule,
    threshold_rule,
    under_arrivals,
)
from dllm_bench.serving.stored_drafts import StoredDrafts
from dllm_bench.store.store import RunEntry, read_samples

Points = Sequence[FrontierPoint] | Sequence[ServicePoint]
Scale = Callable[[StoredDrafts], Temperatures]
HEADINGS = {
    "system": "system",
    "requests": "requests",
    "requests_per_s": "requests/s",
    "tokens_per_s_user": "tokens/s/user",
    "tokens_per_s_device": "tokens/s/device",
    "verified_per_request": "verified/request",
    "tokens_per_round": "tokens/round",
    "attained": "at the level",
    "wait_s": "wait s",
}


def simulated(args: Namespace, entries: Sequence[RunEntry]) -> Points:
    """The points the options ask for."""
    profile = profile_for(args.profile, entries)
    systems = systems_of(entries, profile, args.tau, scale_of(args))
    if not args.arrivals:
        return frontier(systems, profile, args.requests)
    seats = max(args.requests)
    return under_arrivals(systems, profile, seats, args.arrivals, args.level, args.seed)


def profile_for(source: str, entries: Sequence[RunEntry]) -> StepProfile:
    """The step profile in a file, which has to be of the model of all runs."""
    for model in dict.fromkeys(entry.spec.model["name"] for entry in entries):
        check_step_profile(source, model)
    return read_step_profile(source)


def scale_of(args: Namespace) -> Scale:
    """How confidences are scaled: as given, not at all, or by what the first texts say."""
    if args.raw or args.temperatures:
        given = read_temperatures(args.temperatures)
        return lambda first: given
    return lambda first: Temperatures(fit_temperatures(first.observed()))


def systems_of(
    entries: Sequence[RunEntry], profile: StepProfile, tau: float, scale: Scale
) -> list[ServingSystem]:
    """What is compared: autoregressive decoding once, then each drafter under every rule."""
    found: list[ServingSystem] = []
    labels = Counter(entry.spec.label for entry in entries)
    for entry in entries:
        name = entry.spec.label
        name = name if labels[name] == 1 else f"{name}-{entry.spec.short}"
        first, second = drafts_of(entry).halves()
        texts, draft_s = second.served(scale(first)), second.drafting(profile)
        if not found:
            found.append(ServingSystem("autoregressive", texts, fixed_rule(0)))
        chosen = {"": fixed_rule()}
        if first.observed():
            chosen |= {
                f" threshold {tau}": threshold_rule(tau),
                " scheduler": hardware_aware_rule(profile),
                " two steps ahead": asynchronous_rule(profile),
            }
        found += [ServingSystem(name + rule, texts, new, draft_s) for rule, new in chosen.items()]
    return found


def drafts_of(entry: RunEntry) -> StoredDrafts:
    """The drafts of a sealed greedy run."""
    record, spec = sealed(entry), entry.spec
    if spec.decoder.get("temperature", 0) > 0:
        raise DllmBenchError(
            f"Run {spec.short} sampled at temperature {spec.decoder['temperature']}; drafts are "
            "recorded along greedy text, run it with decoder.temperature=0."
        )
    stored = read_samples(entry.path)
    samples = [stored[name] for name in record.columns["id"]]
    drafts = StoredDrafts.of((Trace.from_columns(s.trace), s.born, s.ids) for s in samples)
    if len(drafts.texts) < 2:
        raise DllmBenchError(
            f"Run {spec.short} holds drafts of {len(drafts.texts)} texts; name a run of a "
            "speculative decoder with more items."
        )
    return drafts


def lines(points: Points) -> Iterator[str]:
    """Points as a table."""
    rows = [{HEADINGS[name]: value for name, value in asdict(p).items()} for p in points]
    shown = [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    yield from grid([list(rows[0]), *shown])


def as_csv(points: Points) -> str:
    """The same in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(asdict(points[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(point) for point in points)
    return text.getvalue()
