"""Two selectors at once: what either chooses is committed (Learn2PD: filter or top-k).

The stall rule is that of the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("select.union")
@dataclass(frozen=True)
class Union(Select):
    """Commits what `first` or `second` chooses."""

    first: Select
    second: Select

    @property
    def never_stalls(self) -> bool:  # type: ignore[override]
        """If one of the two never stalls."""
        return self.first.never_stalls or self.second.never_stalls

    @property
    def reaches_beyond(self) -> bool:  # type: ignore[override]
        """If one of the two does."""
        return self.first.reaches_beyond or self.second.reaches_beyond

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return self.first(scores, window, state) | self.second(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.first.on_stall(scores, window, state)

    def beyond(self, state: DecodeState) -> Tensor | None:
        beyond_KW = self.first.beyond(state)
        return self.second.beyond(state) if beyond_KW is None else beyond_KW

    def accepted(self, state: DecodeState) -> Tensor | None:
        accepted_KW = self.first.accepted(state)
        return self.second.accepted(state) if accepted_KW is None else accepted_KW
