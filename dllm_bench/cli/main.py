"""The command line: run · table · figure · report · status · show · compare · rescore · lm-eval ·
simulate · doctor · prefetch · train.

Thin: it composes a configuration, hands plain data to the layer below and prints what comes back.
Hydra and OmegaConf appear in this file alone. Everything heavy is imported by the command that
needs it, so `--help` is immediate. A mistake of the user is one sentence and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench import __version__
from dllm_bench.cli import commands, report_options
from dllm_bench.cli import simulate_options as load_options
from dllm_bench.cli.commands import Plain
from dllm_bench.cli.preflight import check
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir, no_such, options
from dllm_bench.tables import options as table_options
from dllm_bench.training import drafter_options, measure_options

if TYPE_CHECKING:
    from omegaconf import DictConfig

GROUPS = ("model", "decoder", "benchmark", "hardware", "logger", "paths", "hydra/launcher")
MULTIRUN = ("-m", "--multirun")
RUN_FLAGS = (*MULTIRUN, "-c", "--cfg", "-p", "--package", "-r", "--resolve", "-i", "--info")
RUN_HELP = """\
usage: dllm-bench run [-m] [--cfg job] [GROUP=CHOICE ...] [SETTING=VALUE ...]

Run one decoder on one benchmark with one model. A finished run is not repeated, an interrupted one
goes on where it stopped.

  dllm-bench run model=tiny-llada benchmark=minigsm decoder=fast_dllm limit=50
  dllm-bench run -m decoder=vanilla,fast_dllm seed=0,1       every combination
  dllm-bench run decoder=fast_dllm decoder.select.tau=0.7
  dllm-bench run decoder=dspark decoder@baseline=ar_speculative
                                    both on every request: speed-up, and whether the texts are equal
  dllm-bench run --cfg job decoder=lopa                      print the settings, run nothing

settings: seed, limit, batch (requests in one forward), and everything `--cfg job` prints
choices:
"""


# --- run -----------------------------------------------------------------------------------------

_failed: list[str] = []  # sentences of the failed jobs of a multirun in this process


def run(arguments: Sequence[str]) -> int:
    """The Hydra app: overrides, `-m`, `--cfg job`."""
    if {"-h", "--help"} & set(arguments):
        print(RUN_HELP + "\n".join(choices_lines()))
        return 0
    check_flags(arguments)
    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, we make the sentence
    multirun = [flag for flag in MULTIRUN if flag in arguments]
    rest = [argument for argument in arguments if argument not in multirun]
    sys.argv = ["dllm-bench run", *multirun[:1], *rest]
    _failed.clear()
    with sentences():
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="run")(run_one)()
    for sentence in _failed:
        print(f"dllm-bench: {sentence}", file=sys.stderr)
    return 2 if _failed else 0


def run_one(cfg: DictConfig) -> None:
    """One composed run; in a local multirun a failed job does not stop the others."""
    from hydra.core.hydra_config import HydraConfig

    hydra_config = HydraConfig.get()
    local = hydra_config.launcher._target_.endswith("BasicLauncher")
    try:
        with sentences():
            config = to_plain(labelled(cfg, hydra_config.runtime.choices))
        check(config, reads_data(cfg))
        measure(config)
    except DllmBenchError as error:
        if not local:
            raise
        _failed.append(str(error))


def measure(config: Plain) -> None:
    """Make (or look up) the run of a composed configuration and print what it measured."""
    from dllm_bench.launch.run_one import run as run_spec
    from dllm_bench.registry import instantiate
    from dllm_bench.run.progress import RunProgress, summary
    from dllm_bench.store.spec import RunSpec
    from dllm_bench.store.store import Store

    spec = RunSpec.from_config(config)
    store = Store(Path(config["paths"]["results"]) / "runs")
    logger = instantiate(config["logger"])
    record = run_spec(spec, store=store, logger=logger, progress=RunProgress())
    commands.echo([*summary(record), f"stored in {store.path(spec)}"])


def reads_data(cfg: DictConfig) -> bool:
    """Whether the benchmark refers to the data directory, set or not."""
    from omegaconf import OmegaConf

    return "${paths.data}" in str(OmegaConf.to_container(cfg.benchmark, resolve=False))


def check_flags(arguments: Sequence[str]) -> None:
    """Refuse flags that `run` does not know; `--hydra-…` and the like stay out of reach."""
    for argument in arguments:
        if argument.startswith("-") and argument not in RUN_FLAGS:
            raise DllmBenchError(
                f"run has no flag {argument!r}; settings are written name=value, "
                "see `dllm-bench run --help`."
            )


def choices_lines() -> Iterator[str]:
    """One line per configuration group."""
    for group in GROUPS:
        yield f"  {group + '=':17}{' · '.join(options(group))}"


def to_plain(cfg: DictConfig) -> Plain:
    """Resolved plain data; no layer below sees OmegaConf."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def labelled(cfg: DictConfig, choices: Mapping[str, Any]) -> DictConfig:
    """The configuration without Hydra's own part; a decoder without a name gets its yaml's."""
    from omegaconf import OmegaConf

    names = [str(key) for key in cfg if key != "hydra"]
    own = OmegaConf.masked_copy(cfg, names)
    for name, group in (("decoder", "decoder"), ("baseline", "decoder@baseline")):
        if own.get(name):
            OmegaConf.update(own[name], "name", own[name].get("name") or choices[group])
    OmegaConf.set_struct(own, True)
    return own


