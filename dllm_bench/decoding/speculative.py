"""The only draft-verify loop: a drafter proposes tokens, an autoregressive target verifies them.

Prefill, then rounds: draft, cut the draft to the length worth verifying, verify it in one forward
of the target, commit what is accepted, crop the caches. Each step is the business of the piece of
that name. Between rounds the caches of target and drafter hold exactly the positions before the
newest committed token, the anchor. Requests of a batch share the target's forward and the choice of
lengths, nothing else. The output distribution is the target's own, whatever the drafter is.
Left out: one drafter forward for the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.declared import Amount, Count, Positive, Probability
from dllm_bench.core.decoder import ComposedDecoder, Condition, DecoderSummary, needing
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.request import Generation, Request, cut_reasons, first_end
from dllm_bench.core.speculative import (
    Context,
    Draft,
    LengthRule,
    Proposal,
    Sampler,
    Target,
    Uniforms,
    Verify,
    VerifyLength,
    VerifyResult,
    drawn_path,
    one_hot,
    row_at,
)
from dllm_bench.core.state import check_prompt
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.core.transfer import constant, to_device, to_host
from dllm_bench.decoding.batching import RunForward, forward
from dllm_bench.decoding.numerics import keep_top_k, keep_top_p
from dllm_bench.decoding.rounds import Clock, with_costs
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

# --- what is sampled, the length of drafts, and which tokens are kept -----------------------------


@dataclass(frozen=True)
class TruncatedSampler(Sampler):
    """Samples among the most probable tokens alone."""

    top_p: float = 1.0
    """Tokens are left out whose more probable ones sum to more than this."""
    top_k: int | None = None
    """How many tokens are left at most; None: all."""

    def probabilities(self, logits_DV: Tensor) -> Tensor:
        if self.greedy:
            return super().probabilities(logits_DV)
        scaled_DV = logits_DV.float() / self.temperature
        if self.top_k is not None:
            scaled_DV = keep_top_k(scaled_DV, self.top_k)
        return keep_top_p(scaled_DV, self.top_p).softmax(-1)


@register("length.fixed")
@dataclass(frozen=True)
class FixedLength(VerifyLength):
    """The same limit for every proposal.

    Verify the whole draft, or always its first tokens up to a fixed number.

    The reference for every other length rule: calibration data are collected with it, and it is
    what a production system with a static speculation budget does.
    """

    tokens: Count | None = None
    """Most draft tokens verified; None: all of them, 0: plain autoregressive decoding."""

    def __call__(self, proposals: Sequence[Proposal]) -> list[int]:
        return [len(proposal.tokens_D[: self.tokens]) for proposal in proposals]


@register("verify.greedy_match")
@dataclass(frozen=True)
class GreedyMatch(Verify):
    """Accept while the target draws the same token; at temperature 0 the text is the target's.

    Verification by equality, the rule of z-lab/dflash@44947fb and of DDTree's release.

    The target draws its own token at every proposed position. Draft tokens are accepted as long as
    they equal what it drew, and its first differing token is kept. The draft's distributions are
    not used, so drafters take their most probable token at any temperature; a token is accepted
    with probability p_t(draft token). Of a tree the one path is accepted whose tokens it drew.
    """

    reads_probabilities: ClassVar[bool] = False
    gives = frozenset({Condition.DRAFT_TREES})

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        return VerifyResult(sampler.sample(logits_RV)[0])


TINY = 1e-8
"""Smallest draft probability and smallest residual mass used as a divisor."""


@register("verify.rejection")
@dataclass(frozen=True)
class Rejection(Verify):
    """Accept by rejection sampling: texts have the target's distribution, for any drafter.

    Speculative sampling, as in DeepSpec (Leviathan et al. 2023, Chen et al. 2023).

    Token x is accepted with probability min(1, p_t(x) / p_d(x)). After the first rejection the next
    token is drawn from the normalised residual max(p_t - p_d, 0), after full acceptance from p_t. A
    position is accepted with probability sum min(p_t, p_d). It takes one random number per draft
    token, also after a rejection, then one for the next. At temperature 0 it takes none: a token is
    accepted if it is the target's argmax, and no distribution is made.
    """

    reads_probabilities: ClassVar[bool] = True

    def __call__(self, proposal: Proposal, logits_RV: Tensor, sampler: Sampler) -> VerifyResult:
        if sampler.greedy:
            return GreedyMatch()(proposal, logits_RV, sampler)
        target_RV = sampler.probabilities(logits_RV)
        draft_DV = proposal.probabilities_DV
        if draft_DV is None:
            draft_DV = one_hot(proposal.tokens_D, target_RV.shape[-1])
        accepted_D = self.acceptance_probability(proposal.tokens_D, draft_DV, target_RV)
        count = (sampler.uniforms(len(proposal)) < accepted_D).long().cumprod(0).sum()
        bonus_1 = sampler.draw(self.next_distribution(count, draft_DV, target_RV)[None])
        return VerifyResult(bonus_1, count[None])

    @staticmethod
    def acceptance_probability(tokens_D: Tensor, draft_DV: Tensor, target_RV: Tensor) -> Tensor:
        """Return the probability (D,) that each token is accepted if all before it are."""
        tokens_D1 = tokens_D[:, None]
        draft_D = draft_DV.gather(1, tokens_D1)[:, 0].clamp(min=TINY)
        return (target_RV[:-1].gather(1, tokens_D1)[:, 0] / draft_D).clamp(max=1)

    @staticmethod
    def next_distribution(count: Tensor, draft_DV: Tensor, target_RV: Tensor) -> Tensor:
        """Return the probabilities (V,) of the token after `count` accepted ones."""
        nothing_1V = torch.zeros_like(target_RV[:1])
        target_V = row_at(target_RV, count)
        residual_V = (target_V - row_at(torch.cat([draft_DV, nothing_1V]), count)).clamp(min=0)
        mass = residual_V.sum()
        return torch.where(mass > TINY, residual_V / mass.clamp(min=TINY), target_V)


# --- the loop -------------------------------------------------------------------------------------


@register("decoder.speculative")
@dataclass(frozen=True)
class SpeculativeDecoder(ComposedDecoder):
    """Speculative decoding, put together from three pieces."""

    draft: Draft
    """Proposes tokens after the committed ones."""
    verify: Verify = field(default_factory=Rejection)
    """Decides which proposed tokens are accepted."""
    length: VerifyLength = field(default_factory=FixedLength)
    """Decides how many proposed tokens of each request are verified."""
    temperature: Amount = 0.0
    """Of the target and of the drafter; 0 takes the most probable token."""
    checks_first: bool = field(default=True, metadata=DEFAULT_LEFT_OUT)
    """Whether no round is made where the token after the prompt ends the text, as in DeepSpec;
    z-lab/dflash 44947fb makes one. The text is the same, the number of rounds is not."""
    top_p: Probability = field(default=1.0, metadata=DEFAULT_LEFT_OUT)
    """Of the target and of drafters that have none of their own; 1 leaves no token out."""
    top_k: Positive | None = field(default=None, metadata=DEFAULT_LEFT_OUT)
    """The same; None leaves no token out."""
    needs = needing({"model": Condition.CAUSAL})

    def prepare(self, model: Target, request: Request) -> Request:
        """Return the request with what the pieces must know beforehand; load the drafter's network.

        DllmBenchError if the model is not autoregressive or does not fit the drafter, or if tokens
        of the answer are given, which this loop would not keep.
        """
        pinned = f"request {request.id!r} with pinned tokens"
        asked = {pinned: needing({"model": Condition.MASKS})} if request.pinned else {}
        self.check_run_fits(model, asked=asked)
        check_prompt(request, model.special)
        request = super().prepare(model, request)
        self.draft.new_cache(model, 0)
        return request

    def summary(self) -> DecoderSummary:
        drawn = self.any_gives(Condition.DRAWS) or self.temperature > 0
        return DecoderSummary(drafts=True, uses_seed=drawn)

    def uniforms(self, request: Request, device: torch.device) -> Uniforms:
        """Return the source of the request's random numbers, seeded by `request.seed`."""
        generator = torch.Generator(device).manual_seed(request.seed)
        return lambda n: torch.rand(n, generator=generator, dtype=torch.float64, device=device)

    def generate(self, model: Target, request: Request) -> Generation:
        """Decode one request; `ids` holds the whole last round, `cut` says where the limit lies."""
        return next(self.generate_stream(model, [request], 1))

    @torch.inference_mode()
    def generate_stream(
        self, model: Target, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode up to `batch` requests at a time and yield each as it finishes.

        A text equals that of its request decoded alone, unless the length rule looks at the whole
        batch. The time of a forward is what its request waited for it, other requests included.
        """
        waiting, active, rule = iter(requests), list[_ActiveRequest](), self.length.begin()
        while True:
            joining = islice(waiting, batch - len(active))
            active += [self._begin(model, request) for request in joining]
            if not active:
                return
            yield from (one.generation() for one in active if one.finished)
            if active := [one for one in active if not one.finished]:
                self._round(active, rule)

    def _begin(self, model: Target, request: Request) -> _ActiveRequest:
        """Feed the prompt; the token after it is the first anchor."""
        request = self.prepare(model, request)
        uniforms = self.uniforms(request, model.device)
        sampler: Sampler = TruncatedSampler(self.temperature, uniforms, self.top_p, self.top_k)
        one = _ActiveRequest(model, request, self.draft, sampler)
        plan = one.plan(ForwardKind.PREFILL, Proposal(one.tokens_L[:0]), self.draft.feature_layers)
        (logits_1V,) = target_forward([one], [plan])
        one.commit(sampler.sample(logits_1V)[0].tolist())
        one.round_due = not self.checks_first
        one.features_1FC = one.kv.features
        return one

    def _round(self, active: Sequence[_ActiveRequest], rule: LengthRule) -> None:
        """Draft for every request, verify all drafts in one forward, commit what is accepted."""
        drafts = self.draft.cut([self._propose(one) for one in active], active[0].model)
        proposals = [draft.first(n) for draft, n in zip(drafts, rule(drafts), strict=True)]
        layers = self.draft.feature_layers
        pairs = zip(active, proposals, strict=True)
        plans = [one.plan(ForwardKind.VERIFY, proposal, layers) for one, proposal in pairs]
        logits = target_forward(active, plans)
        results = map(self.verify, proposals, logits, (one.sampler for one in active))
        copied = _copy_to_host(results, drafts)
        for one, verified, draft, logits_RV in zip(active, copied, drafts, logits, strict=True):
            self._commit(one, verified)
            is_whole_chain = verified.path is None and len(logits_RV) > len(draft)
            one.ahead_DV = logits_RV[len(verified.accepted) + 1 :] if is_whole_chain else None

    def _propose(self, one: _ActiveRequest) -> Proposal:
        """Draft after the committed tokens; the draft is not yet cut."""
        sampler = one.sampler
        if not self.verify.reads_probabilities:
            sampler = replace(sampler, temperature=0.0)
        given = (one.tokens_L, one.features_1FC, one.model, one.draft_kv, one.clock.mark)
        host_L, left = one.host_1L[0, : one.committed], one.request.max_new_tokens - len(one.born)
        context = Context(*given, host_L, left, target_kv=one.kv, ahead_DV=one.ahead_DV)
        proposal = self.draft.propose(context, sampler)
        one.record_draft(proposal)
        return proposal

    def _commit(self, one: _ActiveRequest, verified: _Verified) -> None:
        """Keep the accepted tokens up to an end token, and the target's own token after them."""
        accepted = verified.accepted
        end = first_end(accepted, one.model.special)
        new = [*accepted, verified.bonus] if end is None else accepted[: end + 1]
        kept = len(accepted) if end is None else end + 1
        one.forwards[-1] = replace(one.forwards[-1], accepted=kept, **verified.draft)
        one.commit(new)
        one.round_due = False
        features_1FC = one.kv.features
        if verified.path is not None:
            rows = [place + 1 for place in verified.path[: len(new) - 1]]  # after the anchor
            one.kv.keep_rows(rows)
            if features_1FC is not None and rows != [*range(1, len(new))]:
                rows_S = to_device([0, *rows], features_1FC.device)
                features_1FC = features_1FC.index_select(1, rows_S)
        one.kv.crop(one.committed - 1)
        one.features_1FC = None if features_1FC is None else features_1FC[:, : len(new)]


def target_forward(active: Sequence[_ActiveRequest], plans: Sequence[ForwardPlan]) -> list[Tensor]:
    """Run one forward of the target for all requests, store K/V, return each one's logits (R,
    V)."""
    model = active[0].model
    pairs = list(zip(active, plans, strict=True))
    logits = forward(model, [RunForward(one.canvas_1L, plan, one.kv) for one, plan in pairs])
    for one, plan in pairs:
        one.forwards[-1] = replace(one.forwards[-1], **one.kv.execution._asdict())
        one.kv.keep(plan, constant(0, model.device))
    return [logits_1RV[0] for logits_1RV in logits]


class _ActiveRequest:
    """One request that is being decoded: committed tokens, caches, and the trace so far."""

    def __init__(self, model: Target, request: Request, draft: Draft, sampler: Sampler) -> None:
        """Put the prompt on a canvas with room for all that the last round may add."""
        self.model, self.request, self.sampler = model, request, sampler
        self.committed = len(request.prompt_ids)  # positions decided, the prompt included
        room = self.committed + request.max_new_tokens + draft.longest + 1
        # the committed tokens on the host; the canvas itself if that is its device
        self.host_1L = torch.full((1, room), model.special.mask)
        self.host_1L[0, : self.committed] = torch.tensor(request.prompt_ids)
        self.canvas_1L = to_device(self.host_1L, model.device)
        self.kv, self.draft_kv = model.new_cache(room), draft.new_cache(model, room)
        self.clock = Clock(model.device)
        self.features_1FC: Tensor | None = None  # what the drafter reads next
        self.ahead_DV: Tensor | None = None  # the same: logits of the last forward after what was
        # committed
        self.forwards: list[Forward] = []
        self.born: list[int] = []  # forward that committed each new token
        self.ended = False  # whether an end token was committed
        self.round_due = False  # whether a round is made even if an end token was committed

    @property
    def tokens_L(self) -> Tensor:
        """Prompt and committed tokens."""
        return self.canvas_1L[0, : self.committed]

    @property
    def finished(self) -> bool:
        """Whether an end token was committed or the limit is reached."""
        return (self.ended and not self.round_due) or len(self.born) >= self.request.max_new_tokens

    def record_draft(self, proposal: Proposal) -> None:
        """Add the drafter's forward of a round to the trace.

        A draft without a network has no forward: its time is part of the next one. A sequential
        head has a row of its own, from where the drafter called `head_begins`.
        """
        if not proposal.calls:
            return
        has_head = len(self.clock.marks) - 1 > len(self.forwards)
        self.clock.mark()
        row = Forward(proposal.kind, 1, proposal.fed, proposal.cached, calls=proposal.calls)
        head = Forward(ForwardKind.HEAD, 1, 0, 0, calls=len(proposal))
        self.forwards += [row, head] if has_head else [row]

    def plan(self, kind: ForwardKind, proposal: Proposal, layers: tuple[int, ...]) -> ForwardPlan:
        """Feed what is not cached and the draft; logits of the tokens after the anchor and after
        each draft token. A tree is fed beside the canvas.
        """
        added = proposal.rows_after(self.committed - 1)
        stop = self.committed + (len(proposal) if added is None else 0)
        if added is None:
            self.canvas_1L[0, self.committed : stop] = proposal.tokens_D
        feed, rows = (self.kv.length, stop), (self.committed, stop + 1)
        plan = ForwardPlan(
            kind, feed, rows, feed, "block_causal", 1, feature_layers=layers, added=added
        )
        self.forwards.append(Forward(kind, 1, plan.fed, feed[0], proposed=len(proposal)))
        return plan

    def commit(self, tokens: Sequence[int]) -> None:
        """Append the tokens that the last forward decided."""
        self.clock.mark()
        new_D, stop = torch.tensor(tokens), self.committed + len(tokens)
        self.host_1L[0, self.committed : stop] = new_D
        if self.canvas_1L is not self.host_1L:
            self.canvas_1L[0, self.committed : stop] = to_device(new_D, self.model.device)
        self.committed = stop
        self.born += [len(self.forwards) - 1] * len(tokens)
        self.ended = self.ended or first_end(tokens, self.model.special) is not None

    def generation(self) -> Generation:
        """Return all committed tokens; those beyond the limit are cut by the reason "length"."""
        ids = tuple(self.tokens_L[len(self.request.prompt_ids) :].tolist())
        cut = cut_reasons(ids, self.request.max_new_tokens, self.model.special)
        trace = Trace([*with_costs(self.forwards, self.clock, self.kv)])
        return Generation(self.request.id, ids, tuple(self.born), cut, trace)


class _Verified(NamedTuple):
    """What the host learns of a verification."""

    accepted: list[int]  # tokens
    bonus: int
    path: list[int] | None  # where they are among the draft tokens of a tree; None: the first
    draft: dict[str, Any]  # the facts of `Forward` about the whole draft


def _copy_to_host(
    results: Iterable[VerifyResult], drafts: Sequence[Proposal]
) -> Iterator[_Verified]:
    """Copy what was verified for all requests to the host at once; survival logits to 4 digits."""
    parts = list[Tensor]()
    for result, draft in zip(results, drafts, strict=True):
        survival_D = None if draft.survival_D is None else draft.survival_D.double()
        maybe = (result.own_X, result.count_1, draft.tokens_D, survival_D, draft.parents_D)
        parts += [draft.tokens_D[:0] if part is None else part for part in maybe]
    each = iter(to_host(parts))  # five lists for each request
    for own, count, tokens, survival, parents in zip(*[each] * 5, strict=True):
        drafted = (*map(int, tokens),)
        if count:
            places, bonus = [*range(int(count[0]))], own[0]
        else:
            places, bonus = drawn_path(own, drafted, parents or range(len(drafted)))
        accepted = [drafted[place] for place in places]
        logits = tuple(round(logit, 4) for logit in survival)
        facts = {"drafted": drafted, "survival": logits, "parents": (*map(int, parents),)}
        yield _Verified(accepted, int(bonus), places if parents else None, facts)
