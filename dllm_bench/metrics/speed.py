"""Speed metrics: every published meaning of TPF, TPS and latency, over the same samples.

The same word means different counts in different repositories (which tokens, which forwards, which
clock, which mean), so each meaning has its own name, and its text says what it counts. A metric is
None where the samples do not define it (no sample, or no time after the first step).
"""

from __future__ import annotations

from dllm_bench.metrics.metric import (
    MetricDefinition,
    best_ratio,
    mean_of,
    mean_ratio,
    percentile_of,
    share_bounds,
    total_ratio,
)
from dllm_bench.metrics.sample_stats import SampleStats


def _allocated(sample: SampleStats) -> float:
    return sample.allocated or 0


def _committed(sample: SampleStats) -> float:
    return sample.committed or 0


def _commits(sample: SampleStats) -> float:
    """Commits, of positions that a reviser masked again each time that they were committed."""
    return _committed(sample) + (sample.remasked or 0)


def _content(sample: SampleStats) -> float:
    return sample.content or 0


def _emitted(sample: SampleStats) -> float:
    return sample.emitted or 0


def _forwards(sample: SampleStats) -> float:
    return sample.forwards or 0


def _fast_dllm_forwards(sample: SampleStats) -> float:
    return _forwards(sample) + (sample.idle or 0)


def _dinfer_forwards(sample: SampleStats) -> float:
    return _forwards(sample) + (sample.idle_dinfer or 0)


def _rounds(sample: SampleStats) -> float:
    """Forwards as LoPA counts them: one more, its last round, which is empty."""
    return _forwards(sample) + 1


def _seconds(sample: SampleStats) -> float:
    return sample.seconds or 0.0


def _steps_s(sample: SampleStats) -> float:
    return sample.steps_s or 0.0


def _later_s(sample: SampleStats) -> float:
    """Seconds after the first step; 0 for a sample that took a single step.

    The steps of a served model are unknown; its first one ends with the first content.
    """
    return 0.0 if sample.forwards in (0, 1) else _seconds(sample) - (sample.first_step_s or 0.0)


def _later(sample: SampleStats) -> float:
    """Tokens decoded after the first step."""
    return _committed(sample) - (sample.first_tokens or 0)


def _rows(sample: SampleStats) -> float:
    return sample.rows or 0


def _cache_read(sample: SampleStats) -> float:
    return sample.cache_read or 0


def _cache_kept(sample: SampleStats) -> float:
    return sample.cache_kept or 0


def _forced(sample: SampleStats) -> float:
    return sample.forced or 0


def _baseline_s(sample: SampleStats) -> float:
    return sample.baseline_s or 0.0


def _equal(sample: SampleStats) -> float:
    return bool(sample.baseline_equal)


