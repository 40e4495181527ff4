"""d3LLM (arXiv 2601.07568), and dParallel (2509.26488), whose rule it uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockProgress, Window
from dllm_bench.core.contracts import Cache, Revise, Round, Scores, Select
from dllm_bench.core.declared import Count, Positive
from dllm_bench.core.decoder import FIXED_CANVAS, Condition, Conditions, Need
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.methods.caches import spans_given
from dllm_bench.methods.common import Pipeline, most_confident
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.entropy")
@dataclass(frozen=True)
class EntropyThreshold(Select):
    """Commits positions by the entropy of their distribution.

    Commit every position whose distribution has little entropy (dParallel, arXiv 2509.26488;
    d3LLM).

    {H <= tau}, in nats. A block that must progress and has none commits its most confident position
    (the inherited stall rule), with an entropy score the one of least entropy. d3LLM (arXiv
    2601.07568) decodes several blocks at once and in every forward also commits the position of
    least entropy among all of them: `best`.
    """

    tau: float  # nats; below 0: one token per forward
    best: bool = False  # also the most confident position of all open blocks
    needs: ClassVar[frozenset[Need]] = frozenset({Need("score", Condition.ENTROPY)})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # by `needs`
        where_KW = scores.neg_entropy_KW >= -self.tau
        return where_KW | most_confident(scores, window) if self.best else where_KW


@register("schedule.multi_block")
@dataclass(frozen=True)
class MultiBlock(Pipeline):
    """Several open blocks, of which the first unfinished one must progress.

    d3LLM's multi-block decoding (arXiv 2601.07568): several open blocks, the whole canvas in view.

    A block opens as in the pipeline of D2F, one per round, once a share `tau_add` of the last open
    block is committed. Only the first unfinished block has to progress. The released
    `decoded_token_threshold` marks blocks as active, which changes nothing: eligible are all open
    blocks, and the first unfinished one is always active.
    """

    tau_act: float = field(default=1.0, init=False)
    opens_rest: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Open all blocks of a closed branch, as the released early stop does."""
    sees_future: ClassVar[bool] = True

    def opened(self, branch: BlockProgress) -> int:
        return branch.grid.blocks if self.opens_rest and branch.closed else super().opened(branch)

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return n == branch.finished


@register("cache.delayed")
@dataclass(frozen=True)
class DelayedCache(Cache):
    """Caches finished blocks once they have waited.

    d3LLM's approximate cache (arXiv 2601.07568): finished blocks are kept after a delay.

    A block's K/V are stored `delay` rounds after the first forward that found it finished, the
    prompt's in round `delay`. Forwards between feed what is not stored. While a finished block
    waits, and in every `every`-th round, the whole canvas is fed and the stored K/V are renewed. In
    the released code they grow too when several blocks wait, so that later forwards read them
    twice; here they do not.
    """

    delay: Count = 1  # rounds that a finished block waits
    every: Positive | None = None  # rounds between renewals; None: only while a block waits
    attention: Attention = "full"
    needs: ClassVar[frozenset[Need]] = frozenset(
        {Need("schedule", Condition.BLOCKS_IN_ORDER), Need("schedule", Condition.EQUAL_BLOCKS)}
    )

    @property
    def gives(self) -> Conditions:  # type: ignore[override]
        """By its attention."""
        return spans_given(self.attention)

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        held, turn = kv.length, branches.forwards + 1
        ready, waits = self._ready(branches, window, held)
        renews = held and ready == held and (waits or (self.every and turn % self.every == 0))
        feed = 0 if renews else held
        stored = (feed, ready if ready > held or renews else feed)
        kinds = (ForwardKind.DENOISE, ForwardKind.REFRESH if held else ForwardKind.PREFILL)
        return ForwardPlan(
            kind=kinds[stored[1] > stored[0]],
            feed=(feed, window.visible),
            rows=(window.start, window.stop),
            store=stored,
            attention=self.attention,
            block=window.block,
            origin=window.origin,
            visible_K=window.visible_K,
        )

    def _ready(self, branches: DecodeState, window: Window, held: int) -> tuple[int, bool]:
        """Up to where K/V can be stored now, and whether a finished block behind has to wait."""
        ready = held
        for end in range(window.origin, window.retired + 1, window.block):
            if end <= held:
                continue
            seen = MemoKey[int](f"delayed.seen_{end}")  # first forward that found it finished
            if seen not in branches.memo:  # the prompt was finished before there was any
                branches.memo[seen] = branches.forwards or -1
            if branches.forwards - branches.memo[seen] < self.delay:
                return ready, True
            ready = end
        return ready, False


@register("revise.end_fill")
@dataclass(frozen=True)
class EndFill(Revise):
    """Writes end tokens after the first one.

    d3LLM's early stop (arXiv 2601.07568, hao-ai-lab/d3LLM): end tokens after the first end token.

    After a forward, everything after the first end token becomes the end token, committed tokens
    too, unless nothing is masked any more. As released, positions that were masked until then still
    compete in the next forward, and what is committed there stays if decoding ends with it: text
    can follow the end token. The rest is done by stop rule `eos` (scope "token", turn_end off) and
    by schedule `multi_block` (opens_rest on), without which fewer positions compete.
    """

    needs: ClassVar[frozenset[Need]] = frozenset(
        {
            FIXED_CANVAS,
            Need("schedule", Condition.BLOCKS_IN_ORDER),
            Need("stop", Condition.END_OF_TEXT),
        }
    )

    def on_commit(self, round: Round) -> None:
        state = round.state
        tokens_KL, masked_KL = state.tokens_KL, state.masked_KL
        ends_KL = tokens_KL == state.special.eos
        new_KL = ends_KL.clone()
        new_KL[:, : state.prompt_len] = False
        behind_KL = new_KL.cumsum(1) > new_KL.long()
        open_KL = masked_KL & (tokens_KL == state.special.mask)
        behind_KL &= open_KL.any(1, keepdim=True)
        filled_KL = open_KL & behind_KL
        over_K1 = ~(open_KL & ~behind_KL).any(1, keepdim=True)
        shown_KL = masked_KL & ~open_KL  # since the last forward
        write_KL = (behind_KL & ~masked_KL & ~ends_KL) | shown_KL | (filled_KL & over_K1)
        end_KL = torch.full_like(tokens_KL, state.special.eos)
        parts = (torch.zeros_like(write_KL), write_KL, end_KL, filled_KL | shown_KL)
        round.revise(*(part[:, round.window.start :] for part in parts))
