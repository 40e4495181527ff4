"""Metrics of concurrent requests: time to first token, tokens/s, requests/s.

For a served model they are measured at the client, with `model.concurrency` requests in flight; for
a batched run they give the duration of all requests. The duration of one request is that of its
successful try. The duration of all requests is measured from the first start to the last end of
each session, so it includes failed tries, waits, and the end of a session, when fewer requests are
in flight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dllm_bench.metrics.metric import (
    Column,
    MetricDefinition,
    MetricFunction,
    mean_of,
    percentile_of,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def ms_per_token(samples: DataFrame) -> Series:
    """Return milliseconds between the tokens of one request; missing for fewer than two tokens."""
    later = samples.emitted.where(samples.emitted >= 2) - 1
    return 1000 * (samples.seconds - samples.ttft_s.fillna(0)) / later


def span_s(samples: DataFrame) -> float:
    """Return seconds from the first start to the last end, summed over sessions."""
    sessions = samples.fillna({"session": 0}).groupby("session")
    return float((sessions.ended_s.max() - sessions.began_s.min()).sum())


def per_second(amount: Column) -> MetricFunction:
    """Return the sum over samples ÷ the time from the first start to the last end."""

    def compute(samples: DataFrame) -> float | None:
        amounts, took_s = amount(samples), span_s(samples)
        return None if amounts.isna().any() or not took_s else float(amounts.sum() / took_s)

    return compute


def _of_ttft(name: str, word: str, function: MetricFunction) -> MetricDefinition:
    text = "time from sending a request to its first content (connection warm)"
    return MetricDefinition(
        f"ttft/{name}", "s", f"{text}; {word} over samples.", function, "ttft_s"
    )


def _share(name: str, text: str, happened: Column, requires: str) -> MetricDefinition:
    return MetricDefinition(f"requests/{name}", "share", text, mean_of(happened), requires, True)


TOGETHER = "time from the first start to the last end, all requests in flight together"
ALL = (
    _of_ttft("mean", "mean", mean_of(lambda s: s.ttft_s)),
    _of_ttft("p50", "median", percentile_of(lambda s: s.ttft_s, 50)),
    _of_ttft("p95", "95th percentile", percentile_of(lambda s: s.ttft_s, 95)),
    MetricDefinition(
        "tpot/p50",
        "ms",
        "(time of a request − time to its first content) ÷ (tokens − 1); median over samples with "
        "two tokens or more.",
        percentile_of(ms_per_token, 50),
        "ttft_s",
    ),
    MetricDefinition(
        "tps/request_p50",
        "tokens/s",
        "tokens of a request ÷ its time, first token included; median over samples, which is no "
        "mean and no ratio of sums.",
        percentile_of(lambda s: s.emitted / s.seconds, 50),
        "ttft_s",
    ),
    MetricDefinition(
        "tps/throughput",
        "tokens/s",
        f"tokens of all requests ÷ {TOGETHER}; ratio of sums over samples.",
        per_second(lambda s: s.emitted),
        "ended_s",
    ),
    MetricDefinition(
        "requests/s",
        "requests/s",
        f"requests ÷ {TOGETHER}.",
        per_second(lambda s: s.ended_s.notna()),
        "ended_s",
    ),
    _share("retried", "requests that a first try did not answer.", lambda s: s.tries > 1, "tries"),
    _share(
        "retokenised",
        "requests whose tokens the local tokenizer counted, for want of the server's count.",
        lambda s: s.retokenised,
        "retokenised",
    ),
)
