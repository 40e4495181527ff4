"""Run a Python program written by a model in a child process with few rights.

Each program gets its own process and session, limits on CPU time, wall time, memory, file size,
threads and open files, a fresh working directory, and an environment without our variables. On
Linux namespaces, Landlock and a filter of system calls are added (`child/bootstrap.py`).
`isolation()` lists what takes effect on this machine.

The child is two processes. The judged one holds the program and its inputs. The supervisor holds
what a result is compared with and writes the verdict; it never runs the program, whose results it
reads as data (`child/codec.py`). `examine` calls a program's functions. `execute` runs a program
for its output. Only the program's own process knows that it ran to its end, so the verdict is
"ended", never "passed", and the caller compares the output. `child/supervise.py` states the rule.

What the sandbox does not protect against: a bug in the kernel; the memory that many programs use at
once; reading files in /etc that the user who runs this may read (for root: passwords). Where a step
is not available (another operating system, an old kernel, a strict container), its protection is
missing too. For hostile code use the second kind of sandbox, which runs the same child in a
docker, podman or apptainer container. It is chosen with DLLM_BENCH_SANDBOX=container (the first
tool found) or =docker, =podman, =apptainer; DLLM_BENCH_SANDBOX_IMAGE names the image, which needs
Python 3.11 or newer and, for MBPP+, numpy. The container has no network, no capabilities, a
read-only file system and a small /tmp, and shares the host's kernel; the image is trusted.
`docs/security.md` lists what is promised.
"""

from __future__ import annotations

import hashlib
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
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import IO, Any, Literal, TypeVar, cast, get_args

from dllm_bench.core.benchmark import JUDGE_ERROR
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE, read_yaml

CONSENT_VARIABLE = "DLLM_BENCH_ALLOW_CODE"
POLL_S = 0.05
BACKSTOP_S = 2.0
"""How long after its wall time a child that does not stop by itself is killed."""
CHILD = "dllm_bench.benchmarks.sandbox.child."
BROUGHT_DOWN = (signal.SIGXCPU, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
"""Signals that end a judging process when it compares hostile values."""
ISOLATION_VARIABLE, IMAGE_VARIABLE = "DLLM_BENCH_SANDBOX", "DLLM_BENCH_SANDBOX_IMAGE"
PROCESS, CONTAINER = "process", "container"
DEFAULT_IMAGE = "docker.io/library/python:3.11-slim"
STDERR = -1
"""Report channel of a child that cannot inherit a file descriptor."""
MARSHAL_FORMAT = 4
"""Every Python since 3.4 reads this format."""
NOBODY = "65534:65534"
KILL_S = 10.0
VARIABLES = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Environment of a child. The order of sets, and so the grades, stay reproducible. numpy starts no
threads, whose number differs between machines and may exceed what the user may start."""
SYSTEM_CALLS = read_yaml(Path(__file__).with_name("system_calls.yaml"))
START = """\
import marshal, os
def receive():
    parts, missing = [], int.from_bytes(os.read(0, 8), "big")
    while missing:
        parts.append(os.read(0, missing))
        missing -= len(parts[-1])
    return marshal.loads(b"".join(parts))
job, space = receive(), {"__name__": "bootstrap"}
exec(job["bootstrap"], space)
space["main"](job, receive)
"""
"""The code a child is started with; its job, and then the supervisor's order, come through standard
input, each after its length."""


ProgramVerdict = Literal[
    "passed", "ended", "failed", "timeout", "crashed", "memory", "refused", "judge_error"
]
"""passed: every result is right; ended: a program run for its output came to its last line, by its
own account, which no grade may rest on; failed: a wrong result, one that cannot be read or compared
within bounds, an error, an early exit or too much output; timeout: CPU or wall time used up;
crashed: killed by a signal; memory: MemoryError; refused: an error because the sandbox denied a
call; judge_error: a fault of this machine, such as no sandbox or no memory to start it."""


@dataclass(frozen=True)
class Limits:
    """What one program may use; the first limit that is reached stops it."""

    cpu_s: int = 2
    """CPU seconds; also the seconds a program may sleep."""
    wall_s: float = 10.0
    memory_mb: int = 1024
    """Address space."""
    file_mb: int = 8
    """Size of a file, and of the working directory where it is a file system of its own."""
    threads: int = 64
    """Processes and threads."""
    open_files: int = 64
    output_kb: int = 1024
    """Output at which the program is stopped."""
    kept_kb: int = 4
    """How much of the end of the output comes back."""
    packages: bool = False
    """Whether the program may import installed packages."""

    def rlimits(self) -> dict[str, int]:
        """Return names and values for setrlimit(2)."""
        return {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.file_mb << 20,
            "RLIMIT_NPROC": self.threads,
            "RLIMIT_NOFILE": self.open_files,
        }


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended."""

    verdict: ProgramVerdict
    stdout: str
    """The end of its output, without what it wrote to standard error."""
    seconds: float
    """Wall time."""
    detail: str = ""
    """The error, signal or limit that caused the verdict."""
    reports: tuple[tuple[str, ...], ...] = ()
    """The words of each `report(...)` call of one of our own child programs."""
    held: tuple[str, ...] = ()
    """Names of the isolation steps that took effect in the child."""
    cpu_s: float = 0.0
    """CPU time of the child, its start included."""


LASTING: tuple[ProgramVerdict, ...] = ("passed", "failed")
"""Verdicts that judging again would repeat, because no time limit or machine fault is involved."""
MAX_JUDGED = 20_000
"""Most outcomes in the cache; one takes some hundred bytes."""
_JUDGED: dict[bytes, ProgramOutcome] = {}
LAST_WORDS = 200
"""Characters of a container tool's message that are kept."""
A = TypeVar("A")
B = TypeVar("B")


def require_consent(allowed: bool, benchmark: str) -> None:
    """Raise DllmBenchError unless the user allowed programs written by a model to run here."""
    if not allowed and os.environ.get(CONSENT_VARIABLE) != "1":
        raise DllmBenchError(
            f"Benchmark {benchmark!r} runs code written by a model, and this is not allowed yet; "
            f"set benchmark.allow_code_execution=true or {CONSENT_VARIABLE}=1 to run it in the "
            "sandbox."
        )


def execute(program: str, limits: Limits | None = None, stdin: str | None = None) -> ProgramOutcome:
    """Run a Python program in a sandboxed child for its output; it is never judged "passed".

    `stdin` is what it reads, nothing by default.
    """
    examiner = Examiner("supervise", module_name="__main__")
    return _run(program, examiner, limits or Limits(), stdin or "")


def examine(program: str, examiner: Examiner, limits: Limits) -> ProgramOutcome:
    """Load a Python program in a sandboxed child and judge what calls of its functions return.

    The examiner calls them from a process of its own; its reports are in `reports`. Decoders and
    passes often give the same program, so outcomes are cached.
    """
    key = _key(program, examiner, limits)
    known = _JUDGED.get(key)
    if known is None:
        known = _run(program, examiner, limits, None)
        if known.verdict in LASTING and len(_JUDGED) < MAX_JUDGED:
            _JUDGED[key] = known
    return known


def _key(program: str, examiner: Examiner, limits: Limits) -> bytes:
    """Return a hash of all that the outcome of a program depends on."""
    asked: Any = (examiner.program, examiner.payload, examiner.module_name, examiner.silent)
    plain = (program.encode(errors="replace"), asked, repr((limits, requested_container(limits))))
    return hashlib.sha256(marshal.dumps(plain, MARSHAL_FORMAT)).digest()


def _run(program: str, examiner: Examiner, limits: Limits, stdin: str | None) -> ProgramOutcome:
    """Start a child, with a program to run (`stdin` is text) or to be called (None)."""
    container = requested_container(limits)
    read_end, write_end = os.pipe()
    folder = tempfile.mkdtemp(prefix="dllm-bench-")
    nonce = secrets.token_hex(8)
    code = child_source if container else child_program
    job = {
        "bootstrap": code("bootstrap"),
        "modules": {CHILD + name: code(name) for name in ("codec", "answer")},
        "program": program.encode(errors="replace"),
        "name": examiner.module_name,
        "calls": stdin is None,
        "silent": examiner.silent,
        "stdin": (stdin or "").encode(errors="replace"),
        "channel": STDERR if container else write_end,
        "limits": limits.rlimits(),
        "wall_s": limits.wall_s,
        "packages": limits.packages,
        "hidden": str(PACKAGE),
        "system_calls": SYSTEM_CALLS,
    }
    private = {
        "modules": {CHILD + name: code(name) for name in ("supervise", examiner.program)},
        "program": CHILD + examiner.program,
        "payload": examiner.payload,
        "nonce": nonce,
    }
    try:
        if os.geteuid() == 0:
            os.chmod(folder, 0o777)
        with tempfile.TemporaryFile() as sent:
            for part in (job, private):
                data = marshal.dumps(part, MARSHAL_FORMAT)
                sent.write(len(data).to_bytes(8, "big") + data)
            sent.seek(0)
            child = _Child(sent, write_end, folder, limits, container)
        os.close(write_end)
        return _follow(child, read_end, nonce, limits)
    finally:
        os.close(read_end)
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):  # it calls itself, and opens a file, for each level
            subprocess.run(["rm", "-rf", folder], stderr=subprocess.DEVNULL, check=False)


