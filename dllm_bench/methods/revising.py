"""Shared by revisers: budgets, and rounds over a block without masks.

A budget limits the number of changes (re-maskings and overwritings) of a position, of the open
block or of the whole request; null is no limit. If a budget of block or request does not allow all
changes, those at the lower positions are made.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, LEFT, Window
from dllm_bench.core.contracts import HOLD, Revise, Round, Scores
from dllm_bench.core.declared import Count
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import constant, only
from dllm_bench.decoding.numerics import Precision, read_logits, stable_top
from dllm_bench.methods.caches import step_of_block
from dllm_bench.methods.common import count_in_block

STANDING = MemoKey[Tensor]("revise.standing")  # value of the token at each position (K, W)
POST_ROUNDS = MemoKey[Tensor]("revise.post_rounds")  # (K, 2): open block, its rounds without masks
ENTRY_MASKS = MemoKey[int]("revise.entry_masks")  # of the open block

REVISES_BLOCK = needing({"schedule": Condition.HELD_BLOCKS, "cache": Condition.FED_WINDOW})
REVISES_CANVAS = needing({"schedule": Condition.HELD_BLOCKS, "cache": Condition.WHOLE_CANVAS})


class Revision(NamedTuple):
    """Proposed changes of the committed positions of the window."""

    write_KW: Tensor  # bool: positions to overwrite
    ids_KW: Tensor  # int64: the new tokens; the mask id masks a position again


@dataclass(frozen=True, kw_only=True)
class Budgeted(Revise):
    """Proposes changes and makes as many as the budgets allow."""

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
        scores, window, state = round.scores, round.window, round.state
        round.revise(*self._allowed(self.propose(scores, window, state), window, state))

    def _allowed(self, wanted: Revision, window: Window, state: DecodeState) -> Revision:
        """Return the proposed changes that the budgets allow; undoing this forward's commits is
        free."""
        if self.per_position is self.per_block is self.per_request is None:
            return wanted
        fresh_KW = window.of(state.born_KL) == state.forwards
        allowed_KW = fresh_KW | self._within_budgets(wanted.write_KW, window, state)
        return wanted._replace(write_KW=wanted.write_KW & allowed_KW)

    def _within_budgets(self, changed_KW: Tensor, window: Window, state: DecodeState) -> Tensor:
        """Return the proposed changes that the budgets allow, bool (K, W)."""
        assert state.changes_KL is not None
        changed_KW = changed_KW & self.revisable(window, state)
        of_block_KW, of_all_KL = window.of(state.changes_KL), state.changes_KL
        for budget, spent_KX in ((self.per_block, of_block_KW), (self.per_request, of_all_KL)):
            if budget is not None:
                left_K1 = budget - spent_KX.sum(1, keepdim=True)
                changed_KW = changed_KW & (changed_KW.cumsum(1) <= left_K1)
        return changed_KW

    def revisable(self, window: Window, state: DecodeState) -> Tensor:
        """Return the positions that were committed before this forward and may be changed, bool (K,
        W)."""
        assert state.changes_KL is not None
        before_KW = committed_before(window, state)
        if self.per_position is None:
            return before_KW
        return before_KW & (window.of(state.changes_KL) < self.per_position)


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


def committed_before(window: Window, state: DecodeState) -> Tensor:
    """Return the positions that were committed before this forward, bool (K, W)."""
    born_KW = window.of(state.born_KL)
    return (born_KW >= 0) & (born_KW < state.forwards)


def masking(remask_KW: Tensor, state: DecodeState) -> Revision:
    """Return the revision that masks these positions (bool, (K, W)) again."""
    return Revision(remask_KW, constant(state.special.mask, remask_KW.device).expand_as(remask_KW))


def overwriting(write_KW: Tensor, scores: Scores) -> Revision:
    """Return the revision that writes the candidates at these positions (bool, (K, W))."""
    return Revision(write_KW, scores.ids_KW)


def post_rounds(masked_K: Tensor, window: Window, state: DecodeState) -> Tensor:
    """Return the number of rounds of the open block that began without masks, including this one,
    (K,); `masked`: whether this one began with masks."""
    return count_in_block(POST_ROUNDS, ~masked_K, window, state)


def step_and_masks(window: Window, state: DecodeState) -> tuple[int, int]:
    """Return the number of earlier forwards of the open block and its masks at entry, of the only
    branch."""
    step = step_of_block(state, window)
    if step == 0:
        assert window.masks is not None  # the host knows those of one branch
        state.memo[ENTRY_MASKS] = window.masks
    return step, state.memo[ENTRY_MASKS]


def hold_only_branch(flag: int, state: DecodeState) -> None:
    """Set `HOLD` of the only branch: `HELD`, `LEFT` or 0."""
    state.memo[HOLD] = constant(flag, state.tokens_KL.device).reshape(1)


def hold(held_K: Tensor, state: DecodeState, left_K: Tensor | None = None) -> None:
    """Keep the open block open after this round, or close it with its masks, in branches whose flag
    (bool) is true."""
    hold_K = held_K * HELD
    state.memo[HOLD] = hold_K if left_K is None else hold_K.masked_fill(left_K, LEFT)


def largest(values_KW: Tensor, where_KW: Tensor, count_K: Tensor | int) -> Tensor:
    """Return the `count` largest values among those in `where`, bool (K, W); ties to lower
    positions."""
    order_KW = stable_top(only(values_KW, where_KW), values_KW.shape[1])
    rank_W = constant(range(values_KW.shape[1]), values_KW.device)
    count_K1 = count_K[:, None] if isinstance(count_K, Tensor) else count_K
    taken_KW = (rank_W < count_K1).expand_as(where_KW)
    return torch.empty_like(where_KW).scatter_(1, order_KW, taken_KW) & where_KW
