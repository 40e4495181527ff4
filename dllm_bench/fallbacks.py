"""Faster paths that do not work on this machine: one warning each, and a list for records."""

from __future__ import annotations

import warnings

FALLBACKS: list[str] = []
"""What runs in their place in this process, and why."""


def fall_back(what: str, why: str, stacklevel: int = 2) -> None:
    """Note that this process takes a slower path, with a warning.

    what: that path, as a sentence.
    """
    message = f"{what}: {why}."
    if message not in FALLBACKS:
        FALLBACKS.append(message)
    warnings.warn(message, stacklevel=stacklevel + 1)
