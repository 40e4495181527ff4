"""Keep the K/V of finished blocks; feed what is finished but not cached yet, and the open blocks.

Exact under block-causal attention (D2F): a finished block never sees later ones, so its K/V are
final when it is fed once more with its final tokens, in the same forward as the next denoising
step. Approximate under full attention (LoPA-Dist-NV): the cached K/V were computed while the block
saw the open blocks of that forward, and they are not renewed. `reuse` takes the K/V of a prompt's
beginning from an earlier request. That is exact for absolute blocks (block diffusion). It is
approximate where blocks begin behind the prompt (D2F), because the prompt is one block then and
each of its positions saw all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Cache, Reuse
from dllm_bench.core.decoder import BlockLength, Condition, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("cache.block")
@dataclass(frozen=True)
class BlockCache(Cache):
    """Caches finished blocks."""

    attention: Attention = "block_causal"  # "block_causal" is exact, "full" is approximate
    reuse: Reuse = "none"
    renews: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether a finished block is fed once more with its final tokens. As released for T2M
    re-masking and FreeCache it is not: K/V are those of the block's last forward, before its last
    commit."""

    def __post_init__(self) -> None:
        check_choice(self, "reuse", self.reuse, Reuse)
        if self.reuse == "exact" and self.attention == "full":
            raise DllmBenchError(
                "BlockCache has attention 'full' and reuse 'exact', but a prompt that saw other "
                "tokens has other keys and values; choose reuse approximate or none."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """Full attention only if set so."""
        full = {Condition.FULL_ATTENTION} if self.attention == "full" else set()
        return frozenset({Condition.FED_WINDOW, *full})

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """Exact reuse ends with a whole block of both prompts."""
        needs = {Need("schedule", Condition.BLOCKS_IN_ORDER)}
        if self.reuse == "exact":
            needs.add(Need("schedule", Condition.ABSOLUTE_BLOCKS))
        return frozenset(needs)

    def plan(self, round: Round) -> ForwardPlan:
        window, kv = round.window, round.kv
        held = min(kv.length, window.start)
        return ForwardPlan(
            kind=ForwardKind.DENOISE if kv.kept and kv.kept.stores else ForwardKind.PREFILL,
            feed=(held, window.visible),
            rows=(window.start, window.stop),
            store=(held, window.retired if self.renews else window.stop),
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )
