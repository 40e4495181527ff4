"""`DllmBenchError`, for mistakes that the user can correct, and its message for an unknown name;
the warning that this machine forces a slower path.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches


class DllmBenchError(Exception):
    """A mistake that the user can correct.

    The message says what was requested, what was found, and what to do.
    """


SHOWN = 5  # number of nearest names shown if many are known


def unknown_name(
    kind: str, name: str, known: Sequence[str], more: str = "", listing: str = ""
) -> str:
    """Return the error message for an unknown name: the nearest known one, if any, then the
    choices.

    Of more known names than twice `SHOWN` the nearest are shown, nearest first. `more` is added
    after the names, for choices that are not names; `listing` is the command that prints all names.
    """
    question = did_you_mean(name, known)
    choose = f"{question}Choose" if question else "choose"
    shown = known
    if len(known) > 2 * SHOWN:
        shown = get_close_matches(str(name), known, n=SHOWN, cutoff=0)
        command = f"; `{listing}` lists them" if listing else ""
        more = f" (the nearest of {len(known)}{command}){more}"
    return f"There is no {kind} {name!r}; {choose} one of: {', '.join(shown)}{more}."


def did_you_mean(name: str, known: Sequence[str], prefix: str = "") -> str:
    """Return "did you mean 'x'? " with the nearest known name after `prefix`; empty if none is
    near."""
    near = get_close_matches(str(name), known, n=1)
    return f"did you mean {prefix + near[0]!r}? " if near else ""


FALLBACKS: list[str] = []
"""Slower paths that this process takes, each with its reason; records store them."""


def passes_check(check: Callable[[], None], what: str, slower: str) -> bool:
    """Return whether the check of a fast path raises nothing; note the slower path, with a warning,
    if it does.

    what: what is checked. slower: what this process does without it, as a sentence.
    """
    try:
        check()
    except Exception as error:
        message = f"{slower}: {what} fails ({error})."
        if message not in FALLBACKS:
            FALLBACKS.append(message)
        warnings.warn(message, stacklevel=5)  # past this and what asks for the check
        return False
    return True
