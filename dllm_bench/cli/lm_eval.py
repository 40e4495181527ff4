"""`dllm-bench lm-eval`: lm-eval's own command line, with this project's models and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import compose

if TYPE_CHECKING:
    from dllm_bench.runs.prompts import PromptGenerator


def run(arguments: Sequence[str]) -> int:
    """Pass the arguments to lm-eval; mistakes in the names of ours are found before."""
    if given(arguments, "--model", "-M")[:1] == ["dllm_bench"]:
        check_names(given(arguments, "--model_args", "-a"))
    # lm-eval takes a second to import, and its arguments alone a part of that
    from dllm_bench.benchmarks.lm_eval_arguments import parse

    parsed = parse(arguments)
    from dllm_bench.benchmarks.lm_eval_model import execute

    execute(parsed, build_generator)
    return 0


def given(arguments: Sequence[str], *flags: str) -> list[str]:
    """The values after one of the flags, as lm-eval reads them: several words, or after a `=`."""
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
    """Compose the settings of `--model_args NAME=VALUE,…`, so that a wrong one is told at once."""
    settings = [one for text in model_args for one in text.split(",")]
    wrong = [one for one in settings if "=" not in one]
    if not wrong and settings:  # otherwise lm-eval reads them: JSON, or a list in brackets
        compose(settings)


def build_generator(settings: Mapping[str, Any]) -> PromptGenerator:
    """The text generator that lm-eval calls for `--model_args NAME=VALUE,…`."""
    config = compose([f"{name}={value}" for name, value in settings.items()])
    from dllm_bench.runs.prompts import generator  # torch takes seconds to import

    return generator(config)
