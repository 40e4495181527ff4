"""What open runs will cost: forwards, seconds of the hardware, bytes on disk.

A forward is overhead plus the larger of reading the weights once and computing every position
(`conf/cost.yaml`); forwards follow from sealed runs with the same decoder, else from the reported
TPF, else from other decoders' runs, else they are one per token. Seconds are scaled by measured ÷
estimated of sealed runs on the same hardware, `check` says how far the model is off for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from dllm_bench import __version__
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir
from dllm_bench.store.cache import DerivedCache
from dllm_bench.store.inputs import is_served
from dllm_bench.tables.derive import unit_of
from dllm_bench.tables.load import read_yaml
from dllm_bench.tables.plan import PlannedCell, PlannedRun
from dllm_bench.tables.spec import Query

if TYPE_CHECKING:
    from dllm_bench.store.record import RunRecord
    from dllm_bench.store.store import Store

Plain = Mapping[str, Any]
TPF_UNIT = "tokens/forward"
TOKEN_BYTES, FORWARD_BYTES, SAMPLE_BYTES = 10, 39, 550  # of a stored sample, measured
DRAFTED = 8  # positions of a verified proposal, about
WEIGHT_BYTES = 2  # bfloat16
FILE = ".costs.json"  # beside the runs
NEAREST = {"decoder": "benchmark", "hardware": "model"}
"""Group that runs must share -> group they share better too."""
ONE_BY_ONE = ("TopK", "Epsilon")  # selectors


@dataclass(frozen=True)
class Cost:
    """A rough cost."""

    forwards: float = 0.0
    seconds: float = 0.0
    size: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.forwards + other.forwards, self.seconds + other.seconds, self.size + other.size
        )


@dataclass(frozen=True)
class EstimateCheck:
    """Measured ÷ estimated seconds of sealed runs, each estimated from the others."""

    runs: int
    median: float
    low: float
    high: float


class CostModel:
    """Estimates from sealed runs (any will do) and from the values reported at the cells."""

    def __init__(self, planned: Sequence[PlannedCell], kin: MeasuredRuns) -> None:
        self.kin = kin
        self._tpf = {id(run): tpf for cell in planned for run, tpf in _reported_tpf(cell)}

    def estimate(self, run: PlannedRun) -> Cost | None:
        """The cost of what is left of a run; None where nothing is known of its model or task."""
        items = run.total or _items(run.config)
        return _cost(run.config, items, run.done, self._tpf.get(id(run)), self.kin)


def _cost(
    config: Plain, items: int | None, done: int, tpf: float | None, kin: MeasuredRuns
) -> Cost | None:
    each_ms = forward_ms(config)
    if items is None or each_ms is None:
        return None
    length, left = int(config["benchmark"]["max_new_tokens"]), items - done
    forwards = left * length * share(config, tpf, kin)
    size = left * (SAMPLE_BYTES + TOKEN_BYTES * length) + FORWARD_BYTES * forwards
    return Cost(forwards, forwards * each_ms / 1000 * scale(config, kin), size)


@dataclass(frozen=True, eq=False)
class MeasuredRun:
    """A sealed run: what it was asked, and what it took."""

    config: Plain
    samples: int
    seconds: float
    forwards: float

    @classmethod
    def of(cls, record: RunRecord) -> MeasuredRun:
        """What a record says."""
        spec, columns = record.spec, record.columns
        groups = {name: getattr(spec, name) for name in ("model", "benchmark", "hardware")}
        config = {**groups, "decoder": {**spec.decoder, "name": spec.label}, "limit": spec.limit}
        forwards = float(sum(columns["forwards"]))
        return cls(config, len(columns["id"]), float(sum(columns["seconds"])), forwards)

    @cached_property
    def each_ms(self) -> float | None:
        """`forward_ms` of the run."""
        return forward_ms(self.config)

    @property
    def share(self) -> float:
        """Forwards of a sample by its length."""
        return self.forwards / self.samples / int(self.config["benchmark"]["max_new_tokens"])


@dataclass(frozen=True)
class MeasuredRuns:
    """Sealed runs to judge others by, found by their groups' names; `without` is left out."""

    runs: Sequence[MeasuredRun]
    without: MeasuredRun | None = None

    @classmethod
    def of(cls, records: Iterable[RunRecord]) -> MeasuredRuns:
        """Those of records that tell forwards and times: not of served engines, not of batches."""
        asked = ("forwards", "seconds")
        told = (r for r in records if not any(None in r.columns[name] for name in asked))
        return cls([MeasuredRun.of(record) for record in told])

    @cached_property
    def _named(self) -> dict[Query, list[MeasuredRun]]:
        found: dict[Query, list[MeasuredRun]] = {}
        for known in self.runs:
            for must, better in NEAREST.items():
                names = (must, _name(known.config, must))
                for key in (names, (*names, better, _name(known.config, better))):
                    found.setdefault(key, []).append(known)
        return found

    def others(self, known: MeasuredRun) -> MeasuredRuns:
        """All but one."""
        kin = MeasuredRuns(self.runs, known)
        vars(kin)["_named"] = self._named
        return kin

    def all(self) -> list[MeasuredRun]:
        """Every run of it."""
        return [known for known in self.runs if known is not self.without]

    def nearest(self, config: Plain, must: str) -> list[MeasuredRun]:
        """Runs with the same `must` group, only those with the same NEAREST one too if any."""
        names, better = (must, _name(config, must)), NEAREST[must]
        for key in ((*names, better, _name(config, better)), names):
            found = [known for known in self._named.get(key, ()) if known is not self.without]
            if found:
                return found
        return []

    @cached_property
    def check(self) -> EstimateCheck | None:
        """How far estimates are off for these runs; None with less than three."""
        ratios = []
        for known in self.runs:
            found = _cost(known.config, known.samples, 0, None, self.others(known))
            if found and found.seconds:
                ratios.append(known.seconds / found.seconds)
        if len(ratios) < 3:
            return None
        tenths = quantiles(ratios, n=10, method="inclusive")
        return EstimateCheck(len(ratios), median(ratios), tenths[0], tenths[-1])


