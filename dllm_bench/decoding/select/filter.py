"""Learn2PD's learned filter (arXiv 2509.25188, §3.2, Algorithm 2): a small network decides.

It reads the confidences of a whole block, committed positions included, and gives every position
the probability that its candidate is final; masked positions above `tau` are committed. The
authors' code also commits the most confident positions of the step (`union` of filter and topk) and
so never stalls. Alone, a block that must progress and would commit nothing commits the position
with the largest output of the filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice, check_probabilities
from dllm_bench.core.contracts import FilterHead, Reads, Scores, Select
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.registry import register

ACCEPTED = MemoKey[Tensor]("filter.accepted")  # positions accepted in the last forward, (K, W)
LOGITS = MemoKey[Tensor]("filter.logits")  # output of the head in the last forward, (K, W)

CommittedInput = Literal["model", "one"]
StallOrder = Literal["filter", "confidence"]


@register("select.filter")
@dataclass(frozen=True)
class Filter(Select):
    """Commits the masked positions that the head accepts with a probability above `tau`."""

    head: FilterHead
    tau: float = 0.96
    decoded: CommittedInput = "model"  # what the head reads at committed positions: the model's own
    # confidence there (the authors' code) or 1
    stall: StallOrder = "filter"  # what ranks the positions if the filter accepts none

    def __post_init__(self) -> None:
        check_probabilities(self, "tau")
        check_choice(self, "decoded", self.decoded, CommittedInput)
        check_choice(self, "stall", self.stall, StallOrder)

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """Blocks of the length the head was trained for, and what it reads of them."""
        block = Need("schedule", BlockLength(self.head.block))
        reads = {Need("cache", Condition.FED_WINDOW)} if self.reads_rows == "window" else set()
        return frozenset({block, *reads})

    @property
    def reads_rows(self) -> Reads:  # type: ignore[override]
        """Committed positions too, unless it reads 1 there."""
        return "window" if self.decoded == "model" else "masked"

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        input_KW = scores.probability_KW.float()
        if self.decoded == "one":
            input_KW = input_KW.masked_fill(~window.of(state.masked_KL), 1.0)
        logits_KW = window.flat(self.head(window.blocks(input_KW, fill=1.0)))
        accepted_KW = (logits_KW.sigmoid() > self.tau) & window.eligible_KW
        state.memo[LOGITS], state.memo[ACCEPTED] = logits_KW, accepted_KW
        return accepted_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Of equal logits the more confident position counts."""
        if self.stall == "filter":
            open_KW = state.memo[LOGITS].masked_fill(~window.eligible_KW, -torch.inf)
            logits_KNP = window.blocks(open_KW, -torch.inf)
            best_KW = window.flat(logits_KNP == logits_KNP.amax(-1, keepdim=True))
            ranking_KW = scores.confidence_KW.masked_fill(~best_KW, -torch.inf)
            scores = Scores(scores.ids_KW, scores.probability_KW, ranking_KW)
        return super().on_stall(scores, window, state)
