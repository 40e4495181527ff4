"""Caches that several works share: none, causal, prefix, dual, block.

It also counts the forwards of the open block on the host, for caches that renew by this clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Round
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import (
    BlockLength,
    Condition,
    Conditions,
    Needs,
    RenewalRounds,
    holding,
    needing,
)
from dllm_bench.core.denoiser import Attention, ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

BLOCK = MemoKey[int]("cache.block")  # position at which the first open block begins
ENTERED = MemoKey[int]("cache.entered")  # its first forward


def step_of_block(state: DecodeState, window: Window) -> int:
    """Return the number of earlier forwards of the first open block."""
    if state.memo.get(BLOCK) != window.start:
        state.memo[BLOCK], state.memo[ENTERED] = window.start, state.forwards
    return state.forwards - state.memo[ENTERED]


def spans_given(attention: Attention, final: bool = True) -> Conditions:
    """Return the conditions given by a cache over spans that feeds the window.

    final: whether it keeps nothing but finished blocks.
    """
    always = {Condition.FED_WINDOW, Condition.OWN_SPANS}
    if attention == "full":
        return frozenset(always | {Condition.FULL_ATTENTION})
    return holding({Condition.FINAL_KV: final}) | always | {Condition.BLOCK_CAUSAL}


Span = tuple[int, int]
"""Canvas positions [start, stop)."""


def scoring_window(
    round: Round, kind: ForwardKind, feed: Span, store: Span, attention: Attention
) -> ForwardPlan:
    """Return the plan of a forward that scores the window; its blocks are the schedule's."""
    window = round.window
    rows, blocks = (window.start, window.stop), (window.block, window.origin)
    return ForwardPlan(kind, feed, rows, store, attention, *blocks, visible_K=window.visible_K)


def kind_of(kv: KVCache) -> ForwardKind:
    """Return the kind of the next forward of a cache that renews nothing."""
    return ForwardKind.DENOISE if kv.kept and kv.kept.stores else ForwardKind.PREFILL


Reuse = Literal["none", "exact", "approximate"]
"""Whether the K/V of a prompt's prefix (few-shot examples) are taken from an earlier request:
"exact" if they cannot depend on later tokens, "approximate" if they were computed with the rest of
that request's prompt in view."""


def reuse_prefix(reuse: Reuse, round: Round) -> None:
    """Reuse the previous prompt's K/V before the first forward; for exact reuse, whole blocks."""
    if reuse != "none" and not round.state.forwards:
        grid = round.window.block if reuse == "exact" else 1
        round.model.reuse_prefix(round.kv, round.request.prompt_ids, grid, by=round.decoder)


@register("cache.none")
@dataclass(frozen=True)
class NoCache(Cache):
    """Caches nothing: every forward feeds all positions that the schedule lets the model see."""

    attention: Attention = "full"  # bidirectional; or "block_causal" over the schedule's blocks

    @property
    def gives(self) -> Conditions:
        """What other pieces can rely on."""
        always = {Condition.WHOLE_CANVAS, Condition.NO_CACHE, Condition.FINAL_KV}
        return spans_given(self.attention) | always

    def plan(self, round: Round) -> ForwardPlan:
        feed = (0, round.window.visible)
        return scoring_window(round, ForwardKind.DENOISE, feed, (0, 0), self.attention)


@register("cache.causal")
@dataclass(frozen=True)
class CausalCache(Cache):
    """Caches every token once, under causal attention: autoregressive decoding.

    Any reuse is exact, because a token's K/V never depend on later tokens.

    A position is predicted by the one before it, so a forward feeds the tokens that are not cached
    yet (first the prompt, then the last token) and no mask. It serves models with shifted logits
    that were trained autoregressively: with blocks of one position a masked decoder is then a plain
    AR decoder.
    """

    reuse: Reuse = "none"
    gives = frozenset({Condition.FINAL_KV, Condition.CAUSAL})
    needs = needing({"schedule": BlockLength(1), "model": Condition.SHIFTED})

    def plan(self, round: Round) -> ForwardPlan:
        reuse_prefix(self.reuse, round)
        window, kv = round.window, round.kv
        # the last token again where the model chose the mask after it, which commits nothing
        feed, rows = (min(kv.length, window.start - 1), window.start), (window.start, window.stop)
        return ForwardPlan(kind_of(kv), feed, rows, feed, "block_causal", 1)