class _Child:
    """The running process; `status` (negative: a signal) and `cpu_s` are set once it is reaped."""

    def __init__(
        self,
        sent: IO[bytes],
        channel: int,
        folder: str,
        limits: Limits,
        container: Container | None,
    ) -> None:
        """Start it."""
        flags = ["-s", "-P", "-B", "-X", "utf8", *([] if limits.packages else ["-S"])]
        own = [sys.executable, *flags, "-c", START]
        self.container = container
        self.process = subprocess.Popen(
            container.command(flags) if container else own,
            stdin=sent,
            stdout=subprocess.PIPE,
            stderr=channel if container else subprocess.STDOUT,
            pass_fds=() if container else (channel,),
            cwd=folder,
            env=container.environment if container else VARIABLES,
            start_new_session=True,
        )
        self.status: int | None = None
        self.cpu_s = 0.0

    def ended(self, wait: int = os.WNOHANG) -> bool:
        """Return whether the process has ended; reaps it if so."""
        if self.status is None:
            pid, status, usage = os.wait4(self.process.pid, wait)
            if pid:
                self.status = self.process.returncode = os.waitstatus_to_exitcode(status)
                self.cpu_s = usage.ru_utime + usage.ru_stime
        return self.status is not None

    def stop(self) -> int:
        """Kill what is left of the session and return the exit status."""
        if self.container and self.status is None:
            self.container.stop()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ended(wait=0)
        assert self.status is not None
        return self.status


@dataclass(frozen=True)
class Examiner:
    """One of our own programs, which judges a program from the supervisor's process."""

    program: str
    """Name of a file in `child/` whose `main(payload, report, answer)` gives (verdict, detail)."""
    payload: object = None
    """What it judges by, of builtin types only; the judged process never holds it."""
    module_name: str = "builtins"
    """The judged program's `__name__`: by default that of `exec(program, {})`, as HumanEval's own
    harness runs it, so that a block for "__main__" does not run."""
    silent: bool = False
    """Whether everything that is printed is discarded, not only standard error."""


def compare_calls(stages: dict[str, Any], asked: Mapping[str, Any]) -> Examiner:
    """Return the examiner that compares the results of a function's calls with those of a reference
    solution, or with given ones.

    stages: name -> inputs of each call, with the result if it is given. asked: `reference` (None if
    the results are given), `entry_point`, `min_time_s` and `time_factor` (a call may take the
    larger of the first and the reference's time multiplied by the second); `rule` (a name of
    `check.RULES`) and `atol`, which may be absent.
    """
    payload = {"rule": "equal", "atol": 0.0, **asked, "stages": marshal.dumps(stages)}
    return Examiner("check", payload, "__solution__", silent=True)


@cache
def child_program(name: str) -> CodeType:
    """Return compiled code of one of our own programs in `child/`."""
    return compile(child_source(name), f"<{name}>", "exec", dont_inherit=True)


