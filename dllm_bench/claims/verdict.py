"""Verdicts of claims: tests for and against each, Holm's correction over all, items still needed.

A claim of a difference is tested for it (two-sided), and against it: that an effect worth seeing is
excluded. A claim of no loss is tested for equivalence (two one-sided tests, TOST), against it (that
there is a loss), and for its one half: that a loss beyond the margin is excluded. The family is all
claims of `conf/claim`, whichever are shown; a claim whose runs are missing counts with p = 1, so
that making its runs changes no other verdict for the better. A claim that a table's items do not
settle is judged again from larger runs, where these are sealed; both looks count in the family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from enum import StrEnum
from itertools import islice, pairwise

from dllm_bench.claims.evidence import Evidence, Sides, chosen_sides, evidence_of
from dllm_bench.claims.spec import Claim, Direction, load_claim
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import LEVEL, holm
from dllm_bench.store.settings import SettingsCache
from dllm_bench.store.store import Store
from dllm_bench.tables.derive import leaves_of
from dllm_bench.tables.load import names_of
from dllm_bench.tables.plan import (
    CellState,
    PlannedCell,
    PlannedRun,
    distinct_runs,
)
from dllm_bench.tables.spec import Profile
from dllm_bench.tables.stored import StoredNames, StoredPlanner

POWER = 0.8
"""Chance to see the smallest effect worth seeing, with the items that are planned."""
SAME_RUNS = "the profile maps both sides to the same runs."
COMMAND = "dllm-bench claims"
SIZES = (120, *range(200, 1001, 100))
"""Items of larger runs: claims share them, and the generated tasks have at most 1000."""
CellsAt = Callable[[Sequence[Claim], int | None], list[list[PlannedCell]]]
"""The planned cells of each claim, with runs of that number of items; None: of the table's."""


class ClaimVerdict(StrEnum):
    """What the runs say about a claim."""

    CONFIRMED = "confirmed"  # shown, in the stated size if one is stated
    DIRECTION_ONLY = "direction only"  # shown, but smaller than stated or than worth seeing
    NOT_SETTLED = "not settled"  # the items do not suffice to tell
    CONTRADICTED = "contradicted"  # what the claim says is excluded
    UNTESTABLE = "not testable here"  # embedded models cannot tell, or have no such runs
    NOT_RUN = "not run"  # runs are missing


@dataclass(frozen=True)
class PValues:
    """The p-values of a claim's tests."""

    supports: float = 1.0
    """Of the claim being wrong: small if the runs show what it says."""
    refutes: float = 1.0
    """Of the claim being right: small if the runs exclude what it says."""
    no_loss: float = 1.0
    """For a claim of equality, of a loss beyond the margin: small if the runs exclude one."""


@dataclass(frozen=True)
class Judgement:
    """A claim with its verdict and what it rests on."""

    claim: Claim
    """The claim."""
    verdict: ClaimVerdict
    """The verdict."""
    why: str
    """The reason, as a sentence."""
    command: str
    """The one command that makes what is missing and prints the verdict."""
    sides: Sides | None = None
    """The cells compared; None if there is no effect."""
    evidence: Evidence | None = None
    """The effect; None if there is none."""
    tests: PValues = PValues()
    """Its p-values after Holm's correction."""
    needed: int | None = None
    """Items a run for 80 % power; None if the pilot does not say."""
    runs: tuple[PlannedRun, ...] = ()
    """All runs of the claim."""

    @property
    def p_value(self) -> float:
        """The corrected p-value of the test that the verdict follows."""
        if self.verdict is ClaimVerdict.CONTRADICTED:
            return self.tests.refutes
        is_half = self.verdict is ClaimVerdict.DIRECTION_ONLY
        return min(self.tests.supports, self.tests.no_loss) if is_half else self.tests.supports

    @property
    def items(self) -> int:
        """Items of one run."""
        counts = [len(run.record.columns["id"]) for run in self.runs if run.record]
        return min(counts, default=0)


def judge_claims(
    claims: Sequence[Claim], planned: Sequence[Sequence[PlannedCell]], flags: str
) -> list[Judgement]:
    """All claims of the family, each with its planned cells (none for an untestable one).

    flags: the options that chose the profile, for the commands.
    """
    raw = [_measured(*pair, flags) for pair in zip(claims, planned, strict=True)]
    family = [
        p for one in raw if not one.claim.untestable for p in astuple(_tests(one))[: tests_of(one)]
    ]
    corrected, level = iter(holm(family)), (1 - LEVEL) / max(1, len(family))
    return [_judged(one, PValues(*islice(corrected, tests_of(one))), level) for one in raw]


