"""Readings of how tokens became sure: what was said of the final tokens before they were decoded.

From what `run/token_replay` stores for the first samples of a run. Steps and positions
count from 1; a step is a forward. Probabilities and ranks are those of the distribution that
decides (with credit, where a decoder adds it), of the open blocks alone; whether a candidate was
the final token is known ahead of them too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import isnan, log2
from statistics import fmean

from dllm_bench.figures.readings import SeriesPoint, Settings, StoredRun
from dllm_bench.figures.readings_trace import spread
from dllm_bench.run.token_replay import TokenReplay
from dllm_bench.store.record import SampleRecord

Pair = tuple[SampleRecord, TokenReplay]


def first_found(pair: Pair) -> list[tuple[int, int]]:
    """(first step whose candidate was the final token, step of decoding) by position; positions
    that were never decoded, or never found before, are (0, 0).
    """
    sample, evolution = pair
    found = []
    for position, born in enumerate(sample.born):
        seen = evolution.found_SP[: born + 1, position] == 1
        found.append((int(seen.argmax()) + 1, born + 1) if born >= 0 and seen.any() else (0, 0))
    return found


def chosen(run: StoredRun, settings: Settings) -> list[Pair]:
    """The one sample the figure shows, by its place among those stored; none where none are."""
    at = settings.get("sample", 0)
    return run.evolutions[at : at + 1]


def places(settings: Settings, length: int) -> list[int]:
    """Positions of interest, given as shares of the text."""
    return [min(round(share * length), length - 1) for share in settings["at"]]


def first_and_decoded(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """By position of one text: when it was first predicted rightly, when it was decoded."""
    for pair in chosen(run, settings):
        for position, (first, decoded) in enumerate(first_found(pair)):
            if decoded:
                yield SeriesPoint(position + 1, first, n=1, series="first")
                yield SeriesPoint(position + 1, decoded, n=1, series="decoded")


def gaps(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Tokens by steps between the first right prediction and decoding."""
    pairs = [steps for pair in run.evolutions for steps in first_found(pair) if steps[1]]
    counts = Counter(decoded - first for first, decoded in pairs)
    yield from (
        SeriesPoint(gap, counts[gap], n=len(pairs)) for gap in range(max(counts, default=-1) + 1)
    )


def ideal_steps(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """First step whose candidate was the final token, by position, over the samples."""
    by_position: dict[int, list[float]] = defaultdict(list)
    for pair in run.evolutions:
        for position, (first, decoded) in enumerate(first_found(pair)):
            if decoded:
                by_position[position].append(first)
    for position in sorted(by_position):
        read = spread(position + 1, by_position[position])
        yield SeriesPoint(read.x, read.y, read.low, read.high, n=read.n, series="ideal")


def chance(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Probability of the final token at some positions of one text, step by step to its decoding;
    a panel per position, or (`beside`) a series each.
    """
    for sample, evolution in chosen(run, settings):
        for index, position in enumerate(places(settings, len(sample.born)), start=1):
            beside = settings.get("beside")
            series, panel = f"token {index}", f"position {position + 1}"
            for step in range(sample.born[position] + 1):
                value = float(evolution.chance_SP[step, position])
                if not isnan(value):
                    read = SeriesPoint(step + 1, value, n=1)
                    yield replace(read, series=series) if beside else replace(read, panel=panel)


def rank(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """The same for its rank: 1 where it is the candidate."""
    for sample, evolution in chosen(run, settings):
        for position in places(settings, len(sample.born)):
            for step in range(sample.born[position] + 1):
                value = int(evolution.rank_SP[step, position])
                if value > 0:
                    yield SeriesPoint(step + 1, value, n=1, panel=f"position {position + 1}")


def consistency(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """Mean probability of the final token by steps left until its decoding; a series per group of
    tokens with so many steps in all (`groups`: largest number of each).
    """
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample, evolution in run.evolutions:
        for position, born in enumerate(sample.born):
            said = [float(v) for v in evolution.chance_SP[: born + 1, position] if not isnan(v)]
            group = next((g for g in settings["groups"] if len(said) <= g), 0)
            for left, value in enumerate(reversed(said)):
                values[group, left].append(value)
    for group, left in sorted(values):
        if group:
            found = values[group, left]
            yield SeriesPoint(left, fmean(found), n=len(found), series=f"up to {group}")


def rank_map(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """By position and step of one text: rank of the final token (log2), a dot where decoded."""
    for sample, evolution in chosen(run, settings):
        for position, born in enumerate(sample.born):
            for step in range(born + 1):
                value = int(evolution.rank_SP[step, position])
                if value > 0:
                    yield SeriesPoint(position + 1, step + 1, z=log2(value), n=1)
            if born >= 0:
                yield SeriesPoint(position + 1, born + 1, n=1)


def chance_map(run: StoredRun, settings: Settings) -> Iterator[SeriesPoint]:
    """By position and step: probability of the final token, mean over the samples that say one."""
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample, evolution in run.evolutions:
        for position, born in enumerate(sample.born):
            for step in range(born + 1):
                value = float(evolution.chance_SP[step, position])
                if not isnan(value):
                    values[position, step].append(value)
    for position, step in sorted(values):
        found = values[position, step]
        yield SeriesPoint(position + 1, step + 1, z=fmean(found), n=len(found))