_TAIL = "decoded tokens of all opened blocks (what follows the end included)"
_LATER = f"{_TAIL}, the first step's too, ÷ (generation time − first step)"
_LEFT_OUT = "samples of a single step have no such time: they are left out, also of n."
ALL = (
    MetricDefinition(
        "tpf/committed",
        "tokens/forward",
        f"{_TAIL} ÷ forwards; ratio of sums over samples.",
        total_ratio(_commits, _forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/net",
        "tokens/forward",
        f"{_TAIL} that stand at the end ÷ forwards; ratio of sums over samples. Where a decoder "
        "masks tokens again, tpf/committed counts a position each time that it is decoded.",
        total_ratio(_committed, _forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/emitted",
        "tokens/forward",
        "tokens before the first reason to stop ÷ forwards; ratio of sums over samples.",
        total_ratio(_emitted, _forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa",
        "tokens/forward",
        "positions of all opened blocks ÷ (forwards + 1 per sample), as LoPA's single-device "
        "script counts; ratio of sums over samples; k + 1 branches are one forward.",
        total_ratio(_allocated, _rounds),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_dist",
        "tokens/forward",
        f"{_TAIL} ÷ (forwards + 1 per sample), as LoPA-Dist counts; ratio of sums over samples.",
        total_ratio(_committed, _rounds),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_coder",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards, as LoPA's DiffuCoder script "
        "counts; ratio of sums over samples.",
        total_ratio(_content, _forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "tpf/dinfer",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards as dInfer counts them (see "
        "forwards/dinfer); mean over samples of the ratio.",
        mean_ratio(_content, _dinfer_forwards),
        requires="idle_dinfer",
    ),
    MetricDefinition(
        "tps/decode",
        "tokens/s",
        "tokens before the first reason to stop ÷ time of the forwards and what belongs to them; "
        "ratio of sums over samples.",
        total_ratio(_emitted, _steps_s),
        requires="forwards",
        timed=True,
    ),
    MetricDefinition(
        "tps/e2e",
        "tokens/s",
        "tokens before the first reason to stop ÷ whole generation time (tokenisation and disk "
        "outside); ratio of sums over samples.",
        total_ratio(_emitted, _seconds),
        requires="emitted",
        timed=True,
    ),
    MetricDefinition(
        "tps/no_first_step",
        "tokens/s",
        f"LoPA-Dist's average TPS: {_LATER}, more than any speed where steps are few (twice it for "
        "two equal ones; tps/after_first_step is consistent); mean over samples of the ratio; "
        f"{_LEFT_OUT}",
        mean_ratio(_committed, _later_s),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/after_first_step",
        "tokens/s",
        f"{_TAIL}, by later steps than the first ÷ (generation time − first step); mean over "
        f"samples of the ratio; {_LEFT_OUT}",
        mean_ratio(_later, _later_s),
        requires="first_tokens",
        timed=True,
    ),
    MetricDefinition(
        "tps/max",
        "tokens/s",
        f"LoPA-Dist's maximum TPS: {_LATER} of the fastest sample.",
        best_ratio(_committed, _later_s, 1),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/top10",
        "tokens/s",
        f"LoPA-Dist's top-10 TPS: {_LATER}; mean of the ten fastest samples.",
        best_ratio(_committed, _later_s, 10),
        requires="committed",
        timed=True,
    ),
    MetricDefinition(
        "latency/mean",
        "s",
        "generation time of a sample; mean over samples.",
        mean_of(_seconds),
        timed=True,
    ),
    MetricDefinition(
        "latency/p50",
        "s",
        "generation time of a sample; median over samples.",
        percentile_of(_seconds, 50),
        timed=True,
    ),
    MetricDefinition(
        "latency/p95",
        "s",
        "generation time of a sample; 95th percentile over samples.",
        percentile_of(_seconds, 95),
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
        total_ratio(lambda sample: 1000 * _steps_s(sample), _forwards),
        requires="forwards",
        timed=True,
    ),
    MetricDefinition(
        "forwards/mean",
        "forwards",
        "forwards of a sample; mean over samples.",
        mean_of(_forwards),
        requires="forwards",
    ),
    MetricDefinition(
        "forwards/fast_dllm",
        "forwards",
        "forwards of a sample as Fast-dLLM's block loops count: with the prefix or dual cache one "
        "more for each block that the forward renewing the cache filled; mean over samples.",
        mean_of(_fast_dllm_forwards),
        requires="idle",
    ),
    MetricDefinition(
        "forwards/dinfer",
        "forwards",
        "forwards of a sample as dInfer's block loop counts as released: the same, and rounds run "
        "in groups of masks ÷ 8 (1 to 4) of which those after the last mask count too, with the "
        "renewals that cache.every makes by clock=request; mean over samples.",
        mean_of(_dinfer_forwards),
        requires="idle_dinfer",
    ),
    MetricDefinition(
        "row_cost",
        "positions/token",
        "branches × positions fed, summed over forwards ÷ tokens before the first reason to stop; "
        "ratio of sums over samples: what the tokens per forward were bought with.",
        total_ratio(_rows, _emitted),
        requires="rows",
    ),
    MetricDefinition(
        "cache/bytes_read",
        "bytes/forward",
        "bytes that a forward reads from the cache, all layers together: keys, values and whatever "
        "else is kept; ratio of sums over samples. A drafter's cache is not counted.",
        total_ratio(_cache_read, _forwards),
        requires="cache_read",
    ),
    MetricDefinition(
        "cache/bytes_kept",
        "bytes",
        "the most bytes that the cache keeps after a forward, all layers together; mean over "
        "samples.",
        mean_of(_cache_kept),
        requires="cache_kept",
    ),
    MetricDefinition(
        "forced_steps",
        "share",
        "positions the stall rule committed because the selector chose none ÷ decoded positions.",
        total_ratio(_forced, _committed),
        requires="forced",
    ),
    MetricDefinition(
        "empty_rate", "share", "samples whose text is blank.", mean_of(lambda sample: sample.empty)
    ),
    MetricDefinition(
        "end_only_rate",
        "share",
        "samples whose decoded tokens are all end or padding.",
        mean_of(lambda sample: _committed(sample) > 0 and sample.content == 0),
        requires="content",
    ),
    MetricDefinition(
        "truncated_rate",
        "share",
        "samples that nothing but the length ended.",
        mean_of(lambda sample: sample.truncated),
    ),
    MetricDefinition(
        "speedup/baseline",
        "×",
        "generation time of the baseline, which decodes every sample in the same run, in "
        "alternating order ÷ generation time; ratio of sums over samples.",
        total_ratio(_baseline_s, _seconds),
        "baseline_s",
        timed=True,
    ),
    MetricDefinition(
        "equal/baseline",
        "share",
        "samples whose tokens, up to where the text ends, are the very same as the baseline's.",
        mean_of(_equal),
        "baseline_equal",
        share_bounds(_equal),
    ),
)
