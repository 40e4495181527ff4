"""Values of a judged program as bytes, in a form that runs no code of the program's when read.

Only builtin types and the classes of this file come out of `decode`. An instance of a subclass
(`Counter`, an int with its own `__eq__`) is sent as the builtin value it holds; an exact fraction
or decimal number as its ratio; anything that can be iterated as an iterator over its members; every
other object as an `Opaque`, which equals nothing. A value is a tag, then its length or count, then
its content. Pickle and marshal are not used because reading hostile bytes with them is not safe.
Values have bounds on depth, total members, digits and equal hashes, which are also checked when
reading.
"""

from __future__ import annotations

import struct
from itertools import islice

# Type checkers know this name; importing typing would double the start time.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

MAX_DEPTH = 200
"""Nesting at which a value is refused."""
MAX_ITEMS = 1_000_000
"""Members after which an iterator is refused, which may be endless."""
MAX_MEMBERS = 2_000_000
"""Members of a whole value, those of members included."""
MAX_INT = 1 << 17
"""Bytes of an integer, some 315,000 digits."""
MAX_RATIO = 1 << 13
"""Bytes of numerator and denominator, which take quadratic time to reduce."""
MAX_EQUAL_HASHES = 64
"""Members of a set or dict with the same hash, each of which is compared with all others."""
HEAD = struct.Struct(">cI")
"""A tag, and the length of the content in bytes or its number of values."""
FLOAT = struct.Struct(">d")
CONTAINERS: dict[bytes, Any] = {b"l": list, b"t": tuple, b"S": set, b"z": frozenset}
"""Tag -> type of a container of single members."""


class UnreadableValueError(Exception):
    """A value that cannot be sent, or bytes that do not encode a value."""


class Opaque:
    """Stands for an object that is not sent; it equals nothing else."""

    __slots__ = ("kind",)

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Array:
    """The members of a numpy array, as nested lists; it equals no list."""

    __slots__ = ("members",)

    def __init__(self, members: list[Any]) -> None:
        self.members = members

    def __iter__(self) -> Iterator[Any]:
        return iter(self.members)


class OtherFloat(float):
    """A float of a subclass, as numpy's; EvalPlus allows it no tolerance."""


def encode(value: Any) -> bytes:
    """Return the bytes of a value; UnreadableValueError if it is too deep or endless."""
    parts: list[bytes] = []
    _write(value, parts, 0)
    return b"".join(parts)


def _write(value: Any, parts: list[bytes], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise UnreadableValueError("nested too deeply")
    if value is None or value is True or value is False:
        parts.append(HEAD.pack(b"N" if value is None else b"b", value is True))
    elif isinstance(value, int):
        number = int.__index__(value)
        _content(b"i", number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True), parts)
    elif isinstance(value, float):
        _content(b"f" if type(value) is float else b"F", FLOAT.pack(value), parts)
    elif isinstance(value, complex):
        _content(b"c", FLOAT.pack(value.real) + FLOAT.pack(value.imag), parts)
    elif isinstance(value, str):
        _content(b"s", str.encode(value, "utf-8", "surrogatepass"), parts)
    elif isinstance(value, (bytes, bytearray)):
        _content(b"B" if isinstance(value, bytearray) else b"y", bytes(value), parts)
    elif isinstance(value, (list, tuple, set, frozenset, dict)):
        _write_container(value, parts, depth)
    else:
        _write_other(value, parts, depth)


def _content(tag: bytes, content: bytes, parts: list[bytes]) -> None:
    parts.append(HEAD.pack(tag, len(content)))
    parts.append(content)


def _members(tag: bytes, members: list[Any], parts: list[bytes], depth: int) -> None:
    parts.append(HEAD.pack(tag, len(members)))
    for member in members:
        _write(member, parts, depth + 1)


def _write_container(value: Any, parts: list[bytes], depth: int) -> None:
    """Write the members, read with the builtin type's own methods."""
    if isinstance(value, dict):
        flat = [part for pair in dict.items(value) for part in pair]
        return _members(b"d", flat, parts, depth)
    for tag, kind in CONTAINERS.items():
        if isinstance(value, kind):
            return _members(tag, list(kind.__iter__(value)), parts, depth)
    return None


