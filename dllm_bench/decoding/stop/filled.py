"""Decode until nothing is masked (LLaDA and Dream samplers; every generation has full length)."""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.contracts import Stop
from dllm_bench.registry import register


@register("stop.filled")
@dataclass(frozen=True)
class Filled(Stop):
    """Never closes a branch, never finishes early."""
