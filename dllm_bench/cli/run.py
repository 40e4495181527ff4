"""`dllm-bench run`: run one decoder on one benchmark with one model; with -m, several such runs.

Hydra composes the settings, `compose.check` refuses what cannot work before large packages are
imported, then the run is made, or looked up if it is already complete.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from dllm_bench.api import compose
from dllm_bench.cli.common import print_failures, print_lines
from dllm_bench.cli.main import AS_SETTINGS, ESTIMATE, FLAGS, MULTIRUN
from dllm_bench.core.benchmark import JUDGE_ERROR
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show_error
from dllm_bench.runs.progress import RunProgress, headline, summary
from dllm_bench.site.texts import align, looked_up, number, percent
from dllm_bench.store.groups import RunConfig
from dllm_bench.store.inputs import memory_bytes, model_here, model_spec, resolve_hardware
from dllm_bench.store.lock import BusyError
from dllm_bench.store.record import SHOWN_METRICS, RunRecord
from dllm_bench.store.seal import first_items
from dllm_bench.store.spec import RunSpec, differing_settings
from dllm_bench.store.store import Store

_failed: list[str] = []  # error messages of failed jobs of a multirun in this process
_made: list[RunRecord] = []  # records of a multirun in this process
_busy: list[RunConfig] = []  # configurations of a multirun that other processes run
_for_slurm: list[RunConfig] = []  # configurations of a multirun that are sent to SLURM


def run(arguments: Sequence[str]) -> int:
    """Make the runs that the overrides describe; return 2 if any of them failed."""
    task = print_estimate if ESTIMATE in arguments else run_job
    arguments = with_flags_as_settings(one for one in arguments if one != ESTIMATE)
    check_flags(arguments)
    for jobs in (_failed, _made, _busy, _for_slurm):
        jobs.clear()
    several, slurm_changes = bool({*MULTIRUN} & {*arguments}), None
    if several and task is run_job:
        arguments, slurm_changes = compose.split_slurm_settings(arguments)
        task = run_job if slurm_changes is None else collect_job
    compose.hydra_app(arguments, task)
    if _for_slurm:
        make_with_slurm(slurm_changes or [])
    wait_for_busy(several)
    if len(_made) > 1:
        print_lines(["", *overview(_made)])
    return 2 if print_failures(_failed) else 0


def run_job(cfg: Any) -> None:
    """Run one configuration of Hydra; in a local multirun a failure does not stop the others."""
    compose.check_launcher()
    local = compose.runs_in_this_process()
    try:
        config = compose.composed_job(cfg)
        compose.check(config)
        measure(config, compose.is_multirun())
    except BusyError as error:
        _busy.append(config)
        show_error(f"postponed: {error.owner} is making this run")
        if not local:  # this process makes no other run
            wait_for_busy(several=True)
            if _failed:
                raise DllmBenchError(_failed.pop()) from error
    except DllmBenchError as error:
        if not local:
            raise
        _failed.append(str(error))


def collect_job(cfg: Any) -> None:
    """Keep one configuration from Hydra for SLURM; a mistake in it does not stop the others."""
    try:
        config = compose.composed_job(cfg)
        compose.check(config)
        _for_slurm.append(config)
    except DllmBenchError as error:
        _failed.append(str(error))


def make_with_slurm(changes: Sequence[str]) -> None:
    """Send the collected runs as SLURM jobs, wait for them, and print a line about each.

    changes: settings of the launcher, NAME=VALUE. Runs that differ only in `limit` share a folder,
    so only the one with most items is made.
    """
    # the jobs are sent with submitit, which takes a second to import
    from dllm_bench.tables.fill import submit
    from dllm_bench.tables.plan import look_up

    if any(config.hardware.name == "auto" for config in _for_slurm):
        show_error("hardware=auto means this machine's; choose hardware=… where the nodes differ")
    store = Store.in_results(_for_slurm[0].paths.results)
    specs = [RunSpec.from_config(config) for config in _for_slurm]
    before = [look_up((), spec, store).record for spec in specs]
    by_items = sorted(specs, key=lambda spec: spec.limit or math.inf)
    runs = {spec.folder: look_up((), spec, store) for spec in by_items}
    _failed.extend(submit(list(runs.values()), store, changes, wait=True))
    for spec, known in zip(specs, before, strict=True):
        if record := look_up((), spec, store).record:
            show_record(record, known, store, brief=True)


def wait_for_busy(several: bool) -> None:
    """Wait for the runs that other processes are making; make those here that are not sealed
    afterwards.

    several: whether they belong to a multirun.
    """
    while _busy:
        config = _busy.pop(0)
        try:
            spec, store = RunSpec.from_config(config), Store.in_results(config.paths.results)
            store.wait_for(spec, lambda folder, text: show_error(f"{folder}: {text}"))
            measure(config, several)
        except BusyError:
            _busy.append(config)
        except DllmBenchError as error:
            _failed.append(str(error))


def measure(config: RunConfig, brief: bool) -> None:
    """Make the run of a composed configuration, or look it up, and print its metrics.

    brief: print one line, as in a multirun.
    """
    # torch takes seconds to import: only after `check`, so that a mistake is reported at once
    from dllm_bench.launch.local import run as run_spec
    from dllm_bench.runs import rescore

    spec = RunSpec.from_config(config)
    store = Store.in_results(config.paths.results)
    known = store.record(spec)
    record = run_spec(spec, store=store, progress=RunProgress(ends_with_line=not brief))
    if config.retry_errors and JUDGE_ERROR in record.verdicts:
        entry = store.find(spec.identity_hash)
        record = first_items(rescore.rescore(entry, dict(spec.benchmark)).record, spec.limit)
    show_record(record, known, store, brief)


def show_record(record: RunRecord, known: RunRecord | None, store: Store, brief: bool) -> None:
    """Print a run's metrics and keep its record for the overview.

    known: the run's record from before this command, if any; brief: print one line.
    """
    made = [f"nothing was decoded, {looked_up([known])}"] if known else []
    if brief:
        parts = [headline(record), *made, *(f"warning: {text}" for text in record.warnings)]
        print_lines([f"{record.spec.folder}: {' · '.join(parts)}"])
    else:
        print_lines([*summary(record), *made, f"stored in {store.path(record.spec)}"])
    _made.append(record)


def overview(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yield the runs of a multirun as a table with a line each: names, score, metrics, settings."""
    apart = differing_settings(record.spec for record in records)
    rows = []
    for record in records:
        spec, score = record.spec, record.score
        names = (spec.benchmark.name, spec.model.name, spec.label)
        mean = f"{percent(score)} {record.ungraded}".strip() if score else "–"
        metrics = (number(record.summary.get(name)) for name in SHOWN_METRICS)
        rows.append((spec.short, *names, mean, *metrics, apart[spec.short]))
    head = ("run", "benchmark", "model", "decoder", "score", *SHOWN_METRICS, "settings")
    yield from align([head, *rows])


