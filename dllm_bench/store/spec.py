"""`RunSpec`: which run is this? Its identity is a hash over everything that can change the output.

Every key of a composed configuration is classed in `FIELDS` as part of the identity or as runtime
only (where files lie, how progress is shown); a key that is in neither list is refused, so that a
new setting cannot silently share results with an old one. Pieces are spelled out with their
defaults, inputs (items, weights) enter as content hashes taken before the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from dllm_bench import DECODING_VERSION
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import TARGET
from dllm_bench.store.inputs import resolve as resolve_here
from dllm_bench.store.upgrade import former, upgraded

Plain = dict[str, Any]
GROUPS = ("model", "decoder", "benchmark", "hardware")
SHOWN = 10  # hexadecimal digits of the identity hash in folder names


class Role(Enum):
    """What a configuration key is for."""

    IDENTITY = "identity"
    RUNTIME = "runtime"


_I, _R = Role.IDENTITY, Role.RUNTIME

FIELDS: dict[str, Role] = {
    "seed": _I,
    "limit": _I,
    "batch": _I,
    "model.name": _I,
    "model.adapter": _I,
    "model.chat": _I,
    "model.bos": _I,
    "model.dtype": _I,
    "model.attention": _I,
    "model.thinking": _I,
    "model.shifted": _I,
    "model.mask_token": _I,
    "model.merge_lora": _I,
    "model.quantization": _I,
    "model.compile": _I,
    "model.attention_form": _R,  # how the weights were trained; a decoder decides what it does
    "model.block": _R,
    "model.revision": _R,  # path, lora and their revisions enter as content hashes
    "model.path": _R,
    "model.lora": _R,
    "model.lora_revision": _R,
    "model.device": _R,  # the hardware's, with an index
    "model._target_": _I,  # a served engine, and how it is asked
    "model.engine": _I,
    "model.concurrency": _I,
    "model.temperature": _I,
    "model.body": _I,
    "model.body.**": _I,
    "model.tokenizer": _R,  # its content enters as a hash
    "model.url": _R,
    "model.key_env": _R,
    "model.timeout_s": _R,
    "model.retries": _R,
    "model.backoff_s": _R,
    "decoder.name": _R,  # a label: equal pieces are one run under any name
    "decoder.**": _I,
    "decoder.**.source": _R,  # a filter's or drafter's place; its content enters as sha256
    "decoder.**.revision": _R,
    "decoder.**.any_model": _R,  # consent
    "baseline": _I,
    "baseline.name": _R,
    "baseline.**": _I,
    "baseline.**.source": _R,
    "baseline.**.revision": _R,
    "baseline.**.any_model": _R,
    "benchmark._target_": _I,
    "benchmark.name": _I,
    "benchmark.task": _I,
    "benchmark.dataset": _I,
    "benchmark.split": _I,
    "benchmark.shots": _I,
    "benchmark.max_new_tokens": _I,
    "benchmark.primary": _I,
    "benchmark.template": _I,
    "benchmark.chat": _I,
    "benchmark.instruction": _I,
    "benchmark.stop": _I,
    "benchmark.hard_stop": _I,
    "benchmark.escape_until": _I,
    "benchmark.postprocess": _I,
    "benchmark.repeats": _I,
    "benchmark.allow_code_execution": _R,  # consent: without it there is no run
    "benchmark.data_dir": _R,  # its content enters as a hash
    "hardware.name": _I,
    "hardware.device": _I,
    "hardware.dtype": _I,
    "hardware.attention": _I,
    "hardware.quantization": _I,
    "hardware.compile": _I,
    "hardware.threads": _I,
    "hardware.branch_parallel": _I,
    "hardware.tensor_parallel": _I,
    "hardware.commit": _I,
    "hardware.replicas": _R,  # which process decodes a request changes nothing about it
    "hardware.timeout_s": _R,
    "hardware.match": _R,
    "hardware.index": _R,
    "logger.**": _R,
    "paths.**": _R,
    "profile": _R,
    "launcher": _R,
    "progress": _R,
    "jobs": _R,
    "notes": _R,
}
"""Dotted key -> role; `**` stands for any part of a key. The longest match counts."""


def role_of(key: str) -> Role:
    """The role of a dotted configuration key; a sentence when nobody classed it."""
    if key in FIELDS:
        return FIELDS[key]
    matching = [pattern for pattern in FIELDS if "**" in pattern and fnmatchcase(key, pattern)]
    if matching:
        return FIELDS[max(matching, key=len)]
    raise DllmBenchError(
        f"Configuration key {key!r} is classed neither as identity nor as runtime; mend the name, "
        "or class a new key in FIELDS of dllm_bench/store/spec.py."
    )


def leaves(plain: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every entry that is not itself a non-empty mapping."""
    for key, value in plain.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{dotted}.")
        else:
            yield dotted, value