def compose(overrides: Sequence[str]) -> Plain:
    """The run configuration for `overrides` as plain data, the same that `run` would use.

    Hydra composes the choice of each group once; plain `setting=value` overrides are put on a copy,
    as Hydra would. Whatever that does not cover goes the long way.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with sentences():
        groups, values = split_overrides(overrides)
        cfg = deepcopy(put_together(groups))
        try:
            for key, value in values:
                OmegaConf.update(cfg, key, value, merge=True)
        except OmegaConfBaseException:
            cfg = compose_groups(tuple(overrides))
        return to_plain(cfg)


@cache
def put_together(groups: tuple[str, ...]) -> DictConfig:
    """A configuration of groups composed one by one: no choice in one depends on another's."""
    names = [text.partition("=")[0].partition("/")[0] for text in groups]
    if not set(names) <= set(GROUPS):
        return compose_groups(groups)
    cfg = deepcopy(compose_groups(()))
    for name in set(names):
        own = (text for text, its in zip(groups, names, strict=True) if its == name)
        cfg[name] = compose_groups(tuple(own))[name]
    return cfg


@cache
def compose_groups(overrides: tuple[str, ...]) -> DictConfig:
    """What Hydra makes of the overrides; not to be changed by the caller."""
    import hydra

    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose("run", overrides=list(overrides), return_hydra_config=True)
    return labelled(cfg, cfg.hydra.runtime.choices)


def split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, Any]]]:
    """(overrides for Hydra, (key, value) of those that just set a value)."""
    found = [read_override(text) for text in overrides]
    groups = [text for text, value in zip(overrides, found, strict=True) if value is None]
    return tuple(groups), [value for value in found if value is not None]


@cache
def read_override(text: str) -> tuple[str, Any] | None:
    """(key, value) of an override that just sets a value, None of one that is for Hydra."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import OverrideType

    [parsed] = OverridesParser.create().parse_overrides([text])
    key = parsed.key_or_group
    sets = parsed.type is OverrideType.CHANGE and not parsed.is_sweep_override()
    plain = sets and not parsed.package and not (conf_dir() / key).is_dir()
    return (key, parsed.value()) if plain else None


@contextmanager
def sentences() -> Iterator[None]:
    """Turn configuration errors into one sentence."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise DllmBenchError(sentence(error)) from error
    except ValueError as error:
        if not str(error).startswith("Config group override must be"):
            raise
        raise DllmBenchError(
            "A choice of a group is a name, and null or a number was given; `dllm-bench run "
            "--help` lists the names."
        ) from error


def sentence(error: Exception) -> str:
    """What was asked, what was found, what to do."""
    text = " ".join(re.split(r"Config search path|See https", str(error))[0].split())
    absent = getattr(error, "missing_cfg_file", None)
    unknown = re.match(r"Could not override '([^']+)'", text)
    several = re.match(r"Ambiguous value for argument '([^']+)'", text)
    unread = getattr(error, "override", None)
    if absent:
        group, _, name = str(absent).rpartition("/")
        return no_such(group, name, options(group))
    if unknown:
        return f"No setting is called {unknown[1]!r}; {advice(unknown[1], error.__cause__)}"
    if several:
        return f"{several[1]!r} gives several values; add -m to run them all."
    if unread:
        return f"{unread!r} cannot be read; write name=value, see `dllm-bench run --help`."
    return text.removesuffix(".") + "; see `dllm-bench run --help`."


def advice(name: str, cause: object) -> str:
    """The nearest name beside the unknown one, or where the known names are printed."""
    key, path = (str(getattr(cause, part, name)) for part in ("key", "full_key"))
    beside = [str(key) for key in getattr(cause, "parent_node", None) or ()]
    near = get_close_matches(key, beside, n=1)
    found = f"did you mean {path.removesuffix(key) + near[0]!r}? " if near else ""
    return found + "`dllm-bench run --cfg job` prints all settings."


