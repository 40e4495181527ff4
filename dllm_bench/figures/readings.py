"""Readings: named functions from one sealed run to the points of a figure.

For what is no single number of a run: curves over a text's positions or steps, histograms,
reliability diagrams, load simulations. Pure functions of what the run stored; settings come from
the figure's yaml. They live in the modules `readings_*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.run import token_replay
from dllm_bench.run.token_replay import TokenReplay
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.store import read_samples

Settings = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A sealed run: its record, and what lies in its folder."""

    record: RunRecord
    folder: Path

    @cached_property
    def samples(self) -> list[SampleRecord]:
        """The samples in the record's order."""
        stored = read_samples(self.folder)
        return [stored[key] for key in self.record.columns["id"]]

    @cached_property
    def evolutions(self) -> list[tuple[SampleRecord, TokenReplay]]:
        """The samples whose evolution is stored, each with it."""
        stored = read_samples(self.folder)
        return [(stored[found.id], found) for found in token_replay.read_replays(self.folder)]


@dataclass(frozen=True)
class SeriesPoint:
    """One point; panel and series where the reading decides them, not a facet."""

    x: float | str
    y: float
    low: float | None = None
    high: float | None = None
    z: float | None = None
    n: int = 0
    panel: str = ""
    series: str = ""


Reading = Callable[[StoredRun, Settings], Iterable[SeriesPoint]]


def reading(name: str) -> Reading:
    """The reading called `name`; a sentence that lists them when there is none."""
    from dllm_bench.figures import (
        readings_draft,
        readings_evolution,
        readings_filter,
        readings_load,
        readings_trace,
    )

    known: dict[str, Reading] = {
        "reliability": readings_draft.reliability,
        "frontier": readings_load.frontier_points,
        "device_speed": readings_load.device_speed,
        "budget": readings_load.budget,
        "parallel_tokens": readings_trace.parallel_tokens,
        "progress": readings_trace.progress,
        "steps_of_positions": readings_trace.steps_of_positions,
        "steps_per_block": readings_trace.steps_per_block,
        "first_and_decoded": readings_evolution.first_and_decoded,
        "gaps": readings_evolution.gaps,
        "ideal_steps": readings_evolution.ideal_steps,
        "chance": readings_evolution.chance,
        "rank": readings_evolution.rank,
        "consistency": readings_evolution.consistency,
        "rank_map": readings_evolution.rank_map,
        "chance_map": readings_evolution.chance_map,
        "filter_loss": readings_filter.filter_loss,
    }
    if name not in known:
        raise DllmBenchError(f"No reading is called {name!r}; choose one of: {', '.join(known)}.")
    return known[name]
