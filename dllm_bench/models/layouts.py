"""`CheckpointLayout`: how an architecture was published, and how transformers' own classes hold it.

An adapter is one subclass: the checkpoint's `model_type`, its config keys, and where its tensors
lie in the parameters of the built module. `StandardLayout` is for configs spelled as
transformers spells them. No modelling code is copied or executed from a checkpoint.
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
class Part:
    """A published tensor, whole or a span of its rows, and the place it takes in a parameter.

    An empty `place` is the whole parameter.
    """

    name: str
    rows: tuple[int, int] | None = None
    place: tuple[int | slice, ...] = ()


class CheckpointLayout(ABC):
    """The facts that tell one published architecture from another.

    `attention` is the form the architecture is trained with; a model's yaml may say another.
    """

    model_type: ClassVar[str]
    family: ClassVar[str]  # transformers' <family>ForCausalLM
    shifted: ClassVar[bool] = False
    attention: ClassVar[str] = "full"
    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # config key -> values supported
    ropes: ClassVar[tuple[str, ...]] = ("default",)  # rotary variants supported
    elsewhere: ClassVar[str | None] = None  # pattern of published tensors that are not read

    def recognises(self, published: PublishedConfig) -> bool:
        """Whether a config.json is of this layout."""
        return str(published.get("model_type")).lower() == self.model_type.lower()

    def text(self, published: PublishedConfig) -> PublishedConfig:
        """The part of the config that describes the language model."""
        return published

    @abstractmethod
    def settings(self, published: PublishedConfig) -> dict[str, Any]:
        """Arguments of transformers' config class."""

    def build(self, published: PublishedConfig, backend: str) -> Any:
        """A transformers `*ForCausalLM` of the published size; weights are whatever init gives."""
        import transformers

        text = self.text(published)
        kind = getattr(transformers, f"{self.family_of(text)}ForCausalLM")
        return kind(kind.config_class(**self.settings(text), attn_implementation=backend))

    def family_of(self, published: PublishedConfig) -> str:
        """The transformers class that holds a config of this layout."""
        return self.family

    def to_published(self, name: str) -> str:
        """Parameter name of the module -> published tensor name, where they are one to one."""
        return name

    def parts(self, name: str, shapes: Shapes) -> list[Part]:
        """The published tensors that make up a parameter."""
        return [Part(self.to_published(name))]

    def check(self, published: PublishedConfig) -> None:
        """Refuse a config this adapter would load wrongly, naming every key."""
        text = self.text(published)
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
        """The rotary embedding, in the old spelling (`rope_theta`, `rope_scaling`) or the new."""
        found = dict(published.get("rope_parameters") or published.get("rope_scaling") or {})
        bases = {base for base in (published.get("rope_theta"), found.get("rope_theta")) if base}
        if len(bases) > 1:
            raise DllmBenchError(
                f"config.json gives rope_theta={published['rope_theta']} in the old spelling and "
                f"{found['rope_theta']} inside of rope_parameters; keep the one the weights were "
                f"trained with."
            )
        kind = found.pop("type", None) or found.pop("rope_type", "default")
        if kind not in self.ropes:
            raise DllmBenchError(
                f"The config asks for rotary embeddings of type {kind!r}, the {self.model_type} "
                f"adapter knows {', '.join(self.ropes)}; use a checkpoint without it or extend the "
                f"adapter."
            )
        base = bases.pop() if bases else value(published, "rope_theta")
        return {**found, "rope_type": kind, "rope_theta": base}


class StandardLayout(CheckpointLayout):
    """Config keys as transformers spells them, tensor names one to one."""

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
    """A config value that must be there."""
    if published.get(key) is None:
        raise DllmBenchError(
            f"The checkpoint's {file} has no {key!r}; complete it from the published config."
        )
    return published[key]