def print_estimate(cfg: Any) -> None:
    """Print the estimated cost of one configuration from Hydra, with -m after its overrides;
    nothing is run or loaded."""
    print_lines([*compose.job_heading(), *estimate_lines(compose.composed_job(cfg))])


def estimate_lines(config: RunConfig) -> Iterator[str]:
    """Yield the estimated time, forwards, disk space and memory of a run, from sealed runs and the
    weights' headers."""
    # torch takes seconds to import: only where an estimate is wanted
    from dllm_bench.models.load import inspect_checkpoint
    from dllm_bench.tables import cost
    from dllm_bench.tables.plan import CellState, PlannedRun

    hardware = resolve_hardware(config.hardware)
    here = RunConfig({**config, "hardware": dict(hardware)})
    measured = cost.measured_runs(Store.in_results(config.paths.results))
    run_here = PlannedRun((), CellState.MISSING, config=here)
    yield f"cost: {cost.cost_in_words([cost.CostModel([], measured).estimate(run_here)])}"
    if config.model.is_served:
        return
    try:
        model = inspect_checkpoint(model_spec(model_here(config)))
    except DllmBenchError as error:
        yield f"memory: unknown. {error}"
        return
    branches = cost.summary_of(config.decoder).branches
    positions = config.batch * branches * config.benchmark.max_new_tokens
    sizes = (model.weight_bytes, model.cache_bytes(positions), memory_bytes(hardware.device))
    weights, cache, here_in_all = map(cost.size_in_words, sizes)
    yield (
        f"memory: weights {weights}, keys and values of {positions} new positions {cache}; "
        f"{hardware.device} has {here_in_all}"
    )


def with_flags_as_settings(arguments: Iterable[str]) -> list[str]:
    """Return the arguments with the flags of `AS_SETTINGS` written as settings. The name of a
    folder is quoted, since Hydra would read `20260102` as a number and a comma as a list.
    """
    settings, rest = [], iter(arguments)
    for argument in rest:
        flag, joined, value = argument.partition("=")
        setting = AS_SETTINGS.get(flag, argument)
        takes_value = flag in AS_SETTINGS and "=" not in setting
        value = value if joined else next(rest, "") if takes_value else ""
        text = compose.as_override(setting, value) if flag == "--results" else f"{setting}={value}"
        settings.append(text if takes_value else setting)
    return settings


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that `run` does not have, Hydra's `--hydra-…` flags among them, and flags that
    exclude each other."""
    for argument in arguments:
        if argument.startswith("-") and argument not in FLAGS:
            raise DllmBenchError(
                f"run has no flag {argument!r}; settings are written name=value, "
                "see `dllm-bench run --help`."
            )
    prints = {"-c", "--cfg", "-i", "--info"} & {*arguments}
    if prints and {*MULTIRUN} & {*arguments}:
        raise DllmBenchError(
            f"{min(prints)} prints one configuration and -m makes several runs; leave one of them "
            "out."
        )
