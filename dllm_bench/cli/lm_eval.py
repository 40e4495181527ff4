"""`dllm-bench lm-eval`: run lm-eval's own command line with this project's models and decoders."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dllm_bench.cli.common import compose
from dllm_bench.store.groups import RunConfig

if TYPE_CHECKING:
    from dllm_bench.runs.prompts import PromptGenerator


def run(arguments: Sequence[str]) -> int:
    """Check the names of this project in the arguments, then pass all arguments to lm-eval."""
    parsed = parse(arguments)
    if getattr(parsed, "model", None) == "dllm_bench":
        composed(parsed.model_args or {})
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


def composed(settings: Mapping[str, Any]) -> RunConfig:
    """Return the configuration for `--model_args NAME=VALUE,…`, as lm-eval reads them."""
    return compose([f"{name}={value}" for name, value in settings.items()])


def build_generator(settings: Mapping[str, Any]) -> PromptGenerator:
    """Return the text generator that lm-eval calls for `--model_args`."""
    config = composed(settings)
    from dllm_bench.runs.prompts import generator  # torch takes seconds to import

    return generator(config)
