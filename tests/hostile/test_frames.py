"""What a judged process sends: values arrive as they are, no frames pass or break the judge."""

from __future__ import annotations

import math
import os
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dllm_bench.benchmarks.sandbox.child import check, codec
from dllm_bench.benchmarks.sandbox.child.answer import LENGTH
from dllm_bench.benchmarks.sandbox.child.codec import HEAD, decode, encode
from dllm_bench.benchmarks.sandbox.child.supervise import FAILURES, AnswerEnded, JudgedProcess

EXACT: list[Any] = [
    None, True, False, 0, -1, 255, -(10**50), 10**400, 1.5, -0.0, math.inf, 2j, "", "ä\ud800\n",
    b"\0", bytearray(b"y"), [], [1, [2.0, None]], (1,), {"2"}, frozenset({3}), {"a": [1], 2: ()},
    range(1, 9, 2), Fraction(1, 3),
]  # fmt: skip


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_builtin_values_arrive_as_they_are(value: Any) -> None:
    found = decode(encode(value))
    assert type(found) is type(value) and found == value and repr(found) == repr(value)


HOLDING = [(Counter("aab"), {"a": 2, "b": 1}), (OrderedDict(x=1), {"x": 1})]
HOLDING += [(np.float64(0.5), codec.OtherFloat(0.5)), (np.int64(3), 3)]
HOLDING += [(Decimal("0.5"), Fraction(1, 2))]


@pytest.mark.parametrize(("value", "arrives"), HOLDING)
def test_other_values_arrive_as_what_they_hold(value: Any, arrives: Any) -> None:
    found = decode(encode(value))
    assert (type(found), found) == (type(arrives), arrives)


def test_what_is_no_value_equals_nothing() -> None:
    assert list(decode(encode(iter("ab")))) == list(decode(encode(deque("ab")))) == ["a", "b"]
    assert isinstance(decode(encode(object())), codec.Opaque)
    array = decode(encode(np.eye(2)))
    assert isinstance(array, codec.Array) and array.members == [[1, 0], [0, 1]]
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(codec.UnreadableValueError, match="too deeply"):
        encode(endless)
    with pytest.raises(codec.UnreadableValueError):
        decode(b"l\0\0\0\1" * 1000)


# --- a fuzz of frames -----------------------------------------------------------------------------

SECRET = "what the judged process does not know"
RULES = ("equal", "same_value", "same_set")
ENDINGS = {*FAILURES, "timeout", "crashed"}
VALUES: list[Any] = [*EXACT, math.nan, iter([1]), object()]
KINDS: list[Any] = "value passed ended failed memory refused judge_error end".split()
KINDS += ["", b"passed", 1]
TAGS = b"NbifFcsyBoltSzdarqI?\0"


class FrameSource(JudgedProcess):
    """A judged process that has sent some bytes and ended well; its frames may come early."""

    def stop(self, grace_s: float = 0.0) -> int:
        return 0

    def _send(self, data: bytes) -> None: ...

    def _refuse_early(self) -> None: ...

    def _clock(self) -> tuple[float, float]:
        return 0.0, 0.0


@contextmanager
def sent(data: bytes) -> Iterator[FrameSource]:
    results, write = os.pipe()
    os.write(write, data)
    os.close(write)
    yield FrameSource(0, -1, results, -1, {"cpu_s": 1.0, "wall_s": 60.0})
    os.close(results)


def random_value(rng: random.Random) -> bytes:
    """Return a tree of tags with random lengths and contents, mostly of the right form."""
    tag, count = bytes([rng.choice(TAGS)]), rng.choice([0, 1, 2, 3, 8, 2**32 - 1])
    if tag in b"ltSzdarqI":
        return HEAD.pack(tag, count) + b"".join(random_value(rng) for _ in range(min(count, 3)))
    return HEAD.pack(tag, count) + rng.randbytes(min(count, 16))


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them changed, taken out or repeated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at, end = sorted(rng.randrange(len(changed) + 1) for _ in range(2))
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at:end]
            case _:
                changed[at:at] = changed[at:end]
    return bytes(changed[:4096])


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "big") + data


def streams(rng: random.Random) -> Iterator[bytes]:
    """Endless bytes of one or two frames: well formed, random inside, and damaged anywhere."""
    whole = [encode((kind, value)) for kind in KINDS for value in VALUES]
    whole += [encode((kind, "", [])) for kind in KINDS]
    while True:
        content = rng.choice(whole)
        yield framed(content) + framed(rng.choice(whole))
        yield framed(mutated(rng, content))
        yield mutated(rng, framed(content))
        yield framed(encode(("value",))[:-4] + random_value(rng))
        yield framed(HEAD.pack(b"t", 2) + encode(rng.choice(KINDS)) + random_value(rng))
        yield framed(random_value(rng))
        yield rng.randbytes(rng.randrange(64))


def judged(data: bytes, rule: str) -> tuple[str, str]:
    """(verdict, detail) of the bytes in place of the results of two calls."""
    payload = {"rule": rule, "entry_point": "f", "atol": 0.0}
    with sent(data) as source:
        return check.judge(source, [([3], SECRET, 0.0), ([4], SECRET, 0.0)], [1.0, 1.0], payload)


def loaded(data: bytes) -> tuple[str, str]:
    """(ending, detail) of the bytes in place of the word that the program has ended."""
    with sent(data) as source:
        try:
            return source.load(1.0)
        except AnswerEnded as error:
            failure, detail = error.args
            return failure, detail


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.drill)])
def test_no_frames_pass_and_none_break_the_judge(count: int) -> None:
    source, seen = streams(random.Random(count)), set()
    for index in range(count):
        data = next(source)
        verdict, detail = judged(data, RULES[index % len(RULES)])
        assert verdict in ENDINGS, (data, verdict)
        ending, why = loaded(data)
        assert ending in {*ENDINGS, "ended"}, (data, ending)
        assert type(detail) is type(why) is str and len(detail) < 300
        seen.add(ending)
    assert seen >= {*FAILURES, "ended"}


def test_the_right_values_pass_the_same_way() -> None:
    assert judged(framed(encode(("value", SECRET))) * 2, "equal") == ("passed", "")
    assert loaded(framed(encode(("ended", "", ["f"])))) == ("ended", "")
