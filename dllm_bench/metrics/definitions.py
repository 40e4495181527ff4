"""The one registry of named numbers: speed, served engines, acceptance, calibration, speed-ups.

Whoever shows a number asks for it here by name: `definition` for its unit, text and function,
`measure` for its value over the facts of samples. Numbers of a position are called `name@k`, k from
1, and are not among `measure_all`, which is what a record's summary holds. Scores live in
`accuracy`.
"""

from __future__ import annotations

from collections.abc import Sequence

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import acceptance, calibration, served, speed
from dllm_bench.metrics.metric import MetricDefinition, MetricFamily
from dllm_bench.metrics.sample_stats import SampleStats

DEFINITIONS: dict[str, MetricDefinition] = {
    entry.name: entry for entry in (*speed.ALL, *served.ALL, *acceptance.ALL)
}
FAMILIES: dict[str, MetricFamily] = {
    entry.name: entry for entry in (*acceptance.FAMILIES, *calibration.FAMILIES)
}


def definition(name: str) -> MetricDefinition:
    """The definition called `name` or `name@k`; a sentence that lists them when there is none."""
    family, at, position = name.partition("@")
    if at and family in FAMILIES and position.isdecimal() and int(position) > 0:
        return FAMILIES[family].at(int(position))
    if name in DEFINITIONS:
        return DEFINITIONS[name]
    known = ", ".join([*DEFINITIONS, *(f"{name}@1" for name in FAMILIES)])
    raise DllmBenchError(f"No definition is called {name!r}; choose one of: {known}.")


def measure(name: str, facts: Sequence[SampleStats]) -> float | None:
    """The number called `name` over `facts`."""
    return definition(name)(facts)


def measure_all(facts: Sequence[SampleStats]) -> dict[str, float | None]:
    """Every number that is not of a position over `facts`."""
    return {name: entry(facts) for name, entry in DEFINITIONS.items()}
