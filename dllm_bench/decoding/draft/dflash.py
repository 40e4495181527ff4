"""DFlash (arXiv 2602.06036): a block-diffusion drafter proposes a whole block in one forward.

The slots are the anchor and masks behind it; features of the target's layers are injected as keys
and values. Every token is drawn from its slot's law alone, whatever the others are. Both dialects:
the drafter's `silent` says whether the anchor's slot predicts too (DeepSpec) or not (z-lab).
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


class Drawn(NamedTuple):
    """Tokens (n,), their laws (n, V) or None, logits of their survival (n,) or None."""

    tokens_N: Tensor
    law_NV: Tensor | None
    survival_N: Tensor | None = None


@register("draft.dflash")
@dataclass(frozen=True)
class DFlash(Draft):
    """`slots` fewer than the drafter was trained with; None: as trained."""

    drafter: BlockDrafter
    slots: int | None = None

    def __post_init__(self) -> None:
        if self.slots is not None and not self.drafter.silent < self.slots <= self.drafter.slots:
            raise DllmBenchError(
                f"{type(self).__name__} has slots={self.slots}, its drafter was trained with "
                f"{self.drafter.slots}; choose from {self.drafter.silent + 1} to that number."
            )

    @property
    def longest(self) -> int:
        return self._slots - self.drafter.silent

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.drafter.feature_layers

    @property
    def _slots(self) -> int:
        return self.slots or self.drafter.slots

    def new_cache(self, target: Target, length: int) -> KVCache:
        return self.drafter.on(target).new_cache(length)

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        network = self.drafter.on(context.target)
        assert context.kv is not None
        cached = context.kv.length
        hidden_ND, logits_NV = network.block(context, self._slots)
        drawn = self._draw(network, context, hidden_ND, logits_NV, sampler)
        fed = context.anchor - cached + self._slots
        return Proposal(*drawn, calls=1, fed=fed, cached=cached)

    def _draw(
        self,
        network: BlockNetwork,
        context: Context,
        hidden_ND: Tensor,
        logits_NV: Tensor,
        sampler: Sampler,
    ) -> Drawn:
        """All slots at once: too little to be timed as a head of its own."""
        return Drawn(*sampler.sample(logits_NV))
