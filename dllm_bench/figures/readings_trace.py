"""Readings of masked decoding step by step, from what every run stores: when what was decoded.

A step is a forward of the denoising loop; steps and positions count from 1. Curves over samples are
means with the middle half of the samples as their band, over those that are still decoding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean, quantiles

from dllm_bench.figures.readings import SeriesPoint, Settings, StoredRun
from dllm_bench.store.record import SampleRecord

FEWEST = 0.05  # of the samples; where fewer are left, a mean says little


def spread(x: float, values: Sequence[float]) -> SeriesPoint:
    """Mean and quartiles."""
    if len(values) < 2:
        return SeriesPoint(x, values[0], values[0], values[0], n=1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return SeriesPoint(x, fmean(values), low, high, n=len(values))


def per_step(sample: SampleRecord) -> list[int]:
    """Positions decoded at each step."""
    born = Counter(sample.born)
    return [born[step] for step in range(max(sample.born) + 1)]


def parallel_tokens(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Tokens decoded at a step, by step (LoPA, figure 5)."""
    counts = [per_step(sample) for sample in run.samples]
    for step in range(max(map(len, counts))):
        values = [steps[step] for steps in counts if len(steps) > step]
        if len(values) >= FEWEST * len(counts):
            yield spread(step + 1, values)


def progress(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Decoded positions against steps, both in percent of the text's positions, mean over samples;
    one token a step is the diagonal (CreditDecoding, figure 9).
    """
    counts = [(per_step(sample), len(sample.born)) for sample in run.samples]
    for percent in range(0, 101, settings["every"]):
        shares = [sum(c[: round(percent * n / 100)]) / sum(c) for c, n in counts]
        yield SeriesPoint(percent, 100 * fmean(shares), n=len(shares))


def steps_of_positions(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Step at which a position was decoded, mean over samples (CreditDecoding, figure 8)."""
    for position in range(max(len(sample.born) for sample in run.samples)):
        born = [s.born[position] + 1 for s in run.samples if position < len(s.born)]
        decoded = [step for step in born if step > 0]
        if decoded:
            yield spread(position + 1, decoded)


def steps_per_block(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """How many blocks took so many steps (Learn2PD, figure 5); a block counts its own steps."""
    size = run.record.spec.decoder["schedule"]["block"]
    taken = [
        len({step for step in sample.born[start : start + size] if step >= 0})
        for sample in run.samples
        for start in range(0, len(sample.born), size)
    ]
    counts = Counter(steps for steps in taken if steps)
    yield from (
        SeriesPoint(steps, counts[steps], n=len(taken)) for steps in range(1, max(counts) + 1)
    )
