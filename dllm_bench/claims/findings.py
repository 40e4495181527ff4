"""The findings: what their page looks up in judgements, tables and earlier verdicts.

The page's layout is in `templates/`, its prose there and in `findings.yaml`. Numbers in the prose
are looked up in built tables, and verdicts in the judgements ({paper/claim} in braces), so that
none is typed in. The site's page has a template of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from statistics import median
from string import Formatter
from typing import Any

import numpy as np

from dllm_bench.claims.verdict import TESTED, ClaimVerdict, Judgement, counts_text
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import read_yaml
from dllm_bench.store.record import RunRecord
from dllm_bench.tables.frame import BuiltTable, Row, hardware_text
from dllm_bench.tables.render import environment, interval_text, is_empty, measured_text

TEMPLATES = Path(__file__).parent / "templates"
PROSE = Path(__file__).with_name("findings.yaml")
HISTORY = Path(__file__).with_name("history.yaml")
SUPPORT = {str(ClaimVerdict.CONFIRMED), str(ClaimVerdict.DIRECTION_ONLY)}
AGAINST = str(ClaimVerdict.CONTRADICTED)
PARTS = Formatter().parse  # of a text with names in braces
Place = dict[str, str]  # of a cell: its table, metric and facets


@dataclass(frozen=True)
class Paragraph:
    """A titled text, single points, and a small table; numbers in the texts are linked to the table
    they come from."""

    title: str
    """The heading."""
    text: str
    """The text, with the names of `numbers` in braces."""
    points: Sequence[str]
    """Texts like it, shown as a list."""
    numbers: Mapping[str, tuple[str, str]]
    """Name -> (table, the number as text); a claim -> ("", its verdict and effect)."""
    heads: Sequence[str]
    """Heads of the small table's columns."""
    rows: Sequence[Sequence[str]]
    """Its rows: what the row is about, then a number as text in each column."""
    commands: tuple[str, ...]
    """The commands that print these numbers."""


@dataclass(frozen=True)
class Findings:
    """What the templates of the findings look up."""

    judgements: Sequence[Judgement]
    """All claims."""
    tables: Mapping[str, BuiltTable]
    """Those that the prose quotes, as far as they are stored."""
    results: str = ""
    """The option that names the results in commands."""

    @property
    def texts(self) -> Mapping[str, Any]:
        """The prose."""
        return prose()

    @cached_property
    def said(self) -> dict[str, str]:
        """Claim -> its verdict and effect."""
        return {
            one.claim.name: ", ".join(filter(None, (one.verdict, one.effect)))
            for one in self.judgements
        }

    def paragraphs(self, part: str) -> list[Paragraph]:
        """Return those paragraphs of a part of the prose whose tables have all numbers."""
        made = (self._paragraph(one) for one in self.texts[part])
        return [paragraph for paragraph in made if paragraph]

    @property
    def papers(self) -> Iterator[dict[str, Any]]:
        """Each work: title, prose, counts of its verdicts, and its claims as rows."""
        for name, texts in self.texts["papers"].items():
            own = [one for one in self.judgements if one.claim.name.startswith(f"{name}/")]
            yield {
                "title": self.texts["titles"][name],
                "texts": [text.format_map(self.said) for text in texts],
                "counts": counts_text(own),
                "rows": [self._row(one) for one in own],
            }

    def _row(self, one: Judgement) -> tuple[str, ...]:
        """Return a claim's sentence, verdict, effect, items, reason and name."""
        name, verdict, effect, n, _, why = one.row
        sentence = f"{one.claim.sentence} ({one.claim.stands.partition(', ')[2]})"
        return sentence, verdict, effect, n, f"{why} {one.claim.remark}".rstrip(), name

    @property
    def counts(self) -> str:
        """How many claims have each verdict."""
        return counts_text(self.judgements)

    @property
    def statements(self) -> list[tuple[str, str]]:
        """What the evidence rests on: (heading, text)."""
        said: Any = environment(TEMPLATES).get_template("statements.txt").module
        titles = ("Compute", "Power", "Dates", "Contamination")
        return [(title, getattr(said, title.lower())(self)) for title in titles]

    @cached_property
    def records(self) -> list[RunRecord]:
        """The records that the effects rest on, of all trainings and settings to choose from."""
        runs = {run.key: run for one in self.judgements if one.evidence for run in one.runs}
        return [run.record for run in runs.values() if run.record]

    @property
    def seconds(self) -> list[float | None]:
        """Decoding time of each of their samples; None if it shared a batch with others."""
        return [seconds for record in self.records for seconds in record.columns["seconds"]]

    @property
    def machines(self) -> list[str]:
        """What they were measured on."""
        return sorted(set(map(hardware_text, self.records)))

    @property
    def tested(self) -> list[Judgement]:
        """The claims that a test decided, or could have."""
        return [one for one in self.judgements if one.verdict in TESTED]

    @property
    def unsettled(self) -> list[Judgement]:
        """Those of them that have too few items."""
        return [one for one in self.tested if one.verdict is ClaimVerdict.NOT_SETTLED]

    @property
    def needed(self) -> float | None:
        """The items that these need, in the median."""
        needed = [one.needed for one in self.unsettled if one.needed]
        return median(needed) if needed else None

    @property
    def items(self) -> list[int]:
        """How many items runs of tested claims have."""
        return sorted({one.items for one in self.tested})

    @property
    def history(self) -> list[tuple[str, ...]]:
        """A row for each claim that ever had a verdict: its name, the verdicts before, what changed
        each, and the verdict now.
        """
        now = {one.claim.name: str(one.verdict) for one in self.judgements}
        now |= {
            old: f"part of {one.claim.name}" for one in self.judgements for old in one.claim.was
        }
        said = "{date}: {verdict}, {effect}, n {items} ({change})".format_map
        return [
            (name, "<br>".join(map(said, entries)), now.get(name, "withdrawn"))
            for name, entries in history().items()
        ]

    @property
    def turned(self) -> tuple[int, int]:
        """How many claims went from contradicted to a last verdict for them, and how many back."""
        to_support = to_against = 0
        for entries in history().values():
            said = [one["verdict"] for one in entries if one["verdict"] in {*SUPPORT, AGAINST}]
            *before, last = said or [""]
            to_support += last in SUPPORT and AGAINST in before
            to_against += last == AGAINST and not SUPPORT.isdisjoint(before)
        return to_support, to_against

    def _paragraph(self, plain: Mapping[str, Any]) -> Paragraph | None:
        """Return a paragraph with its numbers; None if a table does not have them all."""
        quoted = tables_of(plain)
        if not self.tables.keys() >= set(quoted):
            return None
        named, lines = _places(plain)
        numbers = {name: (place["table"], self._text(place)) for name, place in named.items()}
        rows = [(name, *map(self._text, places)) for name, places in lines.items()]
        if not all((*chain(*numbers.values()), *chain(*rows))):
            return None
        points = plain.get("points", [])
        fields = {field for text in (plain["text"], *points) for _, field, *_ in PARTS(text)}
        numbers |= {name: ("", said) for name, said in self.said.items() if name in fields}
        heads = (plain.get("head", ""), *plain.get("columns", {}))
        commands = tuple(f"dllm-bench table {table}{self.results}" for table in quoted)
        return Paragraph(plain["title"], plain["text"], points, numbers, heads, rows, commands)

    def _text(self, place: Place) -> str:
        """Return a number of a table with its interval; empty if it was not measured."""
        cell = _cell(self.tables[place["table"]], place)
        return "" if is_empty(cell) else f"{measured_text(cell)} {interval_text(cell)}".strip()


