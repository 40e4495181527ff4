"""The findings: verdicts with prose, for `docs/findings.md` and the site's page.

The prose is in `findings.yaml`. Numbers in it are looked up in built tables, and verdicts in the
judgements ({paper/claim} in braces), so that none is typed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

from dllm_bench.claims import view
from dllm_bench.claims.verdict import TESTED, ClaimVerdict, Judgement
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.tables.frame import BuiltTable, Row, hardware_text
from dllm_bench.tables.load import read_yaml
from dllm_bench.tables.plan import CellState, distinct_runs
from dllm_bench.tables.view import interval_text, is_empty, measured_text

PROSE = Path(__file__).with_name("findings.yaml")
HISTORY = Path(__file__).with_name("history.yaml")
TITLES = {
    "lopa": "LoPA",
    "creditdecoding": "CreditDecoding",
    "learn2pd": "Learn2PD",
    "dspark": "DSpark",
}
VERDICTS = {
    ClaimVerdict.CONFIRMED: "shown here, in the printed size if one is printed",
    ClaimVerdict.LARGER: "shown, and the interval lies beyond the printed size",
    ClaimVerdict.SMALLER: "shown, and the interval stays short of the printed size",
    ClaimVerdict.DIRECTION_ONLY: "shown, of unsettled size; or no loss, but not equality",
    ClaimVerdict.NOT_SETTLED: "the items do not suffice to tell",
    ClaimVerdict.CONTRADICTED: "an effect worth seeing is excluded, or a loss is shown",
    ClaimVerdict.IMPAIRED: "one token per forward scores better than the baseline: not testable",
    ClaimVerdict.UNCHECKED: "no one-token decoding of the baseline's model is stored",
    ClaimVerdict.TOO_FEW: "trained parts are compared, with fewer than six trainings: not testable",
    ClaimVerdict.UNTESTABLE: "embedded models cannot tell",
    ClaimVerdict.NOT_RUN: "runs are missing",
}
TESTS = "p-values are corrected for all claims (Holm); n is the items of a run."
HEADS = ("claim", "verdict", "effect, 95 % interval", "n", "why", "command")

HISTORY_HEADS = ("claim", "verdicts before, and the change that each came with", "now")
HISTORY_TEXT = (
    "From the versions of this page, oldest first, wherever verdict, effect or items changed. "
    "{became_support} contradictions became confirmed or direction only after a text, a model or "
    "the items were changed, {became_contradiction} of these became contradicted: texts were not "
    "chosen blindly. Verdicts about baselines, trainings or sizes came with the rules of "
    "[claims.md](claims.md)."
)
SUPPORT = {str(ClaimVerdict.CONFIRMED), str(ClaimVerdict.DIRECTION_ONLY)}


@dataclass(frozen=True)
class Paragraph:
    """A titled text; its numbers are linked to the table they come from."""

    title: str
    """The heading."""
    text: str
    """The text, with the names of `numbers` in braces."""
    numbers: Mapping[str, tuple[str, str]]
    """Name -> (table, the number as text); a claim -> ("", its verdict and effect)."""
    commands: tuple[str, ...]
    """The commands that print these numbers."""


@dataclass(frozen=True)
class PaperFindings:
    """One work: what was found, and its claims."""

    title: str
    """Its name."""
    text: str
    """The prose."""
    counts: str
    """How many claims have each verdict."""
    rows: list[tuple[str, ...]]
    """Its claims, under `HEADS`."""


@dataclass(frozen=True)
class Findings:
    """Everything that the page says, without its form."""

    practice: list[Paragraph]
    """What a practitioner can use."""
    limits: list[str]
    """What the evidence cannot carry."""
    statements: list[tuple[str, str]]
    """Compute, power and contamination: (heading, text)."""
    summary: str
    """How many claims have each verdict."""
    papers: list[PaperFindings]
    """By work."""
    history: list[tuple[str, ...]]
    """Every verdict before, under `HISTORY_HEADS`."""
    unmeasured: list[Paragraph]
    """What no paper had measured; those whose tables have all numbers."""


@lru_cache
def prose() -> dict[str, Any]:
    """The texts of `findings.yaml`."""
    return read_yaml(PROSE)


@lru_cache
def history() -> dict[str, list[dict[str, str]]]:
    """Claim -> every verdict of earlier findings, oldest first (`scripts.claim_history`)."""
    return read_yaml(HISTORY)


def history_rows(judgements: Sequence[Judgement]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each claim that ever had a verdict: its name, the verdicts before, what
    changed each, and the verdict now.
    """
    now = {one.claim.name: str(one.verdict) for one in judgements}
    now |= {old: f"part of {one.claim.name}" for one in judgements for old in one.claim.was}
    for name, entries in history().items():
        before = "<br>".join(
            f"{one['date']}: {one['verdict']}, {one['effect']}, n {one['items']} ({one['change']})"
            for one in entries
        )
        yield name, before, now.get(name, "withdrawn")


