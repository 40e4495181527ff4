"""`dllm-bench lm-eval`: run lm-eval's own command line with this project's models and decoders."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import compose

if TYPE_CHECKING:
    from dllm_bench.runs.prompts import PromptGenerator


def run(arguments: Sequence[str]) -> int:
    """Check the names of this project in the arguments, then pass all arguments to lm-eval."""
    if given(arguments, "--model", "-M")[:1] == ["dllm_bench"]:
        check_names(given(arguments, "--model_args", "-a"))
    parsed = parse(arguments)
    from dllm_bench.benchmarks.lm_eval_model import execute

    execute(parsed, build_generator)
    return 0


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the arguments as lm-eval parses them; `func` runs what they ask for. Exits on --help
    and on mistakes.
    """
    # importing lm-eval takes a second, importing its arguments alone less
    from lm_eval._cli import HarnessCLI

    argv = sys.argv
    sys.argv = ["dllm-bench lm-eval", *arguments]
    try:
        return HarnessCLI().parse_args()
    finally:
        sys.argv = argv


def given(arguments: Sequence[str], *flags: str) -> list[str]:
    """Return the values of one of the flags as lm-eval reads them: the words after it, or after a
    `=`."""
    values: list[str] = []
    reading = False
    for word in arguments:
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            reading = flag in flags
            values += [value] if reading and equals else []
        elif reading:
            values.append(word)
    return values


def check_names(model_args: Sequence[str]) -> None:
    """Compose the settings of `--model_args NAME=VALUE,…`, so that a wrong one is reported at
    once."""
    settings = [one for text in model_args for one in text.split(",")]
    wrong = [one for one in settings if "=" not in one]
    if not wrong and settings:  # JSON and lists in brackets are left to lm-eval
        compose(settings)


def build_generator(settings: Mapping[str, Any]) -> PromptGenerator:
    """Return the text generator that lm-eval calls for `--model_args NAME=VALUE,…`."""
    config = compose([f"{name}={value}" for name, value in settings.items()])
    from dllm_bench.runs.prompts import generator  # torch takes seconds to import

    return generator(config)
