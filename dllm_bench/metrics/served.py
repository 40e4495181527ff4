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

from dllm_bench.metrics.facts import Facts
from dllm_bench.metrics.numbers import Amount, Definition, Measure, mean_of, percentile_of
from dllm_bench.metrics.numbers import share_bounds as bounds
from dllm_bench.metrics.speed import seconds


def ttft_s(fact: Facts) -> float:
    return fact.ttft_s or 0.0


def retried(fact: Facts) -> float:
    return (fact.tries or 1) > 1


def retokenised(fact: Facts) -> float:
    return bool(fact.retokenised)


def tokens_per_s(fact: Facts) -> float | None:
    """Of one request."""
    return None if fact.emitted is None else fact.emitted / seconds(fact)


def ms_per_token(fact: Facts) -> float | None:
    """Between the tokens of one request; none where it has no second token."""
    if fact.emitted is None or fact.emitted < 2:
        return None
    return 1000 * (seconds(fact) - ttft_s(fact)) / (fact.emitted - 1)


def median_of(amount: Callable[[Facts], float | None]) -> Measure:
    """Median over the samples that have the amount."""

    def measure(facts: Sequence[Facts]) -> float | None:
        values = [value for fact in facts if (value := amount(fact)) is not None]
        return median(values) if values else None

    return measure


def span_s(facts: Sequence[Facts]) -> float:
    """Seconds in which anything was asked: first start to last end, session by session."""

    def session(fact: Facts) -> int:
        return fact.session or 0

    total = 0.0
    for _, group in groupby(sorted(facts, key=session), key=session):
        times = [(fact.began_s or 0.0, fact.ended_s or 0.0) for fact in group]
        total += max(end for _, end in times) - min(begin for begin, _ in times)
    return total


def per_second(amount: Callable[[Facts], float | None]) -> Measure:
    """Sum over samples ÷ the time they took together."""

    def measure(facts: Sequence[Facts]) -> float | None:
        values = [amount(fact) for fact in facts]
        took_s = span_s(facts)
        if None in values or not took_s:
            return None
        return sum(value for value in values if value is not None) / took_s

    return measure


def _of_ttft(name: str, word: str, measure: Measure) -> Definition:
    text = "time from sending a request to its first content (connection warm)"
    return Definition(f"ttft/{name}", "s", f"{text}; {word} over samples.", measure, "ttft_s")


def _share(name: str, text: str, happened: Amount, fact: str) -> Definition:
    return Definition(f"requests/{name}", "share", text, mean_of(happened), fact, bounds(happened))


TOGETHER = "time from the first start to the last end, all requests in flight together"
ALL = (
    _of_ttft("mean", "mean", mean_of(ttft_s)),
    _of_ttft("p50", "median", percentile_of(ttft_s, 50)),
    _of_ttft("p95", "95th percentile", percentile_of(ttft_s, 95)),
    Definition(
        "tpot/p50",
        "ms",
        "(time of a request − time to its first content) ÷ (tokens − 1); median over samples with "
        "two tokens or more.",
        median_of(ms_per_token),
        "ttft_s",
    ),
    Definition(
        "tps/request_p50",
        "tokens/s",
        "tokens of a request ÷ its time, first token included; median over samples, which is no "
        "mean and no ratio of sums.",
        median_of(tokens_per_s),
        "ttft_s",
    ),
    Definition(
        "tps/throughput",
        "tokens/s",
        f"tokens of all requests ÷ {TOGETHER}; ratio of sums over samples.",
        per_second(lambda fact: fact.emitted),
        "ended_s",
    ),
    Definition(
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
