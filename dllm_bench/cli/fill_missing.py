"""Make the runs that a table or figure misses: here, or as SLURM jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dllm_bench.cli.common import print_lines
from dllm_bench.launch import slurm
from dllm_bench.launch.run_many import run_all
from dllm_bench.runs.progress import ManyRunsProgress
from dllm_bench.store.store import Store
from dllm_bench.tables.plan import PlannedRun
from dllm_bench.tables.submit import send


def run_here(
    runs: Sequence[PlannedRun],
    store: Store,
    jobs: int,
    stages: Sequence[int] = (),
    after: Callable[[int], None] = lambda items: None,
) -> list[str]:
    """Make the open runs on this machine, `jobs` at a time; gives the errors of failed runs.

    stages, after: see `run_all`.
    """
    specs = [run.spec for run in runs if run.open and run.spec]
    outcomes = run_all(specs, store=store, jobs=jobs, stages=stages, after=after)
    return [f"{outcome.spec.folder}: {outcome.error}" for outcome in outcomes if outcome.error]


def submit(
    runs: Sequence[PlannedRun], store: Store, settings: Sequence[str], wait: bool
) -> list[str]:
    """Submit the open runs to SLURM; with `wait`, an error message for each job that failed."""
    print_lines(send(runs, store, settings))
    hashes = {run.spec.identity_hash for run in runs if run.open and run.spec}
    return slurm.wait_for_jobs(store, ManyRunsProgress(0), hashes) if wait else []
