"""A `Filling` in the terminal: the text coloured by forward, one line per forward, the canvas.

Backgrounds run from blue (early) to yellow (late) with rising lightness (matplotlib's viridis),
which any colour vision can tell apart and any terminal can show. Without colours a small
number behind each token says the forward. What a model wrote is escaped character
by character: it cannot steer the terminal. NO_COLOR and FORCE_COLOR are rich's business.
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

from dllm_bench.site.filling import Filling, Step, Token

SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # viridis
LUMINANCE = (0.2126, 0.7152, 0.0722)  # of red, green and blue (sRGB)
EVEN_CONTRAST = 0.18  # luminance on which black and white are equally legible (WCAG 2)
MASK, BORDER, SPACE, FORCED, DIM = "░", "│", "␣", "!", "dim"
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
LOOKAHEAD, BASE = ("○", "●"), ("□", "■")  # lost, went on
LONG_RUN = 4  # this many equal neighbours are written once, with their number
SWATCHES = 16  # forwards in the legend, at most


def lines(filling: Filling, console: Console, canvas: bool = False) -> Iterator[str]:
    """The view as lines of text, with escape codes where `console` has colours."""
    painter = Painter(filling, colours=bool(console.color_system) and not console.no_color)
    with console.capture() as captured:
        console.print(painter.everything(canvas))
    yield from (line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def terminal() -> Console:
    """Standard output, as wide as the terminal; plain when it is not one."""
    return Console(width=shutil.get_terminal_size().columns, highlight=False)


def printable(text: str) -> str:
    """Control, format and other invisible characters as Python writes them."""
    return "".join(repr(character)[1:-1] for character in text)


def heat(forward: int, forwards: int) -> Style:
    """The colour of a forward among all: blue for the first, yellow for the last."""
    place = forward / max(forwards - 1, 1) * (len(SCALE) - 1)
    low = min(int(place), len(SCALE) - 2)
    pairs = zip(SCALE[low], SCALE[low + 1], strict=True)
    ground = [round(a + (b - a) * (place - low)) for a, b in pairs]
    light = sum(w * (value / 255) ** 2.2 for w, value in zip(LUMINANCE, ground, strict=True))
    ink = "#000000" if light > EVEN_CONTRAST else "#ffffff"
    return Style.parse(f"{ink} on rgb({','.join(map(str, ground))})")


class Painter:
    """Draws one filling, in colours or with numbers in their place."""

    def __init__(self, filling: Filling, colours: bool) -> None:
        self.filling = filling
        self.colours = colours
        self.heats = [heat(i, len(filling.steps)) for i in range(len(filling.steps))]

    def everything(self, canvas: bool) -> RenderableType:
        """Headline, text, forwards, legend; then, if asked for, the canvas forward by forward."""
        parts: list[RenderableType] = [self.headline(), Text(), self.text(), Text()]
        parts += [self.forwards(), Text(), self.legend()]
        for index in range(len(self.filling.steps) if canvas else 0):
            share = self.filling.steps[index].filled
            parts += [Text(), Text(f"after forward {index} ({share:.0%})", "bold")]
            parts.append(self.canvas(until=index))
        return Group(*parts)

    def headline(self) -> Text:
        """Which sample, how long, and where it ends for which reasons."""
        one = self.filling
        ends = ", ".join(f"{reason} at {at}" for reason, at in one.ends.items())
        return Text(
            f"sample {printable(one.id)}: {len(one.tokens)} positions in {len(one.steps)} forwards"
            + (f", ends: {ends}" if ends else "")
        )

    def text(self) -> Text:
        """The final canvas, readable, with the end of the text marked."""
        return self.canvas(until=len(self.filling.steps), final=True)

    def canvas(self, until: int, final: bool = False) -> Text:
        """What is decoded after forward `until`; `final` breaks lines where the text does."""
        drawn, one = Text(overflow="fold"), self.filling
        for first, token, count in self.runs(range(len(one.tokens)), until):
            if final and first == one.end and one.ended_by:
                drawn.append(f"⟦{one.ended_by}⟧", "bold")
            if first in one.borders:
                drawn.append(BORDER, DIM)
            drawn.append_text(self.token(token, count, until, outside=first >= one.end))
            if final and "\n" in token.text and token.born is not None:
                drawn.append("\n")
        if final and one.end == len(one.tokens) and one.ended_by:
            drawn.append(f"⟦{one.ended_by}⟧", "bold")
        return drawn

    def token(self, token: Token, count: int, until: int, outside: bool) -> Text:
        """A run of equal tokens as it stands after forward `until`."""
        if token.born is None or token.born > until:
            return Text(MASK * count, DIM)
        fresh = "bold underline" if token.born == until else ""
        style = Style.parse(DIM) if outside else self.heats[token.born] + Style.parse(fresh)
        drawn = Text(printable(token.text) + times(count), style)
        if not self.colours:
            drawn.append(str(token.born).translate(SUBSCRIPT))
        return drawn

    def runs(self, positions: Sequence[int], until: int) -> Iterator[tuple[int, Token, int]]:
        """Neighbours that look alike, as (first position, token, how many); short runs singly."""

        def alike(item: tuple[int, int]) -> tuple:
            order, position = item
            token = self.filling.tokens[position]
            block = bisect_right(self.filling.borders, position)
            hidden = token.born is None or token.born > until
            what = None if hidden else (token.id, token.born)
            return position - order, block, position >= self.filling.end, what

        for _, group in groupby(enumerate(positions), key=alike):
            places = [position for _, position in group]
            first = self.filling.tokens[places[0]]
            if len(places) >= LONG_RUN:
                yield places[0], first, len(places)
            else:
                yield from ((place, self.filling.tokens[place], 1) for place in places)

    def forwards(self) -> Table:
        """One line per forward."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("", "kind", "branches", "fed", "cached", "ms", "filled"):
            table.add_column(name, justify="left" if name in ("kind", "branches") else "right")
        table.add_column("committed", overflow="fold")
        for index, step in enumerate(self.filling.steps):
            table.add_row(
                Text(f"{index}", self.heats[index]),
                step.kind,
                marks(step),
                str(step.fed),
                str(step.cached),
                f"{step.ms:.1f}" if step.ms else "–",
                f"{step.filled:.0%}",
                self.committed(index, step),
            )
        return table

    def committed(self, index: int, step: Step) -> Text:
        """The tokens of one forward with their positions; forced ones marked as far as known."""
        drawn, all_forced = Text(overflow="fold"), step.forced == len(step.committed)
        for first, token, count in self.runs(step.committed, until=index):
            where = f"{first}" if count == 1 else f"{first}–{first + count - 1}"
            drawn.append(f"{where}:", DIM)
            outside = first >= self.filling.end
            style = Style.parse(DIM) if outside else self.heats[index]
            drawn.append(printable(token.text).replace(" ", SPACE) + times(count), style)
            drawn.append(FORCED + " " if all_forced else " ")
        if step.forced and not all_forced:
            drawn.append(f"({step.forced}{FORCED})")
        return drawn if step.committed else Text("none", DIM)

    def legend(self) -> Text:
        """What colours and marks mean; marks that do not occur are left out."""
        one, last = self.filling, len(self.filling.steps) - 1
        drawn = Text("early → late: " if self.colours else "small number: forward")
        if self.colours and self.heats:
            for index in sorted({i * last // (SWATCHES - 1) for i in range(SWATCHES)}):
                drawn.append(f" {index} ", self.heats[index])
        several = any(step.branches > 1 for step in one.steps)
        notes = {
            f"{MASK} still masked": any(token.born is None for token in one.tokens),
            f"{BORDER} block border": bool(one.borders),
            "⟦…⟧ end of the text": bool(one.ended_by),
            f"{FORCED} committed by the stall rule, (n{FORCED}): n of these": any(
                step.forced for step in one.steps
            ),
            f"{LOOKAHEAD[0]} lookahead, {BASE[0]} base; filled: it went on": several,
            f"{LOOKAHEAD[1]} one of the tokens was tried before the forward": any(
                step.lookahead_won for step in one.steps
            ),
        }
        for note, occurs in notes.items():
            drawn.append(f"\n{note}" if occurs else "")
        return drawn


def marks(step: Step) -> str:
    """One mark per branch in creation order, the base last; the filled one went on."""
    signs = [LOOKAHEAD] * (step.branches - 1) + [BASE]
    return "".join(sign[index == step.winner] for index, sign in enumerate(signs))


def times(count: int) -> str:
    """How often a token is repeated; nothing for once."""
    return f"×{count}" if count > 1 else ""
