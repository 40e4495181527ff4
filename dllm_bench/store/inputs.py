"""Resolve a configuration on this machine: hardware class, default values, hashes of the inputs.

`resolve` replaces "auto" by the device of this machine, writes the decoder out with its defaults
(and thereby refuses an impossible combination before anything is loaded) and hashes items and
weights. A benchmark is made once per process for equal settings. Only this file looks for a CUDA
device: for hardware=auto, for planning a table, and before a run starts. Modules that import torch
are imported on use, because `status` and cached tables do not need it, and planning on a CPU does
not either.

The source of classes from outside this package that a configuration names (plug-ins, user code) is
an input too: if the code of such a piece changes, its run becomes another run. The hash covers the
file that defines the piece and the modules that it imports, at any depth, if they belong to the
same package or are not installed in the interpreter's own folders. The package's own pieces are
covered by `DECODING_VERSION`.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import math
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from dllm_bench import registry
from dllm_bench.core.benchmark import Benchmark
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.spec import AUTO, ModelSpec
from dllm_bench.models.text import tokenizer_files
from dllm_bench.paths import IMPORTED, place_of
from dllm_bench.registry import PACKAGE, TARGET, instantiate
from dllm_bench.serving.served_model import ServedModel
from dllm_bench.store.groups import DECODERS, Hardware, ModelGroup, Plain, RunConfig, setting_in

# --- hardware -------------------------------------------------------------------------------------

CPU = {"name": "cpu", "device": "cpu", "dtype": "float32", "threads": 1}


def resolve_hardware(plain: Mapping[str, Any]) -> Hardware:
    """Return a hardware group in which every "auto" is replaced by this machine's value."""
    if AUTO not in plain.values():
        return Hardware(plain)
    name = cuda_device()
    here = CPU if name is None else cuda_class(name)
    return Hardware({key: here[key] if value == AUTO else value for key, value in plain.items()})


def cuda_class(device_name: str) -> dict[str, Any]:
    """Return the settings for "auto" on a CUDA device; the class is the first word of its name that
    contains a digit (h200, a100), else "cuda".
    """
    words = device_name.lower().replace("-", " ").split()
    name = next((word for word in words if any(map(str.isdigit, word))), "cuda")
    return {"name": name, "device": "cuda", "dtype": "bfloat16", "threads": 8}


def cuda_device(device: str = "cuda") -> str | None:
    """Return the name of a CUDA device, by default the current one; None if this machine does not
    have it."""
    import torch

    index = torch.device(device).index
    if not torch.cuda.is_available() or (index and index >= torch.cuda.device_count()):
        return None
    return torch.cuda.get_device_name(index)


