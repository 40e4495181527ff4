"""Fast-dLLM (arXiv 2505.22618) and its second version (2509.26328): factor, sub-blocks.

dInfer (arXiv 2510.08666): hierarchical decoding and the vicinity cache.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import Cache, Round, Scores, Select
from dllm_bench.core.declared import Amount, Count, Positive, PositiveAmount, Probability, Size
from dllm_bench.core.decoder import Condition, Conditions, needing
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import MASKED, DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant, only
from dllm_bench.methods import common
from dllm_bench.methods.caches import DualCache, NoCache, Span, scoring_window
from dllm_bench.methods.common import COUNTS_STEPS, InTurn, WithInner
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

# --- Fast-dLLM ------------------------------------------------------------------------------------


class MostProbable(Select):
    """Commits the most probable positions of each block; a subclass says how many of them."""

    @abstractmethod
    def allowed(self, sorted_KNP: Tensor, rank_P: Tensor) -> Tensor:
        """Return which of the positions to commit, bool (K, N, P).

        sorted_KNP: probabilities of the block's masks, the largest first, then -inf; rank_P: their
        places, from 1.
        """

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        open_KW = window.eligible_KW
        probability_KNP = window.blocks(only(scores.probability_KW, open_KW), -torch.inf)
        sorted_KNP, order_KNP = probability_KNP.sort(dim=2, descending=True, stable=True)
        rank_P = constant(range(1, window.block + 1), probability_KNP.device)
        allowed_KNP = self.allowed(sorted_KNP, rank_P)
        where_KNP = torch.zeros_like(allowed_KNP).scatter_(2, order_KNP, allowed_KNP)
        return window.flat(where_KNP) & open_KW


@register("select.factor")
@dataclass(frozen=True)
class Factor(MostProbable):
    """Commits as many positions as their joint confidence allows (Fast-dLLM §3.3, factor decoding).

    In each block, with confidences sorted c(1) >= c(2) >= ..., the first n positions are committed,
    for the largest n with (n + 1) (1 - c(n)) < f. So f acts like a threshold that rises with the
    number of positions committed at once. If a block must progress but there is no such n, its most
    confident position is committed. As `released` (NVlabs/Fast-dLLM, `get_transfer_index_dynamic`),
    the comparison is <=, one position is always committed, and if all masks of a block but one
    pass, that one is committed too; so the last two masks are always committed together.
    """

    factor: PositiveAmount  # f; larger commits more
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # `<=` instead of `<`,
    # one position at least, and the last mask of a block with the others

    def allowed(self, sorted_KNP: Tensor, rank_P: Tensor) -> Tensor:
        spread_KNP = (rank_P + 1) * (1 - sorted_KNP)
        allowed_KNP = spread_KNP <= self.factor if self.released else spread_KNP < self.factor
        count_KN1 = (allowed_KNP * rank_P).amax(2, keepdim=True)
        if self.released:
            masks_KN1 = (sorted_KNP > -torch.inf).sum(2, keepdim=True)
            count_KN1 = count_KN1.clamp(min=1)
            count_KN1 += count_KN1 == masks_KN1 - 1
        return rank_P <= count_KN1


@register("select.ration")
@dataclass(frozen=True)
class Ration(WithInner):
    """Limits `inner` to a budget of the most confident: S steps per block share its masks evenly.

    After step i at most (i + 1) / S of the block's initial masks are committed. The unused budget
    of a step is carried over; after S steps only the inner selector limits. With a threshold inside
    and the whole generation as one block, this is Fast-dLLM's threshold for Dream without a cache.
    """

    steps: Positive  # S
    needs = COUNTS_STEPS

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step, total_K = common.step_in_block(state, window)
        due_K = total_K * common.at_most(step + 1, self.steps) // self.steps
        left_K = due_K - (total_K - window.eligible_KW.sum(1))
        return common.most_confident(scores, window, left_K) & self.inner(scores, window, state)


@register("select.first_of_block")
@dataclass(frozen=True)
class FirstOfBlock(WithInner):
    """Commits the first mask of a block in its first forward; `inner` decides everything else.

    Fast-dLLM's caches for Dream do this: the hidden state that predicts a block's first position is
    before the block, so only the forward over the whole canvas can decode this position, and it
    decodes nothing else. The inner selector counts that forward as its own step 0.
    """

    needs = COUNTS_STEPS

    @property
    def gives(self) -> Conditions:
        """A position in every forward, if the inner selector chooses one."""
        return self.inner.gives & {Condition.NEVER_STALLS}

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step, _ = common.step_in_block(state, window)
        is_first, inner_KW = common.column(step) == 0, self.inner(scores, window, state)
        if is_first is False:
            return inner_KW
        first_KW = window.eligible_KW & (window.eligible_KW.cumsum(1) == 1)
        return first_KW if is_first is True else torch.where(is_first, first_KW, inner_KW)


@dataclass(frozen=True)
class SubBlockGrid(BlockGrid):
    """Grid of the parts of blocks. Block `n` of the base class is part `n` here."""

    small: int = 1

    @property
    def parts(self) -> int:
        """Number of parts of a block, including its first position."""
        return self.block // self.small + 1

    @property
    def blocks(self) -> int:
        whole, rest = divmod(self.length, self.block)
        begun = 1 + (rest > 1) + (rest - 1) // self.small if rest else 0
        return whole * self.parts + begun

    def start(self, n: int) -> int:
        block, part = divmod(n, self.parts)
        offset = part if part < 2 else (part - 1) * self.small
        return min(block * self.block + offset, self.length)


@register("schedule.sub_blocks")
@dataclass(frozen=True)
class SubBlocks(InTurn):
    """Sub-blocks (Fast-dLLM v2, arXiv 2509.26328): a block is decoded part by part.

    Blocks lie at multiples of `block`. The first position of a block is a part of its own, which
    any forward fills, because a model with shifted logits predicts it from the previous, finished
    block. The others are decoded in parts that end at multiples of `small`. A closed branch
    finishes all parts of the block it has begun. The model sees the masks of later parts.
    """

    block: Size  # positions of a block
    small: Positive  # length of its parts; the first part has one less
    whole: bool = True  # round the canvas up to whole blocks
    gives = frozenset({Condition.ONE_OPEN_BLOCK, Condition.SUB_BLOCKS, Condition.FIXED_CANVAS})
    needs = needing({"explore": Condition.ONE_BRANCH})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % self.small:
            raise DllmBenchError(
                f"SubBlocks has a block of {self.block} and small {self.small}; give a small that "
                "divides the block."
            )

    def grid(self, prompt_len: int, new: int) -> SubBlockGrid:
        length = prompt_len + new
        length += -length % self.block if self.whole else 0
        return SubBlockGrid(0, self.block, prompt_len, length, small=self.small)

    def opened(self, branch: BlockProgress) -> int:
        inside = branch.grid.start(branch.finished) % self.block > 0
        return super().opened(replace(branch, closed=branch.closed and not inside))


BORN = "hierarchical.born"  # host: the forward that committed each position


@register("cache.hierarchical")
@dataclass(frozen=True)
class HierarchicalCache(Cache):
    """Hierarchical cache of Fast-dLLM v2 (arXiv 2509.26328): finished blocks, and the open one.

    A finished block is fed once more; under block-causal attention its K/V are then final, and its
    last row predicts the first token of the next block. While a block is decoded, forwards feed all
    of it. With `inside` they feed only the open sub-block and overwrite its K/V. The K/V of the
    block's other positions come from the last forward that fed the whole block: the first forward
    of the sub-block, and every forward as long as the sub-block's first position is masked. Later
    sub-blocks are read with their K/V of that forward (as released).

    If nothing is cached yet, the first forward also feeds the prompt's whole blocks.
    """

    inside: bool = False  # whether forwards may feed only the open sub-block
    needs = needing({"schedule": Condition.SUB_BLOCKS, "model": Condition.SHIFTED})

    @property
    def gives(self) -> Conditions:
        """Final K/V, unless those of the open block are kept too."""
        return frozenset(() if self.inside else {Condition.FINAL_KV})

    def on_start(self, round: Round) -> None:
        if self.inside:
            round.ask(BORN, round.state.born_KL[-1])

    def plan(self, round: Round) -> ForwardPlan:
        feed, store = self._spans(round)
        later = ForwardKind.REFRESH if feed[0] < round.kv.length else ForwardKind.DENOISE
        kind = later if round.kv.kept else ForwardKind.PREFILL
        return scoring_window(round, kind, feed, store, "block_causal")

    def _spans(self, round: Round) -> tuple[Span, Span]:
        """Return the fed span and the stored span."""
        window, kv = round.window, round.kv
        start = window.start - window.start % window.block
        if window.start == start:
            finished = (min(kv.length, start - window.block), start)
            return finished, finished
        held, end = min(kv.length, start), min(start + window.block, window.visible)
        if not self.inside:
            return (held, end), (held, start)
        first, last = start if window.start == start + 1 else window.start, kv.kept
        is_new = last is None or last.rows[0] != window.start  # the sub-block
        if is_new or round.host[BORN][first] == MASKED:
            return (held, end), (held, end)
        return (first, window.stop), (first, window.stop)


# --- dInfer ---------------------------------------------------------------------------------------


@register("select.hierarchy")
@dataclass(frozen=True)
class Hierarchy(Select):
    """Divides and conquers runs of adjacent masks (dInfer's hierarchical decoding).

    In every run of adjacent masks of a block, the most probable position is committed if its
    probability is above `low`, so that each forward splits the runs. Every position above `tau` is
    committed too. Both comparisons are strict. If a block must progress but no position passes, its
    most confident position is committed. With `fall`, tau begins at 1 and falls (`iter_threshold`
    of dInfer's HierarchyDecoder).
    """

    tau: Probability  # 1: off
    low: Probability = 0.4  # 0: always
    fall: Amount | None = field(default=None, metadata=DEFAULT_LEFT_OUT)  # tau at forward i
    # is 1 - fall * i, and no less than tau

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KNP = window.blocks(scores.probability_KW)
        masked_KNP = window.blocks(window.eligible_KW)
        run_KNP = (~masked_KNP).cumsum(2)  # equal for all positions of a run
        open_KNP = probability_KNP.masked_fill(~masked_KNP, -1.0)
        best_KNX = torch.full_like(torch.nn.functional.pad(open_KNP, (0, 1)), -1.0)
        best_KNX = best_KNX.scatter_reduce(2, run_KNP, open_KNP, "amax")
        best_KNP = (open_KNP == best_KNX.gather(2, run_KNP)) & (open_KNP > self.low)
        tau = common.falling(self.tau, self.fall, state)
        return window.flat((best_KNP | (open_KNP > tau)) & masked_KNP)


@register("cache.vicinity")
@dataclass(frozen=True)
class VicinityCache(DualCache):
    """Dual cache that also feeds positions near the open block (dInfer's vicinity cache).

    A forward between renewals feeds the block, `before` positions before it and `after` positions
    after it, so that the K/V of these are computed with the block's newest tokens; these K/V are
    not kept. The first `warmup` forwards of a request feed the whole canvas and cache nothing.
    """

    before: Count = 16  # positions fed before the block
    after: Count = 16  # positions fed after the block
    warmup: Count = 4  # forwards before anything is cached
    renews_twice: bool = False  # as released: if warm-up outlasts the first block, renew again
    # two forwards after the first renewal, in the same block

    def plan(self, round: Round) -> ForwardPlan:
        if round.state.forwards < self.warmup:
            return NoCache(self.attention).plan(round)
        return super().plan(round)

    def _renews(self, branches: DecodeState, window: Window, last: ForwardPlan | None) -> bool:
        if super()._renews(branches, window, last):
            return True
        if last is None or not self.renews_twice or last.rows[0] <= branches.prompt_len:
            return False
        return last.forward == self.warmup == branches.forwards - 2

    def _spans(self, window: Window) -> tuple[Span, int]:
        first, last = window.start - self.before, window.stop + self.after
        return (max(0, first), min(window.visible, last)), window.visible
