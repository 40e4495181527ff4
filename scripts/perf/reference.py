"""Plain decoding loops, written like published samplers, as the baseline of speed comparisons.

A forward feeds the whole sequence, or what the method's cache leaves of it, one branch after the
other; the head and a float64 softmax run over all rows that the method reads and the whole
vocabulary; positions are visited one by one in Python. The tokens equal those of this package's
decoders; the comparison checks that. Left out: end of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.denoiser import Denoiser, ForwardPlan, KVCache
from dllm_bench.core.request import Request
from dllm_bench.core.trace import ForwardKind

Caching = Literal["none", "prefix", "dual"]
"""Which K/V are kept from the first forward of a block on: none, those before it, or all."""


class Reference:
    """Blocks of `block` positions, threshold `tau`, `k` lookahead branches (0: none).

    caching: as Fast-dLLM does; with one, `k` is 0.
    """

    def __init__(
        self, model: Denoiser, block: int, tau: float, k: int = 0, caching: Caching = "none"
    ) -> None:
        self.model, self.block, self.tau, self.k, self.caching = model, block, tau, k, caching
        self.mask = model.special.mask
        self.kv: KVCache
        self.renewed = -1  # first position of the block whose first forward filled the cache

    @torch.inference_mode()
    def generate(self, request: Request, steps: int) -> tuple[list[int], int]:
        """Return the new tokens after at most `steps` rounds, and the number of rounds."""
        x = self.canvas(request)
        candidates, rounds, self.renewed = [x], 0, -1
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

    def canvas(self, request: Request) -> Tensor:
        """The prompt, then masks."""
        self.prompt = len(request.prompt_ids)
        x = torch.full((1, self.prompt + request.max_new_tokens), self.mask)
        x[0, : self.prompt] = torch.tensor(request.prompt_ids)
        return x

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`scores` of everything in the first forward of a block; then of the block, and of what is
        not cached after it."""
        length, block = x.shape[1], -1 if self.caching == "none" else self.open_block(x)
        fed, kept = (0, length), {"none": 0, "prefix": block, "dual": length}[self.caching]
        if self.caching != "none" and block == self.renewed:
            fed, kept = (block, length if self.caching == "prefix" else block + self.block), 0
        else:
            self.kv, self.renewed = self.model.new_cache(length), block
        return self.scores(x, ForwardPlan(ForwardKind.DENOISE, fed, fed, (0, kept)))

    def scores(self, x: Tensor, plan: ForwardPlan) -> tuple[Tensor, Tensor]:
        """Most probable token and its probability at every position of the plan's rows, else 0."""
        logits = self.model.forward(x, plan, self.kv)
        if plan.stores:
            self.kv.keep(plan, torch.tensor(0))
        logits[..., self.mask] = -float("inf")
        confidence, ids = torch.softmax(logits.to(torch.float64), dim=-1).max(dim=-1)
        around = (plan.rows[0], x.shape[1] - plan.rows[1])
        return pad(ids, around), pad(confidence, around)

    def open_block(self, x: Tensor) -> int:
        """First position of the first block that has masks."""
        new = self.open_positions(x)[0] - self.prompt
        return self.prompt + new // self.block * self.block

    def open_positions(self, x: Tensor) -> list[int]:
        """Masked positions of the first block that has some."""
        return next(filter(None, self.masks_of_blocks(x)), [])

    def masks_of_blocks(self, x: Tensor) -> Iterator[list[int]]:
        """Masked positions of one block after the other."""
        for start in range(self.prompt, x.shape[1], self.block):
            block = range(start, min(start + self.block, x.shape[1]))
            yield [position for position in block if x[0, position].item() == self.mask]

    def mean_confidence(self, x: Tensor, confidence: Tensor) -> float:
        """Mean over the masked positions of the open block; 1 without any."""
        masked = self.open_positions(x)
        if not masked:
            return 1.0
        return sum(confidence[0, position].item() for position in masked) / len(masked)

    def commit(
        self, x: Tensor, window: list[int], ids: Tensor, confidence: Tensor, must: bool = True
    ) -> Tensor:
        """Commit every position above the threshold; if one `must` be, the most confident one."""
        x = x.clone()
        chosen = [p for p in window if confidence[0, p].item() >= self.tau]
        if window and not chosen and must:
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


class PipelinedReference(Reference):
    """D2F: several open blocks, block-causal attention, and a cache of finished blocks."""

    opens_at, must_at = 0.1, 0.95  # committed shares of the block before, as released

    @torch.inference_mode()
    def generate(self, request: Request, steps: int) -> tuple[list[int], int]:
        """See `Reference`."""
        x, opened, rounds = self.canvas(request), 0, 0
        self.kv = self.model.new_cache(x.shape[1])
        while any(masks := list(self.masks_of_blocks(x))) and rounds < steps:
            done = [1 - len(positions) / self.block for positions in masks]
            if opened < len(masks) and (opened == 0 or done[opened - 1] >= self.opens_at):
                opened += 1
            first = next(n for n, positions in enumerate(masks) if positions)
            plan = self.plan(self.prompt + first * self.block, opened)
            ids, confidence = self.scores(x, plan)
            for n in range(opened):
                must = n == 0 or done[n - 1] >= self.must_at
                x = self.commit(x, masks[n], ids, confidence, must)
            rounds += 1
        return x[0, self.prompt :].tolist(), rounds

    def plan(self, block: int, opened: int) -> ForwardPlan:
        """What is not cached, up to the last open block; finished blocks enter the cache."""
        cached, stop = self.kv.length, self.prompt + opened * self.block
        return ForwardPlan(
            ForwardKind.DENOISE,
            feed=(cached, stop),
            rows=(block, stop),
            store=(cached, block),
            attention="block_causal",
            block=self.block,
            origin=self.prompt,
        )
