"""Check values from outside (settings, stored files) against declared types.

Numbers, text, None, lists, mappings, unions and literals are checked at any depth. The range of a
number is declared with its type: `Annotated[int, Range(0, 10)]`, or one of the names below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from operator import eq
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dllm_bench.core.errors import DllmBenchError

Made = TypeVar("Made")
SHOWN_CHARS = 200  # characters of a value shown in an error message
IsA = Callable[[Any, type], bool]
LISTS, MAPPINGS = (list, tuple, Sequence), (dict, Mapping)
TYPES: dict[Any, set[type]] = {kind: {kind} for kind in (int, bool, str, NoneType)}
TYPES |= {float: {int, float}, None: {NoneType}}
"""Declared type -> accepted types of values: an int is accepted as a float, a bool is not a
number."""
WORDS: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "a text",
    NoneType: "null", None: "null", Any: "anything",
}  # fmt: skip


@dataclass(frozen=True)
class Range:
    """The smallest and largest allowed number of a field; neither is NaN."""

    low: float
    high: float
    above: bool = False  # whether `low` itself is too small

    def holds(self, values: Sequence[Any]) -> bool:
        """Return whether all of these numbers are in the range; a NaN is in none."""
        within = all(self.low <= end <= self.high for end in (min(values), max(values)))
        return within and all(map(eq, values, values)) and not (self.above and self.low in values)

    def __str__(self) -> str:
        if self.high >= UNBOUNDED:
            return f"above {self.low:g}" if self.above else f"of {self.low:g} or more"
        return f"{'above' if self.above else 'from'} {self.low:g} to {self.high:,.12g}"


UNBOUNDED = 2**53  # a range up to this is shown without an upper end
Count = Annotated[int, Range(0, 2**53)]
Amount = Annotated[float, Range(0, 2**53)]
Seconds = Annotated[float, Range(0, 1e9)]  # a duration
Positive = Annotated[int, Range(1, 2**53)]
Size = Annotated[int, Range(1, 1_000_000)]  # of a block, a window or a memory; more is a mistake
PositiveAmount = Annotated[float, Range(0, math.inf, above=True)]
Probability = Annotated[float, Range(0, 1)]
Proportion = Annotated[float, Range(0, 1)]
Fraction = Annotated[float, Range(0, 0.999_999, above=True)]  # neither 0 nor 1
PositiveProportion = Annotated[float, Range(0, 1, above=True)]
Moment = Annotated[float, Range(0, 253_402_300_799)]  # seconds since the epoch, to the year 9999


def fits(value: Any, declared: Any, is_a: IsA = isinstance) -> bool:
    """Return whether `value` is of the type `declared`, as `typing.get_type_hints` gives it.

    is_a: decides for classes and for `object`, which stands for Any.
    """
    if declared in TYPES:
        return type(value) in TYPES[declared]
    origin, parts = _taken_apart(declared)
    if origin in (Union, UnionType):
        return any(fits(value, part, is_a) for part in parts)
    if origin is Annotated:
        return fits(value, parts[0], is_a) and parts[1].holds([value])
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin in LISTS:
        return isinstance(value, (list, tuple)) and _all_fit(value, origin, parts, is_a)
    if origin in MAPPINGS:
        key, item = parts
        return isinstance(value, Mapping) and all(
            fits(k, key, is_a) and fits(v, item, is_a) for k, v in value.items()
        )
    return is_a(value, object if declared is Any else origin or declared)


_taken_apart: Callable[[Any], Any] = cache(lambda kind: (get_origin(kind), get_args(kind)))


def _all_fit(values: Sequence[Any], origin: Any, parts: tuple[Any, ...], is_a: IsA) -> bool:
    fixed = origin is tuple and Ellipsis not in parts
    if fixed and len(values) != len(parts):
        return False
    kind, *ranges = get_args(parts[0]) if get_origin(parts[0]) is Annotated else parts[:1]
    if not fixed and kind in TYPES:  # a fast path, for the many token ids of a sample
        of_kind = set(map(type, values)) <= TYPES[kind]
        return of_kind and (not values or all(one.holds(values) for one in ranges))
    declared = parts if fixed else parts[:1] * len(values)
    return all(fits(value, part, is_a) for value, part in zip(values, declared, strict=True))


def in_words(declared: Any) -> str:
    """Return the declared type in words for an error: "a whole number from 0 to 10, or null"."""
    parts = get_args(declared)
    if get_origin(declared) is Annotated:
        return f"{in_words(parts[0])} {parts[1]}"
    if get_origin(declared) is Literal:
        return " or ".join(map(repr, parts))
    if get_origin(declared) in (Union, UnionType):
        return ", or ".join(map(in_words, parts))
    if declared in WORDS:
        return WORDS[declared]
    if get_origin(declared) in (*LISTS, *MAPPINGS):
        return "a list" if get_origin(declared) in LISTS else "names with values"
    return f"a {declared.__name__ if isinstance(declared, type) and not parts else declared}"


def refusal(owner: str, name: str, declared: Any, value: Any) -> DllmBenchError:
    """Return the error for a setting that violates its declared type, range or choices."""
    return DllmBenchError(f"{owner} has {name} {shown(value)}; give {in_words(declared)}.")


def shown(value: Any) -> str:
    """Return a value as shown in an error message, cut to `SHOWN_CHARS`."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…"


