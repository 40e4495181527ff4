"""Learn2PD's learned filter (arXiv 2509.25188, §3.2, Algorithm 2): a small network decides.

It reads the confidences of a whole block, decoded positions included, and gives every position the
probability that its candidate is final; masked positions above `tau` are committed. The authors'
code commits the surest positions of the step beside it (`union` of filter and topk), which never
stalls; alone, a block that gets nothing commits the position the filter thinks best of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import FilterHead, Scores, Select
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register

ACCEPTED = "filter.accepted"  # memo: what the filter accepted at the last forward, (K, W)
LOGITS = "filter.logits"

Decoded = Literal["model", "one"]
StallOrder = Literal["filter", "confidence"]


@register("select.filter")
@dataclass(frozen=True)
class Filter(Select):
    """`head` is tied to a block length; probability > tau is committed.

    decoded: what the head reads at decoded positions, the model's own confidence there (the
    authors' code) or 1; stall: what ranks positions where the filter accepts none.
    """

    head: FilterHead
    tau: float = 0.96
    decoded: Decoded = "model"
    stall: StallOrder = "filter"

    def __post_init__(self) -> None:
        if self.decoded not in get_args(Decoded) or self.stall not in get_args(StallOrder):
            raise DllmBenchError(
                f"Filter has decoded {self.decoded!r} and stall {self.stall!r}; choose among "
                f"{', '.join(get_args(Decoded))} and {', '.join(get_args(StallOrder))}."
            )

    @property
    def needs(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """Blocks of the length the head was trained for."""
        return frozenset({("schedule", f"blocks of {self.head.block}")})

    @property
    def reads_decoded(self) -> bool:  # type: ignore[override]
        """Unless it reads 1 there."""
        return self.decoded == "model"

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        input_KW = scores.probability_KW.float()
        if self.decoded == "one":
            input_KW = input_KW.masked_fill(~window.of(state.masked_KL), 1.0)
        logits_KW = window.flat(self.head(window.blocks(input_KW, fill=1.0)))
        accepted_KW = (logits_KW.sigmoid() > self.tau) & window.eligible_KW
        state.memo[LOGITS], state.memo[ACCEPTED] = logits_KW, accepted_KW
        return accepted_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Of equal logits the surest position counts."""
        if self.stall == "filter":
            open_KW = state.memo[LOGITS].masked_fill(~window.eligible_KW, -torch.inf)
            logits_KNB = window.blocks(open_KW, -torch.inf)
            best_KW = window.flat(logits_KNB == logits_KNB.amax(-1, keepdim=True))
            ranking_KW = scores.confidence_KW.masked_fill(~best_KW, -torch.inf)
            scores = Scores(scores.ids_KW, scores.probability_KW, ranking_KW)
        return super().on_stall(scores, window, state)