@lru_cache
def prose() -> dict[str, Any]:
    """Read the texts of `findings.yaml`."""
    return read_yaml(PROSE)


@lru_cache
def history() -> dict[str, list[dict[str, str]]]:
    """Return claim -> every verdict of earlier findings, oldest first (`scripts.claim_history`)."""
    return read_yaml(HISTORY)


def tables_of(plain: Mapping[str, Any]) -> list[str]:
    """Return the tables that a paragraph of the prose quotes."""
    named, lines = _places(plain)
    return list({place["table"]: None for place in (*chain(*lines.values()), *named.values())})


def _places(plain: Mapping[str, Any]) -> tuple[dict[str, Place], dict[str, list[Place]]]:
    """Return the cells of a paragraph of the prose: name -> its number, row -> its numbers."""
    of, columns = plain.get("of", {}), plain.get("columns", {}).values()
    named = {name: of | own for name, own in plain.get("numbers", {}).items()}
    rows = plain.get("rows", {}).items()
    return named, {name: [of | row | column for column in columns] for name, row in rows}


def _cell(table: BuiltTable, place: Place) -> Row:
    """Return the one cell that a place names by its metric and facets."""
    levels = {level: name for level, name in place.items() if level != "table"}
    is_it = [table.cells.index.get_level_values(level) == name for level, name in levels.items()]
    found = list(table.cells[np.all(is_it, axis=0)].itertuples())
    if len(found) != 1:
        raise DllmBenchError(
            f"{PROSE.name} asks for {place}, and the table has {len(found)} such cells; name one."
        )
    return found[0]


def markdown(found: Findings, link: Callable[[str], str]) -> str:
    """Return the page as Markdown; `link` returns the address of a table."""

    def linked(one: Paragraph, text: str) -> str:
        numbers = {
            name: f"[{number}]({link(table)})" if table else number
            for name, (table, number) in one.numbers.items()
        }
        return text.format(**numbers)

    return environment(TEMPLATES).get_template("findings.md").render(found=found, linked=linked)


def statements(found: Findings) -> str:
    """Return a paragraph each on compute, power, contamination and the verdicts."""
    return environment(TEMPLATES).get_template("statements.md").render(found=found)
