"""Caches that feed or read single positions: d2Cache, dKV-Cache, DPad, Sparse-dLLM."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Reads, Round, Score, Scores, Select
from dllm_bench.core.declared import Amount, Count, Positive, PositiveAmount, Proportion, Size
from dllm_bench.core.decoder import ONE_BRANCH, ONE_OPEN_BLOCK, Condition, Conditions, needing
from dllm_bench.core.denoiser import ForwardPlan, KVCache, PositionSets
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant, only, to_device, true_indices
from dllm_bench.decoding.numerics import generator, stable_top, top1
from dllm_bench.methods.caches import NoCache, step_of_block
from dllm_bench.methods.common import COUNTS_STEPS, Confidence, Ranked
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

# --- d2Cache --------------------------------------------------------------------------------------


@register("score.density")
@dataclass(frozen=True)
class Density(Score):
    """d2Cache's certainty prior (arXiv 2509.23094): scores times the density of decoded neighbours.

    The density of position j is the mean of "is decoded" over its neighbours, weighted by a
    Gaussian of their distance. The neighbourhood extends by the generation length to both sides.
    The prompt counts as decoded; positions beyond the end repeat the last position. Thresholds also
    compare the product, as in the released code.
    """

    inner: Ranked = field(default_factory=Confidence)
    sigma: PositiveAmount = 10.0  # standard deviation of the Gaussian, in positions
    needs = needing({"inner": Condition.PROBABILITIES})

    @property
    def gives(self) -> Conditions:
        """Row-wise conditions of the inner score; `Scores.raw_KW` is without density."""
        return self.inner.gives - {Condition.LOGITS_ALONE, Condition.PROBABILITIES}

    @property
    def reads_rows(self) -> Reads:
        """As for the inner score, because density is a property of the row's own position."""
        return self.inner.reads_rows

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        scores = self.inner(logits_KWV, state, window)
        density_KW = window.of(density(state, self.sigma))
        if window.rows_M is not None:
            density_KW = density_KW.flatten()[window.rows_M][None]
        raw_KW, probability_KW = scores.confidence_KW, scores.probability_KW * density_KW
        confidence_KW = raw_KW * density_KW
        return Scores(scores.ids_KW, probability_KW, confidence_KW, raw_KW, scores.neg_entropy_KW)


def density(state: DecodeState, sigma: float) -> Tensor:
    """Return the density of decoded positions, float32 (K, L); 1 in the prompt.

    Score and cache of a round share it.
    """

    def compute() -> Tensor:
        decoded_KG = (~state.masked_KL[:, state.prompt_len :]).float()
        size = decoded_KG.shape[1]
        before_KG, after_KG = torch.ones_like(decoded_KG), decoded_KG[:, -1:].expand(-1, size)
        around_KX = torch.cat([before_KG, decoded_KG, after_KG], 1)
        weight_XG = weights(size, sigma, decoded_KG.device)
        return pad(around_KX @ weight_XG, (state.prompt_len, 0), value=1.0)

    return state.once(f"density of width {sigma}", compute)


@lru_cache(maxsize=4)
def weights(size: int, sigma: float, device: torch.device) -> Tensor:
    """Return the weights of `size` positions and as many on both sides, for each density: (X,
    G)."""
    position_X = torch.arange(3 * size, device=device)
    distance_XG = position_X[:, None] - position_X[size : 2 * size]
    weight_XG = torch.exp(-0.5 * (distance_XG / sigma).square())
    return weight_XG / weight_XG.sum(0)


FED, SCORED = 1, 2  # bits of NEXT: feed this row; this mask is predicted by a fed row
NEXT = MemoKey[Tensor]("d2.next")  # int64 (1, L), for the next forward
CONFIDENCE = MemoKey[Tensor]("d2.confidence")  # from each mask's last row, float32 (1, L)


def mean_attention(
    query_AFE: Tensor, key_GXE: Tensor, scaling: float, mask_11FX: Tensor | None
) -> Tensor:
    """Return attention averaged over heads, float32 (F, X); an `AttentionProbe`."""
    query_GQFE = query_AFE.unflatten(0, (len(key_GXE), -1))
    product_GQFX = (query_GQFE @ key_GXE[:, None].transpose(2, 3)).float() * scaling
    if mask_11FX is not None:
        product_GQFX = product_GQFX + mask_11FX
    return product_GQFX.softmax(-1).mean((0, 1))


