"""S2D2 (arXiv 2603.25702): a block-diffusion model verifies its own drafts, as blocks of one token.

Released code: phymhan/S2D2@279500a, SDAR/generate_ssd_policy.py and LLaDA2/generate_utils.py. A
forward drafts all masks of a block. If verification looks worth it, nothing is committed, and the
next forward feeds the block twice: the drafts, each of which sees what is before it, and the masks,
each of which sees the drafts before it. So a mask's row says what the model, with blocks of one
token, thinks of its position. Left out of the released loops: estimates of acceptance that no
published setting uses, and a bandit that reads the entropy of all masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Round, Scores, Select
from dllm_bench.core.declared import Amount, Positive, Probability
from dllm_bench.core.decoder import Condition, Conditions, holding, needing
from dllm_bench.core.denoiser import AddedRows
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant, to_device
from dllm_bench.decoding.numerics import generator, read_logits
from dllm_bench.methods.common import most_confident
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

VERIFY = "s2d2.verify"  # host: whether the next forward verifies
VERIFIES = MemoKey[int]("s2d2.verifies")  # whether this one does
ROUTED = MemoKey[Tensor]("s2d2.routed")  # whether the drafts of this forward are verified, (K,)
ON = MemoKey[Tensor]("s2d2.on")  # whether the drafts before were, with `worth_off`, (K,)
DRAFTS = MemoKey[Tensor]("s2d2.drafts")  # drafted tokens (K, W)
PROBABILITY = MemoKey[Tensor]("s2d2.probability")  # and theirs, (K, W)
LAWS = MemoKey[Tensor]("s2d2.laws")  # and the distributions they are from, (K, W, V)
TAKEN = MemoKey[Tensor]("s2d2.taken")  # what a verification commits, (K, W)
CASE = MemoKey[Tensor]("s2d2.case")  # which of `CASES` the drafts are for the bandit, (K,)
BANDIT = MemoKey[Tensor]("s2d2.bandit")
"""How often it did not verify in each case, and did; the sums of the tokens per forward: float64
(K, 2, 2 CASES)."""
CASES = 8  # runs short or long, blocks less or more than half decoded, drafts sure or not
TINY = 1e-12  # smallest probability of a draft used as a divisor, as released
MARGIN = 0.05  # between the two most probable tokens, as released

Fill = Literal["best", "first"]
"""The most probable drafts, or those from left to right."""
Estimate = Literal["entropy", "margin", "collision"]
"""How likely a draft is to be accepted: exp(-H / ln V) of its distribution's entropy H; 1 if its
two best tokens are more than `MARGIN` apart, else 0; or the sum of squared probabilities."""


@register("select.self_verified")
@dataclass(frozen=True, kw_only=True)
class SelfVerified(Select):
    """Drafts that the next forward verifies, or what `inner` chooses.

    Verified are the drafts of the first run of masks. At temperature 0 a draft is accepted while it
    is the most probable token of its mask's row, and the first other position gets that token.
    Above, draft x is accepted with probability min(1, q(x) / p(x)), and the first other one gets a
    sample of max(q - p, 0); drawn drafts (`decoder/score=sampled`, the same temperature) then have
    the distribution of decoding token by token. The released "greedy" loop is temperature 1 with
    the most probable drafts: its text depends on the seed, and has neither distribution.
    """

    inner: Select
    """Chooses in forwards whose drafts are not verified."""
    least: Positive = 1
    """Masks that a run has at least to be verified."""
    worth: float | None = None
    """Drafts are verified if the number expected to be accepted, less `cost`, is at least this;
    None: always."""
    worth_off: float | None = None
    """Hysteresis: once drafts were verified this is the limit, and until then `worth` has to be
    exceeded; None: `worth` is the limit always."""
    estimate: Estimate = "entropy"
    cost: Amount = 1.0
    """Of a verification, in tokens."""
    cost_above: Probability | None = None
    """Each mask with a probability above this costs as much; None: each verification does."""
    temperature: Amount = 0.0
    temper: Amount = 1.0
    """Exponent of q / p."""
    resamples: bool = True
    """Whether the first position that is not accepted gets a sample; false: it keeps its draft."""
    ratio: Probability | None = None
    """Above temperature 0: drafts with q / p of at least this are accepted anyway."""
    ratio_anywhere: bool = False
    """Whether `ratio` also counts after the first run."""
    number: Positive = 1
    """Tokens that a verifying forward commits at least; if fewer are accepted it is filled up."""
    fill: Fill = field(default="best", metadata=DEFAULT_LEFT_OUT)
    """With which drafts."""
    fill_above: Probability | None = field(default=None, metadata=DEFAULT_LEFT_OUT)
    """Where it is filled up, it also commits drafts with a probability above this."""
    bandit: Amount | None = field(default=None, metadata=DEFAULT_LEFT_OUT)
    """Weight of exploration of a bandit (UCB) that decides in each case whether verifying gives
    more tokens per forward. Cases differ by the length of the run, by how much of the block is
    decoded and by the drafts' mean entropy. None: no bandit."""
    also_above: Probability | None = None
    """Drafts with a probability above this are accepted anyway."""
    causal: Literal["none", "finished", "decoded"] = "none"
    """Which rows see nothing after them: those of finished blocks, or all before the first mask."""
    reads_rows = "window"
    needs = needing(
        {"explore": Condition.ONE_BRANCH, "model": Condition.UNSHIFTED},
        {"schedule": (Condition.ONE_OPEN_BLOCK, Condition.FIXED_CANVAS)},
        {"cache": Condition.BLOCK_CAUSAL},
    )

    @property
    def gives(self) -> Conditions:
        """Random numbers above temperature 0."""
        return holding({Condition.DRAWS: self.temperature > 0})

    def on_plan(self, round: Round) -> None:
        """Feed the block twice if it is verified."""
        verifies = bool(round.host.get(VERIFY, [0])[0])
        round.state.memo[VERIFIES] = int(verifies)
        if verifies:
            round.plan = replace(round.plan, kind=ForwardKind.VERIFY)
        if verifies or self.causal != "none":
            round.plan = replace(round.plan, added=self._rows(round, verifies))

    def _rows(self, round: Round, verifies: bool) -> AddedRows:
        """Return the drafts of the block if it is verified, and what each row sees."""
        window, state = round.window, round.state
        start, again = window.start, window.width if verifies else 0
        feed, device = range(*(x - start for x in round.plan.feed)), state.tokens_KL.device
        place_X, sees_XX, causal_XX = fed_twice(feed, again, device)
        if self.causal != "none":
            before_W = window.eligible_KW[0].cumsum(0) == 0
            end = before_W.sum() if self.causal == "decoded" else 0
            sees_XX = sees_XX & (causal_XX | (place_X[:, None] >= end))
        tokens_E = window.of(state.tokens_KL)[0, :again]
        if verifies:
            tokens_E = torch.where(window.eligible_KW[0], state.memo[DRAFTS][0, :again], tokens_E)
        return AddedRows(tokens_E, constant(range(start, start + again), device), sees_XX)

    def on_scores(self, round: Round) -> None:
        logits_KWV = round.rows_KRV[:, : round.window.width].float()
        if self.temperature > 0:
            logits_KWV = logits_KWV / self.temperature
        if round.state.memo[VERIFIES]:
            self._judge(round, logits_KWV)
        else:
            self._route(round, logits_KWV)

    def _route(self, round: Round, logits_KWV: Tensor) -> None:
        """Decide whether the drafts are verified, and remember them."""
        memo, scores, masked_KW = round.state.memo, round.scores, round.window.eligible_KW
        span_KW = first_run(masked_KW)
        verify_K = span_KW.sum(1) >= self.least
        if self.worth is not None:
            reached_KW = self._acceptance(logits_KWV).masked_fill(~span_KW, 1).cumprod(1)
            cost_K: Tensor | float = self.cost
            if self.cost_above is not None:
                cost_K *= (masked_KW & (scores.probability_KW > self.cost_above)).sum(1)
            gain_K = (reached_KW * span_KW).sum(1) - cost_K
            worth_K = gain_K >= self.worth
            if self.worth_off is not None:
                on_K = memo[ON] if ON in memo else torch.zeros_like(worth_K)
                worth_K = torch.where(on_K, gain_K >= self.worth_off, gain_K > self.worth)
                memo[ON] = torch.where(masked_KW.any(1), worth_K, on_K)
            verify_K = verify_K & worth_K
        if self.bandit is not None:
            verify_K = verify_K & self._bandit_verifies(span_KW, logits_KWV, round)
        memo[ROUTED], memo[DRAFTS] = verify_K, scores.ids_KW
        memo[PROBABILITY] = scores.probability_KW
        if self.temperature > 0:
            memo[LAWS] = logits_KWV.softmax(-1)

    def _bandit_verifies(self, span_KW: Tensor, logits_KWV: Tensor, round: Round) -> Tensor:
        """Return whether the bandit lets the drafts be verified, bool (K,); remember the case."""
        memo, window = round.state.memo, round.window
        if BANDIT not in memo:
            memo[BANDIT] = logits_KWV.new_zeros(len(span_KW), 2, 2 * CASES).double()
        length_K = span_KW.sum(1)
        unsure_K = -(normalised_neg_entropy(logits_KWV) * span_KW).sum(1) / length_K.clamp(min=1)
        long_K = 2 * (length_K - 1) >= max(window.block - 1, 1)
        done_K = 2 * window.of(round.state.committed_KL).sum(1) >= window.block
        memo[CASE] = 4 * long_K + 2 * done_K + (2 * unsure_K >= 1)
        at_K2 = memo[CASE][:, None] + constant((0, CASES), span_KW.device)
        tried_K2, reward_K2 = memo[BANDIT].gather(2, at_K2[:, None].expand(-1, 2, -1)).unbind(1)
        turn_K1 = memo[BANDIT][:, 0].sum(1, keepdim=True) + 1
        bound_K2 = reward_K2 / tried_K2 + (self.bandit or 0) * (turn_K1.log() / tried_K2).sqrt()
        bound_K2 = bound_K2.masked_fill(tried_K2 == 0, torch.inf)
        return bound_K2[:, 1] >= bound_K2[:, 0]

    def _teach_bandit(self, round: Round) -> None:
        """Tell the bandit how many tokens per forward its last decision has committed."""
        memo, window, verifies = round.state.memo, round.window, round.state.memo[VERIFIES]
        new_KW = window.of(round.state.born_KL) == round.state.forwards
        count_K = (memo[TAKEN] if verifies else new_KW).sum(1)
        carried_out_K = window.eligible_KW.any(1) & (memo[ROUTED] == bool(verifies))
        values_K2 = torch.stack([carried_out_K, carried_out_K * count_K / (1 + verifies)], 1)
        at_K21 = (memo[CASE] + verifies * CASES)[:, None, None].expand(-1, 2, 1)
        memo[BANDIT] = memo[BANDIT].scatter_add(2, at_K21, values_K2.double()[..., None])

    def _acceptance(self, logits_KWV: Tensor) -> Tensor:
        """Estimate the probability that each row's draft is accepted, (K, W)."""
        if self.estimate == "entropy":
            return normalised_neg_entropy(logits_KWV).exp()
        laws_KWV = logits_KWV.softmax(-1)
        if self.estimate == "margin":
            best_KW2 = laws_KWV.topk(2).values
            return (best_KW2[..., 0] - best_KW2[..., 1] > MARGIN).float()
        return laws_KWV.square().sum(-1)

    def _judge(self, round: Round, logits_KWV: Tensor) -> None:
        """Put what verification decided in place of the scores of the masks' rows."""
        memo, window = round.state.memo, round.window
        masked_KW = window.eligible_KW  # less than before, if a stop has cut the canvas
        drafts_KW, drafted_KW = (x[:, : window.width] for x in (memo[DRAFTS], memo[PROBABILITY]))
        span_KW = first_run(masked_KW)
        own_KW, ratio_KW = round.scores.ids_KW, torch.zeros_like(drafted_KW)
        wrong_KW = span_KW & (own_KW != drafts_KW)
        if self.temperature > 0:
            laws_KWV = logits_KWV.softmax(-1)
            likely_KW = laws_KWV.gather(2, drafts_KW[..., None])[..., 0]
            ratio_KW = (likely_KW / drafted_KW.clamp(min=TINY)).pow(self.temper).clamp(max=1)
            place_KW = (span_KW.cumsum(1) - 1).clamp(min=0)
            wrong_KW = span_KW & (uniforms(round.state, span_KW.shape[1])[place_KW] >= ratio_KW)
        first_KW = wrong_KW & (wrong_KW.cumsum(1) == 1)
        if self.temperature > 0:
            at_K11 = first_KW.long().argmax(1)[:, None, None].expand(-1, 1, laws_KWV.shape[2])
            law_KV, before_KV = (x.gather(1, at_K11)[:, 0] for x in (laws_KWV, memo[LAWS]))
            own_KW = drawn(law_KV, before_KV, round.state)[:, None].expand_as(own_KW)
        taken_KW = (span_KW & (wrong_KW.cumsum(1) == 0)) | first_KW
        if self.ratio is not None:
            anywhere_KW = masked_KW if self.ratio_anywhere else span_KW
            taken_KW = taken_KW | (anywhere_KW & (ratio_KW >= self.ratio))
        if self.also_above is not None:
            taken_KW = taken_KW | (masked_KW & (drafted_KW > self.also_above))
        ids_KW = torch.where(first_KW, own_KW, drafts_KW) if self.resamples else drafts_KW
        ids_KW = torch.where(masked_KW, ids_KW, window.of(round.state.tokens_KL))
        round.scores = Scores(ids_KW, drafted_KW, drafted_KW)
        if self.number > 1:
            left = replace(window, eligible_KW=masked_KW & ~taken_KW)
            taken_KW = taken_KW | self._filled(round.scores, left, self.number - taken_KW.sum(1))
        memo[TAKEN] = taken_KW

    def _filled(self, scores: Scores, left: Window, missing_K: Tensor) -> Tensor:
        """Return the drafts that fill up a verifying forward, bool (K, W)."""
        if self.fill == "first":
            return first_masks(left.eligible_KW, missing_K[:, None])
        filled_KW = most_confident(scores, left, missing_K)
        if self.fill_above is not None:
            above_KW = left.eligible_KW & (scores.probability_KW > self.fill_above)
            filled_KW = filled_KW | (above_KW & (missing_K > 0)[:, None])
        return filled_KW

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        if state.memo.get(VERIFIES):
            return state.memo[TAKEN]
        return without_routed(self.inner(scores, window, state), state)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = self.inner.on_stall(scores, window, state)
        return without_routed(where_KW, state), ids_KW

    def on_commit(self, round: Round) -> None:
        if self.bandit is not None:
            self._teach_bandit(round)
        if not round.state.memo[VERIFIES]:
            round.ask(VERIFY, round.state.memo[ROUTED].long())


