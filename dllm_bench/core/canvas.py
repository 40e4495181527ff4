"""Contracts of uniform-state diffusion: what decides how a canvas of random tokens is denoised.

There is no mask token. A canvas of C positions begins as random tokens; in every forward all of
them get new logits, some keep the token that was drawn, and the others become random again.
Acceptance has no memory: a position that was accepted competes again in the next forward. The text
is the most probable token of every position in the last forward. Pieces are frozen dataclasses
without state and decide on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dllm_bench.core.decoder import Piece
from dllm_bench.core.denoiser import Denoiser


class CanvasModel(Denoiser, Protocol):
    """A model of uniform-state diffusion.

    It encodes text by a forward with causal attention, whose K/V are kept, and denoises a canvas
    after it by one with full attention, to which `ForwardPlan.added_KFH` is the mean embedding of
    the canvas's last prediction (self-conditioning).
    """

    canvas_length: int
    """C, the positions of a canvas the weights were trained with."""


@dataclass(frozen=True)
class CanvasScores:
    """What a forward says of a canvas, at the temperature of its step."""

    logits_CV: Tensor
    """Divided by the temperature, float32."""
    drawn_C: Tensor
    """A token drawn at every position."""
    top_C: Tensor
    """The most probable token of every position."""
    entropy_C: Tensor
    """Entropy of every position in nats."""


class Accept(Piece, ABC):
    """Which positions keep the token that was drawn."""

    @abstractmethod
    def __call__(self, scores: CanvasScores) -> Tensor:
        """accepted_C, bool."""


class Renoise(Piece, ABC):
    """What stands at positions that were not accepted, and on a new canvas."""

    @abstractmethod
    def __call__(self, count: int, vocabulary: int, numbers: torch.Generator) -> Tensor:
        """Token ids (C,) for all `count` positions, on the device of `numbers`."""


class Anneal(Piece, ABC):
    """How many forwards a canvas has at most, and the temperature of each."""

    steps: int
    """The most forwards of a canvas."""

    @abstractmethod
    def __call__(self, left: int) -> Tensor:
        """Temperature, 0-d float32 on the CPU, with `left` forwards left, this one included."""


class Settle(Piece, ABC):
    """Whether a canvas is finished before its last step."""

    @abstractmethod
    def __call__(self, before: Sequence[Tensor], scores: CanvasScores) -> Tensor:
        """0-d bool; `before`: `CanvasScores.top_C` of earlier forwards over this canvas."""
