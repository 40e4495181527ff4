"""`dllm-bench run`: one decoder on one benchmark with one model; with -m, several such runs.

Hydra composes the settings (`api.compose`), `preflight` refuses what cannot work before anything
heavy is imported, then the run is made, or looked up if it is complete already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dllm_bench.api.compose import (
    GROUPS,
    MULTIRUN,
    check_launcher,
    composed_job,
    hydra_app,
    runs_in_this_process,
)
from dllm_bench.api.preflight import check
from dllm_bench.cli.common import print_failures, print_lines
from dllm_bench.core.benchmark import JUDGE_ERROR
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show_error
from dllm_bench.paths import options
from dllm_bench.registry import instantiate
from dllm_bench.runs.progress import RunProgress, summary
from dllm_bench.site.format import LISTED_METRICS, align, looked_up, number, percent
from dllm_bench.store.differences import differing_settings
from dllm_bench.store.files import results_directory
from dllm_bench.store.hardware import memory_bytes, resolve_hardware
from dllm_bench.store.inputs import is_served, model_spec, resolve_model
from dllm_bench.store.lock import BusyError
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store

FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
ESTIMATE = "--estimate"
HELP = """\
usage: dllm-bench run [-m] [--cfg job] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Run one decoder on one benchmark with one model. A finished run is not repeated, an interrupted one
continues where it stopped.

  dllm-bench run model=tiny-llada benchmark=minigsm decoder=fast_dllm limit=50
  dllm-bench run -m decoder=fast_dllm,credit decoder.select.tau=0.7,0.9      every combination
  dllm-bench run decoder=fast_dllm decoder.select.tau=0.7
  dllm-bench run decoder=dspark decoder@baseline=ar_speculative
                                    both on every request: speed-up, and whether the texts are equal
  dllm-bench run +experiment=first_run                       settings of conf/experiment, or yours
  dllm-bench run --cfg job decoder=lopa                      print the settings, run nothing
  dllm-bench run --estimate model=llada-instruct             time, forwards and memory, run nothing
  dllm-bench run benchmark=minicode --retry-errors           grade again what could not be graded
  dllm-bench run benchmark=minicode --max-judge-errors 3     seal if at most 3 cannot be graded

