"""Speed by name: every published meaning of TPF, TPS and latency over the same stored facts.

The same word means different counts in different repositories (which tokens, which forwards, which
clock, which mean), so a number is always asked for by a definition's name (`definitions`), and its
text says what it counts. A value that the facts do not define (no sample, no time after the first
step) is None. Scores live in `accuracy`, acceptance of drafts in `acceptance`.
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


def allocated(fact: SampleStats) -> float:
    return fact.allocated or 0


def committed(fact: SampleStats) -> float:
    return fact.committed or 0


def content(fact: SampleStats) -> float:
    return fact.content or 0


def emitted(fact: SampleStats) -> float:
    return fact.emitted or 0


def forwards(fact: SampleStats) -> float:
    return fact.forwards or 0


def fast_dllm_forwards(fact: SampleStats) -> float:
    return forwards(fact) + (fact.idle or 0)


def dinfer_forwards(fact: SampleStats) -> float:
    return forwards(fact) + (fact.idle_dinfer or 0)


def rounds(fact: SampleStats) -> float:
    """Forwards as LoPA counts them: its last, empty round included."""
    return forwards(fact) + 1


def seconds(fact: SampleStats) -> float:
    return fact.seconds or 0.0


def steps_s(fact: SampleStats) -> float:
    return fact.steps_s or 0.0


def later_s(fact: SampleStats) -> float:
    """Seconds after the first step; 0 for a sample that took one step only.

    A served engine's steps are unknown; its first ends with the first content.
    """
    return 0.0 if fact.forwards in (0, 1) else seconds(fact) - (fact.first_step_s or 0.0)


def rows(fact: SampleStats) -> float:
    return fact.rows or 0


def forced(fact: SampleStats) -> float:
    return fact.forced or 0


def baseline_s(fact: SampleStats) -> float:
    return fact.baseline_s or 0.0


def equal(fact: SampleStats) -> float:
    return bool(fact.baseline_equal)


_TAIL = "decoded tokens of all opened blocks (what follows the end included)"
_LATER = f"{_TAIL} ÷ (generation time − first step)"
ALL = (
    MetricDefinition(
        "tpf/committed",
        "tokens/forward",
        f"{_TAIL} ÷ forwards; ratio of sums over samples.",
        total_ratio(committed, forwards),
        fact="forwards",
    ),
    MetricDefinition(
        "tpf/emitted",
        "tokens/forward",
        "tokens before the first reason to stop ÷ forwards; ratio of sums over samples.",
        total_ratio(emitted, forwards),
        fact="forwards",
    ),
    MetricDefinition(
        "tpf/lopa",
        "tokens/forward",
        "positions of all opened blocks ÷ (forwards + 1 per sample), as LoPA's single-device "
        "script counts; ratio of sums over samples; k + 1 branches are one forward.",
        total_ratio(allocated, rounds),
        fact="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_dist",
        "tokens/forward",
        f"{_TAIL} ÷ (forwards + 1 per sample), as LoPA-Dist counts; ratio of sums over samples.",
        total_ratio(committed, rounds),
        fact="forwards",
    ),
    MetricDefinition(
        "tpf/lopa_coder",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards, as LoPA's DiffuCoder script "
        "counts; ratio of sums over samples.",
        total_ratio(content, forwards),
        fact="forwards",
    ),
    MetricDefinition(
        "tpf/dinfer",
        "tokens/forward",
        "decoded tokens that are neither end nor padding ÷ forwards as dInfer counts them (see "
        "forwards/dinfer); mean over samples of the ratio.",
        mean_ratio(content, dinfer_forwards),
        fact="idle_dinfer",
    ),
    MetricDefinition(
        "tps/decode",
        "tokens/s",
        "tokens before the first reason to stop ÷ time of the forwards and what belongs to them; "
        "ratio of sums over samples.",
        total_ratio(emitted, steps_s),
        fact="forwards",
        timed=True,
    ),
    MetricDefinition(
        "tps/e2e",
        "tokens/s",
        "tokens before the first reason to stop ÷ whole generation time (tokenisation and disk "
        "outside); ratio of sums over samples.",
        total_ratio(emitted, seconds),
        fact="emitted",
        timed=True,
    ),
    MetricDefinition(
        "tps/no_first_step",
        "tokens/s",
        f"LoPA-Dist's average TPS: {_LATER}; mean over samples of the ratio.",
        mean_ratio(committed, later_s),
        fact="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/max",
        "tokens/s",
        f"LoPA-Dist's maximum TPS: {_LATER} of the fastest sample.",
        best_ratio(committed, later_s, 1),
        fact="committed",
        timed=True,
    ),
    MetricDefinition(
        "tps/top10",
        "tokens/s",
        f"LoPA-Dist's top-10 TPS: {_LATER}; mean of the ten fastest samples.",
        best_ratio(committed, later_s, 10),
        fact="committed",
        timed=True,
    ),
    MetricDefinition(
        "latency/mean",
        "s",
        "generation time of a sample; mean over samples.",
        mean_of(seconds),
        timed=True,
    ),
    MetricDefinition(
        "latency/p50",
        "s",
        "generation time of a sample; median over samples.",
        percentile_of(seconds, 50),
        timed=True,
    ),
    MetricDefinition(
        "latency/p95",
        "s",
        "generation time of a sample; 95th percentile over samples.",
        percentile_of(seconds, 95),
        timed=True,
    ),
    MetricDefinition(
        "latency/no_first_step",
        "s",
        "LoPA-Dist's latency: generation time − first step (of a served engine: to its first "
        "content); mean over samples.",
        mean_of(later_s),
        timed=True,
    ),
    MetricDefinition(
        "step_ms",
        "ms",
        "time of the forwards and what belongs to them ÷ forwards; ratio of sums over samples.",
        total_ratio(lambda fact: 1000 * steps_s(fact), forwards),
        fact="forwards",
        timed=True,
    ),
    MetricDefinition(
        "forwards/mean",
        "forwards",
        "forwards of a sample; mean over samples.",
        mean_of(forwards),
        fact="forwards",
    ),
    MetricDefinition(
        "forwards/fast_dllm",
        "forwards",
        "forwards of a sample as Fast-dLLM's block loops count: with the prefix or dual cache one "
        "more for each block that the forward renewing the cache filled; mean over samples.",
        mean_of(fast_dllm_forwards),
        fact="idle",
    ),
    MetricDefinition(
        "forwards/dinfer",
        "forwards",
        "forwards of a sample as dInfer's block loop counts as released: the same, and rounds run "
        "in groups of masks ÷ 8 (1 to 4) of which those after the last mask count too; mean over "
        "samples.",
        mean_of(dinfer_forwards),
        fact="idle_dinfer",
    ),
    MetricDefinition(
        "row_cost",
        "positions/token",
        "branches × positions fed, summed over forwards ÷ tokens before the first reason to stop; "
        "ratio of sums over samples: what the tokens per forward were bought with.",
        total_ratio(rows, emitted),
        fact="rows",
    ),
    MetricDefinition(
        "forced_steps",
        "share",
        "positions the stall rule committed because the selector chose none ÷ decoded positions.",
        total_ratio(forced, committed),
        fact="forced",
    ),
    MetricDefinition(
        "empty_rate", "share", "samples whose text is blank.", mean_of(lambda fact: fact.empty)
    ),
    MetricDefinition(
        "end_only_rate",
        "share",
        "samples whose decoded tokens are all end or padding.",
        mean_of(lambda fact: committed(fact) > 0 and fact.content == 0),
        fact="content",
    ),
    MetricDefinition(
        "truncated_rate",
        "share",
        "samples that nothing but the length ended.",
        mean_of(lambda fact: fact.truncated),
    ),
    MetricDefinition(
        "speedup/baseline",
        "×",
        "generation time of the baseline, which decodes every sample in the same run, in "
        "alternating order ÷ generation time; ratio of sums over samples.",
        total_ratio(baseline_s, seconds),
        "baseline_s",
        timed=True,
    ),
    MetricDefinition(
        "equal/baseline",
        "share",
        "samples whose tokens, up to where the text ends, are the very same as the baseline's.",
        mean_of(equal),
        "baseline_equal",
        share_bounds(equal),
    ),
)
