"""Values of judged programs: what is sent, and that hostile bytes give a value or an error."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict, deque
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dllm_bench.benchmarks.sandbox.child.codec import (
    Array,
    Opaque,
    UnreadableValueError,
    decode,
    encode,
)

EXACT: list[Any] = [
    None, True, False, 0, -1, 255, -(10**50), 10**400, 1.5, -0.0, math.inf, 2j, "", "ä\ud800\n",
    b"\0", bytearray(b"y"), [], [1, [2.0, None]], (1,), {"2"}, frozenset({3}), {"a": [1], 2: ()},
    range(1, 9, 2), Fraction(1, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_builtin_values_arrive_as_they_are(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value)
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    ("value", "arrives"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (OrderedDict(x=1), {"x": 1}),
        (np.float64(0.5), 0.5),
        (np.int64(3), 3),
        (Decimal("0.5"), Fraction(1, 2)),
    ],
)
def test_other_values_arrive_as_what_they_hold(value: Any, arrives: Any) -> None:
    found = decode(encode(value))
    assert (type(found), found) == (type(arrives), arrives)


def test_what_is_no_value_equals_nothing() -> None:
    assert list(decode(encode(iter("ab")))) == list(decode(encode(deque("ab")))) == ["a", "b"]
    assert isinstance(decode(encode(object())), Opaque)
    array = decode(encode(np.eye(2)))
    assert isinstance(array, Array)
    assert array.members == [[1, 0], [0, 1]]
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnreadableValueError, match="too deeply"):
        encode(endless)


def test_hostile_bytes_give_a_value_or_an_error() -> None:
    rng = random.Random(0)
    whole = encode(EXACT)
    for _ in range(2000):
        data = bytearray(whole[: rng.randrange(1, len(whole) + 1)])
        for _ in range(rng.randint(0, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with suppress(UnreadableValueError):
            decode(bytes(data))
    with pytest.raises(UnreadableValueError):
        decode(b"l\0\0\0\1" * 1000)
