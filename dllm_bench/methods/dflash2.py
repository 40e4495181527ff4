"""DFlash 2: DFlash's block with convolutions over its slots, and a walk along its best candidates.

Released code: z-lab/dflash@07ebd93, dflash/model.py (announced as "DFlash 2: Keep Drafting
Parallel"; there is no paper).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import BlockNetwork, Context, Sampler
from dllm_bench.methods.dflash import DFlash, DrawnTokens
from dllm_bench.registry import register


@register("draft.dflash2")
@dataclass(frozen=True)
class DFlash2(DFlash):
    """A block of draft tokens, each chosen among its slot's candidates by the token before it.

    The candidates of a slot are its K most probable tokens. A path selector adds to their logits
    what the token chosen before them says; sampled tokens are drawn from the softmax of the sums at
    the decoder's temperature. The last block is cut to the tokens that the request still lacks.
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

    def _draw(
        self,
        network: BlockNetwork,
        context: Context,
        hidden_DH: Tensor,
        logits_NV: Tensor,
        sampler: Sampler,
    ) -> DrawnTokens:
        context.head_begins()
        sampler = Sampler(sampler.temperature, sampler.uniforms)  # top-p and top-k are the target's
        count = min(self.drafter.candidates, logits_NV.shape[1])
        ids_DK = logits_NV.topk(count).indices.sort(1).values  # drawn in the order of tokens
        unary_DK = logits_NV.gather(1, ids_DK)
        tokens, distributions = [context.tokens_L[-1]], []
        for hidden_H, ids_K, unary_K in zip(hidden_DH, ids_DK, unary_DK, strict=True):
            score_K = unary_K + network.path_bias(tokens[-1], hidden_H, ids_K)
            place_1, probabilities_1K = sampler.sample(score_K[None])
            tokens.append(ids_K.index_select(0, place_1)[0])
            distributions.append(probabilities_1K)
        if sampler.greedy:
            return DrawnTokens(torch.stack(tokens[1:]), None)
        drawn_DK = torch.cat([one for one in distributions if one is not None])
        return DrawnTokens(
            torch.stack(tokens[1:]),
            torch.zeros_like(logits_NV, dtype=drawn_DK.dtype).scatter_(1, ids_DK, drawn_DK),
        )
