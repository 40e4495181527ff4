"""Autoregressive decoding: every position sees those before it, and each token is fed once.

A position is predicted by the one before it, so a forward feeds the tokens that are not cached yet
(first the prompt, then the last token) and no mask. For models with shifted logits that were
trained autoregressively; with blocks of one position a masked decoder is then a plain AR decoder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Cache, Reuse
from dllm_bench.core.decoder import BlockLength, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.round import Round
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import register


@register("cache.causal")
@dataclass(frozen=True)
class CausalCache(Cache):
    """Causal attention. Any reuse is exact: a token's K/V never depend on later tokens."""

    attention: Attention = field(default="block_causal", init=False)
    reuse: Reuse = "none"
    needs: ClassVar[frozenset[Need]] = frozenset({Need("schedule", BlockLength(1))})

    def __post_init__(self) -> None:
        check_choice(self, "reuse", self.reuse, Reuse)

    def plan(self, round: Round) -> ForwardPlan:
        window, kv = round.window, round.kv
        fed = (kv.length, window.start)
        return ForwardPlan(
            kind=ForwardKind.DENOISE if kv.kept and kv.kept.stores else ForwardKind.PREFILL,
            feed=fed,
            rows=(window.start, window.stop),
            store=fed,
            attention=self.attention,
            block=1,
        )
