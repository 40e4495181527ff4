"""Where the files that ship with the package are: the configuration and the embedded assets.

In a checkout `conf/` is next to the package; in a wheel it is inside (`dllm_bench/conf`). The
directories of the user (results, data) are configuration, see `conf/paths`.
"""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
ASSETS = "assets/"


def conf_dir() -> Path:
    """The root of the configuration groups."""
    inside = PACKAGE / "conf"
    return inside if inside.is_dir() else PACKAGE.parent / "conf"


def assets_dir() -> Path:
    """Embedded weights, tokenizer and task data."""
    return PACKAGE / ASSETS


def place_of(source: str) -> Path:
    """The path of a source on this disk; `assets/…` means the package's own assets."""
    shipped = source.startswith(ASSETS)
    return assets_dir() / source.removeprefix(ASSETS) if shipped else Path(source).expanduser()


def options(group: str) -> list[str]:
    """The choices of a configuration group: the names of the yaml files in its folder, sorted."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))
