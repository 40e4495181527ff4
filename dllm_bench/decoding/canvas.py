"""Uniform-state diffusion: the contracts of its pieces, and its loop.

There is no mask token. A canvas of C positions begins as random tokens. Every forward computes new
logits for all of them; some positions keep the token drawn from these, and the others become random
again. Acceptance has no memory: an accepted position competes again in the next forward. The text
is the most probable token of every position in the last forward. Pieces are frozen dataclasses
without state and decide on the device.

Canvases are denoised one after another. For each canvas, a causal forward encodes the prompt or the
previous canvas and keeps its K/V. The new canvas begins as noise. Each step makes a forward, draws
a token at every position, accepts some, makes the others random again, and stops if the canvas has
settled. The text is the most probable token of every position. The host waits once per step, and
requests share only the copies to the host (`batching`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from dllm_bench.core.decoder import ComposedDecoder, Condition, DecoderSummary, Piece, needing
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.request import Generation, Request, cut_reasons, first_end
from dllm_bench.core.state import check_prompt
from dllm_bench.core.trace import Change, Forward, ForwardKind, Trace
from dllm_bench.core.transfer import to_device
from dllm_bench.decoding.batching import DecodeSteps, Steps, host_values, run_batched, run_forward
from dllm_bench.decoding.numerics import read_logits
from dllm_bench.decoding.rounds import Clock, with_costs
from dllm_bench.registry import register

# --- the contracts --------------------------------------------------------------------------------


class CanvasModel(Denoiser, Protocol):
    """A model of uniform-state diffusion.

    Text is encoded by a forward with causal attention, whose K/V are kept. The canvas after it is
    denoised by forwards with full attention, in which `ForwardPlan.added_KFH` is the mean embedding
    of the canvas's last prediction (self-conditioning).
    """

    canvas_length: int
    """C, the canvas length the weights were trained with."""


@dataclass(frozen=True)
class CanvasScores:
    """The result of a forward over a canvas, at the temperature of its step."""

    drawn_C: Tensor
    """A token drawn at every position."""
    top_C: Tensor
    """The most probable token of every position."""
    entropy_C: Tensor
    """Entropy of every position in nats."""


class Accept(Piece, ABC):
    """Decides which positions keep the token that was drawn."""

    @abstractmethod
    def __call__(self, scores: CanvasScores) -> Tensor:
        """Return accepted_C, bool."""


class Renoise(Piece, ABC):
    """Chooses the tokens of positions that were not accepted, and of a new canvas."""

    @abstractmethod
    def __call__(self, count: int, vocabulary: int, numbers: torch.Generator) -> Tensor:
        """Return the token ids (C,) for all `count` positions, on the device of `numbers`."""


class Anneal(Piece, ABC):
    """The maximum number of forwards of a canvas, and the temperature of each."""

    steps: int
    """The most forwards of a canvas."""

    @abstractmethod
    def __call__(self, left: int) -> Tensor:
        """Return the temperature, 0-d float32 on the CPU; `left`: remaining forwards, including
        this one."""


class Settle(Piece, ABC):
    """Decides whether a canvas is finished before its last step."""

    @abstractmethod
    def __call__(self, before: Sequence[Tensor], scores: CanvasScores) -> Tensor:
        """Return a 0-d bool; `before`: `CanvasScores.top_C` of earlier forwards over this
        canvas."""


# --- the loop -------------------------------------------------------------------------------------


@register("decoder.canvas")
@dataclass(frozen=True)
class CanvasDecoder(ComposedDecoder):
    """Uniform-state diffusion, composed of four pieces; equal seeds give equal texts."""

    needs = needing({"model": Condition.CANVAS})

    accept: Accept
    renoise: Renoise
    anneal: Anneal
    settle: Settle

    def summary(self) -> DecoderSummary:
        return DecoderSummary(uses_seed=True)

    def prepare(self, model: CanvasModel, request: Request) -> Request:
        """Return the request; DllmBenchError if this decoder cannot use the model or the
        request."""
        pinned = f"request {request.id!r} with pinned tokens"
        asked = {pinned: needing({"model": Condition.MASK_TOKEN})} if request.pinned else {}
        self.check_run_fits(model, asked=asked)
        check_prompt(request, model.special)
        return super().prepare(model, request)

    def generate(self, model: CanvasModel, request: Request) -> Generation:
        """Decode one request; `ids` are whole canvases, and `cut` gives the end of the requested
        length."""
        return next(self.generate_stream(model, [request], 1))

    def generate_stream(
        self, model: CanvasModel, requests: Iterable[Request], batch: int
    ) -> Iterator[Generation]:
        """Decode `batch` requests at a time; yield each as soon as it is finished."""
        return run_batched(model, (self.decode(model, request) for request in requests), batch)

    def decode(self, model: CanvasModel, request: Request) -> DecodeSteps:
        """Run the loop: yield the copies and forwards it requests, return the generation."""
        text = _CanvasText(model, self.prepare(model, request))
        while not text.finished:
            yield from text.encode()
            yield from self._denoise(text)
        return text.generation()

    def _denoise(self, text: _CanvasText) -> Steps[None]:
        """Write one canvas."""
        model, numbers, before = text.model, text.numbers, list[Tensor]()
        size, mean_1CH = (model.canvas_length, model.vocab_size), None
        canvas_C = self.renoise(*size, numbers)
        for left in range(self.anneal.steps, 0, -1):
            logits_1CV = yield from text.denoise(canvas_C, mean_1CH)
            logits_1CV.div_(self.anneal(left))
            drawn_C1 = logits_1CV[0].softmax(-1).multinomial(1, generator=numbers)
            read = read_logits(logits_1CV, entropy=True)
            assert read.neg_entropy_KW is not None
            top_C, entropy_C = read.ids_KW[0], -read.neg_entropy_KW[0]
            scores = CanvasScores(drawn_C1[:, 0], top_C, entropy_C)
            noise_C, accepted_C = self.renoise(*size, numbers), self.accept(scores)
            canvas_C = torch.where(accepted_C, scores.drawn_C, noise_C)
            facts_2 = torch.stack([self.settle(before, scores), accepted_C.sum()])
            before.append(top_C)
            settles, accepted, *top = yield from host_values(torch.cat([facts_2, top_C]))
            text.write(top, accepted)
            if settles:
                break
            mean_1CH = model.mean_embeddings(logits_1CV)
        text.end_canvas(before[-1])


class _CanvasText:
    """One request that is being decoded: its tokens, cache, random numbers, and the trace."""

    def __init__(self, model: CanvasModel, request: Request) -> None:
        self.model, self.request = model, request
        self.begins = self.prompt = len(request.prompt_ids)  # start of the open canvas
        canvases = -(-request.max_new_tokens // model.canvas_length)
        host_1L = torch.zeros(1, self.prompt + canvases * model.canvas_length, dtype=torch.long)
        host_1L[0, : self.prompt] = torch.tensor(request.prompt_ids)
        self.tokens_1L = to_device(host_1L, model.device)
        self.kv, self.clock = model.new_cache(host_1L.shape[1]), Clock(model.device)
        self.numbers = torch.Generator(model.device).manual_seed(request.seed)
        self.ids: list[int] = []  # the most probable tokens of all canvases
        self.born: list[int] = []  # the forward that wrote each of them
        self.forwards: list[Forward] = []

    @property
    def finished(self) -> bool:
        """Whether a canvas holds an end token, or the limit is reached."""
        ended = first_end(self.ids, self.model.special) is not None
        return ended or len(self.ids) >= self.request.max_new_tokens

    def encode(self) -> Steps[None]:
        """Encode the tokens that are not encoded yet and keep their K/V; no logits are computed."""
        span, device = (self.kv.length, self.begins), self.model.device
        none_M = torch.zeros(0, dtype=torch.long, device=device)
        plan = ForwardPlan(ForwardKind.PREFILL, span, span, span, "block_causal", 1, only_M=none_M)
        yield from self._forward(plan)
        self.kv.keep(plan, torch.zeros((), dtype=torch.long, device=device))
        self.clock.mark()

    def denoise(self, canvas_C: Tensor, mean_1CH: Tensor | None) -> Steps[Tensor]:
        """Yield logits (1, C, V) of the canvas, given the mean embeddings of its last
        prediction."""
        span = (self.begins, self.begins + len(canvas_C))
        self.tokens_1L[0, slice(*span)] = canvas_C
        plan = ForwardPlan(ForwardKind.DENOISE, span, span, (0, 0), added_KFH=mean_1CH)
        return (yield from self._forward(plan))

    def _forward(self, plan: ForwardPlan) -> Steps[Tensor]:
        """Run a forward and add it to the trace."""
        logits_1CV = yield from run_forward(self.tokens_1L, plan, self.kv)
        ran, cached = self.kv.execution._asdict(), plan.cached(self.kv.length)
        self.forwards.append(Forward(plan.kind, 1, plan.fed, cached, **ran))
        return logits_1CV

    def write(self, top: list[int], accepted: int) -> None:
        """Record the last forward's prediction for the open canvas, and the changes it makes."""
        self.clock.mark()
        index, first = len(self.forwards) - 1, self.begins - self.prompt
        if len(self.ids) == first:
            self.ids += top
            self.born += [index] * len(top)
        changed = [at for at, token in enumerate(top, first) if token != self.ids[at]]
        changes = [Change(at, self.ids[at], self.born[at], top[at - first]) for at in changed]
        self.forwards[-1] = replace(self.forwards[-1], changes=tuple(changes), accepted=accepted)
        for change in changes:
            self.ids[change.position], self.born[change.position] = change.after, index

    def end_canvas(self, top_C: Tensor) -> None:
        """Fix this canvas at its most probable tokens and begin the next one after it."""
        end = self.prompt + len(self.ids)
        self.tokens_1L[0, self.begins : end] = top_C
        self.begins = end

    def generation(self) -> Generation:
        """Return all canvases; tokens beyond the limit are cut with the reason "length"."""
        trace = Trace([*with_costs(self.forwards, self.clock, self.kv)])
        cut = cut_reasons(self.ids, self.request.max_new_tokens, self.model.special)
        return Generation(self.request.id, tuple(self.ids), tuple(self.born), cut, trace)
