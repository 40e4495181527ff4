"""Speed metrics: every published meaning of TPF, TPS and latency, over the same samples.

The same word means different counts in different repositories (which tokens, which forwards, which
clock, which mean), so each meaning has its own name, and its text says what it counts. A metric is
None where the samples do not define it (no sample, or no time after the first step).

`OF_CONCURRENT` are metrics of concurrent requests: time to first token, tokens/s, requests/s. For a
served model they are measured at the client, with `model.concurrency` requests in flight; for a
batched run they give the duration of all requests. The duration of one request is that of its
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
    Ratio,
    mean_of,
    percentile_of,
)

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def _commits(samples: DataFrame) -> Series:
    """Count commits; a position that was masked again counts each time it is committed."""
    return samples.committed + samples.remasked.fillna(0)


def _later_s(samples: DataFrame) -> Series:
    """Return seconds after the first step; 0 for a sample that took a single step.

    The steps of a served model are unknown; its first step ends with the first content.
    """
    later = samples.seconds - samples.first_step_s.fillna(0)
    return later.mask(samples.forwards.isin([0, 1]), 0.0)


def _rounds(samples: DataFrame) -> Series:
    """Return the number of forwards as LoPA counts them: one more, because its last round is
    empty."""
    return samples.forwards + 1


_TAIL = "decoded tokens of all opened blocks (what follows the end included)"
_LATER = f"{_TAIL}, the first step's too, ÷ (generation time − first step)"
_LEFT_OUT = "samples of a single step have no such time: they are left out, also of n."
ALL = (
    MetricDefinition(
        "tpf/committed",
        "tokens/forward",
        f"{_TAIL} ÷ forwards; ratio of sums over samples.",
        Ratio(_commits, lambda s: s.forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/net",
        "tokens/forward",
        f"{_TAIL} that stand at the end ÷ forwards; ratio of sums over samples. Where a decoder "
        "masks tokens again, tpf/committed counts a position each time that it is decoded.",
        Ratio(lambda s: s.committed, lambda s: s.forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/emitted",
        "tokens/forward",
        "tokens before the first reason to stop ÷ forwards; ratio of sums over samples.",
        Ratio(lambda s: s.emitted, lambda s: s.forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa",
        "tokens/forward",
        "positions of all opened blocks ÷ (forwards + 1 per sample), as LoPA's single-device "
        "script counts; ratio of sums over samples; k + 1 branches are one forward.",
        Ratio(lambda s: s.allocated, _rounds),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_dist",
        "tokens/forward",
        f"{_TAIL} ÷ (forwards + 1 per sample), as LoPA-Dist counts; ratio of sums over samples.",
        Ratio(lambda s: s.committed, _rounds),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_coder",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards, as LoPA's DiffuCoder script "
        "counts; ratio of sums over samples.",
        Ratio(lambda s: s.content, lambda s: s.forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/dinfer",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards as dInfer counts them (see "
        "forwards/dinfer); mean over samples of the ratio.",
        Ratio(lambda s: s.content, lambda s: s.forwards + s.idle_dinfer, each=True),
        requires="idle_dinfer",
    ),
    MetricDefinition(
        "tpf/diffusion_gemma",
        "tokens/forward",
        "tokens of all canvases up to the first end, it included ÷ forwards over a canvas, as "
        "transformers counts for DiffusionGemma: forwards that encode text are left out; mean over "
        "samples of the ratio.",
        Ratio(lambda s: s.through_end, lambda s: s.forwards - s.encoding, each=True),
        requires="encoding",
    ),
    MetricDefinition(
        "tps/decode",
        "tokens/s",
        "tokens before the first reason to stop ÷ time of the forwards and what belongs to them; "
        "ratio of sums over samples.",
        Ratio(lambda s: s.emitted, lambda s: s.steps_s),
        requires="forwards",
        timed=True,
    ),
    MetricDefinition(
        "tps/e2e",
        "tokens/s",
        "tokens before the first reason to stop ÷ whole generation time (tokenisation and disk "
        "outside); ratio of sums over samples.",
        Ratio(lambda s: s.emitted, lambda s: s.seconds),
        requires="emitted",
        timed=True,
    ),
    MetricDefinition(
        "tps/no_first_step",
        "tokens/s",
        f"LoPA-Dist's average TPS: {_LATER}, more than any speed where steps are few (twice it for "
        "two equal ones; tps/after_first_step is consistent); mean over samples of the ratio; "
        f"{_LEFT_OUT}",
        Ratio(lambda s: s.committed, _later_s, each=True),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/after_first_step",
        "tokens/s",
        f"{_TAIL}, by later steps than the first ÷ (generation time − first step); mean over "
        f"samples of the ratio; {_LEFT_OUT}",
        Ratio(lambda s: s.committed - s.first_tokens, _later_s, each=True),
        requires="first_tokens",
        timed=True,
    ),
    MetricDefinition(
        "tps/max",
        "tokens/s",
        f"LoPA-Dist's maximum TPS: {_LATER} of the fastest sample.",
        Ratio(lambda s: s.committed, _later_s, each=True, largest=1),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/top10",
        "tokens/s",
        f"LoPA-Dist's top-10 TPS: {_LATER}; mean of the ten fastest samples.",
        Ratio(lambda s: s.committed, _later_s, each=True, largest=10),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "latency/mean",
        "s",
        "generation time of a sample; mean over samples.",
        mean_of(lambda s: s.seconds),
        timed=True,
    ),
    MetricDefinition(
        "latency/p50",
        "s",
        "generation time of a sample; median over samples.",
        percentile_of(lambda s: s.seconds, 50),
        timed=True,
    ),
    MetricDefinition(
        "latency/p95",
        "s",
        "generation time of a sample; 95th percentile over samples.",
        percentile_of(lambda s: s.seconds, 95),
        timed=True,
    ),
    MetricDefinition(
        "latency/no_first_step",
        "s",
        "LoPA-Dist's latency: generation time − first step (of a served engine: to its first "
        "content); mean over samples.",
        mean_of(_later_s),
        timed=True,
    ),
    MetricDefinition(
        "step_ms",
        "ms",
        "time of the forwards and what belongs to them ÷ forwards; ratio of sums over samples.",
        Ratio(lambda s: 1000 * s.steps_s, lambda s: s.forwards),
        requires="forwards",
        timed=True,
    ),
    MetricDefinition(
        "forwards/mean",
        "forwards",
        "forwards of a sample; mean over samples.",
        mean_of(lambda s: s.forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "forwards/fast_dllm",
        "forwards",
        "forwards of a sample as Fast-dLLM's block loops count: with the prefix or dual cache one "
        "more for each block that the forward renewing the cache filled; mean over samples.",
        mean_of(lambda s: s.forwards + s.idle),
        requires="idle",
    ),
    MetricDefinition(
        "forwards/dinfer",
        "forwards",
        "forwards of a sample as dInfer's block loop counts as released: the same, and rounds run "
        "in groups of masks ÷ 8 (1 to 4) of which those after the last mask count too, with the "
        "renewals that cache.every makes by clock=request; mean over samples.",
        mean_of(lambda s: s.forwards + s.idle_dinfer),
        requires="idle_dinfer",
    ),
    MetricDefinition(
        "row_cost",
        "positions/token",
        "branches × positions fed, summed over forwards ÷ tokens before the first reason to stop; "
        "ratio of sums over samples: what the tokens per forward were bought with.",
        Ratio(lambda s: s.rows, lambda s: s.emitted),
        requires="rows",
    ),
    MetricDefinition(
        "cache/bytes_read",
        "bytes/forward",
        "bytes that a forward reads from the cache, all layers together: keys, values and whatever "
        "else is kept; ratio of sums over samples. A drafter's cache is not counted.",
        Ratio(lambda s: s.cache_read, lambda s: s.forwards),
        requires="cache_read",
    ),
    MetricDefinition(
        "cache/bytes_kept",
        "bytes",
        "the most bytes that the cache keeps after a forward, all layers together; mean over "
        "samples.",
        mean_of(lambda s: s.cache_kept),
        requires="cache_kept",
    ),
    MetricDefinition(
        "forced_steps",
        "share",
        "positions the stall rule committed because the selector chose none ÷ decoded positions.",
        Ratio(lambda s: s.forced, lambda s: s.committed),
        requires="forced",
    ),
    MetricDefinition(
        "empty_rate", "share", "samples whose text is blank.", mean_of(lambda s: s["empty"])
    ),
    MetricDefinition(
        "end_only_rate",
        "share",
        "samples whose decoded tokens are all end or padding.",
        mean_of(lambda s: (s.committed > 0) & (s.content == 0)),
        requires="content",
    ),
    MetricDefinition(
        "truncated_rate",
        "share",
        "samples that nothing but the length ended.",
        mean_of(lambda s: s.truncated),
    ),
    MetricDefinition(
        "speedup/baseline",
        "×",
        "generation time of the baseline, which decodes every sample in the same run, in "
        "alternating order ÷ generation time; ratio of sums over samples.",
        Ratio(lambda s: s.baseline_s, lambda s: s.seconds),
        "baseline_s",
        timed=True,
    ),
    MetricDefinition(
        "equal/baseline",
        "share",
        "samples whose tokens, up to where the text ends, are the very same as the baseline's.",
        mean_of(lambda s: s.baseline_equal),
        "baseline_equal",
        is_share=True,
    ),
)


# --- concurrent requests -------------------------------------------------------------------------


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
OF_CONCURRENT = (
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
