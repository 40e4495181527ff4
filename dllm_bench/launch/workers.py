"""Supervise local worker processes: start them, pass messages on, detect deaths, end them.

Both kinds of local parallelism use it: several runs over worker processes (`local`) and one run on
several processes (`processes`). Workers ignore Ctrl-C, because their parent decides, and end when
the parent dies: a surviving worker would hold the lock of its run.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from dllm_bench.core.errors import DllmBenchError

GRACE_S = 2.0  # a worker that was told to end is killed after this time
START_TRIES = 3  # if the process that workers are forked from was killed, the next starts it anew
START_PAUSE_S = 0.5  # until the system knows that it has ended
PRELOAD = ["dllm_bench.launch.local", "dllm_bench.parallel", "transformers.modeling_utils"]
"""Imported once, by the process that all workers are forked from."""


@dataclass(frozen=True)
class Failed:
    """A worker's work raised an exception."""

    text: str  # the sentence of a DllmBenchError, else the exception's type and message
    refused: bool  # whether it was a DllmBenchError


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended."""

    exit_code: int | None  # 0: its work is done; below 0: the signal that killed it


@dataclass(eq=False)
class Worker:
    """A started process, as its parent sees it."""

    process: BaseProcess
    pipe: Connection
    """To the process and back, closed once the process has ended; a worker that waits for a message
    ends by itself when it is closed."""


@dataclass
class Workers:
    """The worker processes of this process; all are ended when the `with` block is left."""

    started: list[Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.listening:
            worker.process.terminate()
        for worker in self.started:
            worker.process.join(GRACE_S)
            worker.process.kill()
            worker.process.join()

    @property
    def listening(self) -> list[Worker]:
        """The workers that have not ended and were not dismissed."""
        return [worker for worker in self.started if not worker.pipe.closed]

    def start(self, work: Callable[[Connection], None]) -> Worker:
        """Start a process that calls `work` (which must be picklable) with its end of the pipe.

        DllmBenchError if no process can be started.
        """
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        failure: Exception | None = None
        for _ in range(START_TRIES):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(work, theirs))
            try:
                process.start()
            except (EOFError, OSError) as error:
                ours.close()
                failure = error
                time.sleep(START_PAUSE_S)
            else:
                self.started.append(Worker(process, ours))
                return self.started[-1]
            finally:
                theirs.close()
        raise DllmBenchError(
            f"A worker process was to be started, and the process that forks workers ended or did "
            f"not answer in {START_TRIES} tries ({failure}); look for what ends processes here "
            "(often too little memory), or use fewer workers."
        )

    def messages(self, timeout_s: float | None = None) -> Iterator[tuple[Worker, Any]]:
        """Yield one message of each worker that sent any within the time; `Ended` if it has ended.

        timeout_s: None waits for the first message.
        """
        listening = self.listening
        for pipe in wait([worker.pipe for worker in listening], timeout_s):
            worker = next(worker for worker in listening if worker.pipe is pipe)
            try:
                message = worker.pipe.recv()
            except (EOFError, OSError):
                worker.pipe.close()
                worker.process.join()
                message = Ended(worker.process.exitcode)
            yield worker, message


def _serve(work: Callable[[Connection], None], pipe: Connection) -> None:
    """Do the work of a worker process, and report an exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    try:
        work(pipe)
    except DllmBenchError as error:
        pipe.send(Failed(str(error), refused=True))
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", refused=False))


def _die_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