def _write_other(value: Any, parts: list[bytes], depth: int) -> None:
    """Write numpy's arrays and numbers, exact ratios, ranges and iterators; refuse what is not
    sent."""
    kind = type(value)
    if kind.__module__ == "numpy" and hasattr(kind, "tolist"):
        plain = value.tolist()
        if isinstance(plain, list):
            return _members(b"a", plain, parts, depth)
        return _write(plain, parts, depth + 1)
    if kind is range:
        return _members(b"r", [value.start, value.stop, value.step], parts, depth)
    if hasattr(kind, "as_integer_ratio"):
        return _members(b"q", list(value.as_integer_ratio()), parts, depth)
    if hasattr(kind, "__iter__"):
        members = list(islice(iter(value), MAX_ITEMS + 1))
        if len(members) > MAX_ITEMS:
            raise UnreadableValueError("too many members")
        return _members(b"I", members, parts, depth)
    return _content(b"o", kind.__name__.encode("utf-8", "replace"), parts)


def decode(data: bytes) -> Any:
    """Return one whole value, of bytes that may be hostile; UnreadableValueError for anything
    else."""
    try:
        value, end = _read(data, 0, 0, [MAX_MEMBERS])
    except (struct.error, ValueError, TypeError, ArithmeticError, MemoryError) as error:
        raise UnreadableValueError(f"{type(error).__name__}: {error}") from error
    if end != len(data):
        raise UnreadableValueError("bytes after the value")
    return value


def _read(data: bytes, at: int, depth: int, left: list[int]) -> tuple[Any, int]:
    """Return (value, index after it) of the value at index `at`; `left` counts members down."""
    if depth > MAX_DEPTH:
        raise UnreadableValueError("nested too deeply")
    tag, count = HEAD.unpack_from(data, at)
    at += HEAD.size
    if tag in b"Nb":
        return (None if tag == b"N" else bool(count)), at
    if count > len(data) - at:  # every member takes a byte or more
        raise UnreadableValueError("shorter than it says")
    if tag in b"ifFcsyBo":
        return _read_content(tag, data[at : at + count]), at + count
    left[0] -= count
    if left[0] < 0:
        raise UnreadableValueError("too many members")
    members = []
    for _ in range(count):
        member, at = _read(data, at, depth + 1, left)
        members.append(member)
    if tag not in MADE:
        raise UnreadableValueError(f"unknown tag {tag!r}")
    return MADE[tag](members), at


def _read_content(tag: bytes, content: bytes) -> Any:
    if tag == b"i":
        if len(content) > MAX_INT:
            raise UnreadableValueError("too many digits")
        return int.from_bytes(content, "big", signed=True)
    if tag in b"fF":
        return (float if tag == b"f" else OtherFloat)(*FLOAT.unpack(content))
    if tag == b"c":
        return complex(*struct.unpack(">dd", content))
    if tag == b"s":
        return content.decode("utf-8", "surrogatepass")
    if tag == b"o":
        return Opaque(content.decode("utf-8", "replace"))
    return bytearray(content) if tag == b"B" else content


def _ratio(numerator: Any, denominator: Any) -> Any:
    """Return the exact fraction of two integers.

    Nothing else: the text `1e999999999` is short, and the number it stands for fills the memory.
    """
    for part in (numerator, denominator):
        if type(part) is not int or part.bit_length() > 8 * MAX_RATIO:
            raise UnreadableValueError("no ratio of integers, or too many digits")
    from fractions import Fraction  # takes milliseconds to import, and is rarely needed

    return Fraction(numerator, denominator)


def _hashable(members: list[Any]) -> list[Any]:
    """Return the members of a set or the keys of a dict, whose hashes must differ: making it out of
    n that do not takes n * n comparisons.
    """
    if len(members) > MAX_EQUAL_HASHES:
        seen: dict[int, int] = {}
        for one in map(hash, members):
            seen[one] = seen.get(one, 0) + 1
        if max(seen.values()) > MAX_EQUAL_HASHES:
            raise UnreadableValueError("too many equal hashes")
    return members


MADE: dict[bytes, Any] = {
    b"l": list,
    b"t": tuple,
    b"S": lambda members: set(_hashable(members)),
    b"z": lambda members: frozenset(_hashable(members)),
    b"d": lambda members: dict(zip(_hashable(members[::2]), members[1::2], strict=True)),
    b"I": iter,
    b"a": Array,
    b"r": lambda members: range(*members),
    b"q": lambda members: _ratio(*members),
}
"""Tag -> how a value is made of its members."""
