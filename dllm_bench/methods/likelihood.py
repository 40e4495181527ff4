"""Log-likelihoods of given options, by LLaDA's Monte-Carlo bound or by all masks of a block.

Source: `eval_llada.py` of LLaDA (arXiv 2502.09992). A masked diffusion model gives an order-free
lower bound of log p(x | prompt) of m tokens: l ~ uniform 1..m, S a uniform subset of l positions,

    m / l * sum over i in S of log p(x_i | prompt, x without S).

averaged over `draws` draws; groups of `together` draws have evenly spaced l, as released. With
`exact`, all 2^m - 1 subsets are enumerated, which gives the exact value of the bound. With `block`,
attention is block-causal and every block has its own bound given the blocks before it; for blocks
of 1 position this is the autoregressive likelihood. Random numbers come from the request's seed, so
each option has its own masks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import comb, sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

from dllm_bench.core.declared import CheckedFields, Positive
from dllm_bench.core.decoder import Condition, DecoderSummary, abilities, needing, require
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Generation, Likelihood, Option, Request
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.registry import register

LARGEST_EXACT = 12
"""Largest block length whose subsets are enumerated: 4,095 forwards."""


class MaskSet(NamedTuple):
    """Positions that are masked in one forward, and the weight of their log-probabilities."""

    positions: tuple[int, ...]
    weight: float


@register("decoder.likelihood")
@dataclass(frozen=True)
class LikelihoodDecoder(CheckedFields):
    """Scores the options of a request; it generates nothing."""

    draws: Positive = 128
    """Number of masks drawn for an option, or for each of its blocks (`mc_num`)."""
    together: Positive = 32
    """Group size of draws with evenly spaced numbers of masks; divides `draws`."""
    guidance: float = 0.0
    """Scale of classifier-free guidance (`cfg`) against a masked prompt; 0 for none."""
    block: Positive | None = None
    """Block length, for block-causal attention; None: full attention, and the option is one
    block."""
    absolute: bool = True
    """Whether blocks lie at multiples of their length, for any prompt."""
    exact: bool = False
    """Enumerate all subsets of a block instead of drawing them."""
    greedy: bool = False
    """Also compute whether decoding the most confident token per forward gives the option
    (LAMBADA)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws % min(self.draws, self.together):
            raise DllmBenchError(
                f"A likelihood of {self.draws} draws, {self.together} together, is no whole number "
                "of batches; make decoder.draws a multiple of decoder.together."
            )

    def prepare(self, model: Denoiser, request: Request) -> Request:
        """Return the request; DllmBenchError if it has no options or the model has no masks."""
        if not request.options:
            raise DllmBenchError(
                f"Decoder likelihood scores options, and request {request.id!r} asks for a text; "
                "choose another decoder, or a benchmark of likelihoods (docs/benchmarks.md)."
            )
        needs = needing({"model": Condition.MASK_TOKEN})
        require("likelihood", needs, {"model": abilities(model)}, "decoder")
        return request

    def summary(self) -> DecoderSummary:
        """Return properties of the decoder that are known without decoding."""
        return DecoderSummary(
            block=self.block,
            caches=False,
            attention="full" if self.block is None else "block_causal",
            uses_seed=not self.exact,
            scores_options=True,
        )

    def generate(self, model: Denoiser, request: Request) -> Generation:
        """Return the likelihoods of all options, and the tokens of the most likely one."""
        self.prepare(model, request)
        trace, likelihoods = Trace(), []
        for number, option in enumerate(request.options):
            generator = torch.Generator().manual_seed(request.seed + number)
            likelihoods.append(_Scorer(self, model, option, generator, trace).likelihood())
        best = max(range(len(likelihoods)), key=lambda i: likelihoods[i].nats)
        ids = request.options[best].ids
        born = (max(len(trace.forwards) - 1, 0),) * len(ids)
        ends = dict.fromkeys(("stop", "length"), len(ids))
        return Generation(request.id, ids, born, ends, trace, likelihoods=tuple(likelihoods))