def _follow(child: _Child, channel: int, nonce: str, limits: Limits) -> ProgramOutcome:
    """Read the child's output until it ends or breaks a limit, then stop its whole session."""
    began = time.monotonic()
    stopped, tail = _drain(child, began + limits.wall_s + BACKSTOP_S, limits)
    status = child.stop()
    reports, other = _reports(channel, nonce)
    verdict, detail = _verdict(stopped, status, reports, child.container is not None)
    if verdict == JUDGE_ERROR and child.container and other.strip():
        detail = f"{detail}: {other.strip()[-LAST_WORDS:]}"
    held = next((r[1:] for r in reports if r[0] == "held"), ())
    words = tuple(r for r in reports if r[0] not in ("held", "begun", "end"))
    text = tail.decode("utf-8", errors="replace")
    return ProgramOutcome(verdict, text, time.monotonic() - began, detail, words, held, child.cpu_s)


def _drain(child: _Child, deadline: float, limits: Limits) -> tuple[str, bytes]:
    """Return (why it must be stopped or "", end of the output); reads little more than the
    limit."""
    assert child.process.stdout is not None
    cap, kept = limits.output_kb << 10, limits.kept_kb << 10
    total, tail = 0, b""
    with child.process.stdout as pipe:
        readable = select.poll()  # unlike select, with any number of open files
        readable.register(pipe, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            ended = child.ended()  # asked first: then the pipe holds all that it wrote
            if readable.poll(1000 * min(left, POLL_S)):
                chunk = os.read(pipe.fileno(), 1 << 16)
                if not chunk:
                    return _wait_exit(child, deadline), tail
                total, tail = total + len(chunk), (tail + chunk)[-kept:]
                if total > cap:
                    return "output", tail
            elif ended:
                return "", tail
    return "timeout", tail


def _wait_exit(child: _Child, deadline: float) -> str:
    """Wait for the process itself after it closed its output; why it must be stopped or ""."""
    pause_s = 0.0005
    while not child.ended():
        if time.monotonic() > deadline:
            return "timeout"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)
    return ""


def _reports(channel: int, nonce: str) -> tuple[list[tuple[str, ...]], str]:
    """Return (words of the lines on the report channel that begin with the nonce, the other
    lines)."""
    os.set_blocking(channel, False)
    data = b""
    with suppress(BlockingIOError):  # a process that escaped the kill holds it open
        while chunk := os.read(channel, 1 << 16):
            data += chunk
    lines = data.decode(errors="replace").splitlines()
    rows = [line.split("\t") for line in lines]
    words = [tuple(words) for key, *words in rows if key == nonce and words]
    return words, "\n".join(line for line in lines if not line.startswith(nonce))


def _verdict(
    stopped: str, status: int, reports: Sequence[tuple[str, ...]], contained: bool
) -> tuple[ProgramVerdict, str]:
    """Return (verdict, detail) of a program that was stopped, or as the supervisor reports it.

    A supervisor that ends without a report is a fault of this machine, unless it had begun to read
    what comes from the program and its end is one that hostile values bring about. So is a wall
    time that is over before the supervisor began. contained: `status` is that of a container, whose
    memory is this program's alone.
    """
    begun = ("begun",) in reports
    if stopped == "timeout" and begun:
        return "timeout", "wall time"
    if stopped == "output":
        return "failed", "printed too much"
    ends = [words[1:] for words in reports if words[0] == "end"]
    if ends and ends[0][0] in get_args(ProgramVerdict):
        return cast(ProgramVerdict, ends[0][0]), ends[0][1]
    number = status - 128 if contained else -status
    by_values = number in (*BROUGHT_DOWN, *([signal.SIGKILL] if contained else []))
    if by_values and begun:
        name = signal.Signals(number).name
        return "failed", f"its results took too much to read or compare ({name})"
    late = "the wall time was over before the program was judged"
    return JUDGE_ERROR, late if stopped else f"the process that judges ended with status {status}"


@cache
def isolation() -> tuple[str, ...]:
    """Return names of the isolation steps that take effect here, found by running an empty
    program."""
    outcome = execute("")
    if outcome.verdict != "ended":
        raise DllmBenchError(
            f"The sandbox cannot run an empty program here ({outcome.verdict}: {outcome.detail} "
            f"{outcome.stdout[-200:]}); code benchmarks need a POSIX system that allows it."
        )
    container = requested_container(Limits())
    tool = [container.tool] if container else []
    return (*tool, "session", "limits", "empty environment", *outcome.held)


