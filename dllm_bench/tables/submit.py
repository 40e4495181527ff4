"""What a table misses, sent to SLURM: one array of exactly the runs that are open and not queued.

A run whose filter, drafter or step profile nobody trained yet has no identity before that is there:
the training is sent too, and the run follows as a command once it succeeded. Which training makes a
file is read from its name, as `dllm-bench train` gives it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.launch import slurm
from dllm_bench.launch.slurm import SlurmJobs
from dllm_bench.run.dependencies import REAL, Dependencies
from dllm_bench.store import inputs
from dllm_bench.store.spec import digest
from dllm_bench.store.store import Store
from dllm_bench.tables.plan import TRAINED, CellState, PlannedRun, missing_trained_files

SIZES = {
    "filters": {"block": "--block", "layers": "--layers"},
    "drafters": {"block": "--slots", "layers": "--layers"},
}
SIZE = re.compile(r"-(block|layers)(\d+)")


def send(
    runs: Sequence[PlannedRun],
    store: Store,
    changes: Sequence[str],
    deps: Dependencies = REAL,
) -> list[str]:
    """Send what is missing; what was sent, one fact a line."""
    going = SlurmJobs.of(store)
    direct = {run.folder: run for run in runs if run.open and run.spec}
    fresh = {
        f: r for f, r in direct.items() if r.spec and not going.is_active(r.spec.identity_hash)
    }
    lines = []
    for group in _alike(fresh.values()):
        jobs: dict[str, Callable[[], None]] = {
            r.folder: slurm.SlurmRun(r.spec, store, deps) for r in group if r.spec
        }
        sent = slurm.submit(jobs, store=store, hardware=_hardware(group), changes=changes)
        lines.append(f"submitted {len(sent)} runs as one array, {_name(sent[0])}")
    lines += _send_trained(_untrained(runs), store, changes, going)
    left = len(direct) - len(fresh)
    lines += [f"{left} runs are queued or running since before"] if left else []
    return [*lines, "`dllm-bench status` follows them"] if lines else ["nothing to submit"]


def _name(job: Any) -> str:
    return f"job {str(job.job_id).partition('_')[0]}"


def _alike(runs: Iterable[PlannedRun]) -> list[list[PlannedRun]]:
    """Runs that take the same cores and devices: those of a table are alike, as a rule."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(digest(slurm.resources(_hardware([run]))), []).append(run)
    return list(groups.values())


def _hardware(runs: Sequence[PlannedRun]) -> dict[str, Any]:
    spec, config = runs[0].spec, runs[0].config
    return spec.hardware if spec else inputs.resolve_hardware(config["hardware"])


def _untrained(runs: Iterable[PlannedRun]) -> list[PlannedRun]:
    """Runs that lack nothing but what `train` makes."""
    return [
        run
        for run in runs
        if run.state is CellState.UNAVAILABLE and missing_trained_files([run]) and _has_weights(run)
    ]


def _has_weights(run: PlannedRun) -> bool:
    try:
        hardware = inputs.resolve_hardware(run.config["hardware"])
        inputs.model_hashes(inputs.resolve_model(run.config["model"], hardware))
    except DllmBenchError:
        return False
    return True


def _send_trained(
    runs: Sequence[PlannedRun], store: Store, changes: Sequence[str], going: SlurmJobs
) -> list[str]:
    """Training first, then the runs that read what it makes, as soon as it succeeded."""
    results = str(Path(store.root).parent)
    made: dict[str, str] = {}  # what is trained -> the job that does
    lines = []
    for run in runs:
        command = ("run", *run.query, f"paths.results={results}")
        trainings = {source: training(source, run) for source in missing_trained_files([run])}
        if going.is_active(shlex.join(command)) or not all(trainings.values()):
            continue
        for source, arguments in trainings.items():
            words = shlex.join(arguments or ())
            if going.is_active(words):
                made[source] = going.tickets[words].job
            elif source not in made and arguments:
                made[source] = _send_one(arguments, run, store, changes, ())
                lines.append(f"submitted job {made[source]}: dllm-bench {words}")
        after = [made[source] for source in trainings]
        job = _send_one(command, run, store, changes, after)
        lines.append(f"submitted job {job}, after {', '.join(after)}: {run.command}")
    return lines


def _send_one(
    arguments: tuple[str, ...],
    run: PlannedRun,
    store: Store,
    changes: Sequence[str],
    after: Sequence[str],
) -> str:
    """Send one command on the run's hardware; its job."""
    jobs: dict[str, Callable[[], None]] = {shlex.join(arguments): slurm.SlurmCommand(arguments)}
    hardware = _hardware([run])
    sent = slurm.submit(jobs, store=store, hardware=hardware, changes=changes, after=after)
    return str(sent[0].job_id)


def training(source: str, run: PlannedRun) -> tuple[str, ...] | None:
    """Arguments of `dllm-bench` that make `source` for the run's model; None for a strange name."""
    model = str(run.config["model"]["name"])
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
    drafter = SIZE.sub("", rest)[1:]
    named = (drafter,) if kind == "drafters" else ()
    return ("train", kind[:-1], model, *named, *sizes, "--out", source)
