"""A table as data: layout, run queries, metric definitions and, for a paper's, reported values.

A `PaperTable` is read from `conf/table/<paper>/<table>.yaml`, its reported values and notes from
csv files below `tables/reported`, if it has any; nothing is computed here. Facets span the table
(model × setting × benchmark), each value adds overrides to the run query, and every (value, value,
…, metric) is a `Cell`. `Profile` translates a cell's overrides to what is run here. Leaves out:
hashes and states (`plan`), measured numbers (`build`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from dllm_bench.core.request import DllmBenchError
from dllm_bench.paths import PACKAGE, conf_dir

REPORTED = PACKAGE / "tables" / "reported"
Query = tuple[str, ...]  # Hydra-style overrides, "key=value"


@dataclass(frozen=True)
class Value:
    """One value of a facet: what it adds to a run query, what it needs, what is shown beside it."""

    name: str
    label: str
    run: Query = ()
    needs: Query = ()
    reported_on: str = ""
    shown: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Metric:
    """A number of the table and the name of its definition.

    tolerance: accepted difference to a reported value, in its unit or (relative) as a share.
    """

    name: str
    label: str
    definition: str
    tolerance: float = 0.0
    relative: bool = False

    @property
    def is_score(self) -> bool:
        """A score is a share of samples, shown in percent; all else is a speed."""
        return self.definition == "score"

    def allowed(self, reported: float) -> float:
        """The accepted difference to `reported`."""
        return self.tolerance * abs(reported) if self.relative else self.tolerance


@dataclass(frozen=True)
class Reported:
    """A printed value: its text, digit by digit, and its number."""

    text: str
    unit: str
    source: str

    @property
    def value(self) -> float:
        return float(self.text)


@dataclass(frozen=True)
class Note:
    """A remark on the cells whose keys meet all of `where`; an empty `where` is the whole table."""

    name: str
    text: str
    where: Mapping[str, Query]

    def holds(self, attributes: Mapping[str, str]) -> bool:
        """True when the cell with these attributes is meant."""
        return all(attributes.get(key) in allowed for key, allowed in self.where.items())


@dataclass(frozen=True)
class Cell:
    """One number to be shown: where it stands, which run gives it, what the paper printed."""

    values: Mapping[str, Value]
    metric: Metric
    run: Query
    reported: Reported | None
    notes: Query

    @property
    def keys(self) -> dict[str, str]:
        """Facet -> value name, as in the reported csv."""
        return {facet: value.name for facet, value in self.values.items()}

    @property
    def needs(self) -> Query:
        """Hardware the reported run had to have."""
        return tuple(need for value in self.values.values() for need in value.needs)

    @property
    def reported_on(self) -> str:
        """Hardware the reported value was measured on."""
        return ", ".join(v.reported_on for v in self.values.values() if v.reported_on)


@dataclass(frozen=True)
class PaperTable:
    """Layout and contents of one table, a published one or (nothing reported) this project's."""

    name: str
    title: str
    source: str
    sections: Query
    rows: Query
    columns: Query
    facets: Mapping[str, tuple[Value, ...]]
    metrics: tuple[Metric, ...]
    run: Query
    reported: Mapping[Query, Reported]
    notes: tuple[Note, ...]

    def cells(self) -> Iterator[Cell]:
        """All cells, facet by facet in the order of the yaml, metrics innermost."""
        for combination in product(*self.facets.values()):
            values = dict(zip(self.facets, combination, strict=True))
            run = (*self.run, *(item for value in combination for item in value.run))
            for metric in self.metrics:
                yield self._cell(values, metric, run)

    def _cell(self, values: Mapping[str, Value], metric: Metric, run: Query) -> Cell:
        names = {facet: value.name for facet, value in values.items()}
        attributes = {key: text for v in values.values() for key, text in v.attributes.items()}
        marked = {**attributes, **names, "metric": metric.name}
        notes = tuple(note.name for note in self.notes if note.where and note.holds(marked))
        reported = self.reported.get((*names.values(), metric.name))
        return Cell(values, metric, run, reported, notes)


@dataclass(frozen=True)
class Profile:
    """How a paper-scale query becomes what is run here.

    replace: override key -> {paper's value: value here}; None leaves the override out, and a value
    without counterpart makes the cell impossible. set: overrides that replace or follow the others.
    embedded: other models and tasks than the paper's, so nothing is compared and the paper's
    hardware is not needed.
    """

    name: str
    embedded: bool
    replace: Mapping[str, Mapping[str, str | None]]
    set: Query

    def translate(self, query: Query) -> Query:
        """The query of this profile; later overrides of a key win, a key keeps its first place."""
        result: dict[str, str | None] = {}
        for override in query:
            key, _, value = override.partition("=")
            result[key] = self._counterpart(key, value)
        result.update(override.partition("=")[::2] for override in self.set)
        return tuple(f"{key}={value}" for key, value in result.items() if value is not None)

    def _counterpart(self, key: str, value: str) -> str | None:
        if key not in self.replace:
            return value
        if value not in self.replace[key]:
            raise DllmBenchError(
                f"Profile {self.name!r} has no counterpart of {key}={value}; add one to "
                f"conf/profile/{self.name}.yaml or choose another profile."
            )
        return self.replace[key][value]