def judge_stored(
    profile: Profile, store: Store, settings: SettingsCache, names: StoredNames | None = None
) -> list[Judgement]:
    """All claims of `conf/claim`, from the runs that are stored.

    names: the names of stored runs; where these show that no run of a claim is stored, it is not
        composed, and counts as not run even if its runs would be unavailable.
    """

    def cells_at(claims: Sequence[Claim], size: int | None) -> list[list[PlannedCell]]:
        sized = profile.limited(size) if size else profile
        planner = StoredPlanner(sized, settings, store, names or StoredNames())
        return [[] if one.untestable else planner.plan(one.cells()) for one in claims]

    return judge_in_turn([load_claim(name) for name in names_of("claim")], cells_at, profile.flags)


def judge_in_turn(claims: Sequence[Claim], cells_at: CellsAt, flags: str) -> list[Judgement]:
    """All claims from the runs of their tables, then those that these do not settle from runs of as
    many items as they say are needed, where all of these are sealed.
    """
    planned = cells_at(claims, None)
    larger = [
        pair
        for size, open_claims in _sizes(judge_claims(claims, planned, flags))
        for pair in zip(open_claims, cells_at(open_claims, size), strict=True)
        if all(cell.run.state is CellState.SEALED for cell in pair[1])
    ]
    again = [claim for claim, _ in larger], [cells for _, cells in larger]
    judgements = judge_claims([*claims, *again[0]], [*planned, *again[1]], flags)
    return list({one.claim.name: one for one in judgements}.values())


def _sizes(pilot: Sequence[Judgement]) -> Iterator[tuple[int, list[Claim]]]:
    """Each of `SIZES` with the claims that need it, the last with those that need more, too."""
    unsettled = [one for one in pilot if one.verdict is ClaimVerdict.NOT_SETTLED and one.needed]
    for less, size in pairwise((0, *SIZES)):
        named = [one.claim for one in unsettled if less < min(one.needed or 0, SIZES[-1]) <= size]
        if named:
            yield size, named


def tests_of(judgement: Judgement) -> int:
    """How many tests of the family belong to a claim, whether its runs are sealed or not."""
    if judgement.claim.untestable:
        return 0
    return 3 if judgement.claim.direction is Direction.EQUAL else 2


# --- from cells to evidence ----------------------------------------------------------------------


def _measured(claim: Claim, planned: Sequence[PlannedCell], flags: str) -> Judgement:
    """The claim with its evidence, or with the reason why there is none."""
    command = f"{COMMAND} {claim.name} {flags} --run"
    runs = tuple(distinct_runs(planned))

    def without(verdict: ClaimVerdict, why: str) -> Judgement:
        return Judgement(claim, verdict, why, command, runs=runs)

    if claim.untestable:
        return without(ClaimVerdict.UNTESTABLE, claim.untestable)
    unsealed = [cell for cell in planned if cell.run.state is not CellState.SEALED]
    never = [cell for cell in unsealed if not cell.run.open]
    if never:
        return without(ClaimVerdict.UNTESTABLE, never[0].run.reason)
    if unsealed:
        open_runs = sum(run.open for run in runs)
        return without(ClaimVerdict.NOT_RUN, f"{open_runs} of {len(runs)} runs are missing.")
    try:
        sides = chosen_sides(claim, planned)
        if sides.are_one_run:
            return without(ClaimVerdict.UNTESTABLE, SAME_RUNS)
        evidence = evidence_of(sides)
    except DllmBenchError as error:
        return without(ClaimVerdict.UNTESTABLE, str(error))
    return Judgement(claim, ClaimVerdict.NOT_SETTLED, "", command, sides, evidence, runs=runs)


def _tests(judgement: Judgement) -> PValues:
    """The two tests of a claim, before correction."""
    claim, evidence = judgement.claim, judgement.evidence
    if evidence is None:
        return PValues()
    none, is_higher = claim.no_effect, evidence.effect > claim.no_effect
    if claim.direction is Direction.EQUAL:
        margin = claim.margin or 0.0
        no_loss, no_gain = evidence.p_above(none - margin), evidence.p_below(none + margin)
        loss = 1.0 if is_higher else evidence.p_same
        return PValues(max(no_loss, no_gain), loss, no_loss)
    if claim.direction is Direction.HIGHER:
        excluded = evidence.p_below(none + claim.smallest)
        return PValues(evidence.p_same if is_higher else 1.0, excluded)
    excluded = evidence.p_above(none - claim.smallest)
    return PValues(evidence.p_same if evidence.effect < none else 1.0, excluded)


