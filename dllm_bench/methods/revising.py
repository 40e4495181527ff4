"""Revisers: what they share, and those that overwrite: LLaDA2.1, MultiBD, DMax."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.blocks import HELD, LAST, LEFT, BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import HOLD, Revise, Round, Score, Scores, Select
from dllm_bench.core.declared import Amount, Count, Positive, Probability, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, Conditions, holding, needing
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.core.transfer import constant
from dllm_bench.decoding.numerics import Precision, read_logits
from dllm_bench.decoding.switches import with_added
from dllm_bench.methods import common
from dllm_bench.methods.caches import step_of_block
from dllm_bench.methods.common import COUNTS_STEPS, OF_LOGITS, Pipeline
from dllm_bench.registry import register

# --- shared by revisers ---------------------------------------------------------------------------

STANDING = MemoKey[Tensor]("revise.standing")  # value of the token at each position (K, W)
POST_ROUNDS = MemoKey[Tensor]("revise.post_rounds")  # (K,): rounds of the open block without masks
ENTRY_MASKS = MemoKey[int]("revise.entry_masks")  # of the open block
ENTRY_SIZE = MemoKey[int]("revise.entry_size")  # its positions

REVISES_BLOCK = needing({"schedule": Condition.HELD_BLOCKS, "cache": Condition.FED_WINDOW})
REVISES_CANVAS = needing({"schedule": Condition.HELD_BLOCKS, "cache": Condition.WHOLE_CANVAS})


class Revision(NamedTuple):
    """Proposed changes of the committed positions of the window."""

    write_KW: Tensor  # bool: positions to overwrite
    ids_KW: Tensor | None = None  # int64: the new tokens; None, or the mask id, masks a position
    # again


@dataclass(frozen=True, kw_only=True)
class Budgeted(Revise):
    """Proposes changes and makes as many as the budgets allow.

    A budget limits the number of changes (re-maskings and overwritings) of a position, of the open
    block or of the whole request; null is no limit. If a budget of block or request does not allow
    all changes, those at the lower positions are made.
    """

    per_position: Count | None = None  # maximum changes of a position
    per_block: Count | None = None  # maximum changes in the open block
    per_request: Count | None = None  # maximum changes of a request
    reads_rows = "window"
    needs = REVISES_BLOCK

    @abstractmethod
    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        """Return the proposed changes; those at positions where `revisable` is false are
        ignored."""

    def on_commit(self, round: Round) -> None:
        window, state = round.window, round.state
        write_KW, ids_KW = self.propose(round.scores, window, state)
        limited = {self.per_position, self.per_block, self.per_request} != {None}
        if limited:
            changed_KW = write_KW & self.revisable(window, state)
            for left_K1 in self._left(window, state):
                changed_KW = changed_KW & (changed_KW.cumsum(1) <= left_K1)
            # undoing commits of this forward is free
            write_KW = changed_KW | (write_KW & (window.of(state.born_KL) == state.forwards))
        round.revise(write_KW, ids_KW, counts=limited)

    def _left(self, window: Window, state: DecodeState) -> list[Tensor]:
        """Return how many changes the budgets of block and request still allow, each (K, 1)."""
        changes_KL = state.changes_KL
        assert changes_KL is not None
        spent = ((self.per_block, window.of(changes_KL)), (self.per_request, changes_KL))
        return [most - made_KX.sum(1, keepdim=True) for most, made_KX in spent if most is not None]

    def revisable(self, window: Window, state: DecodeState) -> Tensor:
        """Return the positions that were committed before this forward and may be changed, bool (K,
        W): none once the budget of the block or the request is spent."""
        any_left = (left_K1 > 0 for left_K1 in self._left(window, state))
        return reduce(torch.logical_and, any_left, self._unspent(window, state))

    def _unspent(self, window: Window, state: DecodeState) -> Tensor:
        """Return the positions committed before that have changes left, bool (K, W)."""
        assert state.changes_KL is not None
        most, changes_KL = self.per_position, state.changes_KL
        if most is None:
            return window.of(state.earlier_KL)
        name = f"committed before, and changed less than {most} times"
        return window.of(state.once(name, lambda: state.earlier_KL & (changes_KL < most)))


@dataclass(frozen=True, kw_only=True)
class ReadsStanding(Budgeted):
    """Judges each position by the probability of its current token."""

    precision: Precision = "float32"  # precision of that probability

    def on_scores(self, round: Round) -> None:
        logits_KWV, ids_KW = self.judging_KWV(round), round.window.of(round.state.tokens_KL)
        seen = read_logits(logits_KWV, self.precision, ids_KW=ids_KW)
        round.state.memo[STANDING] = seen.probability_KW

    def judging_KWV(self, round: Round) -> Tensor:
        """Return the logits that judge the token of each window position: those of its own row."""
        return round.rows_KRV[:, : round.window.width]


def began_masked(window: Window) -> Tensor | bool:
    """Return whether this forward began with masks in the open block: (K,), or of the only branch,
    whose masks the host knows."""
    alone = window.masks is not None and len(window.eligible_KW) == 1
    return bool(window.masks) if alone else window.eligible_KW.any(1)


def full_rounds(window: Window, state: DecodeState) -> tuple[Tensor | bool, Tensor | int]:
    """Return `began_masked` of this forward, and the number of rounds of the open block that began
    without masks, including this one."""
    masked = began_masked(window)
    full = ~masked if isinstance(masked, Tensor) else not masked
    return masked, common.count_in_block(POST_ROUNDS, full, window, state)


def moves(changes_K: Tensor, masked: Tensor | bool, more_rounds: Tensor | bool) -> Tensor:
    """Return in which branches a block stays open, bool (K,): something changes or is masked, and
    there may be more rounds."""
    if masked is not False:
        changes_K = changes_K | masked
    return changes_K if more_rounds is True else changes_K & more_rounds


def block_at_entry(window: Window, state: DecodeState) -> tuple[int, int, int]:
    """Return the number of earlier forwards of the open block, and its masks and positions before
    the first of them, of the only branch. A stop may have cut it since."""
    step = step_of_block(state, window)
    if step == 0:
        assert window.masks is not None  # the host knows those of one branch
        state.memo[ENTRY_MASKS], state.memo[ENTRY_SIZE] = window.masks, window.width
    return step, state.memo[ENTRY_MASKS], state.memo[ENTRY_SIZE]


def hold_only_branch(flag: int, state: DecodeState) -> None:
    """Set `HOLD` of the only branch: `HELD`, `LEFT` or 0."""
    state.memo[HOLD] = constant(flag, state.tokens_KL.device).reshape(1)


# --- LLaDA2.1 -------------------------------------------------------------------------------------


@register("score.repeat_penalty")
@dataclass(frozen=True)
class RepeatPenalty(Score):
    """Penalises repeating the token to the left (SGLang's JointThreshold, `penalty_lambda`).

    In every row of a block except the first, `penalty` is subtracted from the logit of the token at
    the previous position, including prompt tokens and the mask token. The first row has no penalty,
    because the released step sees one block at a time. Another score reads the result.
    """

    inner: Score
    penalty: Amount = 0.0  # subtracted from a logit

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, except the row-wise ones."""
        return self.inner.gives - OF_LOGITS

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        before_KW1 = window.of(state.tokens_KL.roll(1, 1))[..., None]
        penalty_KW1 = torch.full_like(before_KW1, -self.penalty, dtype=logits_KWV.dtype)
        penalty_KW1[:, :: window.block] = 0  # a window begins with a block
        return self.inner(logits_KWV.scatter_add(2, before_KW1, penalty_KW1), state, window)


SHARE_BEGUN = MemoKey[Tensor]("share.begun")
"""Forwards of the open block that began with masks, (K,)."""


@register("select.share")
@dataclass(frozen=True)
class Share(Select):
    """Commits an even share of the block in every forward (diffusers' BlockRefinementScheduler).

    The n-th forward that begins with masks commits the P // S most confident positions of a block
    of P positions, and one more if n is among the first P mod S, regardless of how many the block
    had committed at entry. If S is larger than P, nothing is due after P forwards (`idle`).
    """

    steps: Positive  # S, forwards per block
    idle: bool = False  # whether a forward commits nothing if nothing is due, as released
    needs = COUNTS_STEPS

    @property
    def gives(self) -> Conditions:
        """Forwards without a commit, as released."""
        return holding({Condition.IDLES: self.idle})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        begun = common.count_in_block(SHARE_BEGUN, began_masked(window), window, state)
        count = window.block // self.steps + (begun <= window.block % self.steps)
        return common.most_confident(scores, window, count)


BEGUN = MemoKey[Tensor]("edit.begun")  # (K,): forwards of the open block that began with masks


@register("revise.edit")
@dataclass(frozen=True, kw_only=True)
class Edit(Budgeted):
    """Token-to-token editing (LLaDA2.1, arXiv 2602.08676): overwrites tokens the model now rejects.

    In every forward, an earlier committed position of the open block gets the candidate of its own
    row if that is another token with a probability above `tau`. A block without masks stays open
    until a forward over it edits nothing, or for `rounds` such forwards, as in LLaDA2.1's
    `generate`; SGLang's JointThreshold makes one more forward and ignores its edits
    (`ignores_last`). diffusers' block refinement closes a block after `steps` forwards that began
    with masks, even if masks remain; selector `share` has the same number. Editing uses the score's
    probabilities; with `forbid_mask` off an edit may write the mask token, which masks the position
    again.
    """

    tau: Probability  # edits are made above it; 1: never, without extra forwards
    rounds: Count = 16  # forwards with edits over a block without masks
    ignores_last: bool = False  # whether one more forward is made, without edits
    steps: Positive | None = None  # forwards after which a block is closed, even with masks; None:
    # no limit

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        masked, rounds = full_rounds(window, state)
        other_KW = scores.ids_KW != window.of(state.tokens_KL)
        write_KW = self.revisable(window, state) & other_KW & (scores.probability_KW > self.tau)
        if (is_due := common.column(rounds) <= self.rounds) is not True:
            write_KW = write_KW & is_due
        edits = self.tau < 1 or self.steps is not None  # otherwise there is nothing to edit
        more_rounds = rounds < self.rounds + self.ignores_last
        holds_K = moves(write_KW.any(1), edits and masked, more_rounds)
        hold_K = holds_K * HELD
        if self.steps is not None:
            over = common.count_in_block(BEGUN, masked, window, state) >= self.steps
            if masked is not True:
                left_K = torch.where(masked, over, ~holds_K) if masked is not False else ~holds_K
                hold_K = hold_K.masked_fill(left_K, LEFT)
            elif over:
                hold_K = torch.full_like(hold_K, LEFT)
        state.memo[HOLD] = hold_K
        return Revision(write_KW, scores.ids_KW)


# --- MultiBD --------------------------------------------------------------------------------------

FORWARDS = MemoKey[Tensor]("edit_blocks.forwards")  # of the block of each position, (K, L)
ROUNDS = MemoKey[Tensor]("edit_blocks.rounds")  # those that it began without masks, (K, L)
ENDED = MemoKey[Tensor]("edit_blocks.ended")  # where blocks ended when there was an end token, (K,)


@register("schedule.buffer")
@dataclass(frozen=True, kw_only=True)
class BlockBuffer(Pipeline):
    """MultiBD (MBD-LMs): D2F's pipeline over a buffer of a few absolute blocks.

    At most `size` blocks that are open or finished in the last forward. Released code:
    SJTU-DENG-Lab/Diffulex@184ba97, strategy/multi_bd (SJTU-DENG-Lab/mbd-lms). A finished block
    keeps its place in the buffer for the forward in which its K/V are stored. Forwards that do
    nothing else are not made here. Left out: the serving guards, which end a request while blocks
    are open.

    Blocks lie at multiples of `block`; the canvas is rounded up to whole ones, or down with
    `floor`. The prompt's rest counts as committed. A block opens as in a pipeline if there is room
    in the buffer, and in any case once all open ones are finished.
    """

    size: Positive  # blocks of the buffer

    @property
    def gives(self) -> Conditions:
        """As a pipeline; one open block if the buffer has one."""
        single = holding({Condition.ONE_OPEN_BLOCK: self.size == 1})
        return super().gives | {Condition.ABSOLUTE_BLOCKS, Condition.HELD_EACH} | single

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        length = prompt_len + new
        down = length - length % self.block
        if not self.floor or down <= prompt_len:
            down += self.block * (length > down)
        return BlockGrid(0, self.block, prompt_len, down, sees_future=self.sees_future)

    def opened(self, branch: BlockProgress) -> int:
        prompt = branch.grid.prompt_len // self.block
        opened = branch.opened or -(-branch.grid.prompt_len // self.block)
        if branch.closed or opened >= branch.grid.blocks:
            return opened
        has_room = opened - max(branch.first, prompt) < self.size
        has_room &= LAST not in branch.stays[-1:]
        due = has_room and self._reaches(branch, opened - 1, self.tau_add)
        return opened + (due or branch.finished >= opened)


@register("revise.edit_blocks")
@dataclass(frozen=True, kw_only=True)
class EditBlocks(Budgeted):
    """Overwrites tokens by more probable ones in all open blocks.

    LLaDA2.1's editing in MultiBD (`sampling_mode: edit`). A token that was committed before becomes
    the candidate of its own row if that has a probability above `tau`. A block is finished once all
    before it are, and a forward that began without masks edits nothing there, or is one of more
    than `rounds` such forwards, whose edits are not made. After `rounds` forwards more than a block
    has positions its masks are filled, edits are made and it is finished whatever they are. No
    block is opened while less than a share `stable` of the last open one's tokens are the
    candidates of their rows.
    """

    tau: Probability  # edits are made above it
    rounds: Count = 16  # forwards over a block without masks whose edits are made
    stable: Proportion = 0.0  # share of a block's tokens; 0: a block may open at once
    released: bool = False  # whether an end token finishes full blocks; once it is edited away, no
    # block opens until all open ones are finished
    needs = needing(ONE_BRANCH, {"schedule": Condition.HELD_EACH, "cache": Condition.FED_WINDOW})

    def on_start(self, round: Round) -> None:
        if self.stable and not round.state.forwards:
            round.state.memo[HOLD] = torch.full_like(round.state.tokens_KL[:, 0], LAST)

    def on_commit(self, round: Round) -> None:
        window, state = round.window, round.state
        forwards_KW = counted(FORWARDS, torch.ones_like(window.eligible_KW), window, state)
        state.commit(forwards_KW > window.block + self.rounds, round.scores.ids_KW, window.start)
        super().on_commit(round)
        if self.released:
            self._end(window, state)

    def _end(self, window: Window, state: DecodeState) -> None:
        """Hold blocks as the released engine does once there is an end token."""
        memo = state.memo
        ended_K = ((state.tokens_KL == state.special.eos) & state.committed_KL).any(1)
        known_K = memo[ENDED] if ENDED in memo else torch.zeros_like(memo[HOLD][:, 0])
        memo[ENDED] = known_K.masked_fill(ended_K, window.stop)
        over_K1 = (ended_K & ~window.of(state.masked_KL).any(1))[:, None]
        hold_KN = memo[HOLD].masked_fill(over_K1, 0)
        hold_KN[:, -1].masked_fill_((memo[ENDED] == window.stop) & (hold_KN[:, -1] > 0), LAST)
        memo[HOLD] = hold_KN

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        before_KW = window.of(state.earlier_KL)
        same_KW = scores.ids_KW == window.of(state.tokens_KL)
        write_KW = self.revisable(window, state) & ~same_KW & (scores.probability_KW > self.tau)
        full_KN1 = ~window.blocks(window.eligible_KW).any(-1, keepdim=True)
        full_KW = window.flat(full_KN1.expand(-1, -1, window.block))
        rounds_KN = window.blocks(counted(ROUNDS, full_KW, window, state))[..., 0]
        forwards_KN = window.blocks(window.of(state.memo[FORWARDS]))[..., 0]
        late_KN = forwards_KN > window.block + self.rounds
        edits_KN = window.blocks(write_KW).any(-1) & (rounds_KN <= self.rounds)
        done_KN = late_KN | (full_KN1[..., 0] & ~edits_KN)
        write_KNP = window.blocks(write_KW) & (late_KN | ~done_KN)[..., None]
        tokens_KN, same_KN = (window.blocks(x).sum(-1) for x in (before_KW, before_KW & same_KW))
        share_KN = (same_KN / tokens_KN.clamp(min=1)).double()
        calm_KN = late_KN | (share_KN >= self.stable) | (tokens_KN == 0)
        state.memo[HOLD] = torch.where(calm_KN, HELD, LAST) * (done_KN.cumprod(1) == 0)
        return Revision(window.flat(write_KNP), scores.ids_KW)


def counted(key: MemoKey[Tensor], where_KW: Tensor, window: Window, state: DecodeState) -> Tensor:
    """Count the forwards, with this one, in which `where` (bool) held at each position, (K, W)."""
    known_KL = state.recall(key, torch.long)
    count_KW = window.of(known_KL) + where_KW
    state.memo[key] = window.put(known_KL, count_KW)
    return count_KW


# --- DMax -----------------------------------------------------------------------------------------

ADDED = MemoKey[Tensor]("soft.added")  # added to embeddings of the window, (K, W, H)
START = MemoKey[int]("soft.start")  # start of that window
TINY = 1e-6  # added to a length before dividing by it, as released


@register("select.leftmost")
@dataclass(frozen=True)
class Leftmost(Select):
    """Commits a block's masks from left to right, up to the first one below the threshold.

    The first mask of a block is always committed, so no mask is left before a committed token.
    """

    tau: Probability  # probability
    gives = frozenset({Condition.NEVER_STALLS})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        masked_KNP = window.blocks(window.eligible_KW)
        doubtful_KNP = masked_KNP & (window.blocks(scores.probability_KW) < self.tau)
        run_KNP = doubtful_KNP.cumsum(2) == 0
        return window.flat((run_KNP | (masked_KNP.cumsum(2) == 1)) & masked_KNP)


@register("revise.soft")
@dataclass(frozen=True, kw_only=True)
class SoftRevision(Budgeted):
    """DMax (arXiv 2604.08302): tokens are fed as mean embeddings and revised until the block
    settles.

    Overwrites tokens in every forward and feeds them as mean embeddings until the block settles.
    Released code: czg1225/DMax@82bc29e, dInfer/python/dinfer/decoding/generate_uniform.py.

    Every earlier committed token of the open block is replaced by the candidate of its row. At
    committed positions of the block the next forward is fed a mean embedding: that of the row's
    `likeliest` tokens, weighted by their probabilities, and of the mask token, weighted by the
    remaining probability, scaled to the mean of their lengths. A block without masks is closed once
    the candidate of each row has at least probability `sure`, once a forward has changed nothing,
    or after as many forwards as it has positions. As `released`, masks do not keep it open then.
    """

    sure: Probability  # probability; 1: until nothing changes
    likeliest: Positive = 1  # number of tokens of a row in the mean
    released: bool = False  # whether a block may be closed with masks
    needs = REVISES_BLOCK | {ONE_BRANCH}

    def on_plan(self, round: Round) -> None:
        """Add the mean embeddings in the block of the last forward."""
        memo, window = round.state.memo, round.window
        if ADDED in memo and memo[START] == window.start:
            behind = round.state.length - window.stop
            round.plan = with_added(round.plan, pad(memo[ADDED], (0, 0, window.start, behind)))

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        born_KW, tokens_KW = window.of(state.born_KL), window.of(state.tokens_KL)
        write_KW = window.of(state.earlier_KL) & (scores.ids_KW != tokens_KW)
        changes_K = (write_KW | (born_KW == state.forwards)).any(1)
        doubtful_K = ((born_KW >= MASKED) & (scores.probability_KW < self.sure)).any(1)
        stays_K = changes_K & doubtful_K & (step_of_block(state, window) + 1 < window.block)
        if not self.released:
            masked_KW = (born_KW == MASKED) | (write_KW & (scores.ids_KW == state.special.mask))
            stays_K = stays_K | masked_KW.any(1)
        state.memo[HOLD] = torch.where(stays_K, HELD, LEFT)
        return Revision(write_KW, scores.ids_KW)

    def on_commit(self, round: Round) -> None:
        super().on_commit(round)
        window, state = round.window, round.state
        soft_KW = window.of(state.committed_KL) & (state.memo[HOLD] == HELD)[:, None]
        hard_KWH = round.model.embed(window.of(state.tokens_KL)).detach()
        added_KWH = self._means(round).to(hard_KWH.dtype) - hard_KWH
        state.memo[ADDED], state.memo[START] = added_KWH * soft_KW[..., None], window.start

    def _means(self, round: Round) -> Tensor:
        """Return the mean embeddings of the window's rows, float32 (K, W, H)."""
        ids_KWC, weight_KWC = round.scores.ids_KW[..., None], round.scores.probability_KW[..., None]
        if self.likeliest > 1:
            laws_KWV = round.rows_KRV[:, : round.window.width].float().softmax(2)
            weight_KWC, ids_KWC = laws_KWV.topk(min(self.likeliest, laws_KWV.shape[2]))
        weight_KWC = weight_KWC.float()
        left_KW1 = 1 - weight_KWC.sum(2, keepdim=True).clamp(max=1)
        ids_KWC = pad(ids_KWC, (0, 1), value=round.state.special.mask)
        weight_KWC1 = torch.cat([weight_KWC, left_KW1], 2)[..., None]
        weighted_KWCH = weight_KWC1 * round.model.embed(ids_KWC).detach().float()
        mean_KWH, length_KW1 = weighted_KWCH.sum(2), weighted_KWCH.norm(dim=3).sum(2, keepdim=True)
        return mean_KWH * length_KW1 / (mean_KWH.norm(dim=2, keepdim=True) + TINY)
