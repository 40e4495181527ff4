"""Verify the whole draft, or always its first tokens up to a fixed number.

The reference for every other length rule: calibration data are collected with it, and it is what a
production system with a static speculation budget does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dllm_bench.core.speculative import Proposal, VerifyLength
from dllm_bench.registry import register


@register("length.fixed")
@dataclass(frozen=True)
class FixedLength(VerifyLength):
    """The same limit for every proposal."""

    tokens: int | None = None
    """Most draft tokens verified; None: all of them, 0: plain autoregressive decoding."""

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens_D[: self.tokens]) for proposal in proposals]
