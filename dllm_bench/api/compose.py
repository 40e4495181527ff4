"""Compose run configurations with Hydra; the only module that uses Hydra and OmegaConf.

`compose` turns overrides (`decoder=lopa`, `seed=1`) into plain data, as `dllm-bench run` would;
`hydra_app` is `run` itself, with `-m` and `--cfg job`. No other layer sees OmegaConf. A
configuration error becomes a DllmBenchError of one sentence. A model may be named by its
checkpoint, `model=/path/to/folder` or `model=owner/name`. `compose` restores what Hydra keeps per
process, so that it may be called inside of a program that is itself a Hydra app.

`check` finds mistakes in a composed configuration quickly: a missing model folder, what the
benchmark itself refuses (missing data, code execution without consent), and a decoder or model that
does not fit. Only the last two checks (fit and memory) need torch.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import hydra
from hydra import version
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType, Quote, QuotedString
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dllm_bench import paths
from dllm_bench.core.decoder import ComposedDecoder
from dllm_bench.core.errors import DllmBenchError, did_you_mean, unknown_name
from dllm_bench.models import sources
from dllm_bench.models.spec import DEVICES, ModelSpec
from dllm_bench.paths import ASSETS, GROUPS, IMPORTED, expanded, options, place_of, read_yaml
from dllm_bench.registry import check_plain_types, require_known
from dllm_bench.store import inputs
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import Hardware, ModelGroup, Plain, RunConfig, default_settings

CONFIG = "run"  # conf/run.yaml
LAUNCHER = "hydra/launcher"
LAUNCHER_PARTS = (f"{LAUNCHER}=", "hydra.launcher.")  # the choice of a launcher; its settings
MAY_CHOOSE_THE_MODE = ("-", "hydra", "+hydra", "++hydra", "+experiment")
"""Prefixes of arguments that may request more than one run: flags, and Hydra's own settings."""
NAMED = 3  # settings of one name listed in a message
PLAIN_TEXT = re.compile(r"""[^'"\[\]{}()$\\,\s]+""")
"""A value to be taken literally: it contains no character that has a meaning in Hydra."""
INTERPOLATION = re.compile(r"(\\*)(\$\{)")
"""What begins an interpolation, after the backslashes that would escape it."""
BASELINE, PIECES = "decoder@baseline", "decoder/"  # groups
PLACES = {**{group: group for group in GROUPS}, BASELINE: "baseline", "model@parent": "parent"}
"""Group of conf/run.yaml -> key of its choice in the configuration."""
FOREIGN_NAMES = read_yaml(Path(__file__).with_name("foreign_names.yaml"))
"""What settings are called in other programs -> what they are called here."""
OPTIONAL = {field.name for field in fields(ModelSpec) if field.default is None} | {"merge_lora"}
"""Settings of a model that its yaml may leave out."""


# The single settings, which conf/run.yaml names in its defaults list.
ConfigStore.instance().store("dllm_bench_settings", default_settings())
# What a group is composed in alone. Hydra's own groups would take half of the time.
EMPTY = "dllm_bench_empty"
HYDRA_GROUPS = "callbacks env help hydra_help hydra_logging job_logging launcher output sweeper"
WITHOUT = [{f"override hydra/{group}": None} for group in HYDRA_GROUPS.split()]
ConfigStore.instance().store(EMPTY, {"defaults": WITHOUT})
# `${home:PATH}` in a yaml: the path with the home folder in place of `~`.
OmegaConf.register_new_resolver("home", lambda path: str(expanded(path)), replace=True)


# --- composing without running -------------------------------------------------------------------


def compose(overrides: Sequence[str]) -> Plain:
    """Return the run configuration for `overrides` as plain data, the same that `run` would use.

    Hydra composes the choice of each group once. Overrides that only set a value are applied to a
    copy of the result: the same configuration in a fraction of the time. If that fails, Hydra
    composes all overrides at once.
    """
    with as_sentences():
        overrides = with_checkpoints(overrides)
        parsed = {text: parse_value_override(text) for text in overrides}
        cfg = pickle.loads(merge_groups(tuple(o for o in overrides if parsed[o] is None)))
        try:
            for key, value, is_added in filter(None, map(parsed.get, overrides)):
                OmegaConf.update(cfg, key, value, merge=True, force_add=is_added)
        except OmegaConfBaseException:
            cfg = compose_groups(tuple(overrides))
        return checked(cfg)


