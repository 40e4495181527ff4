"""Runs a Python program written by a model, in a child process with little rights.

Each program gets its own process and session, limits on CPU, wall time, memory, file size, threads
and open files, a fresh working directory, and an environment that holds nothing of ours; Linux
adds namespaces, Landlock and a call filter (`child/bootstrap.py`). `isolation()` says what
holds here. What it does not hold: a kernel bug, the memory of many programs together, a program
that looks for the channel its verdict is reported on, files in /etc that whoever runs this may read
(root: passwords); and where a step is missing (another system, an old kernel, a strict container),
what that step is for. The second tier puts the same child into a container (`container.py`): use it
for hostile code.
"""

from __future__ import annotations

import errno
import marshal
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import IO, Literal, TypeVar

from dllm_bench.benchmarks.sandbox import container
from dllm_bench.core.errors import DllmBenchError

Verdict = Literal["passed", "failed", "timeout", "crashed", "memory", "refused"]
CONSENT = "DLLM_BENCH_ALLOW_CODE"
POLL_S = 0.05
SIGNALLED = 128  # a container's status for a signal n is this + n
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True)
class Limits:
    """What one program may use; it is stopped by whichever comes first.

    kept_kb: how much of the end of its output comes back; packages: may import installed ones.
    """

    cpu_s: int = 2
    wall_s: float = 10.0
    memory_mb: int = 1024
    file_mb: int = 8
    threads: int = 64
    open_files: int = 64
    output_kb: int = 1024
    kept_kb: int = 4
    packages: bool = False

    def rlimits(self) -> dict[str, int]:
        """Names and values for setrlimit(2)."""
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NPROC": self.threads,
            "RLIMIT_NOFILE": self.open_files,
        }


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    passed: ran to its last line; failed: an error, an early exit or too much output; timeout: CPU
    or wall time; crashed: killed by a signal; memory: MemoryError; refused: an error because the
    sandbox denied a call. `reports` are the words of `report(...)` calls of a trusted harness;
    `cpu_s` is what the child used, its start included.
    """

    verdict: Verdict
    stdout: str
    seconds: float
    detail: str = ""
    reports: tuple[tuple[str, ...], ...] = ()
    held: tuple[str, ...] = ()
    cpu_s: float = 0.0


def require_consent(allowed: bool, benchmark: str) -> None:
    """Raise unless the user said that code written by a model may run on this machine."""
    if not allowed and os.environ.get(CONSENT) != "1":
        raise DllmBenchError(
            f"Benchmark {benchmark!r} runs code written by a model, and nobody allowed that here; "
            f"set benchmark.allow_code_execution=true or {CONSENT}=1 to let it run in the sandbox."
        )


def execute(
    source: str | CodeType,
    payload: object = None,
    limits: Limits | None = None,
    stdin: str | None = None,
) -> Outcome:
    """Run a Python program in a sandboxed child and say how it ended.

    With a `payload` (builtin types only) the source is one of our own (`harness`): its
    `main(payload, report)` is called, and the words it reports come back. Without one the source
    may be anything. stdin: what the program reads; nothing by default.
    """
    limits = limits or Limits()
    tier = container.chosen(limits)
    folder = tempfile.mkdtemp(prefix="dllm-bench-")
    read_end, write_end = os.pipe()
    job = {
        "bootstrap": tier.text("bootstrap") if tier else harness("bootstrap"),
        "source": source.encode(errors="replace") if isinstance(source, str) else source,
        "payload": payload,
        "stdin": (stdin or "").encode(errors="replace"),
        "nonce": secrets.token_hex(8),
        "channel": container.STDERR if tier else write_end,
        "limits": limits.rlimits(),
        "packages": limits.packages,
    }
    if tier and isinstance(source, CodeType):
        job["source"] = tier.text(source.co_filename.strip("<>")).encode()
    try:
        if os.geteuid() == 0:
            os.chmod(folder, 0o777)
        with tempfile.TemporaryFile() as sent:
            sent.write(marshal.dumps(job, container.MARSHAL))
            sent.seek(0)
            child = _Child(sent, write_end, folder, limits, tier)
        os.close(write_end)
        return _follow(child, read_end, str(job["nonce"]), limits)
    finally:
        os.close(read_end)
        shutil.rmtree(folder, ignore_errors=True)


class _Child:
    """The running process; `status` (negative for a signal) and `cpu_s` are known once reaped."""

    def __init__(
        self,
        sent: IO[bytes],
        channel: int,
        folder: str,
        limits: Limits,
        tier: container.Container | None,
    ) -> None:
        """A fixed hash seed keeps the order of sets, and so grades, the same in every run."""
        flags = ["-s", "-P", "-B", "-X", "utf8", *([] if limits.packages else ["-S"])]
        own = [sys.executable, *flags, "-c", container.START]
        self.tier = tier
        self.process = subprocess.Popen(
            tier.command(flags) if tier else own,
            stdin=sent,
            stdout=subprocess.PIPE,
            stderr=channel if tier else subprocess.STDOUT,
            pass_fds=() if tier else (channel,),
            cwd=folder,
            env=tier.environment if tier else {"PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        self.status: int | None = None
        self.cpu_s = 0.0

    def ended(self, wait: int = os.WNOHANG) -> bool:
        """Whether the process has ended; reaps it if so."""
        if self.status is None:
            pid, status, usage = os.wait4(self.process.pid, wait)
            if pid:
                self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def stop(self) -> int:
        """Kill what is left of the session; the exit status."""
        if self.tier and self.status is None:
            self.tier.stop()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ended(wait=0)
        assert self.status is not None
        return self.status


@cache
def harness(name: str) -> CodeType:
    """Compiled code of one of our own programs in `child/`."""
    source = (Path(__file__).parent / "child" / f"{name}.py").read_text(encoding="utf-8")
    return compile(source, f"<{name}>", "exec", dont_inherit=True)


def _follow(child: _Child, channel: int, nonce: str, limits: Limits) -> Outcome:
    """Read the child's output until it ends or breaks a limit, then stop its whole session."""
    began = time.monotonic()
    stopped, tail = _drain(child, began + limits.wall_s, limits)
    status = child.stop()
    reports = _reports(channel, nonce)
    verdict, detail = _verdict(stopped, status, child.cpu_s >= limits.cpu_s, reports)
    held = next((r[1:] for r in reports if r[0] == "held"), ())
    words = tuple(r for r in reports if r[0] not in ("held", "end"))
    text = tail.decode("utf-8", errors="replace")
    return Outcome(verdict, text, time.monotonic() - began, detail, words, held, child.cpu_s)


