"""A table as data: layout, run queries, metric definitions and, for a paper's, reported values.

A `PaperTable` is read (`reading`) from `conf/table/<paper>/<table>.yaml`; nothing is computed here.
Facets span the table (model × setting × benchmark), each value adds overrides to the run query, and
every (value, value, …, metric) is a `Cell`; a `Rule` says what holds for some of them. A cell may
be derived from others (a ratio, a difference, an average), its parts. `Profile` translates a cell's
overrides to what is run here. Leaves out: hashes and states (`plan`), measured numbers (`build`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from dllm_bench.core.errors import DllmBenchError

SCORE = "score"  # the definition of a benchmark's own metric
WHOLE, CUT = "whole", "cut"  # areas under all of a curve, or before it ends in a loss
Query = tuple[str, ...]  # Hydra-style overrides, "key=value"


@dataclass(frozen=True)
class FacetValue:
    """One value of a facet: what it adds to a run query, what it needs, what is shown beside it.

    only: why no run can give these cells, reported values stand alone; hidden: measured as a part
    of derived numbers, never shown; skip: there are no such cells; mean_of: values of the same
    facet whose numbers are averaged; curve: values of the same facet that are points of a curve.
    """

    name: str
    label: str = ""
    run: Query = ()
    needs: Query = ()
    reported_on: str = ""
    shown: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    hidden: bool = False
    skip: bool = False
    mean_of: Query = ()
    curve: Query = ()


@dataclass(frozen=True)
class CellCondition:
    """What a cell's attributes have to be: facet values, columns of a facet's file, the metric."""

    where: Mapping[str, Query]

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """True when the cell with these attributes is meant."""
        return all(attributes.get(key) in allowed for key, allowed in self.where.items())


@dataclass(frozen=True)
class Rule(CellCondition):
    """`value` holds for the cells meant, beside the values of their facets."""

    value: FacetValue


@dataclass(frozen=True)
class Note(CellCondition):
    """A remark on the cells meant; an empty `where` is the whole table."""

    name: str
    text: str


@dataclass(frozen=True)
class TableMetric:
    """A number of the table and the name of its definition.

    tolerance: accepted difference to a reported value, in its unit or (relative) as a share.
    over, minus: facet values of the cell this one is divided by or reduced by; gain: the ratio as a
    change in percent. setting: a dotted key of the run configuration instead of a definition;
    labels: configured value -> the paper's word for it. area: not the definition's own number but
    the area under a curve of the score over it (AUP), WHOLE or CUT.
    """

    name: str
    label: str
    definition: str = ""
    tolerance: float = 0.0
    relative: bool = False
    over: Mapping[str, str] = field(default_factory=dict)
    minus: Mapping[str, str] = field(default_factory=dict)
    gain: bool = False
    setting: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    area: str = ""

    @property
    def is_score(self) -> bool:
        """A score is a share of samples, shown in percent; all else is a definition's number."""
        return self.definition == SCORE

    @property
    def plain(self) -> TableMetric:
        """The number that is divided or subtracted; what is said of the result is not said of it,
        so it has no name.
        """
        return replace(self, name="", over={}, minus={}, gain=False)

    @property
    def formula(self) -> str:
        """The definition, what it is set against, or the setting read; names the number."""
        if self.setting:
            return f"setting {self.setting}"
        sign = "÷" if self.over else "−"
        other = " ".join(f"{facet}={name}" for facet, name in {**self.over, **self.minus}.items())
        change = ", change in percent" if self.gain else ""
        own = f"{self.area} area over {self.definition}" if self.area else self.definition
        return f"{own} {sign} {other}{change}" if other else own

    def allowed(self, reported: float) -> float:
        """The accepted difference to `reported`."""
        return self.tolerance * abs(reported) if self.relative else self.tolerance


@dataclass(frozen=True)
class ReportedValue:
    """A printed value: its text, digit by digit, and its number (None: it is a word)."""

    text: str
    unit: str
    source: str

    @property
    def value(self) -> float | None:
        try:
            return float(self.text)
        except ValueError:
            return None


