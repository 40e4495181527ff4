"""`RunSpec`: the specification of a run. Its identity is a hash over everything that can change the
output.

The field that declares a setting says whether it is part of the identity or of the runtime only
(where files lie, how progress is shown). A key that no field declares is refused, so that a new
setting cannot silently share results with an old one. Pieces are written out with their
defaults; inputs (items, weights) enter as content hashes that are taken before the run.

`differing_settings` and its helpers find the settings in which runs differ, for lists, comparisons
and pages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

from dllm_bench import DECODING_VERSION
from dllm_bench.core.declared import Count, made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import TARGET
from dllm_bench.store import groups
from dllm_bench.store.files import check_plain
from dllm_bench.store.inputs import resolve as resolve_here

NAME_CHARS = 200  # no stored run has a longer name: it could not be a folder's
TYPED = {
    **{name: groups.KINDS[name] for name in groups.GROUPS if name in groups.KINDS},
    "runtime": groups.RunConfig,
}
SHOWN = 10  # hexadecimal digits of the identity hash in folder names


def leaves(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every entry that is not itself a non-empty mapping."""
    for key, value in plain.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def split(config: Mapping[str, Any]) -> dict[groups.Role, groups.Plain]:
    """Return the configuration's entries by role, nested as before."""
    sides: dict[groups.Role, groups.Plain] = {role: {} for role in groups.Role}
    for key, value in leaves(config):
        if isinstance(value, Mapping) and not value:
            continue  # an empty group sets nothing
        *parents, name = key.split(".")
        node = sides[groups.role_of(key)]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return sides


def canonical(plain: Any) -> Any:
    """Return a canonical form: no absent entries, whole floats as integers, tuples as lists."""
    if isinstance(plain, Mapping):
        kept = {str(key): canonical(value) for key, value in plain.items() if value is not None}
        return dict(sorted(kept.items()))
    if isinstance(plain, (list, tuple)):
        return [canonical(value) for value in plain]
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    return plain


def digest(plain: Any) -> str:
    """Return sha256 of the canonical JSON of plain data."""
    text = json.dumps(
        canonical(plain), ensure_ascii=False, sort_keys=True, allow_nan=False, separators=(",", ":")
    )
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class RunSpec:
    """One run, as plain nested data."""

    model: groups.ModelGroup
    decoder: groups.Plain  # its pieces, with every default written out
    benchmark: groups.BenchmarkGroup
    hardware: groups.Hardware
    seed: groups.Seed = 0  # for the random numbers of every request
    limit: Count | None = None  # number of items; None for all; not in the identity
    batch: groups.Items = 1  # requests in one forward
    inputs: groups.Plain = field(default_factory=dict)  # sha256 of items, weights and tokenizer
    decoding_version: int = DECODING_VERSION  # raised if equal settings give other tokens
    label: str = ""  # the decoder's label in folder names
    runtime: groups.RunConfig = field(default_factory=lambda: groups.NOTHING_SET, repr=False)
    """Settings that cannot change the output."""
    baseline: groups.Plain = field(default_factory=dict)
    """The decoder that decodes every request too; empty without one, then not in the identity."""
    parent: groups.Plain = field(default_factory=dict)
    """The model that reads the texts; empty without one, then not in the identity."""
    measure_kl: bool = False  # whether forwards are compared with uncached ones; in the identity
    # where they are, since no sample has a time then

    def __post_init__(self) -> None:
        for name, kind in TYPED.items():  # plain data has the types that its settings declare
            if type(given := getattr(self, name)) is not kind:
                object.__setattr__(self, name, kind(given))

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, Any],
        resolve: Callable[[groups.RunConfig], groups.Plain] = resolve_here,
    ) -> RunSpec:
        """Return the run of a composed configuration: plain data, or already typed.

        resolve: writes out pieces and hardware and adds the hashes of the inputs under "inputs".
        """
        split(config)  # refuses a key without a role
        missing = [name for name in groups.GROUPS if not config.get(name)]
        if missing:
            raise DllmBenchError(
                f"The configuration has no {', '.join(missing)}; choose one, for example "
                f"{missing[0]}=NAME."
            )
        resolved = resolve(
            config if isinstance(config, groups.RunConfig) else groups.RunConfig(config)
        )
        own = {f.name for f in fields(cls)} & resolved.keys() - {"decoder"}
        decoder = dict(resolved["decoder"])
        class_name = str(decoder.get(TARGET, "decoder")).rpartition(".")[2].lower()
        label = decoder.pop("name", None) or class_name
        runtime = {key: config[key] for key in config if key not in own | {"decoder"}}
        parts = {name: resolved[name] for name in own if resolved[name] is not None}
        try:
            check_plain({**parts, "decoder": decoder})
            run = cls(decoder=decoder, label=label, runtime=groups.RunConfig(runtime), **parts)
            run.check_names()
        except ValueError as error:
            raise DllmBenchError(
                f"The configuration has {error}, which no stored run can have; correct the setting."
            ) from error
        return run

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], source: str = "The stored run") -> RunSpec:
        """Read what `to_plain` returned; ValueError for values of other types. `source` names the
        file in an error."""
        unknown = sorted(set(plain) - {f.name for f in fields(cls)})
        if unknown:
            raise DllmBenchError(
                f"{source} has unknown fields {', '.join(unknown)}; it was written by a "
                "newer version, update dllm-bench."
            )
        try:
            run = made_from(cls, plain)
            _ = run.identity_hash
        except DllmBenchError as error:
            raise ValueError(str(error)) from error
        run.check_names()
        if not isinstance(run.inputs.get("dataset", ""), str):
            raise ValueError("inputs.dataset is not a text")
        return run

    def check_names(self) -> None:
        """Raise ValueError if its model, benchmark or decoder has no name, or too long a one."""
        names = (self.model.name, self.benchmark.name, self.label)
        if not all(isinstance(name, str) and len(name) <= NAME_CHARS for name in names):
            raise ValueError(
                "a model, benchmark or decoder without a name, or with one of more than "
                f"{NAME_CHARS} characters"
            )

    def identity(self) -> groups.Plain:
        """Return everything that can change the output, in canonical form."""
        names = (*groups.GROUPS, "baseline", "parent", "seed", "batch")
        parts = {name: getattr(self, name) for name in names}
        parts["measure_kl"] = self.measure_kl or None  # None: not in the hash
        whole = {"inputs": self.inputs, "decoding_version": self.decoding_version}
        return dict(canonical({**split(parts)[groups.Role.IDENTITY], **whole}))

    def to_plain(self) -> groups.Plain:
        """Return every field but `runtime`, which belongs to a machine."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "runtime"}
        return dict(json.loads(json.dumps(plain, default=dict)))

    @cached_property
    def identity_hash(self) -> str:
        """sha256 over `identity`."""
        return digest(self.identity())

    @property
    def repeats(self) -> int:
        """How often every item is decoded."""
        return self.benchmark.repeats

    @property
    def of_baseline(self) -> RunSpec:
        """The run of the baseline alone."""
        decoder = {key: value for key, value in self.baseline.items() if key != "name"}
        return replace(
            self, decoder=decoder, label=groups.setting_in(self.baseline, "name", ""), baseline={}
        )

    @property
    def short(self) -> str:
        """The identity hash as shown in folder names."""
        return self.identity_hash[:SHOWN]

    def __hash__(self) -> int:
        return hash(self.identity_hash)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunSpec) and self.identity_hash == other.identity_hash

    @property
    def folder(self) -> str:
        """`<benchmark>/<model>/<decoder>-<hash>` below the runs folder."""
        names = (self.benchmark.name, self.model.name, self.label)
        return "/".join(map(slug, names)) + f"-{self.short}"


def slug(name: str) -> str:
    """Return a folder name: letters, digits, dot, dash and underscore only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


