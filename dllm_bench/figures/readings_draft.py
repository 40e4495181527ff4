"""Readings of speculative runs: what the drafter's confidence head predicted, and what happened.

Predictions are of prefixes (the product of the confidences up to a position), as in
`metrics/calibration`, whose definitions give the numbers; here are the bars behind them.
"""

from __future__ import annotations

from collections.abc import Iterator

from dllm_bench.figures.readings import SeriesPoint, Settings, StoredRun
from dllm_bench.metrics import calibration


def reliability(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Predicted and happened survival by bin: a panel per position, before and after scaling.

    Temperatures are fitted on the first half of the samples, both series are of the second.
    """
    facts = run.record.sample_stats
    if any(fact.survival is None for fact in facts):
        return
    found = {"before": calibration.outcomes_unscaled, "after": calibration.outcomes_scaled}
    for k in settings["positions"]:
        for series, outcomes in found.items():
            for bar in calibration.reliability_bins(outcomes(facts, k), settings["bins"]):
                yield SeriesPoint(
                    bar.predicted, bar.happened, n=bar.count, panel=str(k), series=series
                )
