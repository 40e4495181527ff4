"""Runs and tables from Python: `run`, `evaluate`, `records`, `compare`, `table`.

`run` is `dllm-bench run`: stored, looked up when it is complete, continued when it was interrupted.
`evaluate` takes a model, decoder or benchmark that exists only as an object, and stores nothing.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.api.comparison import RunComparison, sealed_record
from dllm_bench.api.compose import as_override, compose
from dllm_bench.api.preflight import check
from dllm_bench.core.benchmark import Benchmark
from dllm_bench.core.decoder import Decoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import describe, instantiate
from dllm_bench.store.files import results_directory
from dllm_bench.store.inputs import benchmark_of
from dllm_bench.store.record import RunRecord
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.spec import RunSpec, leaves
from dllm_bench.store.store import Store, read_record, read_samples
from dllm_bench.tables.build import BuiltTable, build
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.load import load_profile, load_table
from dllm_bench.tables.plan import plan
from dllm_bench.tables.render import as_csv
from dllm_bench.tables.render_html import html
from dllm_bench.tables.spec import EMBEDDED

if TYPE_CHECKING:
    from pandas import DataFrame

    from dllm_bench.models.load import LoadedModel

FRAME_HEIGHT = 600  # pixels of a table in a notebook


# --- making runs ---------------------------------------------------------------------------------


def run(
    model: str,
    decoder: str | Decoder,
    benchmark: str,
    *,
    results: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> RunRecord:
    """The record of a run, made now unless it is complete, as `dllm-bench run` makes it.

    model, benchmark: names of `conf`.
    decoder: a name, or a decoder of `dllm_bench.decoder`.
    results: the results directory; by default `DLLM_BENCH_RESULTS`, else ./results.
    progress: whether a progress line is shown.
    settings: further settings by the command line's names: `limit=50`, `seed=1`, `hardware="cpu"`,
        `**{"decoder.select.tau": 0.7}`, `**{"decoder/score": "credit"}`.

    DllmBenchError for what cannot work, before anything is loaded.
    """
    from dllm_bench.launch.run_one import run as run_spec  # imports torch, which takes seconds
    from dllm_bench.runs.progress import RunProgress

    chosen = {"decoder": decoder} if isinstance(decoder, str) else {}
    given = {"model": model, "benchmark": benchmark, **chosen, **settings}
    place = {} if results is None else {"paths.results": str(results)}
    overrides = [as_override(key, value) for key, value in {**given, **place}.items()]
    config = compose(overrides)
    if not isinstance(decoder, str):
        config["decoder"] = describe(decoder)
    check(config, reads_data=False)
    store = Store(results_directory(config["paths"]["results"]) / "runs")
    shown = RunProgress() if progress else None
    logger = instantiate(config["logger"], "logger")
    return run_spec(RunSpec.from_config(config), store=store, logger=logger, progress=shown)


def evaluate(
    model: LoadedModel | str | Path,
    decoder: Decoder | str,
    benchmark: Benchmark | str,
    *,
    limit: int | None = None,
    seed: int = 0,
    batch: int = 1,
    **settings: Any,
) -> RunRecord:
    """Decode and grade a benchmark with objects; the record, which is not stored.

    model: of `load_model` or `wrap`, or what `load_model` takes.
    decoder: of `dllm_bench.decoder`, or a name.
    benchmark: an object, or a name with its settings (`shots=3`, `max_new_tokens=64`).
    limit: number of items, None for all; seed: of sampling decoders; batch: requests in a forward.
    """
    from dllm_bench.api import generation, models  # import torch, which takes seconds
    from dllm_bench.launch.run_one import session_class
    from dllm_bench.runs import batched, runner
    from dllm_bench.runs.dependencies import Dependencies

    loaded = models.load_model(model) if isinstance(model, (str, Path)) else model
    chosen = generation.decoder(decoder) if isinstance(decoder, str) else decoder
    items = _named_benchmark(benchmark, settings) if isinstance(benchmark, str) else None
    tasks = benchmark_of(items) if items else benchmark
    if not isinstance(tasks, Benchmark):
        raise DllmBenchError(
            f"A benchmark is a name, as in `dllm-bench list`, or a Benchmark; got {tasks!r}."
        )
    spec = generation.spec_of(
        loaded,
        chosen,
        benchmark=items or {"name": tasks.name},
        inputs={"dataset": tasks.dataset_hash()},
        limit=limit,
        seed=seed,
        batch=batch,
    )
    batched.check(spec)
    deps = Dependencies(
        model=lambda _: loaded,
        decoder=lambda _: chosen,
        benchmark=lambda _: tasks,
        prepare=lambda _: None,
    )
    with tempfile.TemporaryDirectory() as folder:
        return runner.run(spec, store=Store(Path(folder)), deps=deps, session=session_class(spec))


def _named_benchmark(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The composed settings of a benchmark."""
    changed = [as_override(f"benchmark.{key}", value) for key, value in settings.items()]
    group: dict[str, Any] = compose([f"benchmark={name}", *changed])["benchmark"]
    return group


