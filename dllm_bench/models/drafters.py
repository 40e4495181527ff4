"""Trained drafters by path: DFlash and DSpark, EAGLE-3, and small models that draft.

A drafter is a value: its content (sha256 over config and weights) decides what it is, the place it
lies at does not. Its network is read when a target is there to stand beside, and put on the
target's device in the target's dtype. What configs say is in `drafter_facts`, the networks are in
`drafter_nets`. Light to import.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Target
from dllm_bench.models import checkpoint
from dllm_bench.models.adapters import ADAPTERS
from dllm_bench.models.drafter_config import DrafterConfig, architecture, read_drafter_config
from dllm_bench.models.layouts import PublishedConfig, value
from dllm_bench.models.sources import checkpoint_folder, content_hash
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import ASSETS, place_of
from dllm_bench.registry import register

if TYPE_CHECKING:
    from dllm_bench.models.drafter_networks import (
        BlockDraftNetwork,
        ChainDraftNetwork,
        DraftNetwork,
    )
    from dllm_bench.models.transformer import TransformerDenoiser


SHIPPED = ASSETS + "drafters/"
TABLES = ("embed_tokens", "lm_head")  # the target's, in the checkpoint
INITIAL_STD = 0.02  # transformers' initializer_range


@dataclass(frozen=True)
class Stored:
    """A checkpoint in `source`: a folder, assets/drafters/<name>, or a hub id.

    sha256 over config and weights is filled in, and compared where it is given.
    """

    source: str = field(compare=False)
    revision: str | None = field(default=None, compare=False)
    sha256: str = ""

    def __post_init__(self) -> None:
        if self.source.startswith(SHIPPED) and not place_of(self.source).is_dir():
            raise DllmBenchError(
                f"The package ships no drafter {self.source!r}; name a folder or a hub id with "
                "decoder.draft.drafter.source, of a drafter that was trained beside this target."
            )
        found = content_hash(ModelSpec("drafter", self.source, revision=self.revision))
        if self.sha256 not in ("", found):
            raise DllmBenchError(
                f"Drafter {self.source!r} is asked for with sha256 {self.sha256[:10]}…, its files "
                f"have {found[:10]}…; name the one that was meant, or leave sha256 out."
            )
        object.__setattr__(self, "sha256", found)

    @property
    def published(self) -> PublishedConfig:
        """The checkpoint's config.json."""
        return _published(self.source, self.revision, self.sha256)


@dataclass(frozen=True)
class Trained(Stored):
    """A network that reads the target's features."""

    chain: ClassVar[bool]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.facts.chain != self.chain:
            kind, other = ("eagle3", "dflash or dspark")[:: 1 if self.facts.chain else -1]
            raise DllmBenchError(
                f"Drafter {self.source!r} is a {architecture(self.published)}, which this draft "
                f"({other}) cannot use; choose decoder/draft={kind}."
            )

    @property
    def facts(self) -> DrafterConfig:
        """What its config says."""
        return _facts(self.source, self.revision, self.sha256)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target it reads."""
        return self.facts.feature_layers

    def _beside(self, target: Target) -> DraftNetwork:
        self._check(target)
        return _network(self, target.device, target.dtype)

    def _check(self, target: Target) -> None:
        """Refuse a target of other sizes than the drafter was trained beside."""
        own = (
            self.facts.target_layers,
            value(self.published, "vocab_size"),
            value(self.published, "hidden_size"),
        )
        found = (target.num_layers, target.vocab_size, target.hidden_size)
        if own != found:
            raise DllmBenchError(
                f"Drafter {self.source!r} was trained beside a target of {own[0]} layers, {own[1]} "
                f"tokens and width {own[2]}, this one has {found[0]}, {found[1]} and {found[2]}; "
                "choose the drafter of this target."
            )


@register("drafter.block")
@dataclass(frozen=True)
class TrainedBlock(Trained):
    """DFlash or DSpark; implements `core.speculative.BlockDrafter`."""

    chain: ClassVar[bool] = False

    @property
    def slots(self) -> int:
        """Slots of a block, anchor included."""
        return self.facts.slots

    @property
    def silent(self) -> int:
        """Leading slots that predict nothing."""
        return self.facts.silent

    @property
    def has_transition_head(self) -> bool:
        """Whether it has a head of transitions."""
        return self.facts.rank > 0

    @property
    def has_confidence_head(self) -> bool:
        """Whether it has a confidence head."""
        return self.facts.confidence

    def on(self, target: Target) -> BlockDraftNetwork:
        """The network, beside the target."""
        return self._beside(target)  # type: ignore[return-value]


@register("drafter.chain")
@dataclass(frozen=True)
class TrainedChain(Trained):
    """EAGLE-3; implements `core.speculative.ChainDrafter`."""

    chain: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        """Tokens it was trained to draft in a row."""
        return self.facts.slots

    def on(self, target: Target) -> ChainDraftNetwork:
        """The network, beside the target."""
        return self._beside(target)  # type: ignore[return-value]


@register("drafter.model")
@dataclass(frozen=True)
class SmallModel(Stored):
    """An autoregressive model that drafts; implements `core.speculative.ModelDrafter`."""

    def on(self, target: Target) -> TransformerDenoiser:
        """The model, beside the target."""
        model = _model(self, target.device, target.dtype)
        if (model.vocab_size, model.attention_form) != (target.vocab_size, "causal"):
            raise DllmBenchError(
                f"Draft model {self.source!r} has {model.vocab_size} tokens and "
                f"{model.attention_form} attention, the target {target.vocab_size} tokens; choose "
                "an autoregressive model over the target's vocabulary."
            )
        return model


@lru_cache(maxsize=32)
def _published(source: str, revision: str | None, sha256: str) -> PublishedConfig:
    """config.json; `sha256` keeps a changed file apart."""
    return checkpoint.read_json(checkpoint_folder(source, revision) / "config.json")


@lru_cache(maxsize=32)
def _facts(source: str, revision: str | None, sha256: str) -> DrafterConfig:
    return read_drafter_config(_published(source, revision, sha256))


@lru_cache(maxsize=2)
def _network(drafter: Trained, device: torch.device, dtype: torch.dtype) -> DraftNetwork:
    """The drafter's network with its weights, on a device."""
    network = empty_network(drafter.published)
    folder = checkpoint_folder(drafter.source, drafter.revision)
    weights = checkpoint.Weights(checkpoint.weight_files(folder))
    checkpoint.check_tensors(weights, checkpoint.shapes_of(network), set(), drafter.source)
    state = {name: weights.read(name).to(device, dtype) for name in weights.names}
    network.load_state_dict(state, assign=True)
    return network.to(device).eval().requires_grad_(False)


