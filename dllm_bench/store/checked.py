"""JSON with a checksum of its content, so that damage is detected even if the JSON can be parsed.

`check` is the beginning of a sha256 over everything else, in canonical form: white space and the
order of keys do not matter.

Values that no stored file contains are refused at any place: NaN, infinities and numbers beyond
`LARGEST`, halves of surrogate pairs, values nested deeper than `LEVELS`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from dllm_bench.core.secrets import strike_out_of

CHECK = "check"
DIGITS = 16  # hexadecimal, of the checksum
LARGEST = 2**63  # no number is as large
LEVELS = 32  # nesting depth of lists and objects
NUMBERS = {int, float}
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # half of a pair, or of two escapes that are one
Plain = dict[str, Any]


def checksum(plain: Mapping[str, Any]) -> str:
    """Return the checksum of plain data without its own `check`."""
    content = {key: value for key, value in plain.items() if key != CHECK}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def checked_line(plain: Mapping[str, Any]) -> str:
    """Return one line of JSON with its checksum, without the newline."""
    return json.dumps(checked(plain), ensure_ascii=False, separators=(",", ":"))


def checked(plain: Mapping[str, Any]) -> Plain:
    """Return plain data without this process's secrets, and with its checksum."""
    content = strike_out_of(plain)
    return {**content, CHECK: checksum(content)}


def read_checked(text: str | bytes) -> Plain:
    """Return the content of checked JSON; ValueError for damage of any kind."""
    plain = parse(text)
    if not isinstance(plain, dict):
        raise ValueError("not a JSON object")
    stated = plain.pop(CHECK, None)
    if stated != checksum(plain):
        raise ValueError("its checksum is not that of its content")
    return plain


def parse(text: str | bytes) -> Any:
    """Return `json.loads` of UTF-8; ValueError if it cannot be read, or contains values that no
    stored file has."""
    text = text.decode() if isinstance(text, bytes) else text
    try:
        value = json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    check_plain(value)
    if SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def check_plain(value: Any, levels: int = LEVELS) -> None:
    """Raise ValueError for plain data with a number or a depth that no stored file has."""
    inner = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(inner, list):
        inner = [value]
    elif not levels:
        raise ValueError(f"nested more than {LEVELS} levels deep")
    kinds = set(map(type, inner))
    numbers = inner if kinds <= NUMBERS else [one for one in inner if type(one) in NUMBERS]
    if numbers and not (-LARGEST < min(numbers) <= max(numbers) < LARGEST):
        raise ValueError("a number beyond 2**63")
    if kinds & {dict, list}:
        for one in inner:
            if isinstance(one, (dict, list)):
                check_plain(one, levels - 1)
