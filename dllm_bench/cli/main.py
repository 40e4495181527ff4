"""The command line `dllm-bench`: its commands, and how mistakes are reported.

`commands.yaml` has their names and one-line helps. The module of a command is imported once that
command is chosen, so `dllm-bench --help` is immediate. A user's mistake is printed as a one-line
message, with exit code 2.

Each command is a module of this package with `add_arguments(parser)` and `run(arguments)`, which
returns the exit code; several commands of one module, such as those of a group (`train drafter`),
are its `KINDS`. The arguments of the commands in `UNPARSED` are read by the library behind them:
their `run` takes the words of the command line. `--config-dir DIR` goes with every command: it
names a folder of further configuration files.
"""

from __future__ import annotations

import errno
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import clean_warnings, show, show_error
from dllm_bench.paths import CONFIG_DIR, options, read_yaml
from dllm_bench.paths import GROUPS as CHOICES

DESCRIPTION = "Decoding methods for diffusion language models, measured in one way."
COMMANDS: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("commands.yaml"))
UNPARSED = ("run", "lm-eval")  # Hydra and lm-eval read these arguments
MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
ESTIMATE = "--estimate"
AS_SETTINGS = {  # flags of `run` -> the setting; without `=`, the value follows the flag
    "--results": "paths.results",
    "--retry-errors": "retry_errors=true",
    "--max-judge-errors": "max_judge_errors",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    clean_warnings()
    try:
        arguments = without_config_dir(arguments)
        if "_ARGCOMPLETE" in os.environ:  # the shell asks for the words that fit
            return int(command_named("completion").complete())
        if arguments and arguments[0] in UNPARSED:
            if arguments[0] == "run" and {"-h", "--help"} & set(arguments):
                show("\n".join([COMMANDS["run"]["text"], *choices_lines()]))
                return 0
            return int(command_named(arguments[0]).run(arguments[1:]))
        parsed = parse(arguments)
        return int(command_named(parsed.command).run(parsed))
    except DllmBenchError as error:
        show_error(f"dllm-bench: {error}")
        return 2
    except KeyboardInterrupt:
        show_error("\ndllm-bench: stopped; run the same command again to continue.")
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" ({error.filename})" if error.filename else ""
        show_error(
            f"dllm-bench: no space is left to write{where}. What was finished is stored; free some "
            "space, or name another folder with --results, and run the same command again."
        )
        return 2


def choices_lines() -> Iterator[str]:
    """Yield one line of the help of `run` per configuration group."""
    for group in CHOICES:
        yield f"  {group + '=':17}{' · '.join(options(group))}"
    yield f"  {'+experiment=':17}{' · '.join(options('experiment'))}"


def without_config_dir(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without `--config-dir DIR`; apply that option to this process and its
    children."""
    rest, words = [], iter(arguments)
    for word in words:
        flag, given, folder = word.partition("=")
        if flag != "--config-dir":
            rest.append(word)
            continue
        folder = folder if given else next(words, "")
        if not Path(folder or os.devnull).is_dir():
            raise DllmBenchError(
                f"--config-dir {folder} is not a folder; name one that holds yaml files as conf/ "
                "does, for example DIR/decoder/mine.yaml."
            )
        os.environ[CONFIG_DIR] = os.path.abspath(folder)
    return rest


def parse(arguments: Sequence[str]) -> Namespace:
    """Return the parsed arguments, with the command's name as `command`; exits on --help, which is
    also printed if no name is given, and on mistakes."""
    _, parser, rest = parsers(arguments)
    if parser.get_default("command") is None:
        parser.parse_args(rest or ["--help"])
    return parser.parse_intermixed_args(rest)


def parsers(words: Sequence[str]) -> tuple[ArgumentParser, ArgumentParser, Sequence[str]]:
    """Return the parser of all names, the parser of those that begin `words`, and the other words.

    Only the command that is named has its arguments, because importing the others takes time.
    """
    top = parser = ArgumentParser("dllm-bench", description=DESCRIPTION)
    top.add_argument("--config-dir", metavar="DIR", help="folder of further yaml files, as conf/")
    top.add_argument("--version", action="version", version=f"dllm-bench {__version__}")
    group: Mapping[str, Any] = {"kinds": {name: one["help"] for name, one in COMMANDS.items()}}
    names = list[str]()
    while kinds := group.get("kinds"):
        listed = parser.add_subparsers(metavar=group.get("metavar", "COMMAND"), required=True)
        for name, text in kinds.items():
            listed.add_parser(name, help=text, description=text)
        rest = words[len(names) :]
        if not rest or rest[0] not in kinds:
            return top, parser, rest
        parser, group = listed.choices[rest[0]], {} if names else COMMANDS[rest[0]]
        names.append(rest[0])
    command = " ".join(names)
    parser.set_defaults(command=command)
    if command not in UNPARSED:
        command_named(command).add_arguments(parser)
    return top, parser, words[len(names) :]


def command_named(command: str) -> Any:
    """Import the module of a command; if it has several, return the command's entry in `KINDS`."""
    name, _, kind = command.partition(" ")
    module = import_module(f"dllm_bench.cli.{COMMANDS[name].get('module', name)}")
    return getattr(module, "KINDS", {}).get(kind or name, module)
