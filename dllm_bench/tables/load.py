"""Read tables and profiles from their files: `conf/table/<paper>/<table>.yaml`, `conf/profile`,
csv.

Reported values and notes are csv files below `tables/reported`, with a row per value (`metric`,
`value`) or a column per metric. The values of a facet are listed in the yaml, are steps of a sweep,
or are the rows of a csv file; rules are listed or come from a csv file. CONTRIBUTING.md shows the
whole syntax.

A sweep measures one metric over several settings. `{at: [0.8, 0.9], run:
["decoder.select.tau={at}"]}` makes a facet of one sweep. `sweeps: {name: {label, at, run}}` puts
several in one facet, whose values are called `name-x`. A sweep with `from` is a curve that begins
at another value of the facet: its points are hidden, and the curve is a value called `name`.
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import lru_cache
from graphlib import TopologicalSorter
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dllm_bench.core.declared import made_from
from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.metrics.definitions import definition
from dllm_bench.paths import PACKAGE, conf_dir, conf_dirs, conf_file, options, read_yaml
from dllm_bench.registry import require_known
from dllm_bench.tables import spec
from dllm_bench.tables.spec import PaperTable, Profile, Query, TableMetric

TITLE = re.compile(r"^title: (.+)$(?!\n )", re.MULTILINE)  # of one line
REPORTED_TABLES = PACKAGE / "tables" / "reported"
LAYOUT_KEYS = ("sections", "rows", "columns")
OWN_GROUPS = {
    "model": ("path: assets/", "path: imported/"),
    "benchmark": ("name: mini", "name: sentences"),
}
"""Group -> texts in a yaml that mark weights or items that ship, or that `make real` fetches."""
RULE_KEYS = ("run", "reported_only", "hidden", "skip", "needs", "reported_on")
VALUE_KEYS = ("label", "show", "mean_of", "curve", *RULE_KEYS)
TABLE_KEYS = "title source layout facets metrics run reported notes rules".split()
SWEEP_KEYS = "at run from label".split()
FACET_KEYS = "values sweeps file key show labels when needs reported_on".split() + SWEEP_KEYS
PROFILE_KEYS = "embedded replace set as_asked default instead untrained passes".split()
METRIC_KEYS = "label definition tolerance unit over minus setting labels area run".split()


def names_of(kind: str) -> list[str]:
    """Return names of all tables or figures (`kind` is "table" or "figure"), as
    `<paper>/<name>`."""
    paths = [path for folder in conf_dirs() for path in (folder / kind).glob("*/*.yaml")]
    return sorted({f"{path.parent.name}/{path.stem}" for path in paths})


@contextmanager
def errors_of(file: Path, kind: str) -> Iterator[None]:
    """Turn whatever fails while a yaml is read into a DllmBenchError that names it and the reason.

    kind: what it is read as: "table", "figure", "claim" or "profile".
    """
    try:
        yield
    except Exception as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error).rstrip(".")
        raise DllmBenchError(
            f"{file} cannot be read as a {kind}: {why}; CONTRIBUTING.md shows the syntax."
        ) from error


def title_of(kind: str, name: str) -> str:
    """Return the title of a table or figure, if possible without the rest of its yaml; empty if it
    has none."""
    file = conf_file(f"{kind}/{name}.yaml")
    if found := TITLE.search(file.read_text(encoding="utf-8")):
        return str(yaml.safe_load(found[1]))
    plain: object = read_yaml(file)
    return str(plain.get("title", "")) if isinstance(plain, Mapping) else ""


def file_and_data(kind: str, name: str, shipped: Path) -> tuple[Path, Path]:
    """Return the yaml of a table or figure, and the folder of the csv files that it names:
    `shipped` or, for another package's yaml, the folder `table` or `figure` that contains it.
    """
    file = conf_file(f"{kind}/{name}.yaml")
    return file, shipped if file.is_relative_to(conf_dir()) else file.parents[1]


def help_of(kind: str) -> str:
    """Return the command that lists all tables, figures or claims."""
    return f"dllm-bench {'claims' if kind == 'claim' else kind} --help"


def require_name(kind: str, name: str) -> None:
    """Raise DllmBenchError unless there is a table, figure or claim called `<paper>/<name>`."""
    require_known(kind, name, names_of(kind), listing=help_of(kind))


def matching_names(kind: str, name: str) -> list[str]:
    """Return the names that `name` stands for: itself, all of a paper, or all with "all"."""
    known = names_of(kind)
    matching = [one for one in known if name in (one, one.partition("/")[0], "all")]
    if not matching:
        raise DllmBenchError(unknown_name(kind, name, known, "; or a paper, or all", help_of(kind)))
    return matching


@lru_cache
def load_table(name: str) -> PaperTable:
    """Return the table called `<paper>/<table>`."""
    require_name("table", name)
    file, data = file_and_data("table", name, REPORTED_TABLES)
    with errors_of(file, "table"):
        return parse_table(name, read_yaml(file), data)


def parse_table(name: str, plain: Mapping[str, Any], data: Path) -> PaperTable:
    """Return a table from the content of its yaml file, after a check of its cells; the csv files
    that it names lie below `data`."""
    check_keys(f"Table {name}", plain, TABLE_KEYS)
    steps = sweep_steps(plain["facets"])
    facets = {key: tuple(_values(_expand(one)[0], data)) for key, one in plain["facets"].items()}
    metrics = tuple(_metric(key, entry) for key, entry in plain["metrics"].items())
    reported, notes = (
        read_csv(data / plain[key]) if key in plain else [] for key in ("reported", "notes")
    )
    layout = {key: tuple(plain["layout"].get(key, ())) for key in LAYOUT_KEYS}
    if sorted(facet for part in layout.values() for facet in part) != sorted(facets):
        raise DllmBenchError(f"`layout` has to name each facet once ({', '.join(facets)}).")
    known = {("metric", metric.name) for metric in metrics}
    for facet, values in facets.items():
        TopologicalSorter({v.name: v.mean_of for v in values}).prepare()  # raises for a cycle
        known |= {pair for v in values for pair in ((facet, v.name), *v.attributes.items())}
        known |= {(facet, step.group) for step in steps}
    rules = (_rules(entry, steps, known, data) for entry in plain.get("rules", ()))
    made = {
        "name": name,
        "title": plain["title"],
        "source": plain["source"],
        **layout,
        "facets": facets,
        "metrics": metrics,
        "run": as_tuple(plain.get("run", ())),
        "reported": _reported(reported, tuple(facets), metrics),
        "notes": tuple(_note(row) for row in notes),
        "rules": tuple(chain.from_iterable(rules)),
    }
    table = made_from(PaperTable, made)
    if not any(table.cells()):
        raise DllmBenchError("No cell is shown; give values that are not hidden, and metrics.")
    return table


@lru_cache
def load_profile(name: str) -> Profile:
    """Return the profile `conf/profile/<name>.yaml`, merged with the files `<name>/<paper>.yaml`
    next to it: their `instead` entries come first, and all `replace` entries are combined.
    """
    require_known("profile", name, options("profile"))
    path = conf_file(f"profile/{name}.yaml")
    with errors_of(path, "profile"):
        files = (*sorted(path.with_suffix("").glob("*.yaml")), path)
        parts = [_fields(f"Profile {name}", read_yaml(file), PROFILE_KEYS) for file in files]
        replace, instead = defaultdict[str, dict[str, str | None]](dict), list[spec.Instead]()
        for part in parts:
            for key, counterparts in part.get("replace", {}).items():
                own = replace[key]
                for asked, here in counterparts.items():
                    own[str(asked)] = None if here is None else str(here)
            for entry in part.get("instead", ()):
                instead += _instead(entry)
        made = {"name": name, "embedded": False, "set": (), **parts[-1]}
        if made["embedded"]:
            for group in OWN_GROUPS.keys() & replace.keys():
                replace[group] = {**available_here(group), **replace[group]}
            replace["benchmark"] |= {kept: kept for kept in made.get("as_asked", ())}
        passes = _fields(f"`passes` of profile {name}", made.pop("passes", {}), ("run", "of"))
        made |= {
            "replace": dict(replace),
            "instead": tuple(instead),
            "passes": as_tuple(passes.get("run", ())),
            "passes_of": as_tuple(passes.get("of", ())),
        }
        return made_from(Profile, made)


def _instead(entry: Mapping[str, Any]) -> Iterator[spec.Instead]:
    """Yield the replacements of a profile's entry: one, or one per value of the key in `each`,
    which maps a requested value to the value used here.
    """
    check_keys("An entry of `instead`", entry, ("asked", "here", "of", "each"))
    asked, here, of = (as_tuple(entry.get(key, ())) for key in ("asked", "here", "of"))
    if "each" not in entry:
        yield spec.Instead(asked, here, of)
    for key, values in entry.get("each", {}).items():
        for value, counterpart in values.items():
            yield spec.Instead((*asked, f"{key}={value}"), (*here, f"{key}={counterpart}"), of)


def available_here(group: str) -> dict[str, str]:
    """Return {name: name} of the models or benchmarks that are not replaced in an embedded profile.

    These are the ones that ship or that `make real` imports, all of a plug-in or of the user, and
    paths of folders.
    """
    names = {"/*": "/*"} if group == "model" else {}
    for name in options(group):
        file = conf_file(f"{group}/{name}.yaml")
        shipped = conf_dir() in file.parents
        text = file.read_text(encoding="utf-8")
        if not shipped or any(own in text for own in OWN_GROUPS[group]):
            names[name] = name
    return names


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a csv file with a header."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _values(entry: Mapping[str, Any], data: Path) -> Iterator[spec.FacetValue]:
    """Yield the values of a facet: those listed in the yaml, then one per row of its csv file."""
    for name, plain in entry.get("values", {}).items():
        yield _value(name, plain, VALUE_KEYS)
    for row in read_csv(data / entry["file"]) if "file" in entry else ():
        yield _value_of_row(row, entry)


def _value(name: str, plain: Mapping[str, Any], keys: Sequence[str]) -> spec.FacetValue:
    made = {"label": name, **_fields(name, plain, keys)}
    shown = {title: str(text) for title, text in made.pop("show", {}).items()}
    listed = {key: as_tuple(made.pop(key, ())) for key in ("run", "needs", "mean_of", "curve")}
    return made_from(spec.FacetValue, {"name": name, "shown": shown, **listed, **made})


def _fields(name: str, plain: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Return the entries of a yaml with tuples in place of lists; DllmBenchError for an unknown
    key."""
    check_keys(name, plain, keys)
    return {key: tuple(e) if isinstance(e, list) else e for key, e in plain.items()}


