"""Runs in forked processes that are killed, starved of disk or robbed of their rights.

A forked process shares the loaded model with the tests. It never returns into the test.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Request
from dllm_bench.store.files import whole_lines
from dllm_bench.store.spec import RunSpec
from dllm_bench.store.store import SAMPLES, Store, read_samples
from tests.resume import fakes

WARMUPS = 2
REFUSED = 3
"""Exit code of a process that ended with a sentence."""
CHANGES = ("write", "pwrite", "ftruncate", "fsync")  # of `os`, on open files
NAMED = ("open", "os.rename", "os.remove", "os.mkdir")  # audited, on paths
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def fork(action: Callable[[], Any], words: Path | None = None) -> int:
    """Return the id of a process that does `action`; its refusal is written to `words`."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except DllmBenchError as error:
        code = REFUSED
        if words:
            words.write_text(str(error))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Exit code of a forked process, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class Logged:
    """A decoder that notes every request in a file that outlives the process."""

    decoder: Any
    log: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def generate(self, model: Any, request: Request) -> Generation:
        with open(self.log, "a") as file:
            file.write(f"{os.getpid()} {request.id}\n")
        generation: Generation = self.decoder.generate(model, request)
        return generation


def lives(log: Path, seen: int = 0) -> list[list[str]]:
    """Requests decoded in each process after the first `seen` calls, without those that warm up."""
    calls = fakes.calls(log)[seen:]
    processes = dict.fromkeys(process for process, _ in calls)
    return [[key for p, key in calls if p == process][WARMUPS:] for process in processes]


@dataclass
class Books:
    """What is stored and what was decoded, before and after every life of a run."""

    store: Store
    spec: RunSpec
    log: Path

    @property
    def folder(self) -> Path:
        return self.store.path(self.spec)

    def stored(self) -> set[str]:
        return set(read_samples(self.folder))

    def live(self, life: Callable[[], Any], kill_after_s: float | None = None) -> int:
        """Return one life in a process of its own, which may be cut short; its exit code."""
        with self.balanced():
            pid = fork(life)
            if kill_after_s is not None:
                time.sleep(kill_after_s)
                os.kill(pid, signal.SIGKILL)
            code = ended(pid)
        assert code in (0, -signal.SIGKILL)
        return code

    @contextmanager
    def balanced(self) -> Iterator[None]:
        """Check that nothing is lost by what happens inside, and nothing done again."""
        path, seen = self.folder / SAMPLES, len(fakes.calls(self.log))
        before, lines = self.stored(), whole_lines(path)
        yield
        after, mine = self.stored(), lives(self.log, seen)
        decoded = [key for keys in mine for key in keys]
        finished = {key for keys in mine for key in keys[:-1]}
        assert len(decoded) == len(set(decoded)), "decoded twice in one life"
        assert not before & set(decoded), "a stored sample was decoded again"
        assert before | finished <= after, "a finished sample was lost"
        assert after <= before | set(decoded), "a sample from nowhere"
        assert whole_lines(path)[: len(lines)] == lines, "a stored sample was changed"


def die_at_change(n: int, root: Path, life: Callable[[], Any]) -> None:
    """Do `life`, but kill this process at its n-th change of the disk below `root`; a write is torn
    in the middle. For forked processes: hooks stay until the process ends."""
    left = [n]

    def change() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def torn(descriptor: int, data: Any) -> int:
        done = written(descriptor, bytes(data)[: len(data) // 2])
        change()
        return done + written(descriptor, bytes(data)[done:])

    def changing(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            change()
            return function(*args)

        return wrapped

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in NAMED and (event != "open" or args[2] & WRITING):
            path = str(args[0])
            if path.startswith(str(root)) or not os.path.isabs(path):  # within an open folder
                change()

    written = os.write
    patches: dict[str, Any] = {name: changing(getattr(os, name)) for name in CHANGES}
    patches["write"] = torn
    for name, function in patches.items():
        setattr(os, name, function)
    sys.addaudithook(audit)
    life()
