"""`dllm-bench generate`: print the text for one prompt; `--watch` shows the canvas while it is
filled."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from rich.live import Live
from rich.text import Text

from dllm_bench.cli.common import (
    add_decoder_arguments,
    add_name_argument,
    positive_int,
    print_lines,
)
from dllm_bench.cli.show_sample import DIM, MASK, DecodingOrderPainter, terminal
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import show_error
from dllm_bench.site.format import number, printable
from dllm_bench.store.record import SHOWN_METRICS

if TYPE_CHECKING:
    from dllm_bench.api.generation import Committed, Completion

STDIN = "-"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `generate`."""
    add_name_argument(parser, "model", "a name, a checkpoint folder or a hub id")
    add_decoder_arguments(parser, "prompt")
    parser.add_argument("--chat", action="store_true", help="use the prompt as a chat message")
    parser.add_argument("--watch", action="store_true", help="show the canvas while it is filled")
    parser.add_argument(
        "--max-new-tokens",
        type=positive_int,
        metavar="N",
        help="after the prompt (default: 128); not for a prompt with masks, which are filled",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of decoders that sample")


def run(arguments: Namespace) -> int:
    """Print the text, and its numbers of tokens and forwards on stderr."""
    text = sys.stdin.read() if arguments.prompt == STDIN else arguments.prompt
    if not text.strip():
        raise DllmBenchError("The prompt is empty; give a text, or - and a text on standard input.")
    prompt: Any = [{"role": "user", "content": text}] if arguments.chat else text
    from dllm_bench.api.compose import as_override, compose, compose_decoder

    # torch takes seconds to import: only after the names were checked
    compose([as_override("model", arguments.model)])
    compose_decoder(arguments.decoder, arguments.settings)
    from dllm_bench.api.generation import composed_decoder, generate

    chosen = composed_decoder(arguments.decoder, arguments.settings)
    options = {"max_new_tokens": arguments.max_new_tokens, "seed": arguments.seed}
    if not arguments.watch:
        (completion,) = generate(arguments.model, [prompt], chosen, **options)
        print_lines(completion.text.split("\n"))
    else:
        console = terminal()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            show = Canvas(live)
            (completion,) = generate(arguments.model, [prompt], chosen, **options, on_commit=show)
        colours = bool(console.color_system) and not console.no_color
        console.print(DecodingOrderPainter(completion.order, colours).text())
    show_error(effort(completion))
    return 0


class Canvas:
    """Redraws the canvas whenever tokens were committed."""

    def __init__(self, live: Live) -> None:
        self.live = live

    def __call__(self, committed: Committed) -> None:
        """Show the text so far, masked positions dimmed."""
        lines = [printable(line) for line in committed.text.split("\n")]
        drawn = Text("\n".join([*lines, f"forward {committed.forward}"]))
        drawn.highlight_regex(f"{MASK}+", DIM)
        self.live.update(drawn, refresh=True)


def effort(completion: Completion) -> str:
    """Return the numbers of tokens and forwards, and the listed metrics."""
    metrics = completion.metrics()
    listed = (f"{name} {number(metrics.get(name))}" for name in SHOWN_METRICS)
    return f"{len(completion.tokens)} tokens, {len(completion.trace)} forwards, {', '.join(listed)}"
