"""The points of `dllm-bench simulate`: the compared systems, and the texts that each serves.

Importing this module imports torch.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence

from dllm_bench.api.comparison import sealed_record
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.methods.drafting import (
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
from dllm_bench.store.groups import setting_in
from dllm_bench.store.store import RunEntry, read_samples

Points = Sequence[FrontierPoint] | Sequence[ServicePoint]
FitTemperatures = Callable[[StoredDrafts], Temperatures]  # from the first half of the texts


def simulated(arguments: Namespace, entries: Sequence[RunEntry]) -> Points:
    """Return the points that the options describe."""
    profile = profile_for(arguments.profile, entries)
    systems = systems_of(entries, profile, arguments.tau, temperatures_for(arguments))
    if not arguments.arrivals:
        return frontier(systems, profile, arguments.requests)
    return under_arrivals(
        systems,
        profile,
        max(arguments.requests),
        arguments.arrivals,
        arguments.level,
        arguments.seed,
    )


def profile_for(source: str, entries: Sequence[RunEntry]) -> StepProfile:
    """Return the step times in a file; they must be measured with the model of all runs."""
    for model in dict.fromkeys(entry.spec.model.name for entry in entries):
        check_step_profile(source, model)
    return read_step_profile(source)


def temperatures_for(arguments: Namespace) -> FitTemperatures:
    """Return temperatures of confidences: from a file, none, or fitted on the first half of the
    texts."""
    if arguments.raw or arguments.temperatures:
        given = read_temperatures(arguments.temperatures)
        return lambda first: given
    return lambda first: Temperatures(fit_temperatures(first.observed()))


def systems_of(
    entries: Sequence[RunEntry], profile: StepProfile, tau: float, fit: FitTemperatures
) -> list[ServingSystem]:
    """Return the compared systems: autoregressive decoding once, then each drafter under every
    rule."""
    systems: list[ServingSystem] = []
    labels = Counter(entry.spec.label for entry in entries)
    for entry in entries:
        name = entry.spec.label
        name = name if labels[name] == 1 else f"{name}-{entry.spec.short}"
        first, second = drafts_of(entry).halves()
        texts, draft_s = second.served(fit(first)), second.drafting(profile)
        if not systems:
            systems.append(ServingSystem("autoregressive", texts, fixed_rule(0)))
        length_rules = {"": fixed_rule()}
        if first.observed():
            length_rules |= {
                f" threshold {tau}": threshold_rule(tau),
                " scheduler": hardware_aware_rule(profile),
                " two steps ahead": asynchronous_rule(profile),
            }
        systems += [
            ServingSystem(name + rule, texts, new, draft_s) for rule, new in length_rules.items()
        ]
    return systems


def drafts_of(entry: RunEntry) -> StoredDrafts:
    """Return the drafts stored by a sealed greedy run."""
    record, spec = sealed_record(entry), entry.spec
    temperature = setting_in(spec.decoder, "temperature", 0)
    if temperature > 0:
        raise DllmBenchError(
            f"Run {spec.short} sampled at temperature {temperature}; drafts are "
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
