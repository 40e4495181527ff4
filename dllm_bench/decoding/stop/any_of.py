"""Several stop rules at once: a branch is closed or finished as soon as one rule says so."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from dllm_bench.core.contracts import Stop, StopFlags
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register


@register("stop.any_of")
@dataclass(frozen=True)
class AnyOf(Stop):
    """Closed, finished or cut by any of `rules`; the shortest of several lengths is taken."""

    rules: tuple[Stop, ...]

    @property
    def stops_on_end_token(self) -> bool:  # type: ignore[override]
        """If one of the rules does."""
        return any(rule.stops_on_end_token for rule in self.rules)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))

    def ended(self, branches: DecodeState) -> StopFlags:
        flags = [rule.ended(branches) for rule in self.rules]
        return StopFlags(
            any_of(each.closed_K for each in flags), any_of(each.finished_K for each in flags)
        )


def any_of(decisions: Iterable[Tensor | None]) -> Tensor | None:
    """True where one of the rules says so; None if no rule decides."""
    known = [flags for flags in decisions if flags is not None]
    return reduce(torch.logical_or, known) if known else None
