"""Stable names of the classes a configuration may name, and the way from plain data to objects.

A class (or a function that makes objects) declares its name where it is defined, for example
`@register("select.threshold")`. Run hashes and records hold that name, never a module path, so a
class can be moved or renamed without changing the identity of any run. Yaml files write
`_target_: dllm_bench.methods.common.Threshold` (Hydra's convention, which editors can
follow) or the registered name; both mean the same object.

Only registered objects are ever called, and only after all of the data was checked: each class must
be of the kind its place needs, and every argument of the type that the class declares. Another
package registers its own classes from a module that it names as an entry point of the group
`dllm_bench.plugins`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_type_hints

from dllm_bench.core import declared as declared_types
from dllm_bench.core.declared import fits, refusal, shown
from dllm_bench.core.errors import DllmBenchError, unknown_name
from dllm_bench.paths import PLUGINS

TARGET = "_target_"
RUNTIME = {"runtime": True}
"""Metadata of a setting that is no part of a run's identity, since it cannot change what the run
puts out, or what it names enters as a content hash."""
PACKAGE = "dllm_bench."

DEFAULT_LEFT_OUT = {"default_left_out": True}
"""Metadata of a dataclass field that was added after runs had been stored: `describe` leaves it out
while it has its default, so that the hashes of those runs stay."""

SLOTS = (
    "score select explore schedule revise stop cache draft verify length "
    "accept renoise anneal settle"
).split()
PIECES = ("dllm_bench.methods", "dllm_bench.decoding.defaults", "dllm_bench.decoding.speculative")
HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SLOTS, PIECES),
    "decoder": (
        "dllm_bench.decoding.masked",
        "dllm_bench.decoding.speculative",
        "dllm_bench.decoding.canvas",
        "dllm_bench.methods.likelihood",
    ),
    "drafter": ("dllm_bench.models.drafters",),
    "filter": ("dllm_bench.models.filters",),
    "counts": ("dllm_bench.methods.position_rules",),
    "model": ("dllm_bench.serving.served_model",),
    "benchmark": (
        "dllm_bench.benchmarks.lm_eval",
        "dllm_bench.benchmarks.evalplus",
        "dllm_bench.benchmarks.prompts",
    ),
    "logger": ("dllm_bench.runs.loggers",),
}
"""Kind, the first part of a registered name -> modules and packages whose import registers it."""

PLAIN_TYPES = {"int": int, "float": float, "bool": bool, "str": str, "None": None}
"""Annotation -> type, of values that yaml has a notation for."""

Registered = TypeVar("Registered", bound=Callable[..., Any])

_objects: dict[str, Callable[..., Any]] = {}
_names: dict[Callable[..., Any], str] = {}


def register(name: str) -> Callable[[Registered], Registered]:
    """Declare a stable name, `<kind>.<name>`, for the decorated class or function.

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
    """Return the registered name of a class or function; an error if it declares none."""
    try:
        return _names[registered]
    except KeyError:
        raise DllmBenchError(
            f"{_path_of(registered)} has no registered name, so no configuration can hold it; "
            'decorate it with @register("<kind>.<name>").'
        ) from None


def find(target: str) -> Callable[..., Any]:
    """Return the registered class or function that a `_target_` names.

    A `_target_` is a registered name or a dotted path.
    """
    if target in _objects:
        return _objects[target]
    if target.startswith(PACKAGE):
        return _find_by_path(target)
    _import_kind(target.partition(".")[0])
    failed = load_plugins()
    by_path = {_path_of(registered): registered for registered in _names}
    registered = _objects.get(target) or by_path.get(target)
    if registered is None:
        raise DllmBenchError(
            f"_target_ {target!r} is not registered; {''.join(failed)}only classes of this package "
            f"and of installed plug-ins (entry points of the group {PLUGINS!r}) are built from a "
            "configuration."
        )
    return registered


def _find_by_path(target: str) -> Callable[..., Any]:
    """Return the registered object at a dotted path inside this package."""
    module_name, _, name = target.rpartition(".")
    if not _is_home(module_name):
        raise DllmBenchError(
            f"_target_ {target!r} lies in no module whose classes a configuration may build; name "
            "a registered class (conf/ has all of them)."
        )
    try:
        registered = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        own = (error.name or "").startswith(PACKAGE)
        remedy = "correct the name" if own else "install the extra that brings that package"
        raise DllmBenchError(
            f"_target_ {target!r} needs {error.name!r}, which is not there; {remedy}."
        ) from error
    if not callable(registered) or registered not in _names:
        raise DllmBenchError(
            f"_target_ {target!r} is not registered: {module_name!r} has no {name!r} that a "
            "configuration may build; correct the name, or decorate the class with @register."
        )
    return registered


