"""Trained drafters by path: DFlash, DFlash 2, DSpark, EAGLE-3, and small language models.

A drafter is identified by its content (sha256 over config and weights), not by its path. Its
network is loaded when it is first used with a target, on the target's device and in its dtype.
Configs are read in `drafter_config`, the networks are in `drafter_networks`. Importing this module
is cheap: transformers is imported when a network is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.speculative import Target
from dllm_bench.models import checkpoint, sources
from dllm_bench.models.adapters import ADAPTERS, PublishedConfig, value
from dllm_bench.models.drafter_config import DrafterConfig, read_drafter_config, wrong_values_named
from dllm_bench.models.load import load_model
from dllm_bench.models.spec import ModelSpec
from dllm_bench.paths import ASSETS, place_of
from dllm_bench.registry import register

if TYPE_CHECKING:
    from dllm_bench.models.drafter_networks import DraftNetwork
    from dllm_bench.models.transformer import TransformerDenoiser


SHIPPED = ASSETS + "drafters/"
TABLES = ("embed_tokens", "lm_head")  # the target's: copied for training, not stored
INITIAL_STD = 0.02  # transformers' initializer_range


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter's checkpoint."""

    source: str = field(compare=False)
    """A folder, assets/drafters/<name>, or a hub id."""
    revision: str | None = field(default=None, compare=False)
    """Branch, tag or commit of a hub id."""
    sha256: str = ""
    """Hash over config and weights: filled in if empty, else compared with the files."""

    def __post_init__(self) -> None:
        if self.source.startswith(SHIPPED) and not place_of(self.source).is_dir():
            raise DllmBenchError(
                f"The package ships no drafter {self.source!r}; set decoder.draft.drafter.source "
                "to the folder or hub id of a drafter that was trained for this target."
            )
        found = sources.content_hash(ModelSpec("drafter", self.source, revision=self.revision))
        sha256 = sources.require_sha256(f"Drafter {self.source!r}", self.sha256, found)
        object.__setattr__(self, "sha256", sha256)

    @cached_property
    def published(self) -> PublishedConfig:
        """The checkpoint's config.json."""
        return sources.read_json(self.folder / sources.CONFIG)

    @property
    def folder(self) -> Path:
        """Where the checkpoint is on this machine."""
        return sources.checkpoint_folder(self.source, self.revision)


@dataclass(frozen=True)
class TrainedDrafter(StoredDrafter):
    """A drafter network that reads the target's features."""

    chain: ClassVar[bool]
    """Whether it is an EAGLE-3 chain instead of a block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.chain != self.chain:
            fitting, this = ("eagle3", "dflash, dflash2 or dspark")[:: -1 if self.chain else 1]
            raise DllmBenchError(
                f"Drafter {self.source!r} is a {self.published['architectures'][0]}, which this "
                f"draft ({this}) cannot use; choose decoder/draft={fitting}."
            )

    @cached_property
    def config(self) -> DrafterConfig:
        """What its config.json says beyond the sizes of its layers."""
        return read_drafter_config(self.published)

    def on(self, target: Target) -> Any:
        """Return the network on the target's device; DllmBenchError for a target of other sizes
        than the drafter was trained for."""
        sizes = (value(self.published, key) for key in ("vocab_size", "hidden_size"))
        expected = (self.config.target_layers, *sizes)
        actual = (target.num_layers, target.vocab_size, target.hidden_size)
        if expected != actual:
            raise DllmBenchError(
                f"Drafter {self.source!r} was trained for a target of {expected[0]} layers, "
                f"{expected[1]} tokens and width {expected[2]}, this one has {actual[0]}, "
                f"{actual[1]} and {actual[2]}; choose the drafter of this target."
            )
        network = _network(self, target.device, target.dtype)
        network.bind(target)
        return network


@register("drafter.block")
@dataclass(frozen=True)
class TrainedBlockDrafter(TrainedDrafter):
    """A trained drafter of whole blocks: DFlash, DFlash 2 or DSpark."""

    chain: ClassVar[bool] = False


@register("drafter.chain")
@dataclass(frozen=True)
class TrainedChainDrafter(TrainedDrafter):
    """A trained drafter that drafts token by token: EAGLE-3."""

    chain: ClassVar[bool] = True


@register("drafter.model")
@dataclass(frozen=True)
class SmallModelDrafter(StoredDrafter):
    """A smaller autoregressive model over the same vocabulary that drafts."""

    def on(self, target: Target) -> TransformerDenoiser:
        """Return the model on the target's device; DllmBenchError where the two do not fit."""
        model = _model(self, target.device, target.dtype)
        if (model.vocab_size, model.attention_form) != (target.vocab_size, "causal"):
            raise DllmBenchError(
                f"Draft model {self.source!r} has {model.vocab_size} tokens and "
                f"{model.attention_form} attention, the target {target.vocab_size} tokens; choose "
                "an autoregressive model over the target's vocabulary."
            )
        return model


