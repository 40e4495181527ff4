"""Where the files that ship with the package are: the configuration and the embedded assets.

In a checkout `conf/` is next to the package; in a wheel it is inside (`dllm_bench/conf`). Installed
plug-ins may have a folder `conf` of the same form, and `DLLM_BENCH_CONFIG_DIR` may name another;
where two files have one name, the package's own is read, then a plug-in's. The directories of the
user (results, data) are configuration, see `conf/paths`.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError

PACKAGE = Path(__file__).resolve().parent
ASSETS = "assets/"
IMPORTED = "imported/"
"""Begins the source of a model that `dllm-bench import` wrote into this user's cache folder."""
PLUGINS = "dllm_bench.plugins"
"""Entry-point group in which another package names the modules that register its classes."""
CONFIG_DIR = "DLLM_BENCH_CONFIG_DIR"
"""Environment variable that names a folder of further configuration files."""
GROUPS = ("model", "decoder", "benchmark", "hardware", "logger", "paths", "hydra/launcher")
"""The configuration groups that a run has a choice of."""
MAX_YAML_BYTES, MAX_YAML_DEPTH, MAX_YAML_ALIASES = 2**18, 40, 20
"""Of a configuration file that is not the package's own. OmegaConf copies what an alias names, so
the number of aliases bounds its memory."""
SHOWN_CHARS = 100  # characters of a path in an error message


def conf_dir() -> Path:
    """Return the root of the configuration groups."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


@cache
def plugin_folders() -> tuple[Path, ...]:
    """Return the folders of the packages that installed plug-ins are in; nothing is imported for
    this."""
    names = sorted({entry.module.partition(".")[0] for entry in entry_points(group=PLUGINS)})
    specs = [find_spec(name) for name in names]
    places = [spec.submodule_search_locations or () for spec in specs if spec]
    return tuple(Path(place) for folder in places for place in folder)


def further_conf_dirs() -> list[Path]:
    """Return the folders with configuration of other packages and of the user."""
    folders = [folder / "conf" for folder in plugin_folders()]
    own = os.environ.get(CONFIG_DIR)
    if own and not expanded(own).is_dir():
        raise DllmBenchError(
            f"{CONFIG_DIR}={own} is not a folder; name one that holds yaml files as conf/ does, "
            "for example DIR/decoder/mine.yaml, or unset it."
        )
    places = [*folders, *([expanded(own)] if own else [])]
    found = [folder.resolve() for folder in places if folder.is_dir()]
    for folder in found:
        check_yaml_files(folder)
    return found


@cache
def check_yaml_files(folder: Path) -> None:
    """Refuse yaml files that cannot be parsed, or whose aliases or nesting would take for ever."""
    import yaml  # only for folders that are not the package's own

    for file in sorted(folder.rglob("*.yaml")):
        problem = ""
        if not file.is_file() or file.stat().st_size > MAX_YAML_BYTES:
            problem = f"it is no regular file of at most {MAX_YAML_BYTES:,} bytes"
        else:
            try:
                problem = _excess(yaml.parse(file.read_text(encoding="utf-8"), yaml.SafeLoader))
            except (yaml.YAMLError, ValueError) as error:
                problem = " ".join(str(error).split())
        if problem:
            raise DllmBenchError(
                f"The configuration file {file} cannot be read: {problem}; correct the file."
            )


def _excess(events: Iterable[Any]) -> str:
    """Return what a yaml file has too much of; empty if nothing."""
    depth = aliases = 0
    for event in events:
        kind = type(event).__name__
        depth += kind.endswith("StartEvent") - kind.endswith("EndEvent")
        aliases += kind == "AliasEvent"
        if depth > MAX_YAML_DEPTH:
            return f"it is nested more than {MAX_YAML_DEPTH} deep"
        if aliases > MAX_YAML_ALIASES:
            return f"it has more than {MAX_YAML_ALIASES} aliases"
    return ""


def expanded(path: str | Path) -> Path:
    """Return a path that a user gave, with the home folder in place of `~`.

    DllmBenchError if there is no such home, or if the system takes no path of that length.
    """
    try:
        place = Path(path).expanduser()
        place.exists()
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            return place
        why = error.strerror if isinstance(error, OSError) else error
        shown = str(path) if len(str(path)) <= SHOWN_CHARS else f"{str(path)[:SHOWN_CHARS]}…"
        raise DllmBenchError(
            f"The path {shown} cannot be used ({why}); name another one."
        ) from None
    return place


def conf_dirs() -> list[Path]:
    """Return all folders with configuration, the package's own first."""
    return [conf_dir(), *further_conf_dirs()]


def conf_file(name: str) -> Path:
    """Return the first configuration file with a name like `table/lopa/table4.yaml`."""
    files = [folder / name for folder in conf_dirs()]
    return next((file for file in files if file.is_file()), files[0])


def assets_dir() -> Path:
    """Return the folder of embedded weights, tokenizer and task data."""
    return PACKAGE / ASSETS


def place_of(source: str) -> Path:
    """Return the path of a source on this disk; `assets/…` means the package's own assets,
    `imported/…` the models in this user's cache folder.
    """
    if source.startswith(ASSETS):
        return assets_dir() / source.removeprefix(ASSETS)
    return user_folder() / source if source.startswith(IMPORTED) else expanded(source)


def user_folder() -> Path:
    """Return where this user's caches are."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dllm-bench"
    except RuntimeError:  # without a home directory nothing is cached
        return Path(os.devnull) / "dllm-bench"


def cache_file(results: Path, name: str) -> Path:
    """Return the path of a file in this user's cache folder that belongs to a results directory."""
    place = hashlib.sha256(os.path.realpath(results).encode()).hexdigest()[:16]
    return user_folder() / place / name


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a yaml file as plain data, with libyaml where it is installed: ten times as fast."""
    import yaml  # most commands find all settings in a cache

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def read_settings(texts: Iterable[str], option: str) -> dict[str, Any]:
    """Return settings of an option, written NAME=VALUE, as plain data: values are read as yaml."""
    import yaml

    settings = dict[str, Any]()
    for text in texts:
        name, equals, value = text.partition("=")
        try:
            settings[name] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not equals:
            raise DllmBenchError(
                f"{option} {text} sets nothing that can be read; write NAME=VALUE."
            )
    return settings


def hub_cache() -> Path:
    """Return the folder in which the hub's client keeps what it downloaded."""
    from huggingface_hub import constants  # slow to import

    return Path(constants.HF_HUB_CACHE).expanduser()


@cache
def default_pieces(decoder: str) -> Mapping[str, str]:
    """Return {slot: the piece that the decoder's own yaml chooses}."""
    defaults = read_yaml(conf_file(f"decoder/{decoder}.yaml")).get("defaults", ())
    choices = (pair for entry in defaults if not isinstance(entry, str) for pair in entry.items())
    return {slot.removeprefix("override "): piece for slot, piece in choices}


def slot_groups() -> list[str]:
    """Return the configuration groups of a decoder's pieces, such as `decoder/score`."""
    slots = {path.name for folder in conf_dirs() for path in folder.glob("decoder/*/")}
    return [f"decoder/{slot}" for slot in sorted(slots)]


def options(group: str) -> list[str]:
    """Return the choices of a configuration group: the names of the yaml files in its folder,
    sorted."""
    return sorted({path.stem for folder in conf_dirs() for path in (folder / group).glob("*.yaml")})
