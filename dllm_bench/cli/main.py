"""The command line `dllm-bench`: its commands, and how mistakes are reported.

This module contains only names, one-line helps and the help of `run`, which Hydra would take long
to print. The module of a command is imported once that command is chosen, so `dllm-bench --help` is
immediate. A user's mistake is printed as a one-line message, with exit code 2.

Each command is a module of this package with `add_arguments(parser)` and `run(arguments)`, which
returns the exit code; several commands of one module, such as those of a group (`train drafter`),
are its `KINDS`. The arguments of the commands in `UNPARSED` are read by the library behind them:
their `run` takes the words of the command line. `--config-dir DIR` goes with every command: it
names a folder of further configuration files.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from dllm_bench import __version__
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.terminal import clean_warnings, show, show_error
from dllm_bench.paths import CONFIG_DIR, options
from dllm_bench.paths import GROUPS as CHOICES

DESCRIPTION = "Decoding methods for diffusion language models, measured in one way."
COMMANDS = {  # in the order of `--help`
    "run": "run a decoder on a benchmark (with overrides; -m: several runs)",
    "generate": "generate text for one prompt; --watch shows it being filled",
    "prompt": "show the prompt of a benchmark's item as the model receives it",
    "table": "show a paper's table: measured, reported and missing numbers",
    "figure": "draw a paper's figure: measured, reported and missing points",
    "claims": "judge published claims: verdict, effect with interval; or what is missing",
    "report": "build a static site of tables, figures and runs with a trace viewer",
    "status": "list runs, tables and figures",
    "show": "show a run's metrics, or the order in which one sample was decoded",
    "compare": "compare runs in pairs on the samples they share",
    "rescore": "grade the stored texts of a run again",
    "lm-eval": "run lm-eval's own command line with --model dllm_bench",
    "export": "export runs for pandas, datasets, lm-eval, the hub; or a decoder for transformers",
    "simulate": "simulate many requests on one device from runs: tokens/s per user and device",
    "doctor": "report what this machine can run and what is missing",
    "prefetch": "download models, with a list of hashes",
    "import": "turn a model file of another format (GGUF) into a checkpoint folder",
    "completion": "print the line that makes your shell complete commands and choices",
    "train": "train a drafter, filter or adapter; measure step times; fit temperatures",
    "runs": "check the files of all runs, remove runs, unlock the run of a process that is gone",
}
TRAINING = {
    "filter": "train a filter for Learn2PD decoding",
    "sps": "measure steps per second by tokens per step, for the verification scheduler",
    "temperatures": "fit the temperatures of a confidence head on the samples of sealed runs",
    "drafter": "train a drafter for a target: DFlash, DSpark, EAGLE-3 (a second call continues)",
    "adapter": "train a LoRA adapter for block diffusion (a second call continues)",
}
IMPORTS = {"gguf": "a GGUF file of a Llama, Qwen2 or Qwen3 model, compared with transformers"}
STORED_RUNS = {
    "verify": "read every file of every run and name what is damaged",
    "rm": "remove runs for good: their samples, record and folder",
    "unlock": "unlock the folder of a run whose process is gone",
}
GROUPS = {
    "train": ("KIND", TRAINING),
    "runs": ("ACTION", STORED_RUNS),
    "import": ("FORMAT", IMPORTS),
}
MODULES = {  # of commands and groups that share a module, or whose name Python reserves
    **dict.fromkeys(("figure", "claims"), "table"),
    **dict.fromkeys(("compare", "rescore"), "runs"),
    **dict.fromkeys(("prefetch", "import"), "checkpoints"),
    "prompt": "show",
}
UNPARSED = ("run", "lm-eval")  # Hydra and lm-eval read these arguments
MULTIRUN = ("-m", "--multirun")
FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
ESTIMATE = "--estimate"
AS_SETTINGS = {  # flags of `run` -> the setting; without `=`, the value follows the flag
    "--results": "paths.results",
    "--retry-errors": "retry_errors=true",
    "--max-judge-errors": "max_judge_errors",
}
RUN_HELP = """\
usage: dllm-bench run [-m] [--cfg job] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Run one decoder on one benchmark with one model. A finished run is not repeated, an interrupted one
continues where it stopped.

  dllm-bench run model=tiny-llada benchmark=minigsm decoder=fast_dllm limit=50
  dllm-bench run -m decoder=fast_dllm,credit decoder.select.tau=0.7,0.9      every combination
  dllm-bench run decoder=fast_dllm decoder.select.tau=0.7
  dllm-bench run decoder=dspark decoder@baseline=ar_speculative
                                    decode each request with both: speed-up, equal texts or not
  dllm-bench run +experiment=first_run                       settings of conf/experiment, or yours
  dllm-bench run --cfg job decoder=lopa                      print the settings, run nothing
  dllm-bench run --estimate model=llada-instruct             time, forwards and memory, run nothing
  dllm-bench run benchmark=minicode --retry-errors           grade again what could not be graded
  dllm-bench run benchmark=minicode --max-judge-errors 3     seal if at most 3 cannot be graded
  dllm-bench run decoder=fast_dllm --results DIR             store it there (default: ./results)

settings: seed, limit, batch (requests in one forward), measure_kl (the error of a cache), and
everything `--cfg job` prints
choices:"""


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
                show("\n".join([RUN_HELP, *choices_lines()]))
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


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed arguments, with the command's name as `command`; exits on --help and
    mistakes."""
    command = command_of(arguments)
    group, _, kind = command.partition(" ")
    text = GROUPS[group][1][kind] if kind else COMMANDS[command]
    parser = argparse.ArgumentParser(prog=f"dllm-bench {command}", description=text)
    command_named(command).add_arguments(parser)
    rest = arguments[len(command.split()) :]
    return parser.parse_intermixed_args(rest, argparse.Namespace(command=command))


def command_of(arguments: Sequence[str]) -> str:
    """Return the command, with its group if it has one; exits on --help, which is also printed if
    no name is given, and on unknown names."""
    if not arguments or arguments[0] not in COMMANDS:
        top = parser_of_names("dllm-bench", DESCRIPTION, COMMANDS, "COMMAND")
        top.add_argument(
            "--config-dir", metavar="DIR", help="folder of further yaml files, as conf/"
        )
        top.add_argument("--version", action="version", version=f"dllm-bench {__version__}")
        top.parse_args(arguments or ["--help"])
    group = arguments[0]
    if group not in GROUPS:
        return group
    metavar, names = GROUPS[group]
    if len(arguments) < 2 or arguments[1] not in names:
        parser = parser_of_names(f"dllm-bench {group}", COMMANDS[group], names, metavar)
        parser.parse_args(arguments[1:] or ["--help"])
    return f"{group} {arguments[1]}"


def parser_of_names(
    program: str, description: str, names: Mapping[str, str], metavar: str
) -> argparse.ArgumentParser:
    """Return a parser that only knows names and their one-line helps."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    listed = parser.add_subparsers(metavar=metavar, required=True)
    for name, text in names.items():
        listed.add_parser(name, help=text)
    return parser


def command_named(command: str) -> Any:
    """Import the module of a command; if it has several, return the command's entry in `KINDS`."""
    name, _, kind = command.partition(" ")
    module = import_module(f"dllm_bench.cli.{MODULES.get(name, name.replace('-', '_'))}")
    return getattr(module, "KINDS", {}).get(kind or name, module)
