"""Readings of a serving load: what stored drafts come to when many requests share a device.

Of a run that verified nothing (`decoder/length=fixed decoder.length.tokens=0`), whose drafter was
asked at every position of greedy texts. `serving/` simulates, on a measured step profile;
temperatures of the confidence head are fitted on the first half of the texts, the second is served.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.decoding.length.measurements import (
    StepProfile,
    Temperatures,
    check_step_profile,
    read_step_profile,
)
from dllm_bench.figures.readings import SeriesPoint, Settings, StoredRun
from dllm_bench.metrics.calibration import fit_temperatures
from dllm_bench.serving.load_simulation import (
    FrontierPoint,
    NewLengthRule,
    ServingSystem,
    asynchronous_rule,
    fixed_rule,
    frontier,
    hardware_aware_rule,
    threshold_rule,
)
from dllm_bench.serving.stored_drafts import StoredDrafts

NewRule = Callable[[StepProfile, Mapping[str, Any]], NewLengthRule]
RULES: Mapping[str, NewRule] = {
    "none": lambda profile, given: fixed_rule(0),
    "fixed": lambda profile, given: fixed_rule(given.get("tokens")),
    "threshold": lambda profile, given: threshold_rule(given["tau"]),
    "hardware_aware": lambda profile, given: hardware_aware_rule(profile),
    "asynchronous": lambda profile, given: asynchronous_rule(profile),
}


def frontier_points(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Tokens/s per device against tokens/s per user, a point per number of requests."""
    for point in served(run, settings):
        yield SeriesPoint(point.tokens_per_s_user, point.tokens_per_s_device, n=point.requests)


def device_speed(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Tokens/s per device against the number of requests."""
    for point in served(run, settings):
        yield SeriesPoint(point.requests, point.tokens_per_s_device, n=point.requests)


def budget(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Tokens verified per request and step against the number of requests."""
    for point in served(run, settings):
        yield SeriesPoint(point.requests, point.verified_per_request, n=point.requests)


def served(run: StoredRun, settings: Settings) -> list[FrontierPoint]:
    """One system at every number of requests; simulated once for all readings."""
    return _served(run, json.dumps(settings, sort_keys=True))


@lru_cache(maxsize=64)
def _served(run: StoredRun, text: str) -> list[FrontierPoint]:
    settings = json.loads(text)
    profile = _profile(run.record.spec.model["name"], settings["profile"])
    fit, serve = _drafts(run).halves()
    texts = serve.served(Temperatures(fit_temperatures(fit.observed())))
    drafting = serve.drafting(profile, settings.get("tokens"))
    draft_s = (lambda requests: 0.0) if settings["rule"] == "none" else drafting
    system = ServingSystem("", texts, RULES[settings["rule"]](profile, settings), draft_s)
    return frontier([system], profile, settings["requests"])


def _profile(model: str, files: Mapping[str, str]) -> StepProfile:
    """The step profile of a model: steps of another one say nothing about it."""
    if model not in files:
        raise DllmBenchError(
            f"The figure names no step profile of {model}; measure one with `dllm-bench train sps "
            f"{model}` and name its file beside {', '.join(files)}."
        )
    check_step_profile(files[model], model)
    return read_step_profile(files[model])


@lru_cache(maxsize=8)
def _drafts(run: StoredRun) -> StoredDrafts:
    samples = run.samples
    return StoredDrafts.of((Trace.from_columns(s.trace), s.born, s.ids) for s in samples)
