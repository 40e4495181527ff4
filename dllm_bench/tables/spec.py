"""A table as data: layout, run queries, metrics and, for a published table, the reported values.

Facets are the axes of the table (model × setting × benchmark). Each value of a facet adds overrides
to the run query, and every (value, value, …, metric) is a `Cell`; a `Rule` changes some of them. A
cell may be derived from others, its parts: a ratio, a difference, an average, an area under a
curve. `Profile` translates the overrides of a cell to those of a run on this machine. Tables are
read in `load`; hashes and states of runs are found in `plan`, numbers in `frame`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from math import isfinite

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.metrics import definitions

EMBEDDED = "embedded"  # the default profile: models and tasks that ship with the package
SCORE = "score"  # definition name of the benchmark's own metric
SCORE_UNIT = "%"
OF = " of "  # in the name of a claim's table, before that of the table whose cells it has
LIMIT, REPEATS = "limit", "benchmark.repeats"  # settings: items of a run, and passes over them
HARDWARE_UNITS = ("tokens/s", "requests/s", "s", "ms", "×")  # of numbers that depend on hardware
WHOLE, CUT = "whole", "cut"  # area under a whole curve, or until it loses too much score
Query = tuple[str, ...]
"""Overrides of the run configuration in Hydra's form, "key=value"."""


@dataclass(frozen=True)
class FacetValue:
    """One value of a facet, or the additions of a rule to its cells."""

    name: str
    """Its name, as in the reported csv."""
    label: str = ""
    """The text shown."""
    run: Query = ()
    """Its additions to the run query."""
    needs: Query = ()
    """Hardware that no profile can replace; the cells are unavailable in the paper profile."""
    reported_on: str = ""
    """Hardware that the reported values were measured on."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Column title -> text, in additional columns."""
    attributes: Mapping[str, str] = field(default_factory=dict)
    """Column -> text of the facet's csv file, which rules and notes can match."""
    reported_only: str = ""
    """Reason why no run can fill these cells, so that only reported values are shown; else
    empty."""
    hidden: bool = False
    """Whether the cells are only measured as parts of others and not shown."""
    skip: bool = False
    """Whether the table does not have this combination."""
    mean_of: Query = ()
    """Values of the same facet whose numbers are averaged."""
    curve: Query = ()
    """Values of the same facet that are points of a curve."""


@dataclass(frozen=True)
class CellCondition:
    """Selects cells by their attributes."""

    where: Mapping[str, Query]
    """Attribute (facet, column of a facet's csv file, or "metric") -> values allowed."""

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """Return whether a cell with these attributes is selected."""
        return all(attributes.get(key) in allowed for key, allowed in self.where.items())


@dataclass(frozen=True)
class Rule(CellCondition):
    """Additions to some cells, after the values of their facets."""

    value: FacetValue
    """The additions."""


@dataclass(frozen=True)
class Note(CellCondition):
    """A remark on some cells; an empty `where` means the whole table."""

    name: str
    """The mark shown at the cells."""
    text: str
    """The remark."""


@dataclass(frozen=True)
class TableMetric:
    """A metric of the table, with its display and comparison."""

    name: str
    """Its name, as in the reported csv."""
    label: str
    """The text shown."""
    definition: str = ""
    """Name of its definition in `metrics/definitions`, or `SCORE`."""
    tolerance: float = 0.0
    """Accepted difference to a reported value: in the metric's unit, or as a share if relative."""
    relative: bool = False
    """Whether the tolerance is a share of the reported value."""
    over: Mapping[str, str] = field(default_factory=dict)
    """Facet values of the cell that this one is divided by."""
    minus: Mapping[str, str] = field(default_factory=dict)
    """Facet values of the cell that is subtracted from this one."""
    gain: bool = False
    """Whether a ratio is shown as a change in percent."""
    setting: str = ""
    """A dotted key of the run configuration, shown instead of a measured number."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Configured value -> the paper's word for it, for a setting."""
    area: str = ""
    """`WHOLE` or `CUT` for the area under a curve of score over the definition's metric (AUP)."""
    run: Query = ()
    """Further overrides of its cells' run, applied last: for example, a speed is measured over
    fewer items and in several passes. Cells with equal overrides share a run.
    """

    @property
    def is_score(self) -> bool:
        """Whether it is a score: a share of samples, shown in percent. Everything else is a metric
        by definition."""
        return self.definition == SCORE

    @property
    def unit(self) -> str:
        """The unit of its numbers."""
        if self.over:
            return "%" if self.gain else "×"
        if self.setting:
            return ""
        if self.area:
            return f"{SCORE_UNIT} × {definitions.definition(self.definition).unit}"
        if self.is_score:
            return "points" if self.minus else SCORE_UNIT
        return definitions.definition(self.definition).unit

    @property
    def is_of_times(self) -> bool:
        """Whether the number is computed from timings, which depend on the machine and its load."""
        if self.setting or self.is_score:
            return False
        return definitions.definition(self.definition).unit in HARDWARE_UNITS

    @property
    def is_mean_time(self) -> bool:
        """Whether it is a timing of all samples, not only of the fastest ones."""
        return self.is_of_times and not definitions.definition(self.definition).is_of_largest

    @property
    def is_compared(self) -> bool:
        """Whether it is a ratio or difference of two cells."""
        return bool(self.over or self.minus)

    @property
    def plain(self) -> TableMetric:
        """The metric that is divided or subtracted. It has no name, because notes and rules for the
        result do not apply to it.
        """
        return replace(self, name="", over={}, minus={}, gain=False)

    @property
    def formula(self) -> str:
        """Text that names the number: the definition with the cell it is divided or reduced by, or
        the setting."""
        if self.setting:
            return f"setting {self.setting}"
        sign = "÷" if self.over else "−"
        other = " ".join(f"{facet}={name}" for facet, name in {**self.over, **self.minus}.items())
        change = ", change in percent" if self.gain else ""
        own = f"{self.area} area over {self.definition}" if self.area else self.definition
        return f"{own} {sign} {other}{change}" if other else own

    def allowed(self, reported: float) -> float:
        """Return the accepted difference to `reported`."""
        return self.tolerance * abs(reported) if self.relative else self.tolerance


