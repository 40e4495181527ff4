"""Several stop rules at once: closed or finished as soon as one of them says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Scores, Stop, StopFlags
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("stop.any_of")
@dataclass(frozen=True)
class AnyOf(Stop):
    """`rules` are asked in order; the shortest canvas wins."""

    rules: tuple[Stop, ...]

    @property
    def reads_ahead(self) -> bool:  # type: ignore[override]
        """Whether any of the rules does."""
        return any(rule.reads_ahead for rule in self.rules)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def ended(self, branches: DecodeState) -> StopFlags:
        said = [rule.ended(branches) for rule in self.rules]
        return StopFlags(
            any_of(each.closed_K for each in said), any_of(each.finished_K for each in said)
        )

    def shorten(self, state: DecodeState, seen: Scores, window: Window) -> Tensor | None:
        cuts = [rule.shorten(state, seen, window) for rule in self.rules]
        lengths = [length for length in cuts if length is not None]
        return torch.stack(lengths).min() if lengths else None


def any_of(said: Iterable[Tensor | None]) -> Tensor | None:
    """True where one of the rules says so; None where none of them ever does."""
    known = [flags for flags in said if flags is not None]
    return reduce(torch.logical_or, known) if known else None
