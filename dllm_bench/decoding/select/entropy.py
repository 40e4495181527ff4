"""Commit every position whose distribution has little entropy (dParallel, arXiv 2509.26488; d3LLM).

{H <= tau}, in nats. A block that must progress and has none commits its most confident position
(the inherited stall rule), with an entropy score the one of least entropy. d3LLM
(arXiv 2601.07568) decodes several blocks at once and in every forward also commits the position of
least entropy among all of them: `best`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.select.steps import most_confident
from dllm_bench.registry import register


@register("select.entropy")
@dataclass(frozen=True)
class EntropyThreshold(Select):
    """Commits positions by the entropy of their distribution."""

    tau: float  # nats; below 0: one token per forward
    best: bool = False  # also the most confident position of all open blocks
    needs: ClassVar[frozenset[Need]] = frozenset({Need("score", Condition.ENTROPY)})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # by `needs`
        where_KW = scores.neg_entropy_KW >= -self.tau
        return where_KW | most_confident(scores, window) if self.best else where_KW
