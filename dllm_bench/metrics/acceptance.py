"""Acceptance metrics of speculative decoding, and the time of a round.

A round is one verification: n tokens proposed, a accepted, and one more token of the target's own
unless an accepted token ends the text. Published numbers differ in what they count (with the
target's own token or without, prefix survival or conditional acceptance) and in the mean they take
(over rounds or over samples), so each has a name of its own. The token that the prefill yields is
never counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest
from statistics import fmean
from typing import Any, NamedTuple

from dllm_bench.core.request import Generation
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.metrics import accuracy
from dllm_bench.metrics.metric import (
    Interval,
    IntervalFunction,
    MetricDefinition,
    MetricFamily,
    PerSample,
    TotalRatio,
    total_ratio,
)
from dllm_bench.metrics.sample_stats import SampleStats


class DraftRound(NamedTuple):
    """One verification, in tokens."""

    proposed: int  # draft tokens verified
    accepted: int  # draft tokens accepted
    committed: int  # accepted tokens and the target's own


def rounds(generation: Generation) -> list[DraftRound]:
    """The rounds of a generation; see `rounds_of`."""
    return rounds_of(generation.trace, generation.born)


def rounds_of(trace: Trace, born: Sequence[int]) -> list[DraftRound]:
    """The rounds of a stored sample, from its trace and the forward that committed each token.

    Where an accepted end token cut a draft, only the tokens up to it count as proposed.
    """
    new = Counter(born)
    rounds = []
    for index, forward in enumerate(trace.forwards):
        if forward.kind == ForwardKind.VERIFY or forward.proposed:
            ended = new[index] == forward.accepted
            proposed = forward.accepted if ended else forward.proposed
            rounds.append(DraftRound(proposed, forward.accepted, new[index]))
    return rounds


LOOP = {
    ForwardKind.PREFILL,
    ForwardKind.DRAFT,
    ForwardKind.HEAD,
    ForwardKind.VERIFY,
}
"""The kinds of forward that the draft-verify loop makes."""


def speculative_columns(trace: Trace, born: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """The `SampleStats` columns about drafts of one sample; empty if there were none."""
    rows = trace.forwards
    if any(row.masks and row.proposed for row in rows):  # a masked model that drafts for itself
        spent_s = sum(row.ms for row in rows if row.proposed) / 1000
        found = [list(one) for one in rounds_of(trace, born)]
        return {"rounds": found, **({"verify_s": spent_s} if spent_s else {})}
    if not rows or any(row.kind not in LOOP or row.masks for row in rows):
        return {}
    verified = [(index, row) for index, row in enumerate(rows) if row.kind == ForwardKind.VERIFY]
    spent = {kind: sum(row.ms for row in rows if row.kind == kind) / 1000 for kind in LOOP}
    timed = any(spent.values())
    columns: dict[str, Any] = {f"{kind}_s": spent[kind] for kind in LOOP if timed}
    columns["rounds"] = [list(one) for one in rounds_of(trace, born)]
    if all(row.survival for _, row in verified):
        columns["survival"] = [list(row.survival) for _, row in verified]
    if all(len(row.drafted) >= row.proposed for _, row in verified):  # older traces lack the rest
        starts = [sum(forward < index for forward in born) for index, _ in verified]
        pairs = zip(verified, starts, strict=True)
        columns["right"] = [common_prefix(row.drafted, ids[start:]) for (_, row), start in pairs]
    return columns


def common_prefix(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Number of first tokens in which a draft and a text are equal."""
    pairs = zip(drafted, text, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds of one sample; tuples have one entry per position of a draft."""

    rounds: int
    committed: int  # tokens
    proposed: tuple[int, ...]  # rounds that proposed a token at the position
    reached: tuple[int, ...]  # of these, rounds that accepted all tokens before it
    accepted: tuple[int, ...]  # of these, rounds that accepted this token too


def acceptance_of(rounds: Sequence[DraftRound]) -> Acceptance:
    """The counts over one sample's rounds."""
    longest = max((r.proposed for r in rounds), default=0)
    return Acceptance(
        rounds=len(rounds),
        committed=sum(r.committed for r in rounds),
        proposed=tuple(sum(r.proposed > k for r in rounds) for k in range(longest)),
        reached=tuple(sum(r.proposed > k <= r.accepted for r in rounds) for k in range(longest)),
        accepted=tuple(sum(r.accepted > k for r in rounds) for k in range(longest)),
    )


Counts = Sequence[Acceptance]


def acceptance_by_sample(samples: Sequence[SampleStats]) -> list[Acceptance]:
    """The counts of every sample."""
    return [
        acceptance_of([DraftRound(*values) for values in sample.rounds or ()]) for sample in samples
    ]


def ratio(top: float, bottom: float) -> float | None:
    """top / bottom; None if bottom is 0."""
    return top / bottom if bottom else None


def sum_by_position(columns: Sequence[Sequence[int]]) -> list[int]:
    """Sums over columns of different lengths, position by position."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def survival_rates(counts: Counts) -> list[float]:
    """By position k: rounds that accepted more than k tokens ÷ rounds that proposed more than k.

    DeepSpec prints this as accept_rate@k.
    """
    accepted, proposed = (
        sum_by_position([c.accepted for c in counts]),
        sum_by_position([c.proposed for c in counts]),
    )
    return [a / p for a, p in zip(accepted, proposed, strict=True)]


def conditional_rates(counts: Counts) -> list[tuple[float | None, int]]:
    """By position: (share, n), where n rounds accepted all tokens before the position and `share`
    of them accepted its token too; None for n = 0.
    """
    accepted, reached = (
        sum_by_position([c.accepted for c in counts]),
        sum_by_position([c.reached for c in counts]),
    )
    return [(ratio(a, r), r) for a, r in zip(accepted, reached, strict=True)]


def length_per_sample(samples: Sequence[SampleStats]) -> float | None:
    """Mean over samples of tokens per round."""
    means = [c.committed / c.rounds for c in acceptance_by_sample(samples) if c.rounds]
    return fmean(means) if means else None


def _round_count(sample: SampleStats) -> float:
    return len(sample.rounds or ())


def _proposed(sample: SampleStats) -> float:
    return sum(proposed for proposed, _, _ in sample.rounds or ())


def _accepted(sample: SampleStats) -> float:
    return sum(accepted for _, accepted, _ in sample.rounds or ())


def _committed(sample: SampleStats) -> float:
    return sum(committed for _, _, committed in sample.rounds or ())


def _verified(sample: SampleStats) -> float:
    """Positions the target judged: the draft tokens, and one more per round."""
    return _proposed(sample) + _round_count(sample)


def per_round(
    name: str, unit: str, text: str, top: PerSample, bottom: PerSample = _round_count
) -> MetricDefinition:
    """A ratio of sums over samples, by default per round."""
    return MetricDefinition(name, unit, text, total_ratio(top, bottom), "rounds")


def time_per_round(name: str, text: str, seconds: PerSample) -> MetricDefinition:
    """Milliseconds per round."""
    metric = per_round(
        name, "ms", f"{text} ÷ verifications.", lambda sample: 1000 * seconds(sample)
    )
    return replace(metric, timed=True)


ALL = (
    per_round(
        "acceptance/length",
        "tokens/round",
        "tokens committed by verifications, the target's own included ÷ verifications; ratio of "
        "sums over samples, as DeepSpec counts.",
        _committed,
    ),
    MetricDefinition(
        "acceptance/length_per_sample",
        "tokens/round",
        "the same per sample; mean over samples, as z-lab's benchmark counts.",
        length_per_sample,
        "rounds",
    ),
    per_round(
        "acceptance/drafts",
        "tokens/round",
        "draft tokens accepted, without the target's own ÷ verifications.",
        _accepted,
    ),
    per_round(
        "acceptance/rate",
        "share",
        "draft tokens accepted ÷ draft tokens verified, without the target's own.",
        _accepted,
        _proposed,
    ),
    per_round(
        "acceptance/verify_rate",
        "share",
        "tokens committed by verifications ÷ positions verified (draft tokens and one more each), "
        "the acceptance rate of DSpark's figure 5.",
        _committed,
        _verified,
    ),
    per_round(
        "acceptance/verified",
        "tokens/round",
        "positions verified (draft tokens and one more each) ÷ verifications, the tokens per step "
        "of DSpark's figure 5.",
        _verified,
    ),
    per_round(
        "acceptance/proposed",
        "tokens/round",
        "draft tokens verified ÷ verifications.",
        _proposed,
    ),
    time_per_round(
        "round_ms",
        "time of drafting and verifying, the prefill left out",
        lambda sample: (sample.draft_s or 0) + (sample.head_s or 0) + (sample.verify_s or 0),
    ),
    time_per_round(
        "round_ms/draft",
        "time of the drafter's network; of a block drafter without its sequential head",
        lambda sample: sample.draft_s or 0,
    ),
    time_per_round(
        "round_ms/head",
        "time of a block drafter's sequential head, which draws token after token; 0 for a "
        "drafter without one",
        lambda sample: sample.head_s or 0,
    ),
    time_per_round(
        "round_ms/verify",
        "time of the target's forward, acceptance, and of a draft that needs no network",
        lambda sample: sample.verify_s or 0,
    ),
)


def position_share(name: str, text: str, counts: Callable[[int, int, int], bool]) -> MetricFamily:
    """Rounds that accepted the token at a position ÷ those that count there, by (tokens proposed,
    tokens accepted, position from 1).

    The interval is Wilson's, corrected for the rounds of one sample being alike.
    """

    def share(k: int) -> TotalRatio:
        return total_ratio(
            lambda sample: sum(min(one[:2]) >= k for one in sample.rounds or ()),
            lambda sample: sum(counts(one[0], one[1], k) for one in sample.rounds or ()),
        )

    def bounds(k: int) -> IntervalFunction:
        def wilson(samples: Sequence[SampleStats]) -> Interval | None:
            pairs = [share(k).amounts(sample) for sample in samples]
            accepted, totals = ([int(pair[i]) for pair in pairs] for i in (0, 1))
            return accuracy.wilson_of_clusters(accepted, totals) if any(totals) else None

        return wilson

    return MetricFamily(name, "share", text, share, "rounds", bounds)


FAMILIES = (
    position_share(
        "acceptance/conditional",
        "rounds that accepted the token ÷ rounds that proposed it and accepted all before it.",
        lambda proposed, accepted, k: k <= min(proposed, accepted + 1),
    ),
    position_share(
        "acceptance/survival",
        "rounds that accepted the token and all before it ÷ rounds that proposed it; DeepSpec "
        "prints this as accept_rate@k.",
        lambda proposed, accepted, k: k <= proposed,
    ),
)
