"""SlowFast sampling (arXiv 2506.10848): estimate how far the model is confident, then decode up to
there.

A block is decoded in cycles. Slow phase: `explores` forwards over the rest of the block, each of
which estimates the end of the cycle: after the farthest masked position with a probability of at
least `reach`. The estimate is final once the last `estimates` of them deviate by less than
`spread`; otherwise their mean is used. Fast phase: forwards over the cycle until it is full; after
the first one the model sees nothing after the cycle. In both phases all candidates with probability
`tau` or more are committed if there are at least two, otherwise the most confident one. All state
is kept on the device. The released code makes the remaining slow forwards even after a block is
full, and feeds a shorter canvas in the fast phase; here the attention mask hides the rest instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Scores, Select
from dllm_bench.core.declared import Probability
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.methods.common import COUNTS_STEPS, most_confident, open_block
from dllm_bench.registry import register

BLOCK = MemoKey[Tensor]("slow_fast.block")  # block that is decoded, (K,)
STEP = MemoKey[Tensor]("slow_fast.step")  # forwards of this cycle so far, (K,)
SPAN = MemoKey[Tensor]("slow_fast.span")  # start and end of the cycle in its block, (K, 2)
SETTLED = MemoKey[Tensor]("slow_fast.settled")  # whether its end is final, bool (K,)
GUESSES = MemoKey[Tensor]("slow_fast.guesses")  # last estimates of the end, 0: none, (K, X)
VISIBLE = MemoKey[Tensor]("slow_fast.visible")  # end of what the next forward can see, (K,)


@register("select.slow_fast")
@dataclass(frozen=True)
class SlowFast(Select):
    """Commits by a threshold, over the rest of the block or up to the end of a cycle."""

    tau: Probability  # probability
    reach: Probability  # probability used to estimate the end of the cycle
    explores: int = 6  # forwards of a slow phase
    estimates: int = 2  # X, number of estimates that have to agree
    spread: float = 1.0  # they agree below this standard deviation, in positions
    needs = COUNTS_STEPS | needing({"cache": Condition.WHOLE_CANVAS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.estimates <= self.explores:
            raise DllmBenchError(
                f"SlowFast has explores {self.explores} and estimates {self.estimates}; give at "
                "least as many forwards as estimates, which are 1 or more."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        self._enter_block(open_block(window), state)
        place_KW = self._places(window, state)
        open_KW = window.eligible_KW & (place_KW >= 0) & (place_KW < window.block)
        rest_KW = open_KW & (place_KW >= state.memo[SPAN][:, :1])
        slow_K = state.memo[STEP] < self.explores
        self._estimate(rest_KW & (scores.probability_KW >= self.reach), place_KW, slow_K, state)
        cycle_KW = rest_KW & (place_KW < state.memo[SPAN][:, 1:])
        region_KW = torch.where(slow_K[:, None], rest_KW, cycle_KW)
        sure_KW = region_KW & (scores.probability_KW >= self.tau)
        best_KW = most_confident(scores, replace(window, eligible_KW=region_KW))
        where_KW = torch.where(sure_KW.sum(1, keepdim=True) >= 2, sure_KW, best_KW)
        written_KW = where_KW & (scores.ids_KW != state.special.mask)
        self._advance((cycle_KW & ~written_KW).any(1), window, state)
        return where_KW

    def on_plan(self, round: Round) -> None:
        """Hide the positions after the cycle."""
        visible_K = round.state.memo.get(VISIBLE)
        if visible_K is not None:
            known_K = round.plan.visible_K
            limit_K = visible_K if known_K is None else torch.minimum(known_K, visible_K)
            round.plan = replace(round.plan, visible_K=limit_K)

    def _enter_block(self, block_K: Tensor, state: DecodeState) -> None:
        """Begin the first cycle of a block that was not open before."""
        memo, zeros_K = state.memo, torch.zeros_like(block_K)
        if BLOCK not in memo:
            memo[BLOCK], memo[STEP], memo[SETTLED] = zeros_K - 1, zeros_K, zeros_K > 0
            memo[SPAN] = zeros_K[:, None].expand(-1, 2)
            memo[GUESSES] = zeros_K[:, None].expand(-1, self.estimates)
        fresh_K = memo[BLOCK] != block_K
        memo[BLOCK] = block_K
        self._begin_cycle(fresh_K, zeros_K, state)

    def _begin_cycle(self, fresh_K: Tensor, start_K: Tensor, state: DecodeState) -> None:
        """Begin a cycle at `start` where `fresh` is true."""
        memo, fresh_K1 = state.memo, fresh_K[:, None]
        memo[STEP] = memo[STEP].masked_fill(fresh_K, 0)
        memo[SETTLED] = memo[SETTLED] & ~fresh_K
        memo[SPAN] = torch.where(fresh_K1, start_K[:, None], memo[SPAN])
        memo[GUESSES] = memo[GUESSES].masked_fill(fresh_K1, 0)

    def _places(self, window: Window, state: DecodeState) -> Tensor:
        """Return the position of each window position in the open block, (K, W); others are outside
        of its range."""
        first_K = window.origin + state.memo[BLOCK] * window.block - window.start
        at_W = torch.arange(window.width, device=first_K.device)
        return at_W - first_K[:, None]

    def _estimate(
        self, far_KW: Tensor, place_KW: Tensor, slow_K: Tensor, state: DecodeState
    ) -> None:
        """Estimate the end of the cycle, in a slow phase whose estimate is not final."""
        memo, start_K = state.memo, state.memo[SPAN][:, 0]
        behind_K = (far_KW * (place_KW + 1)).amax(1)
        guess_K = torch.where(far_KW.any(1), behind_K, start_K + 1)
        takes_K = slow_K & ~memo[SETTLED]
        moved_KX = torch.cat([memo[GUESSES][:, 1:], guess_K[:, None]], 1)
        memo[GUESSES] = torch.where(takes_K[:, None], moved_KX, memo[GUESSES])
        agree_K = memo[GUESSES].double().std(1, correction=0) < self.spread
        enough_K = takes_K & (memo[GUESSES] > 0).all(1)
        mean_K = memo[GUESSES].sum(1) // self.estimates
        end_K = torch.where(agree_K, guess_K, mean_K)
        end_K = torch.where(enough_K, end_K, memo[SPAN][:, 1])
        memo[SPAN] = torch.stack([start_K, end_K], 1)
        memo[SETTLED] = memo[SETTLED] | (enough_K & agree_K)

    def _advance(self, left_K: Tensor, window: Window, state: DecodeState) -> None:
        """Count the forward; begin a new cycle where this one has no mask left."""
        memo = state.memo
        memo[STEP] = memo[STEP] + 1
        fast_K = memo[STEP] >= self.explores
        self._begin_cycle(fast_K & ~left_K, memo[SPAN][:, 1], state)
        end_K = window.origin + memo[BLOCK] * window.block + memo[SPAN][:, 1]
        hides_K = memo[STEP] > self.explores
        memo[VISIBLE] = torch.where(hides_K, end_K, state.length)
