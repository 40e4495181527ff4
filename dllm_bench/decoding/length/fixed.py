"""Verify the whole proposal, or always its first so many tokens.

The reference point of every other rule: what calibration data are collected with, and what a
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
    """At most `tokens` of every proposal; None: all of it, 0: plain autoregressive decoding."""

    tokens: int | None = None

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens_N[: self.tokens]) for proposal in proposals]
