"""How many positions the scores allow to commit: EB-Sampler, LocalLeap, Prophet, SlowFast."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d, pad

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Score, Scores, Select
from dllm_bench.core.declared import Amount, Count, Positive, Probability, Size
from dllm_bench.core.decoder import Condition, Conditions, Needs, holding, needing
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.transfer import constant
from dllm_bench.methods import common
from dllm_bench.methods.common import COUNTS_STEPS, OF_LOGITS, Confidence, Ranked, TopK
from dllm_bench.registry import register

# --- EB-Sampler -----------------------------------------------------------------------------------


@register("score.with_entropy")
@dataclass(frozen=True)
class WithEntropy(Score):
    """The scores of `inner` with the entropy of every position, from one pass over the logits.

    For selectors that rank by one value and bound another, as d2Cache's form of the EB-Sampler
    does: rank by confidence, bound the entropy.
    """

    inner: Ranked = field(default_factory=Confidence)
    gives = frozenset({Condition.RAW_CONFIDENCE, Condition.ENTROPY, Condition.ROW_BY_ROW})
    reads_rows = "masked"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, Confidence) and self.inner.last:
            raise DllmBenchError(
                f"WithEntropy reads the logits once, and its inner score has last "
                f"{self.inner.last!r}, whose probabilities are those of other logits; use null."
            )

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        return self.inner.of(logits_KWV, None, state, entropy=True)


@register("select.entropy_bound")
@dataclass(frozen=True)
class EntropyBound(Select):
    """EB-Sampler (arXiv 2505.24857): the longest prefix of positions whose joint error is bounded.

    Positions are ordered by confidence. The first n are committed, for the largest n with H(1) +
    ... + H(n) - max(H(1) ... H(n)) <= gamma, in nats: a bound on the difference between their joint
    distribution and the product of their distributions. In order of entropy (as in public copies)
    the maximum is the last one. d2Cache orders by confidence or margin and always leaves out the
    last one, because its running maximum runs along the batch axis; the two differ if an earlier
    position has a higher entropy. At least the `least` most confident positions are committed.
    """

    gamma: float  # nats; below 0: one token per forward
    least: Positive = 1  # positions committed regardless of their entropy
    left_out: Literal["largest", "last"] = "largest"  # the entropy that the sum leaves out
    needs = needing({"score": Condition.ENTROPY})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # by `needs`
        order_KW = common.order_of(scores.confidence_KW, window.eligible_KW)
        entropy_KW = -scores.neg_entropy_KW.gather(1, order_KW)
        left_out_KW = entropy_KW if self.left_out == "last" else entropy_KW.cummax(1).values
        allowed_K = (entropy_KW.cumsum(1) - left_out_KW <= self.gamma).sum(1)
        return common.first_of(order_KW, allowed_K.clamp(min=self.least), window.eligible_KW)


# --- LocalLeap ------------------------------------------------------------------------------------


@register("select.local_leap")
@dataclass(frozen=True)
class LocalLeap(Select):
    """LocalLeap (arXiv 2510.07081): a lower threshold near confident positions.

    Commits by a threshold that is relaxed near anchors. A position whose candidate has at least
    probability `tau` is an anchor. The threshold is `relaxed` for masked positions at most `radius`
    away from an anchor, itself included, and `tau` for all others. If a block must progress but no
    position passes, its most confident one is committed (the inherited stall rule).
    """

    tau: Probability  # probability of an anchor
    relaxed: Probability  # threshold near an anchor
    radius: Count  # positions on either side of an anchor; 0: none

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        sure_KW = window.eligible_KW & (scores.probability_KW >= self.tau)
        reach = min(self.radius, window.width)
        near_KW = max_pool1d(sure_KW.float(), 2 * reach + 1, stride=1, padding=reach)
        return torch.where(near_KW > 0, scores.probability_KW >= self.relaxed, sure_KW)


# --- Prophet --------------------------------------------------------------------------------------

GAP = MemoKey[Tensor]("answer_gap.gap")  # mean difference of the two largest logits, (K,)


@register("score.answer_gap")
@dataclass(frozen=True)
class AnswerGap(Score):
    """Scores by `inner`, and remembers the lead of the answer's best logits.

    The gap is the difference of the two largest logits, averaged over the answer's positions,
    masked or not. The released code reads five positions from the start of the answer, which it
    knows from the tokens it pins; without a known start it reads nothing. Here the gap is then
    averaged over all masks.
    """

    inner: Score = field(default_factory=Confidence)
    answer: Count | None = None  # first new position of the answer; None: all masked positions
    width: Positive = 5  # positions of the answer

    @property
    def needs(self) -> Needs:
        """The answer in the window, and logits at its committed positions."""
        reads = () if self.answer is None else Condition.FED_WINDOW
        return needing({"schedule": Condition.WHOLE_GENERATION, "cache": reads})

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, and the gap."""
        return self.inner.gives - OF_LOGITS | {Condition.ANSWER_GAP}

    def prepare(self, model: Denoiser, request: Request) -> Request:
        if self.answer is not None and self.answer >= request.max_new_tokens:
            raise DllmBenchError(
                f"AnswerGap reads the answer from new position {self.answer} on, and the request "
                f"has {request.max_new_tokens} new tokens; set score.answer lower."
            )
        return request

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        read_KW, logits_KRV = window.eligible_KW, logits_KWV
        if self.answer is not None:
            logits_KRV = logits_KWV[:, self.answer : self.answer + self.width]
            read_KW = torch.ones_like(logits_KRV[..., 0], dtype=torch.bool)
        two_KR2 = logits_KRV.topk(2, dim=-1).values.float()
        gap_KR = (two_KR2[..., 0] - two_KR2[..., 1]) * read_KW
        state.memo[GAP] = gap_KR.sum(1) / read_KW.sum(1)
        return self.inner(logits_KWV, state, window)