def parser() -> argparse.ArgumentParser:
    """All subcommands; `run` is listed here and parsed by Hydra."""
    top = argparse.ArgumentParser(
        prog="dllm-bench",
        description="Decoding methods for diffusion language models, measured alike.",
    )
    top.add_argument("--version", action="version", version=f"dllm-bench {__version__}")
    listed = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    listed.add_parser("run", help="run a decoder on a benchmark (overrides, -m for several)")
    text = "a paper's table: measured, reported, missing"
    table_options.add_to(add(listed, "table", commands.table, text), "table", positive)
    text = "a paper's figure, drawn from runs: measured, reported, missing"
    table_options.add_to(add(listed, "figure", commands.figure, text), "figure", positive)
    report_options.add_to(add(listed, "report", commands.report, report_options.TEXT))
    add(listed, "status", commands.status, "board of runs, tables and figures")
    one = add(listed, "show", commands.show, "a run's numbers, or one sample's filling order")
    one.add_argument("run", help="hash of a run, or its beginning (see status)")
    one.add_argument("--sample", metavar="ID", help="show the filling order of this sample")
    one.add_argument("--canvas", action="store_true", help="the canvas after every forward too")
    one.add_argument("--json", action="store_true", help="the sample's forwards and tokens as JSON")
    two = add(listed, "compare", commands.compare, "paired difference of two runs")
    two.add_argument("a", help="hash of a run")
    two.add_argument("b", help="hash of another run")
    again = add(listed, "rescore", commands.rescore, "grade the stored texts of a run again")
    again.add_argument("run", help="hash of a run, or its beginning (see status)")
    again.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="another reading, unsaved")
    again.add_argument("--evalplus", type=Path, metavar="FILE", help="write EvalPlus's samples")
    listed.add_parser("lm-eval", help="lm-eval's own command line with --model dllm_bench")
    loaded = add(listed, "simulate", commands.simulate, load_options.TEXT)
    load_options.add_to(loaded, positives)
    machine = add(listed, "doctor", commands.doctor, "what this machine can run, what is absent")
    machine.add_argument("model", nargs="?", help="check this model's weights too")
    fetch = add(listed, "prefetch", commands.prefetch, "download models, with a list of hashes")
    fetch.add_argument("models", nargs="*", metavar="MODEL", help="as in model=MODEL")
    fetch.add_argument("--to", type=Path, metavar="DIR", help="default: the hub's cache")
    fetch.add_argument("--verify", action="store_true", help="compare what is there, offline")
    add_train(listed)
    return top


def add_train(listed: Any) -> None:
    """The kinds of `train`."""
    text = "train a filter or a drafter; measure steps, fit temperatures"
    kinds = listed.add_parser("train", help=text, description=text).add_subparsers(
        dest="kind", metavar="KIND", required=True
    )
    learn = add(kinds, "filter", commands.train_filter, "a filter for Learn2PD decoding")
    learn.add_argument("model", metavar="MODEL", help="a model as in `dllm-bench run model=…`")
    learn.add_argument("--out", type=Path, metavar="DIR", help="default: RESULTS/training/filters")
    for name, default, meaning in (
        ("--block", 32, "positions of a block"),
        ("--gen-length", 64, "new tokens per prompt (the paper: 256)"),
        ("--layers", 2, "linear layers"),
        ("--epochs", 5000, "passes over all rows"),
        ("--prompts", 400, "prompts drawn from the train splits"),
    ):
        learn.add_argument(
            name, type=positive, metavar="N", default=default, help=f"{meaning}; default: {default}"
        )
    rate = drafter_options.rate
    learn.add_argument("--lr", type=rate, default=1e-3, metavar="RATE", help="default: 1e-3")
    learn.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    learn.add_argument(
        "--labels",
        choices=("masked", "all"),
        default="masked",
        help="positions the loss reads; all: the authors' code",
    )
    learn.add_argument(
        "--benchmark",
        action="append",
        choices=("minigsm", "minicode", "minimath"),
        help="whose train split gives prompts; may be repeated; default: all",
    )
    learn.add_argument("--flan", type=Path, metavar="DIR", help="jsonl rows (task, inputs) instead")
    learn.add_argument(
        "--all-blocks", action="store_true", help="keep the blocks after the end of the text too"
    )
    learn.add_argument(
        "--collect-only", action="store_true", help="collect traces (a second call goes on)"
    )
    steps = add(kinds, "sps", commands.train_sps, measure_options.SPS)
    measure_options.add_sps(steps, positive, positives)
    scales = add(kinds, "temperatures", commands.train_temperatures, measure_options.TEMPERATURES)
    measure_options.add_temperatures(scales)
    drafting = add(kinds, "drafter", commands.train_drafter, drafter_options.TEXT)
    drafter_options.add_to(drafting, positive)


def positives(text: str) -> tuple[int, ...]:
    """Whole numbers above zero with commas between."""
    return tuple(positive(part) for part in text.split(","))


def positive(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above zero")
    return int(text)


def add(listed: Any, name: str, action: commands.Action, text: str) -> argparse.ArgumentParser:
    """A subcommand with the option all of them share."""
    added: argparse.ArgumentParser = listed.add_parser(name, help=text, description=text)
    added.add_argument("--results", metavar="DIR", help="results directory (default: ./results)")
    added.set_defaults(action=action)
    return added


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["run"]:
            return run(arguments[1:])
        if arguments[:1] == ["lm-eval"]:
            return commands.lm_eval(arguments[1:], compose)
        args = parser().parse_args(arguments)
        return int(args.action(args, compose))
    except DllmBenchError as error:
        print(f"dllm-bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ndllm-bench: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
