"""The environment of a run: commit and local changes, package versions, machine, threads.

It is cheap (a few git calls, no imports beyond torch) and never fatal: unknown values are None. For
local changes, the hash and the names of the files are stored, because their text may contain
secrets. With `provenance.diff=text` the text is stored too, after removing what looks like a
secret. Nothing here is part of a run's identity; the hardware class and the inputs' hashes are, see
`spec`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dllm_bench import DECODING_VERSION, __version__
from dllm_bench.paths import PACKAGE, read_yaml
from dllm_bench.store.spec import RunSpec

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "peft", "lm-eval", "evalplus",
    "datasets", "numpy", "scipy", "hydra-core", "wandb", "submitit",
)  # fmt: skip
CODE = ("dllm_bench", "conf", "pyproject.toml", "constraints.txt")
DIFF_CHARS = 4000
STRUCK = "[struck out]"
SECRETS = tuple(map(re.compile, read_yaml(Path(__file__).with_name("secrets.yaml"))))
"""Usual forms of secrets; the match of the group `name` is kept."""
GIT_TIMEOUT_S = 5.0


def environment_of(spec: RunSpec) -> dict[str, Any]:
    """Return the environment of a run on its device."""
    return environment(spec.hardware.device, with_text=spec.runtime.provenance.diff == "text")


def environment(device: str = "cpu", with_text: bool = False) -> dict[str, Any]:
    """Return code, packages and machine as plain data; `with_text`: also the text of local
    changes."""
    return {
        "dllm_bench": __version__,
        "decoding_version": DECODING_VERSION,
        **code(PACKAGE.parent, with_text),
        "packages": packages(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        **machine(device),
    }


def packages() -> dict[str, str | None]:
    """Return the installed versions of relevant packages; None for a package that is absent."""
    return {name: installed_version(name) for name in PACKAGES}


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed. Cached: the files of a
    process's own packages are read once."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def code(root: Path, with_text: bool = False) -> dict[str, Any]:
    """Return the commit of the checkout at `root` and the changes to it; None outside of a
    checkout."""
    unknown = dict.fromkeys(("commit", "dirty", "diff_sha256", "changed", "diff"))
    top = _git(root, "rev-parse", "--show-toplevel", "HEAD")
    if top is None:
        return unknown
    where, _, commit = top.strip().partition("\n")
    if Path(where).resolve() != root.resolve():
        return unknown  # the package is installed inside another repository
    untracked = _code_files(root, "ls-files", "--others", "--exclude-standard")
    changed = _code_files(root, "diff", "--name-only", "HEAD")
    diff = (_git(root, "diff", "HEAD", "--", *CODE) or "") + _hashes(root, untracked)
    return {
        "commit": commit,
        "dirty": bool(diff),
        "diff_sha256": hashlib.sha256(diff.encode()).hexdigest() if diff else None,
        "changed": sorted([*changed, *untracked]),
        "diff": without_secrets(diff)[:DIFF_CHARS] or None if with_text else None,
    }


def without_secrets(text: str) -> str:
    """Return the text without anything that looks like a key, a password or a token."""
    for pattern in SECRETS:
        text = pattern.sub(lambda found: (found.groupdict().get("name") or "") + STRUCK, text)
    return text


def _hashes(root: Path, untracked: Sequence[str]) -> str:
    """Return names and content hashes of files that git does not track."""
    lines = []
    for name in untracked:
        path, content = root / name, b""
        with suppress(OSError):
            content = path.read_bytes() if path.is_file() else b""
        lines.append(f"untracked {name} {hashlib.sha256(content).hexdigest()[:16]}\n")
    return "".join(lines)


def _code_files(root: Path, *arguments: str) -> list[str]:
    """Return the names of code files that a command of git lists, sorted."""
    return sorted(filter(None, (_git(root, *arguments, "-z", "--", *CODE) or "").split("\0")))


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
    """Return CPU, threads and the device that a run computes on."""
    torch = sys.modules.get("torch")  # a run has imported it; other commands may not have
    cuda = torch is not None and device.startswith("cuda") and torch.cuda.is_available()
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads() if torch else None,
        # average of the last minute: other work disturbs timings
        "load": round(os.getloadavg()[0], 2),
        "device": torch.cuda.get_device_name(device) if torch and cuda else cpu_model(),
        "cuda": torch.version.cuda if torch and cuda else None,
        "driver": _driver() if cuda else None,
    }


def cpu_model() -> str:
    """Return the processor's name."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        if found := re.search(r"^model name.*?:(.*)$", text, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    """Return the NVIDIA driver's version, from the kernel module."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return None
    return next((word for word in words if word.count(".") >= 1 and word[0].isdigit()), None)
