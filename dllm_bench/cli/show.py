"""`dllm-bench show`, `prompt` and `generate`: show a run's metrics, the order in which a sample was
decoded, the prompt of an item as the model receives it, or the text that is decoded for a prompt.

`DecodingOrderPainter` draws a decoding order in the terminal. The background of a token is the
colour of the forward that committed it (`colours_of_forward`). Without colours a small number after
each token names the forward. Invisible characters in the model's text are written out, so the text
cannot control the terminal. rich obeys NO_COLOR and FORCE_COLOR.
"""

from __future__ import annotations

import shutil
import sys
from argparse import Namespace
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.style import Style
from rich.table import Table
from rich.text import Text

from dllm_bench.cli.common import compose, open_store, print_lines
from dllm_bench.core.benchmark import GradedAnswer
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import console as clean_console
from dllm_bench.core.output import show_error, show_painted
from dllm_bench.runs import progress
from dllm_bench.site import texts
from dllm_bench.site.decoding_order import DecodingOrder, colours_of_forward, decoding_order
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import decoder_of, resolve_model
from dllm_bench.store.record import SHOWN_METRICS, RunRecord, SampleRecord
from dllm_bench.store.spec import RunSpec, flat_settings
from dllm_bench.store.store import RunEntry, read_record, read_samples
from dllm_bench.tables.frame import is_loaded

if TYPE_CHECKING:
    from dllm_bench.api.generation import Committed
    from dllm_bench.site.decoding_order import CanvasToken, ForwardStep

STDIN = "-"
MASK, BORDER, SPACE, FORCED, DIM = "░", "│", "␣", "!", "dim"
SUBSCRIPT = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
OVERWRITTEN, REMASKED, INSERTED = "↻", "⌫", "+"
LOOKAHEAD, BASE = ("○", "●"), ("□", "■")  # branch dropped, branch continued
LONG_RUN = 4  # this many equal neighbours or more are written once, with their count
SWATCHES = 16  # colours in the legend, at most


# --- show ----------------------------------------------------------------------------------------


def show_run(arguments: Namespace) -> int:
    """Print the metrics of a run or the decoding order of one of its samples."""
    entry = open_store(arguments).find(arguments.run)
    record = read_record(entry.path)
    if arguments.sample is None:
        if arguments.json or arguments.canvas:
            raise DllmBenchError(
                "--json and --canvas show one sample, but none was named; add --sample ID."
            )
        return print_lines(summary_lines(record) if record else unfinished_lines(entry))
    samples = read_samples(entry.path)
    order = record.columns["id"] if record else list(samples)
    sample = named_sample(samples, order, arguments.sample, arguments.run)
    source = texts.TextSource(compose)
    decode = str if sample.served else source.decode(entry.spec)
    decoding = decoding_order(sample, decode, entry.spec.decoder)
    if arguments.json:
        return print_lines([decoding.to_json()])
    print_lines(grading_lines(entry, sample, source))
    if sample.served:  # a server does not report its decoding order
        return print_lines(["", sample.text])
    console = terminal()
    show_painted(DecodingOrderPainter(decoding, console).everything(arguments.canvas), console)
    return 0


def grading_lines(entry: RunEntry, sample: SampleRecord, source: texts.TextSource) -> Iterator[str]:
    """Yield prompt, right answer, what was read of the text, and verdict of a sample."""
    one, record = {sample.id: sample}, read_record(entry.path)
    prompt = source.prompts(entry.spec, one).get(sample.id)
    unknown = "not known: benchmark or tokenizer is missing on this machine, or has changed"
    yield from ("prompt:", *(prompt or unknown).split("\n"), "")
    grade = record.grades.get(sample.id) if record else None
    if answer := source.answers(entry.spec, one).get(sample.id):
        yield from named_text("right answer", answer.gold)
        yield from named_text("read from the text", answer.extracted)
        yield from every_grading(answer, grade.metrics if grade else {})
    if grade:
        yield f"verdict: {grade.verdict} ({grade.value})"
    yield ""


def every_grading(answer: GradedAnswer, stored: Mapping[str, float]) -> Iterator[str]:
    """Yield each way of grading the text: its name, its value and what it read, if there are
    several.

    stored: values in the run's record. Programs are only executed for graders in it.
    """
    rows = [
        (f"  {name}", f"{value:g}", texts.snippet(text))
        for name, value in {**answer.metrics, **stored}.items()
        if (text := answer.readings.get(name.rpartition(",")[2])) is not None
    ]
    if len(rows) > 1:
        yield from ("all gradings:", *texts.align(rows))


def named_text(name: str, text: str) -> Iterator[str]:
    """Yield a text after its name; below it if it has several lines."""
    first, *rest = text.split("\n")
    yield from (f"{name}:", first, *rest) if rest else (f"{name}: {first}",)