def freeze_tables(network: DraftNetwork) -> DraftNetwork:
    """Everything learns but the embedding and the head, which are the target's."""
    network.requires_grad_(True)
    for name in TABLES:
        getattr(network, name).requires_grad_(False)
    return network


def new_network(published: PublishedConfig, target: TransformerDenoiser, seed: int) -> DraftNetwork:
    """A network to train from the start beside a target, with transformers' initial weights."""
    network = empty_network(published)
    module: Any = target.module
    tables = {"embed_tokens": module.model.embed_tokens, "lm_head": module.lm_head}
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, like in network.state_dict().items():
        whole, _, kind = name.rpartition(".")
        noise = torch.randn(like.shape, generator=generator) * INITIAL_STD
        plain = torch.zeros if kind == "bias" else torch.ones
        state[name] = noise if like.dim() > 1 else plain(like.shape)
        if whole in tables:
            state[name] = tables[whole].weight.detach().float().clone()
    network.load_state_dict({n: w.to(target.device) for n, w in state.items()}, assign=True)
    return freeze_tables(network.to(target.device).train())


def save_drafter(folder: Path, published: PublishedConfig, weights: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors, bfloat16; other files are the trainer's business."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(published, indent=1) + "\n")
    stored = {n: w.detach().to("cpu", torch.bfloat16).contiguous() for n, w in weights.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def empty_network(published: PublishedConfig) -> DraftNetwork:
    """The network a config describes, its parameters without storage."""
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    from dllm_bench.models.drafter_networks import BlockDraftNetwork, ChainDraftNetwork

    layout, facts = ADAPTERS["qwen3"], read_drafter_config(published)
    layout.check(published)
    sliding = [kind for kind in published.get("layer_types") or [] if kind != "full_attention"]
    if sliding:
        raise DllmBenchError(
            f"The drafter's config asks for layers of {sliding[0]}, which are not supported; use a "
            "drafter whose layers see the whole text."
        )
    settings = {**layout.settings(published), "attn_implementation": "sdpa"}
    config = Qwen3Config(**settings)
    with torch.device("meta"):
        network = (
            ChainDraftNetwork(config, facts) if facts.chain else BlockDraftNetwork(config, facts)
        )
    network.rotary_emb = Qwen3RotaryEmbedding(config)
    return network


@lru_cache(maxsize=2)
def _model(drafter: SmallModel, device: torch.device, dtype: torch.dtype) -> TransformerDenoiser:
    from dllm_bench.models.load import load_model
    from dllm_bench.models.transformer import TransformerDenoiser

    name = str(dtype).removeprefix("torch.")
    spec = ModelSpec(
        "draft", drafter.source, revision=drafter.revision, dtype=name, device=str(device)
    )
    denoiser = load_model(spec).denoiser
    assert isinstance(denoiser, TransformerDenoiser)
    return denoiser
