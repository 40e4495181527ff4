"""A selector of your own in a published decoder: commit what is sure, and its right neighbour."""

from dataclasses import dataclass

from torch import Tensor

import dllm_bench as db
from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.neighbour")
@dataclass(frozen=True)
class Neighbour(Select):
    """Commit positions with at least this confidence, and the position right of each."""

    tau: float = 0.9

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        sure_KW = window.eligible_KW & (scores.confidence_KW >= self.tau)
        return sure_KW | (window.eligible_KW & sure_KW.roll(1, -1))


prompt = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"
for decoder in (db.decoder("fast_dllm"), db.decoder("fast_dllm", select=Neighbour(0.9))):
    (completion,) = db.generate("tiny-llada", prompt, decoder, max_new_tokens=64)
    print(f"{len(completion.trace)} forwards: {completion.text.strip()}")
