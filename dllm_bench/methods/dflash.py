"""DFlash (arXiv 2602.06036): a block-diffusion drafter proposes a whole block in one forward.

The slots of a block are the anchor and the masks after it; features of the target's layers are
injected as keys and values. Every token is drawn from the distribution of its own slot,
independently of the other tokens. Both published variants are covered: the drafter's `silent` says
whether the anchor's slot also predicts a token (DeepSpec) or not (z-lab). A block of silent slots
only (z-lab's block size 1, its baseline) drafts nothing and skips the drafter.

DFlash 2 (z-lab/dflash@07ebd93, dflash/model.py; announced as "DFlash 2: Keep Drafting Parallel",
no paper) adds convolutions over the slots, and a path search over their best candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.denoiser import KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import (
    BlockDrafter,
    BlockNetwork,
    Context,
    Draft,
    Proposal,
    Sampler,
    Target,
)
from dllm_bench.core.transfer import constant
from dllm_bench.registry import register


class DrawnTokens(NamedTuple):
    """The first fields of `Proposal`, with the same meaning."""

    tokens_D: Tensor
    probabilities_DV: Tensor | None = None
    survival_D: Tensor | None = None
    parents_D: Tensor | None = None


class SlotBlock(NamedTuple):
    """Output of a drafter's network for the N slots of a block that predict a token."""

    network: BlockNetwork
    context: Context
    hidden_NH: Tensor
    logits_NV: Tensor


@register("draft.dflash")
@dataclass(frozen=True)
class DFlash(Draft):
    """A block of draft tokens, drawn independently of each other."""

    drafter: BlockDrafter
    slots: int | None = None
    """Slots per block, at most as many as in training; None: as many as in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = max(self.drafter.silent, 1)
        if self.slots is not None and not least <= self.slots <= self.drafter.slots:
            raise DllmBenchError(
                f"{type(self).__name__} has slots={self.slots}, but its drafter was trained with "
                f"{self.drafter.slots}; choose {least} to {self.drafter.slots}."
            )

    @property
    def longest(self) -> int:
        return self._slots - self.drafter.silent

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers if self.longest else ()

    @property
    def _slots(self) -> int:
        return self.slots or self.drafter.slots

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def slots_in(self, context: Context) -> int:
        """Return the number of slots of the next block."""
        return self._slots

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        slots = self.slots_in(context)
        if slots == self.drafter.silent:
            return Proposal(context.tokens_L[:0])
        network = self.drafter.on(context.target)
        assert context.kv is not None
        cached = context.kv.length
        block = SlotBlock(network, context, *network.block(context, slots, self._first(slots)))
        drawn = self._draw(block, sampler)
        fed = context.anchor - cached + slots
        return Proposal(*drawn, calls=1, fed=fed, cached=cached)

    def _first(self, slots: int) -> int | None:
        """Return the first slot of a block to draw from; None: the first that predicts."""
        return None

    def _draw(self, block: SlotBlock, sampler: Sampler) -> DrawnTokens:
        """Draw all slots at once; this is too short to be timed as a separate head."""
        return DrawnTokens(*sampler.sample(block.logits_NV))


@register("draft.dflash2")
@dataclass(frozen=True)
class DFlash2(DFlash):
    """A block of draft tokens, each chosen among its slot's candidates by the token before it.

    The candidates of a slot are its K most probable tokens. A path selector adds a term to their
    logits that depends on the token chosen before them; sampled tokens are drawn from the softmax
    of the sums at the decoder's temperature. The last block is cut to the tokens that the request
    still lacks.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.candidates:
            raise DllmBenchError(
                "DFlash 2 needs a drafter with a path selector, and this one has none; choose "
                "another drafter, decoder/draft=dflash or decoder/draft=dspark."
            )

    def slots_in(self, context: Context) -> int:
        return self._slots if context.left is None else min(self._slots, context.left + 1)

    def _draw(self, block: SlotBlock, sampler: Sampler) -> DrawnTokens:
        network, context, hidden_NH, logits_NV = block
        context.head_begins()
        sampler = Sampler(sampler.temperature, sampler.uniforms)  # top-p, top-k: only the target's
        count = min(self.drafter.candidates, logits_NV.shape[1])
        ids_NK = logits_NV.topk(count).indices.sort(1).values  # drawn in the order of token ids
        unary_NK = logits_NV.gather(1, ids_NK)
        anchor_1K = context.tokens_L[-1:].expand(1, count)
        before_NK = torch.cat([anchor_1K, ids_NK[:-1]])
        score_NKK = unary_NK[:, None] + network.path_biases(before_NK, hidden_NH, ids_NK)
        places, distributions = [constant(0, ids_NK.device).reshape(1)], []
        for score_KK in score_NKK:
            place_1, probabilities_1K = sampler.sample(score_KK.index_select(0, places[-1]))
            places.append(place_1)
            distributions.append(probabilities_1K)
        tokens_N1 = ids_NK.gather(1, torch.cat(places[1:])[:, None])
        drawn_NV = sampler.joined(distributions)
        if drawn_NV is not None:
            among_NV = torch.zeros_like(logits_NV, dtype=drawn_NV.dtype)
            drawn_NV = among_NV.scatter_(1, ids_NK, drawn_NV)
        return DrawnTokens(tokens_N1[:, 0], drawn_NV)
