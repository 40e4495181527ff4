"""Cache of composed and of resolved settings, for each results directory.

Composing a run's configuration needs Hydra, instantiating its decoder needs torch, and hashing its
items needs generating them. For a table this takes seconds, with the same result every time.
`SettingsCache` keeps both results as long as their dependencies are unchanged: the content of conf
and of the package, the environment variables that conf reads, the versions of the libraries, and
the files that the settings name. Results that depend on anything else (devices of this machine, the
hub's cache, original data) are computed every time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dllm_bench.paths import (
    PACKAGE,
    conf_dir,
    further_conf_dirs,
    options,
    plugin_folders,
    read_yaml,
)
from dllm_bench.store import inputs
from dllm_bench.store.cache import DerivedCache, fingerprints
from dllm_bench.store.groups import KINDS
from dllm_bench.store.provenance import packages
from dllm_bench.store.spec import Role, split

KIND = "settings"
OMEGACONF = "omegaconf"  # records do not store its version
SKIPPED = ("assets", "__pycache__")  # assets count only if settings name them; the other is derived
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)")
SIMPLE_PATH = re.compile(r"\$\{oc\.env:(\w+),(null|results)\}")
Plain = dict[str, Any]
Compose = Callable[[Sequence[str]], Mapping[str, Any]]


class SettingsCache:
    """`compose` and `inputs.resolve`, computed once as long as their dependencies are unchanged.

    folder: the results directory; compose: overrides -> the composed configuration.
    """

    def __init__(self, folder: Path, compose: Compose) -> None:
        self._compose = compose
        self._cache = DerivedCache(folder, KIND, made_by())
        self.save = self._cache.save

    def compose(self, overrides: Sequence[str]) -> Plain:
        """Return the configuration for `overrides`, as plain data."""
        key = f"compose {json.dumps(list(overrides))}"
        return dict(self.cached(key, lambda: dict(self._compose(overrides))))

    def cached(self, key: str, make: Callable[[], Any], files: Sequence[Path] = ()) -> Any:
        """Return the result of `make`: plain data that depends only on conf, the package and
        `files`."""
        state = fingerprints(files)
        value = self._cache.get(key, state)
        if value is None:
            value = make()
            self._cache.put(key, state, value)
        return value

    def resolve(self, config: Plain) -> Plain:
        """Return the resolved configuration, see `inputs.resolve`."""
        files = inputs.files_of(config)
        if files is None:
            return inputs.resolve(config)
        text = json.dumps(config)
        key, state = f"resolve {hashlib.sha256(text.encode()).hexdigest()}", fingerprints(files)
        changed = self._cache.get(key, state)
        if changed is None:
            groups = inputs.resolve(config).items()
            changed = {name: group for name, group in groups if group != config.get(name)}
            self._cache.put(key, state, changed)
        return {**config, **changed}


def on_this_machine(group: str, stored: Mapping[str, Any], compose: Compose) -> Plain:
    """Return settings of a stored run that are safe to use here, even if a stranger wrote them.

    Settings that affect the output are those stored. Locations of files, server addresses and
    consents come from this machine's configuration of that name, if there is one.
    """
    chosen: Any = KINDS[group](stored)
    is_object = group == "model" and chosen.is_object  # it only shares a name
    known = chosen.name in options(group) and not is_object
    own = compose([f"{group}={chosen.name}"])[group] if known else {}
    identity = split({group: stored})[Role.IDENTITY].get(group, {})
    return {**identity, **split({group: own})[Role.RUNTIME].get(group, {})}


def made_by() -> list[str]:
    """Return a hash of conf, the package and plug-ins, the environment variables conf reads,
    library versions.
    """
    hashed, variables = hashlib.sha256(), set[str]()
    for root in (conf_dir(), PACKAGE, *further_conf_dirs(), *plugin_folders()):
        for path in _texts(root):
            content = path.read_bytes()
            hashed.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
            if path.suffix == ".yaml":
                variables |= set(VARIABLE.findall(content.decode()))
    return [
        hashed.hexdigest(),
        *(f"{name}={os.environ.get(name)!r}" for name in sorted(variables)),
        *(f"{name} {installed}" for name, installed in packages().items()),
        f"omegaconf {version(OMEGACONF)}",
        platform.python_version(),
    ]


def _texts(root: Path) -> list[Path]:
    """Return all files below `root`, except for those in `SKIPPED` folders."""
    paths = []
    for folder, names, files in os.walk(root):
        names[:] = [name for name in names if name not in SKIPPED]
        paths += [Path(folder, file) for file in files]
    return sorted(paths)


def default_paths() -> Plain | None:
    """Return the `paths` group as composed without overrides, read without Hydra; None if that
    fails.

    A value must be an environment variable with the default `null` or `results`.
    """
    run = read_yaml(conf_dir() / "run.yaml")
    chosen = [entry["paths"] for entry in run["defaults"] if "paths" in entry]
    if len(chosen) != 1 or "paths" in run:
        return None
    group = read_yaml(conf_dir() / "paths" / f"{chosen[0]}.yaml")
    paths: Plain = {}
    for name, text in group.items():
        variable = SIMPLE_PATH.fullmatch(str(text))
        if not variable:
            return None
        instead = None if variable[2] == "null" else variable[2]
        paths[name] = os.environ.get(variable[1], instead)
    return paths