def check_keys(name: str, plain: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise DllmBenchError if `name`, an entry of a yaml, has a key that is not one of `keys`."""
    unknown = [key for key in plain if key not in keys]
    if unknown:
        raise DllmBenchError(f"{name}: {unknown_name('key', unknown[0], keys)}")


def as_tuple(plain: object) -> Query:
    """Return one entry or a list of them, as text; numbers and booleans as csv files write them."""
    entries = plain if isinstance(plain, (list, tuple)) else [plain]
    return tuple(str(e).lower() if isinstance(e, bool) else str(e) for e in entries)


def _value_of_row(row: Mapping[str, str], entry: Mapping[str, Any]) -> spec.FacetValue:
    """Return a csv row as a facet value: the row's columns are filled into `run`; `when`, `needs`
    and `reported_on` are looked up by column and value.
    """
    labels = entry.get("labels", {})
    name = row[entry["key"]]
    run = (text.format(**row) for text in as_tuple(entry["run"]))
    return spec.FacetValue(
        name=name,
        label=name,
        run=(*run, *_entries_for(row, entry.get("when", {}))),
        needs=_entries_for(row, entry.get("needs", {})),
        reported_on=", ".join(_entries_for(row, entry.get("reported_on", {}))),
        shown={title: labels.get(row[col], row[col]) for col, title in entry["show"].items()},
        attributes=dict(row),
    )


def _entries_for(row: Mapping[str, str], lookup: Mapping[str, Mapping[str, Any]]) -> Query:
    """Return the entries `lookup[column][value of that column in the row]` of all columns, in
    order."""
    found = (by_value.get(row[column], ()) for column, by_value in lookup.items())
    return tuple(entry for entries in found for entry in as_tuple(entries))


def _rules(
    entry: Mapping[str, Any], steps: Sequence[SweepStep], known: Set[tuple[str, str]], data: Path
) -> Iterator[spec.Rule]:
    """Yield the rule of an entry; the name of a sweep in `where` stands for all its values.

    With `file`, yield one rule per csv row: it applies to cells whose attributes equal the row's in
    the columns `match`, and the row's columns are filled into `run`.
    """
    where = {}
    for key, allowed in entry["where"].items():
        names = as_tuple(allowed)
        if absent := [name for name in names if (key, name) not in known]:
            raise DllmBenchError(f"A rule is for {key} {absent[0]}, which is not in the table.")
        where[key] = (*names, *(step.value for step in steps if step.group in names))
    plain = {key: entry[key] for key in entry if key not in ("where", "file", "match")}
    if "file" not in entry:
        yield spec.Rule(where, _value("rule", plain, RULE_KEYS))
        return
    for row in read_csv(data / entry["file"]):
        filled = {**plain, "run": [text.format(**row) for text in as_tuple(plain["run"])]}
        matched = {column: (row[column],) for column in entry["match"]}
        yield spec.Rule({**where, **matched}, _value("rule", filled, RULE_KEYS))


def _metric(name: str, plain: Mapping[str, Any]) -> TableMetric:
    """Return a metric; `tolerance: 10 %` is relative, a bare number is in the metric's unit."""
    made = _fields(f"Metric {name}", plain, METRIC_KEYS)
    kind, derived = made.keys() & {"definition", "setting"}, made.keys() & {"over", "minus", "area"}
    if len(kind) != 1 or {"over", "minus"} <= derived or ("setting" in kind and derived):
        raise DllmBenchError(
            f"Metric {name} needs a `definition`, with at most one of `over` and `minus`, or a "
            "`setting`, without these and `area`."
        )
    area, tolerance = made.get("area", ""), str(made.pop("tolerance", 0))
    if area not in ("", spec.WHOLE, spec.CUT):
        raise DllmBenchError(f"Metric {name}: {unknown_name('area', area, (spec.WHOLE, spec.CUT))}")
    relative = tolerance.endswith("%")
    texts = {
        key: {str(one): str(word) for one, word in made.pop(key, {}).items()}
        for key in ("labels", "over", "minus")
    }
    made |= {"name": name, "label": made["label"], "relative": relative, **texts}
    made["tolerance"] = float(tolerance.removesuffix("%")) / (100 if relative else 1)
    made |= {"gain": made.pop("unit", "") == "%", "run": as_tuple(made.pop("run", ()))}
    metric = made_from(TableMetric, made)
    if metric.area or not (metric.setting or metric.is_score):
        definition(metric.definition)  # raises for an unknown one
    return metric


def _reported(
    rows: Sequence[Mapping[str, str]], facets: Query, metrics: Sequence[TableMetric]
) -> dict[Query, str]:
    """Return (facet values …, metric) -> what is printed."""
    values: dict[Query, str] = {}
    for row in rows:
        keys = tuple(row[facet] for facet in facets)
        wide = {m.name: row[m.name] for m in metrics if m.name in row}
        own = {row["metric"]: row["value"]} if "metric" in row else wide
        values |= {(*keys, name): text for name, text in own.items()}
    return values


def _note(row: Mapping[str, str]) -> spec.Note:
    pairs = (condition.partition("=")[::2] for condition in row["where"].split())
    return spec.Note({key: tuple(value.split("|")) for key, value in pairs}, row["id"], row["text"])


class SweepStep(NamedTuple):
    """A facet value made by a sweep."""

    value: str
    """Name of the value."""
    x: str
    """Value of the swept quantity, as text."""
    group: str
    """Name of the sweep; empty if it is the whole facet."""


def sweep_steps(facets: Mapping[str, Mapping[str, Any]]) -> list[SweepStep]:
    """Return every value that a sweep of any facet makes."""
    return [step for facet in facets.values() for step in _expand(facet)[1]]


def _expand(plain: Mapping[str, Any]) -> tuple[dict[str, Any], list[SweepStep]]:
    """Return a facet with its sweeps written out as values, and what they made. A facet that is one
    sweep has the name "". The steps of a list are x and value of the run; a mapping gives both.
    """
    check_keys("A facet", plain, FACET_KEYS)
    values = {as_tuple(name)[0]: entry for name, entry in plain.get("values", {}).items()}
    steps = list[SweepStep]()
    sweeps = {"": plain} if "at" in plain else plain.get("sweeps", {})
    for group, sweep in sweeps.items():
        check_keys(f"Sweep {group}", sweep, SWEEP_KEYS if group else FACET_KEYS)
        at = sweep["at"]
        hidden, points = {"hidden": True} if "from" in sweep else {}, []
        for x, value in at.items() if isinstance(at, Mapping) else zip(at, at, strict=True):
            step = SweepStep(f"{group}-{x}" if group else str(x), str(x), group)
            run = [text.format(at=value) for text in as_tuple(sweep["run"])]
            values[step.value] = {"label": sweep.get("label", step.x), "run": run, **hidden}
            points.append(step.value)
            steps.append(step)
        if "from" in sweep:
            points.insert(0, sweep["from"])
            values[group] = {"label": sweep.get("label", group), "curve": points}
    rest = {key: entry for key, entry in plain.items() if key not in ("at", "run", "sweeps")}
    return ({**rest, "values": values} if values else dict(plain)), steps
