"""All settings of a run: the field that declares one has its type, bounds, default, role and help.

`RunConfig` is a composed configuration with typed attributes. Roles and checks follow from the
fields. The classes of pieces, benchmarks and loggers declare settings of their own, which
`registry` checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from dllm_bench.benchmarks.items import BenchmarkSettings
from dllm_bench.core.declared import Range, fits, in_words, shown
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.spec import AUTO, NONE, OBJECT, ModelSpec
from dllm_bench.registry import RUNTIME, TARGET
from dllm_bench.serving.served_model import ServedModel
from dllm_bench.store.files import Plain

LARGEST = 2**63 - 1  # of any setting that is a whole number
GROUPS = ("model", "decoder", "benchmark", "hardware")
DECODERS = ("decoder", "baseline")  # the run's own, and the one it is compared with
OPEN = ("logger", "paths")  # groups whose further entries are classed as runtime too
RUNTIME_OF_PIECES = ("source", "revision", "any_model", "short")
"""Where a filter or drafter lies (its content enters as sha256), and consents, at any depth."""
Seed = Annotated[int, Range(0, LARGEST)]
Items = Annotated[int, Range(1, 2**31)]
TIMEOUT_S = 120.0
PROCESSES = ("branch_parallel", "tensor_parallel", "replicas")  # settings that multiply
Processes = Annotated[int, Range(1, 1024)]


class Role(Enum):
    """Whether a configuration key can change the output of a run."""

    IDENTITY = "identity"  # it can, and enters the hash
    RUNTIME = "runtime"  # it cannot


class Group(Mapping[str, Any]):
    """Base of dataclasses that hold settings as they were given, which is what a run's hash covers.

    As attributes they have their declared types. One that is absent, or null though its type is not
    optional, has its default, or None. DllmBenchError for a setting of another type or beyond its
    bounds, unless it is still `AUTO`.
    """

    group: ClassVar[str]
    """What the group is called in a configuration."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        values = {name: self._value(plain, *of) for name, of in declarations(type(self)).items()}
        vars(self).update({**values, "_plain": dict(plain)})

    def _value(self, plain: Mapping[str, Any], one: Field[Any], declared: Any) -> Any:
        given = plain.get(one.name)
        if one.name not in plain or (given is None and not fits(None, declared)):
            default = None if one.default is MISSING else one.default
            return default if one.default_factory is MISSING else one.default_factory()
        if isinstance(given, Mapping):
            for kind in (declared, *get_args(declared)):
                if isinstance(kind, type) and issubclass(kind, Group):
                    return kind(given)
        if given != AUTO and not fits(given, declared):
            key = f"{self.group}.{one.name}".lstrip(".")
            raise DllmBenchError(f"{key} is {shown(given)}; give {in_words(declared)}.")
        return given

    def __getitem__(self, name: str) -> Any:
        return vars(self)["_plain"][name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self)["_plain"])

    def __len__(self) -> int:
        return len(vars(self)["_plain"])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({vars(self)['_plain']!r})"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class ModelGroup(Group, ModelSpec, ServedModel):  # type: ignore[misc]
    """Which weights and how they are computed with, or a served engine."""

    group = "model"

    @property
    def is_served(self) -> bool:
        """Whether the group names a class of its own: a served engine, not weights."""
        return TARGET in self

    @property
    def is_object(self) -> bool:
        """Whether the group describes an object of a Python program, which is in no file."""
        return self.adapter == OBJECT


