"""Numbers of requests in flight: time to first token, tokens/s of a request and of all, requests/s.

Of a served engine, measured at the client, at the run's `model.concurrency`; of a run in batches
what all took together. What a request took is the time of the try that was answered; what all of
them took together is counted from the first start to the last end of each session, so failed tries,
waits and the emptying at the end are in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median

from dllm_bench.metrics.metric import (
    MetricDefinition,
    MetricFunction,
    PerSample,
    mean_of,
    percentile_of,
)
from dllm_bench.metrics.metric import share_bounds as bounds
from dllm_bench.metrics.sample_stats import SampleStats
from dllm_bench.metrics.speed import seconds


def ttft_s(fact: SampleStats) -> float:
    return fact.ttft_s or 0.0


def retried(fact: SampleStats) -> float:
    return (fact.tries or 1) > 1


def retokenised(fact: SampleStats) -> float:
    return bool(fact.retokenised)


def tokens_per_s(fact: SampleStats) -> float | None:
    """Of one request."""
    return None if fact.emitted is None else fact.emitted / seconds(fact)


def ms_per_token(fact: SampleStats) -> float | None:
    """Between the tokens of one request; none where it has no second token."""
    if fact.emitted is None or fact.emitted < 2:
        return None
    return 1000 * (seconds(fact) - ttft_s(fact)) / (fact.emitted - 1)


def median_of(amount: Callable[[SampleStats], float | None]) -> MetricFunction:
    """Median over the samples that have the amount."""

    def measure(facts: Sequence[SampleStats]) -> float | None:
        values = [value for fact in facts if (value := amount(fact)) is not None]
        return median(values) if values else None

    return measure


def span_s(facts: Sequence[SampleStats]) -> float:
    """Seconds in which anything was asked: first start to last end, session by session."""

    def session(fact: SampleStats) -> int:
        return fact.session or 0

    total = 0.0
    for _, group in groupby(sorted(facts, key=session), key=session):
        times = [(fact.began_s or 0.0, fact.ended_s or 0.0) for fact in group]
        total += max(end for _, end in times) - min(begin for begin, _ in times)
    return total


def per_second(amount: Callable[[SampleStats], float | None]) -> MetricFunction:
    """Sum over samples ÷ the time they took together."""

    def measure(facts: Sequence[SampleStats]) -> float | None:
        values = [amount(fact) for fact in facts]
        took_s = span_s(facts)
        if None in values or not took_s:
            return None
        return sum(value for value in values if value is not None) / took_s

    return measure


def _of_ttft(name: str, word: str, measure: MetricFunction) -> MetricDefinition:
    text = "time from sending a request to its first content (connection warm)"
    return MetricDefinition(f"ttft/{name}", "s", f"{text}; {word} over samples.", measure, "ttft_s")


def _share(name: str, text: str, happened: PerSample, fact: str) -> MetricDefinition:
    return MetricDefinition(
        f"requests/{name}", "share", text, mean_of(happened), fact, bounds(happened)
    )


TOGETHER = "time from the first start to the last end, all requests in flight together"
ALL = (
    _of_ttft("mean", "mean", mean_of(ttft_s)),
    _of_ttft("p50", "median", percentile_of(ttft_s, 50)),
    _of_ttft("p95", "95th percentile", percentile_of(ttft_s, 95)),
    MetricDefinition(
        "tpot/p50",
        "ms",
        "(time of a request − time to its first content) ÷ (tokens − 1); median over samples with "
        "two tokens or more.",
        median_of(ms_per_token),
        "ttft_s",
    ),
    MetricDefinition(
        "tps/request_p50",
        "tokens/s",
        "tokens of a request ÷ its time, first token included; median over samples, which is no "
        "mean and no ratio of sums.",
        median_of(tokens_per_s),
        "ttft_s",
    ),
    MetricDefinition(
        "tps/throughput",
        "tokens/s",
        f"tokens of all requests ÷ {TOGETHER}; ratio of sums over samples.",
        per_second(lambda fact: fact.emitted),
        "ended_s",
    ),
    MetricDefinition(
        "requests/s", "requests/s", f"requests ÷ {TOGETHER}.", per_second(lambda _: 1), "ended_s"
    ),
    _share("retried", "requests that a first try did not answer.", retried, "tries"),
    _share(
        "retokenised",
        "requests whose tokens the local tokenizer counted, for want of the server's count.",
        retokenised,
        "retokenised",
    ),
)