def share(config: Plain, tpf: float | None, kin: MeasuredRuns) -> float:
    """Forwards of a sample by its length: of runs with the same decoder, on the same task if any;
    else the reported TPF's, else those of other decoders' runs.
    """
    alike = kin.nearest(config, "decoder")
    if alike:
        return median(known.share for known in alike)
    if tpf or one_by_one(config):
        return 1 / (tpf or 1.0)
    others = [known.share for known in kin.all() if not one_by_one(known.config)]
    return median(others) if others else 1.0


def scale(config: Plain, kin: MeasuredRuns) -> float:
    """Measured ÷ estimated per forward on the same hardware, of the same model if any; else 1."""
    ratios = []
    for known in kin.nearest(config, "hardware"):
        if known.each_ms and known.forwards:
            ratios.append(1000 * known.seconds / (known.forwards * known.each_ms))
    return median(ratios) if ratios else 1.0


def measured_runs(store: Store) -> MeasuredRuns:
    """All sealed runs, remembered beside them; a damaged record is left to who needs it."""
    from dllm_bench.store.store import read_record, record_fingerprint

    cache = DerivedCache(
        Path(store.root) / FILE, [__version__, *(f.name for f in fields(MeasuredRun))]
    )
    found = []
    for folder in store.folders():
        name, state = folder.relative_to(store.root).as_posix(), record_fingerprint(folder)
        known = cache.get(name, state) if state else None
        if state and known is None:
            with suppress(DllmBenchError):
                record = read_record(folder)
                known = [asdict(one) for one in MeasuredRuns.of([record] if record else []).runs]
                cache.put(name, state, known)
        found += [MeasuredRun(**plain) for plain in known or ()]
    cache.save(used_only=True)
    return MeasuredRuns(found)


