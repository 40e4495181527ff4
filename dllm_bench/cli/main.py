"""The command line `dllm-bench`: which commands there are, and how a mistake ends one.

This module knows names and one-line helps only. The module of the chosen command is imported when
the command is known, so `dllm-bench --help` is immediate. A mistake of the user is printed as one
sentence, with exit code 2.

Each command is a module of this package with `add_arguments(parser)` and `run(arguments)`, which
returns the exit code. The arguments of the commands in `UNPARSED` are read by the library behind
them: their `run` takes the words of the command line.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from dllm_bench import __version__
from dllm_bench.core.errors import DllmBenchError

COMMANDS = {  # in the order of `--help`
    "run": "run a decoder on a benchmark (overrides, -m for several)",
    "table": "a paper's table: measured, reported, missing",
    "figure": "a paper's figure, drawn from runs: measured, reported, missing",
    "report": "a static site of tables, figures and runs, with a trace viewer; needs no server",
    "status": "list of runs, tables and figures",
    "show": "a run's numbers, or the order in which one sample was decoded",
    "compare": "paired difference of two runs",
    "rescore": "grade the stored texts of a run again",
    "lm-eval": "lm-eval's own command line with --model dllm_bench",
    "simulate": "many requests on one device, simulated from runs: tokens/s per user and device",
    "doctor": "what this machine can run, what is missing",
    "prefetch": "download models, with a list of hashes",
    "train": "train a drafter or a filter; measure step times, fit temperatures",
}
UNPARSED = ("run", "lm-eval")  # Hydra and lm-eval read these arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in UNPARSED:
            return int(module_of(arguments[0]).run(arguments[1:]))
        parsed = parse(arguments)
        return int(module_of(parsed.command).run(parsed))
    except DllmBenchError as error:
        print(f"dllm-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndllm-bench: stopped; run the same command again to continue.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments, with the command's name as `command`; exits on --help and mistakes."""
    if not arguments or arguments[0] not in COMMANDS:
        top_parser().parse_args(arguments)
    command, *rest = arguments
    parser = argparse.ArgumentParser(prog=f"dllm-bench {command}", description=COMMANDS[command])
    module_of(command).add_arguments(parser)
    return parser.parse_args(rest, argparse.Namespace(command=command))


def module_of(command: str) -> Any:
    """The module of a command, imported now."""
    return import_module(f"dllm_bench.cli.{command.replace('-', '_')}")


def top_parser() -> argparse.ArgumentParser:
    """The parser of what comes before a command: `--help`, `--version`, an unknown command."""
    top = argparse.ArgumentParser(
        prog="dllm-bench",
        description="Decoding methods for diffusion language models, measured alike.",
    )
    top.add_argument("--version", action="version", version=f"dllm-bench {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for name, text in COMMANDS.items():
        commands.add_parser(name, help=text)
    return top