def _history_text() -> str:
    """How often an earlier and the last verdict for or against a claim lie on opposite sides."""
    against = str(ClaimVerdict.CONTRADICTED)
    decided = [[one["verdict"] for one in said] for said in history().values()]
    decided = [[one for one in said if one in {*SUPPORT, against}] for said in decided]
    ends = [(set(said[:-1]), said[-1]) for said in decided if said]
    return HISTORY_TEXT.format(
        became_support=sum(against in before and now in SUPPORT for before, now in ends),
        became_contradiction=sum(bool(before & SUPPORT) and now == against for before, now in ends),
    )


def tables_needed() -> list[str]:
    """The tables whose numbers the prose quotes."""
    texts = (*prose()["practice"], *prose()["unmeasured"])
    entries = (number["table"] for one in texts for number in one["numbers"].values())
    return list(dict.fromkeys(entries))


def findings(
    judgements: Sequence[Judgement], tables: Mapping[str, BuiltTable], results: str = ""
) -> Findings:
    """The findings of all claims; `results`: the option that names the results in commands."""
    texts, said = prose(), {one.claim.name: view.verdict_text(one) for one in judgements}

    def with_numbers(part: str) -> list[Paragraph]:
        made = (_paragraph(one, tables, said, results) for one in texts[part])
        return [paragraph for paragraph in made if paragraph]

    return Findings(
        practice=with_numbers("practice"),
        limits=texts["limits"],
        statements=[
            ("Compute", _compute(judgements)),
            ("Power", _power(judgements)),
            ("Dates", _dates(judgements)),
            ("Contamination", texts["contamination"]),
        ],
        summary=view.counts_text(judgements),
        papers=[
            _paper(name, text.format_map(said), judgements, results)
            for name, text in texts["papers"].items()
        ],
        history=list(history_rows(judgements)),
        unmeasured=with_numbers("unmeasured"),
    )


def _paper(name: str, text: str, judgements: Iterable[Judgement], results: str) -> PaperFindings:
    own = [one for one in judgements if one.claim.name.startswith(f"{name}/")]
    rows: list[tuple[str, ...]] = []
    for one in own:
        _, verdict, effect, n, _, why = view.row(one)
        sentence = f"{one.claim.sentence} ({one.claim.stands.partition(', ')[2]})"
        why = f"{why} {one.claim.remark}".rstrip()
        rows.append((sentence, verdict, effect, n, why, view.command(one.claim, results)))
    return PaperFindings(TITLES[name], text, view.counts_text(own), rows)


def _compute(judgements: Iterable[Judgement]) -> str:
    runs = distinct_runs(side.planned for one in judgements for side in one.sides or ())
    records = [run.record for run in runs if run.state is CellState.SEALED and run.record]
    seconds = [s or 0.0 for record in records for s in record.columns["seconds"]]
    machines = "; ".join(sorted({hardware_text(record) for record in records}))
    return (
        f"The verdicts rest on {len(records)} runs of {len(seconds)} decoded samples in all, "
        f"{sum(seconds) / 60:.0f} minutes of decoding. Measured on: {machines or 'nothing yet'}."
    )


def _power(judgements: Sequence[Judgement]) -> str:
    testable = [one for one in judgements if one.verdict in TESTED]
    open_claims = [one for one in testable if one.verdict is ClaimVerdict.NOT_SETTLED]
    needed = [one.needed for one in open_claims if one.needed]
    items = sorted({one.items for one in testable})
    more = f" The others need {median(needed):.0f} items a run in the median." if needed else ""
    return (
        f"Runs have {', '.join(map(str, items)) or 'no'} items. They settle "
        f"{len(testable) - len(open_claims)} of {len(testable)} tested claims.{more} Items are "
        "planned for 80 % power at the level that Holm's correction gives the strictest test of "
        "all claims."
    )


