"""From a `ModelSpec` to a `LoadedModel`: find the checkpoint, check it, read it, describe it.

Sources are a folder, `assets/<name>` inside the package, or a hub id in the local cache; nothing is
downloaded and no code of a checkpoint is run. Light to import: transformers comes with `load`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dllm_bench.core.protocols import Denoiser, Turns
from dllm_bench.core.request import DllmBenchError, SpecialTokens
from dllm_bench.models import checkpoint, lora
from dllm_bench.models.dream import Dream
from dllm_bench.models.embedded import assets_root
from dllm_bench.models.layout import Layout
from dllm_bench.models.llada import LLaDA
from dllm_bench.models.text import TextFront, read_tokenizer, special_tokens, tokenizer_files

if TYPE_CHECKING:
    from dllm_bench.models.transformer import TransformerDenoiser

ADAPTERS: Mapping[str, Layout] = {"llada": LLaDA(), "dream": Dream()}
DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
BACKENDS = ("sdpa", "eager")
AUTO = "auto"
DEVICES = (AUTO, "cpu", "cuda")
ASSETS = "assets/"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class ModelSpec:
    """Which weights, read how. `path` and `lora`: a folder, assets/<name>, or a hub id.

    adapter None takes the one of the checkpoint's own model_type; device and dtype "auto" are a
    CUDA device with bfloat16 where there is one, else the CPU with float32.
    """

    name: str
    path: str
    adapter: str | None = None
    revision: str | None = None
    lora: str | None = None
    lora_revision: str | None = None
    chat: bool = False
    bos: bool = False
    dtype: str = AUTO
    attention: str = "sdpa"
    device: str = AUTO

    def __post_init__(self) -> None:
        self._check("dtype", self.dtype, (*DTYPES, AUTO))
        self._check("attention", self.attention, BACKENDS)
        if self.adapter is not None:
            self._check("adapter", self.adapter, tuple(ADAPTERS))
        kind, _, index = self.device.partition(":")
        self._check("device", kind if not index or index.isdigit() else self.device, DEVICES)

    def _check(self, field: str, found: str, known: tuple[str, ...]) -> None:
        if found not in known:
            raise DllmBenchError(
                f"Model {self.name!r} asks for {field} {found!r}; choose one of {', '.join(known)}."
            )


@dataclass(frozen=True)
class ModelFacts:
    """What was loaded, for the record; `revision` is the hub commit where known."""

    name: str
    adapter: str
    revision: str | None
    lora_revision: str | None
    weights_sha256: str
    tokenizer_sha256: str | None
    template_sha256: str | None
    dtype: str
    device: str
    attention: str
    parameters: int


@dataclass(frozen=True)
class LoadedModel:
    """A denoiser with its text front and facts."""

    denoiser: Denoiser
    text: TextFront
    facts: ModelFacts

    @property
    def special(self) -> SpecialTokens:
        return self.text.special

    def encode(self, text: str | Turns) -> list[int]:
        """Prompt ids of plain text or chat turns."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.text.decode(ids)


def load(spec: ModelSpec) -> LoadedModel:
    """Read the checkpoint behind `spec`; every refusal is a sentence."""
    folder = locate(spec.path, spec.revision)
    published = checkpoint.read_json(folder / "config.json")
    adapter, layout = choose_adapter(spec, published)
    tokenizer = read_tokenizer(folder)
    denoiser = _denoiser(spec, folder, layout, published, tokenizer)
    text = TextFront(spec.name, tokenizer, denoiser.special, spec.chat, spec.bos)
    token_files = tokenizer_files(folder)
    facts = ModelFacts(
        name=spec.name,
        adapter=adapter,
        revision=_commit(folder),
        lora_revision=_commit(locate(spec.lora, spec.lora_revision)) if spec.lora else None,
        weights_sha256=content_hash(spec),
        tokenizer_sha256=checkpoint.content_hash(token_files) if token_files else None,
        template_sha256=text.template_sha256 if tokenizer is not None else None,
        dtype=str(denoiser.dtype).removeprefix("torch."),
        device=str(denoiser.device),
        attention=spec.attention,
        parameters=sum(parameter.numel() for parameter in denoiser.module.parameters()),
    )
    return LoadedModel(denoiser, text, facts)


