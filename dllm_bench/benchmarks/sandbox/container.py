"""The second tier of the sandbox: the same child inside a docker, podman or apptainer container.

Chosen with DLLM_BENCH_SANDBOX=container (the first tool found) or =docker, =podman, =apptainer;
DLLM_BENCH_SANDBOX_IMAGE names the image, which needs Python 3.11 or newer and, for MBPP+, numpy.
The container has no network, no capabilities, a read-only file system and a small /tmp; verdicts
come back through its standard error. It shares the host's kernel, and an image is trusted.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from dllm_bench.core.errors import DllmBenchError

if TYPE_CHECKING:
    from dllm_bench.benchmarks.sandbox.execution import Limits

TIER, IMAGE = "DLLM_BENCH_SANDBOX", "DLLM_BENCH_SANDBOX_IMAGE"
PROCESS, CONTAINER = "process", "container"
DEFAULT_IMAGE = "docker.io/library/python:3.11-slim"
STDERR = -1  # the channel of a child that cannot be handed a file descriptor
MARSHAL = 4  # a format every Python since 3.4 reads
NOBODY = "65534:65534"
KILL_S = 10.0
START = (
    "import marshal, sys; job = marshal.loads(sys.stdin.buffer.read()); "
    "space = {'__name__': 'bootstrap'}; exec(job['bootstrap'], space); space['main'](job)"
)
"""What a child is started with; the rest comes through its standard input."""


@dataclass(frozen=True)
class Container:
    """One container that will run one program."""

    tool: str
    image: str
    limits: Limits
    name: str = field(default_factory=lambda: f"dllm-bench-{secrets.token_hex(6)}")

    @property
    def environment(self) -> Mapping[str, str]:
        """What the tool needs of ours to find its service; none of it enters the container."""
        kept = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST")
        return {name: os.environ[name] for name in kept if name in os.environ}

    def command(self, flags: Sequence[str]) -> list[str]:
        """The command line that starts the program."""
        return [*TOOLS[self.tool](self), "python3", *flags, "-c", START]

    def stop(self) -> None:
        """Kill the container itself; killing the tool may leave it running."""
        if self.tool in ("docker", "podman"):
            subprocess.run(
                [self.tool, "kill", self.name],
                env=self.environment,
                capture_output=True,
                timeout=KILL_S,
                check=False,
            )

    @staticmethod
    def text(name: str) -> str:
        """Source of one of our own programs; compiled code would not fit another Python."""
        return (Path(__file__).parent / "child" / f"{name}.py").read_text(encoding="utf-8")


def _oci(made: Container) -> list[str]:
    limits = made.limits
    return [
        made.tool, "run", "--rm", "--interactive", "--name", made.name, "--network", "none",
        "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges",
        "--user", NOBODY, "--pids-limit", str(limits.threads), "--memory", f"{limits.memory_mb}m",
        "--memory-swap", f"{limits.memory_mb}m", "--ulimit", f"cpu={limits.cpu_s}",
        "--tmpfs", f"/tmp:size={limits.file_mb}m,mode=1777", "--workdir", "/tmp",
        "--env", "PYTHONHASHSEED=0", made.image,
    ]  # fmt: skip


def _apptainer(made: Container) -> list[str]:
    image = made.image if "://" in made.image or Path(made.image).exists() else None
    return [
        "apptainer", "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network",
        "none", "--pid", "--env", "PYTHONHASHSEED=0", "--pwd", "/tmp",
        image or f"docker://{made.image}",
    ]  # fmt: skip


TOOLS: Mapping[str, Callable[[Container], list[str]]] = {
    "docker": _oci,
    "podman": _oci,
    "apptainer": _apptainer,
}


def chosen(limits: Limits) -> Container | None:
    """The container a program runs in, None for the process tier."""
    asked = os.environ.get(TIER, PROCESS)
    if asked == PROCESS:
        return None
    return Container(tool(asked), os.environ.get(IMAGE, DEFAULT_IMAGE), limits)


@cache
def tool(asked: str) -> str:
    """The tool to use: the one asked for, or the first that is there."""
    if asked not in (*TOOLS, CONTAINER):
        raise DllmBenchError(
            f"{TIER}={asked} is no tier of the sandbox; choose {PROCESS}, {CONTAINER}, "
            f"{', '.join(TOOLS)}."
        )
    found = next((name for name in TOOLS if asked in (name, CONTAINER) and shutil.which(name)), "")
    if not found:
        raise DllmBenchError(
            f"{TIER}={asked} needs {' or '.join(TOOLS) if asked == CONTAINER else asked}, which "
            f"is not on the PATH; install it or use {TIER}={PROCESS}."
        )
    return found
