"""Scores with their uncertainty: a mean with an interval, and two runs compared on shared samples.

Right/wrong values get the Wilson interval, fractional ones a seeded percentile bootstrap. Two runs
are compared pairwise on the samples both have: exact McNemar for right/wrong values, paired
bootstrap otherwise. Items asked several times count once, with their mean (avg@k); pass@k is the
unbiased estimator. The statistics are SciPy's, imported on first use. Speed lives in `speed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean
from typing import Any

from dllm_bench.core.errors import DllmBenchError

RESAMPLES = 2000
LEVEL = 0.95


@dataclass(frozen=True)
class MeanScore:
    """Mean of `n` sample scores in [low, high] at `LEVEL`; `method` says how the interval came."""

    mean: float
    low: float
    high: float
    n: int
    method: str

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class Comparison:
    """ours - theirs over `n` shared samples; `p_value` of no difference, None for a bootstrap.

    low/high: interval of the difference. `differs` is the only ground to call two runs different.
    """

    difference: float
    low: float
    high: float
    n: int
    p_value: float | None
    method: str

    @property
    def differs(self) -> bool:
        if self.p_value is not None:
            return self.p_value < 1 - LEVEL
        return not self.low <= 0 <= self.high


def is_binary(values: Sequence[float]) -> bool:
    """True when every value is 0 or 1."""
    return all(value in (0, 1) for value in values)


def mean_score(values: Sequence[float], *, seed: int = 0) -> MeanScore | None:
    """Mean and interval of sample scores in [0, 1]; None without samples."""
    if not values:
        return None
    if is_binary(values):
        low, high = wilson(int(sum(values)), len(values))
        return MeanScore(fmean(values), low, high, len(values), "wilson")
    low, high = bootstrap(values, seed)
    return MeanScore(fmean(values), low, high, len(values), "bootstrap")


def wilson(successes: int, n: int) -> tuple[float, float]:
    """Wilson interval of a share."""
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def wilson_of_clusters(happened: Sequence[int], of: Sequence[int]) -> tuple[float, float]:
    """Wilson interval of sum(happened) / sum(of), where one sample's events are alike.

    Their number counts for as many independent ones as give the variance of the ratio over samples
    (Kish's effective size in Wilson's formula, as Franco et al. 2019 compare them), never for more
    than there are. happened, of: counts by sample; `of` must not be all 0.
    """
    from scipy.special import ndtri

    pairs = [pair for pair in zip(happened, of, strict=True) if pair[1]]
    n, samples = float(sum(of)), len(pairs)
    share = sum(happened) / n
    spread = sum((top - share * bottom) ** 2 for top, bottom in pairs)
    if samples > 1 and spread > 0:
        alone, alike = share * (1 - share) / (n - 1), samples / (samples - 1) * spread / n**2
        n = min(n, n * alone / alike)
    z = float(ndtri((1 + LEVEL) / 2))
    middle, width = share + z**2 / (2 * n), z * sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    return (middle - width) / (1 + z**2 / n), (middle + width) / (1 + z**2 / n)


def bootstrap(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean; one sample says nothing beyond its own value."""
    if len(values) < 2:
        return values[0], values[0]
    return _resampled([values], lambda drawn, axis: drawn.mean(axis), seed)


def bootstrap_ratio(
    tops: Sequence[float], bottoms: Sequence[float], seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(tops) / sum(bottoms); samples are drawn as pairs."""
    return _resampled(
        [tops, bottoms], lambda top, bottom, axis: top.sum(axis) / bottom.sum(axis), seed
    )


def _resampled(
    columns: Sequence[Sequence[float]], statistic: Callable[..., Any], seed: int
) -> tuple[float, float]:
    """Percentile interval of a statistic of columns, whose rows are drawn together."""
    import numpy as np
    from scipy import stats

    with np.errstate(divide="ignore", invalid="ignore"):  # a ratio over nothing is not finite
        result = stats.bootstrap(
            [np.asarray(column, dtype=float) for column in columns],
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=RESAMPLES,
            batch=256,
            confidence_level=LEVEL,
            method="percentile",
            rng=np.random.default_rng(seed),
        )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold one of the `correct` ones.

    Equation 1 of Chen et al. (2021): 1 - C(n - correct, k) / C(n, k).
    """
    if not 1 <= k <= n:
        raise DllmBenchError(f"pass@{k} needs at least {max(k, 1)} samples per item, found {n}.")
    return 1 - comb(n - correct, k) / comb(n, k)


def repeated(outcomes: Sequence[Sequence[float]]) -> dict[str, float]:
    """avg@k over items asked k times each; pass@1, 2, 4, … k where values are right or wrong."""
    k = min(map(len, outcomes), default=0)
    if k < 2 or k != max(map(len, outcomes)):
        return {}
    found = {f"avg@{k}": fmean(map(fmean, outcomes))}
    if not all(map(is_binary, outcomes)):
        return found
    sizes = [j for j in (1 << i for i in range(k.bit_length())) if j < k]
    for j in (*sizes, k):
        found[f"pass@{j}"] = fmean(pass_at_k(k, int(sum(values)), j) for values in outcomes)
    return found


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Exact two-sided McNemar p-value of the discordant pairs."""
    from scipy.stats import binomtest

    discordant = only_ours + only_theirs
    return float(binomtest(only_ours, discordant, 0.5).pvalue) if discordant else 1.0


def compare(ours: Mapping[str, float], theirs: Mapping[str, float], *, seed: int = 0) -> Comparison:
    """Pairwise comparison on the sample ids both runs have."""
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise DllmBenchError(
            f"The two runs share no sample ({len(ours)} and {len(theirs)} ids); "
            "compare runs of the same benchmark and limit."
        )
    differences = [ours[key] - theirs[key] for key in shared]
    low, high = bootstrap(differences, seed)
    mean = fmean(differences)
    if is_binary([*(ours[key] for key in shared), *(theirs[key] for key in shared)]):
        p_value = mcnemar(differences.count(1), differences.count(-1))
        return Comparison(mean, low, high, len(shared), p_value, "mcnemar exact")
    return Comparison(mean, low, high, len(shared), None, "paired bootstrap")
