"""Real processes for tests of `parallel`: a job done by every process of a run, on the CPU.

`on_all_ranks` starts them, gives each its `RankGroup`, and returns the results of the job by rank.
A job and its result are sent between processes, so both are plain values of importable classes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dllm_bench.launch.workers import PRELOAD
from dllm_bench.parallel import ParallelLayout, RankGroup

PATIENCE_S = 120.0  # for a machine with much other work

Job = Callable[[RankGroup], Any]


def on_all_ranks(layout: ParallelLayout, job: Job, folder: Path) -> list[Any]:
    """Return the result of `job` in each process; the exception of one is raised here."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    started = []
    for rank in range(layout.processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(layout, rank, folder, job, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        answers = [pipe.recv() if pipe.poll(PATIENCE_S) else TimeoutError() for _, pipe in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


def _serve(layout: ParallelLayout, rank: int, folder: Path, job: Job, pipe: Connection) -> None:
    """Do the job in a new process and send its result."""
    torch.set_num_threads(1)
    try:
        answer: Any = job(RankGroup.join(layout, rank, folder / "meeting", "cpu"))
    except Exception as error:
        answer = error
    with suppress(BrokenPipeError):
        pipe.send(answer)
    dist.destroy_process_group()
