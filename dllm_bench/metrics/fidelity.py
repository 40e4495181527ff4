"""How far a cached forward is from one without a cache, of runs with `measure_kl=true`."""

from __future__ import annotations

from dllm_bench.metrics.metric import MetricDefinition, Ratio

ALL = (
    MetricDefinition(
        "quality/kl_to_uncached",
        "nats",
        "KL divergence of the model's distribution with the cache from the one without, "
        "KL(uncached ‖ cached), at the masked positions that a forward predicts ÷ their number; "
        "ratio of sums over forwards and samples, along the decoder's own trajectory.",
        Ratio(lambda s: s.kl_nats, lambda s: s.kl_rows),
        requires="kl_rows",
    ),
)
