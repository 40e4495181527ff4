"""Acceptance of draft tokens by name, and the time of a round: functions of the rounds' facts.

A round is one verification: n tokens proposed, a accepted, and one more of the target's own unless
an accepted token ends the text. Published numbers differ in what they count (bonus or not, prefix
survival or conditional acceptance) and in the mean they take (over rounds or over samples), so a
number is asked for by name. The prefill's token counts nowhere.
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


class Round(NamedTuple):
    """Tokens proposed to the target, accepted of them, and committed in all."""

    proposed: int
    accepted: int
    committed: int


def rounds(generation: Generation) -> list[Round]:
    """The verifications of a generation; a proposal cut by an accepted end token counts as cut."""
    return rounds_of(generation.trace, generation.born)


def rounds_of(trace: Trace, born: Sequence[int]) -> list[Round]:
    """The same from a stored sample's columns."""
    new = Counter(born)
    found = []
    for index, forward in enumerate(trace.forwards):
        if forward.kind == ForwardKind.VERIFY:
            ended = new[index] == forward.accepted
            proposed = forward.accepted if ended else forward.proposed
            found.append(Round(proposed, forward.accepted, new[index]))
    return found


LOOP = {
    ForwardKind.PREFILL,
    ForwardKind.DRAFT,
    ForwardKind.HEAD,
    ForwardKind.VERIFY,
}  # what the draft-verify loop consists of


