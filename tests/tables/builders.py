"""Made-up runs for the table tests: a small table, two profiles, records with fixed columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dllm_bench.api import compose as composing
from dllm_bench.core.trace import Trace
from dllm_bench.metrics.accuracy import mean_score
from dllm_bench.paths import read_yaml
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.record import RunRecord, SampleRecord, Session
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import ERROR, RECORD, SAMPLES, Store
from dllm_bench.tables.frame import BuiltTable, build
from dllm_bench.tables.load import load_table, parse_table
from dllm_bench.tables.plan import PlannedCell, PlannedRun, Planner, cells_with_runs, distinct_runs
from dllm_bench.tables.spec import PaperTable, Profile, Query
from tests.sample_stats import record_of as record_of_samples
from tests.sample_stats import sample, stored_sample

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
TINY = Profile(
    "embedded",
    embedded=True,
    replace={
        "model": {"alpha": "tiny-alpha"},
        "benchmark": {"quiz": "miniquiz", "code": "minicode"},
        "benchmark.max_new_tokens": {"512": "64"},
    },
    set=("limit=20", "hardware=cpu"),
)
FULL = Profile("paper", embedded=False, replace={}, set=("hardware=cpu",))
CODE = {"commit": "0123456789abcdef", "diff_sha256": "fedcba9876543210"}
ENVIRONMENT = {"device": "Test CPU", **CODE}
Compose = Callable[[Sequence[str]], Any]


@cache
def settings() -> SettingsCache:
    """Real composed settings that the tests of a process share; never saved."""
    return SettingsCache(HERE, composing.compose)


def small_table(name: str = "table1") -> PaperTable:
    """Return a table of the folder `small`: `own` reports nothing, `derived` has formulas."""
    return parse_table(f"small/{name}", read_yaml(HERE / "small" / f"{name}.yaml"), HERE / "small")


def compose(query: Sequence[str]) -> dict[str, Any]:
    """Return a stand-in for Hydra: dotted overrides to nested plain data."""
    config: dict[str, Any] = {"seed": 0, "limit": None}
    for override in query:
        key, _, value = override.partition("=")
        group, _, name = key.partition(".")
        if name:
            known = {"true": True, "false": False}
            typed = int(value) if value.isdigit() else known.get(value, value)
            config.setdefault(group, {})[name] = typed
        elif group in ("limit", "seed"):
            config[group] = int(value)
        else:
            config.setdefault(group, {})["name"] = value
    cpu = {"device": "cpu", "dtype": "float32", "attention": "sdpa", "threads": 1}
    config["hardware"] = {**config.get("hardware", {}), **cpu}
    return config


def spec_of(config: Mapping[str, Any], resolve: object = None) -> RunSpec:
    """Return the run of a composed configuration, without touching data or weights."""
    groups = {name: dict(config[name]) for name in ("model", "decoder", "benchmark", "hardware")}
    label = groups["decoder"].pop("name")
    return RunSpec(
        **groups,
        seed=config["seed"],
        limit=config["limit"],
        inputs={"dataset": "d" * 64, "weights": "e" * 64},
        decoding_version=1,
        label=label,
    )


def record_of(spec: RunSpec, right: int = 11, n: int = 20, speed_up: float = 1.0) -> RunRecord:
    """Return a sealed run of `n` samples of which `right` are right; times are simple fractions."""
    counts = dict.fromkeys(("allocated", "committed", "content", "emitted"), 64)
    samples = []
    for i in range(n):
        steps_s = (0.25 + 0.0125 * (i % 7)) / speed_up
        times = {"seconds": steps_s + 0.05, "steps_s": steps_s, "first_step_s": 0.05}
        samples.append(sample(**counts, **times, forwards=10 + i % 3, rows=400))
    values = [float(i < right) for i in range(n)]
    grades = {"value": values, "verdict": ["correct" if value else "wrong" for value in values]}
    made = record_of_samples(samples)
    return replace(
        made,
        spec=spec,
        identity_hash=spec.identity_hash,
        score=mean_score(grades["value"], seed=spec.seed),
        columns={**made.columns, **grades},
        sessions=[Session(0.0, 2, dict(ENVIRONMENT), n)],
    )


def seal(store: Store, record: RunRecord, samples: Sequence[SampleRecord] = ()) -> Path:
    """Put a record where its run belongs, with its samples if there are any."""
    folder = store.path(record.spec)
    folder.mkdir(parents=True)
    (folder / RECORD).write_text(record.to_json(), encoding="utf-8")
    if samples:
        lines = "".join(one.to_line() + "\n" for one in samples)
        (folder / SAMPLES).write_text(lines, encoding="utf-8")
    return folder


def start(store: Store, spec: RunSpec, done: int, total: int, error: str = "") -> None:
    """Leave an unfinished run: `done` lines of samples, and what stopped it."""
    with store.open(spec) as run:
        run.expect(total)
        samples = (stored_sample((), (), Trace(), id=f"item-{i}", text="") for i in range(done))
        lines = "".join(one.to_line(spec.short) + "\n" for one in samples)
        (run.folder / SAMPLES).write_text(lines, encoding="utf-8")
        if error:
            (run.folder / ERROR).write_text(error + "\n", encoding="utf-8")


@cache
def queries_of(name: str) -> dict[Query, str | None]:
    """Return the runs that a table of the package asks for, each with its benchmark."""
    return {cell.run: cell.keys.get("benchmark") for cell in cells_with_runs(load_table(name))}


def planned_small(
    store: Store, profile: Profile, table: PaperTable | None = None, compose: Compose = compose
) -> list[PlannedCell]:
    """Return a table's plan, by default a small one's, with runs specified by `spec_of`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSpec, "from_config", staticmethod(spec_of))
        return Planner(compose, store).cells(table or small_table(), profile)


