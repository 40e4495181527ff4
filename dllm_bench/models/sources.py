"""Where checkpoints are: a folder, `assets/<name>`, `imported/<name>`, or a hub id in the cache.

`checkpoint_folder` finds one on this machine and `content_hash` hashes what is in it; neither
downloads anything, and a run never does. Importing this module is cheap. `prefetch` downloads
models for machines without network, with a manifest of every file's size and sha256. The manifest
is stored in the cache and names files relative to it, so the two can be copied and verified on
another machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.folder import HUB_ID, read_json
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import ASSETS, IMPORTED, assets_dir, conf_dir, place_of

SHIPPED_MODELS = tuple(sorted(file.stem for file in (conf_dir() / "model").glob("tiny-*.yaml")))
"""Models in the package's `assets` folder; scripts/embedded makes them."""
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")
PINNED = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A revision that fixes a source's content: the hub's commit, or the sha256 of an imported file."""
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # no code, no pickles
MANIFEST = "dllm-bench-manifest.json"
Manifest = dict[str, Any]


def checkpoint_folder(source: str, revision: str | None = None) -> Path:
    """Return the folder of a source on this machine; DllmBenchError says how to get a missing
    one."""
    folder = place_of(source)
    if folder.is_dir():
        if source.startswith(IMPORTED) and revision is not None:
            _check_imported(folder, revision)
        return folder
    if source.startswith(ASSETS):
        shipped = [name for name in SHIPPED_MODELS if (assets_dir() / name).is_dir()] or ["none"]
        raise DllmBenchError(
            f"There is no {source!r} here; choose one of {', '.join(shipped)}. A clone of the "
            f"repository has it, or makes it: python -m scripts.embedded {folder.name}"
        )
    if source.startswith(IMPORTED):
        raise DllmBenchError(
            f"{source} is not in this user's cache folder ({folder}); make it: `make real` for the "
            f"models of the package, or dllm-bench import gguf FILE --to {source}"
        )
    if is_hub_id(source):
        return _cached_snapshot(source, revision)
    raise DllmBenchError(
        f"There is no model folder {source!r}; give an existing folder, assets/<name> or a hub id "
        f"(owner/name)."
    )


def _check_imported(folder: Path, sha256: str) -> None:
    """Raise DllmBenchError if a folder was imported from another file than the one of this hash."""
    found = read_json(folder / "config.json").get("imported_from")
    if not isinstance(found, dict) or found.get("sha256") != sha256:
        raise DllmBenchError(
            f"{folder} was not imported from the file whose sha256 is {sha256}, which the model's "
            "yaml names as its revision; remove the folder and import that file again, or set "
            "model.revision=null."
        )


def is_hub_id(source: str) -> bool:
    """Return whether a source is a repository of the hub."""
    on_disk = source.startswith((ASSETS, IMPORTED)) or place_of(source).is_dir()
    return not on_disk and HUB_ID.fullmatch(source) is not None


def _cached_snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        pinned = f" --revision {revision}" if revision else ""
        raise DllmBenchError(
            f"Model {hub_id!r} is not in the local Hugging Face cache and nothing is downloaded "
            f"during a run; fetch it first: hf download {hub_id}{pinned}, or "
            f"dllm-bench prefetch NAME for a model that `dllm-bench run --help` names"
        ) from None


def download_snapshot(hub_id: str, revision: str | None, cache: Path | None = None) -> Path:
    """Download a repository's weights and texts (no code, no pickles) and return its folder."""
    from huggingface_hub import snapshot_download  # slow to import
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, cache_dir=cache, allow_patterns=list(DOWNLOADED)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DllmBenchError(
            f"{hub_id} cannot be downloaded ({first_line}); check the network, the "
            f"revision, and `hf auth login` for gated models."
        ) from None


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot folder in the hub's cache; None for other folders."""
    return folder.name if COMMIT_SHA.fullmatch(folder.name) else None


