"""Causal models that also predict at masks: WeDLM, I-DLM, Nemotron-Labs-Diffusion."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dllm_bench.core.blocks import BlockGrid, BlockProgress, Window
from dllm_bench.core.contracts import Cache, Round, Schedule, Scores, Select
from dllm_bench.core.declared import Amount, Positive, PositiveAmount, Size
from dllm_bench.core.decoder import ONE_BRANCH, Condition, Conditions, holding, needing
from dllm_bench.core.denoiser import AddedRows, ForwardPlan
from dllm_bench.core.speculative import Context, Draft, FixedDraft, Proposal, Sampler, one_hot
from dllm_bench.core.state import DecodeState
from dllm_bench.core.trace import ForwardKind
from dllm_bench.core.transfer import constant
from dllm_bench.decoding.numerics import Candidates
from dllm_bench.methods.caches import kind_of
from dllm_bench.methods.common import Confidence
from dllm_bench.registry import register

# --- WeDLM ----------------------------------------------------------------------------------------


@register("cache.feed_order")
@dataclass(frozen=True)
class FeedOrder(Cache):
    """WeDLM (arXiv 2512.22737): attention that is causal in the order in which rows are fed.

    Caches the text before the window; attention is causal in feed order, so this is exact. Released
    code: Tencent/WeDLM@0216110, wedlm/engine (a window that moves on) and
    hf_compat/modeling_wedlm.py (blocks). What is committed is fed first, by position, then the
    masks; a row sees the rows fed before it. So a mask sees every committed token, to its right as
    well, and the K/V of the text up to the first mask are those of plain causal attention. Rows lie
    by position here, and a mask of attention stands for the order. Left out: cuts by top-k and
    top-p of drawn tokens.
    """

    gives = frozenset(
        {Condition.FED_WINDOW, Condition.FEED_ORDER, Condition.OWN_SPANS, Condition.FINAL_KV}
    )
    needs = needing(
        ONE_BRANCH, {"schedule": Condition.BLOCKS_IN_ORDER, "model": Condition.UNSHIFTED}
    )

    def plan(self, round: Round) -> ForwardPlan:
        window, kv, state = round.window, round.kv, round.state
        held = min(kv.length, window.start)
        feed, rows, store = (held, window.stop), (window.start, window.stop), (held, window.start)
        masked_F = state.masked_KL[0, held : window.stop]  # masks are fed after all others
        place_F = constant(range(len(masked_F)), masked_F.device) + len(masked_F) * masked_F
        nothing_E = state.tokens_KL.new_empty(0)
        order = AddedRows(nothing_E, nothing_E, place_F <= place_F[:, None])
        return ForwardPlan(kind_of(kv), feed, rows, store, added=order)


@register("schedule.sliding")
@dataclass(frozen=True)
class Sliding(Schedule):
    """As many open positions as the window has, from the first mask on.

    The window ends with the canvas, and stays where it is once an end token is committed.
    `overruns` are the released rules: it always has all its positions, those beyond the limit of
    the text as well, and moves on until the text is finished.
    """

    window: Size  # W, positions
    overruns: bool = False  # whether it goes beyond the text's limit and its end tokens
    block: int = field(default=1, init=False)
    gives = frozenset({Condition.BLOCKS_IN_ORDER, Condition.EQUAL_BLOCKS, Condition.FIXED_CANVAS})
    needs = needing({"select": Condition.NEVER_STALLS})

    def grid(self, prompt_len: int, new: int) -> BlockGrid:
        beyond = self.window - 1 if self.overruns else 0
        return BlockGrid(prompt_len, 1, prompt_len, prompt_len + new + beyond, sees_future=False)

    def opened(self, branch: BlockProgress) -> int:
        blocks, finished = branch.grid.blocks, branch.finished
        if self.overruns and finished > blocks - self.window:
            return finished  # the text is complete; what the window holds beyond it is given up
        if branch.closed and not self.overruns:
            return branch.opened
        return max(branch.opened, min(finished + self.window, blocks))

    def must_progress(self, branch: BlockProgress, n: int) -> bool:
        """Return False: the selector commits something in every forward, anywhere."""
        return False


@register("select.near_entropy")
@dataclass(frozen=True)
class NearEntropy(Select):
    """Commits positions of low entropy, the nearer to the first mask, the sooner.

    All whose entropy plus `penalty` times their distance from the first mask is below `tau`; where
    there is none, the position with the least sum.
    """

    tau: float | None  # nats; None: one position in every forward
    penalty: Amount = 0.02  # nats for each position of distance
    needs = needing({"score": Condition.ENTROPY})

    @property
    def gives(self) -> Conditions:
        """A position in every forward; without `tau` one alone."""
        return holding({Condition.NEVER_STALLS: True, Condition.ONE_PER_FORWARD: self.tau is None})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # by `needs`
        open_KW = window.eligible_KW
        place_W = constant(range(open_KW.shape[1]), open_KW.device)
        distance_KW = place_W - open_KW.int().argmax(1, keepdim=True)
        cost_KW = self.penalty * distance_KW - scores.neg_entropy_KW
        cost_KW = cost_KW.masked_fill(~open_KW, torch.inf)
        least_KW = place_W == cost_KW.argmin(1, keepdim=True)
        return open_KW & (least_KW if self.tau is None else least_KW | (cost_KW < self.tau))


@register("score.tempered")
@dataclass(frozen=True)
class Tempered(Confidence):
    """Confidence at a temperature that divides the logits; nothing is drawn."""

    temperature: PositiveAmount = 1.0

    def read(self, logits_KWV: Tensor, entropy: bool, ids_KW: Tensor | None = None) -> Candidates:
        return super().read(logits_KWV / self.temperature, entropy, ids_KW)


# --- I-DLM ----------------------------------------------------------------------------------------


@register("draft.strided")
@dataclass(frozen=True)
class StridedDraft(Draft):
    """I-DLM (arXiv 2604.11035): masks after the draft make the next draft in the verifying forward.

    Tokens that the target itself predicted at masks, in the forward that verified the last ones.
    Written after a reading of the released code, thuEcstasy/I-DLM@3342a17 (idlm_blockN.py); there
    are no recorded cases. For causal models that were trained to predict at masks as well. Left
    out: skipped or partial verification, drafts among the best few tokens, an adapter for masks
    alone.

    A round feeds the draft and as many masks after it. If the whole draft is accepted, the rows of
    these masks are the next draft; otherwise a round feeds masks alone. Masks are a part of the
    proposal, whose end is always rejected; a length rule that cuts it costs drafts, but no
    losslessness. Above temperature 0 drafts are drawn, so that rejection keeps the target's
    distribution (released: the most probable tokens with p/q, which has another one).
    """

    tokens: Positive
    """Draft tokens of a round; the published N less one."""

    @property
    def longest(self) -> int:
        return 2 * self.tokens

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        masks_D = context.tokens_L.new_full((self.tokens,), context.target.special.mask)
        ahead_DV = context.ahead_DV
        if ahead_DV is None or len(ahead_DV) != self.tokens:
            return Proposal(masks_D)
        drafts_D, laws_DV = sampler.sample(ahead_DV)
        if laws_DV is not None:
            laws_DV = torch.cat([laws_DV, one_hot(masks_D, laws_DV.shape[1])])
        return Proposal(torch.cat([drafts_D, masks_D]), laws_DV)


# --- Nemotron-Labs-Diffusion ----------------------------------------------------------------------


@register("draft.bidirectional")
@dataclass(frozen=True)
class BidirectionalDraft(FixedDraft):
    """Nemotron-Labs-Diffusion's linear self-speculation (arXiv 2607.05722): one model in two modes.

    Tokens of a block of masks after the anchor, by the target itself with full attention in it.
    Written after a description of `linear_spec_generate` in the model's remote code; there are no
    recorded cases. For models trained for diffusion in blocks and for autoregression alike. Left
    out: slots that stay masks below a confidence (default: none), an adapter for drafting alone, a
    budget of thinking, and the quadratic form.

    The block reads the target's own causal K/V and leaves none. The slots of a model trained for
    both modes predict their own positions, although its autoregressive rows predict the next ones.
    """

    tokens: Positive
    """Draft tokens; the published block has one more, the anchor."""
    shifted: bool = False
    """Whether a row of the block predicts the position after its own, too (Dream's form)."""

    def propose(self, context: Context, sampler: Sampler) -> Proposal:
        model, kv, anchor = context.target, context.target_kv, context.anchor
        assert kv is not None
        masks_D = context.tokens_L.new_full((self.tokens,), model.special.mask)
        canvas_1L = torch.cat([context.tokens_L, masks_D])[None]
        # The row that predicts p in autoregression is that of the slot at p - 1.
        first = anchor + (1 if self.shifted else 2)
        feed, rows = (anchor, anchor + 1 + self.tokens), (first, first + self.tokens)
        plan = ForwardPlan(ForwardKind.SELF_DRAFT, feed, rows, store=(anchor, anchor))
        drafts_D, laws_DV = sampler.sample(model.forward(canvas_1L, plan, kv)[0])
        return Proposal(drafts_D, laws_DV, calls=1, kind=plan.kind, fed=plan.fed, cached=anchor)
