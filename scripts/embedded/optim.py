"""Optimiser, learning-rate schedule and weight average for the embedded models.

Muon for the matrices of the blocks (updates scaled to AdamW's RMS), AdamW for embeddings, head,
norms and biases; flat learning rate, then a cosine to zero; exponential moving average of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scripts.embedded.network import half

WARMUP_STEPS = 100
EMA_DECAY = 0.998
CLIP_NORM = 1.0
MUON_MOMENTUM, MUON_DECAY = 0.95, 0.02
NEWTON_SCHULZ = (3.4445, -4.775, 2.0315)


class Muon(torch.optim.Optimizer):
    """Momentum whose updates are made orthogonal by five Newton-Schulz steps (Jordan et al., 2024),
    scaled to AdamW's RMS. As torch.optim.Muon, but in the type of the network's matrix products.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None:
                    self._update(matrix, matrix.grad, group["lr"])

    def _update(self, matrix: Tensor, gradient: Tensor, lr: float) -> None:
        momentum = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
        update = orthogonal(half(gradient.lerp(momentum, MUON_MOMENTUM)))
        matrix.mul_(1 - lr * MUON_DECAY)
        matrix.add_(update, alpha=-lr * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the matrix with its singular values near 1."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    a, b, c = NEWTON_SCHULZ
    matrix = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = matrix @ matrix.T
        matrix = a * matrix + (b * gram + c * gram @ gram) @ matrix
    return matrix


def learning_rate_factor(step: int, steps: int, decay_steps: int) -> float:
    """Linear warm-up, then 1, then a cosine to zero over the last `decay_steps` of `steps`."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    left = (steps - step) / max(decay_steps, 1)
    return warm * (0.5 - 0.5 * math.cos(math.pi * min(1.0, max(left, 0.0))))


class Optimizer:
    """Muon and AdamW over a dictionary of tensors, with clipped gradients and a moving average.

    `muon` says whether Muon optimises the tensor of a name; AdamW optimises the others.
    """

    def __init__(self, tensors: dict[str, Tensor], lr: float, muon: Callable[[str], bool]):
        self.lr, self.tensors = lr, tensors
        matrices = [t for n, t in tensors.items() if muon(n)]
        others = [t for n, t in tensors.items() if not muon(n)]
        self.parts: list[Any] = [torch.optim.AdamW(others, lr, betas=(0.9, 0.98), weight_decay=0.0)]
        if matrices:
            self.parts.append(Muon(matrices, {"lr": lr}))
        self.average = {n: t.detach().clone() for n, t in tensors.items()}
        self.count = 0

    def step(self, factor: float) -> None:
        """Update the tensors at `factor` times the peak rate and clear their gradients."""
        torch.nn.utils.clip_grad_norm_(list(self.tensors.values()), CLIP_NORM, foreach=True)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = self.lr * factor
            part.step()
            part.zero_grad()
        self.count += 1
        decay = min(EMA_DECAY, self.count / (self.count + 10))
        values = [t.detach() for t in self.tensors.values()]
        torch._foreach_lerp_(list(self.average.values()), values, 1 - decay)  # one fused call

    def state(self) -> dict[str, Any]:
        """Everything a resumed training needs."""
        parts = [p.state_dict() for p in self.parts]
        return {"parts": parts, "average": self.average, "count": self.count}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.average, self.count = state["average"], state["count"]
