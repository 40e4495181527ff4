"""Compose run configurations with Hydra; the only module that uses Hydra and OmegaConf.

`compose` turns overrides (`decoder=lopa`, `seed=1`) into plain data, as `dllm-bench run` would;
`hydra_app` is `run` itself, with `-m` and `--cfg job`. No other layer sees OmegaConf. A
configuration error becomes a DllmBenchError of one sentence.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dllm_bench.core.choices import did_you_mean, unknown_name
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import conf_dir, options

GROUPS = ("model", "decoder", "benchmark", "hardware", "logger", "paths", "hydra/launcher")
MULTIRUN = ("-m", "--multirun")
CONFIG = "run"  # conf/run.yaml
Plain = dict[str, Any]


# --- composing without running -------------------------------------------------------------------


def compose(overrides: Sequence[str]) -> Plain:
    """The run configuration for `overrides` as plain data, the same that `run` would use.

    Hydra composes the choice of each group once. Overrides that only set a value are applied to a
    copy of the result, which gives what Hydra would give in a fraction of the time. If that fails,
    Hydra composes all overrides at once.
    """
    with as_sentences():
        groups, values = split_overrides(overrides)
        cfg = deepcopy(merge_groups(groups))
        try:
            for key, value in values:
                OmegaConf.update(cfg, key, value, merge=True)
        except OmegaConfBaseException:
            cfg = compose_groups(tuple(overrides))
        return to_plain(cfg)


@cache
def merge_groups(groups: tuple[str, ...]) -> DictConfig:
    """A configuration whose groups are composed one by one: no group depends on another's choice.

    The result is cached: the caller must not change it.
    """
    names = [text.partition("=")[0].partition("/")[0] for text in groups]
    if not set(names) <= set(GROUPS):
        return compose_groups(groups)
    cfg = deepcopy(compose_groups(()))
    for name in set(names):
        own = (text for text, group in zip(groups, names, strict=True) if group == name)
        cfg[name] = compose_groups(tuple(own))[name]
    return cfg


@cache
def compose_groups(overrides: tuple[str, ...]) -> DictConfig:
    """Hydra's configuration for the overrides. Cached: the caller must not change it."""
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        cfg = hydra.compose(CONFIG, overrides=list(overrides), return_hydra_config=True)
    return name_decoders(cfg, cfg.hydra.runtime.choices)


def split_overrides(overrides: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, Any]]]:
    """(overrides that Hydra must apply, (key, value) of those that only set a value)."""
    parsed = [parse_value_override(text) for text in overrides]
    groups = [text for text, pair in zip(overrides, parsed, strict=True) if pair is None]
    return tuple(groups), [pair for pair in parsed if pair is not None]


@cache
def parse_value_override(text: str) -> tuple[str, Any] | None:
    """(key, value) of an override that only sets a value; None if Hydra must apply it."""
    [parsed] = OverridesParser.create().parse_overrides([text])
    key = parsed.key_or_group
    sets = parsed.type is OverrideType.CHANGE and not parsed.is_sweep_override()
    only_sets = sets and not parsed.package and not (conf_dir() / key).is_dir()
    return (key, parsed.value()) if only_sets else None


def to_plain(cfg: DictConfig) -> Plain:
    """The configuration as dicts and lists, with interpolations resolved."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def name_decoders(cfg: DictConfig, choices: Mapping[str, Any]) -> DictConfig:
    """The configuration without Hydra's own part; a decoder without a name gets its yaml's."""
    names = [str(key) for key in cfg if key != "hydra"]
    own = OmegaConf.masked_copy(cfg, names)
    for name, group in (("decoder", "decoder"), ("baseline", "decoder@baseline")):
        if own.get(name):
            OmegaConf.update(own[name], "name", own[name].get("name") or choices[group])
    OmegaConf.set_struct(own, True)
    return own


# --- `dllm-bench run` ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ComposedJob:
    """One job of `dllm-bench run`, composed.

    config: the whole run configuration as plain data.
    reads_data: the benchmark refers to the data directory, whether that is set or not.
    """

    config: Plain
    reads_data: bool


def hydra_app(arguments: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Call `task` with each configuration that the arguments of `run` describe, as Hydra's app.

    `task` must be a function of a module: with `-m` a launcher may pickle it for other processes.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach this process, which prints the sentence
    multirun = [flag for flag in MULTIRUN if flag in arguments]
    rest = [argument for argument in arguments if argument not in multirun]
    sys.argv = ["dllm-bench run", *multirun[:1], *rest]
    with as_sentences():
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG)(task)()


def composed_job(cfg: DictConfig) -> ComposedJob:
    """The configuration Hydra passed to a task, as plain data."""
    with as_sentences():
        config = to_plain(name_decoders(cfg, HydraConfig.get().runtime.choices))
    benchmark = str(OmegaConf.to_container(cfg.benchmark, resolve=False))
    return ComposedJob(config, reads_data="${paths.data}" in benchmark)


def runs_in_this_process() -> bool:
    """Whether Hydra runs its jobs one after the other in this process."""
    return bool(HydraConfig.get().launcher._target_.endswith("BasicLauncher"))


# --- errors --------------------------------------------------------------------------------------


@contextmanager
def as_sentences() -> Iterator[None]:
    """Turn any configuration error raised in the block into a DllmBenchError of one sentence."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise DllmBenchError(sentence(error)) from error
    except ValueError as error:
        if not str(error).startswith("Config group override must be"):
            raise
        raise DllmBenchError(
            "The choice of a group must be a name, but null or a number was given; "
            "`dllm-bench run --help` lists the names."
        ) from error


def sentence(error: Exception) -> str:
    """What was asked, what was found and what to do, for an error of Hydra or OmegaConf."""
    text = " ".join(re.split(r"Config search path|See https", str(error))[0].split())
    absent = getattr(error, "missing_cfg_file", None)
    unknown = re.match(r"Could not override '([^']+)'", text)
    several = re.match(r"Ambiguous value for argument '([^']+)'", text)
    unreadable = getattr(error, "override", None)
    if absent:
        group, _, name = str(absent).rpartition("/")
        return unknown_name(group, name, options(group))
    if unknown:
        return unknown_setting(unknown[1], error.__cause__)
    if several:
        return f"{several[1]!r} gives several values; add -m to run them all."
    if unreadable:
        return f"{unreadable!r} cannot be read; write name=value, see `dllm-bench run --help`."
    return text.removesuffix(".") + "; see `dllm-bench run --help`."


def unknown_setting(name: str, cause: object) -> str:
    """The sentence about a setting that does not exist: the nearest name, or where to find all."""
    key, path = (str(getattr(cause, part, name)) for part in ("key", "full_key"))
    siblings = [str(key) for key in getattr(cause, "parent_node", None) or ()]
    question = did_you_mean(key, siblings, prefix=path.removesuffix(key))
    known = "`dllm-bench run --cfg job` prints all settings."
    return f"No setting is called {name!r}; {question}{known}"
