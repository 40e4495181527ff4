"""`Layout`: how an architecture was published, and how transformers' own classes hold it.

An adapter is one subclass: the checkpoint's `model_type`, its config keys, its tensor names, and
whether its logits are shifted. No modelling code is copied or executed from a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from dllm_bench.core.request import DllmBenchError

Published = Mapping[str, Any]  # the checkpoint's config.json


class Layout(ABC):
    """The facts that tell one published architecture from another."""

    model_type: ClassVar[str]
    shifted: ClassVar[bool]
    required: ClassVar[Mapping[str, tuple[Any, ...]]]  # config key -> values this adapter supports

    @abstractmethod
    def build(self, published: Published, attention: str) -> Any:
        """A transformers `*ForCausalLM` of the published size; weights are whatever init gives."""

    def to_module(self, name: str) -> str:
        """Published tensor name -> parameter name of the built module."""
        return name

    def to_published(self, name: str) -> str:
        """Inverse of `to_module`."""
        return name

    def check(self, published: Published) -> None:
        """Refuse a config this adapter would load wrongly, naming every key."""
        wrong = [
            f"{key}={published[key]!r}"
            for key, values in self.required.items()
            if key in published and published[key] not in values
        ]
        if wrong:
            raise DllmBenchError(
                f"The config asks for {', '.join(wrong)}, which the {self.model_type} adapter does "
                f"not support; use a checkpoint without it or extend the adapter."
            )


def value(published: Published, key: str) -> Any:
    """A config value that must be there."""
    if published.get(key) is None:
        raise DllmBenchError(
            f"The checkpoint's config.json has no {key!r}; complete it from the published config."
        )
    return published[key]


def rope(published: Published) -> dict[str, Any]:
    """Plain rotary embedding with the published base."""
    return {"rope_type": "default", "rope_theta": value(published, "rope_theta")}