def _dates(judgements: Sequence[Judgement]) -> str:
    tested = [one for one in judgements if one.verdict in TESTED]
    older = sum(one.rests_on_older_runs for one in tested)
    return (
        f"{older} of {len(tested)} tested claims rest on runs that were made before the claim took "
        "its present form: their texts were known when it was written. Only runs made later "
        "confirm or contradict anew."
    )


def _paragraph(
    plain: Mapping[str, Any],
    tables: Mapping[str, BuiltTable],
    said: Mapping[str, str],
    results: str,
) -> Paragraph | None:
    """A paragraph with its numbers; None if a table does not have them all.

    said: claim -> its verdict and effect.
    """
    if any(entry["table"] not in tables for entry in plain["numbers"].values()):
        return None
    cells = {name: _cell(tables, entry) for name, entry in plain["numbers"].items()}
    if any(is_empty(cell) for cell in cells.values()):
        return None
    of = {name: plain["numbers"][name]["table"] for name in cells}
    numbers = {
        name: (of[name], f"{measured_text(cell)} {interval_text(cell)}".strip())
        for name, cell in cells.items()
    }
    commands = tuple(f"dllm-bench table {table}{results}" for table in dict.fromkeys(of.values()))
    claims = (field for _, field, _, _ in Formatter().parse(plain["text"]) if field in said)
    numbers |= {name: ("", said[name]) for name in claims if name}
    return Paragraph(plain["title"], plain["text"], numbers, commands)


def _cell(tables: Mapping[str, BuiltTable], entry: Mapping[str, Any]) -> Row:
    """The one cell that an entry of the prose names."""
    cells = tables[entry["table"]].cells
    for level, name in {**entry["at"], "metric": entry["metric"]}.items():
        cells = cells[cells.index.get_level_values(level) == name]
    found = list(cells.itertuples())
    if len(found) != 1:
        raise DllmBenchError(
            f"{PROSE.name} asks for {entry['metric']} at {entry['at']} of {entry['table']}, which "
            f"has {len(found)} such cells; name one."
        )
    return found[0]


# --- Markdown ------------------------------------------------------------------------------------


def markdown(found: Findings, link: Callable[[str], str]) -> str:
    """The page as Markdown; `link` gives the address of a table."""
    return "\n".join(_lines(found, link)).rstrip() + "\n"


def statement_lines(found: Findings) -> Iterator[str]:
    """Compute, power, contamination and the verdicts, a paragraph each."""
    for title, text in found.statements:
        yield from (f"**{title}.** {text}", "")
    yield f"**Verdicts.** {found.summary}."


def _lines(found: Findings, link: Callable[[str], str]) -> Iterator[str]:
    yield "# Findings"
    yield ""
    yield "What the reference results say about published claims (`python -m scripts.update_docs`)."
    yield ""
    yield from ("## What a practitioner can use", "")
    yield from _paragraph_lines(found.practice, link)
    yield from ("## What the evidence can carry", "")
    for text in found.limits:
        yield from (text, "")
    yield from (*statement_lines(found), "")
    yield from (f"- *{verdict}*: {text}" for verdict, text in VERDICTS.items())
    yield from ("", TESTS, "")
    for paper in found.papers:
        yield from (f"## {paper.title}", "", paper.text, "", f"{paper.counts}.", "")
        yield f"| {' | '.join(HEADS)} |"
        yield f"|{' --- |' * len(HEADS)}"
        for *cells, command in paper.rows:
            yield f"| {' | '.join(cells)} | `{command}` |"
        yield ""
    yield from ("## Every verdict ever reached", "", _history_text(), "")
    yield f"| {' | '.join(HISTORY_HEADS)} |"
    yield f"|{' --- |' * len(HISTORY_HEADS)}"
    yield from (f"| {' | '.join(cells)} |" for cells in found.history)
    yield ""
    yield from ("## What the papers did not measure", "")
    yield from _paragraph_lines(found.unmeasured, link)


def _paragraph_lines(paragraphs: Iterable[Paragraph], link: Callable[[str], str]) -> Iterator[str]:
    for one in paragraphs:
        values = {
            name: f"[{text}]({link(table)})" if table else text
            for name, (table, text) in one.numbers.items()
        }
        text = one.text.format(**values)
        commands = ", ".join(f"`{command}`" for command in one.commands)
        yield from (f"**{one.title}.** {text}" + (f" ({commands})" if commands else ""), "")