# --- reading runs --------------------------------------------------------------------------------


def records(results: str | Path | None = None, by: Literal["run", "sample"] = "run") -> DataFrame:
    """The complete runs of a results directory as a table of pandas.

    by: "run" has a row per run: what it was (`model`, `benchmark`, `decoder`, `seed`, … and every
        setting of the decoder by its dotted name), `score` with its interval, and all metrics;
        "sample" has a row per sample: the run's columns up to `batch`, then `id`, `value` and
        `verdict` of its grade, its counts and times, and its `text`.

    Columns hold one type each, so `to_parquet` takes the table as it is. A run whose record cannot
    be read is left out, with a warning that names it.
    """
    import pandas as pd

    if by not in ("run", "sample"):
        raise DllmBenchError(f"records takes by='run' or by='sample', not {by!r}.")
    store, rows = open_store(results), list[dict[str, Any]]()
    for folder in store.folders():
        try:
            record = read_record(folder)
        except DllmBenchError as error:
            warnings.warn(f"left out: {error}", stacklevel=2)
            continue
        if record is not None:
            rows += [_run_row(record)] if by == "run" else sample_rows(record, folder)
    return pd.DataFrame(rows).apply(of_one_type)


def open_store(results: str | Path | None = None) -> Store:
    """The store of a results directory; the configured one if none is named."""
    folder = compose([])["paths"]["results"] if results is None else results
    return Store(results_directory(str(folder)) / "runs")


def _identity_row(record: RunRecord) -> dict[str, Any]:
    """The columns that say which run it is."""
    spec = record.spec
    return {
        "run": spec.short,
        "benchmark": spec.benchmark["name"],
        "model": spec.model["name"],
        "decoder": spec.label,
        "hardware": spec.hardware.get("name"),
        "seed": spec.seed,
        "limit": spec.limit,
        "batch": spec.batch,
    }


def _run_row(record: RunRecord) -> dict[str, Any]:
    score = record.score
    ends = {"score": score.mean, "low": score.low, "high": score.high} if score else {}
    settings = {f"decoder.{key}": value for key, value in leaves(record.spec.decoder)}
    samples = {"samples": len(record.columns["id"]), **ends}
    return {**_identity_row(record), **samples, **record.summary, **record.scores, **settings}


def sample_rows(record: RunRecord, folder: Path) -> Iterator[dict[str, Any]]:
    """A row per sample: the run's columns, the sample's own, and its text."""
    texts = {key: sample.text for key, sample in read_samples(folder).items()}
    names, values = record.columns.keys(), record.columns.values()
    for row in zip(*values, strict=True):
        sample = dict(zip(names, row, strict=True))
        yield {**_identity_row(record), **sample, "text": texts.get(sample["id"])}


def of_one_type(column: Any) -> Any:
    """The column; if its values are of several types, or lists, as JSON text."""
    kinds = set(map(_kind, column)) - {None}
    if len(kinds) <= 1 and not kinds & {list, dict}:
        return column
    return column.map(lambda value: None if _kind(value) is None else json.dumps(value))


def _kind(value: Any) -> type | None:
    """The type of a value, whole numbers being floats; None where there is no value."""
    if value is None or value != value:
        return None
    return float if type(value) is int else type(value)


def compare(*runs: RunRecord | str, results: str | Path | None = None) -> RunComparison:
    """Two or more complete runs, each compared with the first on the samples they share.

    runs: records, or hashes of runs in the results directory. `print` shows what the command
    prints; `.scores` are the tests, `.to_pandas()` the metrics.
    """

    def found(one: RunRecord | str) -> RunRecord:
        return sealed_record(open_store(results).find(one)) if isinstance(one, str) else one

    return RunComparison(tuple(map(found, runs)))


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A paper's table with the numbers that are stored."""

    built: BuiltTable
    """The table, cell by cell."""

    def to_pandas(self) -> DataFrame:
        """A row per cell: its facets, metric, state, measured and reported value, and runs."""
        import pandas as pd

        return pd.read_csv(io.StringIO(as_csv(self.built)))

    def _repr_html_(self) -> str:
        """The table as its page shows it, in a frame, so that its style stays there."""
        page = escape(html(self.built))
        return f'<iframe srcdoc="{page}" width="100%" height="{FRAME_HEIGHT}"></iframe>'


def table(name: str, *, profile: str = EMBEDDED, results: str | Path | None = None) -> Table:
    """A table of a paper ("lopa/table4") from stored runs; nothing is run.

    profile: "embedded" for the models and tasks that ship, "paper" for the published ones.
    """
    paper, store = load_table(name), open_store(results)
    settings = SettingsCache(store.root.parent, compose)
    cells = plan(paper, load_profile(profile), settings.compose, store, resolve=settings.resolve)
    settings.save()
    return Table(build(paper, load_profile(profile), cells, measured_runs(store)))
