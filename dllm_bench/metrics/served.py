"""Metrics of requests in flight together: time to first token, tokens/s, requests/s.

Of a served model they are measured at the client, with `model.concurrency` requests in flight; of a
run in batches they say what all requests took. The time of one request is that of the try that was
answered. The time of all requests runs from the first start to the last end of each session, so it
includes failed tries, waits, and the end of a session, when fewer requests are in flight.
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
    share_bounds,
)
from dllm_bench.metrics.sample_stats import SampleStats


def _ttft_s(sample: SampleStats) -> float:
    return sample.ttft_s or 0.0


def _retried(sample: SampleStats) -> float:
    return (sample.tries or 1) > 1


def _retokenised(sample: SampleStats) -> float:
    return bool(sample.retokenised)


def tokens_per_s(sample: SampleStats) -> float | None:
    """Tokens per second of one request."""
    return None if sample.emitted is None else sample.emitted / (sample.seconds or 0.0)


def ms_per_token(sample: SampleStats) -> float | None:
    """Milliseconds between the tokens of one request; None for fewer than two tokens."""
    if sample.emitted is None or sample.emitted < 2:
        return None
    return 1000 * ((sample.seconds or 0.0) - _ttft_s(sample)) / (sample.emitted - 1)


def median_of(amount: Callable[[SampleStats], float | None]) -> MetricFunction:
    """Median over the samples that have the amount."""

    def compute(samples: Sequence[SampleStats]) -> float | None:
        values = [value for sample in samples if (value := amount(sample)) is not None]
        return median(values) if values else None

    return compute


def span_s(samples: Sequence[SampleStats]) -> float:
    """Seconds from the first start to the last end, summed over sessions."""

    def session(sample: SampleStats) -> int:
        return sample.session or 0

    total = 0.0
    for _, group in groupby(sorted(samples, key=session), key=session):
        times = [(sample.began_s or 0.0, sample.ended_s or 0.0) for sample in group]
        total += max(end for _, end in times) - min(begin for begin, _ in times)
    return total


def per_second(amount: Callable[[SampleStats], float | None]) -> MetricFunction:
    """Sum over samples ÷ the time from the first start to the last end."""

    def compute(samples: Sequence[SampleStats]) -> float | None:
        values = [amount(sample) for sample in samples]
        took_s = span_s(samples)
        if None in values or not took_s:
            return None
        return sum(value for value in values if value is not None) / took_s

    return compute


def _of_ttft(name: str, word: str, function: MetricFunction) -> MetricDefinition:
    text = "time from sending a request to its first content (connection warm)"
    return MetricDefinition(
        f"ttft/{name}", "s", f"{text}; {word} over samples.", function, "ttft_s"
    )


def _share(name: str, text: str, happened: PerSample, requires: str) -> MetricDefinition:
    return MetricDefinition(
        f"requests/{name}", "share", text, mean_of(happened), requires, share_bounds(happened)
    )


TOGETHER = "time from the first start to the last end, all requests in flight together"
ALL = (
    _of_ttft("mean", "mean", mean_of(_ttft_s)),
    _of_ttft("p50", "median", percentile_of(_ttft_s, 50)),
    _of_ttft("p95", "95th percentile", percentile_of(_ttft_s, 95)),
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
        per_second(lambda sample: sample.emitted),
        "ended_s",
    ),
    MetricDefinition(
        "requests/s", "requests/s", f"requests ÷ {TOGETHER}.", per_second(lambda _: 1), "ended_s"
    ),
    _share("retried", "requests that a first try did not answer.", _retried, "tries"),
    _share(
        "retokenised",
        "requests whose tokens the local tokenizer counted, for want of the server's count.",
        _retokenised,
        "retokenised",
    ),
)
