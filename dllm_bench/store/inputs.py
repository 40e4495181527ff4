"""Resolve a configuration on this machine: hardware class, default values, hashes of the inputs.

`resolve` replaces "auto" by the device of this machine, writes the decoder out with its defaults
(and thereby refuses an impossible combination before anything is loaded) and hashes items and
weights. A benchmark is made once per process for equal settings. Modules that import torch are
imported on use, because `status` and cached tables do not need it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dllm_bench.core.benchmark import Benchmark
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.spec import ModelSpec
from dllm_bench.models.text import tokenizer_files
from dllm_bench.paths import place_of
from dllm_bench.registry import (
    PACKAGE,
    TARGET,
    construct,
    describe,
    find,
    instantiate,
    with_registered_names,
)
from dllm_bench.serving.served_model import ServedModel
from dllm_bench.store.groups import (
    DECODERS,
    BenchmarkGroup,
    Hardware,
    ModelGroup,
    Plain,
    RunConfig,
    setting_in,
)
from dllm_bench.store.hardware import AUTO, memory_bytes, resolve_hardware
from dllm_bench.store.piece_source import pieces_hash, targets

PIECES = "pieces"  # input: hash of the source of pieces from outside
SERVED = "served"  # name of decoder and hardware if a served engine decodes
DEFAULT_DECODER = "vanilla"  # as in conf/run.yaml
GIBIBYTE = 2**30
WEIGHTS_SHARE = 0.95  # share of a device's memory; the rest is for activations
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SMALL_DTYPE = "bfloat16"
HARDWARE_SETTINGS_OF_MODELS = ("dtype", "attention", "device", "quantization", "compile")


class MissingInputError(DllmBenchError):
    """Weights or data are not on this machine. Other errors of `resolve` concern the settings."""


@contextmanager
def as_missing_input() -> Iterator[None]:
    """Turn any DllmBenchError of the block into MissingInputError: weights or data are missing."""
    try:
        yield
    except DllmBenchError as error:
        raise MissingInputError(str(error)) from error


@dataclass(frozen=True)
class ObjectInputs:
    """Inputs that replace the files of a model or benchmark that exists only as an object."""

    hashes: Mapping[str, str] = field(default_factory=dict)
    """"dataset" of a benchmark; "weights" and others of a model."""
    classes: tuple[type, ...] = ()
    """Classes of the model; the user's own source is hashed as part of the run."""


def resolve(config: Plain, given: ObjectInputs = ObjectInputs()) -> Plain:
    """Return the configuration with hardware and decoders written out, and the hashes under
    "inputs"."""
    chosen = RunConfig(config)
    if chosen.model.is_served:
        return resolve_served(chosen)
    hardware = resolve_hardware(chosen.hardware)
    model = resolve_model(chosen.model, hardware)
    parents, inputs = {}, {}
    if chosen.parent:
        parents["parent"] = dict(parent := resolve_model(chosen.parent, hardware))
        inputs["parent"] = weights_hash(parent)
    own = dict(given.hashes)
    dataset = own.pop("dataset", None) or dataset_hash(chosen.benchmark)
    hashes = own or model_hashes(model)
    decoders = {k: resolve_decoder(d, model.name, hashes) for k, d in chosen.decoders.items()}
    return with_pieces(
        {
            **config,
            "benchmark": with_registered_names(chosen.benchmark),
            "hardware": dict(hardware),
            "model": dict(model),
            **decoders,
            **parents,
            "inputs": {"dataset": dataset, **hashes, **inputs},
        },
        given.classes,
    )


def with_pieces(resolved: Plain, further: Iterable[type] = ()) -> Plain:
    """Return the configuration, with a hash of the source of pieces from outside under "inputs", if
    any.

    Loggers are not pieces of the run.
    """
    named = [resolved.get(name) for name in ("model", "benchmark", *DECODERS)]
    source = pieces_hash(named, further)
    if source is None:
        return resolved
    return {**resolved, "inputs": {**resolved["inputs"], PIECES: source}}


def files_of(config: Plain) -> list[Path] | None:
    """Return the files and folders that `resolve` reads besides the package's code, as settings
    name them.

    None if `resolve` depends on more than files: devices of this machine, a served engine, a source
    that is not on this disk (such as the hub), items that the package does not generate, or the
    source of pieces from outside.
    """
    chosen = RunConfig(config)
    if chosen.model.is_served or AUTO in chosen.hardware.values():
        return None
    if not benchmark_of(chosen.benchmark).generated:
        return None
    models = [chosen.model, *([ModelGroup(chosen.parent)] if chosen.parent else [])]
    weights = [source for one in models for source in (one.path, one.lora) if source]
    return files_of_pieces([chosen.benchmark, *chosen.decoders.values()], weights)


