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
    def spans(self) -> tuple[bool, bool]:  # type: ignore[override]
        """To the last block, if one of the two commits behind the open one."""
        return False, self.first.spans[1] or self.second.spans[1]

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return self.first(scores, window, state) | self.second(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.first.on_stall(scores, window, state)
