"""DSpark (§3.1): DFlash's block, its tokens drawn left to right.

p_k = softmax(U_k + B_k): what a head says about slot k after the token before it is added to the
block's logits; the head is small, so the block stays one forward. A confidence head says how
likely each token survives, given the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import BlockNetwork, Context, HeadState, Sampler
from dllm_bench.decoding.draft.dflash import DFlash, Drawn
from dllm_bench.registry import register


@register("draft.dspark")
@dataclass(frozen=True)
class DSpark(DFlash):
    """Needs a drafter with a head of transitions (Markov, gated or RNN)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.sequential:
            raise DllmBenchError(
                "The drafter of DSpark has no head of transitions; choose one with a head, or "
                "decoder/draft=dflash."
            )

    @property
    def gives(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"survival estimates"} if self.drafter.survives else ())

    def _draw(
        self,
        network: BlockNetwork,
        context: Context,
        hidden_ND: Tensor,
        logits_NV: Tensor,
        sampler: Sampler,
    ) -> Drawn:
        context.head_begins()
        tokens, laws, survivals = [context.tokens_L[-1]], [], []
        state: HeadState = None
        for hidden_D, logits_V in zip(hidden_ND, logits_NV, strict=True):
            if self.drafter.survives:
                survivals.append(network.survival(tokens[-1], hidden_D))
            bias_V, state = network.transition(tokens[-1], hidden_D, state)
            token_1, law_1V = sampler.sample((logits_V + bias_V)[None])
            tokens.append(token_1[0])
            laws.append(law_1V)
        return Drawn(
            torch.stack(tokens[1:]),
            None if sampler.greedy else torch.cat([law for law in laws if law is not None]),
            torch.stack(survivals) if survivals else None,
        )
