"""What a sandboxed program may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    """The end of its output, standard error included."""
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