def compose_decoder(name: str, overrides: Sequence[str]) -> Plain:
    """Return the configuration of a decoder, with overrides of its settings and pieces only."""
    others = [one for one in overrides if not one.startswith(("decoder.", "decoder/"))]
    if others:
        raise DllmBenchError(
            f"{others[0]!r} is no setting of a decoder; write decoder.SLOT.NAME=VALUE or "
            "decoder/SLOT=PIECE."
        )
    require_known("decoder", name, options("decoder"), listing="dllm-bench run --help")
    return dict(compose([f"decoder={name}", *overrides])["decoder"])


@cache
def merge_groups(groups: tuple[str, ...]) -> bytes:
    """Return a configuration, pickled, whose groups are composed one by one: no group depends on
    another's choice.

    Unpickling it copies it faster than `deepcopy`.
    """
    texts_of = defaultdict[str, list[str]](list)
    for text in groups:
        key = text.partition("=")[0]
        place = PLACES.get(key if "@" in key else key.partition("/")[0])
        if place is None:
            return pickle.dumps(compose_groups(groups))
        texts_of[place].append(f"+{text}" if key in PLACES else text)
    cfg = pickle.loads(pickle.dumps(compose_groups(())))
    for place, texts in texts_of.items():
        alone = sum(text.startswith("+") for text in texts) == 1  # else conf/run.yaml chooses
        own = tuple(text.removeprefix("+") for text in texts)
        part = compose_groups(tuple(texts), EMPTY) if alone else compose_groups(own)
        OmegaConf.update(cfg, place, part[place], merge=False, force_add=True)
    return pickle.dumps(cfg)


@cache
def compose_groups(overrides: tuple[str, ...], config: str = CONFIG) -> DictConfig:
    """Compose Hydra's configuration for the overrides, cached: the caller must not change it.

    config: conf/run.yaml, or `EMPTY`, to which a group is added.
    """
    base = version.VersionBase.instance()
    before = base.version_base
    try:
        with hydra.initialize_config_dir(str(paths.conf_dir()), version_base="1.3"):
            given = [*search_path(), *overrides]
            cfg = hydra.compose(config, overrides=given, return_hydra_config=True)
    finally:
        base.version_base = before
    return named(cfg, cfg.hydra)


def search_path() -> list[str]:
    """Return the override that adds the configuration folders of plug-ins and of the user to
    Hydra's search path; empty if there are none.
    """
    places = ",".join(f"'file://{folder}'" for folder in paths.further_conf_dirs())
    return [f"hydra.searchpath=[{places}]"] if places else []


@cache
def parse_value_override(text: str) -> tuple[str, Any, bool] | None:
    """Return (key, value, whether the key may be new) of an override that only sets a value; None
    if Hydra must apply it."""
    [parsed] = OverridesParser.create().parse_overrides([text])
    key, sets = parsed.key_or_group, parsed.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
    is_group = any((folder / key).is_dir() for folder in paths.conf_dirs())
    is_value = sets and not (parsed.is_sweep_override() or parsed.package or is_group)
    return (key, parsed.value(), parsed.is_force_add()) if is_value else None


# --- models named by a checkpoint ----------------------------------------------------------------


def with_checkpoints(overrides: Sequence[str]) -> list[str]:
    """Return the overrides; `model=` with a checkpoint (a folder or a hub id) is replaced by
    settings.

    A model read from a folder is named after the folder, unless another name is given.
    """
    overrides = [as_hydra_reads(text) for text in overrides]
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    source, path = (given.get(key, "").strip("'") for key in ("model", "model.path"))
    if source and source not in options("model"):
        rest = (text for text in overrides if not text.startswith("model="))
        return [*checkpoint_overrides(source), *rest]
    if path and "model.name" not in given and place_of(path).is_dir():
        return [*overrides, as_override("model.name", folder_name(path))]
    return list(overrides)