def table_names() -> list[str]:
    """All tables, as `<paper>/<table>`."""
    root = conf_dir() / "table"
    return sorted(
        path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")
    )


@lru_cache
def load_table(name: str) -> PaperTable:
    """The table called `<paper>/<table>`."""
    if name not in table_names():
        raise DllmBenchError(
            f"There is no table {name!r}; choose one of: {', '.join(table_names())}."
        )
    return read_table(name, conf_dir() / "table" / f"{name}.yaml", REPORTED)


def read_table(name: str, path: Path, data: Path) -> PaperTable:
    """A table from its yaml; the csv files it may name lie below `data`."""
    plain = read_yaml(path)
    facets = {key: tuple(_values(entry, data)) for key, entry in plain["facets"].items()}
    reported, notes = (
        read_csv(data / plain[key]) if key in plain else [] for key in ("reported", "notes")
    )
    return PaperTable(
        name=name,
        title=plain["title"],
        source=plain["source"],
        **{part: tuple(plain["layout"][part]) for part in ("sections", "rows", "columns")},
        facets=facets,
        metrics=tuple(_metric(key, entry) for key, entry in plain["metrics"].items()),
        run=tuple(plain["run"]),
        reported=_reported(reported, tuple(facets), plain["source"]),
        notes=tuple(_note(row) for row in notes),
    )


@lru_cache
def load_profile(name: str) -> Profile:
    """The profile `conf/profile/<name>.yaml`."""
    known = sorted(path.stem for path in (conf_dir() / "profile").glob("*.yaml"))
    if name not in known:
        raise DllmBenchError(f"There is no profile {name!r}; choose one of: {', '.join(known)}.")
    plain = read_yaml(conf_dir() / "profile" / f"{name}.yaml")
    replace = {
        key: {str(a): None if b is None else str(b) for a, b in mapping.items()}
        for key, mapping in plain["replace"].items()
    }
    return Profile(name, bool(plain["embedded"]), replace, tuple(plain["set"]))


def read_yaml(path: Path) -> dict[str, Any]:
    """A yaml file as plain data."""
    plain: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return plain


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file with a header."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _values(entry: Mapping[str, Any], data: Path) -> Iterator[Value]:
    """A facet's values: spelled out in the yaml, or one per row of a csv file."""
    for name, plain in entry.get("values", {}).items():
        yield Value(name, plain["label"], tuple(plain["run"]))
    for row in read_csv(data / entry["file"]) if "file" in entry else ():
        yield _row_value(row, entry)


def _row_value(row: Mapping[str, str], entry: Mapping[str, Any]) -> Value:
    """A csv row as a facet value: `run` filled with its columns, the rest looked up by column."""
    labels = entry.get("labels", {})
    name = row[entry["key"]]
    return Value(
        name=name,
        label=name,
        run=(*(text.format(**row) for text in entry["run"]), *_chosen(row, entry.get("when", {}))),
        needs=_chosen(row, entry.get("needs", {})),
        reported_on=", ".join(_chosen(row, entry.get("reported_on", {}))),
        shown={title: labels.get(row[col], row[col]) for col, title in entry["show"].items()},
        attributes=dict(row),
    )


def _chosen(row: Mapping[str, str], lookup: Mapping[str, Mapping[str, Any]]) -> Query:
    """Entries of `lookup[column][row's value of column]`, in order."""
    found: list[str] = []
    for column, options in lookup.items():
        option = options.get(row[column], [])
        found += [option] if isinstance(option, str) else option
    return tuple(found)


def _metric(name: str, plain: Mapping[str, Any]) -> Metric:
    """`tolerance: 10 %` is relative, a bare number is in the metric's unit."""
    text = str(plain.get("tolerance", 0))
    relative = text.endswith("%")
    tolerance = float(text.removesuffix("%")) / (100 if relative else 1)
    return Metric(name, plain["label"], plain["definition"], tolerance, relative)


def _reported(
    rows: Sequence[Mapping[str, str]], facets: Sequence[str], source: str
) -> dict[Query, Reported]:
    """(facet values …, metric) -> printed value; the source is cut at its first semicolon."""
    where = source.partition(";")[0]
    return {
        (*(row[facet] for facet in facets), row["metric"]): Reported(
            row["value"], row["unit"], where
        )
        for row in rows
    }


def _note(row: Mapping[str, str]) -> Note:
    pairs = (condition.partition("=")[::2] for condition in row["where"].split())
    return Note(row["id"], row["text"], {key: tuple(value.split("|")) for key, value in pairs})
