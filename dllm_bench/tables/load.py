"""Tables and profiles from their files: `conf/table/<paper>/<table>.yaml`, `conf/profile`, csv.

Reported values and notes are csv files below `tables/reported`, if the table has any, with a row
per value (`metric`, `value`) or a column per metric. A facet's values are spelled out, steps of a
sweep (`sweeps`) or the rows of a csv file, and so are rules. CONTRIBUTING.md shows the whole
syntax. Nothing is computed here.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import PACKAGE, conf_dir
from dllm_bench.tables.spec import (
    CUT,
    WHOLE,
    FacetValue,
    Note,
    PaperTable,
    Profile,
    Query,
    ReportedValue,
    Rule,
    RunRemark,
    TableMetric,
)

REPORTED = PACKAGE / "tables" / "reported"
LAYOUT = ("sections", "rows", "columns")
RULE = ("run", "only", "hidden", "skip", "needs", "reported_on")
VALUE = ("label", "show", "mean_of", "curve", *RULE)


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
    return table_of(name, read_yaml(path), data)


def table_of(name: str, plain: Mapping[str, Any], data: Path) -> PaperTable:
    """A table from what its yaml says."""
    steps = steps_of(plain["facets"])
    facets = {key: tuple(_values(spelled(one), data)) for key, one in plain["facets"].items()}
    rules = [spelled_rule(entry, steps) for entry in plain.get("rules", ())]
    metrics = tuple(_metric(key, entry) for key, entry in plain["metrics"].items())
    reported, notes = (
        read_csv(data / plain[key]) if key in plain else [] for key in ("reported", "notes")
    )
    return PaperTable(
        name=name,
        title=plain["title"],
        source=plain["source"],
        **{part: tuple(plain["layout"].get(part, ())) for part in LAYOUT},
        facets=facets,
        metrics=metrics,
        run=tuple(plain.get("run", ())),
        reported=_reported(reported, tuple(facets), metrics, plain["source"]),
        notes=tuple(_note(row) for row in notes),
        rules=tuple(rule for entry in rules for rule in _rules(entry, data)),
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
    instead = tuple((tuple(e["asked"]), tuple(e["here"])) for e in plain.get("instead", ()))
    remarks = tuple(
        RunRemark(mark, entry["text"], entry["benchmark"], tuple(entry["models"]))
        for mark, entry in plain.get("remarks", {}).items()
    )
    return Profile(
        name=name,
        embedded=bool(plain["embedded"]),
        replace=replace,
        set=tuple(plain["set"]),
        instead=instead,
        untrained=plain.get("untrained", {}),
        remarks=remarks,
    )


def read_yaml(path: Path) -> dict[str, Any]:
    """A yaml file as plain data."""
    plain: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return plain


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a csv file with a header."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _values(entry: Mapping[str, Any], data: Path) -> Iterator[FacetValue]:
    """A facet's values: spelled out in the yaml, or one per row of a csv file."""
    for name, plain in entry.get("values", {}).items():
        yield _value(name, plain, VALUE)
    for row in read_csv(data / entry["file"]) if "file" in entry else ():
        yield _row_value(row, entry)


def _value(name: str, plain: Mapping[str, Any], known: Sequence[str]) -> FacetValue:
    strange = sorted(set(plain) - set(known))
    if strange:
        raise DllmBenchError(f"{name}: {', '.join(strange)} is none of {', '.join(known)}.")
    return FacetValue(
        name=name,
        label=plain.get("label", name),
        run=tuple(plain.get("run", ())),
        needs=_several(plain.get("needs", ())),
        reported_on=plain.get("reported_on", ""),
        shown={title: str(text) for title, text in plain.get("show", {}).items()},
        only=plain.get("only", ""),
        hidden=plain.get("hidden", False),
        skip=plain.get("skip", False),
        mean_of=tuple(plain.get("mean_of", ())),
        curve=tuple(plain.get("curve", ())),
    )


def _several(plain: object) -> Query:
    """One entry or a list of them; numbers and truth values as csv files write them."""
    entries = plain if isinstance(plain, (list, tuple)) else [plain]
    return tuple(str(e).lower() if isinstance(e, bool) else str(e) for e in entries)


