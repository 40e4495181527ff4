"""Scores with their uncertainty: a mean with an interval, and paired comparison of two runs.

Right/wrong values get the Wilson interval, fractional ones a seeded percentile bootstrap. Two runs
are compared on the samples that both have: McNemar's exact test for right/wrong values, with the
interval of Agresti and Min (2005); paired bootstrap otherwise. Whether a difference is beyond a
margin is tested by Tango's score test (1998). An item answered several times counts once, with its
mean (avg@k); pass@k is the unbiased estimator. The statistics are SciPy's, imported on first use
because that is slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb, inf, log, sqrt
from statistics import fmean

from dllm_bench.core.declared import Count
from dllm_bench.core.errors import DllmBenchError

RESAMPLES = 2000
"""Resamples of a bootstrap."""
LEVEL = 0.95
"""Confidence level of all intervals."""
NEARLY = 1e-9
"""Scores closer than this are equal: they are sums of floats."""


@dataclass(frozen=True)
class MeanScore:
    """Mean of sample scores with its interval at `LEVEL`."""

    mean: float
    low: float
    high: float
    n: Count  # samples
    method: str  # how the interval was computed: "wilson" or "bootstrap"

    @property
    def margin(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2


def percent_of(mean: float, low: float, high: float) -> str:
    """Return a share in percent with the ends of its interval, which are shares too."""
    return f"{100 * mean:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


@dataclass(frozen=True)
class Effect:
    """Difference (ours − theirs) or ratio (ours ÷ theirs) of two sides, with interval and tests."""

    value: float
    low: float  # interval of the value
    high: float
    n: int  # items or samples that both sides have
    p_value: float | None = None  # exact test of no effect
    error: float = 0.0  # standard error, of the logarithm for a ratio; 0 if all resamples agree
    centre: float = 0.0  # estimate used by the tests: value, its logarithm, Agresti and Min's
    freedom: float = inf  # degrees of freedom of the tests
    is_ratio: bool = False
    pairs: Sequence[tuple[int, int, int]] = ()  # of right/wrong scores, by benchmark: items, and
    # those that only ours, only theirs has right
    unit: float = 1.0  # what a share of 1 is in value, low, high, error and centre

    @property
    def differs(self) -> bool:
        """Whether two scores differ at `LEVEL`; the only criterion for calling two runs
        different. An interval without width is no evidence."""
        if self.p_value is not None:
            return self.p_value < 1 - LEVEL
        return self.low < self.high and not self.low <= 0 <= self.high

    @property
    def p_same(self) -> float:
        """Two-sided p-value of equal sides: from the exact test if there is one."""
        if self.p_value is not None:
            return self.p_value
        none = 1.0 if self.is_ratio else 0.0
        return min(1.0, 2 * min(self.p_below(none), self.p_above(none)))

    def p_below(self, value: float) -> float:
        """Return the one-sided p-value of a true effect of at least `value`."""
        from scipy.stats import t

        if self.pairs:
            return float(t.cdf(score_of_pairs(self.pairs, value / self.unit), self.freedom))
        distance = self._at(value) - self.centre
        if self.error == 0:
            return 1.0 if distance <= 0 else 0.0
        return float(t.sf(distance / self.error, self.freedom))

    def p_above(self, value: float) -> float:
        """Return the one-sided p-value of a true effect of at most `value`."""
        if self.error == 0:
            return 1.0 if self._at(value) >= self.centre else 0.0
        return 1 - self.p_below(value)

    def _at(self, value: float) -> float:
        return log(value) if self.is_ratio else value


def is_binary(values: Sequence[float]) -> bool:
    """Return True when every value is 0 or 1."""
    return all(value in (0, 1) for value in values)


def mean_score(values: Sequence[float], *, seed: int = 0) -> MeanScore | None:
    """Return the mean and interval of sample scores in [0, 1]; None without samples."""
    if not values:
        return None
    if is_binary(values):
        ends, method = wilson(fmean(values), len(values)), "wilson"
    else:
        ends, method = bootstrap(values, seed), "bootstrap"
    return MeanScore(fmean(values), *ends, len(values), method)


def wilson(share: float, n: float) -> tuple[float, float]:
    """Return the Wilson interval of a share of n events."""
    from scipy.special import ndtri  # `scipy.stats` takes a second to import

    z = float(ndtri((1 + LEVEL) / 2))
    middle, width = 2 * n * share + z**2, z * sqrt(4 * n * share * (1 - share) + z**2)
    return (middle - width) / (2 * (n + z**2)), (middle + width) / (2 * (n + z**2))


def wilson_of_clusters(happened: Sequence[float], of: Sequence[float]) -> tuple[float, float]:
    """Return the Wilson interval of sum(happened) / sum(of) when events within a sample are
    correlated.

    happened, of: counts by sample, or their means over repetitions; `of` must not be all 0. The
    number of events is replaced by the number of independent events that would give the same
    variance of the ratio over samples, at most the true number (Kish's effective size in Wilson's
    formula, one of the methods that Franco et al. 2019 compare). Without variance it is replaced by
    the number of samples.
    """
    pairs = [pair for pair in zip(happened, of, strict=True) if pair[1]]
    n, samples = float(sum(of)), len(pairs)
    share = sum(happened) / n
    spread = sum((top - share * bottom) ** 2 for top, bottom in pairs)
    if samples > 1 and spread == 0:  # nothing shows how events of a sample are correlated
        n = min(n, samples)
    elif samples > 1 and n > 1:
        alone, alike = share * (1 - share) / (n - 1), samples / (samples - 1) * spread / n**2
        n = min(n, n * alone / alike)
    return wilson(share, n)


def bootstrap(values: Sequence[float], seed: int) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the mean; a single value is its own interval."""
    if len(values) < 2:
        return values[0], values[0]
    import numpy as np
    from scipy import stats

    result = stats.bootstrap(
        [np.asarray(values, dtype=float)],
        np.mean,
        n_resamples=RESAMPLES,
        batch=256,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that k of n samples, drawn without replacement, include a correct one.

    Equation 1 of Chen et al. (2021): 1 - C(n - correct, k) / C(n, k).
    """
    if not 1 <= k <= n:
        raise DllmBenchError(f"pass@{k} needs at least {max(k, 1)} samples per item, found {n}.")
    return 1 - comb(n - correct, k) / comb(n, k)


def repeated(outcomes: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return avg@k over items with k outcomes each, and pass@1, 2, 4, … k for right/wrong outcomes.

    Empty if there are fewer than two outcomes per item, or unequal numbers of them.
    """
    k = min(map(len, outcomes), default=0)
    if k < 2 or k != max(map(len, outcomes)):
        return {}
    metrics = {f"avg@{k}": fmean(map(fmean, outcomes))}
    if not all(map(is_binary, outcomes)):
        return metrics
    sizes = [j for j in (1 << i for i in range(k.bit_length())) if j < k]
    for j in (*sizes, k):
        metrics[f"pass@{j}"] = fmean(pass_at_k(k, int(sum(values)), j) for values in outcomes)
    return metrics


def mcnemar(only_ours: int, only_theirs: int) -> float:
    """Return the exact two-sided McNemar p-value of the discordant pairs."""
    from scipy.special import bdtr  # `scipy.stats` takes a second to import

    fewer = min(only_ours, only_theirs)
    return min(1.0, 2 * float(bdtr(fewer, only_ours + only_theirs, 0.5)))


def paired_shares(
    benchmarks: Sequence[tuple[Sequence[float], Sequence[float]]], unit: float = 1.0
) -> Effect:
    """Return the difference of two shares of right answers, ours - theirs, averaged over
    benchmarks.

    benchmarks: right/wrong values of equal items, (ours, theirs) for each. unit: what a share of 1
    is in the result, 100 for points.

    The interval is that of Agresti and Min (2005): half an item is added to each cell of the table
    of pairs, so that it stays wide if no item differs. The p-value is that of McNemar's exact test,
    which decides where both disagree; it pools items, so an average of benchmarks has none.
    """
    from scipy.special import ndtri  # `scipy.stats` takes a second to import

    counts = []
    for ours, theirs in benchmarks:
        gains = [own - other for own, other in zip(ours, theirs, strict=True)]
        counts.append((len(gains), sum(one > 0 for one in gains), sum(one < 0 for one in gains)))
    share = unit / len(counts)
    centre = share * sum((gained - lost) / (n + 2) for n, gained, lost in counts)
    variance = sum(
        (gained + lost + 1 - (gained - lost) ** 2 / (n + 2)) / (n + 2) ** 2
        for n, gained, lost in counts
    )
    error = share * sqrt(variance)
    width = float(ndtri((1 + LEVEL) / 2)) * error
    items, gained, lost = (sum(column) for column in zip(*counts, strict=True))
    return Effect(
        share * sum((gained - lost) / n for n, gained, lost in counts),
        max(centre - width, -unit),
        min(centre + width, unit),
        items,
        mcnemar(gained, lost) if len(counts) == 1 else None,
        error=error,
        centre=centre,
        pairs=counts,
        unit=unit,
    )


def score_of_pairs(pairs: Sequence[tuple[int, int, int]], difference: float) -> float:
    """Return the standardised distance of an observed difference of paired shares from a true one.

    pairs: by benchmark, see `Effect`. The variance is that under the true difference (Tango 1998):
    the observed one is too small where few items differ, and all of them in one direction. Of
    several benchmarks, whose average is compared, each is taken to have the true difference.
    """
    variance = 0.0
    for n, gained, lost in pairs:
        # the most probable share of items that only theirs has right, given the difference
        b = (2 * n - gained + lost) * difference - gained - lost
        c = -lost * difference * (1 - difference)
        only_theirs = (sqrt(max(b**2 - 8 * n * c, 0.0)) - b) / (4 * n)
        variance += (2 * only_theirs + difference * (1 - difference)) / n
    distance = fmean((gained - lost) / n for n, gained, lost in pairs) - difference
    return distance * len(pairs) / sqrt(variance) if variance > 0 else 0.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for testing a family (Holm 1979), in the given order."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


def compare(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Effect:
    """Return the difference of mean scores, ours - theirs, over the samples that both have.

    ours, theirs: sample id -> score in [0, 1]. Right/wrong scores get `paired_shares`, others the
    paired bootstrap. DllmBenchError if the runs share no id.
    """
    shared = sorted(ours.keys() & theirs.keys())
    if not shared:
        raise DllmBenchError(
            f"The two runs share no sample ({len(ours)} and {len(theirs)} ids); "
            "compare runs of the same benchmark and limit."
        )
    one, other = ([side[key] for key in shared] for side in (ours, theirs))
    if is_binary([*one, *other]):
        return paired_shares([(one, other)])
    differences = [a - b if abs(a - b) > NEARLY else 0.0 for a, b in zip(one, other, strict=True)]
    return Effect(fmean(differences), *bootstrap(differences, seed=0), len(shared))
