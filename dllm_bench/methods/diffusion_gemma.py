"""DiffusionGemma: acceptance by an entropy bound, uniform noise, and a stop for stable canvases.

Source: transformers 5.23, `models/diffusion_gemma/generation_diffusion_gemma.py` (paper: arXiv
2608.00146). These pieces draw random numbers in the same order. Left out: the image part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.declared import Amount, Count, Positive, PositiveAmount
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.decoding.canvas import Accept, Anneal, CanvasScores, Renoise, Settle
from dllm_bench.registry import register


@register("accept.entropy_bound")
@dataclass(frozen=True)
class CanvasEntropyBound(Accept):
    """Accepts positions in the order of their entropy, as long as the entropies before sum to at
    most a bound.

    The joint error of tokens drawn independently is at most that sum (EB-Sampler, 2505.24857), so
    one position is always accepted.
    """

    gamma: PositiveAmount
    """The bound in nats (`entropy_bound`)."""

    def __call__(self, scores: CanvasScores) -> Tensor:
        entropy_C, order_C = scores.entropy_C.sort()
        fits_C = entropy_C.cumsum(0) - entropy_C <= self.gamma
        return torch.zeros_like(fits_C).scatter_(0, order_C, fits_C)


@register("renoise.uniform")
@dataclass(frozen=True)
class UniformNoise(Renoise):
    """Tokens drawn uniformly from the whole vocabulary."""

    def __call__(self, count: int, vocabulary: int, numbers: torch.Generator) -> Tensor:
        return torch.randint(vocabulary, (count,), generator=numbers, device=numbers.device)


@register("anneal.linear")
@dataclass(frozen=True)
class LinearTemperature(Anneal):
    """A temperature that falls evenly from `first` to just above `last`."""

    steps: Positive
    """Maximum number of forwards of a canvas (`max_denoising_steps`)."""
    first: PositiveAmount
    """Temperature of the first forward (`t_max`)."""
    last: Amount
    """Temperature one forward after the last one (`t_min`)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.last >= self.first:
            raise DllmBenchError(
                f"A temperature cannot fall from {self.first} to {self.last}; "
                "lower decoder.anneal.last."
            )

    def __call__(self, left: int) -> Tensor:
        return self.last + (self.first - self.last) * (torch.tensor(left) / self.steps)


@register("settle.stable")
@dataclass(frozen=True)
class StableAndConfident(Settle):
    """Stops once the most probable tokens stay the same and their entropies are low."""

    rounds: Count
    """Number of earlier forwards with the same tokens (`stability_threshold`); 0: only entropy
    decides."""
    entropy: PositiveAmount
    """Upper limit of the mean entropy in nats (`confidence_threshold`)."""

    def __call__(self, before: Sequence[Tensor], scores: CanvasScores) -> Tensor:
        confident = scores.entropy_C.mean() < self.entropy
        if len(before) < self.rounds:
            return torch.zeros_like(confident)
        same = [(top_C == scores.top_C).all() for top_C in before[len(before) - self.rounds :]]
        return torch.stack([confident, *same]).all()