@cache
def as_hydra_reads(override: str) -> str:
    """Return the override in a form that Hydra accepts. Plain text that Hydra cannot read
    (`<|mask|>`) is quoted; a model setting that the model's yaml leaves out is added with `+`.
    """
    key, _, value = override.partition("=")
    if not PLAIN_TEXT.fullmatch(value.strip("'")):
        return override
    if key.removeprefix("model.") in OPTIONAL and key.startswith("model."):
        key, override = f"++{key}", f"++{override}"
    try:
        OverridesParser.create().parse_overrides([override])
    except HydraException:
        return as_override(key, value)
    return override


def folder_name(source: str) -> str:
    """Return the last part of a folder's path or of a hub id."""
    return os.path.basename(os.path.abspath(place_of(source)))


def checkpoint_overrides(source: str) -> list[str]:
    """Return the overrides that describe the model in a folder or of a hub id; for any other text,
    `model=source`.

    A checkpoint that a yaml names is that yaml's model; any other is described by its own files. A
    LoRA adapter stands for the model it was trained on, with the adapter.
    """
    folder = place_of(source)
    if not folder.is_dir() and source.startswith(("/", ".", "~")):
        raise DllmBenchError(
            f"There is no model folder {source!r}; give an existing folder, a hub id "
            "(owner/name), or a name that `dllm-bench run --help` lists."
        )
    if not folder.is_dir() and not sources.HUB_ID.fullmatch(source):
        return [as_hydra_reads(f"model={source}")]
    for name in options("model"):
        plain = read_yaml(paths.conf_file(f"model/{name}.yaml"))
        if (plain.get("lora") or plain.get("path")) == source:
            return [f"model={name}"]
    if not folder.is_dir():
        folder = sources.checkpoint_folder(source)
    name = folder_name(source)
    if sources.is_lora(folder) and (base := sources.adapted_model(folder)):
        try:
            adapted = checkpoint_overrides(base)
        except DllmBenchError as error:
            raise DllmBenchError(
                f"{source} is a LoRA adapter of {base!r}, which was not found: {error}. Where it "
                f"lies elsewhere, name it: model=FOLDER model.lora={source}, or in Python "
                f'load_model("FOLDER", lora="{source}").'
            ) from error
        return [*adapted, as_override("++model.name", name), as_override("++model.lora", source)]
    own = {"name": name, "path": source, **sources.settings_of(folder)}
    return ["~model", *(as_override(f"+model.{key}", value) for key, value in own.items())]


def as_override(key: str, value: Any) -> str:
    """Return the override that sets a key to a value: None, a number (NumPy's included), a text, a
    path, or a list of these. A text stays as it is, quotes, backslashes and `${` included."""
    try:
        return f"{key}={as_hydra_writes(value)}"
    except TypeError as error:
        raise DllmBenchError(f"{key} is {value!r}; give a number, a text or a list.") from error


def as_hydra_writes(value: Any) -> str:
    """Return a value in Hydra's grammar of overrides; TypeError for one of another kind."""
    value = value.tolist() if hasattr(value, "tolist") else value  # of NumPy or pandas
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_hydra_writes, value))}]"
    if not isinstance(value, (str, os.PathLike)):
        return json.dumps(value)
    escaped = INTERPOLATION.sub(r"\1\1\\\2", str(value))
    return QuotedString(escaped, Quote.single).with_quotes()


def to_plain(cfg: DictConfig) -> Plain:
    """Return the configuration as dicts and lists, with interpolations resolved."""
    plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    return {str(key): value for key, value in plain.items()} if isinstance(plain, dict) else {}


def checked(cfg: DictConfig) -> Plain:
    """Return the configuration as dicts and lists; DllmBenchError for a value of a wrong type."""
    plain = to_plain(cfg)
    RunConfig(plain)  # each setting is what its field declares
    check_plain_types(plain)
    return plain


def named(cfg: DictConfig, about: HydraConf) -> DictConfig:
    """Return the configuration without Hydra's own part, and name each decoder that has no name.

    about: Hydra's own part, which holds the choices.
    """
    own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    choices = about.runtime.choices
    for key, name in (("decoder", decoder_name), ("baseline", itemgetter(BASELINE))):
        if own.get(key):
            OmegaConf.update(own[key], "name", own[key].get("name") or name(choices))
    OmegaConf.set_struct(own, True)
    return own


