"""The environment of a run: commit and local changes, package versions, machine, threads.

Cheap (three git calls, no imports beyond torch) and never fatal: what cannot be determined is None.
Nothing here is part of a run's identity; the hardware class and the inputs' hashes are, see `spec`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dllm_bench import DECODING_VERSION, __version__
from dllm_bench.paths import PACKAGE

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "lm-eval", "evalplus",
    "datasets", "numpy", "scipy", "hydra-core", "wandb", "submitit",
)  # fmt: skip
CODE = ("dllm_bench", "conf", "pyproject.toml", "constraints.txt")
DIFF_CHARS = 4000
GIT_TIMEOUT_S = 5.0


def environment(device: str = "cpu") -> dict[str, Any]:
    """Code, packages and machine, as plain data."""
    return {
        "dllm_bench": __version__,
        "decoding_version": DECODING_VERSION,
        **code(PACKAGE.parent),
        "packages": packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        **machine(device),
    }


def packages() -> dict[str, str | None]:
    """Installed versions of the packages that matter; None where a package is absent."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def code(root: Path) -> dict[str, Any]:
    """Commit of the checkout at `root` and the changes to it; None outside of a checkout."""
    unknown = {"commit": None, "dirty": None, "diff_sha256": None, "diff": None}
    top = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return unknown
    where, _, commit = top.strip().partition("\n")
    if Path(where).resolve() != root.resolve():
        return unknown  # the package is installed inside another repository
    diff = (_git(root, "diff", "HEAD", "--", *CODE) or "") + _untracked(root)
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "diff": diff[:DIFF_CHARS] or None,
    }


def _untracked(root: Path) -> str:
    """Names and content hashes of code files that git does not track."""
    names = (_git(root, "ls-files", "--others", "--exclude-standard", "--", *CODE) or "").split(
        "\n"
    )
    lines = []
    for name in sorted(filter(None, names)):
        path = root / name
        content = path.read_bytes() if path.is_file() else b""
        lines.append(f"untracked {name} {hashlib.sha256(content).hexdigest()[:16]}\n")
    return "".join(lines)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def machine(device: str) -> dict[str, Any]:
    """CPU, threads and the device a run computes on."""
    torch = sys.modules.get("torch")  # a run has imported it; other commands may not have
    cuda = torch is not None and device.startswith("cuda") and torch.cuda.is_available()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        "load": round(
            os.getloadavg()[0], 2
        ),  # average of the last minute: other work disturbs timings
        "device": torch.cuda.get_device_name(device) if torch and cuda else cpu_model(),
        "cuda": torch.version.cuda if torch and cuda else None,
        "driver": _driver() if cuda else None,
    }


def cpu_model() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """The NVIDIA driver's version, from the kernel module."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)