# --- from evidence to a verdict ------------------------------------------------------------------


def _judged(raw: Judgement, tests: PValues, level: float) -> Judgement:
    """The judgement with its verdict; `level` is the strictest level of the family."""
    if raw.evidence is None or raw.sides is None:
        return raw
    verdict, why = _verdict(raw.claim, raw.evidence, tests)
    needed = items_needed(raw.claim, raw.evidence, len(leaves_of(raw.sides.ours)), level)
    if verdict is ClaimVerdict.NOT_SETTLED and needed:
        why += f" {needed} items are needed."
    return replace(raw, verdict=verdict, why=why, tests=tests, needed=needed)


def _verdict(claim: Claim, evidence: Evidence, tests: PValues) -> tuple[ClaimVerdict, str]:
    if claim.direction is Direction.EQUAL:
        return _verdict_of_equality(claim, tests)
    shown, excluded = tests.supports < 1 - LEVEL, tests.refutes < 1 - LEVEL
    smallest = claim.no_effect + (1 if claim.direction is Direction.HIGHER else -1) * claim.smallest
    worth = effect_text(claim, smallest)
    if not shown:
        if excluded:
            return ClaimVerdict.CONTRADICTED, f"an effect of {worth} or more is excluded."
        return ClaimVerdict.NOT_SETTLED, f"neither no effect nor one of {worth} is excluded."
    if excluded:
        return ClaimVerdict.DIRECTION_ONLY, f"the effect is smaller than {worth}."
    stated = claim.stated
    if stated is None:
        return ClaimVerdict.CONFIRMED, "the effect is shown; no size is claimed."
    is_higher, size = claim.direction is Direction.HIGHER, effect_text(claim, stated)
    if evidence.high >= stated if is_higher else evidence.low <= stated:
        return ClaimVerdict.CONFIRMED, f"the interval reaches the stated {size}."
    return ClaimVerdict.DIRECTION_ONLY, f"the stated {size} is not reached."


def _verdict_of_equality(claim: Claim, tests: PValues) -> tuple[ClaimVerdict, str]:
    margin = effect_text(claim, claim.no_effect + (claim.margin or 0.0)).lstrip("+")
    if tests.supports < 1 - LEVEL:
        return ClaimVerdict.CONFIRMED, f"a difference of {margin} or more is excluded."
    if tests.refutes < 1 - LEVEL:
        return (
            ClaimVerdict.CONTRADICTED,
            f"there is a loss, and nothing shows that it is within {margin}.",
        )
    if tests.no_loss < 1 - LEVEL:
        return ClaimVerdict.DIRECTION_ONLY, f"a loss of {margin} is excluded, a gain is not."
    return ClaimVerdict.NOT_SETTLED, f"neither a loss of {margin} nor equality is excluded."


def effect_text(claim: Claim, value: float) -> str:
    """An effect with its unit."""
    return f"{value:+.1f} points" if claim.is_difference else f"× {value:.3g}"


# --- power ---------------------------------------------------------------------------------------


def items_needed(claim: Claim, evidence: Evidence, runs: int, level: float) -> int | None:
    """Items a run so that the smallest effect worth seeing is found with `POWER`; None where the
    pilot's items do not differ at all.

    Scores: from the share of discordant items (Connor 1987), smoothed by one item more each way.
    Other numbers: from the standard error. Equivalence: two one-sided tests, no true difference.
    runs: runs of a side, whose items share the work. level: of the test.
    """
    from scipy.special import ndtri

    equal = claim.direction is Direction.EQUAL
    effect = (claim.margin or 0.0) if equal else claim.smallest
    tails = ndtri(1 - (level if equal else level / 2))
    power = ndtri((1 + POWER) / 2 if equal else POWER)
    if evidence.discordant is not None:
        share = effect / 100
        discordant = (evidence.discordant * evidence.items + 1) / (evidence.items + 2)
        discordant = max(discordant, share)
        rest = discordant if equal else discordant - share**2
        root = (tails * math.sqrt(discordant) + power * math.sqrt(rest)) / share
        return math.ceil(root**2 / runs)
    if evidence.error == 0:
        return None
    distance = math.log1p(effect) if evidence.is_ratio else effect
    root = (tails + power) * evidence.error / distance
    return math.ceil(evidence.items * root**2 / runs)