class ParentGroup(ModelGroup):
    """The autoregressive model that reads the texts."""

    group = "parent"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class BenchmarkGroup(Group, BenchmarkSettings):
    """Task, prompts and grading."""

    group = "benchmark"


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Hardware(Group):
    """Where and how a run computes."""

    group = "hardware"

    name: str
    """The class a timing belongs to (h200, cpu)."""
    device: str = "cpu"
    """"cpu", "cuda" or "cuda:N"."""
    dtype: str = AUTO
    """Of the weights, like the next three: for models that do not set it themselves."""
    attention: str = "sdpa"
    quantization: str = NONE
    compile: str = NONE
    threads: Processes = 1
    """torch's threads on the host, per process."""
    branch_parallel: Processes = 1
    """Processes that divide the branches of a round among them."""
    tensor_parallel: Processes = 1
    """Processes over which heads and hidden layers are split."""
    commit: Literal["winner", "none"] = "winner"
    """"winner": its K/V go to every process; "none": no K/V do (block-causal attention only)."""
    replicas: Processes = field(default=1, metadata=RUNTIME)
    """Processes, or groups of them, that share the requests: a sample is the same in each."""
    timeout_s: Annotated[float, Range(0, 10**7)] = field(default=TIMEOUT_S, metadata=RUNTIME)
    """The run ends if a process waits longer for another one."""
    match: str | None = field(default=None, metadata=RUNTIME)
    """What the device's name must contain; upper and lower case make no difference."""

    @property
    def uses_cuda(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def several(self) -> list[str]:
        """The settings that ask for several processes."""
        return [name for name in PROCESSES if getattr(self, name) > 1]

    @property
    def group_size(self) -> int:
        """Processes that decode one request together."""
        return self.branch_parallel * self.tensor_parallel

    @property
    def processes(self) -> int:
        """All processes of a run."""
        return self.group_size * self.replicas


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Paths(Group):
    """Where files lie."""

    group = "paths"

    results: str | None = "results"
    """Runs, tables and figures; no results directory is named null."""
    data: str | None = None
    """Original files of benchmarks; None: the hub, or its cache."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class ProvenanceGroup(Group):
    """What a record keeps of this machine."""

    group = "provenance"

    diff: Literal["hash", "text"] = field(default="hash", metadata=RUNTIME)
    """Of uncommitted code changes: hash and file names, or their text too."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class RunConfig(Group):
    """A composed run configuration."""

    group = ""

    model: ModelGroup
    decoder: Mapping[str, Any]
    benchmark: BenchmarkGroup
    hardware: Hardware
    baseline: Mapping[str, Any] | None = None
    """The decoder that decodes every request too."""
    parent: ParentGroup | None = None
    """The autoregressive model that reads the texts (`quality/nll_under_parent` and its like)."""
    seed: Seed = 0
    """Of the random numbers of every request."""
    limit: Items | None = field(default=None, metadata=RUNTIME)
    """Number of items, None for all. A larger number continues the same run."""
    batch: Items = 1
    """Requests in one forward."""
    measure_kl: bool = False
    """Whether forwards are compared with uncached ones; no sample has a time then."""
    max_judge_errors: Annotated[int, Range(0, 2**31)] | None = field(default=0, metadata=RUNTIME)
    """Samples whose grading may fail; None: any number but all."""
    retry_errors: bool = field(default=False, metadata=RUNTIME)
    """Of a finished run: grade those samples again."""
    logger: Mapping[str, Any] = field(default_factory=dict, metadata=RUNTIME)
    paths: Paths = field(default_factory=lambda: Paths({}))
    provenance: ProvenanceGroup = field(default_factory=lambda: ProvenanceGroup({}))

    def __init__(self, plain: Mapping[str, Any]) -> None:
        require_numbers(plain)
        super().__init__(plain)

    @property
    def decoders(self) -> dict[str, Mapping[str, Any]]:
        """The run's decoder and the baseline, those that there are."""
        both = {name: self.get(name) for name in DECODERS}
        return {name: decoder for name, decoder in both.items() if decoder}


KINDS = {
    kind.group: kind
    for kind in (ModelGroup, ParentGroup, BenchmarkGroup, Hardware, Paths, ProvenanceGroup)
}


@cache
def declarations(kind: type[Group]) -> dict[str, tuple[Field[Any], Any]]:
    """Return setting -> the field that declares it, and its type."""
    of: Any = kind
    hints = get_type_hints(kind, include_extras=True)
    return {one.name: (one, hints[one.name]) for one in fields(of)}


def default_settings() -> Plain:
    """Return the defaults of a run's single settings, those that no choice of a group gives."""
    groups = (*DECODERS, "parent")
    own = {name: one for name, (one, _) in declarations(RunConfig).items() if name not in groups}
    single = {name: one.default for name, one in own.items() if one.default is not MISSING}
    return {**single, "provenance": {f.name: f.default for f in fields(ProvenanceGroup)}}


@cache
def role_of(key: str) -> Role:
    """Return the role of a dotted configuration key; DllmBenchError if nothing declares it."""
    group, _, rest = key.partition(".")
    if group in DECODERS:
        is_runtime = rest == "name" or ("." in rest and key.split(".")[-1] in RUNTIME_OF_PIECES)
        return Role.RUNTIME if is_runtime else Role.IDENTITY
    if rest and group in OPEN:
        return Role.RUNTIME
    own = declarations(RunConfig).get(key)
    if rest and group in KINDS:
        own = declarations(KINDS[group]).get(rest.partition(".")[0])
    if own:
        return Role.RUNTIME if own[0].metadata.get("runtime") else Role.IDENTITY
    if (group == "benchmark" and rest) or key == f"model.{TARGET}":
        return Role.IDENTITY  # a benchmark's class has settings of its own
    raise DllmBenchError(
        f"The setting {key!r} was added, and nothing in a run reads it; correct the name or "
        "leave it out: `dllm-bench run --cfg job` prints all settings."
    )


def require_numbers(plain: object, key: str = "") -> None:
    """Raise DllmBenchError if a setting, at any depth, is NaN, with which every comparison fails,
    or a whole number that no library takes.
    """
    if isinstance(plain, Mapping):
        for name, value in plain.items():
            require_numbers(value, f"{key}.{name}".lstrip("."))
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            require_numbers(value, key)
    elif isinstance(plain, float) and math.isnan(plain):
        raise DllmBenchError(f"{key} is nan, which is no number; give one.")
    elif type(plain) is int and abs(plain) > LARGEST:
        raise DllmBenchError(f"{key} is beyond 64 bits; give a smaller number.")


def setting_in(decoder: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Look up a dotted setting of a decoder as plain data; its pieces' classes import torch."""
    value: Any = decoder
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return default if value is None else value


NOTHING_SET = RunConfig({})
"""The empty configuration, of a run whose settings are not known."""
