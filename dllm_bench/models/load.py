"""Load a model (`load_model`), or say what would be loaded (`inspect_checkpoint`).

Nothing is downloaded and no code of a checkpoint is run. Importing this module is cheap: the
modules that need transformers are imported when a model is built.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dllm_bench.core.benchmark import Turns
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import SpecialTokens
from dllm_bench.models import checkpoint, sources
from dllm_bench.models.adapters import ADAPTERS, CheckpointLayout, PublishedConfig, value
from dllm_bench.models.plain_module import FAMILIES, PlainModule
from dllm_bench.models.spec import AUTO, CANVAS, MASKLESS, NONE, ModelSpec
from dllm_bench.models.text import (
    SpecialTokenSources,
    TextCodec,
    library_errors_named,
    read_tokenizer,
    special_tokens,
    tokenizer_files,
)
from dllm_bench.paths import ASSETS

if TYPE_CHECKING:
    from dllm_bench.models.transformer import TransformerDenoiser


@dataclass(frozen=True, kw_only=True)
class ModelMetadata:
    """Description of a loaded model, for the record of a run."""

    name: str
    """Name in the model's yaml."""
    adapter: str
    """Name in `ADAPTERS`."""
    revision: str | None = None
    """Commit of the checkpoint on the hub, where known."""
    lora_revision: str | None = None
    """Commit of the LoRA adapter on the hub, where known."""
    weights_sha256: str | None = None
    """`content_hash` of the spec; None for a model that was made elsewhere, see `content`."""
    tokenizer_sha256: str | None = None
    """Hash of the files that decide how text becomes ids."""
    template_sha256: str | None = None
    """Hash of the chat template, None where it is not used."""
    dtype: str
    """Dtype of the weights."""
    device: str
    """Device of the weights."""
    attention: str
    """Attention kernel."""
    parameters: int
    """Number of parameters."""


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to decode."""

    denoiser: Denoiser = field(repr=False)
    """Tokens to logits."""
    text: TextCodec = field(repr=False)
    """Text to tokens and back."""
    metadata: ModelMetadata
    """What was loaded."""
    attention_form: str = "full"
    """Attention the weights were trained with: full, block_causal or causal."""
    block: int | None = None
    """Block length the weights were trained with, where there is one."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The settings of a run's `model` group that describe it."""
    content: Callable[[], dict[str, str]] | None = field(default=None, repr=False)
    """For a model that was made elsewhere: computes the hashes that identify a run's inputs. They
    are computed again for each run, because the object may have been trained in between."""

    @property
    def special(self) -> SpecialTokens:
        """Ids of the special tokens."""
        return self.text.special

    def attention_warning(self, attention: str, block: int) -> str | None:
        """Return a warning if a decoder uses other attention than the weights were trained with.

        None if it is the same, and for autoregressive models, whose decoders must fit anyway.
        Models trained for WeDLM's "feed_order" are described as block_causal with blocks of 1.
        """
        trained = self.attention_form
        if attention == "feed_order":
            is_same = (trained, self.block) == ("block_causal", 1)
        else:
            is_same = trained == attention and (attention == "full" or self.block in (None, block))
        if is_same or trained == "causal":
            return None
        trained_blocks = f" over blocks of {self.block}" if self.block else ""
        feed_order = "attention that is causal in the order in which rows are fed"
        words = {"full": "full attention", "feed_order": feed_order}
        used = words.get(attention, f"{attention} attention over blocks of {block}")
        return (
            f"Model {self.metadata.name!r} was trained with {trained} attention{trained_blocks}, "
            f"the decoder uses {used}: an approximation that may cost score."
        )

    def encode(self, text: str | Turns) -> list[int]:
        """Return the prompt ids of plain text or chat turns; DllmBenchError for a token that the
        model does not have."""
        ids, size = self.text.encode(text), self.denoiser.vocab_size
        if ids and max(ids) >= size:
            raise DllmBenchError(
                f"The prompt holds {self.text.decode_visibly([max(ids)])!r}, which is token "
                f"{max(ids)} of the tokenizer, and model {self.metadata.name!r} has {size} tokens; "
                "leave it out, or use the files of one checkpoint."
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens left out."""
        return self.text.decode(ids)


@dataclass(frozen=True)
class OpenedCheckpoint:
    """A checkpoint whose config is read and checked; no weight is read yet."""

    spec: ModelSpec
    """The model as its yaml describes it."""
    folder: Path
    """Where the checkpoint is."""
    published: PublishedConfig
    """Its config.json."""
    adapter: str
    """Name in `ADAPTERS`."""
    layout: CheckpointLayout
    """The adapter's layout."""

    @property
    def attention_form(self) -> str:
        """The attention the weights were trained with."""
        return self.spec.attention_form or self.layout.attention

    @property
    def shifted(self) -> bool:
        """Whether row i predicts position i + 1."""
        return self.layout.shifted if self.spec.shifted is None else self.spec.shifted

    @property
    def block(self) -> int | None:
        """The block length the weights were trained with, if the spec or config.json gives one."""
        given = self.published.get("block_size", self.published.get("bd_size"))
        return self.spec.block or (given if self.attention_form == "block_causal" else None)

    @property
    def lora_folder(self) -> Path | None:
        """Where the LoRA adapter is, if there is one."""
        lora = self.spec.lora
        return sources.checkpoint_folder(lora, self.spec.lora_revision) if lora else None

    @property
    def is_plain(self) -> bool:
        """Whether the weights are held by a `PlainModule`: of dense embedded models, which are so
        small that importing transformers' classes takes longer than a text.
        """
        spec, layout = self.spec, self.layout
        usual = (spec.attention, spec.compile, spec.quantization) == ("sdpa", NONE, NONE)
        unchanged = usual and (spec.lora is None or spec.merge_lora)
        embedded = spec.path.startswith(ASSETS)
        return embedded and unchanged and layout.family_of(self.published) in FAMILIES

    def empty_module(self) -> Any:
        """Return the module on the meta device; DllmBenchError where config.json describes none."""
        self._check_counts()
        build = partial(build_module, self.layout, self.published, self.spec.attention)
        text = self.layout.text_config(self.published)
        failed = f"{self.folder / 'config.json'} does not describe a {self.adapter} model"
        todo = "complete it from the published config"
        with library_errors_named(failed, todo), torch.device("meta"):
            if not self.is_plain:
                return build()
            return PlainModule(self.layout.family_of(text), self.layout.settings(text), build)

    def _check_counts(self) -> None:
        """Compare numbers of layers and experts with the tensors' names.

        A module of a wrong number of layers may take hours to build, so this comes first.
        """
        stored = self.headers()
        text = self.layout.text_config(self.published)
        for key, part in self.layout.counts.items():
            said, found = text.get(key), stored.count(part)
            if isinstance(said, int) and said != found and (said > 0 or found > 0):
                raise DllmBenchError(
                    f"{self.folder / 'config.json'} says {key}={said}, and the weights beside it "
                    f"have {found} {part}; use the files of one checkpoint."
                )

    def headers(self) -> checkpoint.Weights:
        """Return the checkpoint's tensors, unchecked."""
        return checkpoint.Weights(sources.weight_files(self.folder), self.layout.ignored)

    def weights(self, module: Any) -> checkpoint.Weights:
        """Return the checkpoint's tensors, checked against the module's names and shapes."""
        weights = self.headers()
        tied = set(map(self.layout.to_published, checkpoint.tied(module)[1:]))
        expected = checkpoint.published_shapes(self.layout, checkpoint.shapes_of(module))
        checkpoint.check_tensors(weights, expected, tied, self.spec.path)
        return weights

    def codec(self, tokenizer: Any, special: SpecialTokens) -> TextCodec:
        """Return the tokenizer, used as the spec says."""
        spec = self.spec
        return TextCodec(spec.name, tokenizer, special, spec.chat, spec.bos, spec.thinking)

    def special(self, tokenizer: Any, vocab_size: int) -> SpecialTokens:
        """Return ids of the special tokens, checked against each other and the vocabulary."""
        file = self.folder / "generation_config.json"
        generation = sources.read_json(file) if file.is_file() else {}
        ids = {**self.layout.text_config(self.published), **self.published}
        named = SpecialTokenSources(ids, tokenizer, generation)
        maskless = self.attention_form in MASKLESS
        return special_tokens(named, vocab_size, self.spec.mask_token, maskless)


def build_module(layout: CheckpointLayout, published: PublishedConfig, backend: str) -> Any:
    """Return a `*ForCausalLM` module of the published size, its weights not yet loaded.

    `backend` is the attention kernel, as transformers names it.
    """
    text = layout.text_config(published)
    if layout.attention == CANVAS:
        from dllm_bench.models.canvas import CanvasModule  # imports transformers, which is slow

        return CanvasModule(layout.settings(text), value(published, "canvas_length"), backend)
    import transformers

    kind = getattr(transformers, f"{layout.family_of(text)}ForCausalLM")
    return kind(kind.config_class(**layout.settings(text), attn_implementation=backend))


def open_checkpoint(spec: ModelSpec) -> OpenedCheckpoint:
    """Find the checkpoint of `spec` and its adapter, and check its config."""
    folder = sources.checkpoint_folder(spec.path, spec.revision)
    published = sources.published_config(folder)
    adapter = sources.require_adapter(f"Model {spec.name!r} ({spec.path})", published)
    if spec.adapter not in (None, adapter):
        raise DllmBenchError(
            f"Model {spec.name!r} asks for adapter {spec.adapter!r}, and {spec.path} has "
            f"model_type {published.get('model_type')!r}, which adapter {adapter!r} reads; set "
            f"model.adapter={adapter}, or name the checkpoint that {spec.adapter!r} reads."
        )
    ADAPTERS[adapter].check(published)
    return OpenedCheckpoint(spec, folder, published, adapter, ADAPTERS[adapter])


def load_model(spec: ModelSpec) -> LoadedModel:
    """Load a model; DllmBenchError says what is missing or does not fit."""
    opened = open_checkpoint(spec)
    tokenizer = read_tokenizer(folder := opened.folder)
    denoiser = _denoiser(opened, tokenizer)
    text = opened.codec(tokenizer, denoiser.special)
    metadata = ModelMetadata(
        name=spec.name,
        adapter=opened.adapter,
        revision=sources.snapshot_commit(folder),
        lora_revision=sources.snapshot_commit(lora) if (lora := opened.lora_folder) else None,
        weights_sha256=sources.content_hash(spec),
        tokenizer_sha256=sources.files_hash(files) if (files := tokenizer_files(folder)) else None,
        template_sha256=text.template_sha256 if tokenizer is not None else None,
        dtype=str(denoiser.dtype).removeprefix("torch."),
        device=str(denoiser.device),
        attention=spec.attention,
        parameters=denoiser.parameters,
    )
    return LoadedModel(denoiser, text, metadata, opened.attention_form, opened.block)


def load_text_codec(spec: ModelSpec) -> TextCodec:
    """Return the text codec of `load_model`, without building the module."""
    opened = open_checkpoint(spec)
    tokenizer = read_tokenizer(opened.folder)
    settings = opened.layout.settings(opened.layout.text_config(opened.published))
    return opened.codec(tokenizer, opened.special(tokenizer, settings["vocab_size"]))


def _denoiser(opened: OpenedCheckpoint, tokenizer: Any) -> TransformerDenoiser:
    """Build the module without weights, check names and shapes, then load the weights."""
    from dllm_bench.models.acceleration import quantize  # imports transformers, which takes seconds

    spec, device = opened.spec, device_of(opened.spec)
    module = opened.empty_module()
    special = opened.special(tokenizer, module.config.vocab_size)
    weights, adapter = opened.weights(module), checkpoint.NO_LORA
    if opened.lora_folder:
        adapter = checkpoint.read_lora(opened.lora_folder)
        expected = checkpoint.published_shapes(opened.layout, checkpoint.shapes_of(module))
        tied = set(map(opened.layout.to_published, checkpoint.tied(module)))
        checkpoint.check_lora_targets(adapter, expected, opened.lora_folder, tied)
    merged = adapter if spec.merge_lora else checkpoint.NO_LORA
    dtype, copied = dtype_of(spec), bool(merged.pairs)
    checkpoint.fill(module, opened.layout, weights, merged.merge, device, dtype, copied)
    if not spec.merge_lora:
        checkpoint.attach_lora(adapter, module, opened.layout)
    if spec.quantization != NONE:
        quantize(module, spec.quantization, device)
    form = opened.attention_form
    kind = denoiser_class(spec.compile, form)
    return kind(module, special, opened.shifted, attention_form=form, block=spec.block)


def denoiser_class(mode: str, form: str = "full") -> type[TransformerDenoiser]:
    """Return the class that runs a model of a form of attention in a mode of `hardware.compile`."""
    from dllm_bench.models.acceleration import CompiledDenoiser, FixedShapeDenoiser
    from dllm_bench.models.transformer import TransformerDenoiser

    if form == CANVAS:
        from dllm_bench.models.canvas import CanvasDenoiser

        if mode != NONE:
            raise DllmBenchError(
                f"hardware.compile={mode} runs one kind of forward, and a model of {form} "
                "attention encodes and denoises; set hardware.compile=none."
            )
        return CanvasDenoiser
    return {NONE: TransformerDenoiser, "default": CompiledDenoiser, "max": FixedShapeDenoiser}[mode]


def device_of(spec: ModelSpec) -> torch.device:
    """Return the device of the spec; DllmBenchError if it is CUDA and this machine has none."""
    has_cuda = torch.cuda.is_available()
    device = torch.device(spec.device if spec.device != AUTO else "cuda" if has_cuda else "cpu")
    if device.type == "cuda" and not has_cuda:
        raise DllmBenchError(
            f"Model {spec.name!r} asks for device {spec.device!r}, but this machine has no CUDA "
            f"device; set hardware=cpu."
        )
    return device


def dtype_of(spec: ModelSpec) -> torch.dtype:
    """Return the dtype of the spec; "auto" depends on the device."""
    if spec.dtype != AUTO:
        return getattr(torch, spec.dtype)
    return torch.bfloat16 if device_of(spec).type == "cuda" else torch.float32


@dataclass(frozen=True)
class Inspection:
    """Description of a checkpoint and its memory use, for `dllm-bench doctor MODEL`."""

    opened: OpenedCheckpoint
    """Its config, adapter and folder."""
    folders: dict[str, Path]
    """Source -> folder, the LoRA adapter's included."""
    files: dict[Path, int]
    """Weight file -> size in bytes."""
    stored: dict[str, int]
    """Dtype in the files -> number of tensors."""
    dtype: torch.dtype
    """Dtype the model would run in."""
    parameters: int
    """Number of parameters."""
    cached_per_position: int
    """Numbers in the keys and values of one position, over all layers."""
    text: TextCodec
    """Text to tokens and back."""

    @property
    def commits(self) -> dict[str, str | None]:
        """Source -> commit; None outside of the hub's cache."""
        return {source: sources.snapshot_commit(folder) for source, folder in self.folders.items()}

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights, in bytes."""
        return self.parameters * self.dtype.itemsize

    def cache_bytes(self, positions: int) -> int:
        """Return the memory of the keys and values of `positions` positions, in bytes."""
        return positions * self.cached_per_position * self.dtype.itemsize

    def named_ids(self) -> dict[str, str]:
        """Return role -> id and text of each special token."""
        tokenizer = self.text.tokenizer
        ids = {role: i for role, i in asdict(self.text.special).items() if i is not None}
        texts = {i: tokenizer.convert_ids_to_tokens(i) for i in ids.values()} if tokenizer else {}
        return {role: " ".join([str(i), texts.get(i) or ""]).strip() for role, i in ids.items()}


def inspect_checkpoint(spec: ModelSpec) -> Inspection:
    """Read config, tokenizer and tensor headers; raise the errors that `load_model` would raise for
    them."""
    opened = open_checkpoint(spec)
    module = opened.empty_module()
    weights = opened.weights(module)
    tokenizer = read_tokenizer(opened.folder)
    special = opened.special(tokenizer, module.config.vocab_size)
    folders, files = {spec.path: opened.folder}, sources.weight_files(opened.folder)
    if spec.lora and opened.lora_folder:
        folders[spec.lora] = opened.lora_folder
        files += sources.weight_files(opened.lora_folder, sources.LORA_STEM)
    return Inspection(
        opened=opened,
        folders=folders,
        files={file: file.stat().st_size for file in files},
        stored=dict(Counter(weights.dtype(name) for name in weights.names)),
        dtype=dtype_of(spec),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        cached_per_position=2 * sum(x.self_attn.k_proj.out_features for x in module.model.layers),
        text=opened.codec(tokenizer, special),
    )
