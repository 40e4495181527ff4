"""The only draft-verify loop: an autoregressive target decodes, a drafter saves it forwards.

Prefill, then rounds of: draft, cut to the length worth verifying, verify in one forward of the
target, accept, crop. What happens in each word is the business of the piece of that name. Between
rounds the caches of target and drafter hold exactly what lies before the newest token, the anchor.
Requests side by side share the target's forward and the choice of lengths, nothing else. The output
law is the target's own whatever the drafter is. Left out: one forward for the drafts of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import islice, pairwise
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.contracts import Piece
from dllm_bench.core.denoiser import ForwardPlan, KVCache
from dllm_bench.core.errors import DllmBenchError
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
)
from dllm_bench.core.state import check_prompt
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.decoding.length.fixed import FixedLength
from dllm_bench.decoding.masked import check_fit
from dllm_bench.decoding.verify.rejection import Rejection
from dllm_bench.registry import register


@register("decoder.speculative")
@dataclass(frozen=True)
class SpeculativeDecoder:
    """Three pieces and a temperature, the target's and the drafter's alike."""

    draft: Draft
    verify: Verify = field(default_factory=Rejection)
    length: VerifyLength = field(default_factory=FixedLength)
    temperature: float = 0.0

    def __post_init__(self) -> None:
        check_fit(self.slots())
        if self.temperature < 0:
            raise DllmBenchError(
                f"The decoder has temperature={self.temperature}; choose 0 (the most probable "
                "token) or more."
            )

    def slots(self) -> dict[str, Piece]:
        """The pieces by the name of their slot."""
        values = {slot.name: getattr(self, slot.name) for slot in fields(self)}
        return {name: piece for name, piece in values.items() if isinstance(piece, Piece)}

    def prepare(self, model: Target, request: Request) -> Request:
        """The request with what the pieces have to know beforehand; networks are read here."""
        check_target(model)
        check_prompt(request, model.special)
        self.draft.new_cache(model, 0)
        for piece in self.slots().values():
            for part in (piece, *piece.parts()):
                request = part.prepare(model, request)
        return request

    def uniforms(self, request: Request, device: torch.device) -> Uniforms:
        """The request's random numbers; they follow from its seed."""
        generator = torch.Generator(device).manual_seed(request.seed)
        return lambda n: torch.rand(n, generator=generator, dtype=torch.float64, device=device)

    def generate(self, model: Target, request: Request) -> Generation:
        """Decode `request`; `ids` has all of the last round, `cut` knows the limit."""
        return self.generate_batch(model, [request])[0]

    def generate_batch(self, model: Target, requests: Sequence[Request]) -> list[Generation]:
        """Decode requests (of distinct ids) side by side, all begun at once; in their order."""
        found = {
            done.request_id: done for done in self.generate_stream(model, requests, len(requests))
        }
        return [found[request.id] for request in requests]

    @torch.inference_mode()
    def generate_stream(
        self, model: Target, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time: one verification a round, everyone leaves as they end.

        A text is what its request gives alone, as far as lengths do not depend on the others. The
        time of a row is what passed for its request, waiting for the others included.
        """
        waiting, texts, rule = iter(requests), list[_Text](), self.length.begin()
        while True:
            texts += [
                self._begin(model, request) for request in islice(waiting, batch - len(texts))
            ]
            if not texts:
                return
            yield from (text.generation() for text in texts if text.over)
            if texts := [text for text in texts if not text.over]:
                self._round(texts, rule)

    def _begin(self, model: Target, request: Request) -> _Text:
        """Feed the prompt; the token after it is the first anchor."""
        request = self.prepare(model, request)
        own = Sampler(self.temperature, self.uniforms(request, model.device))
        text = _Text.start(model, request, self.draft, own)
        nothing = Proposal(text.tokens_L[:0])
        (logits_1V,) = forward(
            [text], [text.plan(ForwardKind.PREFILL, nothing, self.draft.feature_layers)]
        )
        text.commit(own.sample(logits_1V)[0].tolist())
        text.features_1FC = text.kv.features
        return text

    def _round(self, texts: Sequence[_Text], rule: LengthRule) -> None:
        """Draft, cut, feed anchors and proposals together, commit what the rule accepts."""
        wholes = [self._propose(text) for text in texts]
        proposals = [whole.first(n) for whole, n in zip(wholes, rule(wholes), strict=True)]
        asked = list(zip(texts, proposals, strict=True))
        plans = [
            text.plan(ForwardKind.VERIFY, proposal, self.draft.feature_layers)
            for text, proposal in asked
        ]
        verdicts = [
            self.verify(proposal, logits_NV, text.sampler)
            for (text, proposal), logits_NV in zip(asked, forward(texts, plans), strict=True)
        ]
        for text, whole, verdict in zip(texts, wholes, verdicts, strict=True):
            self._commit(text, whole, verdict)

    def _propose(self, text: _Text) -> Proposal:
        """The whole draft after a text."""
        guess = (
            text.sampler
            if self.verify.reads_probabilities
            else replace(text.sampler, temperature=0.0)
        )
        context = Context(
            text.tokens_L, text.features_1FC, text.model, text.memory, text.clock.mark
        )
        proposal = self.draft.propose(context, guess)
        text.drafted(proposal)
        return proposal

    def _commit(self, text: _Text, whole: Proposal, verdict: VerifyResult) -> None:
        """Keep the accepted tokens up to an end, and the target's own token after them."""
        count, bonus, drafted, survival = on_host(verdict, whole)
        end = first_end(drafted[:count], text.model.special)
        kept = drafted[: count if end is None else end + 1]
        new = [*kept] if end is not None else [*kept, bonus]
        text.note(accepted=len(kept), drafted=drafted, survival=survival)
        text.commit(new)
        text.kv.crop(text.committed - 1)
        features_1FC = text.kv.features
        text.features_1FC = None if features_1FC is None else features_1FC[:, : len(new)]


def forward(texts: Sequence[_Text], plans: Sequence[ForwardPlan]) -> list[Tensor]:
    """One forward for all texts, whose K/V are kept: logits (rows, V) of each.

    A text alone is fed as it is; more are a batch of ragged lengths.
    """
    model = texts[0].model
    canvases, caches = [text.canvas_1L for text in texts], [text.kv for text in texts]
    if len(texts) == 1:
        logits = [model.forward(canvases[0], plans[0], caches[0])]
    else:
        logits = model.forward_batch(canvases, plans, caches)
    for kv, plan in zip(caches, plans, strict=True):
        kv.keep(plan, torch.zeros((), dtype=torch.long, device=model.device))
    return [logits_1RV[0] for logits_1RV in logits]


@dataclass
class _Text:
    """One request on its way: committed tokens, and the facts of the forwards that made them.

    kv, memory: the caches of target and drafter; features_1FC: what the drafter reads next.
    """

    model: Target
    request: Request
    sampler: Sampler
    canvas_1L: Tensor
    committed: int
    kv: KVCache
    memory: KVCache | None
    clock: _Clock
    features_1FC: Tensor | None = None
    forwards: list[Forward] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    ended: bool = False

    @classmethod
    def start(cls, model: Target, request: Request, draft: Draft, sampler: Sampler) -> _Text:
        """The prompt and room for all that a last round may add."""
        prompt = len(request.prompt_ids)
        room = prompt + request.max_new_tokens + draft.longest + 1
        canvas_1L = torch.full((1, room), model.special.mask, device=model.device)
        canvas_1L[0, :prompt] = torch.tensor(request.prompt_ids, device=model.device)
        kv, memory = model.new_cache(room), draft.new_cache(model, room)
        clock = _Clock(model.device)
        return cls(model, request, sampler, canvas_1L, prompt, kv, memory, clock)

    @property
    def tokens_L(self) -> Tensor:
        """Prompt and committed tokens."""
        return self.canvas_1L[0, : self.committed]

    @property
    def over(self) -> bool:
        """Whether the text has ended or is long enough."""
        return self.ended or len(self.born) >= self.request.max_new_tokens

    def drafted(self, proposal: Proposal) -> None:
        """Note the drafter's part of a round; one without a network costs the next forward.

        A sequential head has a row of its own, where the drafter said that it begins.
        """
        if not proposal.calls:
            return
        headed = self.clock.spans > len(self.forwards)
        self.clock.mark()
        row = Forward(ForwardKind.DRAFT, 1, proposal.fed, proposal.cached, calls=proposal.calls)
        head = Forward(ForwardKind.HEAD, 1, 0, 0, calls=len(proposal))
        self.forwards += [row, head] if headed else [row]

    def plan(
        self, kind: ForwardKind, proposal: Proposal, feature_layers: tuple[int, ...]
    ) -> ForwardPlan:
        """Feed what is not cached and the proposed tokens; logits (n + 1) from the anchor on."""
        stop = self.committed + len(proposal)
        self.canvas_1L[0, self.committed : stop] = proposal.tokens_N
        feed, rows = (self.kv.length, stop), (self.committed, stop + 1)
        self.forwards.append(Forward(kind, 1, stop - feed[0], feed[0], proposed=len(proposal)))
        return ForwardPlan(
            kind,
            feed,
            rows,
            store=feed,
            attention="block_causal",
            block=1,
            feature_layers=feature_layers,
        )

    def note(self, accepted: int, drafted: tuple[int, ...], survival: tuple[float, ...]) -> None:
        """What the last forward, a verification, was asked about, and what it accepted."""
        row = self.forwards[-1]
        self.forwards[-1] = replace(row, accepted=accepted, drafted=drafted, survival=survival)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append what the last forward decided."""
        self.clock.mark()
        stop = self.committed + len(tokens)
        self.canvas_1L[0, self.committed : stop] = torch.tensor(tokens, device=self.model.device)
        self.committed = stop
        self.born += [len(self.forwards) - 1] * len(tokens)
        self.ended = first_end(tokens, self.model.special) is not None

    def generation(self) -> Generation:
        """All that was committed; what lies beyond the limit is cut by its length."""
        ids = tuple(self.tokens_L[len(self.request.prompt_ids) :].tolist())
        cut = cut_reasons(ids, self.request.max_new_tokens, self.model.special)
        rows = zip(self.forwards, self.clock.spans_ms(), strict=True)
        trace = Trace([replace(forward, ms=ms) for forward, ms in rows])
        return Generation(self.request.id, ids, tuple(self.born), cut, trace)


class _Clock:
    """Milliseconds between marks: events of a CUDA device, which waits for none, or host time."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """End one span and begin the next."""
        if not self.cuda:
            self.marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    @property
    def spans(self) -> int:
        """How many spans have ended."""
        return len(self.marks) - 1

    def spans_ms(self) -> list[float]:
        """One span per pair of neighbouring marks."""
        pairs = pairwise(self.marks)
        if not self.cuda:
            return [1000 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


def on_host(
    verdict: VerifyResult, whole: Proposal
) -> tuple[int, int, tuple[int, ...], tuple[float, ...]]:
    """Count, next token, drafted tokens and their survival (4 digits), in one copy."""
    none_0 = whole.tokens_N[:0]
    survival_N = none_0 if whole.survival_N is None else whole.survival_N
    parts = torch.stack([verdict.count, verdict.bonus]), whole.tokens_N, survival_N
    count, bonus, *rest = torch.cat([part.double() for part in parts]).tolist()
    drafted, survival = rest[: len(whole)], rest[len(whole) :]
    return int(count), int(bonus), tuple(map(int, drafted)), tuple(round(z, 4) for z in survival)


def check_target(model: Target) -> None:
    """Refuse models whose positions see later ones: there is no next token to verify."""
    if model.attention_form != "causal":
        raise DllmBenchError(
            f"A speculative decoder asks for an autoregressive target, this model has "
            f"{model.attention_form} attention; choose another model or decoder."
        )