def choose_adapter(spec: ModelSpec, published: Mapping[str, Any]) -> tuple[str, Layout]:
    """The adapter of the checkpoint's own model_type; another one asked for is an error."""
    found = str(published.get("model_type"))
    known = {layout.model_type.lower(): name for name, layout in ADAPTERS.items()}
    name = known.get(found.lower())
    if name is None or spec.adapter not in (None, name):
        wanted = f"adapter {spec.adapter!r}" if spec.adapter else f"one of {', '.join(ADAPTERS)}"
        raise DllmBenchError(
            f"Model {spec.name!r} asks for {wanted}, but {spec.path} has model_type {found!r}; "
            f"correct the adapter or the path."
        )
    return name, ADAPTERS[name]


def _denoiser(
    spec: ModelSpec, folder: Path, layout: Layout, published: Mapping[str, Any], tokenizer: Any
) -> TransformerDenoiser:
    """Build the module without weights, check names and shapes, then fill it."""
    from dllm_bench.models.transformer import TransformerDenoiser

    layout.check(published)
    device, dtype = _device(spec), _dtype(spec)
    with torch.device("meta"):
        module = layout.build(published, spec.attention)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    tied = {"lm_head.weight"} if module.config.tie_word_embeddings else set()
    special = special_tokens(published, tokenizer, module.config.vocab_size)
    weights = checkpoint.Weights(checkpoint.weight_files(folder), layout.to_module)
    checkpoint.check_tensors(weights, shapes, tied, spec.path)
    adapter = _lora(spec, layout.to_module, shapes)
    checkpoint.fill(module, weights, adapter.merge, dtype, device)
    return TransformerDenoiser(module, special, layout.shifted)


def _lora(
    spec: ModelSpec, rename: Callable[[str], str], shapes: dict[str, tuple[int, ...]]
) -> lora.Lora:
    if spec.lora is None:
        return lora.NONE
    folder = locate(spec.lora, spec.lora_revision)
    found = lora.read_lora(folder, rename)
    lora.check_targets(found, shapes, folder)
    return found


def content_hash(spec: ModelSpec) -> str:
    """sha256 of what decides the model's output: config, weights, adapter.

    A hub id pinned to a commit is hashed by id and commit, so it needs no files.
    """
    parts = [_source_hash(spec.path, spec.revision, adapter=False)]
    if spec.lora is not None:
        parts.append(_source_hash(spec.lora, spec.lora_revision, adapter=True))
    return parts[0] if len(parts) == 1 else hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _source_hash(source: str, revision: str | None, adapter: bool) -> str:
    if _is_hub(source) and COMMIT.fullmatch(revision or ""):
        return hashlib.sha256(f"{source}@{revision}".encode()).hexdigest()
    folder = locate(source, revision)
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
    return checkpoint.content_hash(file for file, *_ in files)


def locate(source: str, revision: str | None = None) -> Path:
    """The folder of a source, or a sentence that says how to get it."""
    if source.startswith(ASSETS):
        folder = assets_root() / source.removeprefix(ASSETS)
        if not folder.is_dir():
            shipped = sorted(path.name for path in assets_root().glob("*/")) or ["none"]
            raise DllmBenchError(
                f"The package ships no model {source!r}; choose one of {', '.join(shipped)}, or "
                f"train it with: dllm-bench train embedded/{folder.name}"
            )
        return folder
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if _is_hub(source):
        return _cached_snapshot(source, revision)
    raise DllmBenchError(
        f"There is no model folder {source!r}; give an existing folder, assets/<name> or a hub id "
        f"(owner/name)."
    )


def _is_hub(source: str) -> bool:
    known = source.startswith(ASSETS) or Path(source).expanduser().is_dir()
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
            f"during a run; fetch it first with: hf download {hub_id}{pinned}"
        ) from None


def _commit(folder: Path) -> str | None:
    """The commit of a snapshot folder of the hub's cache."""
    return folder.name if COMMIT.fullmatch(folder.name) else None


def _device(spec: ModelSpec) -> torch.device:
    if spec.device != AUTO:
        found = torch.device(spec.device)
    else:
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise DllmBenchError(
            f"Model {spec.name!r} asks for device {spec.device!r}, but this machine has no CUDA "
            f"device; set hardware=cpu."
        )
    return found


def _dtype(spec: ModelSpec) -> torch.dtype:
    if spec.dtype != AUTO:
        return DTYPES[spec.dtype]
    return torch.bfloat16 if _device(spec).type == "cuda" else torch.float32
