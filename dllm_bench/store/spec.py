"""`RunSpec`: which run this is. Its identity is a hash over everything that can change the output.

`FIELDS` says of every key of a composed configuration whether it is part of the identity or of the
runtime only (where files lie, how progress is shown). A key that is not listed is refused, so that
a new setting cannot silently share results with an old one. Pieces are written out with their
defaults; inputs (items, weights) enter as content hashes that are taken before the run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from fnmatch import fnmatchcase
from functools import cache, cached_property
from typing import Annotated, Any

from dllm_bench import DECODING_VERSION
from dllm_bench.core.declared import Count, Range, fits, in_words, made_from
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.registry import TARGET
from dllm_bench.store.checked import check_plain
from dllm_bench.store.inputs import resolve as resolve_here

Plain = dict[str, Any]
GROUPS = ("model", "decoder", "benchmark", "hardware")
NAME_CHARS = 200  # a longer name is of no stored run: it would be of no folder
READ: dict[str, dict[str, Any]] = {
    "model": {"path": str | None, "concurrency": Count},
    "benchmark": {"repeats": Annotated[int, Range(0, 10**6)] | None},
    "hardware": {"name": str, "device": str, "branch_parallel": Annotated[int, Range(1, 2**10)]},
    "inputs": {"dataset": str},
}
"""Group -> its settings that are read from stored runs as more than text."""
SHOWN = 10  # hexadecimal digits of the identity hash in folder names


class Role(Enum):
    """Whether a configuration key can change the output of a run."""

    IDENTITY = "identity"  # it can, and enters the hash
    RUNTIME = "runtime"  # it cannot


_I, _R = Role.IDENTITY, Role.RUNTIME

FIELDS: dict[str, Role] = {
    "seed": _I,
    "limit": _R,  # how many items: a larger number continues the same run
    "batch": _I,
    "measure_kl": _I,
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
    "model.attention_form": _R,  # of training; the decoder decides which attention is used
    "model.block": _R,
    "model.revision": _R,  # path, lora and their revisions enter as content hashes
    "model.path": _R,
    "model.lora": _R,
    "model.lora_revision": _R,
    "model.device": _R,  # that of the hardware, with an index
    "model._target_": _I,  # a served engine, and the settings of its requests
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
    "decoder.**.source": _R,  # path of a filter or drafter; its content enters as sha256
    "decoder.**.revision": _R,
    "decoder.**.any_model": _R,  # consent
    "decoder.**.short": _R,  # consent to a short last block: without it there is no run
    "baseline": _I,
    "baseline.name": _R,
    "baseline.**": _I,
    "baseline.**.source": _R,
    "baseline.**.revision": _R,
    "baseline.**.any_model": _R,
    "baseline.**.short": _R,
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
    "hardware.replicas": _R,  # a sample is the same whichever process decodes it
    "hardware.timeout_s": _R,
    "hardware.match": _R,
    "hardware.index": _R,
    "logger.**": _R,
    "paths.**": _R,
    "profile": _R,
    "launcher": _R,
    "provenance.diff": _R,
    "progress": _R,
    "jobs": _R,
    "max_judge_errors": _R,  # a sample that could not be graded has no score, whatever the limit
    "retry_errors": _R,
    "notes": _R,
}
"""Dotted key -> role; `**` matches any part of a key. The longest match counts."""


@cache
def role_of(key: str) -> Role:
    """The role of a dotted configuration key; raises DllmBenchError if it is not in `FIELDS`."""
    if key in FIELDS:
        return FIELDS[key]
    matching = [pattern for pattern in FIELDS if "**" in pattern and fnmatchcase(key, pattern)]
    if matching:
        return FIELDS[max(matching, key=len)]
    raise DllmBenchError(
        f"The setting {key!r} was added, and nothing in a run reads it; correct the name or "
        "leave it out: `dllm-bench run --cfg job` prints all settings."
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
            continue  # an empty group sets nothing
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
    """One run, as plain nested data."""

    model: Plain  # which weights and how they are computed with, or a served engine
    decoder: Plain  # its pieces, with every default written out
    benchmark: Plain  # task, prompts and grading
    hardware: Plain  # class of device, dtype, threads, processes
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0  # of the random numbers of every request
    limit: Count | None = None  # number of items; None for all; not in the identity
    batch: Annotated[int, Range(1, 2**20)] = 1  # requests in one forward
    inputs: Plain = field(default_factory=dict)  # sha256 of items, weights and tokenizer
    decoding_version: int = DECODING_VERSION  # raised when the same settings give other tokens
    label: str = ""  # what the decoder is called in folder names
    runtime: Plain = field(default_factory=dict, repr=False)  # groups that cannot change the output
    baseline: Plain = field(default_factory=dict)
    """The decoder that decodes every request too; empty without one, then not in the identity."""
    measure_kl: bool = False  # whether forwards are compared with uncached ones; in the identity
    # where they are, since no sample has a time then

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], resolve: Callable[[Plain], Plain] = resolve_here
    ) -> RunSpec:
        """The run of a composed configuration (plain data).

        resolve: writes out pieces and hardware and adds the hashes of the inputs under "inputs".
        """
        split(config)  # refuses a key without a role
        missing = [name for name in GROUPS if not config.get(name)]
        if missing:
            raise DllmBenchError(
                f"The configuration has no {', '.join(missing)}; choose one, for example "
                f"{missing[0]}=NAME."
            )
        resolved = resolve(dict(config))
        own = {f.name for f in fields(cls)} & resolved.keys() - {"decoder"}
        decoder = dict(resolved["decoder"])
        label = decoder.pop("name", None) or _class_name(decoder)
        runtime = {key: config[key] for key in config if key not in own | {"decoder"}}
        groups = {name: resolved[name] for name in own if resolved[name] is not None}
        try:
            check_plain({**groups, "decoder": decoder})
        except ValueError as error:
            raise DllmBenchError(
                f"The configuration has {error}, which no stored run can have; correct the setting."
            ) from error
        return cls(decoder=decoder, label=label, runtime=runtime, **groups)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RunSpec:
        """Inverse of `to_plain`; raises ValueError for values of other types."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(plain) - known)
        if unknown:
            raise DllmBenchError(
                f"The stored run has unknown fields {', '.join(unknown)}; it was written by a "
                "newer version, update dllm-bench."
            )
        run = made_from(cls, plain)
        names = (run.model.get("name"), run.benchmark.get("name"), run.label)
        if not all(isinstance(name, str) and len(name) <= NAME_CHARS for name in names):
            raise ValueError("a run whose model, benchmark or decoder has no name, or a long one")
        _check_settings(run)
        try:
            _ = run.identity_hash
        except DllmBenchError as error:
            raise ValueError(str(error)) from error
        return run

    def identity(self) -> Plain:
        """Everything that can change the output, in canonical form."""
        names = (*GROUPS, "baseline", "seed", "batch")
        groups = {name: getattr(self, name) for name in names}
        groups["measure_kl"] = self.measure_kl or None  # None: not in the hash
        whole = {"inputs": self.inputs, "decoding_version": self.decoding_version}
        return dict(canonical({**split(groups)[Role.IDENTITY], **whole}))

    def to_plain(self) -> Plain:
        """Every field but `runtime`, which belongs to a machine."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "runtime"}
        return dict(json.loads(json.dumps(plain)))

    @cached_property
    def identity_hash(self) -> str:
        """sha256 over `identity`."""
        return digest(self.identity())

    @property
    def repeats(self) -> int:
        """How often every item is decoded."""
        return int(self.benchmark.get("repeats") or 1)

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


def _check_settings(run: RunSpec) -> None:
    """Raise ValueError for a setting of another type than the one it is read as."""
    for group, declared in READ.items():
        stored = getattr(run, group)
        for name, kind in declared.items():
            if name in stored and not fits(stored[name], kind):
                raise ValueError(f"{group}.{name} is not {in_words(kind)}")


def slug(name: str) -> str:
    """A folder name: letters, digits, dot, dash and underscore only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "unnamed"


def _class_name(plain: Mapping[str, Any]) -> str:
    return str(plain.get(TARGET, "decoder")).rpartition(".")[2].lower()
