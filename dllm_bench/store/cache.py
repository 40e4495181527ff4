"""Caches of derived values, for each results directory: a value is valid as long as the fingerprint
of its files is unchanged.

Each kind of values has a file. It lies in this user's cache folder: a results directory may come
from a stranger, and some are read-only. A fingerprint identifies one state of files (path, time of
change, size, inode). Everything else that a value depends on is in `made_by`; a file with another
`made_by` is ignored. The file may be deleted at any time. If it is damaged or cannot be written,
values are computed again. If several processes save at once, the values of the last one stay.

`SettingsCache` keeps composed and resolved settings. Composing a run's configuration needs Hydra,
instantiating its decoder needs torch, and hashing its items needs generating them. For a table this
takes seconds, with the same result every time. The results depend on the content of conf and of the
package, the environment variables that conf reads, the versions of the libraries, and the files
that the settings name. Those that depend on anything else (devices of this machine, the hub's
cache, original data) are computed every time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.output import strike_out
from dllm_bench.paths import PACKAGE, cache_file, conf_dirs, options, plugin_folders, read_yaml
from dllm_bench.store import inputs
from dllm_bench.store.files import lstat, stored_bytes, write_atomic
from dllm_bench.store.groups import KINDS, Plain, Role, RunConfig
from dllm_bench.store.provenance import installed_version, packages
from dllm_bench.store.spec import digest, split

Fingerprint = list[Any]
Compose = Callable[[Sequence[str]], Mapping[str, Any]]


class DerivedCache:
    """Values by key, each with the fingerprint of the files it was derived from. Only `save` writes
    the file.

    results: the results directory; kind: name of this kind of values; made_by: dependencies of all
    values of the kind (versions, names of columns).
    """

    def __init__(self, results: Path, kind: str, made_by: Sequence[str]) -> None:
        self.path, self._made_by = cache_file(results, f"{kind}.json"), digest(list(made_by))
        self._values = self._read()
        self._has_new = False

    def _read(self) -> dict[str, tuple[str, str]]:
        """Return key -> (fingerprint, value), both as JSON, since few of them are needed."""
        with suppress(DllmBenchError, ValueError, LookupError, TypeError, AttributeError):
            plain = json.loads(stored_bytes(self.path) or b"{}")
            if plain["made_by"] == self._made_by:
                return {key: (state, value) for key, (state, value) in plain["values"].items()}
        return {}

    def get(self, key: str, state: Fingerprint) -> Any:
        """Return a copy of the value under `key`; None if there is none with this fingerprint."""
        stored, value = self._values.get(key, ("", ""))
        return json.loads(value) if stored == json.dumps(state) else None

    def put(self, key: str, state: Fingerprint, value: Any) -> None:
        """Keep `value`, unless JSON would change it (a tuple, for example) or it holds a secret."""
        text = json.dumps(value)
        if json.loads(text) == value and strike_out(text) == text:
            self._values[key] = json.dumps(state), text
            self._has_new = True

    def known(self) -> list[str]:
        """Return the keys of all values, valid or not."""
        return sorted(self._values)

    def save(self, keep: Callable[[str], bool] = bool) -> None:
        """Write the file if values are new, or if `keep` refuses keys, which are removed. It is not
        an error if the file cannot be written.
        """
        kept = {key: value for key, value in self._values.items() if keep(key)}
        if not self._has_new and len(kept) == len(self._values):
            return
        self._values, self._has_new = kept, False
        with suppress(DllmBenchError, OSError):
            text = json.dumps({"made_by": self._made_by, "values": kept})
            write_atomic(self.path, text, durable=False)


def fingerprint(file: Path) -> Fingerprint:
    """Return the time of change (ns), size (bytes) and inode of a file; empty without one."""
    found = lstat(file)
    return [found.st_mtime_ns, found.st_size, found.st_ino] if found else []


def fingerprints(paths: Iterable[Path]) -> Fingerprint:
    """Return the path and fingerprint of every file at or below `paths`; links are followed."""
    files = {
        file.resolve()
        for path in paths
        for file in (path.rglob("*") if path.is_dir() else [path])
        if not file.is_dir()
    }
    return [[str(file), *fingerprint(file)] for file in sorted(files)]


# --- settings -------------------------------------------------------------------------------------

KIND = "settings"
SKIPPED = ("assets", "__pycache__")  # assets count only if settings name them; the other is derived
VARIABLE = re.compile(r"\$\{oc\.env:(\w+)")
SIMPLE_PATH = re.compile(r"\$\{oc\.env:(\w+),(null|results)\}")


class SettingsCache:
    """`compose` and `inputs.resolve`, computed once as long as their dependencies are unchanged.

    The end of a `with` block writes the file, even if an error or a signal ends it.

    folder: the results directory; compose: overrides -> the composed configuration.
    """

    def __init__(self, folder: Path, compose: Compose) -> None:
        self._compose = compose
        self._cache = DerivedCache(folder, KIND, made_by())
        self.save = self._cache.save

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.save()

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

    def resolve(self, config: RunConfig) -> Plain:
        """Return the resolved configuration, see `inputs.resolve`."""
        files = inputs.files_of(config)
        if files is None:
            return inputs.resolve(config)

        def changed() -> Plain:
            groups = inputs.resolve(config).items()
            return {name: group for name, group in groups if group != config.get(name)}

        digits = hashlib.sha256(json.dumps(dict(config)).encode()).hexdigest()
        return {**config, **self.cached(f"resolve {digits}", changed, files)}


def on_this_machine(group: str, stored: Mapping[str, Any], compose: Compose) -> Plain:
    """Return settings of a stored run that are safe to use here, even if a stranger wrote them.

    Settings that affect the output are those stored. Locations of files, server addresses and
    consents come from this machine's configuration of that name, if there is one; a split or a data
    set may be a part of the stored name.
    """
    chosen: Any = KINDS[group](stored)
    is_object = group == "model" and chosen.is_object  # it only shares a name
    without_split = chosen.name.removesuffix(f"_{stored.get('split')}")
    named = [chosen.name, without_split, f"deepspec_{stored.get('dataset')}"]
    known = [] if is_object else [name for name in named if name in options(group)]
    own = compose([f"{group}={known[0]}"])[group] if known else {}
    identity = split({group: stored})[Role.IDENTITY].get(group, {})
    return {**identity, **split({group: own})[Role.RUNTIME].get(group, {})}


def made_by() -> list[str]:
    """Return a hash of conf, the package and plug-ins, the environment variables conf reads,
    library versions.
    """
    hashed, variables = hashlib.sha256(), set[str]()
    for root in (*conf_dirs(), PACKAGE, *plugin_folders()):
        for path in _texts(root):
            content = path.read_bytes()
            hashed.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
            if path.suffix == ".yaml":
                variables |= set(VARIABLE.findall(content.decode()))
    return [
        hashed.hexdigest(),
        *(f"{name}={os.environ.get(name)!r}" for name in sorted(variables)),
        *(f"{name} {installed}" for name, installed in packages().items()),
        f"omegaconf {installed_version('omegaconf')}",  # records do not store it
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
    group = read_yaml(conf_dirs()[0] / "paths/default.yaml")  # the package's own
    found = {name: SIMPLE_PATH.fullmatch(str(text)) for name, text in group.items()}
    if not all(found.values()):
        return None
    instead = {"null": None, "results": "results"}
    return {name: os.environ.get(one[1], instead[one[2]]) for name, one in found.items() if one}
