"""Run series: named functions that turn one stored run into points of a figure.

They give what a single metric of a run cannot: curves over positions or steps, histograms,
reliability diagrams, simulated serving load. A figure names one with `run_series` and gives its
settings with `with`; `RUN_SERIES` holds them all. Each is a pure function of the run's
stored data. A step is one forward of the decoding loop; steps and positions count from 1.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from hashlib import sha256
from math import log2
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.trace import Trace
from dllm_bench.figures.spec import SeriesSettings
from dllm_bench.methods.drafting import (
    StepProfile,
    Temperatures,
    check_step_profile,
    read_step_profile,
)
from dllm_bench.metrics import drafts
from dllm_bench.paths import place_of
from dllm_bench.registry import require_known
from dllm_bench.runs.token_replay import TokenReplay, read_replays
from dllm_bench.serving import load_simulation as simulation
from dllm_bench.store.groups import setting_in
from dllm_bench.store.record import RunRecord, SampleRecord
from dllm_bench.store.store import read_samples

Settings = Mapping[str, Any]
MIN_SHARE = 0.05  # share of samples: a mean over fewer says little
CURVE_FILE, WEIGHTS_FILE = "curve.jsonl", "filter.safetensors"  # files of a trained filter


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A sealed run: its record, and the files in its folder."""

    record: RunRecord
    """The sealed record."""
    folder: Path
    """The folder that the run is stored in."""

    @cached_property
    def samples(self) -> list[SampleRecord]:
        """The samples, in the order of the record; DllmBenchError if one is missing, or if they
        have no positions because a server decoded them."""
        stored, ids = read_samples(self.folder), self.record.columns["id"]
        missing = [key for key in ids if key not in stored]
        if missing:
            raise DllmBenchError(
                f"the run is stored without {len(missing)} of its {len(ids)} samples; to draw "
                f"them, remove it (`dllm-bench runs rm {self.record.spec.short}`) and make it again"
            )
        if not all(stored[key].born for key in ids):
            raise DllmBenchError("the run has no decoding order, which a server does not report")
        return [stored[key] for key in ids]

    @cached_property
    def replays(self) -> list[tuple[SampleRecord, TokenReplay]]:
        """Each sample that has a stored token replay, with that replay; DllmBenchError if a sample
        is missing.
        """
        stored = {sample.id: sample for sample in self.samples}
        return [(stored[replay.id], replay) for replay in read_replays(self.folder)]


Point = dict[str, Any]
"""Fields of a point by the names of `points.BLANK`: x and y, others where the run gives them."""
RunSeries = Callable[[StoredRun, Settings], Iterable[Point]]
RUN_SERIES: dict[str, RunSeries] = {}
"""All run series, by name."""
COUNTED: dict[str, str] = {}
"""Run series -> unit that the `n` of its points counts, if not samples."""


def series(counted: str = "") -> Callable[[RunSeries], RunSeries]:
    """Add a function to `RUN_SERIES`, and the unit to `COUNTED`."""

    def add(function: RunSeries) -> RunSeries:
        RUN_SERIES[function.__name__] = function
        if counted:
            COUNTED[function.__name__] = counted
        return function

    return add


# Step by step, from the commit times that every run stores. Curves over samples are means over the
# samples that are still decoding, with the middle half of these samples as their band.


def mean_and_quartiles(x: float, values: Sequence[float]) -> Point:
    """Return the mean of `values` at `x`, with their quartiles as band."""
    ends = quantiles(values, n=4, method="inclusive") if len(values) > 1 else values
    mean = fmean(values) if len(values) > 1 else values[0]
    return {"x": x, "y": mean, "low": ends[0], "high": ends[-1], "n": len(values)}


def committed_per_step(sample: SampleRecord) -> list[int]:
    """Return the number of positions committed at each step."""
    counts = Counter(sample.born)
    return [counts[step] for step in range(max(sample.born) + 1)]