def memory_bytes(device: str) -> int:
    """Return the total memory of a CUDA device, or of this machine, in bytes."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wait_for(device: object) -> None:
    """Wait until a device (its name, or a torch device) has finished all its work; a CPU always
    has."""
    if str(device).startswith("cuda"):
        import torch

        torch.cuda.synchronize(str(device))


def missing_device(hardware: Hardware) -> str:
    """Return the device that a hardware group requests and this machine lacks, in words ("a GPU
    (H200)"); empty if nothing is missing. Names are compared without regard to case.
    """
    if not hardware.uses_cuda:
        return ""
    name, match = cuda_device(hardware.device), hardware.match or ""
    is_here = name is not None and match.lower() in name.lower()
    return "" if is_here else f"a GPU ({match or hardware.device.upper()})"


def require_device(hardware: Hardware) -> None:
    """Raise DllmBenchError if the device of a hardware group is missing."""
    missing = missing_device(hardware)
    if missing:
        raise DllmBenchError(
            f"hardware={hardware.name} asks for {missing}, and this machine has "
            f"{cuda_device() or 'no CUDA device'}; choose the hardware that is here (hardware=auto "
            "finds it)."
        )


# --- settings and contents ------------------------------------------------------------------------

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


def resolve(chosen: RunConfig, given: ObjectInputs = ObjectInputs()) -> Plain:
    """Return the configuration with hardware and decoders written out, and the hashes under
    "inputs"."""
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
            **chosen,
            "benchmark": registry.with_registered_names(chosen.benchmark),
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
    pieces = map(registry.find, targets(named))
    outside = [one for one in pieces if not one.__module__.startswith(PACKAGE)]
    every: list[Callable[..., Any]] = [*outside, *filter(is_own, further)]
    texts = {name: text for made in every for name, text in source_of(made).items()}
    if not texts:
        return resolved
    hashed = hashlib.sha256()
    for name, text in sorted(texts.items()):
        hashed.update(f"{name} {len(text)}\n{text}".encode())
    return {**resolved, "inputs": {**resolved["inputs"], PIECES: hashed.hexdigest()}}


def files_of(chosen: RunConfig) -> list[Path] | None:
    """Return the files and folders that `resolve` reads besides the package's code, as settings
    name them.

    None if `resolve` depends on more than files: devices of this machine, a served engine, a source
    that may be in the hub's cache, items whose hash the package does not know, or the source of
    pieces from outside.
    """
    if chosen.model.is_served or AUTO in chosen.hardware.values():
        return None
    if not benchmark_of(chosen.benchmark).is_hash_known:
        return None
    models = filter(None, [chosen.model, chosen.parent])
    weights = [source for one in models for source in (one.path, one.lora) if source]
    return files_of_pieces([chosen.benchmark, *chosen.decoders.values()], weights)


def files_of_pieces(plain: object, further: Iterable[str] = ()) -> list[Path] | None:
    """Return the files and folders that the pieces of plain data read, and `further` ones.

    None if one may be elsewhere (in the hub's cache), or if a piece is from outside.
    """
    named = (*further, *sources(plain))
    is_own = all(target.startswith(PACKAGE) for target in targets(plain))
    on_disk = all(name.startswith(IMPORTED) or place_of(name).exists() for name in named)
    return list(map(place_of, named)) if is_own and on_disk else None


def sources(plain: object) -> Iterator[str]:
    """Return every `source` that plain data names, at any depth."""
    return (part["source"] for part in sourced(plain))


def sourced(plain: object) -> Iterator[Mapping[str, Any]]:
    """Return every mapping in plain data that has a `source`, at any depth."""
    return (part for part in mappings_in(plain) if isinstance(part.get("source"), str))


def targets(plain: object) -> Iterator[str]:
    """Return every `_target_` of plain data, at any depth."""
    return (str(part[TARGET]) for part in mappings_in(plain) if TARGET in part)


def mappings_in(plain: object) -> Iterator[Mapping[str, Any]]:
    """Yield every mapping in plain data, at any depth, outer ones first."""
    if isinstance(plain, Mapping):
        yield plain
        plain = list(plain.values())
    for value in plain if isinstance(plain, (list, tuple)) else ():
        yield from mappings_in(value)


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
            "model": registry.with_registered_names(chosen.model),
            "benchmark": registry.with_registered_names(chosen.benchmark),
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
    return {**registry.describe(decoder), **named}


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
        if TARGET in part and registry.find(str(part[TARGET])) is read_step_profile:
            check_step_profile(part["source"], model)


def benchmark_of(plain: Mapping[str, Any]) -> Benchmark:
    """Return the benchmark a configuration group describes, made once per process."""
    if TARGET not in plain:
        raise DllmBenchError(
            f"Benchmark {plain.get('name')!r} names no _target_ class; add one to its yaml."
        )
    return _benchmark(json.dumps(dict(plain), sort_keys=True))


def dataset_hash(plain: Mapping[str, Any]) -> str:
    """Return sha256 of the items of the benchmark that a configuration group describes."""
    benchmark = benchmark_of(plain)
    with as_missing_input():
        return benchmark.dataset_hash()


@lru_cache(maxsize=8)
def _benchmark(text: str) -> Benchmark:
    return instantiate(json.loads(text), "benchmark")


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
    return instantiate(plain, "model")


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
    registry.check_arguments(ModelSpec, plain, f"Model {chosen.name!r}")
    return ModelSpec(**plain)


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
    from dllm_bench.models.sources import checkpoint_folder, files_hash

    with as_missing_input():
        return files_hash(tokenizer_files(checkpoint_folder(source, revision)))


# --- source of pieces from outside ----------------------------------------------------------------

INSTALLED = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def is_own(made: Callable[..., Any]) -> bool:
    """Return whether a class is the user's: typed in, or in a file that is not installed."""
    return made.__module__ == "__main__" or file_of(made.__module__, "") is not None


def source_of(made: Callable[..., Any]) -> dict[str, str]:
    """Return {module: its text} for the module of a class or function and the user's own modules
    that it imports.

    A class that was typed into a notebook is its own source.
    """
    texts = dict[str, str]()
    waiting = [made.__module__]
    while waiting:
        name = waiting.pop()
        file = None if name in texts else file_of(name, made.__module__)
        if file is not None:
            texts[name] = file.read_text(encoding="utf-8")
            waiting += imports_of(texts[name], name)
    return texts or {made.__module__: typed_in(made)}


def typed_in(made: Callable[..., Any]) -> str:
    """Return the source of a class or function that is in no file."""
    try:
        return inspect.getsource(made)
    except (OSError, TypeError) as error:
        raise DllmBenchError(
            f"{made.__qualname__} is a piece whose source cannot be found ({error}), so a changed "
            "one could not be told from it; define it in a file."
        ) from error


def file_of(name: str, asked: str) -> Path | None:
    """Return the file of a module, if that is the user's: not this package's, of the package of
    module `asked` or outside of the interpreter's folders.
    """
    if f"{name}.".startswith(PACKAGE):
        return None
    try:
        spec = None if name == "__main__" else find_spec(name)
    except (ImportError, ValueError):
        return None
    origin = spec.origin if spec else getattr(sys.modules.get(name), "__file__", None)
    if not origin or Path(origin).suffix != ".py" or not Path(origin).is_file():
        return None
    own = name.partition(".")[0] == asked.partition(".")[0]
    installed = any(Path(origin).is_relative_to(folder) for folder in INSTALLED)
    return Path(origin) if own or not installed else None


def imports_of(text: str, module: str) -> Iterator[str]:
    """Yield the modules that a module's text may import, wherever it does."""
    spec = None if module == "__main__" else find_spec(module)
    package = spec.parent if spec else None
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            if node.level and not package:
                continue
            whole = resolve_name(source, package)
            yield whole
            yield from (f"{whole}.{alias.name}" for alias in node.names)
