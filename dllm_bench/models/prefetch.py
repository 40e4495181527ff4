"""Checkpoints for machines without network: download them once, with a manifest of what came.

The manifest lies in the hub cache it describes and names every file relative to it, with size and
sha256, so that cache and manifest can be copied together and verified where they arrive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models import lora
from dllm_bench.models.checkpoint import digest, read_json, weight_files
from dllm_bench.models.sources import commit, fetch, is_hub
from dllm_bench.models.spec import ModelSpec

MANIFEST = "dllm-bench-manifest.json"
Manifest = dict[str, Any]


def prefetch(specs: Iterable[ModelSpec], cache: Path) -> Iterator[tuple[str, Path | None]]:
    """Download what the models need and write the manifest; yields (source, folder).

    The folder is None for what is not on the hub: shipped models and local folders.
    """
    manifest = read_manifest(cache)
    for source, revision, is_adapter in sources(specs):
        if not is_hub(source):
            yield source, None
            continue
        folder = fetch(source, revision, cache)
        weight_files(folder, lora.STEM if is_adapter else "model")
        manifest[source] = entry(folder, cache)
        cache.mkdir(parents=True, exist_ok=True)
        (cache / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        yield source, folder


def sources(specs: Iterable[ModelSpec]) -> Iterator[tuple[str, str | None, bool]]:
    """(source, revision, is it an adapter) of every checkpoint, each once."""
    every = [
        part
        for spec in specs
        for part in ((spec.path, spec.revision, False), (spec.lora, spec.lora_revision, True))
    ]
    for source, revision, is_adapter in dict.fromkeys(every):
        if source is not None:
            yield source, revision, is_adapter


def entry(folder: Path, cache: Path) -> Manifest:
    """What a snapshot holds: commit, and size and hash of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {
        "commit": commit(folder),
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


def verify(cache: Path) -> Iterator[tuple[str, list[str]]]:
    """(source, what is wrong with it) for everything the manifest of a cache names."""
    manifest = read_manifest(cache)
    if not manifest:
        raise DllmBenchError(
            f"{cache} holds no {MANIFEST}; name the folder that dllm-bench prefetch filled."
        )
    for source, described in sorted(manifest.items()):
        files = described["files"].items()
        yield source, [wrong for name, facts in files if (wrong := fault(cache / name, facts))]


def fault(file: Path, facts: Manifest) -> str | None:
    """What is wrong with a file, None where it is what was downloaded."""
    if not file.is_file():
        return f"{file.name} is missing"
    if file.stat().st_size != facts["size"]:
        return f"{file.name} has {file.stat().st_size} bytes instead of {facts['size']}"
    return None if digest(file) == facts["sha256"] else f"{file.name} has other content"