Settings = Mapping[str, str]
"""Dotted name of a setting -> its value as text."""


def flat_settings(spec: RunSpec) -> dict[str, str]:
    """Return all settings of a run that can change its output."""
    return {setting_name(key): setting_value(key, value) for key, value in leaves(spec.identity())}


def differing_settings(specs: Iterable[RunSpec]) -> dict[str, str]:
    """Return {short hash: the settings in which a run differs from others of its name}."""
    return differing(
        (spec.short, (spec.label, spec.model.name, spec.benchmark.name), flat_settings(spec))
        for spec in specs
    )


def differing(runs: Iterable[tuple[str, Hashable, Settings]]) -> dict[str, str]:
    """Return (hash, name, settings) of runs -> hash: settings that not all runs of its name
    share."""
    alike: dict[Hashable, dict[str, Settings]] = {}
    for short, name, settings in runs:
        alike.setdefault(name, {})[short] = settings
    apart = dict[str, str]()
    for group in alike.values():
        rows = setting_rows(list(group.values()))
        for index, short in enumerate(group):
            own = (f"{name} {values[index]}" for name, *values in rows if values[index])
            apart[short] = ", ".join(own)
    return apart


def setting_rows(runs: Sequence[Settings]) -> list[tuple[str, ...]]:
    """Return (setting, its value in each run) for every setting whose value not all runs share.

    The value is empty where a run does not have the setting.
    """
    names = dict.fromkeys(name for settings in runs for name in settings)
    rows = [(name, *(settings.get(name, "") for settings in runs)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def setting_name(key: str) -> str:
    """Return the dotted name without the parts that are obvious: the decoder, and the key of a
    piece."""
    return key.removesuffix(f".{TARGET}").removeprefix("decoder.")


def setting_value(key: str, value: Any) -> str:
    """Return a setting's value as text; a piece by its name without the kind, a SHA-256 hash cut
    short."""
    text = "none" if value is None else str(value)
    if key.endswith(TARGET):
        return text.rpartition(".")[2]
    is_hash = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:12] + "…" if is_hash else text
