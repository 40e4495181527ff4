"""`dllm-bench completion`: print the lines that make a shell complete commands, choices and
settings.

eval "$(dllm-bench completion)"  # in ~/.bashrc or ~/.zshrc

Through argcomplete, the shell then calls `dllm-bench` itself for the matching words, and `complete`
prints them. It reads only the names of yaml files, and the contents of those chosen on the line.
"""

from __future__ import annotations

import os
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import argcomplete
from argcomplete.lexers import split_line

from dllm_bench.cli.common import SETTINGS, print_lines
from dllm_bench.cli.main import AS_SETTINGS, ESTIMATE, FLAGS, parsers
from dllm_bench.paths import GROUPS as CHOICES
from dllm_bench.paths import conf_file, options, read_yaml, slot_groups
from dllm_bench.store.groups import default_settings
from dllm_bench.store.spec import leaves

OF_RUN = (*FLAGS, ESTIMATE, *AS_SETTINGS)
OF_DECODER = ("decoder.", "decoder/")
GROUP_OF = {"MODEL": "model", "DECODER": "decoder", "BENCHMARK": "benchmark"}
"""Metavar of an argument -> the configuration group whose choices it takes."""


def run(arguments: Namespace) -> int:
    """Print the lines for a shell."""
    return print_lines([argcomplete.shellcode(["dllm-bench"], shell=arguments.shell or "bash")])


# --- answers to the shell ------------------------------------------------------------------------


def complete() -> int:
    """Write the words that may continue $COMP_LINE; ends the process."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = split_line(line)[3][1:]

    def fitting(
        *, prefix: str, action: Action, parser: ArgumentParser, parsed_args: Namespace
    ) -> list[str]:
        return list(words_for(prefix, action, vars(parsed_args), words))

    argcomplete.autocomplete(parser_of(words), default_completer=fitting)  # type: ignore[arg-type]
    return 0


def parser_of(words: Sequence[str]) -> ArgumentParser:
    """Return a parser that knows all commands, and the arguments of the one on the line. Those of
    lm-eval are left out, whose parser takes a second to import.
    """
    top, parser, _ = parsers(words)
    if words[:1] == ["run"]:
        for flag in OF_RUN:
            parser.add_argument(flag, action="store_true")
        parser.add_argument("settings", nargs="*", metavar=SETTINGS)
    return top


def words_for(
    prefix: str, action: Action, given: Mapping[str, Any], words: Sequence[str]
) -> Iterator[str]:
    """Yield the words that begin with `prefix` and may be this argument; none if it may be a file.

    given: arguments on the line, by name; words: all of the line.
    """
    metavar = str(action.metavar)
    if metavar == SETTINGS and not action.option_strings:
        chosen = dict(word.split("=", 1) for word in words if "=" in word)
        named = {name: given[name] for name in ("model", "decoder") if given.get(name)}
        found = setting_words(prefix, {**named, **chosen})
        # a command with an argument DECODER takes no other settings
        yield from (w for w in found if "decoder" not in given or w.startswith(OF_DECODER))
    elif metavar in GROUP_OF:
        yield from options(GROUP_OF[metavar])
    elif action.dest == "profile" and metavar != "FILE":
        yield from options("profile")
    elif metavar.startswith("PAPER/"):
        from dllm_bench.tables.load import names_of

        yield from names_of(action.dest)
    elif action.dest == "drafter":
        from dllm_bench.training import DRAFTER_KINDS

        yield from DRAFTER_KINDS


def setting_words(prefix: str, chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield words for a setting of `run`: names up to their `=`, and after it the choices of a
    group.

    chosen: group -> its choice on the line.
    """
    name, equals, value = prefix.partition("=")
    if equals:
        before, comma, _ = value.rpartition(",")  # with -m: several choices
        group = name.lstrip("+").partition("@")[0]
        yield from (f"{name}={before}{comma}{choice}" for choice in options(group))
        return
    groups = [*CHOICES, *slot_groups(), "decoder@baseline", "model@parent", "+experiment"]
    yield from (f"{group}=" for group in groups)
    yield from (f"{setting}=" for setting in settings_of_run(chosen))


def settings_of_run(chosen: Mapping[str, str]) -> Iterator[str]:
    """Yield the dotted names of all settings of a run with some choices, from its yaml files."""
    chosen_by_default = (one for one in read("run.yaml")["defaults"] if isinstance(one, dict))
    usual = {group: name for one in chosen_by_default for group, name in one.items()}
    yield from dotted_names(default_settings())
    for group in CHOICES:
        if name := chosen.get(group, usual.get(group)):
            dotted = group.replace("/", ".")
            yield from (f"{dotted}.{key}" for key in settings_of(group, name, chosen))


def settings_of(group: str, name: str, chosen: Mapping[str, str]) -> list[str]:
    """Return the dotted names of the settings of a choice, those of its pieces included."""
    plain, found = read(f"{group}/{name}.yaml"), list[str]()
    for entry in plain.pop("defaults", ()):
        if isinstance(entry, str):
            found += settings_of(group, entry, chosen) if entry != "_self_" else []
            continue
        for key, usual in entry.items():
            slot = key.removeprefix("override ")
            piece = chosen.get(f"{group}/{slot}", usual)
            found = [one for one in found if not one.startswith(f"{slot}.")]
            found += [f"{slot}.{one}" for one in settings_of(f"{group}/{slot}", piece, chosen)]
    return list(dict.fromkeys([*found, *dotted_names(plain)]))


def dotted_names(plain: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dotted names of nested settings."""
    return (name for name, _ in leaves(plain) if not name.endswith("_target_"))


def read(name: str) -> dict[str, Any]:
    """Return a yaml file of the configuration; empty if there is none of that name."""
    file = conf_file(name)
    return (file.is_file() and read_yaml(file)) or {}
