"""Plain configuration to objects and back, without Hydra.

A mapping with `_target_` becomes a call of that class with the other entries as arguments, parts
first. Only names inside this package are targets, so that a configuration cannot run anything else.
`describe` is the inverse for dataclasses: defaults are spelled out, so two texts of one value read
alike and a changed default is a changed value.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError

TARGET = "_target_"
PACKAGE = "dllm_bench."
PLAIN_KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}


def instantiate(plain: Any) -> Any:
    """The object a plain value describes; values without `_target_` stay as they are."""
    if isinstance(plain, Mapping):
        parts = {key: instantiate(value) for key, value in plain.items() if key != TARGET}
        return _call(str(plain[TARGET]), parts) if TARGET in plain else parts
    if isinstance(plain, (list, tuple)):
        return tuple(instantiate(value) for value in plain)
    return plain


def find(target: str) -> Callable[..., Any]:
    """The class or function with the dotted name `target` in this package."""
    module_name, _, name = target.rpartition(".")
    if not target.startswith(PACKAGE):
        raise DllmBenchError(
            f"_target_ {target!r} lies outside of this package; only names that begin with "
            f"{PACKAGE!r} are built from a configuration."
        )
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PACKAGE):
            raise DllmBenchError(
                f"_target_ {target!r} needs the package {error.name!r}, which is not installed; "
                "install the extra that brings it."
            ) from error
        raise DllmBenchError(f"_target_ {target!r}: there is no module {error.name!r}.") from error
    except AttributeError as error:
        raise DllmBenchError(
            f"_target_ {target!r}: module {module_name!r} has no {name!r}; mend the name."
        ) from error
    if not callable(found):
        raise DllmBenchError(f"_target_ {target!r} is no class or function; name one.")
    return found


def _call(target: str, arguments: dict[str, Any]) -> Any:
    factory = find(target)
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise DllmBenchError(
            f"_target_ {target!r} does not fit its arguments ({error}); it takes: {takes}."
        ) from error
    for name, value in arguments.items():
        declared = str(signature.parameters[name].annotation)
        if not _fits(value, declared):
            raise DllmBenchError(
                f"_target_ {target!r} takes {name} as {declared}, and {value!r} was given; give a "
                "value of that kind."
            )
    return factory(**arguments)


def _fits(value: Any, declared: str) -> bool:
    """Whether a value is of the declared kind; only numbers, text and truth are looked at."""
    kinds = set(declared.split(" | "))
    if not kinds <= {*PLAIN_KINDS, "None"}:
        return True
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    return isinstance(value, tuple(kind for name in kinds for kind in PLAIN_KINDS.get(name, ())))


def describe(value: Any) -> Any:
    """Plain data of a value made of dataclasses; the inverse of `instantiate` for those."""
    if is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        parts = {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.init}
        return {TARGET: f"{kind.__module__}.{kind.__qualname__}", **parts}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(describe(item) for item in value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise DllmBenchError(
        f"A {type(value).__name__} cannot be part of a configuration; use numbers, text, lists, "
        "mappings or dataclasses of them."
    )