class CheckedFields:
    """Base of dataclasses that refuse values outside the ranges and choices of their fields."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, declared in _narrowed(kind).items():
            value = getattr(self, name)
            if not fits(value, declared):
                raise refusal(kind.__name__, name, declared, value)


@cache
def _narrowed(kind: Any) -> dict[str, Any]:
    """Return the types of the fields that declare a range or choices."""
    hints = dict[str, Any]()
    with suppress(NameError):  # a type that is only imported for annotations
        hints = get_type_hints(kind, include_extras=True)
    own = {field.name: hints[field.name] for field in fields(kind) if field.name in hints}
    return {name: declared for name, declared in own.items() if _is_narrow(declared)}


def _is_narrow(declared: Any) -> bool:
    of = get_origin(declared)
    return of in (Annotated, Literal) or (
        of in (Union, UnionType) and any(map(_is_narrow, get_args(declared)))
    )


def made_from(kind: Callable[..., Made], plain: Any) -> Made:
    """Return a `kind` (a dataclass, possibly nested) made from plain data; ValueError for names or
    types that it does not declare.
    """
    hints, optional = _fields_of(kind)
    names = hints.keys()
    if not isinstance(plain, Mapping) or not (names - optional) <= plain.keys() <= names:
        raise ValueError(f"not a {kind.__name__}")
    values = {name: _part(hints[name], value) for name, value in plain.items()}
    wrong = [name for name, value in values.items() if not fits(value, hints[name])]
    if wrong:
        raise ValueError(f"{wrong[0]} of a {kind.__name__} is not {in_words(hints[wrong[0]])}")
    return kind(**values)


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the types of all fields, and the names of fields with a default."""
    hints = get_type_hints(kind, include_extras=True)
    own = [field for field in fields(kind) if field.init]
    optional = [f.name for f in own if (f.default, f.default_factory) != (MISSING, MISSING)]
    return {field.name: hints[field.name] for field in own}, frozenset(optional)


def _part(declared: Any, value: Any) -> Any:
    """Return a value, converted to its declared type if that is a dataclass."""
    kinds = (declared, *get_args(declared))
    inner = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    if inner and isinstance(value, Mapping):
        kind: Any = inner[0]
        return kind(value) if issubclass(kind, Mapping) else made_from(kind, value)
    if inner and isinstance(value, list):
        return [_part(inner[0], item) for item in value]
    return value
