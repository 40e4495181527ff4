"""CreditDecoding (arXiv 2510.06133, Eq. 6, 7, 13; Algorithm 1): evidence of earlier steps.

C_t = beta C_{t+1} + p^gamma at the raw top-1 token of every masked position, fused as
l + alpha log(1 + C); another Score reads the fused logits. Credits live per block, in the state's
memo, so they follow their branch and end with their request. A position holds only the ids it has
credited, which is exact; `full_distribution` (Eq. 13) credits every id and needs a dense table.
`adaptive` (§4.3) takes gamma = 1 and alpha = beta = 1 - (masked share of the block), read before
this step's commits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dllm_bench.core.protocols import Score, Scores, Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.decoding.numerics import top1

FREE = -1  # id of an unused slot
MEMO = "credit"


@dataclass(frozen=True)
class Credit(Score):
    """`inner` scores the fused logits; alpha = 0 leaves it unchanged."""

    inner: Score
    alpha: float = 0.65
    beta: float = 0.7
    gamma: float = 0.2
    adaptive: bool = False
    full_distribution: bool = False

    def __post_init__(self) -> None:
        if self.alpha < 0 or not 0 <= self.beta <= 1 or self.gamma < 0:
            raise DllmBenchError(
                f"Credit has alpha {self.alpha}, beta {self.beta}, gamma {self.gamma}; alpha and "
                "gamma must not be negative and beta lies in [0, 1]."
            )

    def __call__(self, logits_KWV: Tensor, state: DecodeState, window: Window) -> Scores:
        fused_KWV = logits_KWV.float()
        masked_KW = window.of(state.masked_KL)
        forget(state, window)
        for start in range(0, window.stop - window.start, window.block):
            span = slice(start, start + window.block)
            gain_K11, decay_K11 = self._weights(masked_KW[:, span])
            memo = f"{MEMO}@{window.start + start}"
            self._fuse(fused_KWV[:, span], masked_KW[:, span], gain_K11, decay_K11, (state, memo))
        return self.inner(fused_KWV, state, window)

    def _weights(self, masked_KB: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and beta of this step, each (K, 1, 1)."""
        if self.adaptive:
            done_K11 = 1 - masked_KB.float().mean(1)[:, None, None]
            return done_K11, done_K11
        ones_K11 = torch.ones(len(masked_KB), 1, 1, device=masked_KB.device)
        return self.alpha * ones_K11, self.beta * ones_K11

    def _fuse(
        self,
        logits_KBV: Tensor,
        masked_KB: Tensor,
        gain_K11: Tensor,
        decay_K11: Tensor,
        where: tuple[DecodeState, str],
    ) -> None:
        """Update the credits of one block and add them to its logits in place."""
        state, memo = where
        gamma = 1.0 if self.adaptive else self.gamma
        if self.full_distribution:
            gained_KBV = logits_KBV.softmax(-1).pow(gamma) * masked_KB[..., None]
            credit_KBV = gained_KBV + decay_K11 * state.memo.get(memo, 0.0)
            state.memo[memo] = credit_KBV
            logits_KBV += gain_K11 * credit_KBV.log1p()
            return
        ids_KB, probability_KB = top1(logits_KBV)
        gained_KB = probability_KB.pow(gamma) * masked_KB
        ids_KBS, credit_KBS = self._credited(ids_KB, state, memo)
        match_KBS = ids_KBS == ids_KB[..., None]
        credit_KBS = decay_K11 * credit_KBS + match_KBS * gained_KB[..., None]
        state.memo[f"{memo}.ids"], state.memo[memo] = ids_KBS, credit_KBS
        logits_KBV.scatter_add_(2, ids_KBS.clamp(min=0), gain_K11 * credit_KBS.log1p())

    def _credited(self, ids_KB: Tensor, state: DecodeState, memo: str) -> tuple[Tensor, Tensor]:
        """The block's slots with room for `ids`: (K, B, S) ids and credits, one slot per id."""
        if memo not in state.memo:
            return ids_KB[..., None], torch.zeros_like(ids_KB, dtype=torch.float32)[..., None]
        ids_KBS, credit_KBS = state.memo[f"{memo}.ids"], state.memo[memo]
        known_KB1 = (ids_KBS == ids_KB[..., None]).any(-1, keepdim=True)
        slot_KB1 = ids_KB[..., None].masked_fill(known_KB1, FREE)
        empty_KB1 = torch.zeros_like(slot_KB1, dtype=torch.float32)
        return torch.cat([ids_KBS, slot_KB1], 2), torch.cat([credit_KBS, empty_KB1], 2)


def forget(state: DecodeState, window: Window) -> None:
    """Drop the credits of blocks that are finished in every branch."""
    for name in [name for name in state.memo if name.startswith(f"{MEMO}@")]:
        if int(name.removeprefix(f"{MEMO}@").removesuffix(".ids")) < window.start:
            del state.memo[name]