def _is_home(module_name: str) -> bool:
    """Return whether a module is one whose classes a configuration may build."""
    homes = [home for kind in HOMES.values() for home in kind]
    return any(f"{module_name}.".startswith(f"{home}.") for home in homes)


@cache
def load_plugins() -> tuple[str, ...]:
    """Import the modules that installed packages name as entry points, once per process.

    Returns a clause for each that cannot be imported, which leaves the others as they are.
    """
    failed = []
    for entry in entry_points(group=PLUGINS):
        try:
            entry.load()
        except (Exception, SystemExit) as error:  # the code of another package raises anything
            failed.append(
                f"plug-in {entry.name!r} ({entry.value}) cannot be imported "
                f"({type(error).__name__}: {error}), update or uninstall its package; "
            )
    return tuple(failed)


@cache
def _import_kind(kind: str) -> None:
    """Import every module whose classes may have a name of this kind."""
    for home in HOMES.get(kind, ()):
        package = importlib.import_module(home)
        for module in pkgutil.iter_modules(getattr(package, "__path__", ()), f"{home}."):
            importlib.import_module(module.name)


def with_registered_names(plain: Any) -> Any:
    """Return plain data with every `_target_`, at any depth, spelled as its registered name."""
    if isinstance(plain, Mapping):
        return {
            key: name_of(find(str(value))) if key == TARGET else with_registered_names(value)
            for key, value in plain.items()
        }
    if isinstance(plain, (list, tuple)):
        return [with_registered_names(value) for value in plain]
    return plain


def instantiate(plain: Any, kind: str | None) -> Any:
    """Return the object that a mapping with `_target_` stands for, lists as tuples.

    kind: first part of the registered name it must have; None for any. Everything is checked, at
    every depth, before the first object is made: names, kinds, arguments and their declared types.
    """
    if not isinstance(plain, Mapping) or TARGET not in plain:
        raise DllmBenchError(
            f"A configuration of a {kind or 'registered class'} was needed, and {shown(plain)} "
            f"was given; name a class with {TARGET}."
        )
    target = str(plain[TARGET])
    found = name_of(find(target)).partition(".")[0]
    if kind is not None and found != kind:
        raise DllmBenchError(
            f"_target_ {target!r} is a {found}, and a {kind} belongs here; name a class that is "
            f"registered as {kind}.…"
        )
    _check_target(plain)
    return _build(plain)


def _build(plain: Any) -> Any:
    """Build the object that checked plain data describes, innermost part first."""
    if isinstance(plain, Mapping):
        parts = {key: _build(value) for key, value in plain.items() if key != TARGET}
        return find(str(plain[TARGET]))(**parts) if TARGET in plain else parts
    if isinstance(plain, (list, tuple)):
        return tuple(_build(value) for value in plain)
    return plain


