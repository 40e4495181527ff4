"""Samplers of Dream (arXiv 2508.15487) and DiffuCoder (2506.20639)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Score, Scores, Select
from dllm_bench.core.declared import Amount, Fraction, Positive, PositiveAmount, PositiveProportion
from dllm_bench.core.decoder import ONE_BRANCH, Condition, Conditions, Needs, holding, needing
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState, MemoKey
from dllm_bench.decoding import numerics
from dllm_bench.methods import common
from dllm_bench.registry import DEFAULT_LEFT_OUT, register


@dataclass(frozen=True)
class DrawnScore(Score):
    """Base of scores whose candidates are drawn above temperature 0, and ranked by `inner`."""

    inner: common.Ranked = field(default_factory=common.Confidence)
    temperature: Amount = 0.0  # T
    reads_rows = "masked"
    needs = needing({"inner": Condition.LOGITS_ALONE})

    @property
    def gives(self) -> Conditions:
        """Conditions of the inner score, and random draws above temperature 0."""
        draws = holding({Condition.DRAWS: self.temperature > 0})
        return self.inner.gives - {Condition.LOGITS_ALONE} | draws


@register("score.sampled")
@dataclass(frozen=True)
class Sampled(DrawnScore):
    """Candidates drawn at a temperature and cut by top-p and top-k, as Dream publishes them.

    `inner` ranks them. D2F, LoPA and DiffuCoder draw alike.

    Logits are divided by T and cut to the smallest set of tokens whose probabilities sum to more
    than `top_p`, and to the `top_k` largest (ties at this cut are kept). Of equal tokens at the
    `top_p` cut the lower ids stay or, with `released_ties`, those that torch.sort returns first, as
    published. The token is drawn from the softmax of the remaining logits. Its probability and the
    inner confidence (margin, entropy) refer to that distribution. Temperature 0 takes the most
    probable token; without cuts it equals the inner score. Each forward has its own random numbers,
    from the request's seed.
    """

    top_p: PositiveProportion = 1.0  # 1 cuts nothing
    top_k: Positive | None = None  # None cuts nothing
    released_ties: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)
    """Whether equal tokens at the `top_p` cut follow the order of torch.sort."""

    @property
    def gives(self) -> Conditions:
        """Also costly rows: sorting and noise cost more than gathering rows."""
        costly = self.temperature > 0 or self.top_p < 1
        return super().gives | holding({Condition.COSTLY_ROWS: costly})

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        logits_KWV = self._cut(logits_KWV)
        if self.temperature == 0:
            return self.inner(logits_KWV, state, window)
        ids_KW = numerics.draw(logits_KWV, 1.0, numerics.generator(state), window)
        return self.inner.of(logits_KWV, ids_KW, state)

    def _cut(self, logits_KWV: Tensor) -> Tensor:
        """Return logits divided by the temperature, -inf at tokens that cannot be drawn."""
        if self.temperature > 0:
            logits_KWV = numerics.rounded(logits_KWV, self.inner.precision) / self.temperature
        logits_KWV = numerics.keep_top_p(logits_KWV, self.top_p, self.released_ties)
        if self.top_k is not None:
            logits_KWV = numerics.keep_top_k(logits_KWV, self.top_k)
        return logits_KWV


@register("score.gumbel")
@dataclass(frozen=True)
class Gumbel(DrawnScore):
    """Candidates argmax_v exp(l_v) / (-ln U_v)^T, LLaDA's temperature, ranked by `inner`.

    It is computed in logarithms, l + T * Gumbel noise, which cannot overflow. The token is a draw
    from softmax(l / T); its probability and confidence refer to the distribution without
    temperature. The published sampler draws U in float64; float32 changes only events rarer than
    1e-7. Temperature 0 is the inner score. Each forward has its own random numbers, from the
    request's seed.
    """

    precision: Literal["float32", "float64"] = "float32"  # precision of the noise; the inner score
    # has its own

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        if self.temperature == 0:
            return self.inner(logits_KWV, state, window)
        noisy_KWV = numerics.rounded(logits_KWV, self.precision)
        ids_KW = numerics.draw(noisy_KWV, self.temperature, numerics.generator(state), window)
        return self.inner.of(logits_KWV, ids_KW, state)


SIZE = MemoKey[int]("epsilon.size")  # positions of the first block


@register("select.epsilon")
@dataclass(frozen=True)
class Epsilon(Select):
    """Commits shares of the masks: Dream's time t runs evenly from 1 to eps in S steps.

    Step i commits the n = int(m (1 - t[i+1] / t[i])) most confident of the m remaining masks; the
    last step commits all of them. m counts the open block, which for Dream is the whole generation
    (schedule `full`). Early steps commit nothing if S is close to m; the published sampler still
    makes these forwards, and so does `idle`. Without `idle`, every forward commits at least the
    most confident position. With `alg_temp` the n positions are drawn without replacement from
    softmax(confidence / alg_temp).

    Equal confidences are common after a top-p cut, which leaves one token at many positions. Of
    these the lower positions are taken or, with `ties`, those that `torch.topk` takes, as
    published.
    """

    steps: Positive | None = None  # S, forwards per block; None: as many as the first has
    # positions, before a stop may cut it
    eps: Fraction = 1e-3  # value of t after the last step
    idle: bool = False  # whether steps may commit nothing, as published
    alg_temp: PositiveAmount | None = None  # temperature of drawing positions; None: most confident
    ties: common.Ties = field(default="lower", metadata=DEFAULT_LEFT_OUT)  # of equal confidences:
    # the lower positions, or those that torch.topk takes over the canvas or the open block

    @property
    def needs(self) -> Needs:
        """Step counts, and the needs of `ties`."""
        return common.COUNTS_STEPS | holding({ONE_BRANCH: self.ties != "lower"})

    @property
    def gives(self) -> Conditions:
        """Published steps for sampled tokens, since Dream evaluates its sampler above temperature
        0."""
        steps = {Condition.ONE_PER_FORWARD: self.steps is None, Condition.IDLES: self.idle}
        draws = {Condition.FOR_DRAWN_TOKENS: True, Condition.DRAWS: self.alg_temp is not None}
        return holding({**steps, **draws})

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        step, _ = common.step_in_block(state, window)
        masks_K = window.eligible_KW.sum(1)
        if self.alg_temp is not None:
            numbers = numerics.generator(state, "positions")
            drawn_KW = numerics.add_gumbel(scores.confidence_KW, self.alg_temp, numbers, window)
            scores = replace(scores, confidence_KW=drawn_KW)
        count_K = (masks_K * self._share(step, window, state)).long()
        return common.most_confident_by(self.ties, scores, window, count_K, state.length)

    def _share(self, step: Tensor | int, window: Window, state: DecodeState) -> Tensor:
        """Return the share of the masks left that is committed in each of these steps."""
        share_X = shares(self._steps(window, state), self.eps, window.eligible_KW.device)
        return share_X[common.at_most(step, len(share_X) - 1)]

    def _steps(self, window: Window, state: DecodeState) -> int:
        size = state.memo.setdefault(SIZE, min(window.block, window.width))
        if self.steps is not None and self.steps > 2 * size:
            raise DllmBenchError(
                f"{type(self).__name__} has {self.steps} steps for {size} positions, most of which "
                f"would commit nothing; set steps to {size} or less (null: one per position)."
            )
        return self.steps or size


@cache
def shares(steps: int, eps: float, device: torch.device) -> Tensor:
    """Return 1 - t[i+1] / t[i] of Dream's time schedule, and 1 in the last step: (steps,)."""
    time = torch.linspace(1, eps, steps + 1, device=device)
    share_X = 1 - time[1:] / time[:-1]
    share_X[-1] = 1
    return share_X


