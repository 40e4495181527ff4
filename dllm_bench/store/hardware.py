"""Find the hardware class of this machine, and check whether a hardware group is available here.

Only this file looks for a CUDA device: for hardware=auto, for planning a table, and before a run
starts. torch is imported only if a group requests a CUDA device or "auto", because planning on a
CPU does not need it and its import takes seconds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.spec import AUTO
from dllm_bench.store.groups import Hardware

CPU = {"name": "cpu", "device": "cpu", "dtype": "float32", "threads": 1}


def resolve_hardware(plain: Mapping[str, Any]) -> Hardware:
    """Return a hardware group in which every "auto" is replaced by this machine's value."""
    if AUTO not in plain.values():
        return Hardware(plain)
    name = cuda_device()
    here = CPU if name is None else cuda_class(name)
    return Hardware({key: here[key] if value == AUTO else value for key, value in plain.items()})


def cuda_class(device_name: str) -> dict[str, Any]:
    """Return the settings for "auto" on a CUDA device; the class is the first word of its name that
    contains a digit (h200, a100), else "cuda".
    """
    words = device_name.lower().replace("-", " ").split()
    name = next((word for word in words if any(map(str.isdigit, word))), "cuda")
    return {"name": name, "device": "cuda", "dtype": "bfloat16", "threads": 8}


def cuda_device(device: str = "cuda") -> str | None:
    """Return the name of a CUDA device, by default the current one; None if this machine does not
    have it."""
    import torch

    index = torch.device(device).index
    if not torch.cuda.is_available() or (index and index >= torch.cuda.device_count()):
        return None
    return torch.cuda.get_device_name(index)


def memory_bytes(device: str) -> int:
    """Return the total memory of a CUDA device, or of this machine, in bytes."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wait_for(device: object) -> None:
    """Wait until a device (its name, or a torch device) has finished all its work; a CPU always
    has."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(str(device))


def missing_device(hardware: Hardware) -> str:
    """Return the device that a hardware group requests and this machine lacks, in words ("a GPU
    (H200)"); empty if nothing is missing. Names are compared without regard to case.
    """
    if not hardware.uses_cuda:
        return ""
    name, match = cuda_device(hardware.device), hardware.match or ""
    is_here = name is not None and match.lower() in name.lower()
    return "" if is_here else f"a GPU ({match or hardware.device.upper()})"


def require_device(hardware: Hardware) -> None:
    """Raise DllmBenchError if the device of a hardware group is missing."""
    missing = missing_device(hardware)
    if missing:
        raise DllmBenchError(
            f"hardware={hardware.name} asks for {missing}, and this machine has "
            f"{cuda_device() or 'no CUDA device'}; choose the hardware that is here (hardware=auto "
            "finds it)."
        )
