"""No draft: the speculative loop with empty proposals is plain autoregressive decoding.

The baseline of every speed-up: same loop, same cache, same sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler


@dataclass(frozen=True)
class NoDraft(Draft):
    """Proposes nothing; the target decides every token alone."""

    @property
    def longest(self) -> int:
        return 0

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        return Proposal(context.tokens_L[:0])
