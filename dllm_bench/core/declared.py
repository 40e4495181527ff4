"""Whether a value fits a declared type, for data that comes from outside: settings, stored files.

Numbers, text, None, lists, mappings, unions and literals are checked at any depth. Of a literal
only the type is: the class that declares it names the choices in its own error. A number's range is
declared with its type: `Annotated[int, Range(0, 10)]`, or `Count`, `Amount`, `Seconds`, `Moment`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

Made = TypeVar("Made")
IsA = Callable[[Any, type], bool]
LISTS, MAPPINGS = (list, tuple, Sequence), (dict, Mapping)
TYPES: dict[Any, set[type]] = {int: {int}, float: {int, float}, bool: {bool}, str: {str}}
"""Declared type -> the types of its values: a whole number is a float too, True is no number."""


@dataclass(frozen=True)
class Range:
    """The smallest and the largest number that a field may hold; neither is NaN."""

    low: float
    high: float

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether all of these numbers are in the range."""
        return all(self.low <= end <= self.high for end in (min(values), max(values)))


Count = Annotated[int, Range(0, 2**53)]
Amount = Annotated[float, Range(0, 2**53)]
Seconds = Annotated[float, Range(0, 1e9)]  # a duration
Moment = Annotated[float, Range(0, 253_402_300_799)]  # seconds since the epoch, to the year 9999


def fits(value: Any, declared: Any, is_a: IsA = isinstance) -> bool:
    """Whether `value` is of the type `declared`, as `typing.get_type_hints` gives it.

    is_a: decides for classes, and for `object`, which stands for Any.
    """
    origin, parts = get_origin(declared), get_args(declared)
    if origin in (Union, UnionType):
        return any(fits(value, part, is_a) for part in parts)
    if origin is Annotated:
        return fits(value, parts[0], is_a) and parts[1].holds([value])
    if origin is Literal:
        return type(value) in {type(part) for part in parts}
    if declared in TYPES:
        return type(value) in TYPES[declared]
    if declared in (None, NoneType):
        return value is None
    if origin in LISTS:
        return isinstance(value, (list, tuple)) and _all_fit(value, origin, parts, is_a)
    if origin in MAPPINGS:
        key, item = parts
        return isinstance(value, Mapping) and all(
            fits(k, key, is_a) and fits(v, item, is_a) for k, v in value.items()
        )
    return is_a(value, object if declared is Any else origin or declared)


def _all_fit(values: Sequence[Any], origin: Any, parts: tuple[Any, ...], is_a: IsA) -> bool:
    fixed = origin is tuple and Ellipsis not in parts
    if fixed and len(values) != len(parts):
        return False
    kind, *ranges = get_args(parts[0]) if get_origin(parts[0]) is Annotated else parts[:1]
    if not fixed and kind in TYPES:  # the many token ids of a sample
        of_kind = set(map(type, values)) <= TYPES[kind]
        return of_kind and (not values or all(one.holds(values) for one in ranges))
    declared = parts if fixed else parts[:1] * len(values)
    return all(fits(value, part, is_a) for value, part in zip(values, declared, strict=True))


def in_words(declared: Any) -> str:
    """The declared type as an error names it: "int from 0 to 10, or None"."""
    parts = get_args(declared)
    if get_origin(declared) is Annotated:
        return f"{in_words(parts[0])} from {parts[1].low:g} to {parts[1].high:g}"
    if get_origin(declared) in (Union, UnionType):
        return ", or ".join("None" if part is NoneType else in_words(part) for part in parts)
    return declared.__name__ if isinstance(declared, type) and not parts else str(declared)


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
        raise ValueError(f"{wrong[0]} of a {kind.__name__} is no {in_words(hints[wrong[0]])}")
    return kind(**values)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types by field, and the fields that have a default."""
    hints = get_type_hints(kind, include_extras=True)
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
