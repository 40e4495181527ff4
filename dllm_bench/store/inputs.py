"""What a configuration stands for on this machine: hardware class, pieces, content of the inputs.

`resolve` turns "auto" into the device found, spells the decoder out with its defaults (which also
refuses an impossible combination before anything is loaded) and hashes items and weights. Objects
made from equal plain data are made once per process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.paths import place_of
from dllm_bench.registry import (
    TARGET,
    construct,
    describe,
    find,
    instantiate,
    with_registered_names,
)

if TYPE_CHECKING:
    from dllm_bench.core.benchmark import Benchmark
    from dllm_bench.models.spec import ModelSpec
    from dllm_bench.serving.served_model import ServedModel

Plain = dict[str, Any]
AUTO = "auto"
DECODERS = ("decoder", "baseline")  # the run's own, and the one it is compared with
SERVED = "served"  # the decoder and the hardware of a served engine
UNASKED = "vanilla"  # the decoder of a configuration that names none
OF_THE_MACHINE = ("dtype", "attention", "device", "quantization", "compile")


class AbsentError(DllmBenchError):
    """Weights or data that are not on this machine; any other refusal is of the settings."""


@contextmanager
def reading() -> Iterator[None]:
    """What is refused within is refused for want of weights or data."""
    try:
        yield
    except DllmBenchError as error:
        raise AbsentError(str(error)) from error


def resolve(config: Plain) -> Plain:
    """The configuration with hardware and decoder spelled out, and "inputs" hashed."""
    if is_served(config["model"]):
        return resolve_served(config)
    hardware = resolve_hardware(config["hardware"])
    model = resolve_model(config["model"], hardware)
    dataset = dataset_hash(config["benchmark"])
    hashes = model_hashes(model)
    decoders = {name: config[name] for name in DECODERS if config.get(name)}
    return {
        **config,
        "benchmark": with_registered_names(config["benchmark"]),
        "hardware": hardware,
        "model": model,
        **{name: resolve_decoder(d, str(model["name"]), hashes) for name, d in decoders.items()},
        "inputs": {"dataset": dataset, **hashes},
    }


def files_of(config: Plain) -> list[Path] | None:
    """All that `resolve` reads beside the package's own code: folders and files that settings name.

    None where that cannot be said: devices of this machine, a served engine, a source that is not
    on this disk (the hub's), items that are not drawn by the package.
    """
    if is_served(config["model"]) or AUTO in config["hardware"].values():
        return None
    if not getattr(benchmark_of(config["benchmark"]), "drawn", False):
        return None
    model, decoders = config["model"], [config.get(name) for name in DECODERS]
    named = [model["path"], *filter(None, [model.get("lora")]), *sources(decoders)]
    places = [place_of(source) for source in named]
    return places if all(place.exists() for place in places) else None


def sources(plain: object) -> Iterator[str]:
    """Every `source` that plain data names, at any depth."""
    return (part["source"] for part in sourced(plain))


def sourced(plain: object) -> Iterator[Mapping[str, Any]]:
    """Every part of plain data that names a `source`, at any depth."""
    if isinstance(plain, Mapping):
        if isinstance(plain.get("source"), str):
            yield plain
        for value in plain.values():
            yield from sourced(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from sourced(value)


def is_here(part: Mapping[str, Any]) -> bool:
    """Whether anything lies where a part's `source` says; if so, what is refused is what it is."""
    from dllm_bench.models.sources import checkpoint_folder

    try:
        return (
            place_of(part["source"]).exists()
            or checkpoint_folder(part["source"], part.get("revision")).exists()
        )
    except DllmBenchError:
        return False


def is_served(model: Mapping[str, Any]) -> bool:
    """Whether a model group names a class of its own: a served engine instead of weights."""
    return TARGET in model


def resolve_served(config: Plain) -> Plain:
    """The configuration of a run whose server decodes: no decoder, no hardware of this machine."""
    decoder, batch = config["decoder"].get("name"), config.get("batch") or 1
    wrong = {
        f"decoder={decoder}": decoder not in (UNASKED, SERVED),
        "a baseline": bool(config.get("baseline")),
        f"batch={batch}": batch != 1,
    }
    if any(wrong.values()):
        raise DllmBenchError(
            f"Model {config['model']['name']!r} is served, so its server decodes and batches, not "
            f"{' and '.join(name for name in wrong if wrong[name])}; leave that out, and say with "
            "model.concurrency how many requests are in flight."
        )
    tokenizer = engine_of(config["model"]).tokenizer
    counted_by = {"tokenizer": tokenizer_hash(tokenizer)} if tokenizer else {}
    return {
        **config,
        "model": with_registered_names(config["model"]),
        "benchmark": with_registered_names(config["benchmark"]),
        "hardware": {"name": SERVED, "device": SERVED},
        "decoder": {"name": SERVED},
        "inputs": {"dataset": dataset_hash(config["benchmark"]), **counted_by},
    }


def resolve_decoder(plain: Mapping[str, Any], model: str, hashes: Mapping[str, str]) -> Plain:
    """A decoder with its defaults spelled out; its name, if it has one, is kept."""
    try:
        made = instantiate({key: value for key, value in plain.items() if key != "name"})
    except DllmBenchError:
        with reading():
            for part in sourced(plain):
                if not is_here(part):
                    instantiate(part)
        raise
    check_filters(made, model, hashes["weights"])
    check_profiles(plain, model)
    named = {"name": plain["name"]} if "name" in plain else {}
    return {**describe(made), **named}


def check_filters(made: Any, model: str, weights: str) -> None:
    """Refuse a learned filter, at any depth of a decoder, that was trained for another model."""
    from dllm_bench.models.filters import LearnedFilter

    if isinstance(made, LearnedFilter):
        made.check_model(model, weights)
    for part in made if isinstance(made, tuple) else ():
        check_filters(part, model, weights)
    for part in fields(made) if is_dataclass(made) else ():
        check_filters(getattr(made, part.name), model, weights)


def check_profiles(plain: Mapping[str, Any], model: str) -> None:
    """Refuse step times, at any depth of a decoder, that were measured with another model."""
    from dllm_bench.decoding.length.measurements import check_step_profile, read_step_profile

    for part in sourced(plain):
        if TARGET in part and find(str(part[TARGET])) is read_step_profile:
            check_step_profile(part["source"], model)


def resolve_hardware(plain: Mapping[str, Any]) -> Plain:
    """Hardware settings with "auto" replaced by what this machine has."""
    if AUTO not in plain.values():
        return dict(plain)
    found = _cuda_class() or {"name": "cpu", "device": "cpu", "dtype": "float32", "threads": 1}
    return {key: found[key] if value == AUTO else value for key, value in plain.items()}


def _cuda_class() -> Plain | None:
    import torch

    if not torch.cuda.is_available():
        return None
    words = torch.cuda.get_device_name().lower().replace("-", " ").split()
    name = next((word for word in words if any(map(str.isdigit, word))), "cuda")
    return {"name": name, "device": "cuda", "dtype": "bfloat16", "threads": 8}


def benchmark_of(plain: Mapping[str, Any]) -> Benchmark:
    """The benchmark a configuration group describes, made once per process."""
    if TARGET not in plain:
        raise DllmBenchError(
            f"Benchmark {plain.get('name')!r} names no _target_ class; mend its yaml."
        )
    return _benchmark(json.dumps(plain, sort_keys=True))


def dataset_hash(plain: Mapping[str, Any]) -> str:
    """Hash of the items of the benchmark that a configuration group describes."""
    benchmark = benchmark_of(plain)
    with reading():
        return benchmark.dataset_hash()


@lru_cache(maxsize=8)
def _benchmark(text: str) -> Benchmark:
    benchmark: Benchmark = instantiate(json.loads(text))
    return benchmark


def resolve_model(plain: Mapping[str, Any], hardware: Mapping[str, Any]) -> Plain:
    """Model settings with those of the hardware: dtype, kernels, device, what is done for speed."""
    given = {key: value for key, value in plain.items() if value not in (None, AUTO)}
    shared = {key: hardware[key] for key in OF_THE_MACHINE if key in hardware}
    return {**shared, **given}


def engine_of(plain: Mapping[str, Any]) -> ServedModel:
    """The served engine a configuration group describes."""
    engine: ServedModel = instantiate(plain)
    return engine


def model_spec(plain: Mapping[str, Any]) -> ModelSpec:
    """The model a resolved configuration group describes."""
    if is_served(plain):
        raise DllmBenchError(
            f"Model {plain.get('name')!r} is served, there are no weights of it here; choose a "
            "model that is loaded, or ask the server with `dllm-bench run`."
        )
    from dllm_bench.models.spec import ModelSpec

    model: ModelSpec = construct(ModelSpec, plain, f"Model {plain.get('name')!r}")
    return model


def weights_hash(plain: Mapping[str, Any]) -> str:
    """Hash of the weights alone."""
    return model_hashes(plain)["weights"]


def model_hashes(plain: Mapping[str, Any]) -> dict[str, str]:
    """Hash of the weights, and of the tokenizer where no pinned commit covers it."""
    from dllm_bench.models import sources as model_sources

    model = model_spec(plain)
    with reading():
        hashes = {"weights": model_sources.content_hash(model)}
    if not model_sources.COMMIT_SHA.fullmatch(model.revision or ""):
        hashes["tokenizer"] = tokenizer_hash(model.path, model.revision)
    return hashes


def tokenizer_hash(source: str, revision: str | None = None) -> str:
    """Hash of the files that decide how text becomes ids."""
    from dllm_bench.models import checkpoint
    from dllm_bench.models import sources as model_sources
    from dllm_bench.models.text import tokenizer_files

    with reading():
        return checkpoint.files_hash(
            tokenizer_files(model_sources.checkpoint_folder(source, revision))
        )
