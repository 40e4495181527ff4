"""DDTree (arXiv 2604.12989): a tree of drafts from the marginals of a block drafter.

Released code: liranringel/ddtree@c96427a, ddtree.py. A block drafter gives every slot a
distribution of its own, so a prefix of tokens is as probable as the product of its tokens. The tree
of B tokens with the longest expected path under that product is that of the B most probable
prefixes (propositions 1 and 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, Need
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Sampler
from dllm_bench.core.transfer import to_device
from dllm_bench.methods.dflash import DFlash, DrawnTokens, SlotBlock
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("draft.ddtree")
@dataclass(frozen=True)
class DDTree(DFlash):
    """The most probable prefixes of a block, as a tree; a temperature does not change it."""

    budget: Positive | None = None
    """B, draft tokens of a tree; None: as many as the block has slots that predict a token."""
    width: Positive | None = None
    """Tokens of a slot that are considered, the most probable ones; None: as many as `budget`."""
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether blocks get shorter near the limit of a text, to `budget` and one more than the tokens
    left, as the released buffer has room for. Its slice of their logits begins with the anchor's
    slot, so that every marginal is read one slot late. The text is the same."""
    needs: ClassVar[frozenset[Need]] = frozenset({Need("verify", Condition.DRAFT_TREES)})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafter.has_transition_head or self.drafter.candidates:
            raise DllmBenchError(
                "DDTree takes the tokens of a block as independent, and this drafter has a head "
                "that makes each depend on the one before it; choose a DFlash drafter, or "
                "decoder/draft=dspark or dflash2."
            )

    @property
    def longest(self) -> int:
        slots = super().longest
        return min(slots, 1) * (self.budget or slots)

    def slots_in(self, context: Context) -> int:
        slots = super().slots_in(context)
        if not self.released or context.left is None:
            return slots
        return min(slots, context.left + 1 + (self.budget or self._slots))

    def _first(self, slots: int) -> int | None:
        return 0 if slots < self._slots else None

    def _draw(self, block: SlotBlock, sampler: Sampler) -> DrawnTokens:
        tokens_D, parents_D = likeliest_tree(block.logits_NV, self.longest, self.width)
        return DrawnTokens(tokens_D, parents_D=parents_D)


def likeliest_tree(
    logits_NV: Tensor, budget: int, width: int | None = None
) -> tuple[Tensor, Tensor]:
    """Tokens (D,) of the most probable prefixes of N slots, the most probable first, and parents.

    Parents are those of `Proposal`. D is `budget`, or the number of prefixes if there are fewer.
    width: tokens of a slot that are considered; None: as many as `budget`.
    """
    ranks = min(budget, width or budget, logits_NV.shape[1])
    top_NK = logits_NV.topk(ranks)
    score_NK = top_NK.values.float() - logits_NV.float().logsumexp(-1, keepdim=True)
    levels = list(_levels(score_NK.double(), top_NK.indices, budget))
    score_X, token_X, parent_X = (torch.cat(parts) for parts in zip(*levels, strict=True))
    # A parent is at least as probable as its children, and stands before them.
    order_D = score_X.sort(descending=True, stable=True).indices[:budget]
    place_X = torch.zeros(len(score_X) + 1, dtype=torch.long, device=score_X.device)
    place_X[1:][order_D] = torch.arange(1, len(order_D) + 1, device=score_X.device)
    return token_X[order_D], place_X[parent_X[order_D]]


def _levels(
    score_NK: Tensor, ids_NK: Tensor, budget: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of the most probable prefixes of each length: scores, last tokens, and where the prefix
    before stands, from 1 in the order of all that are returned; 0: nothing is before it.
    """
    before_S, first = score_NK.new_zeros(1), 0
    for score_K, ids_K in zip(score_NK, ids_NK, strict=True):
        prefix_X, rank_X = _pairs(len(before_S), len(ids_K), budget, ids_K.device)
        best = (before_S[prefix_X] + score_K[rank_X]).sort(descending=True, stable=True)
        kept_S = best.indices[:budget]
        yield best.values[:budget], ids_K[rank_X[kept_S]], first + prefix_X[kept_S]
        first += len(before_S)
        before_S = best.values[:budget]


@lru_cache
def _pairs(prefixes: int, ranks: int, budget: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prefixes and ranks of their next token, the most probable of both first, that can be among
    the best `budget`: (p + 1) * (r + 1) pairs are at least as probable as (p, r).
    """
    pairs = [(p, r) for p in range(prefixes) for r in range(min(ranks, budget // (p + 1)))]
    prefix_X, rank_X = to_device(pairs, device).unbind(1)
    return prefix_X, rank_X
