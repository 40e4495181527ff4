"""d2Cache (arXiv 2509.23094): feed the rows selected by the results of the last forward."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Reads, Round, Score, Scores
from dllm_bench.core.declared import Amount, Count, Positive, PositiveAmount
from dllm_bench.core.decoder import ONE_BRANCH, ONE_OPEN_BLOCK, Condition, Conditions, needing
from dllm_bench.core.denoiser import ForwardPlan, KVCache, PositionSets
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant, only, true_indices
from dllm_bench.decoding.numerics import stable_top, top1
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.common import Confidence, Ranked
from dllm_bench.registry import register


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
        density_KW = window.of(density(state.masked_KL, state.prompt_len, self.sigma))
        if window.rows_M is not None:
            density_KW = density_KW.flatten()[window.rows_M][None]
        return replace(
            scores,
            probability_KW=scores.probability_KW * density_KW,
            confidence_KW=scores.confidence_KW * density_KW,
            raw_KW=scores.confidence_KW,
        )


def density(masked_KL: Tensor, prompt_len: int, sigma: float) -> Tensor:
    """Return the density of decoded positions, float32 (K, L); 1 in the prompt."""
    decoded_KG = (~masked_KL[:, prompt_len:]).float()
    size = decoded_KG.shape[1]
    around_KX = torch.cat(
        [torch.ones_like(decoded_KG), decoded_KG, decoded_KG[:, -1:].expand(-1, size)], 1
    )
    weight_XG = weights(size, sigma, masked_KL.device)
    return pad(around_KX @ weight_XG, (prompt_len, 0), value=1.0)


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


@dataclass(frozen=True)
class MeanAttention:
    """Attention averaged over heads, float32 (F, X); implements `core.denoiser.AttentionProbe`."""

    def __call__(
        self, query_AFE: Tensor, key_GXE: Tensor, scaling: float, mask_11FX: Tensor | None
    ) -> Tensor:
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
    Gaps of at most `inflate` positions between all these. A mask whose row is not fed keeps the
    confidence of its last row.

    `released` reproduces the released code. Confidences are those of the first forward. A mask
    whose row is not fed counts with logits of 0, so it may be committed to token 0. The block of
    (1) is that of the forward just made, with as many positions as it had masks. With shifted
    logits, the prompt's last row is fed only if it predicts the first new token, although it
    competes in (3) and may displace another row there.
    """

    current: Positive = 32  # number of masks fed
    rollout: Amount = 0.1  # share of the attention rollout that is fed; above 1: everything
    sigma: PositiveAmount = 10.0  # standard deviation of the density's Gaussian, in positions
    inflate: Count = 0  # largest gap, in positions, that is also fed
    released: bool = False  # confidences, blocks and rows as in the released code
    gives = frozenset({Condition.FULL_ATTENTION})
    needs = needing(
        ONE_BRANCH,
        ONE_OPEN_BLOCK,
        {
            "schedule": Condition.EQUAL_BLOCKS,
            "score": (Condition.RAW_CONFIDENCE, Condition.ROW_BY_ROW),
        },
    )

    def on_start(self, round: Round) -> None:
        known = round.state.memo.get(NEXT)
        if known is not None:
            round.ask(NEXT, known[0, : round.state.length])

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        plan = NoCache().plan(round)
        if NEXT in round.host:
            next_L = round.on_host(NEXT)
        else:
            next_L = torch.zeros(branches.length, dtype=torch.long)
        next_L[kv.length :] = FED | SCORED  # positions that no forward has fed yet
        scored_L = next_L >= SCORED
        fed_L = (next_L % SCORED == FED) | kv.predicting(scored_L[None])[0]
        fed_L, scored_L = fed_L[: window.visible], scored_L[window.start : window.stop]
        indices = true_indices((fed_L, ~fed_L, scored_L), branches.born_KL.device)
        feed_F, read_C, scored_M = indices
        return replace(
            plan,
            kind=ForwardKind.DENOISE if kv.kept else ForwardKind.PREFILL,
            rows=(window.start, window.visible),
            store=plan.feed,
            sets=PositionSets(feed_F, read_C, feed_F, counts_rest=self.released),
            scored_M=scored_M,
            probe=MeanAttention(),
        )

    def on_commit(self, round: Round) -> None:
        window, state, kv = round.window, round.state, round.kv
        assert kv.kept is not None
        assert kv.kept.sets is not None
        nothing_1L = torch.zeros_like(state.born_KL, dtype=torch.bool)
        rows_1L = nothing_1L.index_fill(1, kv.kept.sets.feed_F, True)
        confidence_1L = self._confidence(round, kv.predicted(rows_1L))
        taken_1L = self._taken(confidence_1L, window, state)
        fed_1L = kv.predicting(taken_1L) | (state.born_KL == state.forwards)
        last = slice(state.prompt_len - 1, state.prompt_len)
        if self.released:
            own_11 = fed_1L[:, last].clone()  # whether it predicts a selected mask
            fed_1L[:, last] = False
        fed_1L |= self._attended(fed_1L, kv)
        if self.released:
            is_shifted_11 = ~kv.predicting(~nothing_1L)[:, -1:]
            fed_1L[:, last] = torch.where(is_shifted_11, own_11, fed_1L[:, last])
        fed_1L = inflated(fed_1L, self.inflate)
        scored_1L = kv.predicted(fed_1L) & state.masked_KL
        state.memo[NEXT] = fed_1L * FED + scored_1L * SCORED

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
        value_1L = confidence_1L * density(masked_1L, state.prompt_len, self.sigma)
        value_1L = value_1L + value_1L.amax() * block_1L
        best_1C = stable_top(only(value_1L, candidate_1L), self.current)
        return torch.zeros_like(masked_1L).scatter_(1, best_1C, True) & candidate_1L

    def _attended(self, fed_1L: Tensor, kv: KVCache) -> Tensor:
        """Return the rows that the last forward's rows attend to most, bool (1, L)."""
        weights_NFX, last = kv.probed, kv.kept
        assert weights_NFX is not None
        assert last is not None
        assert last.sets is not None
        place_X, fed = torch.cat([last.sets.read_C, last.sets.feed_F]), last.fed
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
