"""Sweeps of a facet, spelled out as its values: one number over several settings.

`{at: [0.8, 0.9], run: ["decoder.select.tau={at}"]}` is a facet of one sweep; `sweeps: {name:
{label, at, run}}` has several side by side, whose values are called `name-x`. A sweep with `from`
is a curve that begins at another value: its points are hidden, the curve is a value called `name`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class Step(NamedTuple):
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


def steps_of(facets: Mapping[str, Mapping[str, Any]]) -> list[Step]:
    """Every value that a sweep of any facet gives."""
    return [
        Step(_name(group, x), x, group)
        for facet in facets.values()
        for group, sweep in _sweeps(facet)
        for x, _ in _steps(sweep["at"])
    ]


def spelled_rule(plain: Mapping[str, Any], steps: Sequence[Step]) -> dict[str, Any]:
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