def decoder_name(choices: Mapping[str, Any]) -> str:
    """Return the yaml's name, then the pieces chosen instead of the yaml's:
    `vanilla+select.factor`."""
    name = str(choices["decoder"])
    usual = paths.default_pieces(name)
    chosen = {key.removeprefix(PIECES): choices[key] for key in choices if key.startswith(PIECES)}
    changed = [
        f"+{slot}.{piece}" for slot, piece in chosen.items() if usual.get(slot, piece) != piece
    ]
    return name + "".join(changed)


# --- checking what was composed -------------------------------------------------------------------


def check(config: RunConfig) -> None:
    """Raise a DllmBenchError for the first problem found."""
    results_directory(config.paths.results)
    check_device(config.hardware)
    check_model(config.model)
    if config.parent:
        check_model(config.parent)
    if config.benchmark:
        inputs.benchmark_of(config.benchmark).check()
    check_fits(config)
    check_memory(config)


def check_device(hardware: Hardware) -> None:
    """Check that this package can run on the kind of device.

    Other kinds of hardware are in conf only so that their reported numbers can be shown and
    compared.
    """
    if hardware.device.partition(":")[0] not in DEVICES:
        raise DllmBenchError(
            f"hardware={hardware.name} asks for {hardware.processes} devices of kind "
            f"{hardware.device!r}, and this package runs on {' and '.join(DEVICES[1:])} devices; "
            "choose hardware=auto, which finds what is here."
        )


def check_model(model: ModelGroup) -> None:
    """Check that weights and adapter are where the model's settings say: in the package, a folder,
    or the cache."""
    name = model.name
    for source, revision in ((model.path, model.revision), (model.lora, None)):
        if not source or expanded(source).is_dir():
            continue
        if source.startswith(IMPORTED):
            sources.checkpoint_folder(source, revision)
        elif source.startswith(ASSETS) and not any(place_of(source).glob("*.safetensors")):
            shipped = source.removeprefix(ASSETS)
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which this installation does not have; a clone of "
                f"the repository has it, or makes it: python -m scripts.embedded {shipped}"
            )
        elif sources.is_hub_id(source) and not is_cached(source):
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which is not in the local Hugging Face cache, and "
                f"a run downloads nothing; fetch it first: dllm-bench "
                f"prefetch {name}, or hf download {source}"
            )
    check_folder(model)


def check_folder(model: ModelGroup) -> None:
    """Check that a user's checkpoint folder contains everything a run reads."""
    source = model.path or ASSETS
    folder = place_of(source)
    if source.startswith(ASSETS) or not folder.is_dir():
        return
    if listed := "; ".join(sources.lacking(folder, model)):
        raise DllmBenchError(
            f"Model {model.name!r} is to be read from {folder}, which lacks {listed}; "
            "complete the folder and give the same command again."
        )


def check_memory(config: RunConfig) -> None:
    """Check that the weights fit into the memory of the device, in the dtype they are run in.

    There is no check if the device is absent, since a run can still be looked up, nor for a model
    object, which is in memory already.
    """
    is_in_files = not (config.model.is_served or config.model.is_object)
    if is_in_files and not inputs.missing_device(inputs.resolve_hardware(config.hardware)):
        inputs.require_memory(inputs.model_here(config))


def check_fits(config: RunConfig) -> None:
    """Check that decoder and baseline fit the batch and the model's settings."""
    for plain in {} if config.model.is_served else config.decoders.values():
        decoder = inputs.decoder_of(plain)
        if isinstance(decoder, ComposedDecoder):
            decoder.check_run_fits(config.model, config.batch)


def is_cached(hub_id: str) -> bool:
    """Return whether the hub's cache has any version of a repository."""
    return (paths.hub_cache() / f"models--{hub_id.replace('/', '--')}").is_dir()


# --- `dllm-bench run` ----------------------------------------------------------------------------