def check_arguments(factory: Callable[..., Any], arguments: Mapping[str, Any], title: str) -> None:
    """Raise DllmBenchError for names or types that `factory` does not declare, at any depth."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise DllmBenchError(
            f"{title} does not fit its arguments ({error}); it takes: {takes}."
        ) from error
    declared = _declared_types(factory)
    for name, value in arguments.items():
        if not fits(value, declared.get(name, Any), _is_a):
            raise refusal(factory.__name__, name, declared[name], value)


def check_plain_types(plain: Any) -> None:
    """Raise DllmBenchError for numbers, switches and texts, at any depth, that do not fit what the
    source of their class declares.

    The class is not imported, which would import torch. All else is left to `instantiate`.
    """
    if isinstance(plain, (list, tuple)):
        for item in plain:
            check_plain_types(item)
    if not isinstance(plain, Mapping):
        return
    target = str(plain.get(TARGET, ""))
    home, _, owner = target.rpartition(".")
    for name, declared in _plain_types(target).items() if _is_home(home) else ():
        if name in plain and not fits(plain[name], declared):
            raise refusal(owner, name, declared, plain[name])
    for value in plain.values():
        check_plain_types(value)


@cache
def _plain_types(target: str) -> dict[str, Any]:
    """Return field -> type, for those fields of a class of this package whose types are plain.

    Fields of base classes are included.
    """
    module, _, name = target.rpartition(".")
    types = dict[str, Any]()
    for node in _nodes_of(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in reversed(node.bases):
                types |= _plain_types(_path_in(module, ast.unparse(base)))
            for part in node.body:
                if isinstance(part, ast.AnnAssign):
                    types.pop(ast.unparse(part.target), None)
                    with suppress(LookupError):
                        types[ast.unparse(part.target)] = _plain_type(part.annotation, module)
    return types


def _plain_type(node: ast.expr, module: str) -> Any:
    """Return the type that an annotation of a module stands for; LookupError if it is no plain
    one."""
    name = ast.unparse(node)
    if name in PLAIN_TYPES:
        return PLAIN_TYPES[name]
    if isinstance(node, ast.BinOp):
        return Union[_plain_type(node.left, module), _plain_type(node.right, module)]  # noqa: UP007
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        return Literal[ast.literal_eval(node.slice)]
    home, _, name = _path_in(module, name).rpartition(".")
    if home == declared_types.__name__:
        return getattr(declared_types, name)
    for one in _nodes_of(home):
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == name:
            return _plain_type(one.value, home)
    raise LookupError(name)


def _path_in(module: str, name: str) -> str:
    """Return the dotted path of what a module calls `name`."""
    for node in _nodes_of(module):
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return f"{node.module}.{name}"
    return f"{module}.{name}"


@cache
def _nodes_of(module_name: str) -> list[ast.stmt]:
    """Return the statements of a module of this package, without importing it."""
    if not module_name.startswith(PACKAGE):
        return []
    try:
        spec = find_spec(module_name)
    except (ModuleNotFoundError, ValueError):  # no such package; a module made by a program
        return []
    loader = spec and spec.loader
    source = loader.get_source(module_name) if isinstance(loader, InspectLoader) else None
    return ast.parse(source or "").body


def _check_target(plain: Mapping[str, Any]) -> None:
    target = str(plain[TARGET])
    arguments = {str(key): value for key, value in plain.items() if key != TARGET}
    check_arguments(find(target), arguments, f"_target_ {target!r}")


@cache
def _declared_types(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return argument -> type; "return" -> the class of what `factory` makes."""
    is_class = inspect.isclass(factory)
    holder = factory.__init__ if is_class and not is_dataclass(factory) else factory
    try:
        hints = get_type_hints(holder, include_extras=True)
    except NameError as error:
        raise DllmBenchError(
            f"{_path_of(factory)} declares a type that cannot be found ({error}); import that "
            "type in its module, outside of TYPE_CHECKING."
        ) from error
    return {**hints, "return": factory if is_class else hints.get("return", object)}


def _is_a(value: Any, wanted: type) -> bool:
    """Return whether a value, or what its `_target_` makes, is a `wanted`; where anything goes
    (`object`), nothing is built.
    """
    if isinstance(value, Mapping) and TARGET in value and wanted is not object:
        if not _provides(_declared_types(find(str(value[TARGET])))["return"], wanted):
            return False
        _check_target(value)
        return True
    if wanted is not object:
        return _provides(type(value), wanted)
    if isinstance(value, Mapping):
        return TARGET not in value and all(_is_a(part, object) for part in value.values())
    return not isinstance(value, (list, tuple)) or all(_is_a(part, object) for part in value)


def _provides(made: type, wanted: type) -> bool:
    """Return whether a class is a subclass of `wanted`, or has all members of that protocol."""
    if not getattr(wanted, "_is_protocol", False):
        return issubclass(made, wanted)
    protocols = [base for base in wanted.__mro__ if getattr(base, "_is_protocol", False)]
    names = {name for base in protocols for name in (*vars(base), *inspect.get_annotations(base))}
    members = {name for name in names if not name.startswith("_")} | names & {"__call__"}
    own = {name for base in made.__mro__ for name in inspect.get_annotations(base)}
    return members <= {*dir(made), *own}


def describe(value: Any) -> Any:
    """Return plain data of a value made of registered dataclasses; the inverse of `instantiate`.

    Defaults are written out, so that equal objects give equal data however they were configured,
    and a changed default changes the data; see `DEFAULT_LEFT_OUT` for the exception.
    """
    if is_dataclass(value) and not isinstance(value, type):
        kept = (f for f in fields(value) if f.init and not _left_out(f, getattr(value, f.name)))
        parts = {f.name: describe(getattr(value, f.name)) for f in kept}
        return {TARGET: name_of(type(value)), **parts}
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise DllmBenchError(
        f"A {type(value).__name__} cannot be part of a configuration; use numbers, text, lists, "
        "mappings or dataclasses of them."
    )


def _left_out(declared: Field[Any], value: Any) -> bool:
    """Return whether the value is the default of a field that leaves its default out."""
    if not declared.metadata.get("default_left_out"):
        return False
    factory = declared.default_factory
    return bool(value == (declared.default if factory is MISSING else factory()))


def _path_of(registered: Callable[..., Any]) -> str:
    return f"{registered.__module__}.{registered.__qualname__}"


def require_known(kind: str, name: str, known: Iterable[str], listing: str = "") -> None:
    """Raise DllmBenchError unless `name` is one of the known names; see `unknown_name`."""
    names = list(known)
    if name not in names:
        raise DllmBenchError(unknown_name(kind, name, names, listing=listing))
