"""Temperature, top-p and top-k as Dream publishes them (D2F, LoPA and DiffuCoder alike).

Logits are divided by T and cut to the smallest set of tokens that sums to more than `top_p` and to
the `top_k` largest, ties at the latter kept. Of equal tokens at the `top_p` cut the lower ids stay;
with `released_ties` those that torch.sort returns first, as published. The token is drawn from the
softmax of what is left. Its probability and the inner confidence (margin, entropy) are those of
that distribution. Temperature 0 takes the most probable token, so with nothing cut it is the inner
score.
Each forward has its own random numbers, from the request's seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Score, Scores
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import draw, generator, keep_top_k, keep_top_p, rounded
from dllm_bench.decoding.score.confidence import Confidence
from dllm_bench.decoding.score.ranked import Ranked, check_sampler
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@register("score.sampled")
@dataclass(frozen=True)
class Sampled(Score):
    """Candidates drawn from tempered and cut logits, ranked by `inner`."""

    inner: Ranked = field(default_factory=Confidence)
    temperature: float = 0.0  # T
    top_p: float = 1.0  # 1 cuts nothing
    top_k: int | None = None  # None cuts nothing
    released_ties: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether equal tokens at the `top_p` cut follow the order of torch.sort."""
    reads_rows: ClassVar[Reads] = "masked"

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """What the inner score gives."""
        return self.inner.gives

    def __post_init__(self) -> None:
        check_sampler(self, self.inner, self.temperature)
        if not 0 < self.top_p <= 1 or (self.top_k is not None and self.top_k < 1):
            raise DllmBenchError(
                f"Sampled has top_p {self.top_p} and top_k {self.top_k}; give a share above 0 and "
                "at most 1, and a number of tokens of 1 or more (null: all)."
            )

    @property
    def costly(self) -> bool:  # type: ignore[override]
        """Sorting and noise cost more than gathering rows."""
        return self.temperature > 0 or self.top_p < 1

    @property
    def uses_seed(self) -> bool:  # type: ignore[override]
        """Above temperature 0."""
        return self.temperature > 0

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        logits_KWV = self._cut(logits_KWV)
        if self.temperature == 0:
            return self.inner(logits_KWV, state, window)
        ids_KW = draw(logits_KWV, 1.0, generator(state), window)
        return self.inner.of(logits_KWV, ids_KW, state)

    def _cut(self, logits_KWV: Tensor) -> Tensor:
        """Logits divided by the temperature, -inf at tokens that cannot be drawn."""
        if self.temperature > 0:
            logits_KWV = rounded(logits_KWV, self.inner.precision) / self.temperature
        if self.top_p < 1:
            logits_KWV = keep_top_p(logits_KWV, self.top_p, self.released_ties)
        if self.top_k is not None:
            logits_KWV = keep_top_k(logits_KWV, self.top_k)
        return logits_KWV
