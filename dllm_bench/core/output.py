"""What leaves this process: secrets are removed everywhere, control characters on the terminal.

Secrets, such as a server's key, are removed from everything that is written and shown. Code that
reads a secret calls `keep_out`. Code that writes calls `strike_out` (text) or `strike_out_of`
(plain data, before the checksum is computed). A secret that was cut in two, or encoded other than
as JSON, is not recognised.

Output to the terminal (text, lines rendered by rich, progress, warnings) may contain text from a
model, a server or other people's results. So everything passes through `cleaned`: control
characters and characters that hide or reverse text are escaped, and secrets are removed. Only
colours and cursor moves of rich itself remain.
"""

from __future__ import annotations

import json
import sys
import unicodedata
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

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


# --- the terminal ---------------------------------------------------------------------------------

KEPT = "\n\t"
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, surrogate, line and paragraph separators


def visible(text: str) -> str:
    """Return the text with every control or invisible character, except newline and tab, as an
    escape."""
    if text.isascii() and text.isprintable():
        return text

    def shown(character: str) -> str:
        hidden = unicodedata.category(character) in HIDDEN and character not in KEPT
        return repr(character)[1:-1] if hidden else character

    return "".join(map(shown, text))


def cleaned(text: str) -> str:
    """Return the text in a form that is safe for a terminal."""
    return visible(strike_out(text))


def show(text: str, stream: TextIO | None = None) -> None:
    """Write a text and a line end to standard output, or to `stream`, and flush."""
    stream = stream or sys.stdout
    stream.write(cleaned(text) + "\n")
    stream.flush()


def show_error(text: str) -> None:
    """Write a text and a line end to standard error."""
    show(text, sys.stderr)


def console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Make a rich console whose texts are cleaned; the settings are rich's own.

    Automatic highlighting is off, because it would cut a secret in two.
    """
    return _console_class()(highlight=False, stderr=stderr, width=width)


@cache
def _console_class() -> type[Console]:
    from rich.console import Console  # takes a tenth of a second, and most commands do not need it

    class CleanConsole(Console):
        """Cleans the text of every segment, and leaves rich's own control codes."""

        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=cleaned(segment.text))

    return CleanConsole


def painted(drawing: RenderableType, by: Console) -> Iterator[str]:
    """Yield the drawing as lines with the console's colours, without white space at their ends."""
    with by.capture() as captured:
        by.print(drawing)
    yield from (line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def show_painted(drawing: RenderableType, by: Console) -> None:
    """Write `painted` lines to standard output; `by`: a console of `console`."""
    sys.stdout.writelines(f"{line}\n" for line in painted(drawing, by))


@cache
def clean_warnings() -> None:
    """Clean all warnings that this process shows from here on, including those of libraries."""
    form = warnings.formatwarning
    warnings.formatwarning = lambda *parts, **named: cleaned(form(*parts, **named))
