"""Verdicts of claims: the rules of docs/claims.md, Holm's correction over all, items still needed.

A claim of a difference is tested for it, and against it: that an effect worth seeing is excluded.
A claim of no loss is tested for equivalence (two one-sided tests), against it (that the loss is
beyond the margin), and for its one half: that a loss beyond the margin is excluded. All tests are
two-sided at 5 %, so that they agree with 95 % intervals. The family is all claims of `conf/claim`,
whichever are shown; one whose runs are missing counts with p = 1. Every claim is judged once, from
the items of its table: none is given more items because of its outcome.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice

from dllm_bench.claims.evidence import (
    RecordsBeside,
    Sides,
    crossed,
    effect_of,
    is_speculative,
    loss_of_baseline,
    one_token_runs,
    sides_of,
    trained_parts,
)
from dllm_bench.claims.spec import DEFAULT_POINTS, Claim, Direction, Keys, load_claim
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics.accuracy import LEVEL, Effect, holm
from dllm_bench.tables.derive import records_of
from dllm_bench.tables.load import names_of
from dllm_bench.tables.plan import CellState, PlannedCell, PlannedRun, Planner, distinct_runs
from dllm_bench.tables.spec import Profile

ROW_HEADS = ("claim", "verdict", "effect, 95 % interval", "n", "p", "why")
NOTHING = "–"
LEAST_P = 0.0001  # smaller ones are not told apart
POWER = 0.8
"""Chance to see the smallest effect worth seeing, with the items that are planned."""
SAME_RUNS = "the profile maps both sides to the same runs."
COMMAND = "dllm-bench claims"
IN_ONE_RUN = "speedup/baseline"
"""The metric of times whose two sides alternate in the same run."""
FEWEST_TRAININGS = 6
"""Trainings of what is compared that a claim about training needs."""


class ClaimVerdict(StrEnum):
    """What the runs say about a claim."""

    CONFIRMED = "confirmed"  # shown, in the printed size if one is printed
    LARGER = "larger than printed"  # shown, and the interval is beyond the printed size
    SMALLER = "smaller than printed"  # shown, and the interval stays below the printed size
    DIRECTION_ONLY = "direction only"  # shown, of unsettled size; or no loss, but not equality
    NOT_SETTLED = "not settled"  # the items do not suffice to tell
    CONTRADICTED = "contradicted"  # what the claim says is excluded, by more than the margin
    IMPAIRED = "baseline impaired"  # one token per forward is better than what is compared with
    UNCHECKED = "baseline unchecked"  # no one-token decoding of its model is stored
    TOO_FEW = "too few trainings"  # trained parts are compared, and not enough trainings of them
    UNTESTABLE = "not testable here"  # embedded models cannot tell, or have no such runs
    NOT_RUN = "not run"  # runs are missing


TESTED = frozenset(ClaimVerdict) - {
    ClaimVerdict.IMPAIRED,
    ClaimVerdict.UNCHECKED,
    ClaimVerdict.TOO_FEW,
    ClaimVerdict.UNTESTABLE,
    ClaimVerdict.NOT_RUN,
}
"""Verdicts that a test gave."""


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
    """The rows compared; None if there is no effect."""
    evidence: Effect | None = None
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
        if self.verdict not in TESTED:
            return 1.0
        return min(self.tests.supports, self.tests.no_loss) if is_half else self.tests.supports

    @property
    def rests_on_older_runs(self) -> bool:
        """Whether a run was made before the day on which the claim was frozen."""
        made = [run.record.sealed_at for run in self.runs if run.record]
        days = [datetime.fromtimestamp(seconds, UTC).date() for seconds in made]
        return any(day < self.claim.frozen for day in days)

    @property
    def items(self) -> int:
        """Items of one run."""
        return min((run.record.items for run in self.runs if run.record), default=0)

    @property
    def row(self) -> tuple[str, ...]:
        """Texts under `ROW_HEADS`; n: items of one run, p: after Holm's correction."""
        numbers = (NOTHING, NOTHING, NOTHING)
        if self.evidence:
            n = str(self.items // 2 if self.claim.chooses else self.items)
            p = "< 0.0001" if self.p_value < LEAST_P else f"{self.p_value:.2g}"
            numbers = (self.effect, n, p)
        return (self.claim.name, self.verdict, *numbers, self.why)

    @property
    def effect(self) -> str:
        """The effect with its interval; empty if there is none."""
        if self.evidence is None:
            return ""
        value, low, high = self.evidence.value, self.evidence.low, self.evidence.high
        if self.claim.is_difference:
            return f"{value:+.1f} [{low:+.1f}, {high:+.1f}] points"
        return f"× {value:.2f} [{low:.2f}, {high:.2f}]"

    def details(self, given: str = "") -> Iterator[str]:
        """Yield everything about the claim, line by line; `given`: options that end commands."""
        claim = self.claim
        yield f"“{claim.sentence}” ({claim.stands})"
        yield f"{self.verdict}: {self.why}"
        if claim.remark:
            yield f"tested here: {claim.remark}"
        if self.sides and self.evidence:
            ours, theirs = (side.planned.cell.keys for side in self.sides)
            sides = f"{differing(ours, theirs)} against {differing(theirs, ours)}"
            yield f"{claim.metric} of {sides}, {claim.table}"
            yield f"effect {self.effect}, {self.row[3]} items a run"
        if self.needed:
            size = effect_text(claim, claim.beyond(1)).lstrip("+")
            yield (
                f"{self.needed} items a run show a difference of {size} in 80 % of repetitions "
                f"(the pilot has {self.items})"
            )
        for run in (one for one in self.runs if one.query):
            yield f"run: {run.command}{given}"
        if any(run.open for run in self.runs):
            yield f"command: {self.command}{given}"


def judge_claims(
    claims: Sequence[Claim],
    planned: Sequence[Sequence[PlannedCell]],
    profile: Profile,
    one_token: RecordsBeside | None = None,
) -> list[Judgement]:
    """Judge all claims of the family, each with its planned cells (none for an untestable one).

    profile: what they were planned with.
    one_token: finds the decodings that baselines are checked against; None: they are not checked.
    """
    raw = [_measured(*pair, profile, one_token) for pair in zip(claims, planned, strict=True)]
    family = [p for one in raw for p in astuple(_tests(one))[: tests_of(one)]]
    corrected, level = iter(holm(family)), (1 - LEVEL) / max(1, len(family))
    return [_judged(one, PValues(*islice(corrected, tests_of(one))), level) for one in raw]


def judge_stored(profile: Profile, planner: Planner, some: Sequence[Claim] = ()) -> list[Judgement]:
    """Judge some claims, by default all of `conf/claim`, from the stored runs.

    If the planner has the names of stored runs and they show that no run of a claim is stored, the
    claim is not composed, and counts as not run even if its runs would be unavailable.
    """
    claims = some or [load_claim(name) for name in names_of("claim")]
    testable = iter(planner.common((c.cells() for c in claims if not c.untestable), profile))
    planned = [[] if one.untestable else next(testable).cells for one in claims]
    return judge_claims(claims, planned, profile, one_token_runs(planner.store))


def tests_of(judgement: Judgement) -> int:
    """Return how many tests of the family belong to a claim, whether or not its runs are sealed."""
    if judgement.claim.untestable:
        return 0
    return 3 if judgement.claim.direction is Direction.EQUAL else 2


# --- from cells to evidence ----------------------------------------------------------------------


def _measured(
    claim: Claim, planned: Sequence[PlannedCell], profile: Profile, one_token: RecordsBeside | None
) -> Judgement:
    """Return the claim with its evidence, or with the reason why there is none."""
    command = f"{COMMAND} {claim.name} {profile.flags} --run"
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
        trained = sides_of(claim, planned, profile)
        if any(one.are_one_run for one in trained):
            return without(ClaimVerdict.UNTESTABLE, SAME_RUNS)
        effects = [effect_of(claim, one) for one in trained]
        evidence = crossed(effects) if claim.trainings else effects[0]
        verdict, why = _bar(claim, trained, one_token)
    except DllmBenchError as error:
        return without(ClaimVerdict.UNTESTABLE, str(error))
    return Judgement(claim, verdict, why, command, trained[0], evidence, runs=runs)


def _bar(
    claim: Claim, trained: Sequence[Sides], one_token: RecordsBeside | None
) -> tuple[ClaimVerdict, str]:
    """Return the verdict and reason that keep a claim from being tested.

    Not settled and no reason if nothing does.
    """
    if is_about_training(claim, trained[0]) and len(trained) < FEWEST_TRAININGS:
        number = "one training" if len(trained) == 1 else f"{len(trained)} trainings"
        why = f"{number} of what is compared; {FEWEST_TRAININGS} are needed."
        return ClaimVerdict.TOO_FEW, why
    losses = [loss_of_baseline(one, one_token) for one in trained] if one_token else []
    for loss in losses:
        if loss is None:
            why = "no one-token decoding of the baseline's model on these items is stored."
            return ClaimVerdict.UNCHECKED, why
        if loss > DEFAULT_POINTS:
            why = f"one token per forward scores {loss:.1f} points above the baseline."
            return ClaimVerdict.IMPAIRED, why
    is_timed = trained[0].ours.planned.cell.metric.is_of_times and claim.metric != IN_ONE_RUN
    passes = {record.spec.repeats for side in trained[0] for record in records_of(side.planned)}
    if is_timed and 1 in passes and not claim.trainings:
        why = "one pass does not show how passes differ; make the runs again with --passes 5."
        return ClaimVerdict.UNTESTABLE, why
    return ClaimVerdict.NOT_SETTLED, ""


def is_about_training(claim: Claim, sides: Sides) -> bool:
    """Return whether the two sides use different weights and the metric depends on them.

    A target's verified text does not depend on the drafter.
    """
    if claim.is_difference and all(map(is_speculative, records_of(sides.ours.planned))):
        return False
    return trained_parts(sides.ours) != trained_parts(sides.theirs)


def _tests(judgement: Judgement) -> PValues:
    """Return the p-values of a claim's tests, before correction."""
    claim, evidence = judgement.claim, judgement.evidence
    if evidence is None:
        return PValues()
    none, worth, loss = claim.beyond(0), claim.beyond(1), claim.beyond(-1)
    if claim.direction is Direction.EQUAL:
        no_loss, no_gain = evidence.p_above(loss), evidence.p_below(worth)
        both = (max(no_loss, no_gain), evidence.p_below(loss), no_loss)
        return PValues(*(min(1.0, 2 * p) for p in both))
    is_higher = claim.direction is Direction.HIGHER
    agrees = evidence.value > none if is_higher else evidence.value < none
    excluded = evidence.p_below(worth) if is_higher else evidence.p_above(loss)
    return PValues(evidence.p_same if agrees else 1.0, min(1.0, 2 * excluded))


# --- from evidence to a verdict ------------------------------------------------------------------


def _judged(raw: Judgement, tests: PValues, level: float) -> Judgement:
    """Return the judgement with its verdict; `level` is the strictest level of the family."""
    if raw.evidence is None or raw.sides is None or raw.verdict is not ClaimVerdict.NOT_SETTLED:
        return raw
    verdict, why = _verdict(raw.claim, raw.evidence, tests)
    needed = items_needed(raw.claim, raw.evidence, len(records_of(raw.sides.ours.planned)), level)
    if verdict is ClaimVerdict.NOT_SETTLED and needed:
        why += f" {needed} items are needed."
    return replace(raw, verdict=verdict, why=why, tests=tests, needed=needed)


def _verdict(claim: Claim, evidence: Effect, tests: PValues) -> tuple[ClaimVerdict, str]:
    if claim.direction is Direction.EQUAL:
        return _verdict_of_equality(claim, tests)
    shown, excluded = tests.supports < 1 - LEVEL, tests.refutes < 1 - LEVEL
    is_higher = claim.direction is Direction.HIGHER
    worth = effect_text(claim, claim.beyond(1 if is_higher else -1))
    if not shown:
        if excluded:
            return ClaimVerdict.CONTRADICTED, f"an effect of {worth} or more is excluded."
        why = f"after the correction, neither no effect nor one of {worth} is excluded."
        return ClaimVerdict.NOT_SETTLED, why
    if claim.stated is not None:
        return _verdict_of_size(claim, evidence, claim.stated)
    if excluded:
        return ClaimVerdict.DIRECTION_ONLY, f"the effect is smaller than {worth}."
    return ClaimVerdict.CONFIRMED, "the effect is shown; no size is printed."


def _verdict_of_size(claim: Claim, evidence: Effect, stated: float) -> tuple[ClaimVerdict, str]:
    """Compare a shown effect with the printed one, and return verdict and reason."""
    size, (low, high) = effect_text(claim, stated), claim.band
    if evidence.low <= stated <= evidence.high:
        if low <= evidence.low and evidence.high <= high:
            return ClaimVerdict.CONFIRMED, f"the interval holds the printed {size}."
        return ClaimVerdict.DIRECTION_ONLY, f"the interval is too wide to confirm {size}."
    is_above = evidence.low > stated
    if is_above == (claim.direction is Direction.HIGHER):
        return ClaimVerdict.LARGER, f"{size} is printed."
    return ClaimVerdict.SMALLER, f"{size} is printed."


def _verdict_of_equality(claim: Claim, tests: PValues) -> tuple[ClaimVerdict, str]:
    margin = effect_text(claim, claim.beyond(1)).lstrip("+")
    if tests.supports < 1 - LEVEL:
        return ClaimVerdict.CONFIRMED, f"a difference of {margin} or more is excluded."
    if tests.refutes < 1 - LEVEL:
        return ClaimVerdict.CONTRADICTED, f"there is a loss of more than {margin}."
    if tests.no_loss < 1 - LEVEL:
        return ClaimVerdict.DIRECTION_ONLY, f"a loss of {margin} is excluded, a gain is not."
    why = f"after the correction, neither a loss of {margin} nor equality is shown."
    return ClaimVerdict.NOT_SETTLED, why


# --- power ---------------------------------------------------------------------------------------


def items_needed(claim: Claim, evidence: Effect, runs: int, level: float) -> int | None:
    """Return the items a run needs to find the smallest effect worth seeing with `POWER`.

    None if the pilot's items do not differ at all, and for a claim with trainings, whose variance
    more items do not lower. Scores: from the share of discordant items (Connor 1987) of all runs
    together, half an item added to each cell as for the interval, and at least the margin. Other
    numbers: from the standard error. Equivalence: two one-sided tests, each at half the level, no
    true difference. Where settings are chosen, half of the items are compared.
    runs: runs of a side, whose items share the work. level: of the test.
    """
    from scipy.special import ndtri

    equal = claim.direction is Direction.EQUAL
    tails = ndtri(1 - level / 2)
    power = ndtri((1 + POWER) / 2 if equal else POWER)
    if evidence.pairs:
        share = claim.margin / 100
        differing = sum(gained + lost for _, gained, lost in evidence.pairs)
        discordant = max((differing + 1) / (evidence.n + 2), share)
        rest = discordant if equal else discordant - share**2
        compared = ((tails * math.sqrt(discordant) + power * math.sqrt(rest)) / share) ** 2
    elif evidence.error == 0 or claim.trainings:
        return None
    else:
        compared = evidence.n * ((tails + power) * evidence.error / claim.margin) ** 2
    return math.ceil(compared * (2 if claim.chooses else 1) / runs)


# --- as text -------------------------------------------------------------------------------------


def effect_text(claim: Claim, value: float) -> str:
    """Return an effect with its unit as text."""
    return f"{value:+.1f} points" if claim.is_difference else f"× {value:.3g}"


def differing(keys: Keys, other: Keys) -> str:
    """Return the facet values of a side that the other side does not have."""
    return ", ".join(name for facet, name in keys.items() if other[facet] != name)


def counts_text(judgements: Sequence[Judgement]) -> str:
    """Return how many claims have each verdict: "3 confirmed, 1 contradicted"."""
    counts = Counter(one.verdict for one in judgements)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ClaimVerdict if counts[verdict])