@lru_cache(maxsize=4)
def fed_twice(feed: range, again: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Describe the X rows of a forward that feeds a span, then the block's first `again` positions
    a second time.

    feed: the span, counted from the block's start. Returns the rows' places, counted so (X,), what
    each row sees (X, X), and which rows are not after it (X, X). If nothing is fed twice, each row
    sees all. Otherwise it sees itself, what lies before the block, and the second rows before it.
    """
    key_X = to_device([*feed, *range(again)], device)
    causal_XX, sees_XX = key_X <= key_X[:, None], torch.ones_like(key_X > key_X[:, None])
    if again:
        second_X = constant(range(len(key_X)), device) >= len(feed)
        sees_XX = (second_X & (key_X < key_X[:, None])) | (~second_X & (key_X < 0))
        sees_XX |= torch.eye(len(key_X), dtype=torch.bool, device=device)
    return key_X, sees_XX, causal_XX


def without_routed(where_KW: Tensor, state: DecodeState) -> Tensor:
    """Return the positions, or none where the drafts are verified, (K, W)."""
    routed_K = state.memo.get(ROUTED)
    return where_KW if routed_K is None else where_KW > routed_K[:, None]


@register("select.in_order")
@dataclass(frozen=True)
class InOrder(Select):
    """Commits the first `number` masks, from left to right (SDAR's `sequential`)."""

    number: Positive

    @property
    def gives(self) -> Conditions:
        """One token per forward, if the number is 1."""
        return holding({Condition.NEVER_STALLS: True, Condition.ONE_PER_FORWARD: self.number == 1})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return first_masks(window.eligible_KW, self.number)


def first_masks(masked_KW: Tensor, count: Tensor | int) -> Tensor:
    """Return the first `count` masks, bool (K, W)."""
    return masked_KW & (masked_KW.cumsum(1) <= count)


def normalised_neg_entropy(logits_KWV: Tensor) -> Tensor:
    """Return the sum of p ln p of each row, divided by ln V, (K, W); -1 if all are equal."""
    read = read_logits(logits_KWV, "float32", entropy=True)
    assert read.neg_entropy_KW is not None
    return read.neg_entropy_KW / math.log(logits_KWV.shape[-1])


def first_run(masked_KW: Tensor) -> Tensor:
    """Return the first contiguous masks, bool (K, W)."""
    first_K1 = masked_KW.view(torch.uint8).argmax(1, keepdim=True)
    place_KW = constant(range(1, masked_KW.shape[1] + 1), masked_KW.device) - first_K1
    return masked_KW & (masked_KW.cumsum(1) == place_KW)  # places count from the first mask


def uniforms(state: DecodeState, count: int) -> Tensor:
    """Draw the random numbers of a verification, (count,) float64."""
    numbers = generator(state, "s2d2")
    return torch.rand(count, generator=numbers, dtype=torch.float64, device=numbers.device)


def drawn(law_KV: Tensor, draft_KV: Tensor, state: DecodeState) -> Tensor:
    """Draw tokens (K,) from the excess of `law` over `draft`; from `law` if there is none."""
    residual_KV = (law_KV - draft_KV).clamp(min=0)
    residual_KV = torch.where(residual_KV.sum(1, keepdim=True) > 0, residual_KV, law_KV)
    return torch.multinomial(residual_KV, 1, generator=generator(state, "s2d2 residual"))[:, 0]
