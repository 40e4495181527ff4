"""Helpers of tests of loading: a spec for a folder, logits of a fixed text, edits of files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.trace import ForwardKind
from dllm_bench.models.load import LoadedModel
from dllm_bench.models.spec import ModelSpec
from tests.helpers import IDS

LAYOUTS = ("llada", "dream")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, IDS["<|mask|>"], 9, 2, 6, IDS["<|mask|>"]]])
PARAMETER = {
    "llada": "model.transformer.blocks.1.attn_out.weight",
    "dream": "model.layers.1.self_attn.o_proj.weight",
}


def spec(folder: Path, **changes: Any) -> ModelSpec:
    return ModelSpec(
        **{"name": "tiny", "path": str(folder), "dtype": "float32", "device": "cpu"} | changes
    )


def logits(model: LoadedModel) -> Tensor:
    length = TOKENS.shape[1]
    plan = ForwardPlan(ForwardKind.DENOISE, (0, length), (0, length), (0, 0))
    return model.denoiser.forward(TOKENS, plan, model.denoiser.new_cache(length))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


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