@dataclass(frozen=True)
class Cell:
    """One number to be shown: where it stands, which run gives it, what the paper printed.

    values: by facet; rules: what else holds.
    """

    values: Mapping[str, FacetValue]
    metric: TableMetric
    run: Query
    reported: ReportedValue | None
    notes: Query
    rules: tuple[FacetValue, ...] = ()

    @property
    def holding(self) -> tuple[FacetValue, ...]:
        """All that holds for the cell."""
        return (*self.values.values(), *self.rules)

    @property
    def keys(self) -> dict[str, str]:
        """Facet -> value name, as in the reported csv."""
        return {facet: value.name for facet, value in self.values.items()}

    @property
    def needs(self) -> Query:
        """Hardware the reported run had to have."""
        return tuple(need for value in self.holding for need in value.needs)

    @property
    def reported_on(self) -> str:
        """Hardware the reported value was measured on."""
        return ", ".join(v.reported_on for v in self.holding if v.reported_on)

    @property
    def curve(self) -> Query:
        """The points of the curve that the cell is; empty where it is none."""
        return next((value.curve for value in self.values.values() if value.curve), ())

    @property
    def only(self) -> str:
        """Why nothing can be measured; empty where something can."""
        return next((value.only for value in self.holding if value.only), "")

    @property
    def hidden(self) -> bool:
        """True for a cell that is measured for others and not shown."""
        return any(value.hidden for value in self.holding)

    @property
    def skipped(self) -> bool:
        """True for a combination that the table does not have."""
        return any(value.skip for value in self.holding)


@dataclass(frozen=True)
class PaperTable:
    """Layout and contents of one table, a published one or (nothing reported) this project's."""

    name: str
    title: str
    source: str
    sections: Query
    rows: Query
    columns: Query
    facets: Mapping[str, tuple[FacetValue, ...]]
    metrics: tuple[TableMetric, ...]
    run: Query
    reported: Mapping[Query, ReportedValue]
    notes: tuple[Note, ...]
    rules: tuple[Rule, ...] = ()

    def cells(self) -> Iterator[Cell]:
        """All cells shown, facet by facet in the order of the yaml, metrics innermost."""
        for combination in product(*self.facets.values()):
            values = dict(zip(self.facets, combination, strict=True))
            for metric in self.metrics:
                cell = self._cell(values, metric)
                if not cell.skipped and not cell.hidden:
                    yield cell

    def parts(self, cell: Cell) -> tuple[Cell, ...]:
        """The cells a derived one is made of: (own, other) of a ratio or difference, else those
        averaged, else a curve's; none where the cell has a run of its own.
        """
        other = {**cell.metric.over, **cell.metric.minus}
        if other:
            return tuple(self._at(cell, keys, cell.metric.plain) for keys in ({}, other))
        for facet, value in cell.values.items():
            if value.mean_of:
                return tuple(self._at(cell, {facet: v}, cell.metric) for v in value.mean_of)
        return self._under(cell) if cell.metric.area or cell.curve else ()

    def _under(self, cell: Cell) -> tuple[Cell, ...]:
        """What an area is made of: x of the curve's points, then the scores of them and of all
        other runs of the facet, the best of which weighs them.
        """
        if not (cell.metric.area and cell.curve):
            raise DllmBenchError(
                f"Table {self.name}: {cell.metric.name} at {cell.keys}: a number is an area where, "
                "and only where, its value is a curve; mend `area`, `curve` or hide the value."
            )
        [facet] = [facet for facet, value in cell.values.items() if value.curve]
        single = replace(cell.metric, name="", area="")
        others = [v.name for v in self.facets[facet] if not (v.curve or v.mean_of or v.only)]
        rest = [name for name in others if name not in cell.curve]
        score = replace(single, definition=SCORE)
        xs = [self._at(cell, {facet: name}, single) for name in cell.curve]
        return (*xs, *(self._at(cell, {facet: name}, score) for name in (*cell.curve, *rest)))

    def _at(self, cell: Cell, keys: Mapping[str, str], metric: TableMetric) -> Cell:
        """The cell at other facet values."""
        values = {
            facet: next((v for v in self.facets[facet] if v.name == name), None)
            for facet, name in {**cell.keys, **keys}.items()
        }
        found = {facet: value for facet, value in values.items() if value}
        part = self._cell(found, metric) if len(found) == len(self.facets) else None
        if part is None or part.skipped:
            raise DllmBenchError(
                f"Table {self.name}: {cell.metric.name} at {cell.keys} is derived from "
                f"{dict(keys)}, and the table has no such cell; mend `over`, `minus` or `mean_of`."
            )
        return part

    def _cell(self, values: Mapping[str, FacetValue], metric: TableMetric) -> Cell:
        names = {facet: value.name for facet, value in values.items()}
        attributes = {key: text for v in values.values() for key, text in v.attributes.items()}
        marked = {**attributes, **names, "metric": metric.name}
        notes = tuple(note.name for note in self.notes if note.where and note.holds(marked))
        rules = tuple(rule.value for rule in self.rules if rule.holds(marked))
        run = (*self.run, *(item for v in (*values.values(), *rules) for item in v.run))
        reported = self.reported.get((*names.values(), metric.name))
        return Cell(values, metric, run, reported, notes, rules)


