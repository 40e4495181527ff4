"""Caches in which every layer chooses the rows it computes: dLLM-Cache, Elastic-Cache."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from dllm_bench.core.contracts import Cache, Round
from dllm_bench.core.declared import Amount, Positive, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, needing
from dllm_bench.core.denoiser import ForwardPlan, LayerRows
from dllm_bench.core.state import MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import true_indices
from dllm_bench.decoding.numerics import stable_top
from dllm_bench.methods.caches import NoCache
from dllm_bench.methods.position_caches import FED, SCORED, mean_attention
from dllm_bench.registry import register

# --- dLLM-Cache -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class MostChanged:
    """Chooses the rows a layer computes; implements `core.denoiser.RowChoice`."""

    prompt: int  # positions of the prompt
    length: int  # X, length of prompt and response
    renews_prompt: bool
    renews_response: bool
    share: float

    def rows(self, layer: LayerRows) -> Tensor | None:
        """Return the rows to renew; of the response, if it is not renewed, those chosen."""
        if layer.index == 0 or (self.renews_prompt and self.renews_response):
            return None
        if self.renews_response:
            return layer.span(self.prompt, self.length)
        if not self.share:
            return layer.span(0, self.prompt if self.renews_prompt else 0)
        chosen_R = layer.compared(self.prompt, self.length, self.choose)
        return torch.cat([layer.span(0, self.prompt), chosen_R]) if self.renews_prompt else chosen_R

    def choose(self, old_SC: Tensor, new_SC: Tensor) -> Tensor:
        """Return the rows of the response with the smallest cosine; of equal ones the first."""
        cosine_S = cosine_similarity(new_SC.float(), old_SC.float(), dim=-1)
        return stable_top(-cosine_S[None], int(len(cosine_S) * self.share))[0]


@register("cache.dllm_cache")
@dataclass(frozen=True)
class DLLMCache(Cache):
    """dLLM-Cache (arXiv 2506.06295): each layer computes the response rows whose V changed most.

    Caches K, V and the outputs of attention and MLP, in every layer and at every position. All
    hidden states pass through every layer, and all rows have logits. For rows that a layer does not
    compute, it takes K, V and the outputs of attention and MLP from the cache. The prompt's rows
    are computed every `prompt_every` forwards, the response's every `every`; both count all
    forwards of the request. In the other forwards a layer computes and keeps V of the whole
    response, then computes the rows whose V has the smallest cosine with the previous V. Their
    number is the share `share` of the response, rounded down, including decoded tokens and later
    blocks. With a share of 0, V is not renewed. The first layer computes everything.
    """

    prompt_every: Positive = 100  # forwards between those that compute the prompt
    every: Positive = 7  # forwards between those that compute the response
    share: Proportion = 0.25  # response rows computed by a layer in the other forwards
    gives = frozenset({Condition.FED_WINDOW, Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, {"model": Condition.CHOSEN_ROWS})

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        plan, now = NoCache().plan(round), branches.forwards
        span = (0, window.visible)
        fresh = kv.length < window.visible  # positions that no forward has computed
        renews = now % self.prompt_every == 0, now % self.every == 0 or fresh
        rule = MostChanged(branches.prompt_len, window.visible, *renews, self.share)
        kind = ForwardKind.REFRESH if any(renews) else ForwardKind.DENOISE
        return replace(plan, kind=kind if now else ForwardKind.PREFILL, store=span, recompute=rule)


# --- Elastic-Cache --------------------------------------------------------------------------------

TRACKED = MemoKey[Tensor]("elastic.tracked")  # tracked token of each layer, int64 (1, N)
GIVEN = MemoKey[Tensor]("elastic.given")  # attention of rows to it, 0 if not computed (1, N, X)
FLAGS = "elastic.flags"  # host: `FED` and `SCORED` of each position


@dataclass
class DriftTest:
    """Computes some rows, and all of them above a drift.

    Implements `core.denoiser.RowChoice` and, for the test of each layer, `AttentionProbe`.
    """

    always_R: Tensor
    """Rows that are computed in any case."""
    decoded_X: Tensor
    """Positions that hold tokens, bool; the tracked ones are chosen among them."""
    gamma: float
    before: tuple[Tensor, Tensor] | None
    """Tracked tokens (N,) and the attention of rows to them (N, X); None: everything is
    computed."""
    tracked: list[Tensor] = field(default_factory=list)
    """The token that each layer so far tracks from now on, 0-d int64."""

    def __post_init__(self) -> None:
        self._is_whole = self.before is None
        self._drifted: Tensor | None = None  # whether the last layer has drifted, 0-d bool

    def rows(self, layer: LayerRows) -> Tensor | None:
        """Return all rows after a layer that drifted."""
        if self._drifted is not None:
            self._is_whole, self._drifted = bool(self._drifted), None
        return None if self._is_whole else self.always_R

    def __call__(
        self, query_AFE: Tensor, key_GXE: Tensor, scaling: float, mask_11FX: Tensor | None
    ) -> Tensor:
        """Test whether the layer has drifted, and choose a token to track in the next forward.

        Return the attention weights (X,) of that token's row.
        """
        if self._is_whole:
            query_AFE = query_AFE.index_select(1, self.always_R)
            if mask_11FX is not None and mask_11FX.shape[2] > 1:
                mask_11FX = mask_11FX.index_select(2, self.always_R)
        weights_RX = mean_attention(query_AFE, key_GXE, scaling, mask_11FX)
        if self.before is not None and not self._is_whole:
            layer, last = len(self.tracked), weights_RX.shape[1] - 1
            tracked_1, given_1X = (memory[layer : layer + 1] for memory in self.before)
            # a token that a stop has cut off the canvas gets no attention, so its layer has drifted
            new_R1 = weights_RX.index_select(1, tracked_1.clamp(max=last)) * (tracked_1 <= last)
            new_R, old_R = new_R1[:, 0], given_1X[0].index_select(0, self.always_R)
            self._drifted = cosine_similarity(new_R * (old_R > 0), old_R, dim=0) < self.gamma
        most = weights_RX.sum(0).masked_fill(~self.decoded_X, -1).argmax()
        most_R = weights_RX.index_select(1, most.reshape(1))[:, 0]
        nothing_X = torch.zeros_like(weights_RX[0])
        self.tracked.append(most)
        return nothing_X.index_copy(0, self.always_R, most_R)


@register("cache.elastic")
@dataclass(frozen=True)
class ElasticCache(Cache):
    """Elastic-Cache (arXiv 2510.14973): from the layer at which attention has drifted, all rows are
    recomputed.

    Computes a window of masks, and everything in the layers above a drifted one. A forward computes
    the first `window` masks, the tokens committed by the last forward and the tracked tokens; all
    other rows keep their K, V and hidden states. In each layer one decoded token is tracked: the
    one to which the computed rows attend most. The next forward compares, layer by layer, the
    attention to this token from rows that both forwards computed. If their cosine falls below
    `gamma` in a layer, all layers above it compute every row (Algorithm 1). Only masks of the
    window are committed. The first forward computes everything.

    This implementation follows descriptions of the paper; its text and code were not available. Our
    own choices are: attention is averaged over heads, for the rows that the forward was planned to
    compute; a layer in which no row can be compared counts as drifted; masks after the window are
    cached individually, not in blocks of 32. The host waits for the test of each layer, because it
    decides what the next layer computes.
    """

    window: Positive = 16  # number of masks
    gamma: Amount = 0.9  # cosine below which a layer has drifted; above 1: always, 0: never
    gives = frozenset({Condition.FULL_ATTENTION})
    needs = needing(ONE_BRANCH, {"score": Condition.ROW_BY_ROW, "model": Condition.CHOSEN_ROWS})

    def on_start(self, round: Round) -> None:
        branches = round.state
        scored_1L = branches.masked_KL & (branches.masked_KL.cumsum(1) <= self.window)
        fed_1L, tracked_1N = scored_1L, branches.memo.get(TRACKED)
        if tracked_1N is not None:
            fed_1L = fed_1L | (branches.born_KL == branches.forwards - 1)
            fed_1L = fed_1L.scatter(1, tracked_1N, True)
        round.ask(FLAGS, (fed_1L * FED + scored_1L * SCORED)[0])

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        plan, flags_L = NoCache().plan(round), round.on_host(FLAGS)
        scored_L = flags_L >= SCORED
        fed_L = (flags_L % SCORED == FED) | kv.predicting(scored_L[None])[0]
        masks = (fed_L[: window.visible], scored_L[window.start : window.stop])
        feed_R, scored_M = true_indices(masks, branches.born_KL.device)
        before, memo = None, branches.memo
        if TRACKED in memo and kv.length >= window.visible:
            before = memo[TRACKED][0], memo[GIVEN][0]
        test = DriftTest(feed_R, ~branches.masked_KL[0, : window.visible], self.gamma, before)
        kind = ForwardKind.DENOISE if kv.kept else ForwardKind.PREFILL
        plan = replace(plan, kind=kind, store=plan.feed, scored_M=scored_M)
        return replace(plan, recompute=test, probe=test)

    def on_commit(self, round: Round) -> None:
        test, given_NX = round.plan.recompute, round.kv.probed
        assert isinstance(test, DriftTest)
        assert given_NX is not None
        round.state.memo[TRACKED] = torch.stack(test.tracked)[None]
        round.state.memo[GIVEN] = given_NX[None]
