"""`CheckpointLayout`: how a published checkpoint maps onto a model class of transformers.

A layout translates config.json into the arguments of transformers' config class, and says which
published tensors make up each parameter of the module built from it. The supported layouts are in
`adapters`. No modelling code of a checkpoint is copied or run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dllm_bench.core.errors import DllmBenchError

PublishedConfig = Mapping[str, Any]  # the checkpoint's config.json
Shapes = Mapping[str, tuple[int, ...]]  # parameter name of the module -> its shape


@dataclass(frozen=True)
class PublishedTensor:
    """A published tensor that fills a parameter of the module, or a part of one."""

    name: str
    """Name in the checkpoint."""
    rows: tuple[int, int] | None = None
    """The half-open span of its rows that is read; None: all of them."""
    place: tuple[int | slice, ...] = ()
    """Index of the part of the parameter that it fills; empty: the whole parameter."""


class CheckpointLayout(ABC):
    """One published architecture: its config keys, tensor names and habits."""

    model_type: ClassVar[str]
    """`model_type` of its config.json."""
    family: ClassVar[str]
    """The class of transformers that runs it, without "ForCausalLM"."""
    shifted: ClassVar[bool] = False
    """Whether row i predicts position i + 1."""
    attention: ClassVar[str] = "full"
    """Attention it is usually trained with; a model's yaml may name another."""
    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    """Config key -> supported values; a key that is absent is fine."""
    ropes: ClassVar[tuple[str, ...]] = ("default",)
    """Supported variants of the rotary embedding."""
    plain_layers: ClassVar[bool] = False
    """Whether a layer is `input_layernorm`, `self_attn`, `post_attention_layernorm` and `mlp`, each
    pair added to its input, and V a projection of its own: what `chosen_rows` runs by its parts."""
    counts: ClassVar[Mapping[str, str]] = {
        "num_hidden_layers": "layers",
        "num_experts": "experts",
    }
    """Config key -> how the names of that many published parts begin, before their number."""
    ignored: ClassVar[str | None] = None
    """Regular expression of published tensors that are not read."""

    def recognises(self, published: PublishedConfig) -> bool:
        """Return whether a config.json is of this layout."""
        return str(published.get("model_type")).lower() == self.model_type.lower()

    def text_config(self, published: PublishedConfig) -> PublishedConfig:
        """Return the part of the config that describes the language model."""
        return published

    @abstractmethod
    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        """Return the arguments of transformers' config class."""

    def build(self, published: PublishedConfig, backend: str) -> Any:
        """Return a `*ForCausalLM` module of the published size, its weights not yet loaded.

        `backend` is the attention kernel, as transformers names it.
        """
        import transformers  # slow to import

        text = self.text_config(published)
        kind = getattr(transformers, f"{self.family_of(text)}ForCausalLM")
        return kind(kind.config_class(**self.settings(text), attn_implementation=backend))

    def family_of(self, published: PublishedConfig) -> str:
        """Return the class of transformers for this config, without "ForCausalLM"."""
        return self.family

    def to_published(self, name: str) -> str:
        """Return the published name of a parameter, if names correspond one to one."""
        return name

    def parts(self, name: str, shapes: Shapes) -> list[PublishedTensor]:
        """Return the published tensors that make up a parameter."""
        return [PublishedTensor(self.to_published(name))]

    def check(self, published: PublishedConfig) -> None:
        """Raise DllmBenchError, naming every key, for a config that this layout would load
        wrongly."""
        text = self.text_config(published)
        wrong = [
            f"{key}={text[key]!r}"
            for key, values in self.required.items()
            if key in text and text[key] not in values
        ]
        if wrong:
            raise DllmBenchError(
                f"The config asks for {', '.join(wrong)}, which the {self.model_type} adapter does "
                f"not support; use a checkpoint without it or extend the adapter."
            )

    def rope(self, published: PublishedConfig) -> dict[str, Any]:
        """Return `rope_parameters` of the rotary embedding.

        Reads the older keys of transformers (`rope_theta`, `rope_scaling`) and the newer one.
        """
        scaling = dict(published.get("rope_parameters") or published.get("rope_scaling") or {})
        bases = {base for base in (published.get("rope_theta"), scaling.get("rope_theta")) if base}
        if len(bases) > 1:
            raise DllmBenchError(
                f"config.json gives rope_theta={published['rope_theta']} at its top level and "
                f"{scaling['rope_theta']} inside of rope_parameters; keep the one the weights were "
                f"trained with."
            )
        kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
        if kind not in self.ropes:
            raise DllmBenchError(
                f"The config asks for rotary embeddings of type {kind!r}, the {self.model_type} "
                f"adapter supports {', '.join(self.ropes)}; use a checkpoint without it or extend "
                f"the adapter."
            )
        base = bases.pop() if bases else value(published, "rope_theta")
        return {**scaling, "rope_type": kind, "rope_theta": base}


class StandardLayout(CheckpointLayout):
    """Config keys and tensor names as in transformers."""

    sizes: ClassVar[tuple[str, ...]] = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    )

    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        sizes = {key: value(published, key) for key in self.sizes}
        optional = {"head_dim": published["head_dim"]} if published.get("head_dim") else {}
        tied = bool(published.get("tie_word_embeddings", False))
        shared = {"rope_parameters": self.rope(published), "tie_word_embeddings": tied}
        return {**sizes, **optional, **shared}


def value(published: PublishedConfig, key: str, file: str = "config.json") -> Any:
    """Return a config value that must not be missing; `file` is named in the error."""
    if published.get(key) is None:
        raise DllmBenchError(
            f"The checkpoint's {file} has no {key!r}; complete it from the published config."
        )
    return published[key]
