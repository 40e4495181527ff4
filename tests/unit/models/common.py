"""Helpers of tests of models: a spec for a folder, logits of a fixed text, edits of files; plans of
each form of attention over one canvas, and the distance between two sets of logits.
"""

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
from dllm_bench.models.transformer import TransformerDenoiser
from tests.helpers import IDS, VOCAB, whole_forward
from tests.unit.models.restated import Sees

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
    return whole_forward(model.denoiser, TOKENS)


def edit(file: Path, **changes: Any) -> None:
    """Change entries of a JSON file; "absent" takes one out."""
    entries = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: one for key, one in entries.items() if one != "absent"}))


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


LENGTH, PROMPT, BLOCK = 21, 5, 4
RELATIVE = 1e-4
MASK = IDS["<|mask|>"]
FIRST = torch.tensor(0)
FORMS: dict[str, Sees] = {
    "full": lambda q, k: True,
    "block_causal": lambda q, k: block_of(k) <= block_of(q),
    "causal": lambda q, k: k <= q,
}


def block_of(position: int) -> int:
    return 0 if position < PROMPT else 1 + (position - PROMPT) // BLOCK


def canvas(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens_1L = torch.randint(0, VOCAB - len(IDS), (1, LENGTH), generator=generator)
    masked_1L = torch.rand(1, LENGTH, generator=generator) < 0.4
    masked_1L[:, :PROMPT] = False
    return tokens_1L.masked_fill(masked_1L, MASK)


def step(
    form: str, feed: tuple[int, int], rows: tuple[int, int], store: tuple[int, int]
) -> ForwardPlan:
    if form == "full":
        return ForwardPlan(ForwardKind.DENOISE, feed, rows, store)
    block, origin = (1, 0) if form == "causal" else (BLOCK, PROMPT)
    return ForwardPlan(ForwardKind.DENOISE, feed, rows, store, "block_causal", block, origin)


def ours(model: TransformerDenoiser, tokens_1L: Tensor, form: str) -> Tensor:
    """Return logits (L, V) as the published model gives them: shifted rows are shifted back."""
    length = tokens_1L.shape[1]
    ahead = int(model.shifted)
    plan = step(form, (0, length), (ahead, length + ahead), (0, 0))
    return model.forward(tokens_1L, plan, model.new_cache(length + ahead))[0]


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())