NUMBERS = MemoKey[Tensor]("origin.numbers")  # the request's uniform numbers, (K, X)
USED = MemoKey[Tensor]("origin.used")  # number of used ones, (K,)


@register("select.origin")
@dataclass(frozen=True)
class Origin(Epsilon):
    """Commits every mask with the same probability, whatever its confidence (Dream's `origin`).

    Steps, eps and idle are as in `Epsilon`.

    The probability is the share in Dream's time schedule, 1 - t[i+1] / t[i], and 1 in the last
    step; committed tokens are the candidates. Each mask gets one uniform number per step, in the
    order of positions, from a generator seeded for each request: the stream of
    `torch.manual_seed(seed)` on the CPU. All numbers are drawn when the first block is entered.
    This gives the same stream without copying the number of remaining masks to the host.
    """

    seed: int = 0  # seed of the stream

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alg_temp is not None or self.ties != "lower":
            raise DllmBenchError(
                f"Origin has alg_temp {self.alg_temp} and ties {self.ties}, but its "
                "probability is the same at every mask; use null and lower."
            )

    @property
    def gives(self) -> Conditions:
        """Those of `Epsilon`; a forward may commit several positions."""
        return super().gives - {Condition.ONE_PER_FORWARD}

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        share_K1 = self._share(common.column(common.step_in_block(state, window)[0]), window, state)
        return window.eligible_KW & (self._draw(window, state) < share_K1)

    def _draw(self, window: Window, state: DecodeState) -> Tensor:
        """Return the next number of the stream at every mask, (K, W)."""
        memo, open_KW = state.memo, window.eligible_KW
        if NUMBERS not in memo:
            new = state.length - state.prompt_len
            count = self._steps(window, state) * new  # enough for all steps
            numbers = torch.rand(count, generator=torch.Generator().manual_seed(self.seed))
            memo[NUMBERS] = numbers.to(open_KW.device).expand(len(open_KW), -1)
            memo[USED] = torch.zeros_like(open_KW[:, 0], dtype=torch.long)
        at_KW = memo[USED][:, None] + open_KW.cumsum(1) - 1
        memo[USED] = memo[USED] + open_KW.sum(1)
        return memo[NUMBERS].gather(1, at_KW.clamp(min=0, max=memo[NUMBERS].shape[1] - 1))
