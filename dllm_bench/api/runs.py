"""Runs and what is shown of them from Python: `run`, `evaluate`, `records`, `compare`,
`acceptance`, `table`, `figure`, `verdicts`, `trade_off`.

`run` does what `dllm-bench run` does: the result is stored, a complete run is looked up, an
interrupted one is continued. Model and decoder may be objects. `evaluate` also accepts a benchmark
object; it makes the same run in a temporary folder.
"""

from __future__ import annotations

import io
import json
import tempfile
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dllm_bench.api.compose import as_override, check, compose
from dllm_bench.claims.verdict import ROW_HEADS, judge_stored
from dllm_bench.core.benchmark import Benchmark
from dllm_bench.core.decoder import Decoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures import trade_off as plot
from dllm_bench.figures.spec import load_figure
from dllm_bench.metrics import accuracy
from dllm_bench.metrics.definitions import definition, measure, measure_all
from dllm_bench.metrics.drafts import longest_draft
from dllm_bench.models.spec import NONE
from dllm_bench.registry import describe
from dllm_bench.site.texts import align, keep_tokenizer, number, percent
from dllm_bench.store.cache import SettingsCache
from dllm_bench.store.files import write_atomic
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.inputs import HARDWARE_SETTINGS_OF_MODELS, ObjectInputs, resolve
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec, flat_settings, leaves, setting_rows, slug
from dllm_bench.store.store import Store, read_record, read_samples, sealed_record
from dllm_bench.tables.cost import measured_runs
from dllm_bench.tables.frame import BuiltTable, build
from dllm_bench.tables.load import load_profile, load_table, matching_names
from dllm_bench.tables.plan import PlannedTable, Planner
from dllm_bench.tables.render import as_csv, render
from dllm_bench.tables.spec import EMBEDDED, PaperTable

if TYPE_CHECKING:
    from pandas import DataFrame

    from dllm_bench.models.load import LoadedModel

BY_POSITION = "acceptance/conditional acceptance/survival calibration/ece calibration/auroc".split()
"""Metrics of a position of the draft."""
FORMS = ("png", "svg")  # of pictures
ONLY_EMPTY: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}
"""How pandas reads a csv in which only empty cells are missing: a facet may be called None."""
FRAME_HEIGHT = 600  # pixels of a table in a notebook


# --- making runs ---------------------------------------------------------------------------------


def run(
    model: str | Path | LoadedModel,
    decoder: str | Decoder,
    benchmark: str,
    *,
    results: str | Path | None = None,
    progress: bool = False,
    **settings: Any,
) -> RunRecord:
    """Return the record of a run, made now unless it is complete, as `dllm-bench run` makes it.

    model: a name of `conf`, a checkpoint's folder or hub id, or a model made by `load_model` or
    `wrap`. A model of `load_model` makes the same run as its name; a run of a wrapped model is
    identified by its weights. decoder: a name, or a decoder of `dllm_bench.decoder`. benchmark: a
    name of `conf`. results: the results directory; by default `DLLM_BENCH_RESULTS`, else ./results.
    progress: whether a progress line is shown. settings: further settings by the command line's
    names: `limit=50`, `seed=1`, `hardware="cpu"`,
        `**{"decoder.select.tau": 0.7}`, `**{"decoder/score": "credit"}`.

    Raises DllmBenchError before anything is loaded if the settings cannot work.
    """
    if not isinstance(benchmark, str):
        raise DllmBenchError(
            f"run stores a run of a benchmark by name, and got {benchmark!r}; give a name that "
            "`dllm-bench run --help` lists, or use evaluate: it takes objects and stores nothing."
        )
    return make_run(Chosen(model, decoder, benchmark), results, progress, settings)


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
    """Decode and grade a benchmark with objects; return the record, which is not stored.

    model, decoder: as in `run`.
    benchmark: an object, or a name with its settings (`shots=3`, `max_new_tokens=64`).
    limit: number of items, None for all; seed: for decoders that sample; batch: requests in a
    forward.
    """
    if not isinstance(benchmark, (Benchmark, str)):
        raise DllmBenchError(
            "A benchmark is a Benchmark, or a name that `dllm-bench run --help` lists; "
            f"got {benchmark!r}."
        )
    given = {f"benchmark.{key}": value for key, value in settings.items()}
    given |= {"limit": limit, "seed": seed, "batch": batch}
    with tempfile.TemporaryDirectory() as folder:
        return make_run(Chosen(model, decoder, benchmark, stored=False), folder, False, given)


