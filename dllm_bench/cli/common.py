"""Shared by the commands: the results directory, checked option values, printed lines."""

from __future__ import annotations

import gc
import os
import re
import shlex
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from dllm_bench.core.output import show, show_error
from dllm_bench.paths import CONFIG_DIR, GROUPS
from dllm_bench.store.cache import default_paths
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import Paths, RunConfig
from dllm_bench.store.store import Store

Line = tuple[str, str, str]
"""Of the doctor's report: mark, topic, text."""
OK, OPTIONAL_MISSING, REQUIRED_MISSING = "ok", "--", "no"
SETTINGS = "NAME=VALUE"  # metavar of settings


# --- types of arguments ---------------------------------------------------------------------------


def choice_of(group: str) -> Callable[[str], str]:
    """Return the argument parser's type for a name in a group, given as NAME or GROUP=NAME."""

    def name_in(word: str) -> str:
        key, is_given, name = word.partition("=")
        if not is_given or re.split(r"[./@]", key.lstrip("+~"))[0] not in GROUPS:
            return word  # an equals sign may also be part of a folder's name
        if key != group:
            raise ArgumentTypeError(
                f"{word!r} is a setting, and the name of a {group} belongs here; give that first, "
                "settings after it"
            )
        return name

    return name_in


def positive(kind: type, words: str, several: bool = False, low: float = 0) -> Callable[[str], Any]:
    """Return the argument parser's type for a number above zero, or several with commas between.

    words: what the numbers are; low: the smallest one.
    """

    def numbers_in(text: str) -> Any:
        with suppress(ValueError):
            numbers = tuple(map(kind, text.split(",") if several else [text]))
            if all(0 < number < inf and number >= low for number in numbers):
                return numbers if several else numbers[0]
        raise ArgumentTypeError(f"{text!r} is not {words}")

    return numbers_in


TYPES = {
    "int": int,
    "float": float,
    "path": Path,
    "positive_int": positive(int, "a whole number above zero"),
    "positive_ints": positive(int, "a whole number above zero", several=True),
    "positive_float": positive(float, "a number above zero"),
    "rates": positive(float, "a number from 1e-6 up", several=True, low=1e-6),
    **{group: choice_of(group) for group in ("model", "decoder", "benchmark")},
}
"""The types of arguments that `commands.yaml` names."""


# --- configuration and results -------------------------------------------------------------------


def compose(overrides: Sequence[str]) -> RunConfig:
    """Return the run configuration for `overrides`, see `api.compose`."""
    # Hydra takes a quarter of a second to import, and most commands find all settings in a cache.
    from dllm_bench.api.compose import compose as compose_with_hydra

    return RunConfig(compose_with_hydra(overrides))


def as_model(word: str) -> str:
    """Return the override for a model given to a command as NAME, model=NAME or model.path=DIR."""
    return word if word.startswith(("model=", "model.")) else f"model={word}"


def configured_paths(arguments: Namespace) -> Paths:
    """Return the `paths` group of the configuration; `--results` replaces its results directory."""
    paths = default_paths() or compose([]).paths
    return Paths(paths if arguments.results is None else {**paths, "results": arguments.results})


def training_folder(arguments: Namespace) -> Path:
    """Return the default folder for the results of `train` (--out replaces it)."""
    return results_directory(configured_paths(arguments).results) / "training"


def open_store(arguments: Namespace) -> Store:
    """Return the store in the results directory.

    From then on Python looks for cycles of objects less often: a fifth of the time in which records
    are read would go into it, and they have none.
    """
    gc.set_threshold(10_000)
    return Store.in_results(configured_paths(arguments).results)


def given_folders(arguments: Namespace) -> str:
    """Return the options that name the folders in use, for the end of a printed command."""
    given = {"--results": arguments.results, "--config-dir": os.environ.get(CONFIG_DIR)}
    return "".join(f" {option} {shlex.quote(at)}" for option, at in given.items() if at)


# --- output --------------------------------------------------------------------------------------


def print_lines(lines: Iterable[str]) -> int:
    """Print lines to stdout; return the exit code of success."""
    for line in lines:
        show(line)
    return 0


def print_written(place: Path | str, use: str) -> int:
    """Print what was written and the words that use it; return the exit code of success."""
    return print_lines([f"written: {place}", f"use it: {use}"])


def print_failures(sentences: Sequence[str]) -> int:
    """Print failures to stderr; return 1 if there were any, else 0."""
    for sentence in sentences:
        show_error(f"dllm-bench: {sentence}")
    return 1 if sentences else 0
