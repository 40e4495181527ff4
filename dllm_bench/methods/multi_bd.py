"""MultiBD (MBD-LMs): D2F's pipeline over a buffer of a few absolute blocks.

Released code: SJTU-DENG-Lab/Diffulex@184ba97, strategy/multi_bd (SJTU-DENG-Lab/mbd-lms). A finished
block keeps its place in the buffer for the forward in which its K/V are stored. Forwards that do
nothing else are not made here. Left out: the serving guards, which end a request while blocks are
open.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, LAST, BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import HOLD, Round, Scores
from dllm_bench.core.declared import Count, Positive, Probability, Proportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, Conditions, holding, needing
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.common import Pipeline
from dllm_bench.methods.revising import Budgeted, Revision, committed_before, overwriting
from dllm_bench.registry import register

FORWARDS = MemoKey[Tensor]("edit_blocks.forwards")  # of the block of each position, (K, L)
ROUNDS = MemoKey[Tensor]("edit_blocks.rounds")  # those that it began without masks, (K, L)
ENDED = MemoKey[Tensor]("edit_blocks.ended")  # where blocks ended when there was an end token, (K,)


@register("schedule.buffer")
@dataclass(frozen=True, kw_only=True)
class BlockBuffer(Pipeline):
    """At most `size` blocks that are open or finished in the last forward.

    Blocks lie at multiples of `block`; the canvas is rounded up to whole ones, or down with
    `floor`. The prompt's rest counts as committed. A block opens as in a pipeline if there is room
    in the buffer, and in any case once all open ones are finished.
    """

    size: Positive  # blocks of the buffer

    @property
    def gives(self) -> Conditions:
        """As a pipeline; one open block if the buffer has one."""
        single = holding({Condition.ONE_OPEN_BLOCK: self.size == 1})
        always = {Condition.ABSOLUTE_BLOCKS, Condition.HELD_EACH}
        return super().gives | always | single

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
    released: bool = False  # whether full blocks are finished once there is an end token, and one
    # that is edited away lets no block open until all open ones are finished
    needs = needing(ONE_BRANCH, {"schedule": Condition.HELD_EACH, "cache": Condition.FED_WINDOW})

    def on_start(self, round: Round) -> None:
        if self.stable and not round.begun:
            round.state.memo[HOLD] = torch.full_like(round.state.tokens_KL[:, 0], LAST)

    def on_commit(self, round: Round) -> None:
        window, state = round.window, round.state
        forwards_KW = counted(FORWARDS, torch.ones_like(window.eligible_KW), window, state)
        late_KW = forwards_KW > window.block + self.rounds
        state.commit(late_KW, round.scores.ids_KW, window.start)
        super().on_commit(round)
        if self.released:
            self._end(window, state)

    def _end(self, window: Window, state: DecodeState) -> None:
        """Hold blocks as the released engine does once there is an end token."""
        memo = state.memo
        ended_K = (state.tokens_KL[:, state.prompt_len :] == state.special.eos).any(1)
        known_K = memo[ENDED] if ENDED in memo else torch.zeros_like(memo[HOLD][:, 0])
        memo[ENDED] = known_K.masked_fill(ended_K, window.stop)
        over_K1 = (ended_K & ~window.of(state.masked_KL).any(1))[:, None]
        hold_KN = memo[HOLD].masked_fill(over_K1, 0)
        hold_KN[:, -1].masked_fill_((memo[ENDED] == window.stop) & (hold_KN[:, -1] > 0), LAST)
        memo[HOLD] = hold_KN

    def propose(self, scores: Scores, window: Window, state: DecodeState) -> Revision:
        before_KW = committed_before(window, state)
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
        held_KN = torch.where(calm_KN, HELD, LAST)
        state.memo[HOLD] = held_KN * (done_KN.cumprod(1) == 0)
        return overwriting(window.flat(write_KNP), scores)


def counted(key: MemoKey[Tensor], where_KW: Tensor, window: Window, state: DecodeState) -> Tensor:
    """Count the forwards, with this one, in which `where` (bool) held at each position, (K, W)."""
    known_KL = state.recall(key, torch.long)
    count_KW = window.of(known_KL) + where_KW
    state.memo[key] = window.put(known_KL, count_KW)
    return count_KW