def split(config: Mapping[str, Any]) -> dict[Role, Plain]:
    """The configuration's entries by role, nested as before."""
    sides: dict[Role, Plain] = {role: {} for role in Role}
    for key, value in leaves(config):
        if isinstance(value, Mapping) and not value:
            continue  # an empty group says nothing
        *parents, name = key.split(".")
        node = sides[role_of(key)]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return sides


def canonical(plain: Any) -> Any:
    """One form per value: no absent entries, whole floats as integers, tuples as lists."""
    if isinstance(plain, Mapping):
        kept = {str(key): canonical(value) for key, value in plain.items() if value is not None}
        return dict(sorted(kept.items()))
    if isinstance(plain, (list, tuple)):
        return [canonical(value) for value in plain]
    if isinstance(plain, float) and plain.is_integer():
        return int(plain)
    return plain


def digest(plain: Any) -> str:
    """sha256 of the canonical JSON of plain data."""
    text = json.dumps(
        canonical(plain),
        ensure_ascii=False,
        sort_keys=True,
        allow_nan=False,
        separators=(",", ":"),
    )
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class RunSpec:
    """One run. Groups are plain nested data, as configured; `inputs` are sha256 of the items,
    weights and tokenizer behind them; `runtime` are the groups no output depends on; `baseline` is
    the decoder that decodes every request too, empty without one, and then no part of the identity.
    """

    model: Plain
    decoder: Plain
    benchmark: Plain
    hardware: Plain
    seed: int = 0
    limit: int | None = None
    batch: int = 1
    inputs: Plain = field(default_factory=dict)
    decoding_version: int = DECODING_VERSION
    label: str = ""  # what the decoder is called in folder names
    runtime: Plain = field(default_factory=dict, repr=False)
    baseline: Plain = field(default_factory=dict)

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], resolve: Callable[[Plain], Plain] = resolve_here
    ) -> RunSpec:
        """The run a composed configuration (plain data) asks for.

        `resolve` spells out pieces and hardware and hashes the inputs (under the key "inputs").
        """
        split(config)  # every key must be classed
        absent = [name for name in GROUPS if not config.get(name)]
        if absent:
            raise DllmBenchError(
                f"The configuration has no {', '.join(absent)}; choose one, for example "
                f"{absent[0]}=NAME."
            )
        resolved = resolve(dict(config))
        own = {f.name for f in fields(cls)} & resolved.keys() - {"decoder"}
        decoder = dict(resolved["decoder"])
        label = decoder.pop("name", None) or _class_name(decoder)
        runtime = {key: config[key] for key in config if key not in own | {"decoder"}}
        groups = {name: resolved[name] for name in own if resolved[name] is not None}
        return cls(decoder=decoder, label=label, runtime=runtime, **groups)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunSpec:
        """Inverse of `to_plain`; also reads what was stored before registered names."""
        plain = upgraded(plain)
        known = {f.name for f in fields(cls)}
        strange = sorted(set(plain) - known)
        if strange:
            raise DllmBenchError(
                f"The stored run has unknown fields {', '.join(strange)}; it was written by a "
                "newer version, update dllm-bench."
            )
        return cls(**plain)

    def identity(self) -> Plain:
        """All that can change the output, in canonical form."""
        names = (*GROUPS, "baseline", "seed", "limit", "batch")
        groups = {name: getattr(self, name) for name in names}
        whole = {"inputs": self.inputs, "decoding_version": self.decoding_version}
        return dict(canonical({**split(groups)[Role.IDENTITY], **whole}))

    def to_plain(self) -> Plain:
        """All but `runtime`, which belongs to a machine."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "runtime"}
        return dict(json.loads(json.dumps(plain)))

    @cached_property
    def identity_hash(self) -> str:
        """sha256 over `identity`."""
        return digest(self.identity())

    @property
    def former_hash(self) -> str:
        """The hash the run had before registered names; runs stored then are found by it."""
        return digest(former(self.identity()))

    @property
    def of_baseline(self) -> RunSpec:
        """The run of the baseline alone."""
        decoder = {key: value for key, value in self.baseline.items() if key != "name"}
        return replace(self, decoder=decoder, label=self.baseline.get("name", ""), baseline={})

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
        benchmark, model = (slug(str(group["name"])) for group in (self.benchmark, self.model))
        return f"{benchmark}/{model}/{slug(self.label)}-{self.short}"


def slug(name: str) -> str:
    """A folder name: letters, digits, dot, dash and underscore only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def _class_name(plain: Mapping[str, Any]) -> str:
    return str(plain.get(TARGET, "decoder")).rpartition(".")[2].lower()
