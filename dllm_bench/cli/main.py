"""The command line `dllm-bench`: its commands, and how mistakes are reported.

`commands.yaml` has their names, helps and arguments. The module of a command is imported once that
command is chosen and its arguments were parsed, so `--help` is immediate. A user's mistake is
printed as a one-line message, with exit code 2. The arguments of the commands in `UNPARSED` are
read by the library behind them: their functions are given the words of the command line.
`--config-dir DIR` goes with every command: it names a folder of further configuration files.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from dllm_bench import __version__
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import clean_warnings, show, show_error
from dllm_bench.paths import CONFIG_DIR, options, read_yaml
from dllm_bench.paths import GROUPS as CHOICES

DESCRIPTION = "Decoding methods for diffusion language models, measured in one way."
COMMAND_LINE = read_yaml(Path(__file__).with_name("commands.yaml"))
COMMANDS: Mapping[str, Mapping[str, Any]] = COMMAND_LINE["commands"]
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
            return int(imported("completion.complete")())
        if arguments and arguments[0] in UNPARSED:
            if arguments[0] == "run" and {"-h", "--help"} & set(arguments):
                show("\n".join([COMMANDS["run"]["text"], *choices_lines()]))
                return 0
            return int(imported(COMMANDS[arguments[0]]["run"])(arguments[1:]))
        parsed = parse(arguments)
        return int(imported(parsed.function)(parsed))
    except DllmBenchError as error:
        show_error(f"dllm-bench: {error}")
        return 2
    except KeyboardInterrupt:
        show_error("\ndllm-bench: stopped; run the same command again to continue.")
        return 130
    except BrokenPipeError:
        if not is_closed(sys.stdout):
            raise
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


def is_closed(stream: TextIO) -> bool:
    """Return whether the reader of a stream that is a pipe has closed it."""
    watched = select.poll()
    watched.register(stream, 0)
    return bool(watched.poll(0))


def choices_lines() -> Iterator[str]:
    """Yield one line of the help of `run` per configuration group."""
    for group in (*CHOICES, "+experiment"):
        yield f"  {group + '=':17}{' · '.join(options(group.removeprefix('+')))}"


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
    """Return the parsed arguments, with the name of the command's `function`; exits on --help,
    which is also printed if no name is given, and on mistakes."""
    _, parser, rest = parsers(arguments)
    if parser.get_default("function") is None:
        parser.parse_args(rest or ["--help"])
    return parser.parse_intermixed_args(rest)


def parsers(words: Sequence[str]) -> tuple[ArgumentParser, ArgumentParser, Sequence[str]]:
    """Return the parser of all names, the parser of those that begin `words`, and the other words.

    Only the command that is named has its arguments.
    """
    top = parser = ArgumentParser("dllm-bench", description=DESCRIPTION)
    top.add_argument("--config-dir", metavar="DIR", help="folder of further yaml files, as conf/")
    top.add_argument("--version", action="version", version=f"dllm-bench {__version__}")
    command: Mapping[str, Any] = {"kinds": COMMANDS, "metavar": "COMMAND"}
    while kinds := command.get("kinds"):
        listed = parser.add_subparsers(metavar=command["metavar"], required=True)
        for name, entry in kinds.items():
            listed.add_parser(name, help=entry["help"], description=entry["help"])
        if not words or words[0] not in kinds:
            return top, parser, words
        command, parser, words = kinds[words[0]], listed.choices[words[0]], words[1:]
    add_arguments(parser, command)
    return top, parser, words


def add_arguments(parser: ArgumentParser, command: Mapping[str, Any]) -> None:
    """Add the arguments of a command of `commands.yaml`."""
    from dllm_bench.cli.common import TYPES  # imports the store, which `--help` has no use for

    parser.set_defaults(function=command["run"])
    parser.epilog = command.get("epilog")
    for name, own in command.get("arguments", {}).items():
        given = own or COMMAND_LINE["arguments"][name]
        is_flag = isinstance(given, str)
        settings: dict[str, Any] = {"action": "store_true", "help": given} if is_flag else {**given}
        if "type" in settings:
            settings["type"] = TYPES[settings["type"]]
        if isinstance(settings.get("metavar"), list):
            settings["metavar"] = tuple(settings["metavar"])
        parser.add_argument(name, **settings)
    if "lists" in command:
        parser.formatter_class = RawDescriptionHelpFormatter
        parser.epilog = "\n".join(list_lines(command["lists"]))


def list_lines(kind: str) -> Iterator[str]:
    """Yield all tables, figures or claims with their titles."""
    from dllm_bench.tables.load import names_of, title_of

    names = names_of(kind)
    width = max(map(len, names))
    yield f"{kind}s:"
    yield from (f"  {name.ljust(width)}  {title_of(kind, name)}".rstrip() for name in names)


def imported(name: str) -> Any:
    """Return the function `MODULE.FUNCTION` of this package."""
    module, function = name.split(".")
    return getattr(import_module(f"dllm_bench.cli.{module}"), function)
