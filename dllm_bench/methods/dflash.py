"""DFlash (arXiv 2602.06036): a block-diffusion drafter proposes a whole block in one forward.

The slots of a block are the anchor and the masks after it; features of the target's layers are
injected as keys and values. Every token is drawn from the distribution of its own slot, independent
of the other tokens. Both published variants: the drafter's `silent` says whether the anchor's slot
predicts a token too (DeepSpec) or not (z-lab). Blocks of nothing but silent slots (z-lab's block
size 1, its baseline) draft nothing and leave the drafter out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
from dllm_bench.registry import register


class DrawnTokens(NamedTuple):
    """The first three fields of `Proposal`, with the same meaning."""

    tokens_D: Tensor
    probabilities_DV: Tensor | None
    survival_D: Tensor | None = None


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
        """Slots of the next block."""
        return self._slots

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        slots = self.slots_in(context)
        if slots == self.drafter.silent:
            return Proposal(context.tokens_L[:0])
        network = self.drafter.on(context.target)
        assert context.kv is not None
        cached = context.kv.length
        hidden_DH, logits_NV = network.block(context, slots)
        drawn = self._draw(network, context, hidden_DH, logits_NV, sampler)
        fed = context.anchor - cached + slots
        return Proposal(*drawn, calls=1, fed=fed, cached=cached)

    def _draw(
        self,
        network: BlockNetwork,
        context: Context,
        hidden_DH: Tensor,
        logits_NV: Tensor,
        sampler: Sampler,
    ) -> DrawnTokens:
        """Draw all slots at once; too short a step to be timed as a head of its own."""
        return DrawnTokens(*sampler.sample(logits_NV))