def hydra_app(arguments: Sequence[str], task: Callable[[DictConfig], None]) -> None:
    """Call `task` with each configuration that the arguments of `run` describe, as Hydra's app.

    `task` must be a function of a module: with `-m` a launcher may pickle it for other processes.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach this process, which prints the sentence
    multirun = [flag for flag in ("-m", "--multirun") if flag in arguments]
    rest = [argument for argument in arguments if argument not in multirun]
    overrides = [at for at, one in enumerate(rest) if "=" in one and not one.startswith("-")]
    at = overrides[0] if overrides else len(rest)  # overrides have to follow each other
    searched = any(one.startswith("hydra.searchpath=") for one in rest)
    rest[at:] = [*([] if searched else search_path()), *with_checkpoints(rest[at:])]
    sys.argv = ["dllm-bench run", *multirun[:1], *rest]
    conf, before = str(paths.conf_dir()), logging.Handler.handleError
    with as_sentences():
        if not multirun and not any(one.startswith(MAY_CHOOSE_THE_MODE) for one in arguments):
            # hydra.main would compose everything once more, to find the mode
            with hydra.initialize_config_dir(conf, version_base="1.3"):
                app = GlobalHydra.instance().hydra
                assert app is not None  # initialised by the `with`
                app.run(CONFIG, task, rest)
            return
        logging.Handler.handleError = raise_again  # type: ignore[method-assign]
        try:
            hydra.main(version_base="1.3", config_path=conf, config_name=CONFIG)(task)()
        finally:
            logging.Handler.handleError = before  # type: ignore[method-assign]


def composed_job(cfg: DictConfig) -> RunConfig:
    """Return the configuration Hydra passed to a task, as plain data."""
    with as_sentences():
        return RunConfig(checked(named(cfg, HydraConfig.get())))


def runs_in_this_process() -> bool:
    """Return whether Hydra runs its jobs one after the other in this process."""
    return bool(HydraConfig.get().launcher._target_.endswith("BasicLauncher"))


def is_multirun() -> bool:
    """Return whether the job is one of -m."""
    return HydraConfig.get().mode is RunMode.MULTIRUN


def job_heading() -> list[str]:
    """Return the overrides that distinguish a job of -m from the others; none for a single run."""
    return [" ".join(HydraConfig.get().overrides.task)] if is_multirun() else []


def split_slurm_settings(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return (arguments, launcher settings). The arguments are those of a multirun whose jobs Hydra
    runs in this process; the settings are those given to hydra/launcher=slurm, as NAME=VALUE, or
    None if it is not the launcher.

    An experiment's yaml may choose the launcher as well. Hydra itself submits nothing: the jobs are
    submitted as by `table --submit`.
    """
    own = [text for text in arguments if text.lstrip("+").startswith(LAUNCHER_PARTS)]
    experiments = [text for text in arguments if text.startswith("+experiment=")]
    if not own and not experiments:
        return list(arguments), None
    given = [*search_path(), *experiments, *own]
    with as_sentences(), hydra.initialize_config_dir(str(paths.conf_dir()), version_base="1.3"):
        cfg = hydra.compose(CONFIG, overrides=given, return_hydra_config=True)
        if cfg.hydra.runtime.choices[LAUNCHER] != "slurm":
            return list(arguments), None
        usual = hydra.compose(CONFIG, [f"{LAUNCHER}=slurm"], return_hydra_config=True)
        here = [*search_path(), *experiments, f"{LAUNCHER}=local"]
        local = hydra.compose(CONFIG, here, return_hydra_config=True).hydra.launcher
    chosen, before = cfg.hydra.launcher, usual.hydra.launcher
    changed = [name for name in chosen if chosen._get_node(name) != before._get_node(name)]
    rest = [text for text in arguments if text not in own]
    left_out = [f"~hydra.launcher.{name}" for name in local if name != "_target_"]
    values = to_plain(OmegaConf.masked_copy(chosen, changed))
    settings = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return [*rest, f"{LAUNCHER}=local", *left_out], settings