def _drain(child: _Child, deadline: float, limits: Limits) -> tuple[str, bytes]:
    """(why it has to be stopped or "", end of the output); reads little more than it may print."""
    assert child.process.stdout is not None
    cap, kept = limits.output_kb << 10, limits.kept_kb << 10
    total, tail = 0, b""
    with child.process.stdout as pipe:
        while (left := deadline - time.monotonic()) > 0:
            if select.select([pipe], [], [], min(left, POLL_S))[0]:
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    return _wait_exit(child, deadline), tail
                total, tail = total + len(chunk), (tail + chunk)[-kept:]
                if total > cap:
                    return "output", tail
            elif child.ended():
                return "", tail
    return "timeout", tail


def _wait_exit(child: _Child, deadline: float) -> str:
    """The output is closed: wait for the process itself."""
    pause_s = 0.0005
    while not child.ended():
        if time.monotonic() > deadline:
            return "timeout"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
    return ""


def _reports(channel: int, nonce: str) -> list[tuple[str, ...]]:
    """Lines of the report channel that carry the nonce."""
    os.set_blocking(channel, False)
    data = b""
    while True:
        try:
            chunk = os.read(channel, 1 << 16)
        except OSError as error:
            if error.errno == errno.EAGAIN:  # held open by a process that got away
                break
            raise
        if not chunk:
            break
        data += chunk
    rows = [line.split("\t") for line in data.decode(errors="replace").splitlines()]
    return [tuple(words) for key, *words in rows if key == nonce and words]


def _verdict(
    stopped: str, status: int, cpu_spent: bool, reports: Sequence[tuple[str, ...]]
) -> tuple[Verdict, str]:
    if stopped == "timeout":
        return "timeout", "wall time"
    if stopped == "output":
        return "failed", "printed too much"
    if status in (-signal.SIGXCPU, SIGNALLED + signal.SIGXCPU) or (
        status == -signal.SIGKILL and cpu_spent
    ):
        return "timeout", "CPU time"
    if status < 0 or status > SIGNALLED:
        return "crashed", signal.Signals(-status if status < 0 else status - SIGNALLED).name
    end = next((r for r in reports if r[0] == "end"), None)
    if end is None:
        return "failed", f"left before its end with status {status}"
    verdicts: Mapping[str, Verdict] = {"passed": "passed", "memory": "memory", "refused": "refused"}
    return verdicts.get(end[1], "failed"), end[2]


@cache
def isolation() -> tuple[str, ...]:
    """What holds on this machine, found by running an empty program once."""
    outcome = execute("")
    if outcome.verdict != "passed":
        raise DllmBenchError(
            f"The sandbox cannot run an empty program here ({outcome.verdict}: {outcome.detail} "
            f"{outcome.stdout[-200:]}); code benchmarks need a POSIX system that allows it."
        )
    tier = container.chosen(Limits())
    return (*([tier.tool] if tier else []), "session", "limits", "empty environment", *outcome.held)


def map_in_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Apply a function that waits for sandboxed programs, on a few threads, results in order."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    with ThreadPoolExecutor(max_workers=max(1, min(usable, 8))) as pool:
        return list(pool.map(function, items))
