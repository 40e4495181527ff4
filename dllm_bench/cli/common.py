"""What the commands share: the results directory, checked option values, printed lines."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dllm_bench.core.terminal import show, show_error
from dllm_bench.paths import GROUPS
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import Paths, RunConfig
from dllm_bench.store.settings import default_paths
from dllm_bench.store.store import Store

Plain = dict[str, Any]
Line = tuple[str, str, str]
"""Of the doctor's report: mark, topic, text."""
OK, OPTIONAL_MISSING, REQUIRED_MISSING = "ok", "--", "no"


class Command(NamedTuple):
    """A command of a group; the module of a single one has functions of these names."""

    add_arguments: Callable[[ArgumentParser], None]
    """Adds its options."""
    run: Callable[[Namespace], int]
    """Runs it and returns the exit code."""


# --- options -------------------------------------------------------------------------------------


def add_results_option(parser: ArgumentParser) -> None:
    """Add `--results`, which nearly all commands have."""
    parser.add_argument("--results", metavar="DIR", help="results directory (default: ./results)")


def add_decoder_arguments(parser: ArgumentParser, *more: str) -> None:
    """Add the positional DECODER, those named in `more`, and settings of the decoder."""
    add_name_argument(parser, "decoder", "a name of conf/decoder")
    for name in more:
        parser.add_argument(name, metavar=name.upper(), help="text, or - for standard input")
    text = "of the decoder, as in `run`: decoder.select.tau=0.8, decoder/score=credit"
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", help=text)


def add_name_argument(parser: ArgumentParser, group: str, text: str) -> None:
    """Add a positional argument that is a name of a group of settings."""
    parser.add_argument(group, metavar=group.upper(), type=choice_of(group), help=text)


def choice_of(group: str) -> Callable[[str], str]:
    """Return what reads a name of a group, which may be given as NAME or GROUP=NAME."""

    def name_in(word: str) -> str:
        key, is_given, name = word.partition("=")
        if not is_given or re.split(r"[./@]", key.lstrip("+~"))[0] not in GROUPS:
            return word  # a folder's name may have an equals sign too
        if key != group:
            raise ArgumentTypeError(
                f"{word!r} is a setting, and the name of a {group} belongs here; give that first, "
                "settings after it"
            )
        return name

    return name_in


def positive_int(text: str) -> int:
    """The whole number above zero that an option was given."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def positive_ints(text: str) -> tuple[int, ...]:
    """Whole numbers above zero, separated by commas."""
    return tuple(positive_int(part) for part in text.split(","))


def positive_float(text: str) -> float:
    """The number above zero that an option was given."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a number above zero")
    return number


def positive_floats(text: str) -> tuple[float, ...]:
    """Numbers above zero, separated by commas."""
    return tuple(positive_float(part) for part in text.split(","))


# --- configuration and results -------------------------------------------------------------------


def compose(overrides: Sequence[str]) -> RunConfig:
    """The run configuration for `overrides`, see `api.compose`."""
    # Hydra takes a quarter of a second to import, and most commands find all settings in a cache.
    from dllm_bench.api.compose import compose as compose_with_hydra

    return RunConfig(compose_with_hydra(overrides))


def as_model(word: str) -> str:
    """The override for a model that a command was given as NAME, model=NAME or model.path=DIR."""
    return word if word.startswith(("model=", "model.")) else f"model={word}"


def configured_paths(arguments: Namespace) -> Paths:
    """The `paths` group of the configuration; `--results` replaces its results directory."""
    paths = default_paths() or compose([]).paths
    return Paths({**paths, **({"results": arguments.results} if arguments.results else {})})


def training_folder(arguments: Namespace) -> Path:
    """Where the results of `train` go unless --out names another place."""
    return results_directory(configured_paths(arguments).results) / "training"


def open_store(arguments: Namespace) -> Store:
    """The store in the results directory."""
    return Store(results_directory(configured_paths(arguments).results) / "runs")


# --- output --------------------------------------------------------------------------------------


def print_lines(lines: Iterable[str]) -> int:
    """Print lines to stdout; returns the exit code of success."""
    for line in lines:
        show(line)
    return 0


def print_failures(sentences: Sequence[str]) -> int:
    """Print what failed to stderr; returns 1 if anything did, else 0."""
    for sentence in sentences:
        show_error(f"dllm-bench: {sentence}")
    return 1 if sentences else 0
