"""`Round`: one request of the masked loop as its pieces see it, from round to round.

A round has five moments: pieces act before its only wait (`on_start`), before the forward
(`on_plan`) and after its scores (`on_scores`); the selector's choice is committed; and pieces act
once more (`on_commit`), see `contracts.MaskedPiece`. What any piece may do then, whatever its
method, is a method here: have values copied to the host, change the canvas's length, end the open
block, revise tokens.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.scores import Scores
from dllm_bench.core.state import CUT, DecodeState, MemoKey

HOLD = MemoKey[Tensor]("round.hold")
"""int64 (K,): `HELD` if the open block stays open without masks (the whole text, before a block was
opened), `LEFT` if it is left with masks, 0 or nothing remembered if it is open while it has masks.
Any piece may set it; the next wait reads it."""
END = "end"  # host: where the open block ends, if a piece ended it
INSERTED = "inserted"  # host: where positions were inserted, and how many
WORTH = "worth"  # host: how many branches before the base are worth a forward
LENGTH = "length"  # host: length of a canvas that was cut or inserted into


@dataclass
class Round:
    """One request as its pieces see it; from the pick to the next `on_start` of one branch."""

    state: DecodeState
    """Tokens and memo of the branches; of several workers, this one's between plan and pick."""
    kv: KVCache
    """Keys and values of the request."""
    window: Window = field(init=False)
    """What is decoded: of the last round until blocks are opened; none in the first `on_start`."""
    plan: ForwardPlan = field(init=False)
    """Of this round's forward, from `on_plan` on."""
    logits_KXV: Tensor = field(init=False)
    """Of the R rows of the plan, then of the rows that a piece added to it; (1, M, V) if the plan
    names rows `only_M`. From `on_scores` on; it keeps all branches."""
    scores: Scores = field(init=False)
    """Of the window, from `on_scores` on."""
    host: dict[Hashable, list[int]] = field(default_factory=dict)
    """What was asked for, as of this round's wait."""
    revised: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Tokens and `born` (L,) after every revision, for the trace."""
    only: Tensor = field(init=False)
    """Index of a single branch, 0-d int64."""
    _asked: dict[Hashable, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        device = self.state.tokens_KL.device
        self.only = torch.zeros((), dtype=torch.long, device=device)

    @property
    def begun(self) -> bool:
        """Whether a forward was made."""
        return self.state.forwards > 0

    @property
    def rows_KRV(self) -> Tensor:
        """Logits of the rows that the plan wants, without those that a piece added."""
        rows = self.plan.rows[1] - self.plan.rows[0]
        picked = self.plan.only_M is not None or self.logits_KXV.shape[1] == rows
        return self.logits_KXV if picked else self.logits_KXV[:, :rows]

    @property
    def added_KEV(self) -> Tensor:
        """Logits of the rows that a piece added to the plan."""
        return self.logits_KXV[:, self.plan.rows[1] - self.plan.rows[0] :]

    @property
    def ahead_KXV(self) -> Tensor:
        """Logits of the wanted rows after the window, for pieces that read what is fed."""
        return self.rows_KRV[:, self.window.width :]

    def ask(self, key: Hashable, values: Tensor) -> None:
        """Have integers copied to the host at the next wait; `host` holds them flat under `key`."""
        self._asked[key] = values

    def question(self) -> Tensor:
        """All that was asked for, int64 or shorter (X,)."""
        return torch.cat([values.reshape(-1) for values in self._asked.values()])

    def answer(self, values: list[int]) -> None:
        """Learn the values of `question`."""
        each = iter(values)
        self.host = {key: [*islice(each, part.numel())] for key, part in self._asked.items()}
        self._asked = {}

    def on_host(self, key: Hashable) -> Tensor:
        """What was asked for of every canvas position, on the host (L,)."""
        return torch.tensor(self.host[key])[: self.state.length]

    def revise(
        self, remask_KW: Tensor, write_KW: Tensor, ids_KW: Tensor, show_KW: Tensor | None = None
    ) -> None:
        """Change committed positions from the window's start on; see `DecodeState.revise`."""
        self.state.revise(remask_KW, write_KW, ids_KW, show_KW, start=self.window.start)
        self.revised.append((self.state.tokens_KL[-1].clone(), self.state.born_KL[-1].clone()))

    def end_block(self, end: Tensor) -> None:
        """End the open block at a canvas position (0-d int64), at most the window's end."""
        self.window = self.window.until(end)
        self.ask(END, end)

    def keep_first(self, count: Tensor) -> None:
        """Make this forward with the base and the first `count` other branches (0-d int64)."""
        self.ask(WORTH, count)

    def cut(self, length: Tensor) -> None:
        """Give up all positions from `length` (0-d int64) on."""
        self.state.cut(length)
        self.ask(LENGTH, (self.state.born_KL[-1] != CUT).sum())

    def insert(self, at: Tensor, count: Tensor, ends: Tensor | None, most: int) -> None:
        """Insert `count` positions, at most `most`, in front of `at`, up to the request's new
        tokens; see `DecodeState.insert`.
        """
        most = min(most, self.state.wanted - self.state.length)
        if most > 0:
            self.ask(LENGTH, self.state.insert(at, count, ends, most))
            self.ask(INSERTED, torch.stack([at, count]))
