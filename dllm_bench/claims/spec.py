"""A claim as data: what a work states, and which numbers of a table or figure test it.

A `Claim` is read from `conf/claim/<paper>/<claim>.yaml`. Its two sides are cells of a table or
figure of this project, so that its runs are planned, run and found as that table's; `table` gives
these cells as a table of their own. A side may be a list of settings: then the fastest one that
keeps the score is chosen on the development half of the items, and the test half is reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import date
from enum import StrEnum
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.figures.spec import load_figure
from dllm_bench.paths import conf_file, read_yaml
from dllm_bench.tables.load import check_keys, errors_of, load_table, require_name
from dllm_bench.tables.spec import OF, SCORE, FacetValue, PaperTable, Query, Rule, TableMetric

DEFAULT_POINTS, DEFAULT_RATIO = 2.0, 1.05
"""Margins where no gap is printed."""
WIDEST_BAND = 1.2
"""A printed ratio is confirmed within at most this factor of it."""
UNKNOWN_DATE = date(1, 1, 1)
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
    printed: tuple[float, float] | None = None
    """What the work prints for our side and the other: points, or numbers whose ratio counts."""
    keep: float = 0.0
    """Where settings are chosen: points that a score may be below that of the setting that both
    sides list, or below the best of both if they share none.
    """
    frozen: date = UNKNOWN_DATE
    """The day on which the claim took this form; runs that settle it are to be made after it."""
    task: str = ""
    """The text it is tested on here: names of embedded benchmarks."""
    seeds: tuple[int, ...] = ()
    """Seeds of the random numbers of its runs."""
    trainings: Keys | None = None
    """A facet of the table -> its values: the trainings of what is compared, as names with spaces
    between them. Empty: the table's cells have one training.
    """
    was: tuple[str, ...] = ()
    """Names under which the findings called it before."""
    remark: str = ""
    """How the test differs from what was claimed: another quantity, a part of the benchmarks."""

    @property
    def is_difference(self) -> bool:
        """True for scores, compared by their difference; all else is compared by its ratio."""
        return self.metric == SCORE

    @property
    def stated(self) -> float | None:
        """The printed effect: a difference in points, or a ratio; None if no size is printed."""
        if self.printed is None:
            return None
        ours, theirs = self.printed
        return ours - theirs if self.is_difference else ours / theirs

    @property
    def margin(self) -> float:
        """The largest effect that counts as none, in points, or as the logarithm of a ratio: half
        of the printed gap; 2 points, or 5 %, where none is printed.
        """
        if self.stated is None:
            return DEFAULT_POINTS if self.is_difference else math.log(DEFAULT_RATIO)
        return abs(self.stated if self.is_difference else math.log(self.stated)) / 2

    def beyond(self, share: float) -> float:
        """Return the effect that differs by `share` margins from that of two equal sides."""
        step = share * self.margin
        return step if self.is_difference else math.exp(step)

    @property
    def band(self) -> tuple[float, float]:
        """Lowest and highest effect that agree with the printed one: half of the gap away from it,
        of a ratio at most a fifth.
        """
        stated = self.stated or 0.0
        if self.is_difference:
            return stated - self.margin, stated + self.margin
        width = math.exp(min(self.margin, math.log(WIDEST_BAND)))
        return stated / width, stated * width

    @property
    def chooses(self) -> bool:
        """True if a side has several settings."""
        return len(self.ours) > 1 or len(self.theirs) > 1

    @property
    def definitions(self) -> Query:
        """The metrics that are measured: its own, and the score where settings are chosen."""
        return tuple(dict.fromkeys((self.metric, *((SCORE,) if self.chooses else ()))))

    def cells(self) -> PaperTable:
        """Return the cells of both sides as a table that is planned and run like any other.

        A profile's `instead` entries for the source table apply to it. Its `passes` do not, since a
        claim's runs have the claim's own number of items; a requested number of passes does.
        """
        whole = source_table(self.table)
        pairs = ((one.at, side) for one in self.by_training() for side in (*one.ours, *one.theirs))
        wanted = [{**(at or {}), **side} for at, side in pairs]
        self._check(whole, wanted)
        named = {facet: dict.fromkeys(keys[facet] for keys in wanted) for facet in whole.facets}
        shown = {
            facet: tuple(replace(value, hidden=value.name not in named[facet]) for value in values)
            for facet, values in whole.facets.items()
        }
        combinations = (dict(zip(named, names, strict=True)) for names in product(*named.values()))
        skipped = tuple(_skip(keys) for keys in combinations if keys not in wanted)
        metrics = tuple(TableMetric("", "", d, run=whole.run_of(d)) for d in self.definitions)
        return replace(
            whole,
            name=f"claim {self.name}{OF}{whole.name}",
            facets=shown,
            metrics=metrics,
            rules=(*whole.rules, *skipped),
        )

    def by_training(self) -> list[Claim]:
        """Return one claim for each of its trainings."""
        if not self.trainings:
            return [self]
        ((facet, names),) = self.trainings.items()
        each = ({**(self.at or {}), facet: name} for name in names.split())
        return [replace(self, at=at, trainings=None) for at in each]

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
    """Load the table `<paper>/<table>`, or what `figure/<paper>/<figure>` plans and measures."""
    kind, _, rest = name.partition("/")
    return load_figure(rest).table if kind == "figure" else load_table(name)


@lru_cache
def load_claim(name: str) -> Claim:
    """Load the claim called `<paper>/<claim>`."""
    require_name("claim", name)
    claim = read_claim(name, conf_file(f"claim/{name}.yaml"))
    _ = claim.untestable or claim.cells()  # raises for cells that its table does not have
    return claim


def read_claim(name: str, path: Path) -> Claim:
    """Read a claim from its yaml file."""
    with errors_of(path, "claim"):
        plain = read_yaml(path)
        check_keys(f"Claim {name}", plain, [field.name for field in fields(Claim)][1:])
        said = {key: plain[key] for key in ("sentence", "stands")}
        claim = made_from(Claim, {"name": name, **said, **plain, **dict(_converted(plain))})
        claim.by_training()  # raises for trainings of several facets
    if claim.frozen == UNKNOWN_DATE:
        raise DllmBenchError(f"Claim {name} has no date; add the day it was written as `frozen`.")
    is_whole = claim.table and claim.ours and claim.theirs and claim.task and claim.seeds
    if not (claim.untestable or is_whole):
        raise DllmBenchError(
            f"Claim {name} says neither why it is untestable nor all of table, ours, theirs, task "
            "and seeds; add what is missing."
        )
    ours, theirs = claim.printed or (2.0, 1.0)
    if ours == theirs or (min(ours, theirs) <= 0 and not claim.is_difference):
        raise DllmBenchError(
            f"Claim {name} has printed numbers that give no margin: they are equal or, for a "
            "ratio, not above 0; leave `printed` out."
        )
    return claim


def _converted(plain: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries that are not plain text or numbers, converted to the types of `Claim`."""
    for side in ("ours", "theirs"):
        if side in plain:
            settings = plain[side] if isinstance(plain[side], list) else [plain[side]]
            yield side, tuple({facet: str(name) for facet, name in one.items()} for one in settings)
    for listed in ("printed", "seeds", "was"):
        if listed in plain:
            yield listed, tuple(plain[listed])
    for keys in ("at", "trainings"):
        if keys in plain:
            yield keys, {facet: str(name) for facet, name in plain[keys].items()}
    if "direction" in plain:
        yield "direction", Direction(plain["direction"])
