"""All output to the terminal: text, lines rendered by rich, progress, warnings.

Output may contain text from a model, a server or other people's results. So everything passes
through `cleaned`: control characters and characters that hide or reverse text are escaped, and
secrets of this process are removed. Only colours and cursor moves of rich itself remain.
"""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

from dllm_bench.core.secrets import strike_out

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


KEPT = "\n\t"
HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")  # control, format, surrogate, line and paragraph separators


def visible(text: str) -> str:
    """Return the text with every control or invisible character, except newline and tab, as an
    escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        repr(character)[1:-1]
        if unicodedata.category(character) in HIDDEN and character not in KEPT
        else character
        for character in text
    )


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


def console(
    *, stderr: bool = False, width: int | None = None, file: TextIO | None = None
) -> Console:
    """Make a rich console whose texts are cleaned; the settings are rich's own.

    Automatic highlighting is off, because it would cut a secret in two.
    """
    return _console_class()(highlight=False, stderr=stderr, width=width, file=file)


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

    def clean_form(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        return cleaned(form(message, category, filename, lineno, line))

    warnings.formatwarning = clean_form
