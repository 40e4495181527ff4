"""Whether a value fits a declared type, for data that comes from outside: settings, stored files.

Numbers, text, None, lists, mappings, unions and literals are checked at any depth. Of a literal
only the type is: the class that declares it names the choices in its own error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
IsA = Callable[[Any, type], bool]
LISTS, MAPPINGS = (list, tuple, Sequence), (dict, Mapping)


def fits(value: Any, declared: Any, is_a: IsA = isinstance) -> bool:
    """Whether `value` is of the type `declared`, as `typing.get_type_hints` gives it.

    is_a: decides for classes, and for `object`, which stands for Any.
    """
    origin, parts = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return any(fits(value, part, is_a) for part in parts)
    if origin is Literal:
        return type(value) in {type(part) for part in parts}
    if declared in (int, float, bool, str, None, NoneType):
        return _is_plain(value, declared)
    if origin in LISTS:
        return isinstance(value, (list, tuple)) and _all_fit(value, origin, parts, is_a)
    if origin in MAPPINGS:
        key, item = parts
        return isinstance(value, Mapping) and all(
            fits(k, key, is_a) and fits(v, item, is_a) for k, v in value.items()
        )
    return is_a(value, object if declared is Any else origin or declared)


def _is_plain(value: Any, declared: Any) -> bool:
    """A whole number is a float too; True and False are no numbers."""
    if declared is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return type(value) is (NoneType if declared is None else declared)


def _all_fit(values: Sequence[Any], origin: Any, parts: tuple[Any, ...], is_a: IsA) -> bool:
    fixed = origin is tuple and Ellipsis not in parts
    if fixed and len(values) != len(parts):
        return False
    if not fixed and parts[0] in (int, bool, str):  # the many token ids of a sample
        return all(type(value) is parts[0] for value in values)
    declared = parts if fixed else parts[:1] * len(values)
    return all(fits(value, part, is_a) for value, part in zip(values, declared, strict=True))


def made_from(kind: Callable[..., Made], plain: Any) -> Made:
    """The dataclass `kind` of plain data, its inner dataclasses too; ValueError for names or types
    that it does not declare.
    """
    hints, optional = _fields_of(kind)
    if (
        not isinstance(plain, Mapping)
        or not hints.keys() - optional <= plain.keys() <= hints.keys()
    ):
        raise ValueError(f"not a {kind.__name__}")
    values = {name: _part(hints[name], value) for name, value in plain.items()}
    wrong = [name for name, value in values.items() if not fits(value, hints[name])]
    if wrong:
        raise ValueError(f"{wrong[0]} of a {kind.__name__} is no {hints[wrong[0]]}")
    return kind(**values)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types by field, and the fields that have a default."""
    hints = get_type_hints(kind)
    own = [field for field in fields(kind) if field.init]
    optional = [f.name for f in own if (f.default, f.default_factory) != (MISSING, MISSING)]
    return {field.name: hints[field.name] for field in own}, frozenset(optional)


def _part(declared: Any, value: Any) -> Any:
    """A value, as the dataclass that is declared for it, if one is."""
    kinds = (declared, *get_args(declared))
    inner = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    if inner and isinstance(value, Mapping):
        return made_from(inner[0], value)
    if inner and isinstance(value, list):
        return [_part(inner[0], item) for item in value]
    return value
