"""Stable names of the classes a configuration may name, and the way from plain data to objects.

A class (or a function that makes objects) declares its name where it is defined, for example
`@register("select.threshold")`. Run hashes and records hold that name, never a module path, so a
class can be moved or renamed without changing the identity of any run. Yaml files write
`_target_: dllm_bench.decoding.select.threshold.Threshold` (Hydra's convention, which editors can
follow) or the registered name; both mean the same object.

Only registered objects are ever called. Another package registers its own classes from a module
that it names as an entry point of the group `dllm_bench.plugins`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from dllm_bench.core.errors import DllmBenchError

TARGET = "_target_"
PACKAGE = "dllm_bench."
PLUGINS = "dllm_bench.plugins"

HOMES: dict[str, tuple[str, ...]] = {
    **{
        slot: (f"dllm_bench.decoding.{slot}",)
        for slot in ("score", "select", "explore", "schedule", "stop", "cache")
    },
    **{slot: (f"dllm_bench.decoding.{slot}",) for slot in ("draft", "verify", "length")},
    "decoder": ("dllm_bench.decoding.masked", "dllm_bench.decoding.speculative"),
    "drafter": ("dllm_bench.models.drafters",),
    "filter": ("dllm_bench.models.filters",),
    "model": ("dllm_bench.serving.served_model",),
    "benchmark": (
        "dllm_bench.benchmarks.lm_eval",
        "dllm_bench.benchmarks.evalplus",
        "dllm_bench.benchmarks.prompts",
    ),
    "logger": ("dllm_bench.run.loggers",),
}
"""Kind, the first part of a registered name -> modules and packages whose import registers it."""

PLAIN_KINDS = {"int": (int,), "float": (int, float), "bool": (bool,), "str": (str,)}

Registered = TypeVar("Registered", bound=Callable[..., Any])

_objects: dict[str, Callable[..., Any]] = {}
_names: dict[Callable[..., Any], str] = {}


def register(name: str) -> Callable[[Registered], Registered]:
    """Class or function decorator that declares a stable name, `<kind>.<name>`.

    The name enters run hashes: choose it once and never reuse it for something else.
    """

    def declare(registered: Registered) -> Registered:
        known = _objects.get(name)
        if known is not None and _path_of(known) != _path_of(registered):
            raise DllmBenchError(
                f"{_path_of(registered)} registers the name {name!r}, which {_path_of(known)} "
                "already has; choose another name."
            )
        _objects[name] = registered
        _names[registered] = name
        return registered

    return declare


def name_of(registered: Callable[..., Any]) -> str:
    """The registered name of a class or function; an error if it declares none."""
    try:
        return _names[registered]
    except KeyError:
        raise DllmBenchError(
            f"{_path_of(registered)} has no registered name, so no configuration can hold it; "
            'decorate it with @register("<kind>.<name>").'
        ) from None


def find(target: str) -> Callable[..., Any]:
    """The registered class or function behind a `_target_`: a registered name or a dotted path."""
    if target in _objects:
        return _objects[target]
    if target.startswith(PACKAGE):
        return _find_by_path(target)
    _import_kind(target.partition(".")[0])
    load_plugins()
    by_path = {_path_of(registered): registered for registered in _names}
    registered = _objects.get(target) or by_path.get(target)
    if registered is None:
        raise DllmBenchError(
            f"_target_ {target!r} is not registered; only classes of this package and of installed "
            f"plug-ins (entry points of the group {PLUGINS!r}) are built from a configuration."
        )
    return registered


def _find_by_path(target: str) -> Callable[..., Any]:
    """The registered object at a dotted path inside this package."""
    module_name, _, name = target.rpartition(".")
    try:
        registered = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(PACKAGE):
            raise DllmBenchError(
                f"_target_ {target!r} needs the package {error.name!r}, which is not installed; "
                "install the extra that brings it."
            ) from error
        raise DllmBenchError(f"_target_ {target!r}: there is no module {error.name!r}.") from error
    except AttributeError as error:
        raise DllmBenchError(
            f"_target_ {target!r}: module {module_name!r} has no {name!r}; correct the name."
        ) from error
    if not callable(registered) or registered not in _names:
        raise DllmBenchError(
            f"_target_ {target!r} is not registered, so no configuration may build it; name a "
            "class that is decorated with @register."
        )
    return registered


@cache
def load_plugins() -> None:
    """Import the modules that installed packages name as entry points, once per process."""
    for entry in entry_points(group=PLUGINS):
        try:
            entry.load()
        except ImportError as error:
            raise DllmBenchError(
                f"Plug-in {entry.name!r} ({entry.value}) cannot be imported ({error}); update or "
                "uninstall the package that brings it."
            ) from error


@cache
def _import_kind(kind: str) -> None:
    """Import every module whose classes may have a name of this kind."""
    for home in HOMES.get(kind, ()):
        package = importlib.import_module(home)
        for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{home}."):
            importlib.import_module(module.name)


def with_registered_names(plain: Any) -> Any:
    """Plain data with every `_target_`, at any depth, spelled as its registered name."""
    if isinstance(plain, Mapping):
        return {
            key: name_of(find(str(value))) if key == TARGET else with_registered_names(value)
            for key, value in plain.items()
        }
    if isinstance(plain, (list, tuple)):
        return [with_registered_names(value) for value in plain]
    return plain


def instantiate(plain: Any) -> Any:
    """The object plain data stands for: mappings with `_target_` are built, innermost first.

    Values without `_target_` stay as they are, lists become tuples.
    """
    if isinstance(plain, Mapping):
        parts = {key: instantiate(value) for key, value in plain.items() if key != TARGET}
        return _call(str(plain[TARGET]), parts) if TARGET in plain else parts
    if isinstance(plain, (list, tuple)):
        return tuple(instantiate(value) for value in plain)
    return plain


def _call(target: str, arguments: dict[str, Any]) -> Any:
    return construct(find(target), arguments, f"_target_ {target!r}")


def construct(factory: Callable[..., Any], arguments: Mapping[str, Any], title: str) -> Any:
    """`factory(**arguments)` after a check of names and plain types; `title` opens the errors."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise DllmBenchError(
            f"{title} does not fit its arguments ({error}); it takes: {takes}."
        ) from error
    for name, value in arguments.items():
        declared = str(signature.parameters[name].annotation)
        if not _fits(value, declared):
            raise DllmBenchError(
                f"{title} takes {name} as {declared}, and {value!r} was given; give a value of "
                "that kind."
            )
    return factory(**arguments)


def _fits(value: Any, declared: str) -> bool:
    """Whether a value is of the declared type; only int, float, bool, str and None are checked."""
    kinds = set(declared.split(" | "))
    if not kinds <= {*PLAIN_KINDS, "None"}:
        return True
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    return isinstance(value, tuple(kind for name in kinds for kind in PLAIN_KINDS.get(name, ())))


def describe(value: Any) -> Any:
    """Plain data of a value made of registered dataclasses; the inverse of `instantiate`.

    Defaults are written out, so that equal objects give equal data however they were configured,
    and a changed default changes the data.
    """
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: describe(getattr(value, f.name)) for f in fields(value) if f.init}
        return {TARGET: name_of(type(value)), **parts}
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


def _path_of(registered: Callable[..., Any]) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"
