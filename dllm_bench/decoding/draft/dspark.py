"""DSpark (§3.1): the block of DFlash, its tokens drawn one after the other.

p_k = softmax(U_k + B_k): a small sequential head reads the token before slot k and adds B_k to the
block's logits U_k, so the block still takes one forward. A confidence head estimates how likely
each token is accepted, given the token before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import BlockNetwork, Context, HeadState, Sampler
from dllm_bench.decoding.draft.dflash import DFlash, DrawnTokens
from dllm_bench.registry import register


@register("draft.dspark")
@dataclass(frozen=True)
class DSpark(DFlash):
    """A block of draft tokens whose drafter has a transition head (Markov, gated or RNN)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.drafter.has_transition_head:
            raise DllmBenchError(
                "DSpark needs a drafter with a transition head, and this one has none; choose "
                "another drafter, or decoder/draft=dflash."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        return frozenset({Condition.SURVIVAL_ESTIMATES} if self.drafter.has_confidence_head else ())

    def _draw(
        self,
        network: BlockNetwork,
        context: Context,
        hidden_DH: Tensor,
        logits_NV: Tensor,
        sampler: Sampler,
    ) -> DrawnTokens:
        context.head_begins()
        tokens, distributions, survivals = [context.tokens_L[-1]], [], []
        state: HeadState = None
        for hidden_H, logits_V in zip(hidden_DH, logits_NV, strict=True):
            if self.drafter.has_confidence_head:
                survivals.append(network.survival(tokens[-1], hidden_H))
            bias_V, state = network.transition(tokens[-1], hidden_H, state)
            token_1, probabilities_1V = sampler.sample((logits_V + bias_V)[None])
            tokens.append(token_1[0])
            distributions.append(probabilities_1V)
        return DrawnTokens(
            torch.stack(tokens[1:]),
            None
            if sampler.greedy
            else torch.cat([one for one in distributions if one is not None]),
            torch.stack(survivals) if survivals else None,
        )