def summary_lines(record: RunRecord) -> Iterator[str]:
    """Yield what a sealed run measured, and on which machine and commit."""
    environment = record.environment
    yield from progress.summary(record)
    yield f"machine: {record.devices}, {environment.get('threads')} thread(s)"
    for session, one in enumerate(record.environments, 1):
        load = f"{one.get('load')} on {one.get('cores')} cores"
        remark = ", which disturbs timings" if is_loaded(one) else ""
        yield f"load when session {session} began: {load}{remark}"
    yield f"commit: {texts.commit(environment)}"
    yield f"run: {record.identity_hash}"
    yield "settings:"
    yield from texts.align([("", *setting) for setting in flat_settings(record.spec).items()])


def unfinished_lines(entry: RunEntry) -> Iterator[str]:
    """Yield the progress of a run that is not sealed."""
    total = entry.total if entry.total is not None else "?"
    yield f"{entry.spec.short} is {entry.state}: {entry.done} of {total} done"
    if entry.error:
        yield entry.error
    yield "The command that started it continues it."


def named_sample(
    samples: Mapping[str, SampleRecord], order: Sequence[str], name: str, run: str
) -> SampleRecord:
    """Return the sample called `name`, or the one at index `name` of `order`; an error lists some
    names.

    order: sample ids in the benchmark's order, in which the report and W&B's table count them. The
    stored lines of a batched run, or of several processes, are in another order.
    """
    place = int(name) if name.isdecimal() else len(order)
    chosen = order[place] if name not in samples and place < len(order) else name
    if chosen in samples:
        return samples[chosen]
    known = f"the first are: {', '.join(list(samples)[:3])}. A number counts samples from 0."
    absent = "an archive keeps only those of its figures; decode the run again to see its samples."
    advice = known if samples else absent
    raise DllmBenchError(f"Run {run} has no stored sample {name!r} among {len(samples)}; {advice}")


# --- prompt --------------------------------------------------------------------------------------


def show_prompt(arguments: Namespace) -> int:
    """Print the prompt, its length in tokens, the number of new tokens and the stop strings."""
    place = arguments.sample
    config = compose([f"benchmark={arguments.benchmark}", *arguments.settings])
    model, hardware = resolve_model(config.model, Hardware({})), Hardware({})
    spec = RunSpec(model, {}, config.benchmark, hardware, limit=max(0, place + 1) or None)
    requests = texts.requests_of(spec)
    if not 0 <= place < len(requests):
        raise DllmBenchError(
            f"--sample {place} was asked of benchmark {arguments.benchmark!r}, which has "
            f"{len(requests)} items; count from 0."
        )
    request = requests[place]
    print_lines(texts.token_decoder(spec.model)(request.prompt_ids).split("\n"))
    size = f"{len(request.prompt_ids)} tokens, {request.max_new_tokens} new ones"
    return print_lines(["", f"{request.id}: {size}, stops at {list(request.stop)}"])


# --- generate ------------------------------------------------------------------------------------


def show_generated(arguments: Namespace) -> int:
    """Print the text, and its numbers of tokens and forwards on stderr."""
    text = sys.stdin.read() if arguments.prompt == STDIN else arguments.prompt
    if not text.strip():
        raise DllmBenchError("The prompt is empty; give a text, or - and a text on standard input.")
    prompt: Any = [{"role": "user", "content": text}] if arguments.chat else text
    from dllm_bench.api.compose import as_override, compose, compose_decoder

    # torch takes seconds to import: only after the names were checked
    compose([as_override("model", arguments.model)])
    plain = compose_decoder(arguments.decoder, arguments.settings)
    from dllm_bench.api.generation import generate

    chosen = decoder_of(plain)
    options = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed}
    if not arguments.watch:
        (completion,) = generate(arguments.model, [prompt], chosen, **options)
        print_lines(completion.text.split("\n"))
    else:
        console = terminal()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            show = partial(show_canvas, live)
            (completion,) = generate(arguments.model, [prompt], chosen, **options, on_commit=show)
        console.print(DecodingOrderPainter(completion.order, console).text())
    metrics = completion.metrics()
    listed = (f"{name} {texts.number(metrics.get(name))}" for name in SHOWN_METRICS)
    size = f"{len(completion.tokens)} tokens, {len(completion.trace)} forwards"
    show_error(", ".join([size, *listed]))
    return 0


def show_canvas(live: Live, committed: Committed) -> None:
    """Draw the text so far, masked positions dimmed."""
    drawn = Text(f"{texts.printable_lines(committed.text)}\nforward {committed.forward}")
    drawn.highlight_regex(f"{MASK}+", DIM)
    live.update(drawn, refresh=True)


# --- drawing a decoding order --------------------------------------------------------------------


def terminal() -> Console:
    """Return a console for standard output, as wide as the terminal; without colours if it is a
    pipe."""
    return clean_console(width=shutil.get_terminal_size().columns)


def forward_style(forward: int, forwards: int) -> Style:
    """Return the colours of a forward among `forwards` as a rich style."""
    ink, background = colours_of_forward(forward, forwards)
    return Style.parse(f"{ink} on rgb({','.join(map(str, background))})")