def map_in_threads(function: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Apply a function that waits for sandboxed programs, on up to 8 threads; results in order."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2
    with ThreadPoolExecutor(max_workers=max(1, min(usable, 8))) as pool:
        return list(pool.map(function, items))


# --- containers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Container:
    """One container that will run one program."""

    tool: str
    """`docker`, `podman` or `apptainer`."""
    image: str
    limits: Limits
    name: str = field(default_factory=lambda: f"dllm-bench-{secrets.token_hex(6)}", repr=False)
    """Name by which docker and podman can kill it; differs each time, so no part of `_key`."""

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that the tool needs to find its service; none enters the container."""
        kept = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST")
        return {name: os.environ[name] for name in kept if name in os.environ}

    def command(self, flags: Sequence[str]) -> list[str]:
        """Return the command line that starts the program; `flags` are those of the interpreter."""
        return [*TOOLS[self.tool](self), "python3", *flags, "-c", START]

    def stop(self) -> None:
        """Kill the container itself, because killing the tool may leave the container running."""
        if self.tool in ("docker", "podman"):
            with suppress(subprocess.TimeoutExpired):  # a service that hangs
                subprocess.run(
                    [self.tool, "kill", self.name],
                    env=self.environment,
                    capture_output=True,
                    timeout=KILL_S,
                    check=False,
                )


def child_source(name: str) -> str:
    """Return source text of one of our own programs in `child/`.

    A container gets text, because compiled code may not fit its Python.
    """
    return (Path(__file__).parent / "child" / f"{name}.py").read_text(encoding="utf-8")


SET_VARIABLES = [f"--env={name}={value}" for name, value in VARIABLES.items()]


def _oci_command(container: Container) -> list[str]:
    limits = container.limits
    return [
        container.tool, "run", "--rm", "--interactive", "--name", container.name,
        "--network", "none", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--user", NOBODY, "--pids-limit", str(limits.threads), "--memory", f"{limits.memory_mb}m",
        "--memory-swap", f"{limits.memory_mb}m", "--ulimit", f"cpu={limits.cpu_s}",
        "--tmpfs", f"/tmp:size={limits.file_mb}m,mode=1777", "--workdir", "/tmp",
        *SET_VARIABLES, container.image,
    ]  # fmt: skip


def _apptainer_command(container: Container) -> list[str]:
    image = container.image
    if "://" not in image and not Path(image).exists():
        image = f"docker://{image}"
    return [
        "apptainer", "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network",
        "none", "--pid", *SET_VARIABLES, "--pwd", "/tmp", image,
    ]  # fmt: skip


TOOLS: Mapping[str, Callable[[Container], list[str]]] = {
    "docker": _oci_command,
    "podman": _oci_command,
    "apptainer": _apptainer_command,
}
"""Tool -> its command line up to the program."""


def requested_container(limits: Limits) -> Container | None:
    """Return a container for one program, or None where DLLM_BENCH_SANDBOX asks for a plain
    process."""
    choice = os.environ.get(ISOLATION_VARIABLE, PROCESS)
    if choice == PROCESS:
        return None
    image = os.environ.get(IMAGE_VARIABLE, DEFAULT_IMAGE)
    return Container(container_tool(choice), image, limits)


@cache
def container_tool(choice: str) -> str:
    """Return the tool named by `choice`, or for "container" the first one on the PATH."""
    if choice not in (*TOOLS, CONTAINER):
        raise DllmBenchError(
            f"{ISOLATION_VARIABLE}={choice} is not a kind of sandbox; choose {PROCESS}, "
            f"{CONTAINER}, {', '.join(TOOLS)}."
        )
    tool = next((name for name in TOOLS if choice in (name, CONTAINER) and shutil.which(name)), "")
    if not tool:
        raise DllmBenchError(
            f"{ISOLATION_VARIABLE}={choice} needs "
            f"{' or '.join(TOOLS) if choice == CONTAINER else choice}, which is not on the PATH; "
            f"install it or use {ISOLATION_VARIABLE}={PROCESS}."
        )
    return tool
