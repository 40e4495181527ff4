"""JSON with a checksum of its content, so that damage is seen wherever it does not end the parsing.

`check` is the beginning of a sha256 over everything else, in canonical form: white space and the
order of keys do not matter. What was stored before checksums has none and is read as it is; damage
in it is seen only where it breaks the JSON or the declared form.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECK = "check"
DIGITS = 16  # hexadecimal, of the checksum
Plain = dict[str, Any]


def checksum(plain: Mapping[str, Any]) -> str:
    """The checksum of plain data without its own `check`."""
    content = {key: value for key, value in plain.items() if key != CHECK}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def checked_line(plain: Mapping[str, Any]) -> str:
    """One line of JSON with its checksum, without the newline."""
    whole = {**plain, CHECK: checksum(plain)}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


def read_checked(text: str | bytes) -> Plain:
    """The content of checked JSON; ValueError for damage of any kind."""
    plain = parse(text)
    if not isinstance(plain, dict):
        raise ValueError("not a JSON object")
    stated = plain.pop(CHECK, None)
    if stated is not None and stated != checksum(plain):
        raise ValueError("its checksum is not that of its content")
    return plain


def is_checked(text: str | bytes) -> bool:
    """Whether readable JSON carries a checksum."""
    return CHECK in parse(text)


def parse(text: str | bytes) -> Any:
    """`json.loads` of UTF-8, with ValueError for anything it cannot read."""
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
