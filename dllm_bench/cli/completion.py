"""`dllm-bench completion`: the line that makes bash (or zsh) complete commands and choices.

eval "$(dllm-bench completion)"  # in ~/.bashrc; zsh: after autoload -U bashcompinit; bashcompinit
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from dllm_bench.cli.common import print_lines
from dllm_bench.cli.main import COMMANDS, GROUPS
from dllm_bench.paths import options

CHOICES = ("model", "decoder", "benchmark", "hardware", "logger", "+experiment")


def add_arguments(parser: ArgumentParser) -> None:
    """`completion` has no options."""


def run(arguments: Namespace) -> int:
    """Print the line; it holds the names that there are now, those of plug-ins included."""
    words = [*COMMANDS, *(name for _, names in GROUPS.values() for name in names)]
    for group in CHOICES:
        names = options(group.removeprefix("+"))
        words += [f"{group}={name}" for name in names]
    words += options("model") + options("decoder") + options("benchmark")
    listed = " ".join(dict.fromkeys(words))
    # bash would complete what follows a = as a word of its own
    return print_lines(
        ["COMP_WORDBREAKS=${COMP_WORDBREAKS//=}", f"complete -o default -W '{listed}' dllm-bench"]
    )
