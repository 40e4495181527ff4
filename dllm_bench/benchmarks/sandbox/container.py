"""Stronger isolation: the child of `execution.py` inside a docker, podman or apptainer container.

Chosen with DLLM_BENCH_SANDBOX=container (the first tool found) or =docker, =podman, =apptainer;
DLLM_BENCH_SANDBOX_IMAGE names the image, which needs Python 3.11 or newer and, for MBPP+, numpy.
The container has no network, no capabilities, a read-only file system and a small /tmp. Verdicts
come back through its standard error. What this does not protect against: the container shares the
host's kernel, and the image is trusted.
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

from dllm_bench.benchmarks.sandbox.limits import Limits
from dllm_bench.core.errors import DllmBenchError

ISOLATION_VARIABLE, IMAGE_VARIABLE = "DLLM_BENCH_SANDBOX", "DLLM_BENCH_SANDBOX_IMAGE"
PROCESS, CONTAINER = "process", "container"
DEFAULT_IMAGE = "docker.io/library/python:3.11-slim"
STDERR = -1
"""Report channel of a child that cannot inherit a file descriptor."""
MARSHAL_FORMAT = 4
"""Every Python since 3.4 reads this format."""
NOBODY = "65534:65534"
KILL_S = 10.0
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


@dataclass(frozen=True)
class Container:
    """One container that will run one program."""

    tool: str
    """`docker`, `podman` or `apptainer`."""
    image: str
    limits: Limits
    name: str = field(default_factory=lambda: f"dllm-bench-{secrets.token_hex(6)}")
    """Name by which docker and podman can kill it."""

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


def _oci_command(container: Container) -> list[str]:
    limits = container.limits
    return [
        container.tool, "run", "--rm", "--interactive", "--name", container.name,
        "--network", "none", "--read-only", "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--user", NOBODY, "--pids-limit", str(limits.threads), "--memory", f"{limits.memory_mb}m",
        "--memory-swap", f"{limits.memory_mb}m", "--ulimit", f"cpu={limits.cpu_s}",
        "--tmpfs", f"/tmp:size={limits.file_mb}m,mode=1777", "--workdir", "/tmp",
        "--env", "PYTHONHASHSEED=0", container.image,
    ]  # fmt: skip


def _apptainer_command(container: Container) -> list[str]:
    image = container.image
    if "://" not in image and not Path(image).exists():
        image = f"docker://{image}"
    return [
        "apptainer", "exec", "--containall", "--cleanenv", "--no-home", "--net", "--network",
        "none", "--pid", "--env", "PYTHONHASHSEED=0", "--pwd", "/tmp", image,
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