def _name(config: Plain, group: str) -> str:
    return str(config[group].get("name"))


def one_by_one(config: Plain) -> bool:
    """Whether a decoder commits one token per forward by its making."""
    select = config["decoder"].get("select", {})
    return str(select.get("_target_", "")).endswith(ONE_BY_ONE)


def cost_in_words(costs: Sequence[Cost | None]) -> str:
    """A rough cost in words; what nothing is known of is left out, and said."""
    known = [found for found in costs if found]
    if not known:
        return "unknown"
    total = sum(known, Cost())
    parts = (duration(total.seconds), f"{count(total.forwards)} forwards", size(total.size))
    missing = len(costs) - len(known)
    more = f", and {missing} runs of unknown cost" if missing else ""
    return f"about {', '.join(parts)}{more}"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def count(number: float) -> str:
    """A count with its thousands or millions."""
    if number < 1e4:
        return f"{number:.0f}"
    return f"{number / 1e3:.0f} k" if number < 1e6 else f"{number / 1e6:.1f} M"


def size(number: float) -> str:
    """Bytes in MB or GB."""
    return f"{number / 1e6:.1f} MB" if number < 1e9 else f"{number / 1e9:.1f} GB"


def forward_ms(config: Plain) -> float | None:
    """Milliseconds of one forward by `conf/cost.yaml`; None for what it does not know."""
    if is_served(config["model"]):
        return None
    machine = _known("hardware", str(config["hardware"]["name"]))
    weights = _known("parameters", str(config["model"]["name"]))
    fed = positions(config)
    if not machine or not weights or fed is None:
        return None
    overhead_ms, bandwidth_gb_s, tflop_s = machine
    everything, active = (1e9 * count for count in weights)
    read_s = WEIGHT_BYTES * everything / (1e9 * bandwidth_gb_s)
    computed_s = 2 * active * fed / (1e12 * tflop_s)
    return overhead_ms + 1000 * max(read_s, computed_s)


def positions(config: Plain) -> float | None:
    """Positions a forward computes in all branches: the canvas, or about two blocks of it."""
    decoder, benchmark = config["decoder"], config["benchmark"]
    task = _known("items", str(benchmark["name"]))
    if task is None:
        return None
    if "draft" in decoder:
        return DRAFTED
    _, question, example = task
    length = float(benchmark["max_new_tokens"])
    block = float(decoder.get("schedule", {}).get("block") or length)
    explore = decoder.get("explore", {})
    branches = 1 + int(explore.get("k", 0)) - bool(explore.get("counts_base"))
    cached = not str(decoder.get("cache", {}).get("_target_", "")).endswith("NoCache")
    canvas = question + int(benchmark.get("shots") or 0) * example + length
    return branches * (min(2 * block, canvas) if cached else canvas)


def _items(config: Plain) -> int | None:
    """Samples of a whole run."""
    limit, repeats = config.get("limit"), int(config["benchmark"].get("repeats") or 1)
    task = _known("items", str(config["benchmark"]["name"]))
    if task is None:
        return None
    return int(min(limit or task[0], task[0])) * repeats


@lru_cache
def _facts() -> dict[str, dict[str, list[float]]]:
    return read_yaml(conf_dir() / "cost.yaml")


def _known(kind: str, name: str) -> list[float] | None:
    """The entry for a model, benchmark or hardware: the first whose key its name contains."""
    return next((entry for key, entry in _facts()[kind].items() if key in name), None)


def _reported_tpf(cell: PlannedCell) -> list[tuple[PlannedRun, float]]:
    """The run of a cell that reports plain tokens per forward, with the number."""
    value = cell.cell.reported.value if cell.cell.reported else None
    if value and not cell.parts and unit_of(cell.cell.metric) == TPF_UNIT:
        return [(cell.run, value)]
    return []
