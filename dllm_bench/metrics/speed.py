"""Speed metrics: every published meaning of TPF, TPS and latency, over the same samples.

The same word means different counts in different repositories (which tokens, which forwards, which
clock, which mean), so each meaning has its own name, and its text says what it counts. A metric is
None where the samples do not define it (no sample, or no time after the first step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dllm_bench.metrics.metric import MetricDefinition, Ratio, mean_of, percentile_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series


def _commits(samples: DataFrame) -> Series:
    """Number of commits; a position that was masked again counts each time it is committed."""
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
