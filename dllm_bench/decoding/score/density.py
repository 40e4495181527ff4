"""d2Cache's certainty prior (arXiv 2509.23094): confidence times the share of decoded neighbours.

The density of position j is the mean of "is decoded" over the positions around it, weighted by a
Gaussian of their distance. Reading reaches the length of the generation to both sides; the prompt
counts as decoded, and what lies behind the end as its last position. Thresholds compare the product
too, as in the released code.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.ranked import Ranked
from dllm_bench.registry import register


@register("score.density")
@dataclass(frozen=True)
class Density(Score):
    """Scores of `inner`, weighted by the density of decoded positions."""

    inner: Ranked = field(default_factory=Confidence)
    sigma: float = 10.0  # standard deviation of the Gaussian, in positions

    def __post_init__(self) -> None:
        check_sigma(self, self.sigma)
        if not isinstance(self.inner, Ranked) or self.inner.reads_entropy:
            raise DllmBenchError(
                f"Density weighs probabilities, and its inner score is {type(self.inner).__name__};"
                " use confidence or margin."
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives; `Scores.raw_KW` is without density."""
        return self.inner.gives

    @property
    def reads_rows(self) -> Reads:  # type: ignore[override]
        """As the inner score: the density is that of the row's own position."""
        return self.inner.reads_rows

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        scores = self.inner(logits_KWV, state, window)
        density_KW = window.of(density(state.masked_KL, state.prompt_len, self.sigma))
        if window.rows_M is not None:
            density_KW = density_KW.flatten()[window.rows_M][None]
        return replace(
            scores,
            probability_KW=scores.probability_KW * density_KW,
            confidence_KW=scores.confidence_KW * density_KW,
            raw_KW=scores.confidence_KW,
        )


def check_sigma(piece: object, sigma: float) -> None:
    """Refuse a Gaussian without width."""
    if sigma <= 0:
        raise DllmBenchError(
            f"{type(piece).__name__} has sigma {sigma}; give a number of positions above 0."
        )


def density(masked_KL: Tensor, prompt_len: int, sigma: float) -> Tensor:
    """Density of decoded positions, float32 (K, L); 1 in the prompt."""
    decoded_KL = (~masked_KL).float()
    decoded_KG = decoded_KL[:, prompt_len:]
    size = decoded_KG.shape[1]
    around_KX = torch.cat(
        [torch.ones_like(decoded_KG), decoded_KG, decoded_KG[:, -1:].expand(-1, size)], 1
    )
    weight_XG = weights(size, sigma, masked_KL.device)
    density_KG = around_KX @ weight_XG
    return torch.cat([torch.ones_like(decoded_KL[:, :prompt_len]), density_KG], 1)


@lru_cache(maxsize=4)
def weights(size: int, sigma: float, device: torch.device) -> Tensor:
    """Weights of `size` positions, and as many on both sides, for each density: (X, G)."""
    position_X = torch.arange(3 * size, device=device)
    distance_XG = position_X[:, None] - position_X[size : 2 * size]
    weight_XG = torch.exp(-0.5 * (distance_XG / sigma).square())
    return weight_XG / weight_XG.sum(0)