def of_trace(trace: Trace, born: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """A sample's facts of drafting and verifying, by name; none where another loop decoded it."""
    rows = trace.forwards
    if not rows or any(row.kind not in LOOP or row.masks for row in rows):
        return {}
    verified = [(index, row) for index, row in enumerate(rows) if row.kind == ForwardKind.VERIFY]
    spent = {kind: sum(row.ms for row in rows if row.kind == kind) / 1000 for kind in LOOP}
    timed = any(spent.values())
    facts: dict[str, Any] = {f"{kind}_s": spent[kind] for kind in LOOP if timed}
    facts["rounds"] = [list(found) for found in rounds_of(trace, born)]
    if all(row.survival for _, row in verified):
        facts["survival"] = [list(row.survival) for _, row in verified]
    if all(len(row.drafted) >= row.proposed for _, row in verified):  # not so in older traces
        starts = [sum(at < index for at in born) for index, _ in verified]
        pairs = zip(verified, starts, strict=True)
        facts["right"] = [agreeing(row.drafted, ids[start:]) for (_, row), start in pairs]
    return facts


def agreeing(drafted: Sequence[int], text: Sequence[int]) -> int:
    """How many of the first drafted tokens are those of the text."""
    pairs = zip(drafted, text, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@dataclass(frozen=True)
class Acceptance:
    """What one sample's rounds came to; the positions of lists count from 0.

    proposed: rounds that proposed a token at a position; reached: those of them that accepted all
    tokens before it; accepted: those that accepted it too.
    """

    rounds: int
    committed: int
    proposed: tuple[int, ...]
    reached: tuple[int, ...]
    accepted: tuple[int, ...]


def count(found: Sequence[Round]) -> Acceptance:
    """The facts of one sample's rounds."""
    longest = max((r.proposed for r in found), default=0)
    return Acceptance(
        rounds=len(found),
        committed=sum(r.committed for r in found),
        proposed=tuple(sum(r.proposed > k for r in found) for k in range(longest)),
        reached=tuple(sum(r.proposed > k <= r.accepted for r in found) for k in range(longest)),
        accepted=tuple(sum(r.accepted > k for r in found) for k in range(longest)),
    )


Counts = Sequence[Acceptance]


def counted(facts: Sequence[SampleStats]) -> list[Acceptance]:
    """The counts of every sample."""
    return [count([Round(*values) for values in fact.rounds or ()]) for fact in facts]


def ratio(top: float, bottom: float) -> float | None:
    """Their quotient, None over nothing."""
    return top / bottom if bottom else None


def summed(columns: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position of lists of different lengths."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def survival(counts: Counts) -> list[float]:
    """By position k: rounds that accepted more than k tokens ÷ rounds that proposed so many.

    DeepSpec prints this as accept_rate@k.
    """
    accepted, proposed = summed([c.accepted for c in counts]), summed([c.proposed for c in counts])
    return [a / p for a, p in zip(accepted, proposed, strict=True)]


def conditional(counts: Counts) -> list[tuple[float | None, int]]:
    """By position: share accepted of the rounds that accepted all before it, and their number."""
    accepted, reached = summed([c.accepted for c in counts]), summed([c.reached for c in counts])
    return [(ratio(a, r), r) for a, r in zip(accepted, reached, strict=True)]


def length_per_sample(facts: Sequence[SampleStats]) -> float | None:
    """Mean over samples of tokens per round."""
    means = [c.committed / c.rounds for c in counted(facts) if c.rounds]
    return fmean(means) if means else None


def rounds_number(fact: SampleStats) -> float:
    return len(fact.rounds or ())


def proposed(fact: SampleStats) -> float:
    return sum(proposed for proposed, _, _ in fact.rounds or ())


def accepted(fact: SampleStats) -> float:
    return sum(accepted for _, accepted, _ in fact.rounds or ())


def committed(fact: SampleStats) -> float:
    return sum(committed for _, _, committed in fact.rounds or ())


def verified(fact: SampleStats) -> float:
    """Positions the target judged: draft tokens, and one more a round."""
    return proposed(fact) + rounds_number(fact)


def per(
    name: str, unit: str, text: str, top: PerSample, bottom: PerSample = rounds_number
) -> MetricDefinition:
    """A ratio of sums over samples."""
    return MetricDefinition(name, unit, text, total_ratio(top, bottom), "rounds")


def of_time(name: str, text: str, seconds: PerSample) -> MetricDefinition:
    """Milliseconds a round."""
    found = per(name, "ms", f"{text} ÷ verifications.", lambda fact: 1000 * seconds(fact))
    return replace(found, timed=True)


ALL = (
    per(
        "acceptance/length",
        "tokens/round",
        "tokens committed by verifications, the target's own included ÷ verifications; ratio of "
        "sums over samples, as DeepSpec counts.",
        committed,
    ),
    MetricDefinition(
        "acceptance/length_per_sample",
        "tokens/round",
        "the same per sample; mean over samples, as z-lab's benchmark counts.",
        length_per_sample,
        "rounds",
    ),
    per(
        "acceptance/drafts",
        "tokens/round",
        "draft tokens accepted, without the target's own ÷ verifications.",
        accepted,
    ),
    per(
        "acceptance/rate",
        "share",
        "draft tokens accepted ÷ draft tokens verified, without the target's own.",
        accepted,
        proposed,
    ),
    per(
        "acceptance/verify_rate",
        "share",
        "tokens committed by verifications ÷ positions verified (draft tokens and one more each), "
        "the acceptance rate of DSpark's figure 5.",
        committed,
        verified,
    ),
    per(
        "acceptance/verified",
        "tokens/round",
        "positions verified (draft tokens and one more each) ÷ verifications, the tokens per step "
        "of DSpark's figure 5.",
        verified,
    ),
    per(
        "acceptance/proposed",
        "tokens/round",
        "draft tokens verified ÷ verifications.",
        proposed,
    ),
    of_time(
        "round_ms",
        "time of drafting and verifying, the prefill left out",
        lambda fact: (fact.draft_s or 0) + (fact.head_s or 0) + (fact.verify_s or 0),
    ),
    of_time(
        "round_ms/draft",
        "time of the drafter's network; of a block drafter without its sequential head",
        lambda fact: fact.draft_s or 0,
    ),
    of_time(
        "round_ms/head",
        "time of a block drafter's sequential head, which draws token after token; 0 for a "
        "drafter without one",
        lambda fact: fact.head_s or 0,
    ),
    of_time(
        "round_ms/verify",
        "time of the target's forward, acceptance, and of a draft that needs no network",
        lambda fact: fact.verify_s or 0,
    ),
)


def family(name: str, text: str, asked: Callable[[Acceptance], Sequence[int]]) -> MetricFamily:
    """Rounds that accepted a token at a position ÷ rounds `asked` counts there, with Wilson's
    interval over rounds, those of one sample being alike.
    """

    def share(k: int) -> TotalRatio:
        def at(fact: SampleStats) -> tuple[int, int]:
            (counts,) = counted([fact])
            there = len(counts.proposed) >= k
            return (counts.accepted[k - 1], asked(counts)[k - 1]) if there else (0, 0)

        return total_ratio(lambda fact: at(fact)[0], lambda fact: at(fact)[1])

    def bounds(k: int) -> IntervalFunction:
        def wilson(facts: Sequence[SampleStats]) -> Interval | None:
            found = [share(k).amounts(fact) for fact in facts]
            happened, asked_of = ([int(pair[i]) for pair in found] for i in (0, 1))
            return accuracy.wilson_of_clusters(happened, asked_of) if any(asked_of) else None

        return wilson

    return MetricFamily(name, "share", text, share, "rounds", bounds)


FAMILIES = (
    family(
        "acceptance/conditional",
        "rounds that accepted the token ÷ rounds that proposed it and accepted all before it.",
        lambda counts: counts.reached,
    ),
    family(
        "acceptance/survival",
        "rounds that accepted the token and all before it ÷ rounds that proposed it; DeepSpec "
        "prints this as accept_rate@k.",
        lambda counts: counts.proposed,
    ),
)