@series()
def tokens_per_step(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield tokens committed at a step, by step (LoPA, figure 5)."""
    counts = [committed_per_step(sample) for sample in run.samples]
    for step in range(max(map(len, counts))):
        values = [steps[step] for steps in counts if len(steps) > step]
        if len(values) >= MIN_SHARE * len(counts):
            yield mean_and_quartiles(step + 1, values)


@series()
def progress(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the share of committed positions by step, both in percent of the text's positions.

    Mean over samples (CreditDecoding, figure 9). One token per step is the diagonal. Setting
    `every`: the distance of the points in percent.
    """
    counts = [(committed_per_step(sample), len(sample.born)) for sample in run.samples]
    for percent in range(0, 101, settings["every"]):
        shares = [sum(c[: round(percent * n / 100)]) / sum(c) for c, n in counts]
        yield {"x": percent, "y": 100 * fmean(shares), "n": len(shares)}


@series()
def step_of_position(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the step at which each position was committed, mean over samples.

    CreditDecoding, figure 8.
    """
    for position in range(max(len(sample.born) for sample in run.samples)):
        steps = [s.born[position] + 1 for s in run.samples if position < len(s.born)]
        committed = [step for step in steps if step > 0]
        if committed:
            yield mean_and_quartiles(position + 1, committed)


@series("blocks")
def steps_per_block(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the number of blocks by the number of steps that committed something in them (Learn2PD,
    figure 5)."""
    size = setting_in(run.record.spec.decoder, "schedule.block")
    if size is None:
        raise DllmBenchError("the run's decoder has no blocks; draw another run series of it")
    steps_of_blocks = [
        len({step for step in sample.born[start : start + size] if step >= 0})
        for sample in run.samples
        for start in range(0, len(sample.born), size)
    ]
    counts = Counter(steps for steps in steps_of_blocks if steps)
    for steps in range(1, max(counts) + 1):
        yield {"x": steps, "y": counts[steps], "n": len(steps_of_blocks)}


# Before a token was committed, from the token replays of the first samples (`runs/token_replay`).
# Probabilities and ranks are those of the distribution that decides (with credit, where the decoder
# adds it) and exist for open blocks only. Whether a candidate equals the final token is also known
# for blocks that are not open yet.

ReplayedSample = tuple[SampleRecord, TokenReplay]


def first_right_steps(replayed: ReplayedSample) -> list[tuple[int, int]]:
    """Return (first step whose candidate was the final token, step of the commit) by position; (0,
    0) for a position that was never committed, or whose candidate was never right.
    """
    sample, replay = replayed
    pairs = []
    for position, step in enumerate(sample.born):
        right = replay.found_SP[: step + 1, position] == 1
        known = step >= 0 and right.any()
        pairs.append((int(right.argmax()) + 1, step + 1) if known else (0, 0))
    return pairs


def known_values(
    sample: SampleRecord, values_SP: Any, position: int
) -> Iterator[tuple[int, float]]:
    """Yield (step, value) of a position up to its commit, without steps that gave none: those have
    the probability NaN and the rank -1.
    """
    for step in range(sample.born[position] + 1):
        value = values_SP[step, position].item()
        if value >= 0:
            yield step + 1, value


def one_sample(run: StoredRun, settings: Settings) -> list[ReplayedSample]:
    """Return the sample that the setting `sample` chooses by its index; empty if it has no
    replay."""
    index = settings.get("sample", 0)
    return run.replays[index : index + 1]


def chosen_positions(settings: Settings, length: int) -> list[int]:
    """Return indices of the positions that the setting `at` gives as shares of the text's length.
    Papers count from 1: position 128 of 256 is the last of its block.
    """
    return [max(round(share * length), 1) - 1 for share in settings["at"]]


@series()
def first_right_and_committed(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield, by position of one text, the first step with the right candidate and the step of the
    commit."""
    for replayed in one_sample(run, settings):
        for position, (first, committed) in enumerate(first_right_steps(replayed)):
            if committed:
                yield {"x": position + 1, "y": first, "n": 1, "series": "first"}
                yield {"x": position + 1, "y": committed, "n": 1, "series": "decoded"}


@series("tokens")
def waiting_steps(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the number of tokens by steps between the first right candidate and the commit."""
    pairs = [pair for replayed in run.replays for pair in first_right_steps(replayed) if pair[1]]
    counts = Counter(committed - first for first, committed in pairs)
    for waited in range(max(counts, default=-1) + 1):
        yield {"x": waited, "y": counts[waited], "n": len(pairs)}


@series()
def first_right_step(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the first step whose candidate was the final token, by position, mean over samples."""
    by_position: dict[int, list[float]] = defaultdict(list)
    for replayed in run.replays:
        for position, (first, committed) in enumerate(first_right_steps(replayed)):
            if committed:
                by_position[position].append(first)
    for position in sorted(by_position):
        yield {**mean_and_quartiles(position + 1, by_position[position]), "series": "ideal"}


def by_step(values: str, run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield a value of the final token at some positions of one text, by step up to its commit. A
    panel per position, or a series per position with the setting `one_panel`.

    values: name of the value in a token replay.
    """
    for sample, replay in one_sample(run, settings):
        for index, position in enumerate(chosen_positions(settings, len(sample.born)), start=1):
            apart = {"panel": f"position {position + 1}"}
            named = {"series": f"token {index}"} if settings.get("one_panel") else apart
            for step, value in known_values(sample, getattr(replay, values), position):
                yield {"x": step, "y": value, "n": 1, **named}


RUN_SERIES["probability"] = partial(by_step, "chance_SP")
RUN_SERIES["rank"] = partial(by_step, "rank_SP")  # 1: the token is the candidate


@series("tokens")
def probability_before_commit(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the mean probability of the final token by steps left until its commit. Tokens are
    grouped by the number of steps for which they have a probability; the setting `groups` lists the
    largest number of each group, and each group is a series.
    """
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample, replay in run.replays:
        for position in range(len(sample.born)):
            column = [value for _, value in known_values(sample, replay.chance_SP, position)]
            group = next((g for g in settings["groups"] if len(column) <= g), 0)
            for left, value in enumerate(reversed(column)):
                values[group, left].append(value)
    for group, left in sorted(values):
        if group:
            known = values[group, left]
            yield {"x": left, "y": fmean(known), "n": len(known), "series": f"up to {group}"}


@series()
def rank_map(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield log2 of the final token's rank, by position and step of one text.

    A point without value marks where the position was committed.
    """
    for sample, replay in one_sample(run, settings):
        for position, committed in enumerate(sample.born):
            for step, value in known_values(sample, replay.rank_SP, position):
                yield {"x": position + 1, "y": step, "z": log2(value), "n": 1}
            if committed >= 0:
                yield {"x": position + 1, "y": committed + 1, "n": 1}


@series()
def probability_map(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield the final token's probability by position and step, mean over the samples with one."""
    values: dict[tuple[int, int], list[float]] = defaultdict(list)
    for sample, replay in run.replays:
        for position in range(len(sample.born)):
            for step, value in known_values(sample, replay.chance_SP, position):
                values[position, step].append(value)
    for position, step in sorted(values):
        known = values[position, step]
        yield {"x": position + 1, "y": step, "z": fmean(known), "n": len(known)}


# Training and calibration.


@series()
def filter_loss(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield loss by epoch of the filter that the run used, on its training and its held-out rows
    (Learn2PD, figure 8). Nothing if the weights on this disk are not the ones of the run.
    """
    head = setting_in(run.record.spec.decoder, "select.first.head")
    folder = place_of(str(head["source"]))
    if not (folder / CURVE_FILE).exists():
        return
    if sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest() != head.get("sha256"):
        return
    for line in (folder / CURVE_FILE).read_text(encoding="utf-8").splitlines():
        point = json.loads(line)
        for series in ("train", "validation"):
            yield {"x": point["epoch"], "y": point[series], "series": series}


@series("drafts")
def reliability(run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield observed against predicted survival of draft prefixes, by bin of the prediction.

    There is a panel per position of the draft, with a series before and one after temperature
    scaling. The prediction for a prefix is the product of the drafter's confidences up to its
    position (see `metrics/drafts`). Temperatures are fitted on the first half of the samples;
    both series are of the second half. Settings: `positions`, `bins`.
    """
    stats = run.record.samples
    if stats.survival.isna().any():
        return
    for k in settings["positions"]:
        for name, part in (("before", "unscaled"), ("after", "scaled")):
            outcomes = drafts.outcomes_of(stats, part, k)
            for bar in drafts.reliability_bins(outcomes, settings["bins"]):
                of = {"n": bar.count, "panel": str(k), "series": name}
                yield {"x": bar.predicted, "y": bar.happened, **of}


# Simulated serving load (`serving/`) on a measured step profile, from the drafts of a run that
# verified nothing (`decoder/length=fixed decoder.length.tokens=0`), whose drafter proposed at every
# position of greedy texts. The confidence head's temperatures are fitted on the first half of the
# texts, and the second half is served. Settings: `rule` with its `tau` or `tokens`, `profile` (file
# by model), `requests` (numbers of concurrent requests).


SIMULATED: Mapping[str, tuple[str, str]] = {
    "user_and_device_speed": ("tokens_per_s_user", "tokens_per_s_device"),
    "device_speed": ("requests", "tokens_per_s_device"),
    "verified_per_request": ("requests", "verified_per_request"),
}
"""Run series of a simulated load, a point per number of requests -> fields of a `FrontierPoint`
that are its x and y. Numbers are per second and device, per second and user, or per request and
step.
"""


def simulated(x: str, y: str, run: StoredRun, settings: Settings) -> Iterator[Point]:
    """Yield one field of the simulated load against another."""
    for point in served(run, json.dumps(settings, sort_keys=True)):
        yield {"x": getattr(point, x), "y": getattr(point, y), "n": point.requests}


RUN_SERIES.update((name, partial(simulated, *fields)) for name, fields in SIMULATED.items())
COUNTED.update(dict.fromkeys(SIMULATED, "requests"))


@lru_cache(maxsize=64)
def served(run: StoredRun, settings_json: str) -> list[simulation.FrontierPoint]:
    """Return the run's system at every number of requests; simulated once for all series that use
    it."""
    settings = SeriesSettings(json.loads(settings_json))
    profile = _profile(run.record.spec.model.name, settings["profile"])
    systems = systems_of(drafts_of(run), profile, {"": settings})
    return simulation.frontier(systems, profile, settings["requests"])


def _profile(model: str, files: Mapping[str, str]) -> StepProfile:
    """Return the step profile of a model; the step times of another model would say nothing about
    it."""
    if model not in files:
        raise DllmBenchError(
            f"The figure names no step profile of {model}; measure one with `dllm-bench train sps "
            f"{model}` and add its file to the profiles of {', '.join(files)}."
        )
    return profile_of(files[model], [model])


@lru_cache(maxsize=8)
def drafts_of(run: StoredRun) -> simulation.StoredDrafts:
    """Return the drafts that a greedy run stored; DllmBenchError if it cannot be simulated."""
    spec = run.record.spec
    temperature = setting_in(spec.decoder, "temperature", 0)
    if temperature > 0:
        raise DllmBenchError(
            f"Run {spec.short} sampled at temperature {temperature}; drafts are "
            "recorded along greedy text, run it with decoder.temperature=0."
        )
    if setting_in(spec.decoder, "draft._target_", "") == "draft.strided":
        raise DllmBenchError(
            f"Run {spec.short} drafted in the forward that verified the draft before, so its "
            "drafts change with the load; name a run of another drafter."
        )
    stored = simulation.StoredDrafts.of(
        (Trace.from_columns(s.trace), s.born, s.ids) for s in run.samples
    )
    if len(stored.texts) < 2:
        raise DllmBenchError(
            f"Run {spec.short} holds drafts of {len(stored.texts)} texts; name a run of a "
            "speculative decoder with more items."
        )
    return stored


def profile_of(source: str, models: Iterable[str]) -> StepProfile:
    """Return the step times in a file; they must be measured with the model of all runs."""
    for model in dict.fromkeys(models):
        check_step_profile(source, model)
    return read_step_profile(source)


def systems_of(
    stored: simulation.StoredDrafts,
    profile: StepProfile,
    rules: Mapping[str, Mapping[str, Any]],
    temperatures: Temperatures | None = None,
) -> list[simulation.ServingSystem]:
    """Return the systems that serve the second half of the texts, one for each length rule.

    rules: name of the system -> settings of its rule, see `load_simulation.length_rule`;
        temperatures: of the confidence head, fitted on the first half if None.
    """
    first, second = stored.halves()
    texts = second.served(temperatures or Temperatures(drafts.fit_temperatures(first.observed())))

    def system(name: str, settings: Mapping[str, Any]) -> simulation.ServingSystem:
        rule = partial(simulation.length_rule, settings, profile)
        if settings["rule"] == "none":
            return simulation.ServingSystem(name, texts, rule)
        drafting = second.drafting(profile, settings.get("tokens"))
        return simulation.ServingSystem(name, texts, rule, drafting)

    return [system(name, settings) for name, settings in rules.items()]


def run_series(name: str) -> RunSeries:
    """Return the run series called `name`; raises DllmBenchError with the known names if there is
    none."""
    require_known("run series", name, RUN_SERIES)
    return RUN_SERIES[name]
