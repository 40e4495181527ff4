"""Show the decoding order of a sample in the terminal: the text, one line per forward, the canvas.

The background of a token is the colour of the forward that committed it (`colours_of_forward`).
Without colours a small number after each token names the forward. Invisible characters in the
model's text are written out, so the text cannot control the terminal. rich obeys NO_COLOR and
FORCE_COLOR.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dllm_bench.core.terminal import console as clean_console
from dllm_bench.site.decoding_order import (
    CanvasToken,
    DecodingOrder,
    ForwardStep,
    colours_of_forward,
)
from dllm_bench.site.format import printable

MASK, BORDER, SPACE, FORCED, DIM = "░", "│", "␣", "!", "dim"
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
OVERWRITTEN, REMASKED, INSERTED = "↻", "⌫", "+"
LOOKAHEAD, BASE = ("○", "●"), ("□", "■")  # branch dropped, branch continued
LONG_RUN = 4  # this many equal neighbours or more are written once, with their count
SWATCHES = 16  # colours in the legend, at most


def drawing(order: DecodingOrder, console: Console, canvas: bool = False) -> RenderableType:
    """Return the decoding order as rich draws it; `canvas` adds the canvas after every forward."""
    colours = bool(console.color_system) and not console.no_color
    return DecodingOrderPainter(order, colours).everything(canvas)


def terminal() -> Console:
    """Return a console for standard output, as wide as the terminal; without colours if it is a
    pipe."""
    return clean_console(width=shutil.get_terminal_size().columns)


def forward_style(forward: int, forwards: int) -> Style:
    """Return the colours of a forward among `forwards` as a rich style."""
    ink, background = colours_of_forward(forward, forwards)
    return Style.parse(f"{ink} on rgb({','.join(map(str, background))})")


class DecodingOrderPainter:
    """Draws one decoding order, with colours or with the numbers of forwards."""

    def __init__(self, order: DecodingOrder, colours: bool) -> None:
        self.order = order
        self.colours = colours
        self.styles = [forward_style(i, len(order.steps)) for i in range(len(order.steps))]

    def everything(self, canvas: bool) -> RenderableType:
        """Return headline, text, forwards, legend; with `canvas`, also the canvas by forward."""
        parts: list[RenderableType] = [self.headline(), Text(), self.text(), Text()]
        parts += [self.forwards(), Text(), self.legend()]
        for index in range(len(self.order.steps) if canvas else 0):
            share = self.order.steps[index].filled
            parts += [Text(), Text(f"after forward {index} ({share:.0%})", "bold")]
            parts.append(self.canvas(until=index))
        return Group(*parts)

    def headline(self) -> Text:
        """Return the sample's name, its length, and where it ends for which reasons."""
        order = self.order
        ends = ", ".join(f"{reason} at {at}" for reason, at in order.ends.items())
        size = f"{len(order.tokens)} positions in {len(order.steps)} forwards"
        return Text(f"sample {printable(order.id)}: {size}" + (f", ends: {ends}" if ends else ""))

    def text(self) -> Text:
        """Return the final canvas, readable, with the end of the text marked."""
        return self.canvas(until=len(self.order.steps), final=True)

    def canvas(self, until: int, final: bool = False) -> Text:
        """Return the canvas after forward `until`; `final` also breaks lines where the text
        does."""
        drawn, order = Text(overflow="fold"), self.order
        for first, token, count in self.equal_neighbours(range(len(order.tokens)), until):
            if final and first == order.end and order.ended_by:
                drawn.append(f"⟦{order.ended_by}⟧", "bold")
            if first in order.borders:
                drawn.append(BORDER, DIM)
            drawn.append_text(self.token(token, count, until, outside=first >= order.end))
            if final and "\n" in token.text and token.born is not None:
                drawn.append("\n")
        if final and order.end == len(order.tokens) and order.ended_by:
            drawn.append(f"⟦{order.ended_by}⟧", "bold")
        return drawn

    def token(self, token: CanvasToken, count: int, until: int, outside: bool) -> Text:
        """Return `count` equal tokens as drawn after forward `until`; `outside`: after the end of
        the text."""
        if token.born is None or token.born > until:
            return Text(MASK * count, DIM)
        fresh = "bold underline" if token.born == until else ""
        style = Style.parse(DIM) if outside else self.styles[token.born] + Style.parse(fresh)
        drawn = Text(printable(token.text) + times(count), style)
        if not self.colours:
            drawn.append(str(token.born).translate(SUBSCRIPT))
        return drawn

    def equal_neighbours(
        self, positions: Sequence[int], until: int
    ) -> Iterator[tuple[int, CanvasToken, int]]:
        """Yield (first position, token, count) of neighbours that look alike; short runs one by
        one."""

        def alike(item: tuple[int, int]) -> tuple:
            index, position = item
            token = self.order.tokens[position]
            block = bisect_right(self.order.borders, position)
            hidden = token.born is None or token.born > until
            shown = None if hidden else (token.id, token.born)
            return position - index, block, position >= self.order.end, shown

        for _, group in groupby(enumerate(positions), key=alike):
            places = [position for _, position in group]
            first = self.order.tokens[places[0]]
            if len(places) >= LONG_RUN:
                yield places[0], first, len(places)
            else:
                yield from ((place, self.order.tokens[place], 1) for place in places)

    def forwards(self) -> Table:
        """Return a table with one line per forward."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("", "kind", "branches", "fed", "cached", "ms", "filled"):
            table.add_column(name, justify="left" if name in ("kind", "branches") else "right")
        table.add_column("committed", overflow="fold")
        for index, step in enumerate(self.order.steps):
            table.add_row(
                Text(f"{index}", self.styles[index]),
                step.kind,
                marks(step),
                str(step.fed),
                str(step.cached),
                f"{step.ms:.1f}" if step.ms else "–",
                f"{step.filled:.0%}",
                self.committed(index, step),
            )
        return table

    def committed(self, index: int, step: ForwardStep) -> Text:
        """Return the tokens that a forward committed, with positions; forced ones marked, or
        counted."""
        drawn, all_forced = Text(overflow="fold"), step.forced == len(step.committed)
        for first, token, count in self.equal_neighbours(step.committed, until=index):
            where = f"{first}" if count == 1 else f"{first}–{first + count - 1}"
            drawn.append(f"{where}:", DIM)
            outside = first >= self.order.end
            style = Style.parse(DIM) if outside else self.styles[index]
            drawn.append(printable(token.text).replace(" ", SPACE) + times(count), style)
            drawn.append(FORCED + " " if all_forced else " ")
        if step.forced and not all_forced:
            drawn.append(f"({step.forced}{FORCED})")
        for mark, places in ((OVERWRITTEN, step.overwritten), (REMASKED, step.remasked)):
            drawn.append(mark + ",".join(map(str, places)) + " " if places else "")
        if step.inserted:
            drawn.append("{2}{1}:{0} ".format(*step.inserted, INSERTED))
        return drawn if drawn else Text("none", DIM)

    def legend(self) -> Text:
        """Return the legend of colours and marks; marks that do not occur in this sample are left
        out."""
        order, last = self.order, len(self.order.steps) - 1
        drawn = Text("early → late: " if self.colours else "small number: forward")
        if self.colours and self.styles:
            for index in sorted({i * last // (SWATCHES - 1) for i in range(SWATCHES)}):
                drawn.append(f" {index} ", self.styles[index])
        several = any(step.branches > 1 for step in order.steps)
        marks_used = {
            f"{MASK} still masked": any(token.born is None for token in order.tokens),
            f"{BORDER} block border": bool(order.borders),
            "⟦…⟧ end of the text": bool(order.ended_by),
            f"{FORCED} committed by the stall rule, (n{FORCED}): n of them": any(
                step.forced for step in order.steps
            ),
            f"{OVERWRITTEN} positions overwritten": any(step.overwritten for step in order.steps),
            f"{REMASKED} positions masked again": any(step.remasked for step in order.steps),
            f"{INSERTED}n:p n positions inserted in front of p": any(
                step.inserted for step in order.steps
            ),
            f"{LOOKAHEAD[0]} lookahead, {BASE[0]} base; filled: the branch continued": several,
            f"{LOOKAHEAD[1]} one of its tokens was tried before the forward": any(
                step.lookahead_won for step in order.steps
            ),
        }
        for note, occurs in marks_used.items():
            drawn.append(f"\n{note}" if occurs else "")
        return drawn


def marks(step: ForwardStep) -> str:
    """Return one mark per branch in order of creation, the base last; the continued one is
    filled."""
    signs = [LOOKAHEAD] * (step.branches - 1) + [BASE]
    return "".join(sign[index == step.winner] for index, sign in enumerate(signs))


def times(count: int) -> str:
    """Return how often a token is repeated; empty for once."""
    return f"×{count}" if count > 1 else ""
