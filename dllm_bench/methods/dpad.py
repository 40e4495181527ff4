"""DPad (arXiv 2508.14148): drop most masks after the open block, and more of them farther away.

The remaining positions are drawn before a block's first forward. A dropped position is neither fed
nor read until a later block draws again; the others keep their positions in the rotary embedding.
"gaussian": the position at distance d stays with probability `scale` N(z_d), where N is the density
of the standard normal distribution and z runs evenly from 0 to `sigma` over `window` positions;
none stays beyond. "uniform": `number` of the next `window` positions stay. Among the remaining
positions, `inner`, a cache over spans, decides what is fed and read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Cache, Round
from dllm_bench.core.declared import Count, Positive, PositiveAmount
from dllm_bench.core.decoder import ONE_BRANCH, ONE_OPEN_BLOCK, Condition, Conditions, needing
from dllm_bench.core.denoiser import ForwardPlan, PositionSets
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import true_indices
from dllm_bench.decoding.numerics import generator
from dllm_bench.methods.caches import NoCache, step_of_block
from dllm_bench.registry import register

Law = Literal["gaussian", "uniform"]
STAYS = MemoKey[Tensor]("dpad.stays")  # bool (1, L), on the host


@register("cache.dpad")
@dataclass(frozen=True)
class DPadCache(Cache):
    """Drops masks after the open block. The draw happens on the host, so no wait is needed."""

    inner: Cache = field(default_factory=NoCache)
    law: Law = "gaussian"
    window: Positive = 128  # positions after the block among which some stay
    sigma: PositiveAmount = 4.0  # z at the end of the window, for "gaussian"
    scale: PositiveAmount = 2.0  # factor of the density, for "gaussian"
    number: Count = 0  # positions that stay, for "uniform"
    needs = needing(
        ONE_BRANCH, ONE_OPEN_BLOCK, {"inner": (Condition.FULL_ATTENTION, Condition.OWN_SPANS)}
    )

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner cache that concern the window."""
        passed = {Condition.FED_WINDOW, Condition.FULL_ATTENTION, Condition.NO_CACHE}
        return self.inner.gives & passed | {Condition.DRAWS}

    def plan(self, round: Round) -> ForwardPlan:
        branches, window, kv = round.state, round.window, round.kv
        held, plan = kv.length, self.inner.plan(round)
        if step_of_block(branches, window) == 0:
            branches.memo[STAYS] = self.draw(branches, window)
        position_L = torch.arange(window.visible)
        stays_L = branches.memo[STAYS][0, : window.visible]
        fed_L = stays_L & (position_L >= plan.feed[0]) & (position_L < plan.feed[1])
        kept_L = fed_L & (position_L >= plan.store[0]) & (position_L < plan.store[1])
        read_L = stays_L & ~fed_L & (position_L < held)
        indices = true_indices((fed_L, read_L, kept_L), branches.born_KL.device)
        return replace(plan, sets=PositionSets(*indices))

    def draw(self, state: DecodeState, window: Window) -> Tensor:
        """Return the positions that exist while the window's block is open, bool (1, L), on the
        host."""
        stays_1L = torch.ones(1, state.length, dtype=torch.bool)
        rest, numbers = stays_1L[0, window.stop :], generator(state, "dpad", "cpu")
        if self.law == "gaussian":
            z_X = torch.linspace(0, self.sigma, self.window)[: len(rest)]
            density_X = self.scale * (-z_X.square() / 2).exp() / math.sqrt(2 * math.pi)
            uniform_X = torch.rand(len(rest), generator=numbers)
            rest[:] = False
            rest[: len(z_X)] = uniform_X[: len(z_X)] < density_X
        elif self.number < len(rest):
            near = min(len(rest), self.window)
            rest[:] = False
            rest[torch.randperm(near, generator=numbers)[: self.number]] = True
        return stays_1L
