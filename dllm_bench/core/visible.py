"""Text from outside, made safe to print: a terminal would obey the control characters in it."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t"
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, surrogate, line and paragraph separators


def visible(text: str) -> str:
    """The text with every control or invisible character, except newline and tab, as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        repr(character)[1:-1]
        if unicodedata.category(character) in HIDDEN and character not in KEPT
        else character
        for character in text
    )
