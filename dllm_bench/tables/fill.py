"""Send the runs that a table or figure misses as SLURM jobs.

SLURM gets one array of the open runs that are not queued yet. A run whose filter, drafter or step
profile was not trained yet has no hash before that file exists. Then the training is submitted too,
and the run follows as a command once it succeeded. Which training makes a file follows from the
file's name, which `dllm-bench train` chooses.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import show
from dllm_bench.launch import slurm
from dllm_bench.launch.slurm import SlurmJobs
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.store import inputs
from dllm_bench.store.inputs import resolve_hardware
from dllm_bench.store.spec import digest
from dllm_bench.store.store import Store
from dllm_bench.tables.plan import TRAINED, CellState, PlannedRun, missing_trained_files

Job = Callable[[], None]
SIZES = {
    "filters": {"block": "--block", "layers": "--layers"},
    "drafters": {"block": "--slots", "layers": "--layers"},
}
SIZE = re.compile(r"-(block|layers)(\d+)")


def submit(
    runs: Sequence[PlannedRun], store: Store, settings: Sequence[str], wait: bool
) -> list[str]:
    """Submit the open runs to SLURM; with `wait`, an error message for each job that failed."""
    for line in send(runs, store, settings):
        show(line)
    hashes = {run.spec.identity_hash for run in runs if run.open and run.spec}
    return slurm.wait_for_jobs(store, hashes) if wait else []


def send(
    runs: Sequence[PlannedRun], store: Store, changes: Sequence[str], deps: Dependencies = REAL
) -> list[str]:
    """Submit the missing runs; return a line for each array and job.

    changes: settings of the launcher, "name=value".
    """
    active = slurm.answered_jobs(store)
    specs = {run.folder: run.spec for run in runs if run.open and run.spec}
    new = {f: spec for f, spec in specs.items() if not active.is_active(spec.identity_hash)}
    groups = defaultdict[str, dict[str, slurm.SlurmRun]](dict)  # by cores and devices
    for folder, spec in new.items():
        groups[digest(slurm.resources(spec.hardware))][folder] = slurm.SlurmRun(spec, store, deps)
    lines = []
    for jobs in groups.values():
        hardware = next(iter(jobs.values())).spec.hardware
        sent = slurm.submit(jobs, store=store, hardware=hardware, changes=changes)
        job = str(sent[0].job_id).partition("_")[0]
        lines.append(f"submitted {len(sent)} runs as one array, job {job}")
    lines += _submit_with_training(_untrained(runs), store, changes, active)
    left = len(specs) - len(new)
    lines += [f"{left} runs are queued or running since before"] if left else []
    return [*lines, "`dllm-bench status` follows them"] if lines else ["nothing to submit"]


def _untrained(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Return the runs that lack only files that `dllm-bench train` makes."""
    unavailable = (run for run in runs if run.state is CellState.UNAVAILABLE)
    return [run for run in unavailable if missing_trained_files([run]) and _has_weights(run)]


def _has_weights(run: PlannedRun) -> bool:
    try:
        inputs.model_hashes(inputs.model_here(run.config))
    except DllmBenchError:
        return False
    return True


def _submit_with_training(
    runs: Sequence[PlannedRun], store: Store, changes: Sequence[str], active: SlurmJobs
) -> list[str]:
    """Submit the training, and the runs that read its files, which start once it has succeeded."""
    made: dict[str, str] = {}  # file -> job that trains it
    lines = []
    for run in runs:
        command = ("run", *run.query, "--results", str(store.root.parent))
        trainings = {source: training(source, run) for source in missing_trained_files([run])}
        if active.is_active(shlex.join(command)) or not all(trainings.values()):
            continue
        for source, arguments in trainings.items():
            words = shlex.join(arguments or ())
            if active.is_active(words):
                made[source] = active.tickets[words].job
            elif source not in made and arguments:
                made[source] = _submit_command(arguments, run, store, changes, ())
                lines.append(f"submitted job {made[source]}: dllm-bench {words}")
        after = [made[source] for source in trainings]
        job = _submit_command(command, run, store, changes, after)
        lines.append(f"submitted job {job}, after {', '.join(after)}: {run.command}")
    return lines


def _submit_command(
    arguments: tuple[str, ...],
    run: PlannedRun,
    store: Store,
    changes: Sequence[str],
    after: Sequence[str],
) -> str:
    """Submit one command on the run's hardware, after some jobs; returns its job id."""
    jobs: dict[str, Job] = {shlex.join(arguments): slurm.SlurmCommand(arguments)}
    hardware = resolve_hardware(run.config.hardware)
    sent = slurm.submit(jobs, store=store, hardware=hardware, changes=changes, after=after)
    return str(sent[0].job_id)


def training(source: str, run: PlannedRun) -> tuple[str, ...] | None:
    """Return the arguments of `dllm-bench` that make the file `source` for the run's model; None if
    `train` does not use such a name.
    """
    model = run.config.model.name
    kind, _, name = source.removeprefix(TRAINED).partition("/")
    stem = name.removesuffix(".json")
    if not stem.startswith(f"{model}-"):
        return None
    rest = stem.removeprefix(model)
    if kind == "sps":
        return ("train", "sps", model, f"hardware={rest[1:]}", "--out", source)
    if kind not in SIZES:
        return None
    sizes = [part for word, n in SIZE.findall(rest) for part in (SIZES[kind][word], n)]
    named = (SIZE.sub("", rest)[1:],) if kind == "drafters" else ()
    return ("train", kind[:-1], model, *named, *sizes, "--out", source)
