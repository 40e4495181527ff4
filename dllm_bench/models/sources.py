"""Where a checkpoint lies: a folder, `assets/<name>` inside the package, or a hub id in the cache.

`locate` finds the folder, `content_hash` says what is in it, `fetch` is the only place that
downloads (for `dllm-bench prefetch`); a run never does.


Checkpoints for machines without network: download them once, with a manifest of what came.

The manifest lies in the hub cache it describes and names every file relative to it, with size and
sha256, so that cache and manifest can be copied together and verified where they arrive.
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
from dllm_bench.models import checkpoint, lora
from dllm_bench.models.checkpoint import digest, read_json, weight_files
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import ASSETS, assets_dir, place_of

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
SHIPPED_MODELS = (
    "tiny-d2f-diffucoder",
    "tiny-d2f-dream-base",
    "tiny-d2f-dream-instruct",
    "tiny-diffucoder",
    "tiny-dream-base",
    "tiny-dream-instruct",
    "tiny-llada",
    "tiny-llada-moe",
    "tiny-llada2",
    "tiny-qwen3",
    "tiny-sdar",
)
"""Models in the package's `assets` folder; scripts/embedded makes them."""
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")
FETCHED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # no code, no pickles


def checkpoint_folder(source: str, revision: str | None = None) -> Path:
    """The folder of a source, or a sentence that says how to get it."""
    folder = place_of(source)
    if folder.is_dir():
        return folder
    if source.startswith(ASSETS):
        shipped = sorted(path.name for path in assets_dir().glob("*/")) or ["none"]
        raise DllmBenchError(
            f"The package ships no model {source!r}; choose one of {', '.join(shipped)}, or "
            f"train it in a clone of the repository: python -m scripts.embedded {folder.name}"
        )
    if is_hub_id(source):
        return _cached_snapshot(source, revision)
    raise DllmBenchError(
        f"There is no model folder {source!r}; give an existing folder, assets/<name> or a hub id "
        f"(owner/name)."
    )


def is_hub_id(source: str) -> bool:
    """Whether a source is a repository of the hub."""
    known = source.startswith(ASSETS) or place_of(source).is_dir()
    return not known and HUB_ID.fullmatch(source) is not None


def _cached_snapshot(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        pinned = f" --revision {revision}" if revision else ""
        raise DllmBenchError(
            f"Model {hub_id!r} is not in the local Hugging Face cache and nothing is downloaded "
            f"during a run; fetch it first with dllm-bench prefetch, or with: "
            f"hf download {hub_id}{pinned}"
        ) from None


def download_snapshot(hub_id: str, revision: str | None, cache: Path | None = None) -> Path:
    """Download a repository's weights and texts (no code, no pickles); the snapshot's folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, cache_dir=cache, allow_patterns=list(FETCHED)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DllmBenchError(
            f"{hub_id} cannot be downloaded ({_first_line(error)}); check the network, the "
            f"revision, and `hf auth login` for gated models."
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def snapshot_commit(folder: Path) -> str | None:
    """The commit of a snapshot folder of the hub's cache."""
    return folder.name if COMMIT_SHA.fullmatch(folder.name) else None


def content_hash(spec: ModelSpec) -> str:
    """sha256 of what decides the model's output: config, weights, adapter.

    A hub id pinned to a commit is hashed by id and commit, so it needs no files.
    """
    parts = [_source_hash(spec.path, spec.revision, adapter=False)]
    if spec.lora is not None:
        parts.append(_source_hash(spec.lora, spec.lora_revision, adapter=True))
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _source_hash(source: str, revision: str | None, adapter: bool) -> str:
    if is_hub_id(source) and COMMIT_SHA.fullmatch(revision or ""):
        return hashlib.sha256(f"{source}@{revision}".encode()).hexdigest()
    folder = checkpoint_folder(source, revision)
    if adapter:
        files = lora.adapter_files(folder)
    else:
        files = [folder / "config.json", *checkpoint.weight_files(folder)]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise DllmBenchError(
            f"{folder} holds no {', '.join(absent)}; point the model's path at a checkpoint folder."
        )
    return _hash_once(tuple((file, *_version(file)) for file in files))


def _version(file: Path) -> tuple[str, int, int]:
    """What changes when a file changes: where a link leads, size, time."""
    return str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns


@lru_cache(maxsize=64)
def _hash_once(files: tuple[tuple[Path, str, int, int], ...]) -> str:
    """Hash files once per process; a changed file is a new key."""
    return checkpoint.files_hash(file for file, *_ in files)


MANIFEST = "dllm-bench-manifest.json"
Manifest = dict[str, Any]


def prefetch(specs: Iterable[ModelSpec], cache: Path) -> Iterator[tuple[str, Path | None]]:
    """Download what the models need and write the manifest; yields (source, folder).

    The folder is None for what is not on the hub: shipped models and local folders.
    """
    manifest = read_manifest(cache)
    for source, revision, is_adapter in checkpoint_sources(specs):
        if not is_hub_id(source):
            yield source, None
            continue
        folder = download_snapshot(source, revision, cache)
        weight_files(folder, lora.STEM if is_adapter else "model")
        manifest[source] = manifest_entry(folder, cache)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        yield source, folder


def checkpoint_sources(specs: Iterable[ModelSpec]) -> Iterator[tuple[str, str | None, bool]]:
    """(source, revision, is it an adapter) of every checkpoint, each once."""
    every = [
        part
        for spec in specs
        for part in ((spec.path, spec.revision, False), (spec.lora, spec.lora_revision, True))
    ]
    for source, revision, is_adapter in dict.fromkeys(every):
        if source is not None:
            yield source, revision, is_adapter


def manifest_entry(folder: Path, cache: Path) -> Manifest:
    """What a snapshot holds: commit, and size and hash of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "commit": snapshot_commit(folder),
        "files": {
            file.relative_to(cache).as_posix(): {
                "size": file.stat().st_size,
                "sha256": digest(file),
            }
            for file in files
        },
    }


def read_manifest(cache: Path) -> Manifest:
    """The manifest of a cache, {} without one."""
    file = cache / MANIFEST
    return read_json(file) if file.is_file() else {}


def verify_manifest(cache: Path) -> Iterator[tuple[str, list[str]]]:
    """(source, what is wrong with it) for everything the manifest of a cache names."""
    manifest = read_manifest(cache)
    if not manifest:
        raise DllmBenchError(
            f"{cache} holds no {MANIFEST}; name the folder that dllm-bench prefetch filled."
        )
    for source, described in sorted(manifest.items()):
        files = described["files"].items()
        yield (
            source,
            [wrong for name, facts in files if (wrong := file_problem(cache / name, facts))],
        )


def file_problem(file: Path, facts: Manifest) -> str | None:
    """What is wrong with a file, None where it is what was downloaded."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != facts["size"]:
        return f"{file.name} has {file.stat().st_size} bytes instead of {facts['size']}"
    return None if digest(file) == facts["sha256"] else f"{file.name} has other content"