def parse_number(text: str) -> float | None:
    """Return the finite number in a text; None for a word, such as nan."""
    with suppress(ValueError):
        if isfinite(number := float(text)):
            return number
    return None


@dataclass(frozen=True)
class Cell:
    """One number to show: its position, the run it comes from, and the printed value."""

    values: Mapping[str, FacetValue]
    """Facet -> its value."""
    metric: TableMetric
    """The metric."""
    run: Query
    """Overrides of the run, at the paper's size."""
    reported: str
    """What the paper printed, digit by digit; empty if nothing."""
    notes: Query
    """Names of the notes on it."""
    rules: tuple[FacetValue, ...] = ()
    """Additions by rules."""

    @property
    def holding(self) -> tuple[FacetValue, ...]:
        """All facet values and rules that apply to the cell."""
        return (*self.values.values(), *self.rules)

    @property
    def keys(self) -> dict[str, str]:
        """Facet -> name of its value, as in the reported csv."""
        return {facet: value.name for facet, value in self.values.items()}

    @property
    def needs(self) -> Query:
        """Hardware of the reported run that no profile can replace."""
        return tuple(need for value in self.holding for need in value.needs)

    @property
    def reported_on(self) -> str:
        """Hardware that the reported value was measured on."""
        return ", ".join(v.reported_on for v in self.holding if v.reported_on)

    @property
    def curve(self) -> Query:
        """The points of the cell's curve; empty if it is not a curve."""
        return next((value.curve for value in self.values.values() if value.curve), ())

    @property
    def reported_only(self) -> str:
        """Reason why nothing can be measured; empty if something can."""
        return next((value.reported_only for value in self.holding if value.reported_only), "")


