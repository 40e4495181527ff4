"""Lengths that follow from the scores: AdaBlock (blocks), DAEDAL (the canvas)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dllm_bench.core.blocks import HELD, BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import HOLD, Round, Score, Scores
from dllm_bench.core.declared import Amount, Positive, PositiveProportion, Probability, Size
from dllm_bench.core.decoder import ONE_BRANCH, BlockLength, Condition, Conditions, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.decoding.numerics import forbid
from dllm_bench.methods.common import Confidence, InTurn
from dllm_bench.registry import register

READS_ENDS = needing(
    ONE_BRANCH, {"score": Condition.RAW_CONFIDENCE, "cache": Condition.FULL_ATTENTION}
)
"""Needs of schedules that look for an end among the candidates after the open block."""

# --- AdaBlock -------------------------------------------------------------------------------------


@register("schedule.adablock")
@dataclass(frozen=True)
class AdaBlock(InTurn):
    """AdaBlock (arXiv 2509.26432): a block ends at the delimiter that its first forward predicts.

    One open block at a time, whose length follows from its first scores. The candidates of masks in
    the next `share` of the generation are searched for `delimiters`. If the most probable delimiter
    reaches `tau`, the block ends with it; otherwise it has `block` positions. The same forward also
    commits positions before that end.
    """

    block: Size  # block length without a delimiter
    delimiters: tuple[int, ...] = (198,)  # token ids; 198 is the line feed of LLaDA and Dream
    tau: Probability = 0.3  # minimum probability for a delimiter to end a block
    share: PositiveProportion = 0.25  # part of the generation that is searched
    gives = frozenset({Condition.ONE_OPEN_BLOCK, Condition.BLOCKS_IN_ORDER, Condition.FIXED_CANVAS})
    needs = READS_ENDS

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.delimiters:
            raise DllmBenchError("AdaBlock has no delimiters; give one token id or more.")

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        longest = max(self.block, self._searched(new))
        return BlockGrid(prompt_len, longest, prompt_len, prompt_len + new)

    def on_scores(self, round: Round) -> None:
        """End the block according to the scores of its first forward."""
        scores, window, state = round.scores, round.window, round.state
        if window.end_known:
            return
        searched = self._searched(state.length - state.prompt_len)
        found = [window.eligible_KW & (scores.ids_KW == token) for token in self.delimiters]
        sure_1W = scores.probability_KW.masked_fill(~torch.stack(found).any(0), -1)
        best, index = sure_1W[0, :searched].max(0)
        usual = min(window.start + self.block, window.stop)
        round.end_block(torch.where(best >= self.tau, window.start + index + 1, usual))

    def _searched(self, new: int) -> int:
        """Return the number of searched positions for a generation of `new` positions."""
        return max(int(self.share * new), 1)


# --- DAEDAL ---------------------------------------------------------------------------------------


@register("score.mask_last")
@dataclass(frozen=True)
class MaskLast(Score):
    """Decodes positions whose candidate is the mask token last (DAEDAL, released fill rule).

    For decoders that leave the mask token in the distribution. If it is the candidate, the second
    most probable token replaces it. That token gets probability 0, so that no threshold commits it;
    it ranks after all other candidates, by its confidence without the mask token. `Scores.raw_KW`
    keeps the inner score of the mask token.
    """

    inner: Confidence = field(default_factory=Confidence)
    gives = frozenset({Condition.RAW_CONFIDENCE, Condition.ROW_BY_ROW})
    reads_rows = "masked"

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        first = self.inner(logits_KWV, state, window)
        others_KWV = logits_KWV.clone()
        forbid(others_KWV, [state.special.mask])
        other = self.inner(others_KWV, state, window)
        masks_KW = first.ids_KW == state.special.mask
        ids_KW = torch.where(masks_KW, other.ids_KW, first.ids_KW)
        probability_KW = first.probability_KW.masked_fill(masks_KW, 0)
        raw_KW = first.confidence_KW
        confidence_KW = torch.where(masks_KW, other.confidence_KW - 1, raw_KW)
        return Scores(ids_KW, probability_KW, confidence_KW, raw_KW, first.neg_entropy_KW)


SIZING = "daedal.sizing"  # host: whether this forward only finds the canvas length


@register("schedule.daedal")
@dataclass(frozen=True)
class Daedal(InTurn):
    """DAEDAL (arXiv 2508.00819): a canvas that grows.

    One open block at a time, on a canvas that begins short and grows where the model needs it.

    First, forwards over prompt and masks find the length: `factor` masks at a time are appended
    until the model is confident enough (`eos_enough`) that the text ends within the canvas; then
    `eos_window` / 2 end tokens are appended. While blocks are decoded, if a forward's confidence in
    the end is below `eos_expand`, it replaces the least probable mask of the open block by `factor`
    masks, provided its candidate is less probable than `low`. The canvas has at most the request's
    number of new tokens; positions that an expansion pushes beyond it are lost.

    The confidence sums the probabilities of the last `eos_window` candidates that are the end
    token, at any position, and divides by `eos_window` even if there are fewer (released code).
    """

    block: Size  # positions of a block; the last one may be short
    initial: Size = 64  # new positions of the first canvas
    factor: Positive = 8  # masks appended at a time, and masks that replace one
    eos_enough: Amount = 0.5  # confidence in the end at which the first length is accepted
    eos_expand: Amount = 0.9  # confidence in the end below which a mask may be replaced
    low: Amount = 0.1  # probability below which a candidate may be replaced
    eos_window: Positive = 32  # candidates that the confidence in the end counts
    reads_rows = "window"
    needs = READS_ENDS | needing({"cache": Condition.WHOLE_CANVAS})

    @property
    def gives(self) -> Conditions:
        """Conditions for other pieces; steps cannot be counted in a block whose length changes.

        Scores of all rows are needed to find the end of the text.
        """
        blocks = frozenset({Condition.ONE_OPEN_BLOCK, Condition.BLOCKS_IN_ORDER})
        spans = {Condition.FROM_FIRST_BLOCK, Condition.TO_LAST_BLOCK}
        return blocks | spans | {BlockLength(self.block)}

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        return BlockGrid(prompt_len, self.block, prompt_len, prompt_len + min(self.initial, new))

    def opened(self, branch: BlockProgress) -> int:
        """Return 0 blocks while the length is sought."""
        return 0 if HELD in branch.stays else super().opened(branch)

    def on_start(self, round: Round) -> None:
        if not round.state.forwards:
            self._seek(torch.ones_like(round.state.masked_KL[0, 0]), round)

    def on_plan(self, round: Round) -> None:
        if self._seeks(round):
            round.plan = replace(round.plan, kind=ForwardKind.SIZE)

    def on_commit(self, round: Round) -> None:
        if self._seeks(round):
            self._append(self._end_confidence(round) < self.eos_enough, round)
        elif round.state.length < round.state.wanted:
            self._expand(self._end_confidence(round) < self.eos_expand, round)

    def _seeks(self, round: Round) -> bool:
        """Return whether this forward only finds the canvas length, as the first one does."""
        return any(round.host.get(SIZING, ()))

    def _seek(self, flag: Tensor, round: Round) -> None:
        """Let the next forward only find the length, with no block open, if `flag` (0-d bool)."""
        round.state.memo[HOLD] = flag.reshape(1) * HELD
        round.ask(SIZING, flag)

    def _append(self, short: Tensor, round: Round) -> None:
        """Append masks to a canvas that is too short, or end tokens to one that is long enough."""
        state = round.state
        if state.length == state.wanted:
            short = torch.zeros_like(short)
        self._seek(short, round)
        count = torch.where(short, self.factor, self.eos_window // 2)
        at = torch.full_like(count, state.length)
        round.insert(at, count, ~short, max(self.factor, self.eos_window // 2))

    def _expand(self, wanted: Tensor, round: Round) -> None:
        """Insert masks before the least probable mask, which then stands for the last of them."""
        scores, window, state = round.scores, round.window, round.state
        probability_KW = scores.probability_KW if scores.raw_KW is None else scores.raw_KW
        open_KW = window.eligible_KW & window.of(state.masked_KL)
        least, index = probability_KW.masked_fill(~open_KW, torch.inf)[0].min(0)
        count = torch.where(wanted & (least < self.low), self.factor - 1, 0)
        round.insert(window.start + index, count, None, self.factor - 1)

    def _end_confidence(self, round: Round) -> Tensor:
        """Return the model's confidence that the text ends within the canvas, 0-d."""
        scores = round.scores
        ends_W = (scores.ids_KW[0] == round.state.special.eos) & (scores.probability_KW[0] > 0)
        count_W = ends_W.cumsum(0)
        last_W = ends_W & (count_W[-1] - count_W < self.eos_window)
        return (scores.probability_KW[0] * last_W).sum() / self.eos_window
