"""A claim as data: what a work states, and which numbers of a table or figure test it.

A `Claim` is read from `conf/claim/<paper>/<claim>.yaml`. Its two sides are cells of a table or
figure of this project, so that its runs are planned, run and found as that table's; `table` gives
these cells as a table of their own. A side may be a list of settings: then the fastest one that
keeps the score is chosen on the development half of the items, and the test half is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from dllm_bench.core.choices import unknown_name
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import load_figure
from dllm_bench.paths import conf_file
from dllm_bench.tables.load import help_of, load_table, names_of, read_yaml
from dllm_bench.tables.spec import SCORE, FacetValue, PaperTable, Query, Rule, TableMetric

Keys = Mapping[str, str]
"""Facet -> name of its value."""


class Direction(StrEnum):
    """What a claim says of our side, compared with the other."""

    HIGHER = "higher"
    LOWER = "lower"
    EQUAL = "equal"  # no loss: tested as an equivalence


@dataclass(frozen=True)
class Claim:
    """One statement of a work, and how it is tested here."""

    name: str
    """`<paper>/<claim>`."""
    sentence: str
    """What the work states, in its words or close to them."""
    stands: str
    """Where: abstract, section, table, figure."""
    untestable: str = ""
    """Why embedded models cannot test it; empty if they can. The fields below are then unused."""
    table: str = ""
    """The table, or `figure/<paper>/<figure>`, whose cells the sides are."""
    at: Keys | None = None
    """Facet values that both sides share."""
    ours: tuple[Keys, ...] = ()
    """Facet values of the side that the claim is about; several if one is chosen."""
    theirs: tuple[Keys, ...] = ()
    """Facet values of the side that it is compared with; several if one is chosen."""
    metric: str = SCORE
    """The definition compared: a score by its difference in points, others by their ratio."""
    direction: Direction = Direction.HIGHER
    """What is claimed of the effect."""
    stated: float | None = None
    """The effect that the work prints, if the claim is about its size."""
    margin: float | None = None
    """For `EQUAL`: the largest effect that counts as none, a difference or |ratio − 1|."""
    smallest: float = 0.0
    """The smallest effect worth seeing: points, or the ratio − 1."""
    keep: float = 0.0
    """Where settings are chosen: points that a score may be below that of the setting that both
    sides list, or below the best of both if they share none.
    """
    remark: str = ""
    """How the test differs from what was claimed: another quantity, a part of the benchmarks."""

    @property
    def is_difference(self) -> bool:
        """True for scores, compared by their difference; all else is compared by its ratio."""
        return self.metric == SCORE

    @property
    def no_effect(self) -> float:
        """The effect of two equal sides."""
        return 0.0 if self.is_difference else 1.0

    @property
    def chooses(self) -> bool:
        """True if a side has several settings."""
        return len(self.ours) > 1 or len(self.theirs) > 1

    @property
    def definitions(self) -> Query:
        """The metrics that are measured: its own, and the score where settings are chosen."""
        return tuple(dict.fromkeys((self.metric, *((SCORE,) if self.chooses else ()))))

    def cells(self) -> PaperTable:
        """The cells of both sides, as a table that is planned and run like any other."""
        whole = source_table(self.table)
        wanted = [{**(self.at or {}), **side} for side in (*self.ours, *self.theirs)]
        self._check(whole, wanted)
        named = {facet: {keys[facet] for keys in wanted} for facet in whole.facets}
        shown = {
            facet: tuple(replace(value, hidden=value.name not in named[facet]) for value in values)
            for facet, values in whole.facets.items()
        }
        visible = [[v.name for v in values if not v.hidden] for values in shown.values()]
        others = [dict(zip(shown, names, strict=True)) for names in product(*visible)]
        skipped = tuple(_skip(keys) for keys in others if keys not in wanted)
        metrics = tuple(TableMetric("", "", d, run=whole.run_of(d)) for d in self.definitions)
        return replace(
            whole,
            name=f"claim {self.name}",
            facets=shown,
            metrics=metrics,
            rules=(*whole.rules, *skipped),
        )

    def _check(self, whole: PaperTable, wanted: list[dict[str, str]]) -> None:
        for keys in wanted:
            for facet, values in whole.facets.items():
                known = [value.name for value in values]
                if keys.get(facet) not in known or set(keys) != set(whole.facets):
                    raise DllmBenchError(
                        f"Claim {self.name} asks for {keys} of {self.table}, whose facet {facet} "
                        f"has {', '.join(known)}; give every facet of it one of its values."
                    )


def _skip(keys: Keys) -> Rule:
    return Rule({facet: (name,) for facet, name in keys.items()}, FacetValue("", skip=True))


def source_table(name: str) -> PaperTable:
    """The table called `<paper>/<table>`, or what `figure/<paper>/<figure>` plans and measures."""
    kind, _, rest = name.partition("/")
    return load_figure(rest).table if kind == "figure" else load_table(name)


@lru_cache
def load_claim(name: str) -> Claim:
    """The claim called `<paper>/<claim>`."""
    known = names_of("claim")
    if name not in known:
        raise DllmBenchError(unknown_name("claim", name, known, listing=help_of("claim")))
    return read_claim(name, conf_file(f"claim/{name}.yaml"))


def read_claim(name: str, path: Path) -> Claim:
    """A claim from its yaml file."""
    plain = read_yaml(path)
    known = [field.name for field in fields(Claim) if field.name != "name"]
    unknown = [key for key in plain if key not in known]
    if unknown:
        raise DllmBenchError(f"Claim {name}: {unknown_name('key', unknown[0], known)}")
    claim = Claim(name, **{**plain, **dict(_converted(plain))})
    is_whole = claim.table and claim.ours and claim.theirs and claim.smallest
    if not (claim.untestable or is_whole):
        raise DllmBenchError(
            f"Claim {name} says neither why it is untestable nor all of table, ours, theirs and "
            "smallest; add what is missing."
        )
    if (claim.direction is Direction.EQUAL) != (claim.margin is not None):
        raise DllmBenchError(
            f"Claim {name} has direction {claim.direction} and margin {claim.margin}; a margin "
            "belongs to direction equal, and to no other."
        )
    return claim


def _converted(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries that are no plain text or number."""
    for side in ("ours", "theirs"):
        if side in plain:
            settings = plain[side] if isinstance(plain[side], list) else [plain[side]]
            yield side, tuple({facet: str(name) for facet, name in one.items()} for one in settings)
    if "at" in plain:
        yield "at", {facet: str(name) for facet, name in plain["at"].items()}
    if "direction" in plain:
        yield "direction", Direction(plain["direction"])