@dataclass(frozen=True)
class PaperTable:
    """One table: a published one, or one of this project (without reported values)."""

    name: str
    """`<paper>/<table>`."""
    title: str
    """Its title."""
    source: str
    """Where it is published, and where its set-up is from."""
    sections: Query
    """Facets whose values are sections, each with its own tables."""
    rows: Query
    """Facets whose values are rows."""
    columns: Query
    """Facets whose values are groups of columns."""
    facets: Mapping[str, tuple[FacetValue, ...]]
    """Facet -> its values, in order."""
    metrics: tuple[TableMetric, ...]
    """The metrics, columns of each group."""
    run: Query
    """Overrides of all runs."""
    reported: Mapping[Query, str]
    """(facet values …, metric) -> what the paper printed."""
    notes: tuple[Note, ...]
    """Remarks on cells."""
    rules: tuple[Rule, ...] = ()
    """Additions to some cells; of several overrides of a key the last one applies."""

    def cells(self) -> Iterator[Cell]:
        """Yield all cells shown, facet by facet in the order of the yaml, metrics innermost."""
        for combination in product(*self.facets.values()):
            values = dict(zip(self.facets, combination, strict=True))
            for metric in self.metrics:
                cell = self._cell(values, metric)
                if not any(value.skip or value.hidden for value in cell.holding):
                    yield cell

    def run_of(self, definition: str) -> Query:
        """Return the additions to the run query by the table's first metric of this definition."""
        return next((m.run for m in self.metrics if m.definition == definition), ())

    def parts(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the cells that a derived cell is computed from: (own, other) for a ratio or
        difference, the averaged cells, or the points of a curve. A cell with its own run has none.
        """
        other = {**cell.metric.over, **cell.metric.minus}
        if other:
            return tuple(self._at(cell, keys, cell.metric.plain) for keys in ({}, other))
        for facet, value in cell.values.items():
            if value.mean_of:
                return tuple(self._at(cell, {facet: v}, cell.metric) for v in value.mean_of)
        return self._parts_of_area(cell) if cell.metric.area or cell.curve else ()

    def _parts_of_area(self, cell: Cell) -> tuple[Cell, ...]:
        """Return the parts of an area: the x of the curve's points, then the scores of these points
        and of all other runs of the facet, because the area is weighted by the best score.
        """
        curves = [facet for facet, value in cell.values.items() if value.curve]
        if not cell.metric.area or len(curves) != 1:
            raise DllmBenchError(
                f"Table {self.name}: {cell.metric.name} at {cell.keys}: a number is an area where, "
                "and only where, one of its values is a curve; correct `area` or `curve`, or hide "
                "the value."
            )
        [facet] = curves
        single = replace(cell.metric, name="", area="")
        with_runs = [
            v.name for v in self.facets[facet] if not (v.curve or v.mean_of or v.reported_only)
        ]
        others = [name for name in with_runs if name not in cell.curve]
        score = replace(single, definition=SCORE, run=self.run_of(SCORE))
        xs = [self._at(cell, {facet: name}, single) for name in cell.curve]
        return (*xs, *(self._at(cell, {facet: name}, score) for name in (*cell.curve, *others)))

    def _at(self, cell: Cell, keys: Mapping[str, str], metric: TableMetric) -> Cell:
        """Return the cell of `metric` that differs from `cell` in the facet values `keys`."""
        pairs = ((facet, value) for facet in keys for value in self.facets.get(facet, ()))
        other = {facet: value for facet, value in pairs if value.name == keys[facet]}
        part = self._cell({**cell.values, **other}, metric) if len(other) == len(keys) else None
        if part is None or any(value.skip for value in part.holding):
            raise DllmBenchError(
                f"Table {self.name}: {cell.metric.name} at {cell.keys} is derived from "
                f"{dict(keys)}, and the table has no such cell; correct `over`, `minus` or "
                "`mean_of`."
            )
        return part

    def _cell(self, values: Mapping[str, FacetValue], metric: TableMetric) -> Cell:
        names = {facet: value.name for facet, value in values.items()}
        attributes = {key: text for v in values.values() for key, text in v.attributes.items()}
        attributes |= {**names, "metric": metric.name}
        notes = tuple(note.name for note in self.notes if note.where and note.holds(attributes))
        rules = tuple(rule.value for rule in self.rules if rule.holds(attributes))
        own = (item for value in (*values.values(), *rules) for item in value.run)
        run = (*self.run, *own, *metric.run)
        reported = self.reported.get((*names.values(), metric.name), "")
        return Cell(values, metric, run, reported, notes, rules)


@dataclass(frozen=True)
class Instead:
    """Overrides with which a profile replaces others."""

    asked: Query
    """Overrides that a query contains."""
    here: Query
    """The new overrides."""
    of: Collection[str] = ()
    """Tables and figures to which it applies, `PAPER/*` for all of a paper; empty: all."""

    def applied(self, query: Query) -> Query:
        """Return the query with the overrides replaced; unchanged if it does not contain them."""
        if not set(self.asked) <= set(query):
            return query
        return (*self.here, *(override for override in query if override not in self.asked))


@dataclass(frozen=True)
class Profile:
    """Translation of the paper's query of a run into the query of a run on this machine."""

    name: str
    """Name of the file in `conf/profile`."""
    embedded: bool
    """Whether models and tasks differ from the paper's: nothing is then compared with reported
    values, and the paper's hardware is not needed.
    """
    replace: Mapping[str, Mapping[str, str | None]]
    """Override key -> {the paper's value: the value here}. None removes the override. If no exact
    value matches, a `*` at the end of both values stands for the same text. A value that is not
    listed has no counterpart, and its cells are unavailable.
    """
    set: Query
    """Overrides that replace those of the same key, or are appended."""
    as_asked: Collection[str] = ()
    """Prompt sets that need no counterpart; `set` changes no setting of theirs."""
    default: Query = ()
    """Overrides for keys that a query does not set."""
    instead: tuple[Instead, ...] = ()
    """Applied in order, before everything else; entries for some tables come before those for
    all."""
    untrained: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Benchmark -> models that were not trained on its kind of task, so that their scores are
    meaningless."""
    passes: Query = ()
    """Overrides of timed runs: few items, decoded several times."""
    passes_of: Collection[str] = ()
    """Tables and figures with timed runs; `PAPER/*` stands for all of a paper."""
    limit: int | None = None
    """Requested number of items of a run, if not the profile's. A run of several passes never has
    more items than its own number.
    """
    most: int | None = None
    """Maximum number of items of any run, while the runs of a table grow together."""
    repeats: int | None = None
    """Requested number of passes of timed runs, if not the profile's."""

    @property
    def flags(self) -> str:
        """Command line options of `table` and `figure` that choose this profile."""
        asked = {"profile": self.name, "limit": self.limit, "passes": self.repeats}
        return " ".join(f"--{name} {value}" for name, value in asked.items() if value)

    def in_passes(self, count: int) -> Profile:
        """Return the profile with this many passes over the items of timed runs, of all tables;
        with one pass the timings come from the runs that give the scores.
        """
        return replace(self, passes=self.passes if count > 1 else (), repeats=count)

    def translate(self, query: Query) -> Query:
        """Return the translated query; the last override of a key applies, at the key's first
        position."""
        result: dict[str, str | None] = {}
        for override in self._here(last_of_each_key(query)):
            key, _, value = override.partition("=")
            result[key] = self._counterpart(key, value)
        given = overrides_by_key(self.default).items()
        result |= {key: value for key, value in given if key not in result}
        untouched = ("benchmark.",) if result.get("benchmark") in self.as_asked else ()
        result |= overrides_by_key(o for o in self.set if not o.startswith(untouched))
        result[LIMIT] = self._items(result)
        model, benchmark = result.get("model"), result.get("benchmark")
        if model in self.untrained.get(benchmark or "", ()):
            raise DllmBenchError(
                f"Model {model} was not trained on {benchmark}, the counterpart of this benchmark."
            )
        return tuple(f"{key}={value}" for key, value in result.items() if value is not None)

    def _items(self, query: Mapping[str, str | None]) -> str | None:
        """Return the number of items of a run, None for all: its own or the requested number."""
        own = query.get(LIMIT)
        asked = str(self.limit) if self.limit else own
        repeated = query.get(REPEATS) not in (None, "1")
        bounds = [asked, own if repeated else None, self.most]
        numbers = [int(n) for n in bounds if n and str(n).isdigit()]
        return str(min(numbers)) if numbers else own

    def run_of(self, table: str, cell: Cell) -> Query:
        """Return the untranslated overrides of a cell's run, after the `instead` entries for this
        table (for a claim's: those for the table whose cells it has) and its passes. Metrics of the
        fastest samples use the run over all items, because they depend on the number of items.
        """
        query = last_of_each_key(cell.run)
        for entry in self.instead:
            if entry.of and is_among(table.rpartition(OF)[2], entry.of):
                query = entry.applied(query)
        metric = cell.metric
        if metric.is_mean_time and is_among(table, self.passes_of):
            query += self.passes
        if not self.repeats:
            return query
        in_passes = metric.is_mean_time and self.repeats > 1
        has_own = metric.is_of_times and REPEATS in overrides_by_key(metric.run)
        return (*query, f"{REPEATS}={self.repeats}") if in_passes or has_own else query

    def switched(self, table: str, cell: Cell) -> Query:
        """Return the decoder settings that `instead` changes in a cell's run. Model, benchmark, and
        weights that follow the model are shown elsewhere.
        """
        here = self._here(self.run_of(table, cell))
        given = (override for override in here if override not in cell.run)
        return tuple(o for o in given if o.startswith("decoder.") and ".source=" not in o)

    def _here(self, query: Query) -> Query:
        """Return the query after the `instead` entries for all tables, applied in order."""
        for entry in self.instead:
            if not entry.of:
                query = entry.applied(query)
        return query

    def _counterpart(self, key: str, value: str) -> str | None:
        if key not in self.replace:
            return value
        if value in self.replace[key]:
            return self.replace[key][value]
        for original, here in self.replace[key].items():
            if here and original.endswith("*") and value.startswith(original[:-1]):
                return here.replace("*", value[len(original) - 1 :])
        raise DllmBenchError(
            f"Profile {self.name!r} has no counterpart of {key}={value}; add one to "
            f"conf/profile/{self.name}.yaml or choose another profile."
        )


def overrides_by_key(query: Iterable[str]) -> dict[str, str]:
    """Return override key -> value; of several overrides of a key the last one applies."""
    return dict(override.partition("=")[::2] for override in query)


def last_of_each_key(query: Query) -> Query:
    """Return a query without the overrides that later ones of the same key replace."""
    return tuple(f"{key}={value}" for key, value in overrides_by_key(query).items())


def is_among(table: str, names: Collection[str]) -> bool:
    """Return whether a table or figure is one of these; `PAPER/*` stands for all of a paper."""
    return table in names or f"{table.partition('/')[0]}/*" in names
