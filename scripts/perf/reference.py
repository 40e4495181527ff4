"""A plain decoding loop, written like published samplers, as the baseline of speed comparisons.

Every forward feeds the whole sequence, one branch after the other; the head and a float64 softmax
run over all positions and the whole vocabulary; positions are visited one by one in Python. Its
tokens equal those of this package's blocks with a threshold, with or without lookahead; the
comparison checks that. Left out: caches, end of text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind


class Reference:
    """Blocks of `block` positions, threshold `tau`, `k` lookahead branches (0: none)."""

    def __init__(self, model: Denoiser, block: int, tau: float, k: int = 0) -> None:
        self.model, self.block, self.tau, self.k = model, block, tau, k
        self.mask = model.special.mask

    @torch.inference_mode()
    def generate(self, request: Request, steps: int) -> tuple[list[int], int]:
        """Return the new tokens after at most `steps` rounds, and the number of rounds."""
        self.prompt = len(request.prompt_ids)
        length = self.prompt + request.max_new_tokens
        x = torch.full((1, length), self.mask)
        x[0, : self.prompt] = torch.tensor(request.prompt_ids)
        candidates, rounds = [x], 0
        while self.open_positions(candidates[-1]) and rounds < steps:
            best, best_confidence = None, -float("inf")
            for candidate in candidates:
                ids, confidence = self.predict(candidate)
                mean = self.mean_confidence(candidate, confidence)
                if mean > best_confidence:
                    best, best_confidence = (candidate, ids, confidence), mean
            assert best is not None
            x, ids, confidence = best
            window = self.open_positions(x)
            x = self.commit(x, window, ids, confidence)
            candidates = [*self.lookahead(x, window, ids, confidence), x]
            rounds += 1
        return x[0, self.prompt :].tolist(), rounds

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Most probable token and its probability at every position of the sequence."""
        length = x.shape[1]
        plan = ForwardPlan(ForwardKind.DENOISE, (0, length), (0, length), (0, 0))
        logits = self.model.forward(x, plan, self.model.new_cache(length))
        logits[..., self.mask] = -float("inf")
        confidence, ids = torch.softmax(logits.to(torch.float64), dim=-1).max(dim=-1)
        return ids, confidence

    def open_positions(self, x: Tensor) -> list[int]:
        """Masked positions of the first block that has some."""
        for start in range(self.prompt, x.shape[1], self.block):
            block = range(start, min(start + self.block, x.shape[1]))
            masked = [position for position in block if x[0, position].item() == self.mask]
            if masked:
                return masked
        return []

    def mean_confidence(self, x: Tensor, confidence: Tensor) -> float:
        """Mean over the masked positions of the open block; 1 without any."""
        masked = self.open_positions(x)
        if not masked:
            return 1.0
        return sum(confidence[0, position].item() for position in masked) / len(masked)

    def commit(self, x: Tensor, window: list[int], ids: Tensor, confidence: Tensor) -> Tensor:
        """Commit every position above the threshold, and at least the most confident one."""
        x = x.clone()
        chosen = [p for p in window if confidence[0, p].item() >= self.tau]
        if window and not chosen:
            chosen = [max(window, key=lambda p: confidence[0, p].item())]
        for position in chosen:
            x[0, position] = ids[0, position].item()
        return x

    def lookahead(
        self, x: Tensor, window: list[int], ids: Tensor, confidence: Tensor
    ) -> list[Tensor]:
        """For each of the k most confident positions still masked, a branch that commits it."""
        left = [position for position in window if x[0, position].item() == self.mask]
        left.sort(key=lambda p: confidence[0, p].item(), reverse=True)
        copies = []
        for position in left[: self.k]:
            copy = x.clone()
            copy[0, position] = ids[0, position].item()
            copies.append(copy)
        return copies
