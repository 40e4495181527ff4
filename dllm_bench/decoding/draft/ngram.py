"""Prompt lookup (Saxena 2023): propose what followed the last time the text ended like this.

The longest n-gram at the end of the text that occurred before decides, its latest occurrence
counts. No network, no memory: the control that shows what repetition alone is worth.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Draft, Proposal, Sampler
from dllm_bench.registry import register


@register("draft.ngram")
@dataclass(frozen=True)
class NGramDraft(Draft):
    """Up to `tokens` tokens after an earlier occurrence of the last `longest_match` or fewer."""

    tokens: int
    longest_match: int

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.longest_match < 1:
            raise DllmBenchError(
                f"NGramDraft has tokens={self.tokens} and longest_match={self.longest_match}; "
                "choose 1 or more for both."
            )

    @property
    def longest(self) -> int:
        return self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        tokens_L = context.tokens_L
        for match in range(min(self.longest_match, len(tokens_L) - 1), 0, -1):
            after = last_occurrence(tokens_L, match)
            if after is not None:
                return Proposal(tokens_L[after : after + self.tokens])
        return Proposal(tokens_L[:0])


def last_occurrence(tokens_L: Tensor, match: int) -> int | None:
    """Where the latest earlier occurrence of the last `match` tokens ends; None without one."""
    earlier = tokens_L[:-1].unfold(0, match, 1)
    found = (earlier == tokens_L[-match:]).all(-1).nonzero()
    return int(found[-1]) + match if len(found) else None
