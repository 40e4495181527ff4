"""`dllm-bench lm-eval`: lm-eval's own command line, with this project's models and decoders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.api.compose import compose
from dllm_bench.benchmarks.lm_eval_model import command_line

if TYPE_CHECKING:
    from dllm_bench.runs.prompts import PromptGenerator


def run(arguments: Sequence[str]) -> int:
    """Pass the arguments to lm-eval."""
    command_line(arguments, build_generator)
    return 0


def build_generator(settings: Mapping[str, Any]) -> PromptGenerator:
    """The text generator that lm-eval calls for `--model_args NAME=VALUE,…`."""
    config = compose([f"{name}={value}" for name, value in settings.items()])
    from dllm_bench.runs.prompts import generator  # torch takes seconds to import

    return generator(config)