class DecodingOrderPainter:
    """Draws one decoding order, with the console's colours or with the numbers of forwards."""

    def __init__(self, order: DecodingOrder, console: Console) -> None:
        self.order = order
        self.colours = bool(console.color_system) and not console.no_color
        self.styles = [forward_style(i, len(order.steps)) for i in range(len(order.steps))]

    def everything(self, canvas: bool) -> RenderableType:
        """Return headline, text, forwards, legend; with `canvas`, also the canvas by forward."""
        parts: list[RenderableType] = [self.headline(), Text(), self.text(), Text()]
        parts += [self.forwards(), Text(), self.legend()]
        for index, step in enumerate(self.order.steps if canvas else ()):
            parts += [Text(), Text(f"after forward {index} ({step.filled:.0%})", "bold")]
            parts.append(self.canvas(until=index))
        return Group(*parts)

    def headline(self) -> Text:
        """Return the sample's name, its length, and where it ends for which reasons."""
        order = self.order
        ends = ", ".join(f"{reason} at {at}" for reason, at in order.ends.items())
        size = f"{len(order.tokens)} positions in {len(order.steps)} forwards"
        return Text(
            f"sample {texts.printable(order.id)}: {size}" + (f", ends: {ends}" if ends else "")
        )

    def text(self) -> Text:
        """Return the final canvas, readable, with the end of the text marked and its lines
        broken."""
        return self.canvas(until=len(self.order.steps))

    def canvas(self, until: int) -> Text:
        """Return the canvas after forward `until`; after the last one, see `text`."""
        drawn, order = Text(overflow="fold"), self.order
        final = until == len(order.steps)
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
        drawn = Text(texts.printable(token.text) + times(count), style)
        if not self.colours:
            drawn.append(str(token.born).translate(SUBSCRIPT))
        return drawn

    def equal_neighbours(
        self, positions: Sequence[int], until: int
    ) -> Iterator[tuple[int, CanvasToken, int]]:
        """Yield (first position, token, count) of neighbours that look alike; short runs one by
        one."""

        order = self.order

        def alike(item: tuple[int, int]) -> tuple:
            index, position = item
            token, block = order.tokens[position], bisect_right(order.borders, position)
            shown = None if token.born is None or token.born > until else (token.id, token.born)
            return position - index, block, position >= order.end, shown

        for _, group in groupby(enumerate(positions), key=alike):
            places = [position for _, position in group]
            count = len(places) if len(places) >= LONG_RUN else 1
            yield from ((place, order.tokens[place], count) for place in places[::count])

    def forwards(self) -> Table:
        """Return a table with one line per forward."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name in ("", "kind", "branches", "fed", "cached", "ms", "filled"):
            table.add_column(name, justify="left" if name in ("kind", "branches") else "right")
        table.add_column("committed", overflow="fold")
        for index, step in enumerate(self.order.steps):
            drawn, committed = Text(f"{index}", self.styles[index]), self.committed(index, step)
            ms = f"{step.ms:.1f}" if step.ms else "–"
            numbers = (str(step.fed), str(step.cached), ms, f"{step.filled:.0%}")
            table.add_row(drawn, step.kind, marks(step), *numbers, committed)
        return table

    def committed(self, index: int, step: ForwardStep) -> Text:
        """Return the tokens that a forward committed, with positions; forced ones marked, or
        counted."""
        drawn, all_forced = Text(overflow="fold"), step.forced == len(step.committed)
        for first, token, count in self.equal_neighbours(step.committed, until=index):
            where = f"{first}" if count == 1 else f"{first}–{first + count - 1}"
            drawn.append(f"{where}:", DIM)
            style = self.styles[index] if first < self.order.end else Style.parse(DIM)
            drawn.append(texts.printable(token.text).replace(" ", SPACE) + times(count), style)
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
        notes = {
            f"{MASK} still masked": any(token.born is None for token in order.tokens),
            f"{BORDER} block border": bool(order.borders),
            "⟦…⟧ end of the text": bool(order.ended_by),
            **{note: any(map(occurs, order.steps)) for occurs, note in NOTES.items()},
        }
        return drawn.append("".join(f"\n{note}" for note, occurs in notes.items() if occurs))


NOTES: Mapping[Callable[[ForwardStep], object], str] = {
    attrgetter("forced"): f"{FORCED} committed by the stall rule, (n{FORCED}): n of them",
    attrgetter("overwritten"): f"{OVERWRITTEN} positions overwritten",
    attrgetter("remasked"): f"{REMASKED} positions masked again",
    attrgetter("inserted"): f"{INSERTED}n:p n positions inserted in front of p",
    lambda step: step.branches > 1: (
        f"{LOOKAHEAD[0]} lookahead, {BASE[0]} base; filled: the branch continued"
    ),
    attrgetter("lookahead_won"): f"{LOOKAHEAD[1]} one of its tokens was tried before the forward",
}
"""What a forward did -> the note on its mark."""


def marks(step: ForwardStep) -> str:
    """Return one mark per branch in order of creation, the base last; the continued one is
    filled."""
    signs = [LOOKAHEAD] * (step.branches - 1) + [BASE]
    return "".join(sign[index == step.winner] for index, sign in enumerate(signs))


def times(count: int) -> str:
    """Return how often a token is repeated; empty for once."""
    return f"×{count}" if count > 1 else ""