# Equal drafters have equal `sha256`: a changed file is another key of these caches.


@lru_cache(maxsize=2)
def _network(drafter: TrainedDrafter, device: torch.device, dtype: torch.dtype) -> DraftNetwork:
    """Return the drafter's network with its weights, on a device."""
    network = empty_network(drafter.published)
    weights = checkpoint.Weights(sources.weight_files(drafter.folder))
    checkpoint.check_tensors(weights, checkpoint.shapes_of(network), set(), drafter.source)
    state = {
        name: checkpoint.require_finite(name, weights.read(name).to(device, dtype))
        for name in weights.names
    }
    network.load_state_dict(state, assign=True)
    return network.to(device).eval().requires_grad_(False)


@lru_cache(maxsize=2)
def _model(
    drafter: SmallModelDrafter, device: torch.device, dtype: torch.dtype
) -> TransformerDenoiser:
    name = str(dtype).removeprefix("torch.")
    spec = ModelSpec(
        "draft", drafter.source, revision=drafter.revision, dtype=name, device=str(device)
    )
    return cast("TransformerDenoiser", load_model(spec).denoiser)


@wrong_values_named
def empty_network(published: PublishedConfig) -> DraftNetwork:
    """Return the network a drafter's config.json describes, its parameters on the meta device."""
    from dllm_bench.models.drafter_networks import build_network  # imports transformers

    layout, drafter_config = ADAPTERS["qwen3"], read_drafter_config(published)
    layout.check({**published, "use_sliding_window": False})  # `layer_types` says it
    known = ("full_attention", *(("sliding_attention",) if drafter_config.windows else ()))
    sliding = [kind for kind in published.get("layer_types") or [] if kind not in known]
    if sliding:
        raise DllmBenchError(
            f"The drafter's config asks for layers of {sliding[0]}, which are not supported; use a "
            "drafter whose layers all have full attention."
        )
    return build_network(layout.settings(published), drafter_config)


def new_network(published: PublishedConfig, target: TransformerDenoiser, seed: int) -> DraftNetwork:
    """Return an untrained network for a target: transformers' initial weights, the target's
    tables."""
    network = empty_network(published)
    module: Any = target.module
    tables = {"embed_tokens": module.model.embed_tokens, "lm_head": module.lm_head}
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, like in network.state_dict().items():
        part, _, kind = name.rpartition(".")
        noise = torch.randn(like.shape, generator=generator) * INITIAL_STD
        if kind == "base_kernel":  # kernel of a convolution that changes nothing
            noise[:, 0] += 1
        constant = torch.zeros if kind == "bias" else torch.ones
        state[name] = noise if like.dim() > 1 else constant(like.shape)
        if part in tables:
            state[name] = tables[part].weight.detach().float().clone()
        if part == "lm_head" and network.drafter_config.draft_ids:
            state[name] = state[name][list(network.drafter_config.draft_ids)]
    network.load_state_dict({n: w.to(target.device) for n, w in state.items()}, assign=True)
    return freeze_tables(network.to(target.device).train())


def freeze_tables(network: DraftNetwork) -> DraftNetwork:
    """Train everything but the embedding and the head, which are the target's."""
    network.requires_grad_(True)
    for name in TABLES:
        getattr(network, name).requires_grad_(False)
    return network
