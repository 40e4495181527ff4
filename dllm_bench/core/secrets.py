"""Secrets of this process, such as a server's key, struck out of all that it writes and shows.

Who reads a secret calls `keep_out`. What writes calls `strike_out` (text) or `strike_out_of` (plain
data, before its checksum is taken). A secret that was cut in two, or encoded in another way than
JSON's, is not recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRUCK = "***"
SHORTEST = 8  # a shorter key ("EMPTY") is no secret, and could be a word of an answer
_secrets: dict[str, None] = {}  # in the order to strike them: the forms of one after the other


def keep_out(secret: str | None) -> None:
    """Strike a secret out from here on; a short one, or one of digits alone, is none."""
    if secret is not None and len(secret) >= SHORTEST and not secret.isdigit():
        for form in (secret, json.dumps(secret)[1:-1]):
            _secrets[form] = None


def strike_out(text: str) -> str:
    """The text without this process's secrets."""
    for secret in _secrets:
        text = text.replace(secret, STRUCK)
    return text


def strike_out_of(plain: Any) -> Any:
    """Plain data without this process's secrets, in keys and values at any depth."""
    if not _secrets:
        return plain
    if isinstance(plain, str):
        return strike_out(plain)
    if isinstance(plain, Mapping):
        return {strike_out_of(key): strike_out_of(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [strike_out_of(value) for value in plain]
    return plain
