"""EB-Sampler (arXiv 2505.24857): a bound on the joint error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Positive
from dllm_bench.core.decoder import Condition, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.methods.common import Confidence, Ranked, confidence_order, first_of
from dllm_bench.registry import register


@register("score.with_entropy")
@dataclass(frozen=True)
class WithEntropy(Score):
    """The scores of `inner` with the entropy of every position, from one pass over the logits.

    For selectors that rank by one value and bound another, as d2Cache's form of the EB-Sampler
    does: rank by confidence, bound the entropy.
    """

    inner: Ranked = field(default_factory=Confidence)
    gives = frozenset({Condition.RAW_CONFIDENCE, Condition.ENTROPY, Condition.ROW_BY_ROW})
    reads_rows = "masked"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.inner, Confidence) and self.inner.last:
            raise DllmBenchError(
                f"WithEntropy reads the logits once, and its inner score has last "
                f"{self.inner.last!r}, whose probabilities are those of other logits; use null."
            )

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        return self.inner.of_logits(logits_KWV, entropy=True)


LeftOut = Literal["largest", "last"]


@register("select.entropy_bound")
@dataclass(frozen=True)
class EntropyBound(Select):
    """EB-Sampler (arXiv 2505.24857): the longest prefix of positions whose joint error is bounded.

    Positions are ordered by confidence. The first n are committed, for the largest n with H(1) +
    ... + H(n) - max(H(1) ... H(n)) <= gamma, in nats: a bound on the difference between their joint
    distribution and the product of their distributions. In order of entropy (as in public copies)
    the maximum is the last one. d2Cache orders by confidence or margin and always leaves out the
    last one, because its running maximum runs along the batch axis; the two differ if an earlier
    position has a higher entropy. At least the `least` most confident positions are committed.
    """

    gamma: float  # nats; below 0: one token per forward
    least: Positive = 1  # positions committed regardless of their entropy
    left_out: LeftOut = "largest"  # the entropy that the sum leaves out
    needs = needing({"score": Condition.ENTROPY})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert scores.neg_entropy_KW is not None  # by `needs`
        order_KW = confidence_order(scores, window)
        entropy_KW = -scores.neg_entropy_KW.gather(1, order_KW)
        left_out_KW = entropy_KW if self.left_out == "last" else entropy_KW.cummax(1).values
        allowed_K = (entropy_KW.cumsum(1) - left_out_KW <= self.gamma).sum(1)
        return first_of(order_KW, allowed_K.clamp(min=self.least), window)
