"""From a `ModelSpec` to a `LoadedModel`: find the checkpoint, check it, read it, describe it.

Sources are a folder, `assets/<name>` inside the package, or a hub id in the local cache; nothing is
downloaded and no code of a checkpoint is run. Light to import: transformers comes with `load`.


What a checkpoint is, told from config, tokenizer and headers: sizes, ids, memory it would take.

For `dllm-bench doctor MODEL`, before anything large is read. Refuses what loading would refuse.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dllm_bench.core.benchmark import Turns
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models import checkpoint, lora
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.layouts import CheckpointLayout, PublishedConfig
from dllm_bench.models.sources import checkpoint_folder, content_hash, snapshot_commit
from dllm_bench.models.spec import AUTO, NONE, ModelSpec
from dllm_bench.models.text import (
    Sources,
    TextCodec,
    read_tokenizer,
    special_tokens,
    tokenizer_files,
)

if TYPE_CHECKING:
    from dllm_bench.models.transformer import TransformerDenoiser


@dataclass(frozen=True)
class ModelMetadata:
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
    """A denoiser, its text front and its facts; `form`, `block`: attention it was trained with."""

    denoiser: Denoiser
    text: TextCodec
    facts: ModelMetadata
    form: str = "full"
    block: int | None = None

    @property
    def special(self) -> SpecialTokens:
        return self.text.special

    def attention_warning(self, attention: str, block: int) -> str | None:
        """A sentence where a decoder uses other attention than the weights were trained with."""
        trained, asked = self.form, attention
        same_block = self.block in (None, block) or asked == "full"
        if (trained == asked and same_block) or trained == "causal":
            return None  # what an autoregressive model cannot do is refused by its denoiser
        over = f" over blocks of {self.block}" if self.block else ""
        wanted = f" over blocks of {block}" if asked != "full" else ""
        return (
            f"Model {self.facts.name!r} was trained with {trained} attention{over}, the decoder "
            f"uses {asked} attention{wanted}: an approximation that may cost score."
        )

    def encode(self, text: str | Turns) -> list[int]:
        """Prompt ids of plain text or chat turns."""
        return self.text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        return self.text.decode(ids)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose config is read and understood, before any weight is touched."""

    spec: ModelSpec
    folder: Path
    published: PublishedConfig
    adapter: str
    layout: CheckpointLayout

    @property
    def form(self) -> str:
        """The attention the weights were trained with."""
        return self.spec.attention_form or self.layout.attention

    @property
    def shifted(self) -> bool:
        """Whether row i predicts position i + 1."""
        return self.layout.shifted if self.spec.shifted is None else self.spec.shifted

    def empty_module(self) -> Any:
        """The module without weights, or a sentence where config.json makes none."""
        try:
            with torch.device("meta"):
                return self.layout.build(self.published, self.spec.attention)
        except DllmBenchError:
            raise
        except Exception as error:  # numbers as text, sizes below one: found by whoever uses them
            raise DllmBenchError(
                f"{self.folder / 'config.json'} does not describe a {self.adapter} model "
                f"({type(error).__name__}: {' '.join(str(error).split())}); complete it from the "
                "published config."
            ) from error

    def weights(self, module: Any) -> checkpoint.Weights:
        """The checkpoint's tensors, which fit the module's by name and shape."""
        weights = checkpoint.Weights(checkpoint.weight_files(self.folder), self.layout.elsewhere)
        head = self.layout.to_published("lm_head.weight")
        tied = {head} if module.config.tie_word_embeddings else set()
        checkpoint.check_tensors(weights, self.expected(module), tied, self.spec.path)
        return weights

    def expected(self, module: Any) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor the checkpoint has to hold."""
        return checkpoint.published_shapes(self.layout, checkpoint.shapes_of(module))

    def text(self, tokenizer: Any, special: SpecialTokens) -> TextCodec:
        """The tokenizer with the habits the spec asks for."""
        spec = self.spec
        return TextCodec(spec.name, tokenizer, special, spec.chat, spec.bos, spec.thinking)

    def special(self, tokenizer: Any, vocab_size: int) -> SpecialTokens:
        """The special ids, checked."""
        file = self.folder / "generation_config.json"
        generation = checkpoint.read_json(file) if file.is_file() else {}
        ids = {**self.layout.text(self.published), **self.published}
        sources = Sources(ids, tokenizer, generation)
        return special_tokens(sources, vocab_size, self.spec.mask_token, self.form == "causal")


def open_checkpoint(spec: ModelSpec) -> OpenedCheckpoint:
    """Find the checkpoint behind `spec` and choose its adapter; every refusal is a sentence."""
    folder = checkpoint_folder(spec.path, spec.revision)
    published = checkpoint.read_json(folder / "config.json")
    adapter, layout = choose_adapter(spec, published)
    layout.check(published)
    return OpenedCheckpoint(spec, folder, published, adapter, layout)


def load_model(spec: ModelSpec) -> LoadedModel:
    """Read the checkpoint behind `spec`; every refusal is a sentence."""
    opened = open_checkpoint(spec)
    tokenizer = read_tokenizer(opened.folder)
    denoiser = _denoiser(opened, tokenizer)
    text = opened.text(tokenizer, denoiser.special)
    token_files = tokenizer_files(opened.folder)
    facts = ModelMetadata(
        name=spec.name,
        adapter=opened.adapter,
        revision=snapshot_commit(opened.folder),
        lora_revision=snapshot_commit(checkpoint_folder(spec.lora, spec.lora_revision))
        if spec.lora
        else None,
        weights_sha256=content_hash(spec),
        tokenizer_sha256=checkpoint.files_hash(token_files) if token_files else None,
        template_sha256=text.template_sha256 if tokenizer is not None else None,
        dtype=str(denoiser.dtype).removeprefix("torch."),
        device=str(denoiser.device),
        attention=spec.attention,
        parameters=sum(parameter.numel() for parameter in denoiser.module.parameters()),
    )
    return LoadedModel(denoiser, text, facts, opened.form, spec.block)


def load_text_codec(spec: ModelSpec) -> TextCodec:
    """The text front of `load`, without building the module."""
    opened = open_checkpoint(spec)
    tokenizer = read_tokenizer(opened.folder)
    settings = opened.layout.settings(opened.layout.text(opened.published))
    return opened.text(tokenizer, opened.special(tokenizer, settings["vocab_size"]))


def choose_adapter(spec: ModelSpec, published: PublishedConfig) -> tuple[str, CheckpointLayout]:
    """The adapter of the checkpoint's own config; another one asked for is an error."""
    name = next((name for name, layout in ADAPTERS.items() if layout.recognises(published)), None)
    if name is None or spec.adapter not in (None, name):
        wanted = f"adapter {spec.adapter!r}" if spec.adapter else f"one of {', '.join(ADAPTERS)}"
        whose = f" ({name})" if name else ""
        raise DllmBenchError(
            f"Model {spec.name!r} asks for {wanted}, but {spec.path} has model_type "
            f"{published.get('model_type')!r}{whose}; correct the adapter or the path."
        )
    return name, ADAPTERS[name]


