"""Pieces that several works share: blocks, scores, selectors and stop rules.

It also holds the step counts of selectors that decode a block in a fixed number of steps.

`step_in_block` counts the forwards of the open block in the memo, so the count follows its branch.
It needs one open block at a time, and all selectors of a decoder share the count. `most_confident`
chooses a number of positions, which may differ between branches.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import Reads, Round, Schedule, Score, Scores, Select, Stop, StopFlags
from dllm_bench.core.declared import Amount, Positive, Probability, Proportion, Size
from dllm_bench.core.decoder import (
    ONE_BRANCH,
    ONE_OPEN_BLOCK,
    BlockLength,
    Condition,
    Conditions,
    Needs,
    holding,
    needing,
)
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import EndTokens
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import constant, only
from dllm_bench.decoding.numerics import Candidates, Precision, forbid, margin, read_logits
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

OF_LOGITS = frozenset({Condition.LOGITS_ALONE, Condition.ROW_BY_ROW})
"""Conditions given by a score computed from the logits alone; a score that adds something does not
give them."""


@dataclass(frozen=True)
class Ranked(Score):
    """A score of the logits alone: candidate, its probability, and a value to rank by.

    Thresholds compare the probability of the candidate; ranking compares the values of `rank`.
    Everything is computed in `precision` (float32); published samplers use the dtype of the logits
    (Dream, LoPA: `model`) or float64 (Fast-dLLM for LLaDA). Sampling pieces choose the candidates
    themselves.
    """

    precision: Precision = "float32"
    gives = OF_LOGITS | {Condition.RAW_CONFIDENCE}
    reads_rows = "masked"

    @abstractmethod
    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        """Return confidences (K, W), computed from the logits or from the results of one pass over
        them."""

    def read(self, logits_KWV: Tensor, entropy: bool, ids_KW: Tensor | None = None) -> Candidates:
        """Return candidates and statistics of the logits in the score's precision; see
        `read_logits`."""
        return read_logits(logits_KWV, self.precision, entropy, ids_KW)

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        return self.of(logits_KWV, None, state)

    def of(
        self, logits_KWV: Tensor, ids_KW: Tensor | None, state: DecodeState, entropy: bool = False
    ) -> Scores:
        """Return the scores of the candidates `ids` (None: the most probable tokens), from one pass
        over the logits; with the entropies if `entropy`."""
        found = self.read(logits_KWV, entropy, ids_KW)
        confidence_KW = self.rank(logits_KWV, found)
        return Scores(
            found.ids_KW, found.probability_KW, confidence_KW, neg_entropy_KW=found.neg_entropy_KW
        )


@register("score.confidence")
@dataclass(frozen=True)
class Confidence(Ranked):
    """Ranks by the probability of the candidate (LLaDA low-confidence remasking, Fast-dLLM).

    Threshold and ranking use the same value. `last` names end tokens that remain candidates but are
    committed last: probabilities come from a distribution without these tokens, in which an end
    token has probability 0 (LLaDA's `confidence_eos_eot_inf`: both; above temperature 0 its code
    drops only eot).
    """

    last: EndTokens | None = None  # end tokens that are committed last
    gives = Ranked.gives | {Condition.PROBABILITIES}

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        return candidates.probability_KW

    def of(
        self, logits_KWV: Tensor, ids_KW: Tensor | None, state: DecodeState, entropy: bool = False
    ) -> Scores:
        if self.last:
            if ids_KW is None:
                ids_KW = super().of(logits_KWV, None, state).ids_KW
            logits_KWV = logits_KWV.clone()
            forbid(logits_KWV, state.special.named(self.last))
        return super().of(logits_KWV, ids_KW, state, entropy)


@register("score.neg_entropy")
@dataclass(frozen=True)
class NegEntropy(Ranked):
    """Ranks by the negative entropy sum_v p_v ln p_v, in nats (Dream's `entropy`, LoPA's scripts).

    Only the ranking changes; thresholds still compare the probability of the candidate, as in the
    released D2F and LoPA code.
    """

    gives = Ranked.gives | {Condition.ENTROPY}
    eps: Amount = 0.0  # eps of p ln(p + eps), the published form (1e-10)

    def read(self, logits_KWV: Tensor, entropy: bool, ids_KW: Tensor | None = None) -> Candidates:
        return read_logits(logits_KWV, self.precision, True, ids_KW, self.eps)

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        assert candidates.neg_entropy_KW is not None  # as `read` gives it
        return candidates.neg_entropy_KW


@register("score.margin")
@dataclass(frozen=True)
class Margin(Ranked):
    """Ranks by p_1 - p_2 of the two most probable tokens (Dream's `topk_margin`).

    Only the ranking changes; thresholds still compare the probability of the candidate.
    """

    gives = Ranked.gives | {Condition.PROBABILITIES}

    def rank(self, logits_KWV: Tensor, candidates: Candidates) -> Tensor:
        return margin(logits_KWV, self.precision)


Ties = Literal["lower", "canvas", "block"]
"""Which of equally ranked positions are taken: the lower ones, or those that `torch.topk` takes
over the canvas (LLaDA, Dream) or the open block (PC-Sampler)."""
COUNTS_STEPS = needing(ONE_OPEN_BLOCK, {"schedule": Condition.EQUAL_BLOCKS})
STEP_BLOCK = MemoKey[Any]("steps.block")  # the open block, as `open_block` gives it
ENTERED = MemoKey[Any]("steps.entered")  # its first forward, of all branches or of each (K,)
ENTRY_MASKS = MemoKey[Tensor]("steps.masks")  # its masks then, (K,)


def step_in_block(state: DecodeState, window: Window) -> tuple[Tensor | int, Tensor]:
    """Return the number of earlier forwards in the open block, of all branches or of each (K,), and
    its masks at entry, (K,)."""
    memo, is_known = state.memo, same_block(STEP_BLOCK, window, state)
    if is_known is False:
        memo[ENTERED], memo[ENTRY_MASKS] = state.forwards, window.eligible_KW.sum(1)
    elif isinstance(is_known, Tensor):
        memo[ENTERED] = torch.where(is_known, memo[ENTERED], state.forwards)
        memo[ENTRY_MASKS] = torch.where(is_known, memo[ENTRY_MASKS], window.eligible_KW.sum(1))
    return state.forwards - memo[ENTERED], memo[ENTRY_MASKS]


def at_most(step: Tensor | int, most: int) -> Tensor | int:
    """Return a number of `step_in_block`, or `most` where it is larger."""
    return step.clamp(max=most) if isinstance(step, Tensor) else min(step, most)


def column(step: Tensor | int) -> Tensor | int:
    """Return a number of `step_in_block` in a form to compare with values (K, W)."""
    return step[:, None] if isinstance(step, Tensor) else step


def count_in_block(
    key: MemoKey[Any], counts: Tensor | bool, window: Window, state: DecodeState
) -> Tensor | int:
    """Return the number of forwards of the open block, including this one, for which `counts`
    (bool) was true: of all branches or of each (K,).

    `key` holds the count.
    """
    is_known = same_block(MemoKey[Any](f"{key.name}.block"), window, state)
    count = counts * 1
    if is_known is not False:
        count = count + state.memo[key] * is_known
    state.memo[key] = count
    return count


def same_block(key: MemoKey[Any], window: Window, state: DecodeState) -> bool | Tensor:
    """Return whether the open block is that of the last call with this key: of all branches or, if
    the host does not know the block, of each (K,). `key` holds the block."""
    before, now = state.memo.get(key), open_block(window)
    state.memo[key] = now
    return False if before is None else before == now


def open_block(window: Window) -> Tensor | int:
    """Return the index of the block with the first eligible position: of all branches if the window
    is one block, else (K,).

    With lookahead, the window may begin with a block that this branch has already finished.
    """
    before = window.start - window.origin
    if window.width <= window.block:
        return before // window.block
    return (window.eligible_KW.int().argmax(1) + before) // window.block


def most_confident(scores: Scores, window: Window, count: Tensor | int = 1) -> Tensor:
    """Return the `count` most confident eligible positions, as `largest`, bool (K, W)."""
    return largest(scores.confidence_KW, window.eligible_KW, count)


def largest(values_KW: Tensor, where_KW: Tensor, count: Tensor | int = 1) -> Tensor:
    """Return the `count` largest values among those where `where` (bool) is true, bool (K, W).

    Of equal ones the lower position counts. count: of all branches, or of each (K,).
    """
    width = where_KW.shape[1]
    alone = isinstance(count, int) and count == 1
    if alone and width == 1:
        return where_KW
    order_KW = order_of(values_KW, where_KW)
    if alone:
        return (constant(range(width), order_KW.device) == order_KW[:, :1]) & where_KW
    return first_of(order_KW, count, where_KW)


def most_confident_by(
    ties: Ties, scores: Scores, window: Window, count: Tensor | int, length: int
) -> Tensor:
    """Return the `count` most confident eligible positions, ties by `ties`, (K, W).

    length: canvas length. With `torch.topk` there is only one branch, and the host waits for the
    count.
    """
    if ties == "lower":
        return most_confident(scores, window, count)
    taken_1W = taken_by_topk(scores, window, int(count), length if ties == "canvas" else None)
    return taken_1W & window.eligible_KW


def taken_by_topk(scores: Scores, window: Window, count: int, length: int | None) -> Tensor:
    """Return the positions that `torch.topk` takes from the window or from a canvas of `length`
    positions: (1, W).

    Positions that are not eligible are at -inf. Which of equal values it takes depends on all
    values and on `count`.
    """
    values_1X = only(scores.confidence_KW, window.eligible_KW)
    around = (0, 0) if length is None else (window.start, length - window.stop)
    values_1X = torch.nn.functional.pad(values_1X, around, value=-torch.inf)
    best_1C = values_1X.topk(min(count, values_1X.shape[1])).indices
    taken_1X = torch.zeros_like(values_1X, dtype=torch.bool).scatter_(1, best_1C, True)
    return taken_1X[:, around[0] :][:, : window.width]


def order_of(values_KW: Tensor, where_KW: Tensor) -> Tensor:
    """Return positions from the largest value to the smallest, (K, W).

    Of equal ones the lower position comes first; those where `where` (bool) is false come last.
    """
    return only(values_KW, where_KW).sort(dim=1, descending=True, stable=True).indices


def first_of(order_KW: Tensor, count: Tensor | int, where_KW: Tensor) -> Tensor:
    """Return the positions where `where` (bool) is true among the first `count` of an order of all
    W positions, bool (K, W)."""
    chosen_KW = constant(range(order_KW.shape[1]), order_KW.device) < column(count)
    taken_KW = torch.empty_like(order_KW, dtype=torch.bool)
    return taken_KW.scatter_(1, order_KW, chosen_KW.expand_as(order_KW)) & where_KW


@register("select.threshold")
@dataclass(frozen=True)
class Threshold(Select):
    """Commits all candidates that reach a probability (Fast-dLLM §3.3; D2F with `strict`).

    It commits {p >= tau}, or {p > tau} if strict. If a block must progress but no position passes,
    its most confident position is committed (the inherited stall rule). This equals Fast-dLLM's
    "the best one always, the others by threshold", because if any position passes, the most
    probable one does. dInfer instead lowers the threshold to just below the most probable position,
    so that everything within 1e-5 of it is committed too: `band`. With `fall` the threshold begins
    at 1 and falls to tau (`iter_threshold` of dInfer's iteration smoothing, where it falls by
    0.02).
    """

    tau: Probability  # probability; 1 and `strict`: one token per forward
    strict: bool = False  # > instead of >=
    band: Amount | None = None  # lowers tau to this much below the largest probability
    fall: Amount | None = field(default=None, metadata=DEFAULT_LEFT_OUT)  # tau at forward i
    # is 1 - fall * i, and no less than tau

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        probability_KW, tau = scores.probability_KW, falling(self.tau, self.fall, state)
        if self.band is None:
            return probability_KW > tau if self.strict else probability_KW >= tau
        open_KW = window.eligible_KW & (scores.ids_KW != state.special.mask)
        best_K1 = probability_KW.masked_fill(~open_KW, 0).amax(1, keepdim=True)
        return open_KW & (probability_KW >= (best_K1 - self.band).clamp(max=tau))


def falling(tau: float, fall: float | None, state: DecodeState) -> float:
    """Return the threshold of a request's forward i: max(1 - fall * i, tau); None: always tau."""
    return tau if fall is None else max(1 - fall * state.forwards, tau)


BEYOND = MemoKey[Tensor]("topk.beyond")  # positions after the open block, bool (K, W)


@register("select.topk")
@dataclass(frozen=True)
class TopK(Select):
    """Commits the most confident positions, in a fixed number of steps per block (LLaDA Alg. 5).

    A block with m masks at entry and S steps commits floor(m / S) positions per step, and one more
    in each of the first m mod S steps. Without `steps`, S is the block length: one token per
    forward.

    `released` follows the code of Learn2PD's authors, where a filter also commits positions:
    `torch.topk` over the canvas takes the step's number of positions, even if the block has fewer
    masks left. The surplus positions have confidence -inf. They are committed positions, which stay
    as they are, or masks after the block, which are committed to their candidates. The order of
    `torch.topk` decides which ones; the host waits for their number.

    Of equal confidences the lower positions are taken or, with `ties`, those that `torch.topk`
    takes, as published.
    """

    steps: Positive | None = None  # S, forwards per block; None: as many as the block has positions
    released: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # masks after a
    # block that has too few left are committed too
    ties: Ties = field(default="lower", metadata=DEFAULT_LEFT_OUT)  # of equal confidences: the
    # lower positions, or those that torch.topk takes over the canvas or the open block

    @property
    def _reaches_beyond(self) -> bool:
        """Whether it may commit beyond the block: only as released, and not at one position per
        step, which never exceeds the masks."""
        return self.released and self.steps is not None

    @property
    def reads_rows(self) -> Reads:
        """The whole window, if it commits candidates after the open block."""
        return "window" if self._reaches_beyond else "masked"

    @property
    def needs(self) -> Needs:
        """Step counts, and rows of the whole canvas if it commits beyond the block."""
        needs = COUNTS_STEPS | holding({ONE_BRANCH: self.ties != "lower"})
        if not self._reaches_beyond:
            return needs
        beyond = Condition.TO_LAST_BLOCK
        return needs | needing(ONE_BRANCH, {"cache": Condition.WHOLE_CANVAS, "select": beyond})

    @property
    def gives(self) -> Conditions:
        """One token per forward, if there are as many steps as positions; and whether it commits
        beyond the block."""
        single = {Condition.NEVER_STALLS: True, Condition.ONE_PER_FORWARD: self.steps is None}
        return holding({Condition.TO_LAST_BLOCK: self._reaches_beyond, **single})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        count: Tensor | int = 1
        if self.steps is not None:
            step, total_K = step_in_block(state, window)
            count = total_K // self.steps + (total_K % self.steps > step)
        if not self.released and isinstance(count, Tensor):
            count = count.clamp(min=1)  # more steps than masks, some of which were masked again
        if not self._reaches_beyond:
            return most_confident_by(self.ties, scores, window, count, state.length)
        where_KW = taken_by_topk(scores, window, int(count), state.length)
        state.memo[BEYOND] = where_KW & ~window.eligible_KW
        return where_KW & window.eligible_KW

    def on_commit(self, round: Round) -> None:
        """Commit the chosen positions after the open block."""
        beyond_KW = round.state.memo.get(BEYOND)
        if beyond_KW is not None:
            round.state.commit(beyond_KW, round.scores.ids_KW, round.window.start)


@register("select.best")
@dataclass(frozen=True)
class Best(Select):
    """Commits the `number` most confident positions in every forward; all if fewer are masked."""

    number: Positive
    refills: bool = False  # as many as the last revision masked again, if any (ReMDM)

    @property
    def gives(self) -> Conditions:
        """One token per forward, if the number is 1."""
        single = self.number == 1 and not self.refills
        return holding({Condition.NEVER_STALLS: True, Condition.ONE_PER_FORWARD: single})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        if not self.refills or state.remasked_KW is None:
            return most_confident(scores, window, self.number)
        remasked_K = state.remasked_KW.sum(1)
        return most_confident(scores, window, torch.where(remasked_K > 0, remasked_K, self.number))


@dataclass(frozen=True)
class WithInner(Select):
    """Base of selectors that change the choice of `inner`; the stall rule is that of `inner`."""

    inner: Select

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, window, state)


