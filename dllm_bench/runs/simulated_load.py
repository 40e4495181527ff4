"""What `dllm-bench simulate` and DSpark's figures of serving simulate, from stored runs.

The first half of a run's texts fits the temperatures of its confidence head, the second half is
served. Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.methods.drafting import (
    StepProfile,
    Temperatures,
    check_step_profile,
    read_step_profile,
)
from dllm_bench.metrics.drafts import fit_temperatures
from dllm_bench.serving.load_simulation import (
    NewLengthRule,
    ServingSystem,
    StoredDrafts,
    asynchronous_rule,
    fixed_rule,
    hardware_aware_rule,
    threshold_rule,
)
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import SampleRecord
from dllm_bench.store.spec import RunSpec

NO_DRAFTS, WHOLE_DRAFTS = "none", "fixed"
LENGTH_RULES: Mapping[str, Callable[[StepProfile, Mapping[str, Any]], NewLengthRule]] = {
    NO_DRAFTS: lambda profile, settings: fixed_rule(0),
    WHOLE_DRAFTS: lambda profile, settings: fixed_rule(settings.get("tokens")),
    "threshold": lambda profile, settings: threshold_rule(settings["tau"]),
    "hardware_aware": lambda profile, settings: hardware_aware_rule(profile),
    "asynchronous": lambda profile, settings: asynchronous_rule(profile),
}
"""Name of a rule -> makes it from a step profile and settings (`tokens` or `tau`)."""


def drafts_of(spec: RunSpec, samples: Iterable[SampleRecord]) -> StoredDrafts:
    """Return the drafts that a greedy run stored; DllmBenchError if it cannot be simulated."""
    temperature = setting_in(spec.decoder, "temperature", 0)
    if temperature > 0:
        raise DllmBenchError(
            f"Run {spec.short} sampled at temperature {temperature}; drafts are "
            "recorded along greedy text, run it with decoder.temperature=0."
        )
    drafts = StoredDrafts.of((Trace.from_columns(s.trace), s.born, s.ids) for s in samples)
    if len(drafts.texts) < 2:
        raise DllmBenchError(
            f"Run {spec.short} holds drafts of {len(drafts.texts)} texts; name a run of a "
            "speculative decoder with more items."
        )
    return drafts


def profile_of(source: str, models: Iterable[str]) -> StepProfile:
    """Return the step times in a file; they must be measured with the model of all runs."""
    for model in dict.fromkeys(models):
        check_step_profile(source, model)
    return read_step_profile(source)


def systems_of(
    drafts: StoredDrafts,
    profile: StepProfile,
    rules: Mapping[str, Mapping[str, Any]],
    temperatures: Temperatures | None = None,
) -> list[ServingSystem]:
    """Return the systems that serve the second half of the texts, one for each length rule.

    rules: name of the system -> settings of its rule: `rule` (of `LENGTH_RULES`), `tokens` or
        `tau`; temperatures: of the confidence head, fitted on the first half if None.
    """
    first, second = drafts.halves()
    texts = second.served(temperatures or Temperatures(fit_temperatures(first.observed())))

    def system(name: str, settings: Mapping[str, Any]) -> ServingSystem:
        rule = LENGTH_RULES[settings["rule"]](profile, settings)
        if settings["rule"] == NO_DRAFTS:
            return ServingSystem(name, texts, rule)
        drafting = second.drafting(profile, settings.get("tokens"))
        return ServingSystem(name, texts, rule, drafting)

    return [system(name, settings) for name, settings in rules.items()]


def compared_rules(name: str, drafts: StoredDrafts, tau: float) -> dict[str, dict[str, Any]]:
    """Return the rules that `simulate` compares: none, whole drafts and, with a confidence head,
    those that cut them."""
    rules = {"autoregressive": {"rule": NO_DRAFTS}, name: {"rule": WHOLE_DRAFTS}}
    if not drafts.halves()[0].observed():
        return rules
    return rules | {
        f"{name} threshold {tau}": {"rule": "threshold", "tau": tau},
        f"{name} scheduler": {"rule": "hardware_aware"},
        f"{name} two steps ahead": {"rule": "asynchronous"},
    }
