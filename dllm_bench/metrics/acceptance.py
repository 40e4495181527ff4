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
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_bench.core.request import Generation
from dllm_bench.core.trace import ForwardKind, Trace
from dllm_bench.metrics.metric import Column, MetricDefinition, MetricFamily, Ratio

if TYPE_CHECKING:
    from pandas import DataFrame, Series


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


def over_rounds(count: Callable[[DraftRound], float]) -> Column:
    """Sum over the rounds of each sample."""

    def summed(samples: DataFrame) -> Series:
        return samples.rounds.map(lambda rounds: sum(count(DraftRound(*r)) for r in rounds or ()))

    return summed


_round_count = over_rounds(lambda r: 1)
_proposed = over_rounds(lambda r: r.proposed)
_accepted = over_rounds(lambda r: r.accepted)
_committed = over_rounds(lambda r: r.committed)
_verified = over_rounds(lambda r: r.proposed + 1)
"""Positions the target judged: the draft tokens, and one more per round."""


def per_round(
    name: str, unit: str, text: str, top: Column, bottom: Column = _round_count
) -> MetricDefinition:
    """A ratio of sums over samples, by default per round."""
    return MetricDefinition(name, unit, text, Ratio(top, bottom), "rounds")


def time_per_round(name: str, text: str, *columns: str) -> MetricDefinition:
    """Milliseconds per round: the seconds in these columns."""

    def milliseconds(samples: DataFrame) -> Series:
        return 1000 * samples[list(columns)].sum(axis=1)

    metric = per_round(name, "ms", f"{text} ÷ verifications.", milliseconds)
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
        Ratio(_committed, _round_count, each=True),
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
        "draft_s",
        "head_s",
        "verify_s",
    ),
    time_per_round(
        "round_ms/draft",
        "time of the drafter's network; of a block drafter without its sequential head",
        "draft_s",
    ),
    time_per_round(
        "round_ms/head",
        "time of a block drafter's sequential head, which draws token after token; 0 for a "
        "drafter without one",
        "head_s",
    ),
    time_per_round(
        "round_ms/verify",
        "time of the target's forward, acceptance, and of a draft that needs no network",
        "verify_s",
    ),
)


def position_share(name: str, text: str, counts: Callable[[int, int, int], bool]) -> MetricFamily:
    """Rounds that accepted the token at a position ÷ those that count there, by (tokens proposed,
    tokens accepted, position from 1).

    The interval is Wilson's, corrected for the rounds of one sample being alike.
    """

    def share(k: int) -> Ratio:
        return Ratio(
            over_rounds(lambda r: min(r.proposed, r.accepted) >= k),
            over_rounds(lambda r: counts(r.proposed, r.accepted, k)),
        )

    return MetricFamily(name, "share", text, share, "rounds", is_share=True)


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
