"""Remove secrets of this process, such as a server's key, from everything it writes and shows.

Code that reads a secret calls `keep_out`. Code that writes calls `strike_out` (text) or
`strike_out_of` (plain data, before the checksum is computed). A secret that was cut in two, or
encoded other than as JSON, is not recognised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

STRUCK = "***"
SHORTEST = 8  # a shorter key ("EMPTY") is not secret, and could be a word of an answer
_secrets: dict[str, None] = {}  # in the order of removal: all forms of one secret, then of the next


def keep_out(secret: str | None) -> None:
    """Remove this secret from now on; a short text, or one of digits only, is not treated as a
    secret."""
    if secret is not None and len(secret) >= SHORTEST and not secret.isdigit():
        for form in (secret, json.dumps(secret)[1:-1]):
            _secrets[form] = None


def strike_out(text: str) -> str:
    """Return the text without this process's secrets."""
    for secret in _secrets:
        text = text.replace(secret, STRUCK)
    return text


def strike_out_of(plain: Any) -> Any:
    """Return plain data without this process's secrets, in keys and values at any depth."""
    if not _secrets:
        return plain
    if isinstance(plain, str):
        return strike_out(plain)
    if isinstance(plain, Mapping):
        return {strike_out_of(key): strike_out_of(value) for key, value in plain.items()}
    if isinstance(plain, (list, tuple)):
        return [strike_out_of(value) for value in plain]
    return plain
