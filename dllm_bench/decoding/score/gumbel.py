"""Temperature as LLaDA publishes it: the token is argmax_v exp(l_v) / (-ln U_v)^T.

Computed in logarithms, l + T * Gumbel noise, which cannot overflow. The token is a draw from
softmax(l / T); its probability and confidence are those of the distribution without temperature.
The published sampler draws U in float64; float32 changes only what is rarer than 1e-7.
Temperature 0 is the inner score. Each forward has its own random numbers, from the request's seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import draw, generator, rounded
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.ranked import Ranked, check_sampler
from dllm_bench.registry import register

Noise = Literal["float32", "float64"]


@register("score.gumbel")
@dataclass(frozen=True)
class Gumbel(Score):
    """Candidates drawn at a temperature, ranked by `inner`."""

    inner: Ranked = field(default_factory=Confidence)
    temperature: float = 0.0  # T
    precision: Noise = "float32"  # of the noise; the inner score has its own
    reads_rows: ClassVar[Reads] = "masked"

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives."""
        return self.inner.gives

    def __post_init__(self) -> None:
        check_sampler(self, self.inner, self.temperature)
        check_choice(self, "precision", self.precision, Noise)

    @property
    def uses_seed(self) -> bool:  # type: ignore[override]
        """Above temperature 0."""
        return self.temperature > 0

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        if self.temperature == 0:
            return self.inner(logits_KWV, state, window)
        noisy_KWV = rounded(logits_KWV, self.precision)
        ids_KW = draw(noisy_KWV, self.temperature, generator(state), window)
        return self.inner.of(logits_KWV, ids_KW, state)