@register("cache.prefix")
@dataclass(frozen=True)
class PrefixCache(Cache):
    """Caches everything before the open block: Fast-dLLM's approximate prefix cache (§3.2).

    The first forward of every block feeds the whole canvas, which renews these K/V and also
    decodes. The following forwards feed the open block and everything after it. `every` renews more
    often, by one of two clocks. "block" counts the forwards since the last renewal. "request"
    counts rounds from the start of the request, across blocks; a renewal and the forward after it
    are one round (dInfer's `cache_update_freq`; its unrolled rounds over a full block do not exist
    here and do not count).
    """

    every: Positive | None = None  # ticks of `clock` between renewals; None: at a block's start
    attention: Attention = "full"
    clock: Literal["block", "request"] = "block"  # a tick is a forward of the block, or a round of
    # the request
    needs = needing({"schedule": Condition.BLOCKS_IN_ORDER})

    @property
    def gives(self) -> Conditions:
        """Conditions by its form of attention; `every`, if it counts rounds of the request."""
        every = self.every if self.clock == "request" else None
        return spans_given(self.attention) | ({RenewalRounds(every)} if every else set())

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        kind, store, (feed, kept) = ForwardKind.DENOISE, (0, 0), self._spans(window)
        if self._renews(branches, window, kv.kept):
            kind = ForwardKind.REFRESH if kv.length else ForwardKind.PREFILL
            feed, store = (0, window.visible), (0, kept)
        plan = scoring_window(round, kind, feed, store, self.attention)
        clock = self._round(branches, window, kv.kept)
        return replace(plan, forward=branches.forwards, clock=clock)

    def _renews(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> bool:
        """Return whether to renew: at a block's start and by the clock. `last` is the last
        renewal."""
        if last is None or last.rows[0] != window.start:
            return True
        if self.every is None:
            return False
        if self.clock == "request":
            now = self._round(branches, window, last)
            return now > last.clock and now % self.every == 0
        return branches.forwards - last.forward >= self.every

    def _round(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> int:
        """Return the index of this forward's round in the request; a new block begins a new
        round."""
        if last is None:
            return 0
        since = branches.forwards - last.forward - 1
        return last.clock + max(since, int(last.rows[0] != window.start))

    def _spans(self, window: Window) -> tuple[Span, int]:
        """Return the span that a forward between renewals feeds (the open block and the rest of the
        canvas), and the end of the positions whose K/V are kept."""
        return (window.start, window.visible), window.start


@register("cache.dual")
@dataclass(frozen=True)
class DualCache(PrefixCache):
    """Caches everything around the open block: Fast-dLLM's approximate dual cache (§3.2).

    It works like the prefix cache, but the masks after the block are cached as well, so a forward
    between renewals feeds only the open block.
    """

    @property
    def gives(self) -> Conditions:
        """As for the prefix cache, but K/V of masks are not final."""
        return super().gives - {Condition.FINAL_KV}

    def _spans(self, window: Window) -> tuple[Span, int]:
        return (window.start, window.stop), window.visible


@register("cache.block")
@dataclass(frozen=True)
class BlockCache(Cache):
    """Caches finished blocks; feeds those that are not cached yet, and the open blocks.

    It is exact under block-causal attention (D2F): a finished block never sees later blocks, so its
    K/V are final once it is fed again with its final tokens, in the same forward as the next
    denoising step. It is approximate under full attention (LoPA-Dist-NV): the cached K/V were
    computed while the block saw the open blocks of that forward, and they are not renewed. `reuse`
    takes the K/V of a prompt's prefix from an earlier request. This is exact for absolute blocks
    (block diffusion). It is approximate if blocks begin after the prompt (D2F), because the prompt
    is then one block and each of its positions saw all of it.
    """

    attention: Attention = "block_causal"  # "block_causal" is exact, "full" is approximate
    reuse: Reuse = "none"
    renews: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether a finished block is fed once more with its final tokens. The released code of T2M
    re-masking and FreeCache does not do this: K/V are those of the block's last forward, before its
    last commit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reuse == "exact" and self.attention == "full":
            raise DllmBenchError(
                "BlockCache has attention 'full' and reuse 'exact', but a prompt that saw other "
                "tokens has other keys and values; choose reuse approximate or none."
            )

    @property
    def gives(self) -> Conditions:
        """Conditions by its form of attention; with reuse, K/V may come from another request."""
        given = spans_given(self.attention, self.renews)
        return given if self.reuse == "none" else given - {Condition.OWN_SPANS}

    @property
    def needs(self) -> Needs:
        """Exact reuse must end with a whole block of both prompts. With approximate reuse, a text
        depends on the previous request.
        """
        exact = {"schedule": Condition.ABSOLUTE_BLOCKS}
        others = {"exact": exact, "approximate": {"batch": Condition.ONE_REQUEST}, "none": {}}
        return needing({"schedule": Condition.BLOCKS_IN_ORDER}, others[self.reuse])

    def plan(self, round: Round) -> ForwardPlan:
        reuse_prefix(self.reuse, round)
        window, kv = round.window, round.kv
        held = min(kv.length, window.start)
        feed = (held, window.visible)
        store = (held, window.start if self.renews else window.stop)
        return scoring_window(round, kind_of(kv), feed, store, self.attention)