def _row_value(row: Mapping[str, str], entry: Mapping[str, Any]) -> FacetValue:
    """A csv row as a facet value: `run` filled with its columns, the rest looked up by column."""
    labels = entry.get("labels", {})
    name = row[entry["key"]]
    return FacetValue(
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


def _rules(entry: Mapping[str, Any], data: Path) -> Iterator[Rule]:
    """A rule, or one per row of a csv file: for cells that `match` the row, with its columns."""
    where = {key: _several(allowed) for key, allowed in entry["where"].items()}
    plain = {key: entry[key] for key in entry if key not in ("where", "file", "match")}
    if "file" not in entry:
        yield Rule(where, _value("rule", plain, RULE))
    for row in read_csv(data / entry["file"]) if "file" in entry else ():
        filled = {**plain, "run": [text.format(**row) for text in plain["run"]]}
        matched = {column: (row[column],) for column in entry["match"]}
        yield Rule({**where, **matched}, _value("rule", filled, RULE))


def _metric(name: str, plain: Mapping[str, Any]) -> TableMetric:
    """`tolerance: 10 %` is relative, a bare number is in the metric's unit."""
    text = str(plain.get("tolerance", 0))
    relative = text.endswith("%")
    return TableMetric(
        name=name,
        label=plain["label"],
        definition=plain.get("definition", ""),
        tolerance=float(text.removesuffix("%")) / (100 if relative else 1),
        relative=relative,
        over=plain.get("over", {}),
        minus=plain.get("minus", {}),
        gain=plain.get("unit", "") == "%",
        setting=plain.get("setting", ""),
        labels={str(key): str(word) for key, word in plain.get("labels", {}).items()},
        area=_one_of(("", WHOLE, CUT), plain.get("area", "")),
    )


def _one_of(known: Sequence[str], word: str) -> str:
    if word not in known:
        raise DllmBenchError(f"{word!r} is none of {', '.join(filter(None, known))}.")
    return word


def _reported(
    rows: Sequence[Mapping[str, str]],
    facets: Sequence[str],
    metrics: Sequence[TableMetric],
    source: str,
) -> dict[Query, ReportedValue]:
    """(facet values …, metric) -> printed value; the source is cut at its first semicolon."""
    where = source.partition(";")[0]
    found = {}
    for row in rows:
        keys = tuple(row[facet] for facet in facets)
        if "metric" in row:
            unit = row.get("unit", "")
            found[(*keys, row["metric"])] = ReportedValue(row["value"], unit, where)
        else:
            wide = {m.name: ReportedValue(row[m.name], "", where) for m in metrics if m.name in row}
            found |= {(*keys, name): value for name, value in wide.items()}
    return found


def _note(row: Mapping[str, str]) -> Note:
    pairs = (condition.partition("=")[::2] for condition in row["where"].split())
    return Note({key: tuple(value.split("|")) for key, value in pairs}, row["id"], row["text"])


class SweepStep(NamedTuple):
    """A value that a sweep gives: its name, its x, the sweep it belongs to."""

    value: str
    x: str
    group: str


def spelled(plain: Mapping[str, Any]) -> dict[str, Any]:
    """A facet with its sweeps as values."""
    values = dict(plain.get("values", {}))
    for group, sweep in _sweeps(plain):
        curve = [sweep["from"]] if "from" in sweep else []
        for x, at in _steps(sweep["at"]):
            run = [text.format(at=at) for text in sweep["run"]]
            hidden = {"hidden": True} if curve else {}
            values[_name(group, x)] = {"label": sweep.get("label", x), "run": run, **hidden}
        if curve:
            points = [*curve, *(_name(group, x) for x, _ in _steps(sweep["at"]))]
            values[group] = {"label": sweep.get("label", group), "curve": points}
    rest = {key: entry for key, entry in plain.items() if key not in ("at", "run", "sweeps")}
    return {**rest, "values": values} if values else dict(plain)


def steps_of(facets: Mapping[str, Mapping[str, Any]]) -> list[SweepStep]:
    """Every value that a sweep of any facet gives."""
    return [
        SweepStep(_name(group, x), x, group)
        for facet in facets.values()
        for group, sweep in _sweeps(facet)
        for x, _ in _steps(sweep["at"])
    ]


def spelled_rule(plain: Mapping[str, Any], steps: Sequence[SweepStep]) -> dict[str, Any]:
    """A rule of the table; a sweep's name in `where` stands for all of its values."""

    def every(allowed: Any) -> list[Any]:
        wanted = allowed if isinstance(allowed, list) else [allowed]
        return [*wanted, *(step.value for step in steps if step.group in wanted)]

    return {**plain, "where": {key: every(entry) for key, entry in plain["where"].items()}}


def _sweeps(plain: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    if "at" in plain:
        return [("", plain)]
    return list(plain.get("sweeps", {}).items())


def _steps(at: Any) -> Iterator[tuple[str, Any]]:
    """(x, what the run is given): a list where both are one, a mapping where they differ."""
    pairs = at.items() if isinstance(at, Mapping) else ((x, x) for x in at)
    return ((str(x), value) for x, value in pairs)


def _name(group: str, x: str) -> str:
    return f"{group}-{x}" if group else x
