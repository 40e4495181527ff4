"""Acceptance of draft tokens by name: pure functions of what a sample's trace and tokens hold.

A round is one verification: n tokens proposed, a accepted, and one more of the target's own unless
an accepted token ends the text. Published numbers differ in what they count (bonus or not, prefix
survival or conditional acceptance) and in the mean they take (over rounds or over samples), so a
number is asked for by name. The prefill's token counts nowhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

from dllm_bench.core.request import DllmBenchError, Generation
from dllm_bench.core.trace import Kind, Trace


@dataclass(frozen=True)
class Round:
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
        if forward.kind == Kind.VERIFY:
            ended = new[index] == forward.accepted
            proposed = forward.accepted if ended else forward.proposed
            found.append(Round(proposed, forward.accepted, new[index]))
    return found


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


Facts = Sequence[Acceptance]


def ratio(top: float, bottom: float) -> float | None:
    """Their quotient, None over nothing."""
    return top / bottom if bottom else None


def summed(columns: Sequence[Sequence[int]]) -> list[int]:
    """Sums by position of lists of different lengths."""
    return [sum(values) for values in zip_longest(*columns, fillvalue=0)]


def survival(facts: Facts) -> list[float]:
    """By position k: rounds that accepted more than k tokens ÷ rounds that proposed so many.

    DeepSpec prints this as accept_rate@k.
    """
    accepted, proposed = summed([f.accepted for f in facts]), summed([f.proposed for f in facts])
    return [a / p for a, p in zip(accepted, proposed, strict=True)]


def conditional(facts: Facts) -> list[tuple[float | None, int]]:
    """By position: share accepted of the rounds that accepted all before it, and their number."""
    accepted, reached = summed([f.accepted for f in facts]), summed([f.reached for f in facts])
    return [(ratio(a, r), r) for a, r in zip(accepted, reached, strict=True)]


def length(facts: Facts) -> float | None:
    return ratio(sum(f.committed for f in facts), sum(f.rounds for f in facts))


def length_per_sample(facts: Facts) -> float | None:
    means = [f.committed / f.rounds for f in facts if f.rounds]
    return fmean(means) if means else None


def drafts_accepted(facts: Facts) -> float | None:
    return ratio(sum(sum(f.accepted) for f in facts), sum(f.rounds for f in facts))


def verify_rate(facts: Facts) -> float | None:
    verified = sum(sum(f.proposed) + f.rounds for f in facts)
    return ratio(sum(f.committed for f in facts), verified)


def proposed(facts: Facts) -> float | None:
    return ratio(sum(sum(f.proposed) for f in facts), sum(f.rounds for f in facts))


@dataclass(frozen=True)
class Definition:
    """A named number: its unit, what it counts in words, and the function over samples."""

    name: str
    unit: str
    text: str
    function: Callable[[Facts], float | None]


_ALL = (
    Definition(
        "acceptance/length",
        "tokens/round",
        "tokens committed by verifications, the target's own included ÷ verifications; ratio of "
        "sums over samples, as DeepSpec counts.",
        length,
    ),
    Definition(
        "acceptance/length_per_sample",
        "tokens/round",
        "the same per sample; mean over samples, as z-lab's benchmark counts.",
        length_per_sample,
    ),
    Definition(
        "acceptance/drafts",
        "tokens/round",
        "draft tokens accepted, without the target's own ÷ verifications.",
        drafts_accepted,
    ),
    Definition(
        "acceptance/verify_rate",
        "share",
        "tokens committed by verifications ÷ positions verified (draft tokens and one more each).",
        verify_rate,
    ),
    Definition(
        "acceptance/proposed",
        "tokens/round",
        "draft tokens verified ÷ verifications.",
        proposed,
    ),
)
DEFINITIONS: dict[str, Definition] = {definition.name: definition for definition in _ALL}


def measure(name: str, facts: Facts) -> float | None:
    """The number called `name` over `facts`."""
    if name not in DEFINITIONS:
        known = ", ".join(DEFINITIONS)
        raise DllmBenchError(
            f"No acceptance definition is called {name!r}; choose one of: {known}."
        )
    return DEFINITIONS[name].function(facts)


def phase_ms(trace: Trace) -> dict[str, float]:
    """Milliseconds a sample spent by kind of forward: prefill, draft, verify."""
    spent: dict[str, float] = {}
    for forward in trace.forwards:
        spent[str(forward.kind)] = spent.get(str(forward.kind), 0.0) + forward.ms
    return spent
