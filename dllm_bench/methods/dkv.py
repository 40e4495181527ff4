"""dKV-Cache (arXiv 2505.15781): the K/V of decoded tokens, kept one forward late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Round, Scores, Select
from dllm_bench.core.declared import Count, Positive
from dllm_bench.core.decoder import ONE_BRANCH, Condition, Conditions, holding, needing
from dllm_bench.core.denoiser import ForwardPlan, KVCache, PositionSets
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import to_device, true_indices
from dllm_bench.decoding.numerics import generator
from dllm_bench.methods.caches import NoCache, step_of_block
from dllm_bench.methods.common import COUNTS_STEPS
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

DUE = MemoKey[Tensor]("drawn.due")
"""Window positions that this forward commits, in order, int64 (1, X), on the host; may include
committed ones."""
ORDER = MemoKey[Tensor]("drawn.order")  # window positions, int64 (1, X), on the host


@register("select.drawn")
@dataclass(frozen=True)
class Drawn(Select):
    """Commits in an order drawn before a block's first forward (LLaDA's `random` remasking).

    A block with m masks at entry and S steps commits floor(m / S) positions per step, and one more
    in each of the first m mod S steps, as `TopK` does. The next positions are known before a
    forward, so a cache can feed only these (dKV-Cache "greedy"). Drawing the order of a block at
    once is equivalent to drawing in every step, because the remaining positions are in random order
    either way. The order is drawn on the host, so no wait is needed.
    """

    steps: Positive | None = None  # S, forwards per block; None: as many as the block has masks
    needs = COUNTS_STEPS | {ONE_BRANCH}

    @property
    def gives(self) -> Conditions:
        """One token per forward, if there are as many steps as positions."""
        one = holding({Condition.ONE_PER_FORWARD: self.steps is None})
        return one | {Condition.KNOWN_ORDER, Condition.DRAWS}

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        due_1W = torch.zeros(1, window.width, dtype=torch.bool)
        due_1W[0, self.due(state, window)] = True
        return to_device(due_1W, window.eligible_KW.device)

    def on_plan(self, round: Round) -> None:
        """Tell the cache which positions this forward commits."""
        round.state.memo[DUE] = self.due(round.state, round.window)[None]

    def due(self, state: DecodeState, window: Window) -> Tensor:
        """Return the window positions that this forward commits, independent of its scores."""
        step = step_of_block(state, window)
        if step == 0:
            state.memo[ORDER] = self.order(state, window)[None]
        order_X = state.memo[ORDER][0]
        share, rest = divmod(len(order_X), self.steps or len(order_X))
        return order_X[: (step + 1) * share + min(step + 1, rest)]

    def order(self, state: DecodeState, window: Window) -> Tensor:
        """Return the window positions in the order of their commits, int64 (X,), on the host."""
        first = max(window.start, state.prompt_len) - window.start
        numbers = generator(state, "order", "cpu")
        return first + torch.randperm(window.width - first, generator=numbers)


BORN = "dkv.born"  # host: the forward that committed each position


@register("cache.dkv")
@dataclass(frozen=True)
class DKVCache(Cache):
    """dKV-Cache (arXiv 2505.15781): keeps a decoded token's K/V, one forward after it was decoded.

    The positions to feed are computed on the host.

    A forward feeds the rows that predict masks and the tokens committed by the previous forward, so
    that each token is fed once as itself; all other K/V are read from the cache. The block's first
    `first` forwards and every `every`-th one feed everything. With `keeps_prompt` the prompt's K/V
    are those of the request's first forward ("pd" in the released code; with `every` 1 it is its
    "prefill"). With shifted logits, a row is kept together with the token that it predicts: the
    released variant "un" keeps it even if its own token is still masked (`early`), "un_right" does
    not. The variant "right" is left out, because it keeps rows whose logits are still needed.
    """

    every: Positive = 8  # forwards of a block between those that feed everything
    first: Positive = 2  # forwards at the start of a block that feed everything
    keeps_prompt: bool = False  # whether only the request's first forward feeds the prompt
    early: bool = False  # whether a masked row is kept as soon as it predicts no mask
    released_end: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # whether a row that
    # predicts nothing (the last one, with shifted logits) is only kept with its left neighbour
    gives = frozenset({Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH)

    def on_start(self, round: Round) -> None:
        round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        step, now, span = step_of_block(branches, window), branches.forwards, window.visible
        feeds_all = step < self.first or step % self.every == 0
        born_KL = round.on_host(BORN)[None]
        if not feeds_all:
            feed_KL = self._pending(born_KL, kv, now - 1)
        elif self.keeps_prompt and now:
            feed_KL = self._generated(born_KL, branches.prompt_len, kv)
        else:
            feed_KL = torch.ones_like(born_KL, dtype=torch.bool)
        feed_L, pending_L = feed_KL[0, :span], self._pending(born_KL, kv, now)[0, :span]
        masks_L = feed_L, ~feed_L, feed_L > pending_L
        sets = PositionSets(*true_indices(masks_L, branches.born_KL.device))
        everything = ForwardKind.REFRESH if now else ForwardKind.PREFILL
        kind = everything if feeds_all else ForwardKind.DENOISE
        return replace(NoCache().plan(round), kind=kind, store=(0, span), sets=sets)

    def _pending(self, born_KL: Tensor, kv: KVCache, forward: int) -> Tensor:
        """Return the rows whose K/V were not kept by forward `forward`, bool (K, L).

        The request's first forward keeps no row before its token is decoded.
        """
        undecided_KL = (born_KL == MASKED) | (born_KL >= forward)
        rows_KL = kv.predicting(undecided_KL)
        if self.early and forward > 0:
            return rows_KL
        pending_KL = rows_KL | undecided_KL
        if self.released_end:
            predicts_KL = kv.predicting(torch.ones_like(rows_KL))
            pending_KL = pending_KL | (pending_KL.roll(1, 1) & ~predicts_KL)
        return pending_KL

    def _generated(self, born_KL: Tensor, prompt_len: int, kv: KVCache) -> Tensor:
        """Return the rows after the prompt and the prompt rows that predict a new token, bool (K,
        L)."""
        new_KL = torch.zeros_like(born_KL, dtype=torch.bool)
        new_KL[:, prompt_len:] = True
        return new_KL | kv.predicting(new_KL)


Array = np.ndarray[Any, Any]


@register("cache.dkv_greedy")
@dataclass(frozen=True)
class DKVGreedyCache(Cache):
    """dKV-Cache "greedy" (arXiv 2505.15781): feeds only tokens just decoded and the next positions.

    The positions to feed are computed on the host.

    It needs a selector whose order is known beforehand. A forward feeds the tokens committed by the
    previous forward, the positions that it commits itself, and the `window` masks nearest to each
    of these (at equal distance, left before right). Their K/V replace the cached ones. The cache
    holds every position, and all others are read from it, masks as they were when last fed. Every
    `every`-th forward of a block, including the first, feeds everything.
    """

    every: Positive = 2  # forwards of a block between those that feed everything
    window: Count = 4  # masks fed around each position that is committed next
    gives = frozenset({Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, {"select": Condition.KNOWN_ORDER, "score": Condition.ROW_BY_ROW})

    def on_start(self, round: Round) -> None:
        round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        return replace(NoCache().plan(round), store=(0, round.window.visible))

    def on_plan(self, round: Round) -> None:
        """Feed the positions due, as set by the selector, which acts first, and their
        neighbours."""
        branches, window, kv = round.state, round.window, round.kv
        born_L, device = round.on_host(BORN).numpy(), branches.born_KL.device
        due = [p for p in branches.memo[DUE][0].tolist() if born_L[window.start + p] == MASKED]
        if step_of_block(branches, window) % self.every == 0 or not due:
            kind = ForwardKind.REFRESH if kv.kept else ForwardKind.PREFILL
            round.plan = replace(round.plan, kind=kind)
            return
        due_L = np.zeros(len(born_L), dtype=bool)
        due_L[[window.start + place for place in due]] = True
        fed_L = torch.from_numpy(self._around(born_L, due, window.start, branches.forwards))
        fed_L = (fed_L | kv.predicting(torch.from_numpy(due_L)[None])[0])[: window.visible]
        feed_F, read_C = true_indices((fed_L, ~fed_L), device)
        sets = PositionSets(feed_F, read_C, feed_F)
        round.plan = replace(round.plan, sets=sets, scored_M=to_device(due, device))

    def _around(self, born_L: Array, due: Sequence[int], start: int, now: int) -> Array:
        """Return the last forward's tokens, the positions due, and the masks around these, bool
        (L,)."""
        fed_L, position_L = born_L == now - 1, np.arange(len(born_L))
        fed_L[[start + place for place in due]] = True
        for place in due:
            far_L = 2 * np.abs(position_L - start - place) + (position_L > start + place)
            far_L[fed_L | (born_L != MASKED)] = 2 * len(far_L)
            nearest = far_L.argsort()[: self.window]
            fed_L[nearest[far_L[nearest] < 2 * len(far_L)]] = True
        return fed_L
