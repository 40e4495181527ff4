"""One run: in this process, or on as many local processes as its hardware says."""

from __future__ import annotations

from dllm_bench.registry import instantiate
from dllm_bench.runs import batched, cache_error, runner, served
from dllm_bench.runs.dependencies import REAL, Dependencies
from dllm_bench.runs.observers import Observer, ObserverGroup
from dllm_bench.runs.runner import RunSession
from dllm_bench.store.record import RunRecord
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import Store


def run(
    spec: RunSpec,
    *,
    store: Store,
    logger: Observer | None = None,
    progress: Observer | None = None,
    deps: Dependencies = REAL,
) -> RunRecord:
    """Return the record of `spec`: read if it is sealed, else the run is made.

    logger: the one of the run's configuration by default.
    """
    session = session_class(spec)
    check(spec)
    logger = logger or make_logger(spec)
    if spec.hardware.several and store.record(spec) is None:
        from dllm_bench.launch.processes import run_on_processes  # imports torch.distributed

        return run_on_processes(spec, store, ObserverGroup([logger, progress]), deps, session)
    return runner.run(
        spec, store=store, logger=logger, progress=progress, deps=deps, session=session
    )


def check(spec: RunSpec) -> None:
    """Refuse settings that do not go together, before anything is loaded."""
    if spec.measure_kl:
        cache_error.check(spec)
    if session_class(spec) is batched.BatchedRunSession:
        batched.check(spec)


def session_class(spec: RunSpec) -> type[RunSession]:
    """Return the session class of a run: one request at a time, with measured cache error, in
    batches, or by a server."""
    if spec.measure_kl:
        return cache_error.MeasuredRunSession
    if spec.model.is_served:
        return served.ServedRunSession
    return batched.BatchedRunSession if spec.batch != 1 else RunSession


def make_logger(spec: RunSpec) -> Observer | None:
    """Return the logger of the run's configuration."""
    plain = spec.runtime.logger
    logger: Observer | None = instantiate(plain, "logger") if plain else None
    return logger
