"""d3LLM (arXiv 2601.07568), and dParallel (2509.26488), whose rule it uses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import BlockProgress, Window
from dllm_bench.core.contracts import Cache, Revise, Round, Scores, Select
from dllm_bench.core.declared import Count, Positive
from dllm_bench.core.decoder import FIXED_CANVAS, Condition, Conditions, needing
from dllm_bench.core.denoiser import Attention, ForwardPlan
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant
from dllm_bench.methods.caches import scoring_window, spans_given
from dllm_bench.methods.common import Pipeline, most_confident
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("select.entropy")
@dataclass(frozen=True)
class EntropyThreshold(Select):
    """Commits positions of low entropy (dParallel, arXiv 2509.26488; d3LLM).

    It commits {H <= tau}, in nats. If a block must progress but no position passes, its most
    confident position is committed (the inherited stall rule); with an entropy score that is the
    one with the lowest entropy. d3LLM (arXiv 2601.07568) decodes several blocks at once; every
    forward also commits the position with the lowest entropy among all of them: `best`.
    """

    tau: float  # nats; below 0: one token per forward
    best: bool = False  # also commit the most confident position of all open blocks
    needs = needing({"score": Condition.ENTROPY})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # guaranteed by `needs`
        where_KW = scores.neg_entropy_KW >= -self.tau
        return where_KW | most_confident(scores, window) if self.best else where_KW


@register("schedule.multi_block")
@dataclass(frozen=True)
class MultiBlock(Pipeline):
    """d3LLM's multi-block decoding (arXiv 2601.07568): several open blocks, the whole canvas seen.

    As in the pipeline of D2F, one block per round opens once a share `tau_add` of the last open
    block is committed. Only the first unfinished block must progress. The released
    `decoded_token_threshold` marks blocks as active, but this has no effect: all open blocks are
    eligible, and the first unfinished one is always active.
    """

    tau_act: float = field(default=1.0, init=False)
    opens_rest: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Open all blocks of a closed branch, as the released early stop does."""
    sees_future: ClassVar[bool] = True

    def opened(self, branch: BlockProgress) -> int:
        if self.opens_rest and branch.closed:
            return branch.grid.blocks
        # the first block is open before the first round
        return super().opened(replace(branch, opened=max(branch.opened, 1)))

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return n == branch.finished


@register("cache.delayed")
@dataclass(frozen=True)
class DelayedCache(Cache):
    """d3LLM's approximate cache (arXiv 2601.07568): finished blocks are kept after a delay.

    A block's K/V are stored `delay` rounds after the first forward that found it finished; those of
    the prompt in round `delay`. Other forwards feed everything that is not stored. While a finished
    block waits, and in every `every`-th round, the whole canvas is fed and the stored K/V are
    renewed. In the released code the store also grows when several blocks wait, so that later
    forwards read some K/V twice; this is not reproduced.
    """

    delay: Count = 1  # rounds that a finished block waits before it is stored
    every: Positive | None = None  # rounds between renewals; None: only while a block waits
    attention: Attention = "full"
    needs = needing({"schedule": (Condition.BLOCKS_IN_ORDER, Condition.EQUAL_BLOCKS)})

    @property
    def gives(self) -> Conditions:
        """Conditions by its form of attention."""
        return spans_given(self.attention)

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        held, turn = kv.length, branches.forwards + 1
        ready, waits = self._ready(branches, window, held)
        renews = held and ready == held and (waits or (self.every and turn % self.every == 0))
        feed = 0 if renews else held
        stored = (feed, ready if ready > held or renews else feed)
        storing = ForwardKind.REFRESH if held else ForwardKind.PREFILL
        kind = storing if stored[0] < stored[1] else ForwardKind.DENOISE
        return scoring_window(round, kind, (feed, window.visible), stored, self.attention)

    def _ready(self, branches: DecodeState, window: Window, held: int) -> tuple[int, bool]:
        """Return the end of the positions whose K/V can be stored now, and whether a finished block
        after them has to wait."""
        ready = held
        for end in range(window.origin, window.start + 1, window.block):
            if end <= held:
                continue
            seen = MemoKey[int](f"delayed.seen_{end}")  # first forward that found it finished
            if seen not in branches.memo:  # the prompt was finished before the first forward
                branches.memo[seen] = -1 if end <= branches.prompt_len else branches.forwards
            if branches.forwards - branches.memo[seen] < self.delay:
                return ready, True
            ready = end
        return ready, False


@register("revise.end_fill")
@dataclass(frozen=True)
class EndFill(Revise):
    """d3LLM's early stop (arXiv 2601.07568, hao-ai-lab/d3LLM): fills up with end tokens.

    After a forward, all positions after the first decoded end token become end tokens, even
    committed ones, unless nothing is masked any more. As in the released code, positions that were
    masked until then still compete in the next forward. If decoding ends with that forward its
    commits remain, so text can follow the end token. Combine it with stop rule `eos` (scope
    "token", turn_end off) and schedule `multi_block` (opens_rest on); without the latter, fewer
    positions compete.
    """

    needs = needing(
        FIXED_CANVAS, {"schedule": Condition.BLOCKS_IN_ORDER, "stop": Condition.END_OF_TEXT}
    )

    def on_commit(self, round: Round) -> None:
        state = round.state
        tokens_KL, masked_KL = state.tokens_KL, state.masked_KL
        ends_KL = tokens_KL == state.special.eos
        new_KL = ends_KL & state.committed_KL
        behind_KL = new_KL.cumsum(1) > new_KL
        open_KL = masked_KL & (tokens_KL == state.special.mask)
        behind_KL &= open_KL.any(1, keepdim=True)
        filled_KL = open_KL & behind_KL
        over_K1 = ~(open_KL & ~behind_KL).any(1, keepdim=True)
        shown_KL = masked_KL & ~open_KL  # since the last forward
        write_KL = (behind_KL & ~(masked_KL | ends_KL)) | shown_KL | (filled_KL & over_K1)
        end_KL = constant(state.special.eos, tokens_KL.device).expand_as(tokens_KL)
        parts = (write_KL, end_KL, filled_KL | shown_KL)
        round.revise(*(part[:, round.window.start :] for part in parts))