def files_of_pieces(plain: object, further: Iterable[str] = ()) -> list[Path] | None:
    """Return the files and folders that the pieces of plain data read, and `further` ones.

    None if one is not on this disk, or if a piece is from outside.
    """
    if any(not target.startswith(PACKAGE) for target in targets(plain)):
        return None
    places = [place_of(source) for source in (*further, *sources(plain))]
    return places if all(place.exists() for place in places) else None


def sources(plain: object) -> Iterator[str]:
    """Return every `source` that plain data names, at any depth."""
    return (part["source"] for part in sourced(plain))


def sourced(plain: object) -> Iterator[Mapping[str, Any]]:
    """Yield every mapping in plain data that has a `source`, at any depth."""
    if isinstance(plain, Mapping):
        if isinstance(plain.get("source"), str):
            yield plain
        for value in plain.values():
            yield from sourced(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from sourced(value)


def is_here(part: Mapping[str, Any]) -> bool:
    """Return whether there is a file or folder at a part's `source`."""
    from dllm_bench.models.sources import checkpoint_folder

    source, revision = part["source"], part.get("revision")
    try:
        return place_of(source).exists() or checkpoint_folder(source, revision).exists()
    except DllmBenchError:
        return False


def resolve_served(chosen: RunConfig) -> Plain:
    """Return the configuration of a run that a server decodes: no decoder or hardware of this
    machine."""
    decoder = setting_in(chosen.decoder, "name")
    wrong = {
        f"decoder={decoder}": decoder not in (DEFAULT_DECODER, SERVED),
        "a baseline": bool(chosen.baseline),
        "a parent": bool(chosen.parent),
        f"batch={chosen.batch}": chosen.batch != 1,
    }
    if any(wrong.values()):
        raise DllmBenchError(
            f"Model {chosen.model.name!r} is served, so its server decodes and batches, not "
            f"{' and '.join(name for name in wrong if wrong[name])}; leave that out, and set "
            "model.concurrency to the number of requests in flight."
        )
    tokenizer = engine_of(chosen.model).tokenizer
    hashes = {"tokenizer": tokenizer_hash(tokenizer)} if tokenizer else {}
    return with_pieces(
        {
            **chosen,
            "model": with_registered_names(chosen.model),
            "benchmark": with_registered_names(chosen.benchmark),
            "hardware": {"name": SERVED, "device": SERVED},
            "decoder": {"name": SERVED},
            "inputs": {"dataset": dataset_hash(chosen.benchmark), **hashes},
        }
    )


def resolve_decoder(plain: Mapping[str, Any], model: str, hashes: Mapping[str, str]) -> Plain:
    """Return a decoder written out with its defaults; its name, if it has one, is kept."""
    try:
        decoder = decoder_of(plain)
    except DllmBenchError:
        with as_missing_input():
            for part in sourced(plain):
                if TARGET in part and not is_here(part):
                    instantiate(part, None)
        raise
    check_filters(decoder, model, hashes["weights"])
    check_profiles(plain, model)
    named = {"name": plain["name"]} if "name" in plain else {}
    return {**describe(decoder), **named}


def decoder_of(plain: Mapping[str, Any]) -> Any:
    """Return the decoder that a configuration group describes, whose name is not one of its
    settings."""
    return instantiate({key: value for key, value in plain.items() if key != "name"}, "decoder")


def check_filters(value: Any, model: str, weights: str) -> None:
    """Refuse a learned filter, at any depth of a decoder, that was trained for another model."""
    from dllm_bench.models.filters import LearnedFilter

    if isinstance(value, LearnedFilter):
        value.check_model(model, weights)
    for item in value if isinstance(value, tuple) else ():
        check_filters(item, model, weights)
    for part in fields(value) if is_dataclass(value) else ():
        check_filters(getattr(value, part.name), model, weights)


def check_profiles(plain: Mapping[str, Any], model: str) -> None:
    """Refuse step times, at any depth of a decoder, that were measured with another model."""
    from dllm_bench.methods.drafting import check_step_profile, read_step_profile

    for part in sourced(plain):
        if TARGET in part and find(str(part[TARGET])) is read_step_profile:
            check_step_profile(part["source"], model)


def benchmark_of(plain: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark a configuration group describes, made once per process."""
    if TARGET not in plain:
        raise DllmBenchError(
            f"Benchmark {BenchmarkGroup(plain).name!r} names no _target_ class; add one to its "
            "yaml."
        )
    return _benchmark(json.dumps(dict(plain), sort_keys=True))


def dataset_hash(plain: Mapping[str, Any]) -> str:
    """Return sha256 of the items of the benchmark that a configuration group describes."""
    benchmark = benchmark_of(plain)
    with as_missing_input():
        return benchmark.dataset_hash()


@lru_cache(maxsize=8)
def _benchmark(text: str) -> Benchmark:
    benchmark: Benchmark = instantiate(json.loads(text), "benchmark")
    return benchmark


def resolve_model(plain: Mapping[str, Any], hardware: Hardware) -> ModelGroup:
    """Return the model settings, completed by those of the hardware (dtype, attention, device,
    …)."""
    given = {key: value for key, value in plain.items() if value not in (None, AUTO)}
    shared = {key: hardware[key] for key in HARDWARE_SETTINGS_OF_MODELS if key in hardware}
    return ModelGroup({**shared, **given})


def model_here(config: RunConfig) -> ModelGroup:
    """Return the model settings of a configuration, completed by the hardware of this machine."""
    return resolve_model(config.model, resolve_hardware(config.hardware))


def engine_of(plain: Mapping[str, Any]) -> ServedModel:
    """Return the served engine a configuration group describes."""
    engine: ServedModel = instantiate(plain, "model")
    return engine


def model_spec(plain: Mapping[str, Any]) -> ModelSpec:
    """Return the model a resolved configuration group describes."""
    chosen = ModelGroup(plain)
    if chosen.is_served:
        raise DllmBenchError(
            f"Model {chosen.name!r} is served, so its weights are not here; choose a "
            "model that is loaded, or use the server with `dllm-bench run`."
        )
    if chosen.is_object:
        raise DllmBenchError(
            f"Model {chosen.name!r} is an object of the Python program that made the run, so "
            "its weights are in no file; decode with it in that program (dllm_bench.run)."
        )
    model: ModelSpec = construct(ModelSpec, plain, f"Model {chosen.name!r}")
    return model


def require_memory(plain: Mapping[str, Any]) -> None:
    """Raise DllmBenchError if a resolved model's weights do not fit into its device's memory.

    Only the headers of the checkpoint are read.
    """
    from dllm_bench.models.load import open_checkpoint

    model = model_spec(plain)
    weights = open_checkpoint(model).headers()
    numbers = sum(math.prod(weights.shape(name)) for name in weights.names)
    needed, small = numbers * ITEM_BYTES[model.dtype], numbers * ITEM_BYTES[SMALL_DTYPE]
    available = memory_bytes(model.device)
    if needed <= WEIGHTS_SHARE * available:
        return
    remedy = "choose a smaller model, or hardware with more memory"
    if small <= WEIGHTS_SHARE * available:
        remedy = f"set hardware.dtype={SMALL_DTYPE}, which takes {small / GIBIBYTE:,.1f} GiB"
    raise DllmBenchError(
        f"Model {model.name!r} is to be loaded in {model.dtype}, its weights take "
        f"{needed / GIBIBYTE:,.1f} GiB, and {model.device} has {available / GIBIBYTE:,.1f} GiB of "
        f"memory; {remedy}."
    )


def weights_hash(plain: Mapping[str, Any]) -> str:
    """Return sha256 of the weights alone."""
    return model_hashes(plain)["weights"]


def model_hashes(plain: Mapping[str, Any]) -> dict[str, str]:
    """Return sha256 of the weights, and of the tokenizer unless a pinned revision covers it."""
    from dllm_bench.models import sources as model_sources

    model = model_spec(plain)
    with as_missing_input():
        hashes = {"weights": model_sources.content_hash(model)}
    if not model_sources.PINNED.fullmatch(model.revision or ""):
        hashes["tokenizer"] = tokenizer_hash(model.path, model.revision)
    return hashes


def tokenizer_hash(source: str, revision: str | None = None) -> str:
    """Return sha256 of the files that decide how text becomes ids."""
    from dllm_bench.models.checkpoint import files_hash
    from dllm_bench.models.sources import checkpoint_folder

    with as_missing_input():
        return files_hash(tokenizer_files(checkpoint_folder(source, revision)))