@dataclass(frozen=True)
class Chosen:
    """Model, decoder and benchmark of a run: names, or objects in their place."""

    model: str | Path | LoadedModel
    decoder: str | Decoder
    benchmark: str | Benchmark
    stored: bool = True  # else no run is looked up by the hash of its weights

    def __post_init__(self) -> None:
        if not isinstance(self.model, (str, Path)) and not hasattr(self.model, "metadata"):
            raise DllmBenchError(
                f"The model is a {type(self.model).__name__}; give a name, a folder, or what "
                "load_model or wrap returns."
            )

    def composed(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the configuration. An object appears as a description instead of a chosen name."""
        chosen = {"model": self.model, "decoder": self.decoder, "benchmark": self.benchmark}
        named = {name: str(one) for name, one in chosen.items() if isinstance(one, (str, Path))}
        if self.loaded is not None:
            require_as_loaded(self.loaded, settings)
            named["hardware"] = "cpu" if self.loaded.metadata.device == "cpu" else "auto"
        config = compose([as_override(*one) for one in {**named, **settings}.items()])
        if self.loaded is not None:
            config["model"] = dict(self.loaded.settings)
        if not isinstance(self.decoder, str):
            config["decoder"] = describe(self.decoder)
        return config

    @property
    def loaded(self) -> LoadedModel | None:
        """The model, if it is an object."""
        return None if isinstance(self.model, (str, Path)) else self.model

    @property
    def tasks(self) -> Benchmark | None:
        """The benchmark, if it is an object."""
        return None if isinstance(self.benchmark, str) else self.benchmark

    @property
    def inputs(self) -> ObjectInputs:
        """The run inputs that replace the files of the objects."""
        hashes = {} if self.tasks is None else {"dataset": self.tasks.dataset_hash()}
        if self.loaded is None or self.loaded.content is None:
            return ObjectInputs(hashes)
        made: Any = getattr(self.loaded.denoiser, "function", None)
        if not self.stored:
            return ObjectInputs({**hashes, "weights": NONE})
        parts = made.modules() if hasattr(made, "modules") else ()
        classes = dict.fromkeys(map(type, parts))
        return ObjectInputs({**hashes, **self.loaded.content()}, tuple(classes))


def make_run(
    chosen: Chosen, results: str | Path | None, progress: bool, settings: Mapping[str, Any]
) -> RunRecord:
    """Compose and check the settings, then make the run or look it up."""
    import torch

    from dllm_bench.launch.local import run as run_spec  # imports torch, which takes seconds
    from dllm_bench.runs.dependencies import REAL
    from dllm_bench.runs.progress import RunProgress

    place = {} if results is None else {"paths.results": results}
    config = chosen.composed({**settings, **place})
    tasks, loaded = chosen.tasks, chosen.loaded
    deps = REAL
    if tasks is None:
        check(RunConfig(config))
    else:
        check(RunConfig({**config, "benchmark": {}}))
        config["benchmark"] = {"name": tasks.name}
        deps = replace(deps, benchmark=lambda _: tasks)
    if loaded is not None:
        deps = replace(deps, model=lambda _: loaded)
    spec = RunSpec.from_config(config, partial(resolve, given=chosen.inputs))
    if loaded is not None:
        require_same(loaded, spec)
        if loaded.content is not None:
            keep_tokenizer(loaded.text.tokenizer, spec.inputs.get("tokenizer"))
    store = Store.in_results(RunConfig(config).paths.results)
    shown, threads = RunProgress() if progress else None, torch.get_num_threads()
    try:
        return run_spec(spec, store=store, progress=shown, deps=deps)
    finally:
        torch.set_num_threads(threads)  # a run sets those of its hardware


def require_as_loaded(loaded: LoadedModel, settings: Mapping[str, Any]) -> None:
    """Raise DllmBenchError for settings that were fixed when the model was loaded or wrapped."""
    fixed = [f"hardware.{name}" for name in HARDWARE_SETTINGS_OF_MODELS]
    for key in settings:
        if key.startswith("model.") or key in fixed:
            raise DllmBenchError(
                f"{key}={settings[key]!r} was given with model {loaded.metadata.name!r}, which is "
                "an object and stays as it is; give the setting to load_model or wrap, or name the "
                "model in place of the object."
            )


def require_same(loaded: LoadedModel, spec: RunSpec) -> None:
    """Raise DllmBenchError if device, number of processes or weight files of the run differ from
    those of the object.
    """
    name, device = loaded.metadata.name, spec.hardware.device
    if loaded.metadata.device.partition(":")[0] != device.partition(":")[0]:
        raise DllmBenchError(
            f"Model {name!r} is on {loaded.metadata.device}, and hardware="
            f"{spec.hardware.name} is {device}; move the model, or choose its hardware."
        )
    if several := spec.hardware.several:
        raise DllmBenchError(
            f"Model {name!r} is an object of this process, and hardware={spec.hardware.name} "
            f"asks for several processes ({several[0]}); choose hardware of one process, or name "
            "the model in place of the object."
        )
    unapplied = [key for key in ("quantization", "compile") if getattr(spec.model, key) != NONE]
    if loaded.content is not None and unapplied:
        raise DllmBenchError(
            f"Model {name!r} is an object and runs as it is, and hardware={spec.hardware.name} "
            f"asks for {unapplied[0]}={getattr(spec.model, unapplied[0])}; choose hardware without "
            "it."
        )
    known = loaded.metadata.weights_sha256
    if known is not None and spec.inputs["weights"] != known:
        raise DllmBenchError(
            f"The files of model {name!r} have other weights than those that were loaded; load it "
            "again."
        )


# --- reading runs --------------------------------------------------------------------------------


def records(results: str | Path | None = None, by: Literal["run", "sample"] = "run") -> DataFrame:
    """Return the complete runs of a results directory as a table of pandas.

    by: "run" gives a row per run: its settings (`model`, `benchmark`, `decoder`, `seed`, … and
    every
        setting of the decoder by its dotted name), `score` with its interval, and all metrics;
        "sample" gives a row per sample: the run's columns up to `batch`, then `id`, `value` and
        `verdict` of its grade, its counts and timings, and its `text`.

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
    """Return the store of a results directory; the configured one if none is named."""
    folder = RunConfig(compose([])).paths.results if results is None else results
    return Store.in_results(folder)


def _identity_row(record: RunRecord) -> dict[str, Any]:
    """Return the columns that identify the run."""
    spec = record.spec
    return {
        "run": spec.short,
        "benchmark": spec.benchmark.name,
        "model": spec.model.name,
        "decoder": spec.label,
        "hardware": spec.hardware.name,
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
    """Yield a row per sample: the run's columns, the sample's own, and its text."""
    texts = {key: sample.text for key, sample in read_samples(folder).items()}
    for row in zip(*record.columns.values(), strict=True):
        sample = dict(zip(record.columns, row, strict=True))
        yield {**_identity_row(record), **sample, "text": texts.get(sample["id"])}


def of_one_type(column: Any) -> Any:
    """Return the column; values of several types, or lists, become JSON text."""
    from pandas.api.types import infer_dtype

    if infer_dtype(column) not in ("mixed", "mixed-integer"):
        return column
    return column.map(json.dumps, na_action="ignore")


def sealed_records(
    runs: Sequence[RunRecord | str], results: str | Path | None
) -> Iterator[RunRecord]:
    """Yield complete runs that are given as records, or by hash; DllmBenchError for others."""
    for one in runs:
        if not isinstance(one, (str, RunRecord)):
            raise DllmBenchError(f"A run is {one!r}; give a record or the hash of a run.")
        yield sealed_record(open_store(results).find(one)) if isinstance(one, str) else one


def compare(*runs: RunRecord | str, results: str | Path | None = None) -> RunComparison:
    """Return two or more complete runs, each compared with the first on the samples they share.

    runs: records, or hashes of runs in the results directory. `print` shows what the command
    prints; `.scores` are the tests, `.to_pandas()` the metrics.
    """
    if len(runs) < 2:
        given = ", ".join(map(str, runs)) or "none"
        raise DllmBenchError(f"compare got {given}; name two or more, one by one (see status).")
    return RunComparison(tuple(sealed_records(runs, results)))


def acceptance(*runs: RunRecord | str, results: str | Path | None = None) -> DataFrame:
    """Return how many tokens of a draft the target accepts, a row per run and position of the
    draft.

    runs: records, or hashes of runs in the results directory.
    Columns: `conditional`, the probability that the token is accepted if all before it are;
    `survival`, that it and all before it are; `ece` and `auroc` of the draft's own confidence.
    Empty for runs without drafts; a value is missing where no round defines it.
    """
    import pandas as pd

    rows, columns = list[list[Any]](), [name.partition("/")[2] for name in BY_POSITION]
    for record in sealed_records(runs, results):
        for k in range(1, longest_draft(record.samples) + 1):
            values = (measure(f"{name}@{k}", record.samples) for name in BY_POSITION)
            rows.append([record.spec.short, record.spec.label, k, *values])
    return pd.DataFrame(rows, columns=["run", "decoder", "position", *columns])


# --- comparing runs ------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class RunComparison:
    """Two or more runs; the others are compared with the first."""

    records: tuple[RunRecord, ...]
    """The runs."""

    @property
    def scores(self) -> list[accuracy.Effect]:
        """The difference of scores, first - other, with its interval and test, for each other."""
        first, *others = self.records
        return [accuracy.compare(first.values, other.values) for other in others]

    def to_pandas(self) -> DataFrame:
        """Return a row per metric and a column per run, over the samples that all runs share."""
        import pandas as pd

        measured = zip(titles(self.records), shared_metrics(self.records), strict=True)
        return pd.DataFrame(dict(measured)).dropna(how="all")

    def lines(self) -> Iterator[str]:
        """Yield what differs in the settings, then the scores with tests, then all metrics."""
        first, *others = self.records
        settings = [flat_settings(record.spec) for record in self.records]
        hashes = ("run", *(record.spec.short for record in self.records))
        heads = ("setting", *titles(self.records))
        yield from align([heads, hashes, *setting_rows(settings)])
        yield ""
        for other in others:
            yield score_line(first, other)
        yield ""
        yield from metric_lines(self.records)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def __repr__(self) -> str:
        return f"RunComparison({', '.join(titles(self.records))})"

    def _repr_html_(self) -> str:
        """Return the score lines, then the metrics as a table."""
        first, *others = self.records
        scores = "".join(f"<p>{escape(score_line(first, other))}</p>" for other in others)
        shown = self.to_pandas().to_html(float_format="{:.3f}".format, na_rep="–", border=0)
        return scores + shown


def titles(records: Sequence[RunRecord]) -> list[str]:
    """Return each run's decoder name, with the one setting in which runs of that name differ. Equal
    names are told apart by the run's hash.
    """
    named = []
    for record in records:
        label = record.spec.label
        rows = setting_rows([flat_settings(r.spec) for r in records if r.spec.label == label])
        own = flat_settings(record.spec)
        one = [f"{name}={own.get(name, 'none')}" for name, *_ in rows if len(rows) == 1]
        named.append(" ".join([label, *one]))
    pairs = zip(named, records, strict=True)
    return [f"{name} {run.spec.short}" if named.count(name) > 1 else name for name, run in pairs]


def score_line(first: RunRecord, second: RunRecord) -> str:
    """Return the difference of two runs' scores on shared samples, with its test and verdict."""
    names = f"{first.spec.short} and {second.spec.short}"
    if not first.values.keys() & second.values.keys() and shared_ids([first, second]):
        return f"{names}: no score, since nothing is graded in both"
    result = accuracy.compare(first.values, second.values)
    verdict = "the runs differ" if result.differs else "no difference is shown"
    known = "contains 0" if result.low <= 0 <= result.high else "has no width"
    reason = f"the interval of paired resamples {'excludes 0' if result.differs else known}"
    if result.p_value is not None:
        reason = f"McNemar's exact test, p = {result.p_value:.3g}"
    difference, low, high = (f"{100 * x:+.1f}" for x in (result.value, result.low, result.high))
    return (
        f"{names}: score {_graded(first, second)} and {_graded(second, first)} %, difference "
        f"{difference} [{low}, {high}] points on {result.n} shared samples: {verdict} ({reason})"
    )


def _graded(record: RunRecord, other: RunRecord) -> str:
    """Return the score in percent over the samples that the other run has too, with how many of the
    run's samples have no grade."""
    shared = [value for item, value in record.values.items() if item in other.values]
    score = record.score if len(shared) == len(record.values) else accuracy.mean_score(shared)
    return f"{percent(score)}{f' ({record.ungraded})' if record.ungraded else ''}"


def metric_lines(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield every metric over the samples that all runs share, with its ratio to the first
    run's."""
    shared, measured = shared_ids(records), shared_metrics(records)
    first, *others = titles(records)
    rows = [("metric", first, *others, *(f"{first}/{other}" for other in others))]
    for name in measured[0]:
        own, *rest = values = [metrics[name] for metrics in measured]
        if values.count(None) == len(values):
            continue
        ratios = (own / value if own is not None and value else None for value in rest)
        rows.append((name, *(number(value, 3) for value in values), *map(number, ratios)))
    yield f"metrics over {len(shared)} shared samples"
    yield from align(rows)


def shared_ids(records: Sequence[RunRecord]) -> set[str]:
    """Return ids of the samples that all runs have."""
    return set.intersection(*(set(record.columns["id"]) for record in records))


def shared_metrics(records: Sequence[RunRecord]) -> list[dict[str, float | None]]:
    """Return all metrics of each run, over the samples that all runs share."""
    shared = shared_ids(records)
    chosen = ([name in shared for name in record.columns["id"]] for record in records)
    return [measure_all(record.samples[mask]) for record, mask in zip(records, chosen, strict=True)]


# --- tables --------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Table:
    """A paper's table, filled from stored runs."""

    built: BuiltTable
    """The table, cell by cell."""

    def to_pandas(self) -> DataFrame:
        """Return a row per cell: its facets, metric, state, measured and reported value, and
        runs."""
        import pandas as pd

        return pd.read_csv(io.StringIO(as_csv(self.built)), **ONLY_EMPTY)

    def __repr__(self) -> str:
        counts = ", ".join(f"{n} {status}" for status, n in self.built.status_counts().items())
        return f"Table({self.built.table.name}, {len(self.built.cells)} cells: {counts})"

    def _repr_html_(self) -> str:
        """Return the table as its page shows it, in a frame, so that its style stays there."""
        page = escape(render(self.built)["html"])
        return f'<iframe srcdoc="{page}" width="100%" height="{FRAME_HEIGHT}"></iframe>'


def table(name: str, *, profile: str = EMBEDDED, results: str | Path | None = None) -> Table:
    """Return a table of a paper ("lopa/table4") from stored runs; nothing is run.

    profile: "embedded" for the models and tasks that ship, "paper" for the published ones.
    """
    paper, store = load_table(str(name)), open_store(results)
    return Table(build(*planned_table(paper, profile, store), measured_runs(store)))


def planned_table(paper: PaperTable, profile: str, store: Store) -> PlannedTable:
    """Plan a table with the named profile."""
    with SettingsCache(store.root.parent, compose) as settings:
        [planned] = Planner.cached(settings, store).common([paper], load_profile(str(profile)))
    return planned


# --- figures, claims, the trade-off plot ---------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Picture:
    """A drawing and the numbers in it; notebooks display it."""

    title: str
    """One line that says what is drawn."""
    numbers: DataFrame
    """A row per point."""
    image: Callable[[str], bytes]
    """Returns the drawing as a file in one of the formats of `FORMS`."""

    def to_pandas(self) -> DataFrame:
        """Return a row per point."""
        return self.numbers

    def save(self, path: str | Path) -> Path:
        """Write the drawing; the path ends in .png or .svg."""
        form = Path(path).suffix.removeprefix(".")
        if form not in FORMS:
            raise DllmBenchError(
                f"A picture is saved as {' or '.join(FORMS)}, and {str(path)!r} ends in "
                f"{form or 'neither'}; name a file that ends in .png or .svg."
            )
        return write_atomic(Path(path), self.image(form))

    def __repr__(self) -> str:
        return f"Picture({self.title})"

    def _repr_html_(self) -> str:
        """Return the drawing at half its pixels, so that it is sharp."""
        text = b64encode(self.image("png")).decode()
        return f'<img style="max-width: 100%" width="860" src="data:image/png;base64,{text}">'


def figure(name: str, *, profile: str = EMBEDDED, results: str | Path | None = None) -> Picture:
    """Return a figure of a paper ("lopa/figure1") from stored runs; nothing is run.

    profile: "embedded" for the models and tasks that ship, "paper" for the published ones.
    """
    import pandas as pd

    # torch and matplotlib take seconds to import
    from dllm_bench.figures import draw, points

    drawn, store = load_figure(str(name)), open_store(results)
    planned = planned_table(drawn.table, profile, store)
    built = points.build_figure(drawn, planned.profile, planned.cells, store)
    numbers = pd.read_csv(io.StringIO(draw.as_csv(built)), **ONLY_EMPTY)
    return Picture(draw.headline(built), numbers, lambda form: draw.images(built)[form])


def verdicts(
    name: str = "all", *, profile: str = EMBEDDED, results: str | Path | None = None
) -> DataFrame:
    """Return the verdict of published claims from stored runs, a row each; nothing is run.

    name: a claim ("lopa/tpf_mbpp"), a paper, or "all". All claims are judged in any case, since p
    is corrected for all of them.
    """
    import pandas as pd

    shown, store = matching_names("claim", name), open_store(results)
    with SettingsCache(store.root.parent, compose) as settings:
        judged = judge_stored(load_profile(str(profile)), Planner.cached(settings, store))
    rows = [one.row for one in judged if one.claim.name in shown]
    return pd.DataFrame(rows, columns=list(ROW_HEADS)).set_index(ROW_HEADS[0])


def trade_off(
    model: str = "",
    benchmark: str = "",
    *,
    results: str | Path | None = None,
    speed: str = "tpf/emitted",
) -> Picture:
    """Return score against speed of the complete runs of a model on a benchmark, with the Pareto
    front.

    model, benchmark: names. Among the runs that fit, the largest group over the same items is
    drawn. speed: the metric of the x axis, such as "tps/e2e".

    Raises DllmBenchError if no complete run has both numbers.
    """
    store = open_store(results)
    definition(speed)  # raises for an unknown metric
    groups: dict[tuple[object, ...], list[plot.KnownRun]] = {}
    for record, reached, score in plot.known_runs(records_of(store, model, benchmark), speed):
        key = record.spec.model.name, record.spec.benchmark.name, frozenset(record.values)
        groups.setdefault(key, []).append((record, reached, score))
    if not groups:
        wanted = f"{model or 'any model'} on {benchmark or 'any benchmark'}"
        raise DllmBenchError(
            f"A trade-off plot was asked for, and no complete run of {wanted} below {store.root} "
            f"has a score and {speed}; make some, for example with `dllm-bench run -m "
            "model=tiny-llada decoder=vanilla,fast_dllm,credit benchmark=minigsm`."
        )
    largest = max(groups.values(), key=len)
    points = plot.points_of(largest)
    first = largest[0][0]
    title = f"{first.spec.model.name} on {first.spec.benchmark.name}, n = {len(first.values)}"
    numbers = points.sort_values("speed", ignore_index=True)
    return Picture(title, numbers, partial(plot.image, points, title, speed))


def records_of(store: Store, model: str, benchmark: str) -> list[RunRecord]:
    """Return the complete runs whose folders name a model and a benchmark; empty names mean any."""
    pattern = "/".join(slug(str(name)) if name else "*" for name in (benchmark, model))
    found = (read_record(one) for one in store.folders() if one.parent.match(pattern))
    return list(filter(None, found))