MIDDLE, END = 0.33, 0.67  # shares of the forwards at which `mid` and `late` begin (released code)


@register("select.early_exit")
@dataclass(frozen=True)
class EarlyExit(Select):
    """Prophet (arXiv 2508.19982): commits by `inner`, or everything once the answer is clear.

    It takes LLaDA's steps, block by block. In the g-th of all S forwards, all remaining masks are
    committed if the answer's gap has reached a threshold that falls with g / S: `early` below 0.33,
    `mid` below 0.67, then `late`. The whole generation is one window, in which `block` positions
    are open at a time. Pinned tokens are on the canvas from the start; the released code then makes
    forwards over a block that is full before its steps are over (`idle`). g counts such forwards
    even if they are left out.
    """

    inner: TopK = field(default_factory=TopK)  # its steps are per block
    block: Size = 32
    early: float = 7.5  # thresholds of the answer's gap (difference of logits)
    mid: float = 5.0
    late: float = 2.5
    idle: bool = False  # whether forwards may commit nothing, as published
    pinned: tuple[tuple[int, int], ...] = ()  # (new position, token id) known from the start
    needs = needing({"schedule": Condition.WHOLE_GENERATION, "score": Condition.ANSWER_GAP})

    @property
    def gives(self) -> Conditions:
        """Forwards without a commit, as released."""
        return holding({Condition.IDLES: self.idle})

    def prepare(self, model: Denoiser, request: Request) -> Request:
        for _, token in self.pinned:
            if token == model.special.mask or not 0 <= token < model.vocab_size:
                raise DllmBenchError(
                    f"EarlyExit pins token {token}, which is the mask or none of the model's "
                    f"{model.vocab_size:,} tokens; change it in decoder.select.pinned."
                )
        return replace(request, pinned=tuple(dict([*request.pinned, *self.pinned]).items()))

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        opened = self._open(window, state)
        clear_K = state.memo[GAP] >= self._enough(opened, state)
        return self.inner(scores, opened, state) | (clear_K[:, None] & window.eligible_KW)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        return self.inner.on_stall(scores, self._open(window, state), state)

    def _steps(self, window: Window) -> int:
        """Return the number of forwards of a block."""
        return self.inner.steps or min(self.block, window.width)

    def _enough(self, opened: Window, state: DecodeState) -> Tensor:
        """Return the threshold of the gap in this forward, 0-d or (K,)."""
        steps, step = self._steps(opened), common.step_in_block(state, opened)[0]
        before = state.forwards if self.idle else common.open_block(opened) * steps + step
        share = torch.as_tensor((before + 1) / (steps * -(-opened.width // self.block)))
        later = torch.where(share < END, self.mid, self.late)
        return torch.where(share < MIDDLE, self.early, later)

    def _open(self, window: Window, state: DecodeState) -> Window:
        """Return the window with one open block: the first with masks or, with `idle`, the
        scheduled one."""
        window = replace(window, block=self.block)
        first = state.forwards // self._steps(window) if self.idle else common.open_block(window)
        place_W = constant(range(window.width), window.eligible_KW.device) // self.block
        return replace(window, eligible_KW=window.eligible_KW & (place_W == common.column(first)))


# --- SlowFast -------------------------------------------------------------------------------------

BLOCK = MemoKey[Any]("slow_fast.block")  # block that is decoded, as `open_block` gives it
CYCLE = MemoKey[Tensor]("slow_fast.cycle")
"""Int64 (K, 4 + X): forwards of this cycle so far, its start and its end in the block, whether the
end is final, and the last X estimates of the end (0: none)."""
AGE, START, STOP = (slice(column, column + 1) for column in range(3))  # columns of CYCLE
VISIBLE = MemoKey[Tensor]("slow_fast.visible")  # end of what the next forward can see, (K,)


@register("select.slow_fast")
@dataclass(frozen=True)
class SlowFast(Select):
    """SlowFast sampling (arXiv 2506.10848): estimate how far the model is confident, then decode up
    to there.

    Commits by a threshold, over the rest of the block or up to the end of a cycle. A block is
    decoded in cycles. Slow phase: `explores` forwards over the rest of the block, each of which
    estimates the end of the cycle: after the farthest masked position with a probability of at
    least `reach`. The estimate is final once the last `estimates` of them deviate by less than
    `spread`; otherwise their mean is used. Fast phase: forwards over the cycle until it is full;
    after the first one the model sees nothing after the cycle. In both phases all candidates with
    probability `tau` or more are committed if there are at least two, otherwise the most confident
    one. All state is kept on the device. The released code makes the remaining slow forwards even
    after a block is full, and feeds a shorter canvas in the fast phase; here the attention mask
    hides the rest instead.
    """

    tau: Probability  # probability
    reach: Probability  # probability used to estimate the end of the cycle
    explores: Size = 6  # forwards of a slow phase
    estimates: Size = 2  # X, number of estimates that have to agree
    spread: Amount = 1.0  # they agree below this standard deviation, in positions
    needs = COUNTS_STEPS | needing({"cache": Condition.WHOLE_CANVAS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.estimates > self.explores:
            raise DllmBenchError(
                f"SlowFast has explores {self.explores} below estimates {self.estimates}; raise it."
            )

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        cycle_KX, place_KW = self._cycle(window, state), self._places(window, state)
        rest_KW = window.eligible_KW & (place_KW >= cycle_KX[:, START])
        if window.width > window.block:
            rest_KW = rest_KW & (place_KW >= 0) & (place_KW < window.block)
        far_KW = rest_KW & (scores.probability_KW >= self.reach)
        cycle_KX = self._estimated(cycle_KX, far_KW, place_KW)
        cycle_KW = rest_KW & (place_KW < cycle_KX[:, STOP])
        region_KW = torch.where(cycle_KX[:, AGE] < self.explores, rest_KW, cycle_KW)
        sure_KW = region_KW & (scores.probability_KW >= self.tau)
        best_KW = common.largest(scores.confidence_KW, region_KW)
        where_KW = torch.where(sure_KW.sum(1, keepdim=True) >= 2, sure_KW, best_KW)
        written_KW = where_KW & (scores.ids_KW != state.special.mask)
        # count the forward; begin a new cycle where this one has no mask left
        cycle_KX = cycle_KX + constant((1, *[0] * (3 + self.estimates)), cycle_KX.device)
        left_K1 = (cycle_KW & ~written_KW).any(1, keepdim=True)
        over_K1 = (cycle_KX[:, AGE] >= self.explores) & ~left_K1
        next_KX = pad(cycle_KX[:, STOP].expand(-1, 2), (1, 1 + self.estimates))
        cycle_KX = torch.where(over_K1, next_KX, cycle_KX)
        end_K1 = window.origin + common.column(state.memo[BLOCK]) * window.block + cycle_KX[:, STOP]
        visible_K1 = torch.where(cycle_KX[:, AGE] > self.explores, end_K1, state.length)
        state.memo[CYCLE], state.memo[VISIBLE] = cycle_KX, visible_K1.squeeze(1)
        return where_KW

    def on_plan(self, round: Round) -> None:
        """Hide the positions after the cycle."""
        visible_K = round.state.memo.get(VISIBLE)
        if visible_K is not None:
            known_K = round.plan.visible_K
            limit_K = visible_K if known_K is None else torch.minimum(known_K, visible_K)
            round.plan = replace(round.plan, visible_K=limit_K)

    def _cycle(self, window: Window, state: DecodeState) -> Tensor:
        """Return the cycle: the first one of the block if that was not open before."""
        is_known = common.same_block(BLOCK, window, state)
        if is_known is True:
            return state.memo[CYCLE]
        size = (len(window.eligible_KW), 4 + self.estimates)
        first_KX = window.eligible_KW.new_zeros(size, dtype=torch.long)
        if isinstance(is_known, Tensor):
            return torch.where(is_known[:, None], state.memo[CYCLE], first_KX)
        return first_KX

    def _places(self, window: Window, state: DecodeState) -> Tensor:
        """Return the position of each window position in the open block, (W,) or (K, W); others are
        outside of its range."""
        first: Tensor | int = window.origin + state.memo[BLOCK] * window.block - window.start
        return constant(range(window.width), window.eligible_KW.device) - common.column(first)

    def _estimated(self, cycle_KX: Tensor, far_KW: Tensor, place_KW: Tensor) -> Tensor:
        """Return the cycle with an estimate of its end, in a slow phase whose estimate is not
        final; it reaches to the last of the positions `far` (bool)."""
        sizes = [1, 1, 1, 1, self.estimates]
        step_K1, start_K1, end_K1, settled_K1, guesses_KX = cycle_KX.split(sizes, dim=1)
        behind_K1 = (far_KW * (place_KW + 1)).amax(1, keepdim=True)
        guess_K1 = torch.where(far_KW.any(1, keepdim=True), behind_K1, start_K1 + 1)
        takes_K1 = (step_K1 < self.explores) & (settled_K1 == 0)
        moved_KX = torch.cat([guesses_KX[:, 1:], guess_K1], 1)
        guesses_KX = torch.where(takes_K1, moved_KX, guesses_KX)
        agree_K1 = guesses_KX.double().std(1, correction=0, keepdim=True) < self.spread
        enough_K1 = takes_K1 & (guesses_KX > 0).all(1, keepdim=True)
        mean_K1 = guesses_KX.sum(1, keepdim=True) // self.estimates
        found_K1 = torch.where(agree_K1, guess_K1, mean_K1)
        end_K1 = torch.where(enough_K1, found_K1, end_K1)
        settled_K1 = settled_K1 | (enough_K1 & agree_K1)
        return torch.cat([step_K1, start_K1, end_K1, settled_K1, guesses_KX], 1)