def content_hash(spec: ModelSpec) -> str:
    """Return sha256 of what decides the model's output: config, weights, LoRA adapter.

    A hub id pinned to a commit is hashed by id and commit, and a model imported from a file of a
    given sha256 by its name and that, so they need no files.
    """
    hashes = [_source_hash(spec.path, spec.revision, is_lora=False)]
    if spec.lora is not None:
        hashes.append(_source_hash(spec.lora, spec.lora_revision, is_lora=True))
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _source_hash(source: str, revision: str | None, is_lora: bool) -> str:
    elsewhere = source.startswith(IMPORTED) or is_hub_id(source)
    if elsewhere and PINNED.fullmatch(revision or ""):
        return hashlib.sha256(f"{source}@{revision}".encode()).hexdigest()
    from dllm_bench.models import checkpoint  # imports torch

    folder = checkpoint_folder(source, revision)
    if is_lora:
        files = checkpoint.lora_files(folder)
    else:
        files = [folder / "config.json", *checkpoint.weight_files(folder)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise DllmBenchError(
            f"{folder} holds no {', '.join(missing)}; point the model's path at a checkpoint "
            f"folder."
        )
    return _cached_hash(tuple((file, *_version(file)) for file in files))


def _version(file: Path) -> tuple[str, int, int]:
    """Return what differs after a file is changed: the path a link leads to, size, modification
    time."""
    return str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=64)
def _cached_hash(files: tuple[tuple[Path, str, int, int], ...]) -> str:
    """Hash files, once per process for each version of them."""
    from dllm_bench.models import checkpoint  # imports torch

    return checkpoint.files_hash(file for file, *_ in files)


def prefetch(specs: Iterable[ModelSpec], cache: Path) -> Iterator[tuple[str, Path | None]]:
    """Download what the models need and write the manifest; yields (source, folder).

    The folder is None for what is not on the hub: shipped models and local folders.
    """
    from dllm_bench.models import checkpoint  # imports torch

    manifest = read_manifest(cache)
    for source, revision, is_lora in checkpoint_sources(specs):
        if not is_hub_id(source):
            yield source, None
            continue
        folder = download_snapshot(source, revision, cache)
        checkpoint.weight_files(folder, checkpoint.LORA_STEM if is_lora else "model")
        manifest[source] = manifest_entry(folder, cache)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        yield source, folder


def checkpoint_sources(specs: Iterable[ModelSpec]) -> Iterator[tuple[str, str | None, bool]]:
    """Yield (source, revision, whether it is a LoRA adapter) of everything to download, each
    once."""
    every = [
        part
        for spec in specs
        for part in ((spec.path, spec.revision, False), (spec.lora, spec.lora_revision, True))
    ]
    for source, revision, is_lora in dict.fromkeys(every):
        if source is not None:
            yield source, revision, is_lora


def manifest_entry(folder: Path, cache: Path) -> Manifest:
    """Return what a snapshot holds: its commit, and size and hash of every file."""
    from dllm_bench.models import checkpoint  # imports torch

    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "commit": snapshot_commit(folder),
        "files": {
            file.relative_to(cache).as_posix(): {
                "size": file.stat().st_size,
                "sha256": checkpoint.digest(file),
            }
            for file in files
        },
    }


def hub_cache() -> Path:
    """Return the folder in which the hub's client keeps what it downloaded."""
    from huggingface_hub import constants  # slow to import

    return Path(constants.HF_HUB_CACHE).expanduser()


def read_manifest(cache: Path) -> Manifest:
    """Return the manifest of a cache; {} if it has none."""
    file = cache / MANIFEST
    manifest = read_json(file) if file.is_file() else {}
    if not all(is_manifest_entry(entry) for entry in manifest.values()):
        raise DllmBenchError(f"{file} is no list of files with hashes; run dllm-bench prefetch.")
    return manifest


def is_manifest_entry(entry: object) -> bool:
    """Return whether an entry has the form of `manifest_entry`."""
    files = entry.get("files") if isinstance(entry, dict) else None
    return isinstance(files, dict) and all(
        isinstance(recorded, dict) and {"size", "sha256"} <= recorded.keys()
        for recorded in files.values()
    )


def manifest_problems(cache: Path, entry: Manifest) -> list[str]:
    """Return how the files of a source differ from its entry in the manifest of a cache."""
    problems = (file_problem(cache / name, recorded) for name, recorded in entry["files"].items())
    return [problem for problem in problems if problem]


def verify_manifest(cache: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (source, its problems) for every source in the manifest of a cache."""
    manifest = read_manifest(cache)
    if not manifest:
        raise DllmBenchError(
            f"{cache} holds no {MANIFEST}; name the folder that dllm-bench prefetch filled."
        )
    for source, entry in sorted(manifest.items()):
        yield source, manifest_problems(cache, entry)


def file_problem(file: Path, recorded: Manifest) -> str | None:
    """Return how a file differs from its recorded size and hash; None if it does not."""
    from dllm_bench.models import checkpoint  # imports torch

    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != recorded["size"]:
        return f"{file.name} has {file.stat().st_size} bytes instead of {recorded['size']}"
    same = checkpoint.digest(file) == recorded["sha256"]
    return None if same else f"{file.name} has other content"