def spec_at(planned: Sequence[PlannedCell], setting: str, benchmark: str) -> RunSpec:
    """Return the run behind one combination."""
    for entry in planned:
        keys = entry.cell.keys
        if (keys["setting"], keys["benchmark"]) == (setting, benchmark) and entry.run.spec:
            return entry.run.spec
    raise AssertionError(f"no run for {setting}, {benchmark}")


def every_state(root: Path, profile: Profile) -> BuiltTable:
    """Return the small table with a sealed, a partial, a failed and a missing run. S3 is
    impossible under the paper profile and sealed under the embedded one."""
    store = Store(root)
    planned = planned_small(store, profile)
    seal(store, record_of(spec_at(planned, "S1", "quiz")))
    start(store, spec_at(planned, "S1", "code"), done=7, total=20)
    start(store, spec_at(planned, "S2", "quiz"), done=3, total=20, error="The disk is full.")
    if profile.embedded:
        seal(store, record_of(spec_at(planned, "S3", "quiz"), right=10, speed_up=2.0))
        seal(store, record_of(spec_at(planned, "S3", "code"), right=4))
    return build(small_table(), profile, planned_small(store, profile))


def sealed(
    table: PaperTable,
    store: Store,
    profile: Profile,
    made: Callable[[PlannedRun], RunRecord | None],
) -> BuiltTable:
    """Return a table with the records that `made` gives of its runs."""
    for run in distinct_runs(planned_small(store, profile, table)):
        if run.spec and (record := made(run)):
            seal(store, record)
    return build(table, profile, planned_small(store, profile, table))


def nothing_reported(root: Path, profile: Profile) -> BuiltTable:
    """Return the table that reports nothing, with a sealed and a missing run."""

    def made(run: PlannedRun) -> RunRecord | None:
        return record_of(run.spec) if run.chosen["decoder"] == "plain" else None

    return sealed(small_table("own"), Store(root), profile, made)


def derived(root: Path, profile: Profile) -> BuiltTable:
    """Return the table of derived numbers; decoder `lost` has no run, `quick` is twice as fast."""
    right = {"plain": 10, "quick": 12}

    def made(run: PlannedRun) -> RunRecord | None:
        decoder, more = run.chosen["decoder"], 2 if "code" in run.chosen["benchmark"] else 0
        if decoder == "lost":
            return None
        return record_of(run.spec, right[run.spec.label] + more, speed_up=1 + (decoder == "quick"))

    built = sealed(small_table("derived"), Store(root), profile, made)
    assert len(built.records) == 6
    return built