settings: seed, limit, batch (requests in one forward), measure_kl (the error of a cache), and
everything `--cfg job` prints
choices:
"""

_failed: list[str] = []  # sentences about the failed jobs of a multirun in this process
_made: list[RunRecord] = []  # of a multirun in this process
_busy: list[Mapping[str, Any]] = []  # configurations of a multirun that other processes run


def run(arguments: Sequence[str]) -> int:
    """Run what the overrides describe; 2 if any of the runs failed."""
    if {"-h", "--help"} & set(arguments):
        return print_lines([HELP + "\n".join(choices_lines())])
    task = print_estimate if ESTIMATE in arguments else run_job
    arguments = with_flags_as_settings(one for one in arguments if one != ESTIMATE)
    check_flags(arguments)
    _failed.clear()
    _made.clear()
    _busy.clear()
    hydra_app(arguments, task)
    wait_for_busy()
    if len(_made) > 1:
        print_lines(["", *overview(_made)])
    return 2 if print_failures(_failed) else 0


def run_job(cfg: Any) -> None:
    """Run one configuration of Hydra; in a local multirun a failure does not stop the others."""
    check_launcher()
    local = runs_in_this_process()
    try:
        job = composed_job(cfg)
        check(job.config, job.reads_data)
        measure(job.config)
    except BusyError as error:
        _busy.append(job.config)
        show_error(f"left for later, being made by {error.owner}")
        if not local:  # this process makes no other run
            wait_for_busy()
            if _failed:
                raise DllmBenchError(_failed.pop()) from error
    except DllmBenchError as error:
        if not local:
            raise
        _failed.append(str(error))


def wait_for_busy() -> None:
    """Wait for the runs that other processes make; one that is then not sealed is made here."""
    while _busy:
        config = _busy.pop(0)
        try:
            spec, store = RunSpec.from_config(config), store_of(config)
            store.wait_for(spec, partial(show_state, spec.folder))
            measure(config)
        except BusyError:
            _busy.append(config)
        except DllmBenchError as error:
            _failed.append(str(error))


def show_state(folder: str, text: str) -> None:
    """Print how far a run is that another process makes."""
    show_error(f"{folder}: {text}")


def store_of(config: Mapping[str, Any]) -> Store:
    """The store of a composed configuration."""
    return Store(results_directory(config["paths"]["results"]) / "runs")


def measure(config: Mapping[str, Any]) -> None:
    """Make (or look up) the run of a composed configuration and print what it measured."""
    # torch takes seconds to import: only after `check`, so that a mistake is reported at once
    from dllm_bench.launch.run_one import run as run_spec
    from dllm_bench.runs import rescore

    spec = RunSpec.from_config(config)
    store = store_of(config)
    logger = instantiate(config["logger"], "logger")
    known = store.record(spec)
    record = run_spec(spec, store=store, logger=logger, progress=RunProgress())
    if config["retry_errors"] and JUDGE_ERROR in record.verdicts:
        entry = store.find(spec.identity_hash)
        record = rescore.rescore(entry, spec.benchmark).record
    made = f"nothing was decoded, {looked_up([known])}" if known else ""
    print_lines([*summary(record), *filter(None, [made]), f"stored in {store.path(spec)}"])
    _made.append(record)


def overview(records: Sequence[RunRecord]) -> Iterator[str]:
    """The runs of a multirun as a table, a line each: what it is, score, metrics, settings."""
    apart = differing_settings(record.spec for record in records)
    rows = []
    for record in records:
        spec, score = record.spec, record.score
        names = (str(spec.benchmark["name"]), str(spec.model["name"]), spec.label)
        mean = f"{percent(score)} {record.ungraded}".strip() if score else "–"
        metrics = (number(record.summary.get(name)) for name in LISTED_METRICS)
        rows.append((spec.short, *names, mean, *metrics, apart[spec.short]))
    head = ("run", "benchmark", "model", "decoder", "score", *LISTED_METRICS, "settings")
    yield from align([head, *rows])


def print_estimate(cfg: Any) -> None:
    """Print what one configuration of Hydra will cost; nothing is run or loaded."""
    print_lines(estimate_lines(composed_job(cfg).config))


def estimate_lines(config: Mapping[str, Any]) -> Iterator[str]:
    """Time, forwards, disk and memory of a run, from sealed runs and the weights' headers."""
    # torch takes seconds to import: only where an estimate is wanted
    from dllm_bench.models.load import inspect_checkpoint
    from dllm_bench.tables import cost
    from dllm_bench.tables.plan import CellState, PlannedRun

    hardware = resolve_hardware(config["hardware"])
    here = {**config, "hardware": hardware}
    measured = cost.measured_runs(store_of(config))
    run_here = PlannedRun((), CellState.MISSING, config=here)
    yield f"cost: {cost.cost_in_words([cost.CostModel([], measured).estimate(run_here)])}"
    if is_served(config["model"]):
        return
    try:
        model = inspect_checkpoint(model_spec(resolve_model(config["model"], hardware)))
    except DllmBenchError as error:
        yield f"memory: unknown. {error}"
        return
    branches = cost.summary_of(config["decoder"]).branches
    positions = config["batch"] * branches * int(config["benchmark"]["max_new_tokens"])
    sizes = (model.weight_bytes, model.cache_bytes(positions), memory_bytes(hardware["device"]))
    weights, cache, here_in_all = map(cost.size_in_words, sizes)
    yield (
        f"memory: weights {weights}, keys and values of {positions} new positions {cache}; "
        f"{hardware['device']} has {here_in_all}"
    )


def with_flags_as_settings(arguments: Iterable[str]) -> list[str]:
    """The arguments with `--retry-errors` and `--max-judge-errors N` written as settings."""
    settings, rest = [], iter(arguments)
    for argument in rest:
        if argument == "--retry-errors":
            argument = "retry_errors=true"
        elif argument == "--max-judge-errors":
            argument = f"max_judge_errors={next(rest, '')}"
        settings.append(argument)
    return settings


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that `run` does not have; Hydra's `--hydra-…` flags are among them."""
    for argument in arguments:
        if argument.startswith("-") and argument not in FLAGS:
            raise DllmBenchError(
                f"run has no flag {argument!r}; settings are written name=value, "
                "see `dllm-bench run --help`."
            )


def choices_lines() -> Iterator[str]:
    """One line per configuration group."""
    for group in GROUPS:
        yield f"  {group + '=':17}{' · '.join(options(group))}"
    yield f"  {'+experiment=':17}{' · '.join(options('experiment'))}"