def check_launcher() -> None:
    """Refuse a launcher for a single run: Hydra uses launchers only for the jobs of -m."""
    chosen = HydraConfig.get()
    if chosen.mode is RunMode.RUN and not runs_in_this_process():
        raise DllmBenchError(
            f"hydra/launcher={chosen.runtime.choices['hydra/launcher']} submits the jobs of -m, "
            "and one run without -m was requested, which is made here; add -m, or leave the "
            "launcher out."
        )


# --- errors --------------------------------------------------------------------------------------


def raise_again(self: logging.Handler, record: logging.LogRecord) -> None:
    """Raise the error that a log handler met (a closed pipe), in place of `Handler.handleError`.

    Hydra prints `--info` by logging, which otherwise prints a traceback for each line and goes on.
    """
    raise  # noqa: PLE0704 (called while the error is handled)


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
    """Return the message for an error of Hydra or OmegaConf: what was requested, what was found,
    what to do."""
    text = " ".join(re.split(r"Config search path|See https", str(error))[0].split())
    absent = getattr(error, "missing_cfg_file", None)
    unknown = re.match(r"Could not override '([^']+)'", text)
    several = re.match(r"Ambiguous value for argument '([^']+)'", text)
    unreadable = getattr(error, "override", None)
    if absent:
        group, _, name = str(absent).rpartition("/")
        listing = "docs/pieces.md" if group.startswith(PIECES) else "dllm-bench run --help"
        return unknown_name(group, name, options(group), listing=listing)
    if unknown:
        return unknown_setting(unknown[1], error.__cause__)
    if several:
        return f"{several[1]!r} gives several values; add -m to run them all."
    if unreadable:
        return f"{unreadable!r} cannot be read; write name=value, see `dllm-bench run --help`."
    return text.removesuffix(".") + "; see `dllm-bench run --help`."


def unknown_setting(name: str, cause: object) -> str:
    """Return the message for an unknown setting: the nearest name, or where all are listed."""
    key, path = (str(getattr(cause, part, name)) for part in ("key", "full_key"))
    siblings = [str(key) for key in getattr(cause, "parent_node", None) or ()]
    group, _, last = name.rpartition(".")
    pieces = pieces_by_setting(name)
    if owners := pieces.get(last):
        own = f"{group} has {', '.join(one for one in siblings if one != '_target_') or 'none'}. "
        return (
            f"The decoder in use has no setting {name!r}: {own}Choose a piece that has it, "
            f"{' or '.join(owners)}, or one of the decoder's own settings."
        )
    near = next(iter(get_close_matches(last, pieces, n=1)), None)
    of_piece = f"'{group}.{near}', which {pieces[near][-1]} has" if near else ""
    if "/" in name:
        siblings = [*GROUPS, *paths.slot_groups()]
    hint = did_you_mean(key, siblings, prefix=path.removesuffix(key))
    inner = inner_settings(getattr(cause, "parent_node", None), key, path.removesuffix(key))
    elsewhere = FOREIGN_NAMES.get(key) or of_piece or " or ".join(map(repr, inner[:NAMED]))
    if not hint and elsewhere:
        hint = f"did you mean {elsewhere}? "
    return f"No setting is called {name!r}; {hint}`dllm-bench run --cfg job` prints all settings."


def pieces_by_setting(name: str) -> dict[str, list[str]]:
    """Return, for `decoder.SLOT.NAME`, every setting that a piece of the slot has -> these pieces,
    as overrides."""
    group = name.replace(".", "/").rpartition("/")[0]
    found: dict[str, list[str]] = {}
    for piece in options(group) if group.startswith(PIECES) else ():
        for setting in read_yaml(paths.conf_file(f"{group}/{piece}.yaml")):
            found.setdefault(setting, []).append(f"{group}={piece}")
    return found


def inner_settings(node: Any, key: str, prefix: str) -> list[str]:
    """Return the dotted names of all settings called `key` in a part of the configuration, at any
    depth.

    prefix: dotted name of the part, with a dot after it.
    """
    if not OmegaConf.is_dict(node):
        return []
    parts = {str(name): node._get_node(name) for name in node}
    own = [prefix + key] if key in parts else []
    deeper = (inner_settings(parts[name], key, f"{prefix}{name}.") for name in parts)
    return [*own, *(found for names in deeper for found in names)]
