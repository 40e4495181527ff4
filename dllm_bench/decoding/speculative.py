"""The only draft-verify loop: an autoregressive target decodes, a drafter saves it forwards.

Prefill, then rounds of: draft, cut to the length worth verifying, verify in one forward of the
target, accept, crop. What happens in each word is the business of the piece of that name. Between
rounds the caches of target and drafter hold exactly what lies before the newest token, the anchor.
The output law is the target's own whatever the drafter is. Batches of requests are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dllm_bench.core.protocols import KVCache, Piece, Plan
from dllm_bench.core.request import DllmBenchError, Generation, Request, first_end
from dllm_bench.core.speculative import (
    Context,
    Draft,
    Proposal,
    Sampler,
    Target,
    Uniforms,
    Verify,
    VerifyLength,
)
from dllm_bench.core.state import check_prompt
from dllm_bench.core.trace import Forward, Kind, Trace
from dllm_bench.decoding.length.fixed import Fixed
from dllm_bench.decoding.masked import check_fit
from dllm_bench.decoding.verify.rejection import Rejection


@dataclass(frozen=True)
class SpeculativeDecoder:
    """Three pieces and a temperature, the target's and the drafter's alike."""

    draft: Draft
    verify: Verify = field(default_factory=Rejection)
    length: VerifyLength = field(default_factory=Fixed)
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

    @torch.inference_mode()
    def generate(self, model: Target, request: Request) -> Generation:
        """Decode `request`; `ids` has all of the last round, `cut` knows the limit."""
        request = self.prepare(model, request)
        uniforms = self.uniforms(request, model.device)
        own = Sampler(self.temperature, uniforms)
        guess = own if self.verify.reads_law else Sampler(0.0, uniforms)
        text = _Text.start(model, request, self.draft)
        kv = model.new_cache(text.room)
        memory = self.draft.new_cache(model, text.room)
        features_1FC = self._prefill(text, kv, own)
        while not text.over:
            context = Context(text.tokens_L, features_1FC, model, memory)
            proposal = self.draft.propose(context, guess)
            proposal = proposal.first(self.length([proposal])[0])
            text.drafted(proposal)
            features_1FC = self._verify(text, kv, proposal, own)
        return text.generation(request)

    def _prefill(self, text: _Text, kv: KVCache, sampler: Sampler) -> Tensor | None:
        """Feed the prompt; the token after it is the first anchor."""
        logits_1V = text.forward(Kind.PREFILL, text.tokens_L[:0], kv, self.draft.taps)
        text.commit(sampler.sample(logits_1V)[0].tolist(), accepted=0)
        return kv.features

    def _verify(
        self, text: _Text, kv: KVCache, proposal: Proposal, sampler: Sampler
    ) -> Tensor | None:
        """Feed anchor and proposal, commit what the rule accepts and the target's own token."""
        logits_NV = text.forward(Kind.VERIFY, proposal.tokens_N, kv, self.draft.taps)
        verdict = self.verify(proposal, logits_NV, sampler)
        facts = torch.cat([torch.stack([verdict.count, verdict.bonus]), proposal.tokens_N])
        count, bonus, *tokens = facts.tolist()
        end = first_end(tokens[:count], text.model.special)
        kept = tokens[: count if end is None else end + 1]
        new = kept if end is not None else [*kept, bonus]
        text.commit(new, accepted=len(kept))
        kv.crop(text.committed - 1)
        return None if kv.features is None else kv.features[:, : len(new)]


@dataclass
class _Text:
    """One request on its way: committed tokens, and the facts of the forwards that made them."""

    model: Target
    canvas_1L: Tensor
    prompt: int
    limit: int
    committed: int
    clock: _Clock
    forwards: list[Forward] = field(default_factory=list)
    born: list[int] = field(default_factory=list)
    ended: bool = False

    @classmethod
    def start(cls, model: Target, request: Request, draft: Draft) -> _Text:
        """The prompt and room for all that a last round may add."""
        prompt, limit = len(request.prompt_ids), request.max_new_tokens
        room = prompt + limit + draft.longest + 1
        canvas_1L = torch.full((1, room), model.special.mask, device=model.device)
        canvas_1L[0, :prompt] = torch.tensor(request.prompt_ids, device=model.device)
        return cls(model, canvas_1L, prompt, limit, prompt, _Clock(model.device))

    @property
    def room(self) -> int:
        """Positions of the canvas."""
        return self.canvas_1L.shape[1]

    @property
    def tokens_L(self) -> Tensor:
        """Prompt and committed tokens."""
        return self.canvas_1L[0, : self.committed]

    @property
    def over(self) -> bool:
        """Whether the text has ended or is long enough."""
        return self.ended or len(self.born) >= self.limit

    def drafted(self, proposal: Proposal) -> None:
        """Note the drafter's part of a round; one without a network costs the next forward."""
        if proposal.calls:
            self.clock.mark()
            row = Forward(Kind.DRAFT, 1, proposal.fed, proposal.cached, calls=proposal.calls)
            self.forwards.append(row)

    def forward(self, kind: Kind, proposed_N: Tensor, kv: KVCache, taps: tuple[int, ...]) -> Tensor:
        """Feed what is not cached and the proposed tokens: logits (n + 1, V) after the anchor."""
        stop = self.committed + len(proposed_N)
        self.canvas_1L[0, self.committed : stop] = proposed_N
        feed, rows = (kv.length, stop), (self.committed, stop + 1)
        plan = Plan(kind, feed, rows, store=feed, attention="block_causal", block=1, taps=taps)
        self.forwards.append(Forward(kind, 1, stop - feed[0], feed[0], proposed=len(proposed_N)))
        logits_NV = self.model.forward(self.canvas_1L, plan, kv)[0]
        kv.keep(plan, torch.zeros((), dtype=torch.long, device=logits_NV.device))
        return logits_NV

    def commit(self, tokens: Sequence[int], accepted: int) -> None:
        """Append what the last forward decided, `accepted` draft tokens among it."""
        self.clock.mark()
        self.forwards[-1] = replace(self.forwards[-1], accepted=accepted)
        stop = self.committed + len(tokens)
        self.canvas_1L[0, self.committed : stop] = torch.tensor(tokens, device=self.model.device)
        self.committed = stop
        self.born += [len(self.forwards) - 1] * len(tokens)
        self.ended = first_end(tokens, self.model.special) is not None

    def generation(self, request: Request) -> Generation:
        """All that was committed; what lies beyond the limit is cut by its length."""
        ids = tuple(self.tokens_L[self.prompt :].tolist())
        end = first_end(ids, self.model.special)
        cut = {"length": min(len(ids), self.limit)} | ({} if end is None else {"eos": end})
        rows = zip(self.forwards, self.clock.spans_ms(), strict=True)
        trace = Trace([replace(forward, ms=ms) for forward, ms in rows])
        return Generation(request.id, ids, tuple(self.born), cut, trace)


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

    def spans_ms(self) -> list[float]:
        """One span per pair of neighbouring marks."""
        pairs = pairwise(self.marks)
        if not self.cuda:
            return [1000 * (after - before) for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairs]


def check_target(model: Target) -> None:
    """Refuse models whose positions see later ones: there is no next token to verify."""
    if model.attention_form != "causal":
        raise DllmBenchError(
            f"A speculative decoder asks for an autoregressive target, this model has "
            f"{model.attention_form} attention; choose another model or decoder."
        )
