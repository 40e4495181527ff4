"""Decode until nothing is masked (LLaDA and Dream samplers; every generation has full length)."""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.contracts import Stop


@dataclass(frozen=True)
class Filled(Stop):
    """Never closes a branch, never finishes early."""