@register("cache.d2")
@dataclass(frozen=True)
class D2Cache(Cache):
    """d2Cache (arXiv 2509.23094): feeds the rows that the results of the last forward select.

    A forward feeds a set of rows, overwrites their cached K/V and reads all others; the first
    forward feeds everything. The next forward feeds: (1) The `current` best masks, ranked by
    confidence times the density of decoded positions (`score.density`, `sigma`), with masks of the
    open block first. Candidates are all masks up to the end of the block in which their number
    reaches `current`. (2) The tokens just committed. (3) The positions that the fed rows attend to.
    The attention of every layer, averaged over heads, is combined over the layers (rollout:
    averaged with the identity, which also stands for rows that are not fed). Rows are taken by
    their column sums as long as these add up to at most `rollout`; the largest is always taken. (4)
    What lies between two of all these at most `inflate` positions apart. A mask whose row is not
    fed keeps the confidence of its last row.

    `released` reproduces the released code. Confidences are those of the first forward. A mask
    whose row is not fed counts with logits of 0, so it may be committed to token 0. The block of
    (1) is that of the forward just made, with as many positions as it had masks. With shifted
    logits, the prompt's last row is fed only if it predicts the first new token, although it
    competes in (3) and may displace another row there.
    """

    current: Positive = 32  # number of masks fed
    rollout: Amount = 0.1  # share of the attention rollout that is fed; above 1: everything
    sigma: PositiveAmount = 10.0  # standard deviation of the density's Gaussian, in positions
    inflate: Count = 0  # largest distance of two fed rows between which all are fed
    released: bool = False  # confidences, blocks and rows as in the released code
    gives = frozenset({Condition.FULL_ATTENTION})
    needs = COUNTS_STEPS | needing(
        ONE_BRANCH, {"score": (Condition.RAW_CONFIDENCE, Condition.ROW_BY_ROW)}
    )

    def on_start(self, round: Round) -> None:
        known = round.state.memo.get(NEXT)
        if known is not None:
            round.ask(NEXT, known[0, : round.state.length])

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        plan = NoCache().plan(round)
        nothing_L = torch.zeros(branches.length, dtype=torch.long)
        next_L = round.on_host(NEXT) if NEXT in round.host else nothing_L
        next_L[kv.length :] = FED | SCORED  # positions that no forward has fed yet
        scored_L = next_L >= SCORED
        fed_L = (next_L % SCORED == FED) | kv.predicting(scored_L[None])[0]
        fed_L, scored_L = fed_L[: window.visible], scored_L[window.start : window.stop]
        masks = (fed_L, ~fed_L, scored_L)
        feed_F, read_C, scored_M = true_indices(masks, branches.born_KL.device)
        kind = ForwardKind.DENOISE if kv.kept else ForwardKind.PREFILL
        sets = PositionSets(feed_F, read_C, feed_F, counts_rest=self.released)
        plan = replace(plan, kind=kind, rows=(window.start, window.visible), store=plan.feed)
        return replace(plan, sets=sets, scored_M=scored_M, probe=mean_attention)

    def on_commit(self, round: Round) -> None:
        window, state, kv = round.window, round.state, round.kv
        sets = round.plan.sets
        assert sets is not None
        nothing_1L = torch.zeros_like(state.born_KL, dtype=torch.bool)
        rows_1L = nothing_1L.index_fill(1, sets.feed_F, True)
        taken_1L = self._taken(self._confidence(round, kv.predicted(rows_1L)), window, state)
        fed_1L = kv.predicting(taken_1L) | (state.born_KL == state.forwards)
        last = slice(state.prompt_len - 1, state.prompt_len)
        if self.released:
            own_11 = fed_1L[:, last].clone()  # whether it predicts a selected mask
            fed_1L[:, last] = False
        fed_1L |= self._attended(fed_1L, sets, kv.probed)
        if self.released:
            is_shifted_11 = ~kv.predicting(~nothing_1L)[:, -1:]
            fed_1L[:, last] = torch.where(is_shifted_11, own_11, fed_1L[:, last])
        fed_1L = inflated(fed_1L, self.inflate)
        state.memo[NEXT] = fed_1L * FED + (kv.predicted(fed_1L) & state.masked_KL) * SCORED

    def _confidence(self, round: Round, fresh_1L: Tensor) -> Tensor:
        """Return the confidence of each position's last row, (1, L); 0 if it had none."""
        scores, window, state = round.scores, round.window, round.state
        known_1L = state.memo.get(CONFIDENCE)
        if known_1L is not None and self.released:
            return known_1L[:, : state.length]
        own_1W = scores.confidence_KW if scores.raw_KW is None else scores.raw_KW
        _, ahead_1X = top1(round.ahead_KXV)
        new_1A = torch.cat([own_1W, ahead_1X.to(own_1W)], 1)
        span = slice(window.start, window.start + new_1A.shape[1])
        if known_1L is None:
            known_1L = new_1A.new_zeros(fresh_1L.shape)
        confidence_1L = known_1L[:, : state.length].clone()
        confidence_1L[:, span] = torch.where(fresh_1L[:, span], new_1A, confidence_1L[:, span])
        state.memo[CONFIDENCE] = confidence_1L
        return confidence_1L

    def _taken(self, confidence_1L: Tensor, window: Window, state: DecodeState) -> Tensor:
        """Return the best masks, those of the open block first, bool (1, L)."""
        masked_1L, start = state.masked_KL, window.origin
        size: Tensor | int
        position_L = constant(range(state.length), masked_1L.device)
        if self.released:
            block_1L = torch.zeros_like(masked_1L)
            window.of(block_1L).copy_(window.eligible_KW)
            first_11, size = block_1L.view(torch.uint8).argmax(1, keepdim=True), block_1L.sum()
        else:
            first_11, size = masked_1L.view(torch.uint8).argmax(1, keepdim=True), window.block
            number_L = (position_L - start) // window.block
            block_1L = masked_1L & (number_L == (first_11 - start) // window.block)
        reached_1 = (masked_1L.cumsum(1) < self.current).sum(1).clamp(max=state.length - 1)
        end_1 = start + ((reached_1 - start) // size + 1) * size
        candidate_1L = masked_1L & (position_L >= first_11) & (position_L < end_1)
        value_1L = confidence_1L * density(state, self.sigma)
        value_1L = value_1L + value_1L.amax() * block_1L
        best_1C = stable_top(only(value_1L, candidate_1L), self.current)
        return torch.zeros_like(masked_1L).scatter_(1, best_1C, True) & candidate_1L

    def _attended(self, fed_1L: Tensor, sets: PositionSets, weights_NFX: Tensor | None) -> Tensor:
        """Return the rows that the last forward's rows attend to most, bool (1, L)."""
        assert weights_NFX is not None
        place_X, fed = torch.cat([sets.read_C, sets.feed_F]), len(sets.feed_F)
        mass_X = weights_NFX.new_ones(len(place_X))
        for weight_FX in reversed(weights_NFX.unbind()):
            half_F = mass_X[-fed:] / 2
            mass_X = half_F @ weight_FX + torch.cat([mass_X[:-fed], half_F])
        mass_L = mass_X.new_zeros(fed_1L.shape[1]).index_copy_(0, place_X, mass_X)
        mass_1L = mass_L.masked_fill(fed_1L, 0)
        share_1L, order_1L = (mass_1L / mass_1L.sum()).sort(dim=1, descending=True, stable=True)
        kept_1L = share_1L.cumsum(1) <= self.rollout
        kept_1L[:, 0] = True
        return torch.empty_like(fed_1L).scatter_(1, order_1L, kept_1L)


def inflated(fed_1L: Tensor, distance: int) -> Tensor:
    """Return the positions, with gaps between neighbours at most `distance` apart filled in."""
    if distance < 2:
        return fed_1L
    far = fed_1L.shape[1] + distance
    position_1L = torch.arange(fed_1L.shape[1], device=fed_1L.device)[None]
    before_1L = position_1L.masked_fill(~fed_1L, -far).cummax(1).values
    after_1L = position_1L.masked_fill(~fed_1L, far).flip(1).cummin(1).values.flip(1)
    return after_1L - before_1L <= distance


# --- dKV-Cache ------------------------------------------------------------------------------------

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
    either way. The order is drawn on the host, so no wait is needed. It includes pinned positions:
    if nothing else is due, the most confident mask is committed.
    """

    steps: Positive | None = None  # S, forwards per block; None: as many as the block has masks
    needs = COUNTS_STEPS | {ONE_BRANCH}

    @property
    def gives(self) -> Conditions:
        """One token per forward, if there are as many steps as positions."""
        always = frozenset({Condition.KNOWN_ORDER, Condition.DRAWS})
        return always if self.steps else always | {Condition.ONE_PER_FORWARD}

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
        due_X = order_X[: (step + 1) * share + min(step + 1, rest)]
        return due_X[(due_X < window.width).nonzero()[:, 0]]  # a stop may have cut the canvas

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
            new_KL = torch.zeros_like(born_KL, dtype=torch.bool)
            new_KL[:, branches.prompt_len :] = True
            feed_KL = new_KL | kv.predicting(new_KL)  # with the prompt rows that predict new tokens
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
        born_L, due_D = round.on_host(BORN).numpy(), branches.memo[DUE][0].numpy()
        due_D = due_D[born_L[window.start + due_D] == MASKED]
        if step_of_block(branches, window) % self.every == 0 or not len(due_D):
            kind = ForwardKind.REFRESH if kv.kept else ForwardKind.PREFILL
            round.plan = replace(round.plan, kind=kind)
            return
        due_L, position_L = np.zeros(len(born_L), dtype=bool), np.arange(len(born_L))
        due_L[window.start + due_D] = True
        fed_L = due_L | (born_L == branches.forwards - 1)
        for place in window.start + due_D:
            far_L = 2 * np.abs(position_L - place) + (position_L > place)
            far_L[fed_L | (born_L != MASKED)] = 2 * len(far_L)
            nearest = far_L.argsort()[: self.window]
            fed_L[nearest[far_L[nearest] < 2 * len(far_L)]] = True
        rows_L = kv.predicting(torch.from_numpy(due_L)[None])[0]
        fed_X = (torch.from_numpy(fed_L) | rows_L)[: window.visible]
        feed_F, read_C = true_indices((fed_X, ~fed_X), branches.born_KL.device)
        sets = PositionSets(feed_F, read_C, feed_F)
        round.plan = replace(round.plan, sets=sets, scored_M=to_device(due_D, feed_F.device))


# --- DPad -----------------------------------------------------------------------------------------

STAYS = MemoKey[Tensor]("dpad.stays")  # bool (1, L), on the host


@register("cache.dpad")
@dataclass(frozen=True)
class DPadCache(Cache):
    """DPad (arXiv 2508.14148): drop most masks after the open block, and more of them farther away.

    The remaining positions are drawn before a block's first forward, on the host, so that no wait
    is needed. A dropped position is neither fed nor read until a later block draws again; the
    others keep their positions in the rotary embedding. "gaussian": the position at distance d
    stays with probability `scale` N(z_d), where N is the density of the standard normal
    distribution and z runs evenly from 0 to `sigma` over `window` positions; none stays beyond.
    "uniform": `number` of the next `window` positions stay. Among the remaining positions, `inner`,
    a cache over spans, decides what is fed and read.
    """

    inner: Cache = field(default_factory=NoCache)
    law: Literal["gaussian", "uniform"] = "gaussian"
    window: Size = 128  # positions after the block among which some stay
    sigma: PositiveAmount = 4.0  # z at the end of the window, for "gaussian"
    scale: PositiveAmount = 2.0  # factor of the density, for "gaussian"
    number: Count = 0  # positions that stay, for "uniform"
    needs = needing(
        ONE_BRANCH, ONE_OPEN_BLOCK, {"inner": (Condition.FULL_ATTENTION, Condition.OWN_SPANS)}
    )

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner cache that concern the window."""
        passed = {Condition.FED_WINDOW, Condition.FULL_ATTENTION, Condition.NO_CACHE}
        return self.inner.gives & passed | {Condition.DRAWS}

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        held, plan = kv.length, self.inner.plan(round)
        if step_of_block(branches, window) == 0:
            branches.memo[STAYS] = self.draw(branches, window)
        position_L = torch.arange(window.visible)
        stays_L = branches.memo[STAYS][0, : window.visible]
        fed_L = stays_L & (position_L >= plan.feed[0]) & (position_L < plan.feed[1])
        kept_L = fed_L & (position_L >= plan.store[0]) & (position_L < plan.store[1])
        read_L = stays_L & ~fed_L & (position_L < held)
        indices = true_indices((fed_L, read_L, kept_L), branches.born_KL.device)
        return replace(plan, sets=PositionSets(*indices))

    def draw(self, state: DecodeState, window: Window) -> Tensor:
        """Return the positions that exist while the window's block is open, bool (1, L), on the
        host."""
        stays_1L = torch.ones(1, state.length, dtype=torch.bool)
        rest, numbers = stays_1L[0, window.stop :], generator(state, "dpad", "cpu")
        if self.law == "gaussian":
            z_X = torch.linspace(0, self.sigma, self.window)[: len(rest)]
            density_X = self.scale * (-z_X.square() / 2).exp() / math.sqrt(2 * math.pi)
            uniform_X = torch.rand(len(rest), generator=numbers)
            rest[:] = False
            rest[: len(z_X)] = uniform_X[: len(z_X)] < density_X
        elif self.number < len(rest):
            near = min(len(rest), self.window)
            rest[:] = False
            rest[torch.randperm(near, generator=numbers)[: self.number]] = True
        return stays_1L


# --- Sparse-dLLM ----------------------------------------------------------------------------------


@register("cache.sparse")
@dataclass(frozen=True)
class SparseCache(Cache):
    """Sparse-dLLM (arXiv 2508.02558): each layer keeps the K/V that the open block attends to most.

    The first two forwards of a block feed everything. In the second one, every layer rates each
    position outside of the block: its key times the block's mean query, averaged over heads, then
    the maximum over `kernel` neighbours (the prefix's last position and the suffix's first are
    neighbours). The layer keeps the share `keep` of the positions with the highest ratings. Later
    forwards feed the block and read what each layer kept. The maximum produces equal ratings: the
    lower position is kept or, with `released_ties`, the first in the order of `torch.topk`.
    """

    keep: Proportion = 0.5  # share of the positions outside of the block
    kernel: Positive = 3  # width of the maximum over neighbours, an odd number
    released_ties: bool = False  # equal ratings in the order of `torch.topk`, as released
    gives = frozenset({Condition.FED_WINDOW, Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, ONE_OPEN_BLOCK)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kernel % 2 == 0:
            raise DllmBenchError(
                f"SparseCache has kernel {self.kernel}; give an odd number of positions."
            )

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        step, plan = step_of_block(branches, window), NoCache().plan(round)
        span, device = (0, window.visible), branches.born_KL.device
        everything_X = constant(range(*span), device)
        nothing_X = everything_X[:0]
        if step == 0:
            return plan
        if step == 1 or (kv.kept and kv.kept.store != span):  # a stop has cut the canvas
            sets = PositionSets(everything_X, nothing_X, everything_X)
            rule = partial(self._most_attended, plan.rows)
            kind = ForwardKind.REFRESH if kv.kept else ForwardKind.PREFILL
            return replace(plan, kind=kind, store=span, sets=sets, probe=rule)
        assert kv.probed is not None
        sets = PositionSets(everything_X[slice(*plan.rows)], kv.probed, nothing_X)
        return replace(plan, feed=plan.rows, sets=sets)

    def _most_attended(
        self, block: tuple[int, int], query_AXE: Tensor, key_GXE: Tensor, *rest: object
    ) -> Tensor:
        """Return the positions that a layer keeps; an `AttentionProbe` once given the open
        block."""
        start, stop = block
        mean_GQE = query_AXE[:, start:stop].mean(1).unflatten(0, (len(key_GXE), -1))
        rating_X = (mean_GQE @ key_GXE.transpose(1, 2)).mean((0, 1))
        position_X = torch.arange(len(rating_X), device=rating_X.device)
        outside_O = torch.cat([position_X[:start], position_X[stop:]])
        if not len(outside_O):
            return outside_O
        pooled_1O = max_pool1d(rating_X[outside_O][None], self.kernel, 1, self.kernel // 2)
        number = int(len(outside_O) * self.keep)
        if self.released_ties:
            return outside_O[pooled_1O[0].topk(number).indices].sort().values
        return outside_O[stable_top(pooled_1O, number)[0]].sort().values
