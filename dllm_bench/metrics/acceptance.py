"""Acceptance metrics of speculative decoding, and the time of a round.

A round is one verification: n tokens proposed, a accepted, and one more token of the target's own
unless an accepted token ends the text. Published numbers differ in what they count (with or without
the target's own token, prefix survival or conditional acceptance) and in how they average (over
rounds or over samples), so each has its own name. The token from the prefill is never counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

from dllm_bench.core.request import Generation
from dllm_bench.core.trace import Forward, ForwardKind, Trace
from dllm_bench.metrics.metric import Column, MetricFamily, Ratio

if TYPE_CHECKING:
    from pandas import DataFrame, Series


class DraftRound(NamedTuple):
    """One verification, in tokens."""

    proposed: int  # draft tokens verified
    accepted: int  # draft tokens accepted
    committed: int  # accepted tokens and the target's own
    depth: int | None = None  # tokens of the longest path of a tree; None: a chain

    @property
    def longest(self) -> int:
        """Length of the longest proposed chain."""
        return self.proposed if self.depth is None else self.depth


def rounds(generation: Generation) -> list[DraftRound]:
    """Return the rounds of a generation; see `rounds_of`."""
    return rounds_of(generation.trace, generation.born)


def rounds_of(trace: Trace, born: Sequence[int]) -> list[DraftRound]:
    """Return the rounds of a stored sample, from its trace and the forward that committed each
    token.

    If an accepted end token cut a draft, only the tokens up to it count as proposed.
    """
    new = Counter(born)
    rounds = []
    for index, forward in enumerate(trace.forwards):
        if forward.kind == ForwardKind.VERIFY or forward.proposed:
            ended = new[index] == forward.accepted
            proposed = forward.accepted if ended else forward.proposed
            depth = proposed if ended else max(depths(forward.parents[:proposed]))
            chain = DraftRound(proposed, forward.accepted, new[index])
            rounds.append(chain._replace(depth=depth) if forward.parents else chain)
    return rounds


def depths(parents: Sequence[int]) -> list[int]:
    """Return the path lengths, in tokens, to the anchor (0) and to each token of a tree."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


LOOP = {
    ForwardKind.PREFILL,
    ForwardKind.DRAFT,
    ForwardKind.SELF_DRAFT,
    ForwardKind.HEAD,
    ForwardKind.VERIFY,
}
"""The kinds of forward that the draft-verify loop makes."""


def speculative_columns(trace: Trace, born: Sequence[int], ids: Sequence[int]) -> dict[str, Any]:
    """Return the `SampleStats` columns about drafts of one sample; empty if there were none."""
    rows = trace.forwards
    if any(row.masks and row.proposed for row in rows):  # a masked model that drafts for itself
        spent_s = sum(row.ms for row in rows if row.proposed) / 1000
        return {"rounds": _stored_rounds(trace, born), **({"verify_s": spent_s} if spent_s else {})}
    if not rows or any(row.kind not in LOOP or row.masks for row in rows):
        return {}
    verified = [(index, row) for index, row in enumerate(rows) if row.kind == ForwardKind.VERIFY]
    spent = {kind: sum(row.ms for row in rows if row.kind == kind) / 1000 for kind in LOOP}
    spent[ForwardKind.DRAFT] += spent.pop(ForwardKind.SELF_DRAFT)
    timed = any(spent.values())
    columns: dict[str, Any] = {f"{kind}_s": seconds for kind, seconds in spent.items() if timed}
    columns["rounds"] = _stored_rounds(trace, born)
    if all(row.survival for _, row in verified):
        columns["survival"] = [list(row.survival) for _, row in verified]
    if all(len(row.drafted) >= row.proposed for _, row in verified):  # older traces lack the rest
        starts = [sum(forward < index for forward in born) for index, _ in verified]
        pairs = zip(verified, starts, strict=True)
        columns["right"] = [right_tokens(row, ids[start:]) for (_, row), start in pairs]
    return columns


def _stored_rounds(trace: Trace, born: Sequence[int]) -> list[list[int]]:
    return [[n for n in one if n is not None] for one in rounds_of(trace, born)]


def right_tokens(row: Forward, text: Sequence[int]) -> int:
    """Return how many first tokens of a text a draft matches, as a chain or along a path of a
    tree."""
    if not row.parents:
        return common_prefix(row.drafted, text)
    places = {pair: at for at, pair in enumerate(zip(row.parents, row.drafted, strict=True), 1)}
    count = place = 0
    while count < len(text) and (place, text[count]) in places:
        place, count = places[place, text[count]], count + 1
    return count


def common_prefix(drafted: Sequence[int], text: Sequence[int]) -> int:
    """Return the length of the common prefix of a draft and a text."""
    pairs = zip(drafted, text, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def longest_draft(samples: DataFrame) -> int:
    """Return the length of the longest proposed chain; 0 without drafts."""
    rounds = (DraftRound(*one) for rounds in samples.rounds for one in rounds or ())
    return max((one.longest for one in rounds), default=0)


def over_rounds(count: Callable[[DraftRound], float]) -> Column:
    """Return a column: the sum over the rounds of each sample."""

    def summed(samples: DataFrame) -> Series:
        return samples.rounds.map(lambda rounds: sum(count(DraftRound(*r)) for r in rounds or ()))

    return summed


COLUMNS: dict[str, Column] = {
    "round_count": over_rounds(lambda r: 1),
    "proposed_drafts": over_rounds(lambda r: r.proposed),
    "accepted_drafts": over_rounds(lambda r: r.accepted),
    "round_tokens": over_rounds(lambda r: r.committed),
    "verified_positions": over_rounds(lambda r: r.proposed + 1),
    "round_ms": lambda s: 1000 * s[["draft_s", "head_s", "verify_s"]].sum(axis=1),
    "draft_ms": lambda s: 1000 * s.draft_s.fillna(0),
    "head_ms": lambda s: 1000 * s.head_s.fillna(0),
    "verify_ms": lambda s: 1000 * s.verify_s.fillna(0),
}
"""Columns of definitions.yaml about rounds, by name."""


def position_share(name: str, text: str, counts: Callable[[int, int, int], bool]) -> MetricFamily:
    """Return the share of rounds that accepted the token at a position. `counts` selects rounds by
    (longest chain proposed, tokens accepted, position from 1).

    The interval is Wilson's, corrected for correlation between the rounds of one sample.
    """

    def share(k: int) -> Ratio:
        return Ratio(
            over_rounds(lambda r: min(r.proposed, r.accepted) >= k),
            over_rounds(lambda r: counts(r.longest, r.accepted, k)),
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