@dataclass
class _Scorer:
    """One option of a request."""

    decoder: LikelihoodDecoder
    model: Denoiser
    option: Option
    generator: torch.Generator
    trace: Trace

    def __post_init__(self) -> None:
        special = self.model.special
        start = special.eos if special.bos is None else special.bos  # precedes a bare text
        before = self.option.prompt_ids or (start,)
        ids = (*before, *self.option.ids)
        self.prompt, self.length = len(before), len(ids)
        self.ids_L = torch.tensor(ids, device=self.model.device)

    def likelihood(self) -> Likelihood:
        """Return the sum over blocks, whose errors are independent."""
        causal = getattr(self.model, "attention_form", None) == "causal" and self.decoder.block == 1
        parts = self.causal() if causal else [self.bound(*at) for at in self.blocks()]
        error = sqrt(sum(error**2 for _, error in parts))
        greedy = self.decoder.greedy and self.decodes_greedily()
        return Likelihood(sum(nats for nats, _ in parts), error, greedy)

    def causal(self) -> list[tuple[float, float]]:
        """Return the log-probability of each token, without masks, if no row sees a later one."""
        (logits_TV,) = self.logits([self.ids_L], (self.prompt, self.length))
        return [(value, 0.0) for value in self.log_probs(logits_TV, self.prompt).tolist()]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the spans [first, stop) of the option that have their own bound, in order."""
        block, first = self.decoder.block, self.prompt
        while first < self.length:
            within = first % block if block and self.decoder.absolute else 0
            stop = self.length if block is None else min(first + block - within, self.length)
            yield first, stop
            first = stop

    def bound(self, first: int, stop: int) -> tuple[float, float]:
        """Return (value, standard error) of the bound of a block, given everything before it."""
        chosen = self.mask_sets(first, stop)
        values: list[float] = []
        for at in range(0, len(chosen), self.decoder.together):
            some = chosen[at : at + self.decoder.together]
            masked = [self.masked(one.positions, stop) for one in some]
            for logits_TV, one in zip(self.guided(masked, (first, stop)), some, strict=True):
                log_probs_T = self.log_probs(logits_TV, first)
                where = torch.tensor(one.positions, device=log_probs_T.device) - first
                values.append(one.weight * float(log_probs_T[where].sum()))
        if self.decoder.exact or stop - first == 1:
            return sum(values), 0.0
        error = stdev(values) / sqrt(len(values)) if len(values) > 1 else 0.0
        return fmean(values), error

    def mask_sets(self, first: int, stop: int) -> list[MaskSet]:
        """Return all subsets of a block with their probabilities, or random draws of them."""
        size, places = stop - first, range(first, stop)
        if size == 1:
            return [MaskSet((first,), 1.0)]
        if not self.decoder.exact:
            return [MaskSet(self.drawn(places, count), size / count) for count in self.counts(size)]
        if size > LARGEST_EXACT:
            raise DllmBenchError(
                f"All masks of {size} positions were requested (decoder.exact), and at most "
                f"{LARGEST_EXACT} are enumerated; set decoder.block, or use draws."
            )
        return [
            MaskSet(chosen, 1 / (count * comb(size, count)))
            for count in range(1, size + 1)
            for chosen in combinations(places, count)
        ]

    def counts(self, size: int) -> Iterator[int]:
        """Yield numbers of masks as released: a random one, then evenly spaced ones modulo
        `size`."""
        draws, together = self.decoder.draws, min(self.decoder.draws, self.decoder.together)
        for _ in range(draws // together):
            begin = int(torch.randint(1, size + 1, (), generator=self.generator))
            last = begin + (together - 1) * (size / together)
            spaced = torch.round(torch.linspace(float(begin), last, steps=together)).long()
            yield from ((spaced - 1) % size + 1).tolist()

    def drawn(self, places: Sequence[int], count: int) -> tuple[int, ...]:
        """Return `count` random ones of the positions."""
        order = torch.randperm(len(places), generator=self.generator)[:count].tolist()
        return tuple(sorted(places[i] for i in order))

    def masked(self, positions: Iterable[int], stop: int) -> Tensor:
        """Return the canvas up to `stop` with these positions masked."""
        tokens_L = self.ids_L[:stop].clone()
        tokens_L[torch.tensor(list(positions), device=tokens_L.device)] = self.model.special.mask
        return tokens_L

    def guided(self, canvases: Sequence[Tensor], rows: tuple[int, int]) -> list[Tensor]:
        """Return logits (T, V) of rows [first, stop) of each canvas, under guidance if there is
        any."""
        if not self.decoder.guidance:
            return self.logits(canvases, rows)
        masks_T = torch.full_like(self.ids_L[: self.prompt], self.model.special.mask)
        bare = [torch.cat([masks_T, tokens_L[self.prompt :]]) for tokens_L in canvases]
        both = self.logits([*canvases, *bare], rows)
        scale = self.decoder.guidance + 1
        pairs = zip(both[: len(bare)], both[len(bare) :], strict=True)
        return [without + scale * (given - without) for given, without in pairs]

    def logits(self, canvases: Sequence[Tensor], rows: tuple[int, int]) -> list[Tensor]:
        """Return logits (T, V) of rows [first, stop) of each canvas, in one forward."""
        kind, length, count = ForwardKind.DENOISE, len(canvases[0]), len(canvases)
        plan = ForwardPlan(kind, (0, length), rows, (0, 0))
        if block := self.decoder.block:
            origin = 0 if self.decoder.absolute else self.prompt
            plan = replace(plan, attention="block_causal", block=block, origin=origin)
        caches = [self.model.new_cache(length) for _ in canvases]
        tokens = [tokens_L[None] for tokens_L in canvases]
        found = self.model.forward_batch(tokens, [plan] * count, caches)
        self.trace.forwards.append(Forward(kind, branches=count, fed=length, cached=0))
        return [logits_1TV[0] for logits_1TV in found]

    def log_probs(self, logits_TV: Tensor, first: int) -> Tensor:
        """Return float32 log-probabilities (T,) of the option's tokens from position `first` on."""
        wanted_T = self.ids_L[first : first + len(logits_TV)]
        return logits_TV.float().log_softmax(-1).gather(1, wanted_T[:, None])[:, 0]

    def decodes_greedily(self) -> bool:
        """Return whether decoding from all masks, with the most confident token per forward, gives
        the option."""
        left = list(range(self.prompt, self.length))
        while left:
            (logits_TV,) = self.guided([self.masked(left, self.length)], (self.prompt, self.length))
            places = torch.tensor(left, device=logits_TV.device)
            confidence_M, token_M = logits_TV.float().softmax(-1)[places - self.prompt].max(-1)
            best = int(confidence_M.argmax())
            if token_M[best] != self.ids_L[left[best]]:
                return False
            del left[best]
        return True