@register("select.union")
@dataclass(frozen=True)
class Union(Select):
    """Commits what `first` or `second` chooses (Learn2PD: filter or top-k).

    The stall rule is that of the first one.
    """

    first: Select
    second: Select

    @property
    def gives(self) -> Conditions:
        """Conditions that either of the two gives."""
        either = self.first.gives | self.second.gives
        return either & {Condition.TO_LAST_BLOCK, Condition.NEVER_STALLS}

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return self.first(scores, window, state) | self.second(scores, window, state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.first.on_stall(scores, window, state)


LONGEST = 4096  # longest accepted block; a larger number is a mistake


class InTurn(Schedule):
    """One open block at a time: a block is decoded until it has no masks, then the next one."""

    def opened(self, branch: BlockProgress) -> int:
        """Return the number of open blocks. A closed branch finishes a block that it has begun and
        opens no other.

        A block that was masked again stays open.
        """
        n = branch.finished
        opens = n < branch.grid.blocks and (branch.begun(n) or not branch.closed)
        return max(n + opens, branch.opened)


@register("schedule.blocks")
@dataclass(frozen=True)
class Blocks(InTurn):
    """Semi-autoregressive blocks: the next one opens when the open one has no masks.

    (LLaDA §2.4, Fast-dLLM.) With `block: null` the whole generation is one block (Dream's full
    schedule). The model sees the masks of future blocks unless `sees_future` is off, as for models
    that were trained block by block. Blocks begin after the prompt; `absolute` ones lie at
    multiples of `block`, so that the first may overlap the prompt and the last may be short
    (dInfer's `start_block_align`; block diffusion: SDAR, LLaDA2). `whole` rounds the canvas up to
    whole absolute blocks, as the block-diffusion samplers do; the text is then cut to the requested
    length. With `short`, blocks after the prompt need not divide the generation: the last one is
    short (dInfer without `start_block_align`; LLaDA and Fast-dLLM refuse such lengths). A
    generation shorter than a block is one short block.
    """

    block: Positive | None  # positions of a block; None: the whole generation is one block
    sees_future: bool = True  # whether the model sees the masks after the open block
    absolute: bool = False  # blocks at multiples of `block` instead of from the prompt's end
    whole: bool = False  # round the canvas up to whole blocks
    short: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether the last block after the prompt may be short."""
    sees_rest: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether the model sees the positions added by rounding up; diffusers hides them, decodes them
    and leaves them out of the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.absolute and self.block is None) or (self.whole and not self.absolute):
            raise DllmBenchError(
                f"Blocks has block {self.block}, absolute {self.absolute}, whole {self.whole}; "
                "absolute blocks need a length, and only absolute blocks can be whole."
            )

    @property
    def gives(self) -> Conditions:
        """What other pieces can rely on."""
        length = BlockLength(self.block) if self.block else Condition.WHOLE_GENERATION
        always = {Condition.ONE_OPEN_BLOCK, Condition.BLOCKS_IN_ORDER, Condition.HELD_BLOCKS}
        always |= {Condition.EQUAL_BLOCKS, Condition.FIXED_CANVAS}
        return holding({Condition.ABSOLUTE_BLOCKS: self.absolute}) | always | {length}

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        one_short = self.block and new < self.block <= LONGEST
        if self.block and not (self.absolute or self.short or one_short):
            check_divides(self.block, new, "schedule.short=true, which lets the last one be short")
        short = -(prompt_len + new) % self.block if self.whole and self.block else 0
        origin, length = 0 if self.absolute else prompt_len, prompt_len + new + short
        return BlockGrid(origin, self.block, prompt_len, length, sees_future=self.sees_future)

    def on_plan(self, round: Round) -> None:
        if not self.sees_rest:
            round.plan = replace(round.plan, alone=round.state.wanted)


def check_divides(block: int, new: int, other: str) -> None:
    """Check that blocks after the prompt fill the generation exactly.

    other: a setting that makes this length possible; empty if none does.
    """
    if new % block:
        also = f"decoder.{other}, " if other else ""
        raise DllmBenchError(
            f"A block of {block} does not divide the generation length {new}; set "
            f"decoder.schedule.block to a divisor of {new}, {also}or max_new_tokens (not for masks "
            f"within a prompt) to a multiple of {block}."
        )


@register("schedule.pipeline")
@dataclass(frozen=True)
class Pipeline(Schedule):
    """Pipelined blocks (D2F, arXiv 2508.09192, §4.3): several blocks are open at once.

    Its thresholds are shares of a block's positions.

    In each round a branch opens one more block if a share `tau_add` of the last open block is
    committed. A block must progress ("fully activated") once a share `tau_act` of the previous
    block is committed; until then it commits only positions that pass the confidence threshold. The
    prompt counts as committed, and only open blocks are fed to the model. A closed branch (with a
    committed end token) opens no further block but finishes the open ones. Blocks must divide the
    generation; the released code instead makes as many whole blocks as fit (`floor`: 240 of 256
    tokens in blocks of 48).
    """

    block: Size  # positions of a block
    tau_add: Proportion  # committed share of the last open block at which the next one opens
    tau_act: Proportion  # committed share of the previous block at which a block must progress
    floor: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Generate as many whole blocks as fit into the requested length."""
    sees_future: ClassVar[bool] = False

    @property
    def gives(self) -> Conditions:
        """One open block at a time, if a block opens only when the last one is finished."""
        always = {Condition.BLOCKS_IN_ORDER, Condition.EQUAL_BLOCKS, Condition.FIXED_CANVAS}
        single = holding({Condition.ONE_OPEN_BLOCK: self.tau_add == 1})
        return single | always | {BlockLength(self.block)}

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        if self.floor and new >= self.block:
            new -= new % self.block
        fits = "schedule.floor=true, which makes as many as fit" if new > self.block else ""
        check_divides(self.block, new, fits)
        seen = self.sees_future
        return BlockGrid(prompt_len, self.block, prompt_len, prompt_len + new, sees_future=seen)

    def opened(self, branch: BlockProgress) -> int:
        opened = max(branch.opened, branch.finished)
        due = opened == 0 or self._reaches(branch, opened - 1, self.tau_add)
        return opened + (due and opened < branch.grid.blocks and not branch.closed)

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        return n == 0 or self._reaches(branch, n - 1, self.tau_act)

    def _reaches(self, branch: BlockProgress, n: int, share: float) -> bool:
        """Return whether at least a share of block `n` is committed, rounded as published."""
        return 1 - branch.masks_left(n) / self.block >= share


@register("stop.eos")
@dataclass(frozen=True)
class Eos(Stop):
    """Closes or finishes a branch that has committed an end token.

    Scope "block": once an end token is committed, no further block opens; open blocks are decoded
    to their end (D2F, LoPA). Scope "token": in addition, finish as soon as an end token and
    everything before it are committed (CreditDecoding's early stop). Scope "write": finish in a
    forward that writes an end token if everything before the first end token is committed;
    otherwise continue with the next block (diffusers' block refinement of LLaDA2.1). The rule of
    Learn2PD's paper for end-of-text prediction is "block" without the end of a turn.

    Two released loops also look for end tokens in the prompt (`prompt`). If there is one, ReMDM's
    loop decodes only the first block, and diffusers' block refinement never stops early.
    """

    scope: Literal["block", "token", "write"] = "block"  # effect of a committed end token: no new
    # blocks, or the text ends
    turn_end: bool = True  # whether the end of a chat turn counts as well
    prompt: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # count its end tokens too

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt and self.scope == "token":
            raise DllmBenchError(
                'Eos has prompt true and scope "token", under which an end token of the prompt '
                'would end a request at once; set scope to "block" or "write".'
            )

    @property
    def gives(self) -> Conditions:
        """Whether decoding ends at an end token, and whether only at the end of text."""
        at_token = self.scope == "token" and not self.turn_end
        return holding({Condition.STOPS_ON_END: True, Condition.END_OF_TEXT: at_token})

    def _ends(self, branches: DecodeState, start: int, stop: int | None = None) -> Tensor:
        """Return whether each position from `start` to `stop` holds one of E end tokens, bool
        (E, K, X).

        End tokens that a schedule puts after the text do not count.
        """
        ends = branches.special.ends[: None if self.turn_end else 1]
        ends_E11 = constant(ends, branches.tokens_KL.device)[:, None, None]
        ends_EKX = branches.tokens_KL[:, start:stop] == ends_E11
        if branches.ends_given and start:
            ends_EKX = ends_EKX & branches.committed_KL[:, start:stop]
        return ends_EKX

    def ended(self, branches: DecodeState) -> StopFlags:
        start = branches.prompt_len
        ends_EKG = self._ends(branches, start)
        closed_K = ends_EKG.any((0, 2))
        given_K = self._ends(branches, 0, start).any((0, 2)) if self.prompt else None
        if self.scope == "block":
            if given_K is not None:
                closed_K = closed_K | (given_K & branches.committed_KL[:, start:].any(dim=1))
            return StopFlags(closed_K)
        ends_KG, masked_KG = ends_EKG.any(0), branches.masked_KL[:, start:]
        first_K1 = (ends_KG | masked_KG).view(torch.uint8).argmax(1, keepdim=True)
        finished_K = ends_KG.gather(1, first_K1)[:, 0]
        if self.scope == "token":
            return StopFlags(closed_K, finished_K)
        if given_K is not None:
            finished_K = finished_K & ~given_K
        written_K = (ends_KG & (branches.born_KL[:, start:] == branches.forwards - 1)).any(1)
        return StopFlags(finished_K=finished_K & written_K)


@register("stop.budget")
@dataclass(frozen=True)
class Budget(Stop):
    """Finishes a request after a number of forwards, even with masks (quality at a fixed cost).

    Remaining positions stay masked and are not emitted.
    """

    forwards: Positive  # per request

    def ended(self, branches: DecodeState) -> StopFlags:
        spent = branches.forwards >= self.forwards
        first_K = branches.tokens_KL[:, 0]
        return StopFlags(finished_K=torch.full_like(first_K, spent, dtype=torch.bool))


@register("stop.any_of")
@dataclass(frozen=True)
class AnyOf(Stop):
    """Closes, finishes or cuts if any of `rules` does; of several lengths the shortest is used."""

    rules: tuple[Stop, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "rules", tuple(self.rules))

    def ended(self, branches: DecodeState) -> StopFlags:
        flags = [rule.ended(branches) for rule in self.rules]
        closed = [one.closed_K for one in flags if one.closed_K is not None]
        finished = [one.finished_K for one in flags if one.finished_K is not None]
        decided = (reduce(torch.logical_or, one) if one else None for one in (closed, finished))
        return StopFlags(*decided)
