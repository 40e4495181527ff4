"""Quick checks of a composed configuration, so that a mistake is reported at once.

A missing data directory, a missing model folder, code execution without consent, a decoder that
does not fit the model. All but the last two, of fit and memory, do without torch.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants

from dllm_bench.benchmarks.sandbox.execution import require_consent
from dllm_bench.core.decoder import ComposedDecoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.folder import HUB_ID, lacking
from dllm_bench.models.sources import checkpoint_folder
from dllm_bench.paths import ASSETS, IMPORTED, expanded, place_of
from dllm_bench.registry import instantiate
from dllm_bench.store.files import results_directory
from dllm_bench.store.hardware import missing_device, resolve_hardware
from dllm_bench.store.inputs import (
    benchmark_of,
    is_object,
    is_served,
    require_memory,
    require_numbers,
    resolve_model,
)
from dllm_bench.store.provenance import HASH, TEXT

DEVICES = ("cpu", "cuda", "auto")
COUNTS = ("threads", "branch_parallel", "tensor_parallel", "replicas")
HUB = "huggingface.co"


def check(config: Mapping[str, Any], reads_data: bool) -> None:
    """Raise a DllmBenchError for the first problem found.

    `reads_data` says that the benchmark reads original files from the data directory.
    """
    check_numbers(config)
    check_provenance(config.get("provenance", {}))
    results_directory(config["paths"].get("results"))
    if reads_data:
        check_data(config["paths"].get("data"), str(config["benchmark"].get("name")))
    check_device(config.get("hardware", {}))
    check_model(config.get("model", {}))
    check_consent(config.get("benchmark", {}))
    check_fits(config)
    check_memory(config)


def check_numbers(config: Mapping[str, Any]) -> None:
    """Numbers are within their bounds; seed, limit and batch are whole; measure_kl is a switch."""
    seed, limit, batch = config.get("seed", 0), config.get("limit"), config.get("batch", 1)
    if type(seed) is not int:
        raise DllmBenchError(f"seed={seed!r} is not a whole number; write for example seed=0.")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise DllmBenchError(f"limit={limit!r} is not a whole number above zero; null means all.")
    if type(batch) is not int or batch < 1:
        raise DllmBenchError(
            f"batch={batch!r} is not a whole number above zero; 1 means one request at a time."
        )
    if type(config.get("measure_kl", False)) is not bool:
        raise DllmBenchError(
            f"measure_kl={config['measure_kl']!r} is no switch; write true or false."
        )
    require_numbers(config)


def check_provenance(provenance: Mapping[str, Any]) -> None:
    """Only two things can be stored of uncommitted changes."""
    diff = provenance.get("diff", HASH)
    if diff not in (HASH, TEXT):
        raise DllmBenchError(
            f"provenance.diff={diff!r} is no choice; {HASH!r} stores the hash and the file names "
            f"of uncommitted changes, {TEXT!r} their text too."
        )


def check_data(data: str | None, benchmark: str) -> None:
    """A given data directory must exist; without one the hub must be reachable."""
    if data and not expanded(data).is_dir():
        raise DllmBenchError(
            f"Benchmark {benchmark!r} reads paths.data={data}, which is not a directory; name "
            "the one that holds the original files."
        )
    if not data and not hub_is_reachable():
        raise DllmBenchError(
            f"Benchmark {benchmark!r} has no data directory, and the hub cannot be reached; name "
            "the directory that holds the original files with paths.data=DIR or DLLM_BENCH_DATA."
        )


def hub_is_reachable() -> bool:
    """Whether the hub's host name resolves, or its cache already holds a data set."""
    if any(Path(constants.HF_HUB_CACHE).glob("datasets--*")):
        return True
    try:
        return bool(socket.getaddrinfo(HUB, 443))
    except OSError:
        return False


def check_device(hardware: Mapping[str, Any]) -> None:
    """Counts must be whole numbers, and the kind of device one that this package can run on.

    Hardware of other kinds is in conf so that its reported numbers can be shown and compared.
    """
    for name in COUNTS:
        count = hardware.get(name, 1)
        if count != "auto" and (type(count) is not int or count < 1):
            raise DllmBenchError(f"hardware.{name}={count!r} is not a whole number above zero.")
    device = str(hardware.get("device", "cpu"))
    processes = int(hardware.get("branch_parallel", 1)) * int(hardware.get("tensor_parallel", 1))
    if device.partition(":")[0] not in DEVICES:
        raise DllmBenchError(
            f"hardware={hardware.get('name')} asks for {processes} devices of kind {device!r}, and "
            f"this package runs on {' and '.join(DEVICES[:-1])} devices; choose hardware=auto, "
            "which finds what is here."
        )


def check_model(model: Mapping[str, Any]) -> None:
    """Weights and adapter must be where the model says: in the package, a folder, or the cache."""
    name = model.get("name")
    for key in (key for key in ("path", "lora") if model.get(key)):
        source = str(model[key])
        shipped = source.removeprefix(ASSETS)
        if expanded(source).is_dir():
            continue
        if source.startswith(IMPORTED):
            checkpoint_folder(source, model.get("revision") if key == "path" else None)
            continue
        if shipped != source and not any(place_of(source).glob("*.safetensors")):
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which this installation does not have; make it "
                f"in a clone of the repository with `python -m scripts.embedded {shipped}`."
            )
        if shipped == source and HUB_ID.fullmatch(source) and not is_cached(source):
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which is not in the local Hugging Face cache, and "
                f"a run downloads nothing; fetch it first: dllm-bench "
                f"prefetch {name}, or hf download {source}"
            )

    check_folder(model)


def check_folder(model: Mapping[str, Any]) -> None:
    """A checkpoint folder of the user must hold all that a run reads."""
    source = str(model.get("path", ASSETS))
    folder = place_of(source)
    missing = [] if source.startswith(ASSETS) or not folder.is_dir() else lacking(folder, model)
    if listed := "; ".join(missing):
        raise DllmBenchError(
            f"Model {model.get('name')!r} is to be read from {folder}, which lacks {listed}; "
            "complete the folder and give the same command again."
        )


def check_memory(config: Mapping[str, Any]) -> None:
    """The weights must fit into the memory of the device, in the dtype they are run in.

    Without the device a run can still be looked up. The memory holds an object already.
    """
    if not is_served(config["model"]) and not is_object(config["model"]):
        hardware = resolve_hardware(config["hardware"])
        if not missing_device(hardware):
            require_memory(resolve_model(config["model"], hardware))


def check_fits(config: Mapping[str, Any]) -> None:
    """Decoder and baseline must fit the batch, and what the settings say of the model."""
    if is_served(config["model"]):
        return
    known, batch = SimpleNamespace(**config["model"]), int(config.get("batch", 1))
    for plain in (config.get("decoder"), config.get("baseline")):
        if plain:
            decoder = instantiate({k: v for k, v in plain.items() if k != "name"}, "decoder")
            if isinstance(decoder, ComposedDecoder):
                decoder.check_run_fits(known, batch)


def is_cached(hub_id: str) -> bool:
    """Whether the hub's cache has any version of a repository."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir()


def check_consent(benchmark: Mapping[str, Any]) -> None:
    """Code written by a model only runs if the user has allowed it."""
    if benchmark and benchmark_of(benchmark).runs_code:
        require_consent(bool(benchmark.get("allow_code_execution")), str(benchmark.get("name")))
