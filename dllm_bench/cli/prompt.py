"""`dllm-bench prompt`: show the prompt of an item as the model receives it, with its special
tokens."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import add_name_argument, compose, print_lines
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.site.texts import requests_of, token_decoder
from dllm_bench.store.groups import Hardware
from dllm_bench.store.inputs import resolve_model
from dllm_bench.store.spec import RunSpec


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of `prompt`."""
    add_name_argument(parser, "benchmark", "a name of conf/benchmark")
    text = "as in `run`: model=NAME (its chat template and tokenizer are used), benchmark.shots=4"
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help=text)
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="item, from 0 (default)")


def run(arguments: Namespace) -> int:
    """Print the prompt, its length in tokens, the number of new tokens and the stop strings."""
    place = arguments.sample
    config = compose([f"benchmark={arguments.benchmark}", *arguments.settings])
    model, hardware = resolve_model(config.model, Hardware({})), Hardware({})
    spec = RunSpec(model, {}, config.benchmark, hardware, limit=place + 1)
    requests = requests_of(spec)
    if not 0 <= place < len(requests):
        raise DllmBenchError(
            f"--sample {place} was asked of benchmark {arguments.benchmark!r}, which has "
            f"{len(requests)} items; count from 0."
        )
    request = requests[place]
    return print_lines(
        [
            *token_decoder(spec.model)(request.prompt_ids).split("\n"),
            "",
            f"{request.id}: {len(request.prompt_ids)} tokens, "
            f"{request.max_new_tokens} new ones, stops at {list(request.stop)}",
        ]
    )