@dataclass(frozen=True)
class RunRemark:
    """What has to be said of cells that run one of some models on a benchmark."""

    name: str
    text: str
    benchmark: str
    models: tuple[str, ...]

    def holds(self, query: Query) -> bool:
        """Whether a run of this query is meant; of overrides of one key the last one counts."""
        asked = dict(override.partition("=")[::2] for override in query)
        return asked.get("benchmark") == self.benchmark and asked.get("model") in self.models


@dataclass(frozen=True)
class Profile:
    """How a paper-scale query becomes what is run here.

    replace: override key -> {paper's value: value here}; None leaves the override out, `*` at the
    end stands for the same rest in both, where no exact value fits, and a value without counterpart
    makes the cell impossible.
    set: overrides that replace or follow the others. embedded: other models and tasks than the
    paper's, so nothing is compared and the paper's hardware is not needed. instead: overrides that
    stand for others before all that (a decoder of ours for a served engine). untrained: benchmark
    -> models here that never saw its kind, whose scores would say nothing. remarks: what has to be
    said of cells that are measured. limit: items per run, where a quick look asks for fewer.
    """

    name: str
    embedded: bool
    replace: Mapping[str, Mapping[str, str | None]]
    set: Query
    instead: tuple[tuple[Query, Query], ...] = ()
    untrained: Mapping[str, Collection[str]] = field(default_factory=dict)
    remarks: tuple[RunRemark, ...] = ()
    limit: int | None = None

    @property
    def flags(self) -> str:
        """What `table` and `figure` are told to mean this profile."""
        return f"--profile {self.name}" + (f" --limit {self.limit}" if self.limit else "")

    def translate(self, query: Query) -> Query:
        """The query of this profile; later overrides of a key win, a key keeps its first place."""
        result: dict[str, str | None] = {}
        for asked, here in self.instead:
            if set(asked) <= set(query):
                query = (*here, *(override for override in query if override not in asked))
        for override in query:
            key, _, value = override.partition("=")
            result[key] = self._counterpart(key, value)
        result.update(override.partition("=")[::2] for override in self.set)
        model, benchmark = result.get("model"), result.get("benchmark")
        if model in self.untrained.get(benchmark or "", ()):
            raise DllmBenchError(
                f"Model {model} was not trained on {benchmark}, the counterpart of this benchmark."
            )
        return tuple(f"{key}={value}" for key, value in result.items() if value is not None)

    def _counterpart(self, key: str, value: str) -> str | None:
        if key not in self.replace:
            return value
        if value in self.replace[key]:
            return self.replace[key][value]
        for asked, here in self.replace[key].items():
            if here and asked.endswith("*") and value.startswith(asked[:-1]):
                return here.replace("*", value[len(asked) - 1 :])
        raise DllmBenchError(
            f"Profile {self.name!r} has no counterpart of {key}={value}; add one to "
            f"conf/profile/{self.name}.yaml or choose another profile."
        )
