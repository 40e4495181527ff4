"""Judgements as text: cells of a row and words, for the terminal, the pages and the findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from dllm_bench.claims.spec import Claim
from dllm_bench.claims.verdict import COMMAND, ClaimVerdict, Judgement, effect_text

HEADS = ("claim", "verdict", "effect, 95 % interval", "n", "p", "why")
NOTHING = "–"
LEAST_P = 0.0001  # smaller ones are not told apart


def row(judgement: Judgement) -> tuple[str, ...]:
    """Return one judgement under `HEADS`; n: items of one run, p: after Holm's correction."""
    evidence = judgement.evidence
    if evidence is None:
        return (judgement.claim.name, judgement.verdict, NOTHING, NOTHING, NOTHING, judgement.why)
    p_value = judgement.p_value
    n = str(judgement.items // 2) if judgement.claim.chooses else str(judgement.items)
    return (
        judgement.claim.name,
        judgement.verdict,
        interval_text(judgement),
        n,
        "< 0.0001" if p_value < LEAST_P else f"{p_value:.2g}",
        judgement.why,
    )


def interval_text(judgement: Judgement) -> str:
    """Return the effect with its interval as text; empty if there is none."""
    evidence, claim = judgement.evidence, judgement.claim
    if evidence is None:
        return ""
    if claim.is_difference:
        return f"{evidence.value:+.1f} [{evidence.low:+.1f}, {evidence.high:+.1f}] points"
    return f"× {evidence.value:.2f} [{evidence.low:.2f}, {evidence.high:.2f}]"


def verdict_text(judgement: Judgement) -> str:
    """Return the verdict and effect for a sentence: "contradicted, -6.0 [-8.3, -3.5] points"."""
    return ", ".join(filter(None, (str(judgement.verdict), interval_text(judgement))))


def command(claim: Claim, results: str = "") -> str:
    """Return the one command that prints a claim's verdict from stored runs."""
    return f"{COMMAND} {claim.name}{results}"


def counts_text(judgements: Sequence[Judgement]) -> str:
    """Return how many claims have each verdict: "3 confirmed, 1 contradicted"."""
    counts = Counter(one.verdict for one in judgements)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in ClaimVerdict if counts[verdict])


def details(judgement: Judgement) -> Iterator[str]:
    """Yield everything about one claim, line by line."""
    claim, evidence = judgement.claim, judgement.evidence
    yield f"“{claim.sentence}” ({claim.stands})"
    yield f"{judgement.verdict}: {judgement.why}"
    if claim.remark:
        yield f"tested here: {claim.remark}"
    if judgement.sides and evidence:
        ours, theirs = (side.planned.cell.keys for side in judgement.sides)
        sides = f"{differing(ours, theirs)} against {differing(theirs, ours)}"
        yield f"{claim.metric} of {sides}, {claim.table}"
        yield f"effect {interval_text(judgement)}, {row(judgement)[3]} items a run"
    if judgement.needed:
        yield power_text(judgement)
    for run in judgement.runs:
        yield f"run: {run.command}"
    yield f"command: {judgement.command}"


def differing(keys: dict[str, str], other: dict[str, str]) -> str:
    """Return the facet values of a side that the other side does not have."""
    return ", ".join(name for facet, name in keys.items() if other[facet] != name)


def power_text(judgement: Judgement) -> str:
    """Return how many items are needed to see the smallest effect worth seeing, as text."""
    claim = judgement.claim
    size = effect_text(claim, claim.beyond(1)).lstrip("+")
    return (
        f"{judgement.needed} items a run show a difference of {size} in 80 % of "
        f"repetitions (the pilot has {judgement.items})"
    )
