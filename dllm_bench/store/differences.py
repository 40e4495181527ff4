"""Find the settings in which runs differ, for lists, comparisons and pages."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dllm_bench.registry import TARGET
from dllm_bench.store.spec import RunSpec, leaves

Settings = Mapping[str, str]
"""Dotted name of a setting -> its value as text."""


def flat_settings(spec: RunSpec) -> dict[str, str]:
    """Return all settings of a run that can change its output."""
    return {setting_name(key): setting_value(key, value) for key, value in leaves(spec.identity())}


def differing_settings(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Return {short hash: the settings in which a run differs from others of its name}."""
    return differing(
        (spec.short, (spec.label, spec.model.name, spec.benchmark.name), flat_settings(spec))
        for spec in specs
    )


def differing(runs: Iterable[tuple[str, Hashable, Settings]]) -> dict[str, str]:
    """Return (hash, name, settings) of runs -> hash: settings that not all runs of its name
    share."""
    groups: dict[Hashable, dict[str, Settings]] = {}
    for short, name, settings in runs:
        groups.setdefault(name, {})[short] = settings
    return dict(pair for group in groups.values() for pair in _of_group(group))


def _of_group(group: Mapping[str, Settings]) -> Iterator[tuple[str, str]]:
    rows = setting_rows(list(group.values()))
    for index, short in enumerate(group):
        yield short, ", ".join(f"{name} {values[index]}" for name, *values in rows if values[index])


def setting_rows(runs: Sequence[Settings]) -> list[tuple[str, ...]]:
    """Return (setting, its value in each run) for every setting whose value not all runs share.

    The value is empty where a run does not have the setting.
    """
    names = dict.fromkeys(name for settings in runs for name in settings)
    rows = [(name, *(settings.get(name, "") for settings in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def setting_name(key: str) -> str:
    """Return the dotted name without the parts that are obvious: the decoder, and the key of a
    piece."""
    return key.removesuffix(f".{TARGET}").removeprefix("decoder.")


def setting_value(key: str, value: Any) -> str:
    """Return a setting's value as text; a piece by its name without the kind, a SHA-256 hash cut
    short."""
    text = "none" if value is None else str(value)
    if key.endswith(TARGET):
        return text.rpartition(".")[2]
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] + "…" if is_hash else text
