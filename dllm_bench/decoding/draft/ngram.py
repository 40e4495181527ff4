"""Prompt lookup (Saxena 2023): propose what followed an earlier occurrence of the last tokens.

The longest n-gram at the end of the text that occurs earlier in it is used, at its latest earlier
occurrence. Neither network nor cache: the control that shows what repetition alone is worth.
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
    """The tokens after an earlier occurrence of the end of the text; none if there is none."""

    tokens: int
    """Most draft tokens per round."""
    longest_match: int
    """Longest n-gram that is looked up."""

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
        host_L = tokens_L if context.host_L is None else context.host_L
        for match in range(min(self.longest_match, len(tokens_L) - 1), 0, -1):
            after = last_occurrence(host_L, match)
            if after is not None:
                return Proposal(tokens_L[after : after + self.tokens])
        return Proposal(tokens_L[:0])


def last_occurrence(tokens_L: Tensor, match: int) -> int | None:
    """Index after the latest earlier occurrence of the last `match` tokens; None without one."""
    earlier = tokens_L[:-1].unfold(0, match, 1)
    starts = (earlier == tokens_L[-match:]).all(-1).nonzero()
    return int(starts[-1]) + match if len(starts) else None
