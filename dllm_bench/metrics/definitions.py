"""All metrics by name: speed, served models, acceptance of drafts, calibration, a cache's error.

Tables, figures, pages and notebooks request a metric here: `definition` for its unit, text and
function, `measure` for its value over samples. Metrics of one position of a draft are called
`name@k`, with k from 1; they are not part of `measure_all`, which fills a record's summary. Scores
are in `accuracy`.
"""

from __future__ import annotations

from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.metrics import acceptance, calibration, speed
from dllm_bench.metrics.metric import MetricDefinition, MetricFamily, Ratio
from dllm_bench.metrics.sample_stats import Samples, frame_of

OF_CACHE = MetricDefinition(
    "quality/kl_to_uncached",
    "nats",
    "KL divergence of the model's distribution with the cache from the one without, "
    "KL(uncached ‖ cached), at the masked positions that a forward predicts ÷ their number; "
    "ratio of sums over forwards and samples, along the decoder's own trajectory.",
    Ratio(lambda s: s.kl_nats, lambda s: s.kl_rows),
    requires="kl_rows",
)
"""How far a cached forward is from one without a cache, of runs with `measure_kl=true`."""
DEFINITIONS: dict[str, MetricDefinition] = {
    entry.name: entry for entry in (*speed.ALL, *speed.OF_CONCURRENT, *acceptance.ALL, OF_CACHE)
}
"""Metrics without a position, by name."""
FAMILIES: dict[str, MetricFamily] = {
    entry.name: entry for entry in (*acceptance.FAMILIES, *calibration.FAMILIES)
}
"""Metrics of a position, by the name before the @."""


def definition(name: str) -> MetricDefinition:
    """Return the metric called `name` or `name@k`; for an unknown name, a DllmBenchError lists all
    names."""
    family, at, position = name.partition("@")
    if at and family in FAMILIES and position.isdecimal() and int(position) > 0:
        return FAMILIES[family].at(int(position))
    if name in DEFINITIONS:
        return DEFINITIONS[name]
    known = [*DEFINITIONS, *(f"{name}@1" for name in FAMILIES)]
    raise DllmBenchError(unknown_name("metric", name, known))


def measure(name: str, samples: Samples) -> float | None:
    """Return the value of the metric called `name`; None if the samples do not define it."""
    return definition(name)(samples)


def measure_all(samples: Samples) -> dict[str, float | None]:
    """Return the values of all metrics without a position, by name."""
    table = frame_of(samples)
    return {name: entry(table) for name, entry in DEFINITIONS.items()}
