"""Estimate the cost of open runs: forwards, seconds on the hardware, bytes on disk.

A forward takes an overhead plus the larger of two durations: reading the weights once, and
computing every position (numbers in `conf/cost.yaml`). The number of forwards is taken from the
first that exists: sealed runs with the same decoder, the reported TPF, runs with other decoders,
one per token. Seconds are scaled by measured ÷ estimated seconds of sealed runs on the same
hardware; `MeasuredRuns.errors` gives the error of such estimates.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from statistics import median
from typing import Any, NamedTuple

from dllm_bench.core.decoder import DecoderSummary
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir, read_yaml
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.groups import RunConfig, setting_in
from dllm_bench.store.index import OTHER_TYPES, RecordIndex, TimedRun, summary_of
from dllm_bench.store.inputs import files_of_pieces
from dllm_bench.store.record import RunRecord
from dllm_bench.store.store import Store
from dllm_bench.tables.plan import PlannedCell, PlannedRun
from dllm_bench.tables.spec import Query, parse_number

TPF_UNIT = "tokens/forward"
TOKEN_BYTES, FORWARD_BYTES, SAMPLE_BYTES = 10, 39, 550  # measured sizes in a stored sample
DRAFTED = 8  # positions in the verification of one draft, roughly
WEIGHT_BYTES = 2  # bfloat16
CLOSER_GROUP = {"decoder": "benchmark", "hardware": "model"}
"""Group that similar runs must share -> group that they should also share, if any run does."""


class Cost(NamedTuple):
    """A rough cost."""

    forwards: float
    """Number of forwards."""
    seconds: float
    """Time on the hardware."""
    size: float
    """Bytes on disk."""


class CostModel:
    """Estimates the cost of planned runs.

    planned: the cells of the table; their reported TPF are used if nothing was measured.
    measured: sealed runs of any kind.
    """

    def __init__(self, planned: Sequence[PlannedCell], measured: MeasuredRuns) -> None:
        self.measured = measured
        self._tpf = {id(cell.run): tpf for cell in planned if (tpf := _reported_tpf(cell))}

    def estimate(self, run: PlannedRun) -> Cost | None:
        """Return the remaining cost of a run; None if its model or task is unknown, or if it was
        not composed.
        """
        if not run.config:
            return None
        items = run.total or _items(run.config)
        tpf = self._tpf.get(id(run))
        decoder = self.measured.summary(run.config.decoder)
        return self.measured.cost(run.config, decoder, items, run.done, tpf)


@dataclass(frozen=True, eq=False)
class MeasuredRun(TimedRun):
    """A sealed run that others are estimated from."""

    @cached_property
    def chosen(self) -> RunConfig:
        """Its configuration."""
        return RunConfig(self.config)

    @cached_property
    def each_ms(self) -> float | None:
        """The estimated `forward_ms` of the run."""
        return forward_ms(self.chosen, self.decoder)

    @property
    def per_token(self) -> float:
        """Forwards of a sample divided by its length."""
        return self.forwards / self.samples / self.chosen.benchmark.max_new_tokens


@dataclass(frozen=True)
class MeasuredRuns:
    """Sealed runs that others are estimated from, found by the names of their groups."""

    runs: Sequence[MeasuredRun]
    """All runs."""
    settings: SettingsCache | None = None
    """Caches the summaries of decoders, whose computation needs torch."""

    @classmethod
    def of(cls, records: Iterable[RunRecord]) -> MeasuredRuns:
        """Return the records that have forwards and timings, unlike those of served engines and
        batches."""
        return cls([run for record in records if (run := MeasuredRun.of(record))])

    def summary(self, decoder: Mapping[str, Any]) -> DecoderSummary:
        """Return `summary_of` a decoder. It is cached unless it depends on pieces from outside or
        on files that are not on this disk.
        """
        files = files_of_pieces(decoder)
        if self.settings is None or files is None:
            return summary_of(decoder)
        key = f"summary {json.dumps(decoder, sort_keys=True)}"
        made = self.settings.cached(key, lambda: asdict(summary_of(decoder)), files)
        return DecoderSummary(**made)

    @cached_property
    def _by_names(self) -> dict[Query, list[MeasuredRun]]:
        by_names: dict[Query, list[MeasuredRun]] = {}
        for run in self.runs:
            for group, closer in CLOSER_GROUP.items():
                names = (group, _name(run.chosen, group))
                for key in (names, (*names, closer, _name(run.chosen, closer))):
                    by_names.setdefault(key, []).append(run)
        return by_names

    def similar(self, config: RunConfig, group: str) -> list[MeasuredRun]:
        """Return runs with the same `group`; if some also share the `CLOSER_GROUP`, only these.

        The run whose `chosen` is `config` is left out: it does not estimate itself.
        """
        names, closer = (group, _name(config, group)), CLOSER_GROUP[group]
        for key in ((*names, closer, _name(config, closer)), names):
            runs = [run for run in self._by_names.get(key, ()) if run.chosen is not config]
            if runs:
                return runs
        return []

    def cost(
        self,
        config: RunConfig,
        decoder: DecoderSummary,
        items: int | None,
        done: int = 0,
        tpf: float | None = None,
    ) -> Cost | None:
        """Return the cost of the items that are left; `tpf`: tokens per forward as reported."""
        each_ms = forward_ms(config, decoder)
        if items is None or each_ms is None:
            return None
        length, left = config.benchmark.max_new_tokens, items - done
        forwards = left * length * self._forwards_per_token(config, decoder, tpf)
        size = left * (SAMPLE_BYTES + TOKEN_BYTES * length) + FORWARD_BYTES * forwards
        return Cost(forwards, forwards * each_ms / 1000 * self._seconds_scale(config), size)

    def _forwards_per_token(
        self, config: RunConfig, decoder: DecoderSummary, tpf: float | None
    ) -> float:
        """Return forwards per token of a sample: from runs with the same decoder (on the same task,
        if any), else from the reported TPF, else from runs with other decoders.
        """
        if similar := self.similar(config, "decoder"):
            return median(run.per_token for run in similar)
        if tpf or decoder.one_token_per_forward:
            return 1 / (tpf or 1.0)
        runs = (run for run in self.runs if run.chosen is not config)
        others = [run.per_token for run in runs if not run.decoder.one_token_per_forward]
        return median(others) if others else 1.0

    def _seconds_scale(self, config: RunConfig) -> float:
        """Return measured ÷ estimated seconds per forward on the same hardware.

        Runs of the same model are used if there are any; 1 if nothing was measured there.
        """
        ratios = [
            1000 * run.seconds / (run.forwards * each_ms)
            for run in self.similar(config, "hardware")
            if (each_ms := run.each_ms) and run.forwards
        ]
        return median(ratios) if ratios else 1.0

    @cached_property
    def errors(self) -> list[float]:
        """Measured ÷ estimated seconds of these runs, each estimated from the others."""
        estimates = (self.cost(run.chosen, run.decoder, run.samples) for run in self.runs)
        pairs = zip(self.runs, estimates, strict=True)
        return [run.seconds / cost.seconds for run, cost in pairs if cost and cost.seconds]


def measured_runs(store: Store, settings: SettingsCache | None = None) -> MeasuredRuns:
    """Return all sealed runs of a store, from its index. Records that are damaged or have settings
    of wrong types are skipped; a damaged record is reported when its run is needed.
    """
    runs = []
    for timed in (run.timed for run in RecordIndex(store).sealed() if run.timed):
        with suppress(DllmBenchError, *OTHER_TYPES):
            run = MeasuredRun(**vars(timed))
            _ = run.each_ms, run.per_token
            runs.append(run)
    return MeasuredRuns(runs, settings=settings)


def _name(config: RunConfig, group: str) -> str:
    return str(setting_in(config, f"{group}.name"))


def cost_in_words(costs: Sequence[Cost | None]) -> str:
    """Return the sum of some costs in words; unknown costs (None) are counted separately."""
    known = [cost for cost in costs if cost]
    if not known:
        return "unknown"
    forwards, seconds, size = map(sum, zip(*known, strict=True))
    unknown = len(costs) - len(known)
    more = f", and {unknown} runs of unknown cost" if unknown else ""
    about = f"about {duration_in_words(seconds)}, {count_in_words(forwards)} forwards"
    return f"{about}, {size_in_words(size)}{more}"


def duration_in_words(seconds: float) -> str:
    """Return seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def count_in_words(number: float) -> str:
    """Return a count, with k for thousands and M for millions."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.0f} k" if number < 1e6 else f"{number / 1e6:.1f} M"


def size_in_words(number: float) -> str:
    """Return bytes in MB or GB."""
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


def forward_ms(config: RunConfig, decoder: DecoderSummary) -> float | None:
    """Return milliseconds of one forward from `conf/cost.yaml`; None if served, or for an unknown
    name."""
    if config.model.is_served:
        return None
    machine = _entry("hardware", config.hardware.name)
    weights = _entry("parameters", config.model.name)
    fed = positions(config, decoder)
    if not machine or not weights or fed is None:
        return None
    overhead_ms, bandwidth_gb_s, tflop_s = machine
    everything, active = (1e9 * count for count in weights)
    read_s = WEIGHT_BYTES * everything / (1e9 * bandwidth_gb_s)
    computed_s = 2 * active * fed / (1e12 * tflop_s)
    return overhead_ms + 1000 * max(read_s, computed_s)


def positions(config: RunConfig, decoder: DecoderSummary) -> float | None:
    """Return positions that a forward feeds, in all branches: the canvas, or with a cache about two
    blocks of it; None for an unknown task.
    """
    benchmark = config.benchmark
    task = _entry("items", benchmark.name)
    if task is None:
        return None
    if decoder.drafts:
        return DRAFTED
    _, question, example = task
    length = float(benchmark.max_new_tokens)
    block = float(decoder.block or length)
    canvas = question + benchmark.shots * example + length
    return decoder.branches * (min(2 * block, canvas) if decoder.caches else canvas)


def _items(config: RunConfig) -> int | None:
    """Return the number of samples of a whole run; None for an unknown task."""
    task = _entry("items", config.benchmark.name)
    if task is None:
        return None
    return int(min(config.limit or task[0], task[0])) * config.benchmark.repeats


@lru_cache
def _numbers() -> dict[str, dict[str, list[float]]]:
    return read_yaml(conf_dir() / "cost.yaml")


def _entry(kind: str, name: str) -> list[float] | None:
    """Return the entry of `conf/cost.yaml` for a name: the first whose key the name contains."""
    return next((entry for key, entry in _numbers()[kind].items() if key in name), None)


def _reported_tpf(cell: PlannedCell) -> float | None:
    """Return the tokens per forward that the paper reports for a cell; None if it reports none."""
    is_tpf = cell.cell.metric.unit == TPF_UNIT and not cell.parts
    return parse_number(cell.cell.reported) if is_tpf else None
