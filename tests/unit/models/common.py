"""Specs, files and mapped memory of tiny checkpoints."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from dllm_bench.models.spec import ModelSpec


def spec(folder: Path, **changes: Any) -> ModelSpec:
    given = {"name": "tiny", "path": str(folder), "dtype": "float32", "device": "cpu"}
    return ModelSpec(**given | changes)


def edit(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; "absent" takes one out."""
    entries = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: one for key, one in entries.items() if one != "absent"}))


def respelled(folder: Path, **text: Any) -> None:
    """Rewrite settings of the text model in config.json; "absent" takes one out."""
    settings = json.loads((folder / "config.json").read_text())["text_config"] | text
    kept = {key: one for key, one in settings.items() if one != "absent"}
    edit(folder / "config.json", text_config=kept)


def tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def resident(file: Path) -> int:
    """Bytes of this process's mappings of a file that are in memory."""
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip(f"needs {maps}")
    sections = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", maps.read_text())
    mine = (one for one in sections if str(file) in one)
    return sum(1024 * int(re.findall(r"(?m)^Rss: +(\d+)", one)[0]) for one in mine)
