"""Contracts of uniform-state diffusion: the pieces that denoise a canvas of random tokens.

There is no mask token. A canvas of C positions begins as random tokens. Every forward computes new
logits for all of them; some positions keep the token drawn from these, and the others become random
again. Acceptance has no memory: an accepted position competes again in the next forward. The text
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

    Text is encoded by a forward with causal attention, whose K/V are kept. The canvas after it is
    denoised by forwards with full attention, in which `ForwardPlan.added_KFH` is the mean embedding
    of the canvas's last prediction (self-conditioning).
    """

    canvas_length: int
    """C, the canvas length the weights were trained with."""


@dataclass(frozen=True)
class CanvasScores:
    """The result of a forward over a canvas, at the temperature of its step."""

    drawn_C: Tensor
    """A token drawn at every position."""
    top_C: Tensor
    """The most probable token of every position."""
    entropy_C: Tensor
    """Entropy of every position in nats."""


class Accept(Piece, ABC):
    """Decides which positions keep the token that was drawn."""

    @abstractmethod
    def __call__(self, scores: CanvasScores) -> Tensor:
        """Return accepted_C, bool."""


class Renoise(Piece, ABC):
    """Chooses the tokens of positions that were not accepted, and of a new canvas."""

    @abstractmethod
    def __call__(self, count: int, vocabulary: int, numbers: torch.Generator) -> Tensor:
        """Return the token ids (C,) for all `count` positions, on the device of `numbers`."""


class Anneal(Piece, ABC):
    """The maximum number of forwards of a canvas, and the temperature of each."""

    steps: int
    """The most forwards of a canvas."""

    @abstractmethod
    def __call__(self, left: int) -> Tensor:
        """Return the temperature, 0-d float32 on the CPU; `left`: remaining forwards, including
        this one."""


class Settle(Piece, ABC):
    """Decides whether a canvas is finished before its last step."""

    @abstractmethod
    def __call__(self, before: Sequence[Tensor], scores: CanvasScores) -> Tensor:
        """Return a 0-d bool; `before`: `CanvasScores.top_C` of earlier forwards over this
        canvas."""
