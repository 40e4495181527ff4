"""Where the files that ship with the package are: the configuration and the embedded assets.

In a checkout `conf/` is next to the package; in a wheel it is inside (`dllm_bench/conf`). Installed
plug-ins may have a folder `conf` of the same form, and `DLLM_BENCH_CONFIG_DIR` may name another;
where two files have one name, the package's own is read, then a plug-in's. The directories of the
user (results, data) are configuration, see `conf/paths`.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ASSETS = "assets/"
PLUGINS = "dllm_bench.plugins"
"""Entry-point group in which another package names the modules that register its classes."""
CONFIG_DIR = "DLLM_BENCH_CONFIG_DIR"
"""Environment variable that names a folder of further configuration files."""


def conf_dir() -> Path:
    """The root of the configuration groups."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


@cache
def plugin_folders() -> tuple[Path, ...]:
    """The folders of the packages that installed plug-ins are in; nothing is imported for this."""
    names = sorted({entry.module.partition(".")[0] for entry in entry_points(group=PLUGINS)})
    specs = [find_spec(name) for name in names]
    places = [spec.submodule_search_locations or () for spec in specs if spec]
    return tuple(Path(place) for folder in places for place in folder)


def further_conf_dirs() -> list[Path]:
    """Folders with configuration of other packages and of the user."""
    own = [os.environ[CONFIG_DIR]] if os.environ.get(CONFIG_DIR) else []
    folders = [*(folder / "conf" for folder in plugin_folders()), *map(Path, own)]
    return [folder.expanduser().resolve() for folder in folders if folder.is_dir()]


def conf_dirs() -> list[Path]:
    """All folders with configuration, the package's own first."""
    return [conf_dir(), *further_conf_dirs()]


def conf_file(name: str) -> Path:
    """The first configuration file with a name like `table/lopa/table4.yaml`."""
    files = [folder / name for folder in conf_dirs()]
    return next((file for file in files if file.is_file()), files[0])


def assets_dir() -> Path:
    """Embedded weights, tokenizer and task data."""
    return PACKAGE / ASSETS


def place_of(source: str) -> Path:
    """The path of a source on this disk; `assets/…` means the package's own assets."""
    shipped = source.startswith(ASSETS)
    return assets_dir() / source.removeprefix(ASSETS) if shipped else Path(source).expanduser()


def options(group: str) -> list[str]:
    """The choices of a configuration group: the names of the yaml files in its folder, sorted."""
    return sorted({path.stem for folder in conf_dirs() for path in (folder / group).glob("*.yaml")})
