"""What a checkpoint is, told from config, tokenizer and headers: sizes, ids, memory it would take.

For `dllm-bench doctor MODEL`, before anything large is read. Refuses what loading would refuse.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dllm_bench.core.request import SpecialTokens
from dllm_bench.models import checkpoint, lora
from dllm_bench.models.load import Opened, dtype_of, open_checkpoint
from dllm_bench.models.sources import commit, locate
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.text import TextFront, read_tokenizer


@dataclass(frozen=True)
class Inspection:
    """Facts of one checkpoint; the memory is that of the run's dtype."""

    opened: Opened
    folders: dict[str, Path]  # source -> folder, the adapter's included
    files: dict[Path, int]  # weight file -> bytes
    stored: dict[str, int]  # dtype in the files -> tensors
    dtype: torch.dtype
    parameters: int
    cached_per_position: int  # numbers in the keys and values of one position
    text: TextFront

    @property
    def commits(self) -> dict[str, str | None]:
        """Source -> commit, None outside of the hub's cache."""
        return {source: commit(folder) for source, folder in self.folders.items()}

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.parameters * self.dtype.itemsize

    def cache_bytes(self, positions: int) -> int:
        """Memory of the keys and values of so many positions."""
        return positions * self.cached_per_position * self.dtype.itemsize

    def named_ids(self) -> dict[str, str]:
        """Role -> id and text of each special token."""
        tokenizer = self.text.tokenizer
        ids = {role: i for role, i in asdict(self.text.special).items() if i is not None}
        texts = {i: tokenizer.convert_ids_to_tokens(i) for i in ids.values()} if tokenizer else {}
        return {role: " ".join([str(i), texts.get(i) or ""]).strip() for role, i in ids.items()}


def inspect(spec: ModelSpec) -> Inspection:
    """Read what says what the checkpoint is; every refusal is a sentence."""
    opened = open_checkpoint(spec)
    module = opened.empty_module()
    weights = opened.weights(module)
    tokenizer = read_tokenizer(opened.folder)
    special: SpecialTokens = opened.special(tokenizer, module.config.vocab_size)
    folders, files = {spec.path: opened.folder}, checkpoint.weight_files(opened.folder)
    if spec.lora is not None:
        folders[spec.lora] = locate(spec.lora, spec.lora_revision)
        files += checkpoint.weight_files(folders[spec.lora], lora.STEM)
    return Inspection(
        opened=opened,
        folders=folders,
        files={file: file.stat().st_size for file in files},
        stored=dict(Counter(weights.dtype(name) for name in weights.names)),
        dtype=dtype_of(spec),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        cached_per_position=2 * sum(x.self_attn.k_proj.out_features for x in module.model.layers),
        text=opened.text(tokenizer, special),
    )
