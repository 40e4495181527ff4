"""A selector, a model and a benchmark that this package registers for dllm-bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.benchmark import Benchmark, Encode, SampleScore
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.stride")
@dataclass(frozen=True)
class Stride(Select):
    """Commit every `n`-th position of the canvas."""

    n: int = 2

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        place_W = torch.arange(window.start, window.stop, device=scores.ids_KW.device)
        return window.eligible_KW & (place_W % self.n == 0)


@register("benchmark.sums")
@dataclass(frozen=True)
class Sums(Benchmark):
    """Sums of two small numbers; right if the sum is in the text."""

    name: str = "sums"
    max_new_tokens: int = 16

    def requests(self, encode: Encode) -> Sequence[Request]:
        texts = {f"sums/{a}": f"Question: What is {a} + {a}?\nAnswer:" for a in range(1, 6)}
        new = self.max_new_tokens
        return [Request(key, tuple(encode(text)), new, (), text) for key, text in texts.items()]

    def dataset_hash(self) -> str:
        return "sums of 1 to 5"

    def score(self, texts: Mapping[str, str]) -> Mapping[str, SampleScore]:
        right = {key: str(2 * int(key.split("/")[1])) in text for key, text in texts.items()}
        return {key: SampleScore(float(ok), "", {"right": ok}) for key, ok in right.items()}
