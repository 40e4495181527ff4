"""DDTree (arXiv 2604.12989): a tree of drafts from the marginals of a block drafter.

Released code: liranringel/ddtree@c96427a, ddtree.py. A block drafter gives every slot a
distribution of its own, so a prefix of tokens is as probable as the product of its tokens. The tree
of B tokens with the longest expected path under that product is that of the B most probable
prefixes (propositions 1 and 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Context, Sampler
from dllm_bench.core.transfer import constant, to_device
from dllm_bench.decoding.numerics import at_least_float32, statistics
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
    needs = needing({"verify": Condition.DRAFT_TREES})

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
    """Return tokens (D,) of the most probable prefixes of N slots, best first, and parents.

    Parents are those of `Proposal`. D is `budget`, or the number of prefixes if there are fewer.
    width: tokens of a slot that are considered; None: as many as `budget`.
    """
    ranks = min(budget, width or budget, logits_NV.shape[1])
    top_NK = logits_NV.topk(ranks)
    best_N, _, sum_N, _ = statistics(logits_NV, logits_NV.dtype, entropy=False)
    score_NK = at_least_float32(top_NK.values) - (best_N + sum_N.log())[:, None]
    pairs = _pairs(len(logits_NV), ranks, budget, logits_NV.device)
    score_X = score_NK.flatten()[pairs.ends_2X[0]].double()
    score_X[0] = 0.0  # the anchor, which every prefix contains
    anchor_1, first_S, *added = score_X.split(pairs.sizes)
    _, _, *before = pairs.before_X.split(pairs.sizes)
    scores = [anchor_1, first_S]  # of the kept prefixes, each slot's from the best on
    kept = [constant(range(len(one)), one.device) for one in scores]
    for prefix_X, added_X in zip(before, added, strict=True):
        best = (scores[-1][prefix_X] + added_X).sort(descending=True, stable=True)
        scores.append(best.values[:budget])
        kept.append(best.indices[:budget])
    # A parent is at least as probable as its children, and stands before them.
    order_Y = torch.cat(scores).sort(descending=True, stable=True).indices
    place_Y = torch.empty_like(order_Y)
    place_Y.scatter_(0, order_Y, constant(range(len(order_Y)), order_Y.device))
    pair_Y = torch.cat(kept) + pairs.level_Y
    token_D, parent_D = pairs.ends_2X.index_select(1, pair_Y[order_Y[1 : budget + 1]])
    return top_NK.indices.flatten()[token_D], place_Y[parent_D]


class _Pairs(NamedTuple):
    """The anchor, then pairs of a prefix and its next token, slot by slot: X.

    The best `budget` pairs of a slot are the prefixes for the next one. The anchor and these of all
    slots are Y.
    """

    sizes: list[int]
    """1 for the anchor, then the number of pairs with a token of each slot."""
    before_X: Tensor
    """The prefix, as its place among the prefixes kept of the slot before."""
    ends_2X: Tensor
    """The token, as an index into (N, K), and the prefix, as an index into Y."""
    level_Y: Tensor
    """Index of the first pair with a token of the same slot."""


@lru_cache
def _pairs(slots: int, ranks: int, budget: int, device: torch.device) -> _Pairs:
    """Return the pairs that can be among the best `budget` of their slot: (p + 1) * (r + 1) pairs
    are at least as probable as that of prefix p and rank r.
    """
    rows, sizes, levels = [(0, 0, 0)], [1], [0]
    prefixes, first = 1, 0  # kept of the slot before, and where they are in Y
    for slot in range(slots):
        pairs = [
            (p, slot * ranks + r, first + p)
            for p in range(prefixes)
            for r in range(min(ranks, budget // (p + 1)))
        ]
        first += prefixes
        prefixes = min(budget, len(pairs))
        sizes.append(len(pairs))
        levels += [len(rows)] * prefixes
        rows += pairs
    before_X, *ends = to_device(rows, device).unbind(1)
    return _Pairs(sizes, before_X, torch.stack(ends), to_device(levels, device))