def _denoiser(opened: OpenedCheckpoint, tokenizer: Any) -> TransformerDenoiser:
    """Build the module without weights, check names and shapes, then fill it."""
    from dllm_bench.models.acceleration import CompiledDenoiser, quantize
    from dllm_bench.models.transformer import TransformerDenoiser

    spec, device = opened.spec, device_of(opened.spec)
    module = opened.empty_module()
    special = opened.special(tokenizer, module.config.vocab_size)
    weights = opened.weights(module)
    adapter = _lora(spec, opened.expected(module))
    merge = adapter.merge if spec.merge_lora else lora.NONE.merge
    checkpoint.fill(module, opened.layout, weights, merge, device, dtype_of(spec))
    if not spec.merge_lora:
        lora.attach(adapter, module, opened.layout)
    if spec.quantization != NONE:
        quantize(module, spec.quantization, device)
    kind = TransformerDenoiser if spec.compile == NONE else CompiledDenoiser
    denoiser = kind(module, special, opened.shifted, attention_form=opened.form, block=spec.block)
    return denoiser.compile(spec.compile) if isinstance(denoiser, CompiledDenoiser) else denoiser


def _lora(spec: ModelSpec, expected: dict[str, tuple[int, ...]]) -> lora.Lora:
    if spec.lora is None:
        return lora.NONE
    folder = checkpoint_folder(spec.lora, spec.lora_revision)
    found = lora.read_lora(folder)
    lora.check_targets(found, expected, folder)
    return found


def device_of(spec: ModelSpec) -> torch.device:
    """The device asked for, or a sentence where it is not there."""
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


def dtype_of(spec: ModelSpec) -> torch.dtype:
    """The dtype asked for; "auto" goes by the device."""
    if spec.dtype != AUTO:
        found: torch.dtype = getattr(torch, spec.dtype)
        return found
    return torch.bfloat16 if device_of(spec).type == "cuda" else torch.float32


@dataclass(frozen=True)
class Inspection:
    """Facts of one checkpoint; the memory is that of the run's dtype."""

    opened: OpenedCheckpoint
    folders: dict[str, Path]  # source -> folder, the adapter's included
    files: dict[Path, int]  # weight file -> bytes
    stored: dict[str, int]  # dtype in the files -> tensors
    dtype: torch.dtype
    parameters: int
    cached_per_position: int  # numbers in the keys and values of one position
    text: TextCodec

    @property
    def commits(self) -> dict[str, str | None]:
        """Source -> commit, None outside of the hub's cache."""
        return {source: snapshot_commit(folder) for source, folder in self.folders.items()}

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return self.parameters * self.dtype.itemsize

    def cache_bytes(self, positions: int) -> int:
        """Memory of the keys and values of so many positions."""
        return positions * self.cached_per_position * self.dtype.itemsize

    def named_ids(self) -> dict[str, str]:
        """Role -> id and text of each special token."""
        tokenizer = self.text.tokenizer
        ids = {role: i for role, i in asdict(self.text.special).items() if i is not None}
        texts = {i: tokenizer.convert_ids_to_tokens(i) for i in ids.values()} if tokenizer else {}
        return {role: " ".join([str(i), texts.get(i) or ""]).strip() for role, i in ids.items()}


def inspect_checkpoint(spec: ModelSpec) -> Inspection:
    """Read what says what the checkpoint is; every refusal is a sentence."""
    opened = open_checkpoint(spec)
    module = opened.empty_module()
    weights = opened.weights(module)
    tokenizer = read_tokenizer(opened.folder)
    special: SpecialTokens = opened.special(tokenizer, module.config.vocab_size)
    folders, files = {spec.path: opened.folder}, checkpoint.weight_files(opened.folder)
    if spec.lora is not None:
        folders[spec.lora] = checkpoint_folder(spec.lora, spec.lora_revision)
        files += checkpoint.weight_files(folders[spec.lora], lora.STEM)
    return Inspection(
        opened=opened,
        folders=folders,
        files={file: file.stat().st_size for file in files},
        stored=dict(Counter(weights.dtype(name) for name in weights.names)),
        dtype=dtype_of(spec),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        cached_per_position=2 * sum(x.self_attn.k_proj.out_features for x in module.model.layers),
        text=opened.text(tokenizer, special),
    )
