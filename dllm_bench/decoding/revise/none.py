"""No revision: what is committed stays (every decoder but those that edit or re-mask)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dllm_bench.core.contracts import Reads, Revise
from dllm_bench.registry import register


@register("revise.none")
@dataclass(frozen=True)
class NoRevision(Revise):
    """Changes nothing and reads nothing."""

    revises: ClassVar[bool] = False
    reads_rows: ClassVar[Reads] = "masked"
    by_position: ClassVar[bool] = False
