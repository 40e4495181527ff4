"""Check a composed configuration quickly, so that mistakes are reported at once.

The checks find a missing model folder, what the benchmark itself refuses (missing data, code
execution without consent), and a decoder or model that does not fit. Only the last two checks (fit
and memory) need torch.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants

from dllm_bench.core.decoder import ComposedDecoder
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.folder import HUB_ID, lacking
from dllm_bench.models.sources import checkpoint_folder
from dllm_bench.paths import ASSETS, IMPORTED, expanded, place_of
from dllm_bench.store.files import results_directory
from dllm_bench.store.groups import Hardware, ModelGroup, RunConfig
from dllm_bench.store.inputs import (
    benchmark_of,
    decoder_of,
    missing_device,
    model_here,
    require_memory,
    resolve_hardware,
)

DEVICES = ("cpu", "cuda", "auto")


def check(config: RunConfig) -> None:
    """Raise a DllmBenchError for the first problem found."""
    results_directory(config.paths.results)
    check_device(config.hardware)
    check_model(config.model)
    if config.parent:
        check_model(ModelGroup(config.parent))
    if config.benchmark:
        benchmark_of(config.benchmark).check()
    check_fits(config)
    check_memory(config)


def check_device(hardware: Hardware) -> None:
    """Check that this package can run on the kind of device.

    Other kinds of hardware are in conf only so that their reported numbers can be shown and
    compared.
    """
    if hardware.device.partition(":")[0] not in DEVICES:
        raise DllmBenchError(
            f"hardware={hardware.name} asks for {hardware.processes} devices of kind "
            f"{hardware.device!r}, and this package runs on {' and '.join(DEVICES[:-1])} devices; "
            "choose hardware=auto, which finds what is here."
        )


def check_model(model: ModelGroup) -> None:
    """Check that weights and adapter are where the model's settings say: in the package, a folder,
    or the cache."""
    name = model.name
    for source, revision in ((model.path, model.revision), (model.lora, None)):
        if not source or expanded(source).is_dir():
            continue
        if source.startswith(IMPORTED):
            checkpoint_folder(source, revision)
        elif source.startswith(ASSETS):
            if any(place_of(source).glob("*.safetensors")):
                continue
            shipped = source.removeprefix(ASSETS)
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which this installation does not have; a clone of "
                f"the repository has it, or makes it: python -m scripts.embedded {shipped}"
            )
        elif HUB_ID.fullmatch(source) and not is_cached(source):
            raise DllmBenchError(
                f"Model {name!r} needs {source}, which is not in the local Hugging Face cache, and "
                f"a run downloads nothing; fetch it first: dllm-bench "
                f"prefetch {name}, or hf download {source}"
            )

    check_folder(model)


def check_folder(model: ModelGroup) -> None:
    """Check that a user's checkpoint folder contains everything a run reads."""
    source = model.path or ASSETS
    folder = place_of(source)
    missing = [] if source.startswith(ASSETS) or not folder.is_dir() else lacking(folder, model)
    if listed := "; ".join(missing):
        raise DllmBenchError(
            f"Model {model.name!r} is to be read from {folder}, which lacks {listed}; "
            "complete the folder and give the same command again."
        )


def check_memory(config: RunConfig) -> None:
    """Check that the weights fit into the memory of the device, in the dtype they are run in.

    There is no check if the device is absent, since a run can still be looked up, nor for a model
    object, which is in memory already.
    """
    is_in_files = not (config.model.is_served or config.model.is_object)
    if is_in_files and not missing_device(resolve_hardware(config.hardware)):
        require_memory(model_here(config))


def check_fits(config: RunConfig) -> None:
    """Check that decoder and baseline fit the batch and the model's settings."""
    for plain in {} if config.model.is_served else config.decoders.values():
        decoder = decoder_of(plain)
        if isinstance(decoder, ComposedDecoder):
            decoder.check_run_fits(config.model, config.batch)


def is_cached(hub_id: str) -> bool:
    """Return whether the hub's cache has any version of a repository."""
    return (Path(constants.HF_HUB_CACHE) / f"models--{hub_id.replace('/', '--')}").is_dir()
