"""Losses of drafters (DSpark, §3.3, Eq. 9-12; EAGLE-3's unrolled loss as in DeepSpec).

L = ce * CE + l1 * |p_d - p_t|_1 + confidence * BCE, each a weighted mean over supervised slots with
weights exp(-n / decay). CE reads the text's tokens; l1 is the full norm, twice the total variation;
the confidence's label is 1 - l1 / 2, without gradient. DFlash is (1, 0, 0). Temperature is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dllm_bench.core.errors import DllmBenchError
from dllm_bench.training.drafter_blocks import Blocks, Drafted, at, slot_weights
from dllm_bench.training.drafter_chain import shifted

SMALL = 1e-6  # added to denominators
UNROLL_DECAY = 0.8  # of EAGLE-3's steps


@dataclass(frozen=True)
class Shares:
    """How much each term counts, and how fast later slots count less (None: not at all)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0

    def __post_init__(self) -> None:
        """Refuse shares that teach nothing or the wrong way round."""
        if min(self.ce, self.l1, self.confidence) < 0 or self.ce + self.l1 <= 0:
            raise DllmBenchError(
                f"The loss counts CE {self.ce:g} times and L1 {self.l1:g} times; give two "
                "shares of 0 or more, one of them above 0."
            )


@dataclass(frozen=True)
class Losses:
    """Weighted sums of the terms and of the weights (0-d); survives_N: mean chance of acceptance of
    a slot given those before; length: expected tokens of a round, the target's own included.
    """

    ce: Tensor
    l1: Tensor
    confidence: Tensor
    weight: Tensor
    survives_N: Tensor
    length: Tensor

    def total(self, shares: Shares) -> Tensor:
        """What is minimised."""
        terms = shares.ce * self.ce + shares.l1 * self.l1 + shares.confidence * self.confidence
        return terms / (self.weight + SMALL)

    def numbers(self, shares: Shares) -> dict[str, float]:
        """A point of the training curve."""
        terms = {"ce": self.ce, "l1": self.l1, "confidence": self.confidence}
        means = {name: (term / (self.weight + SMALL)).item() for name, term in terms.items()}
        return {"loss": self.total(shares).item(), **means, "length": self.length.item()}


def block_losses(
    drafted: Drafted, target_BANV: Tensor, ids_BS: Tensor, blocks: Blocks, decay: float | None
) -> Losses:
    """All terms of one batch; `target` are the target's logits for the labels."""
    weight_BAN = slot_weights(blocks.supervised_BAN, decay)
    labels_BAN = at(ids_BS, blocks.labels_BAN)
    own_BANV, wanted_BANV = drafted.logits_BANV.float(), target_BANV.float()
    ce_BAN = F.cross_entropy(own_BANV.movedim(-1, 1), labels_BAN, reduction="none")
    l1_BAN = (own_BANV.softmax(-1) - wanted_BANV.softmax(-1)).abs().sum(-1)
    survives_BAN = (1 - l1_BAN.detach() / 2).clamp(0, 1)
    confidence = torch.zeros((), device=weight_BAN.device)
    if drafted.survival_BAN is not None:
        bce_BAN = F.binary_cross_entropy_with_logits(
            drafted.survival_BAN.float(), survives_BAN, reduction="none"
        )
        confidence = (bce_BAN * weight_BAN).sum()
    return Losses(
        ce=(ce_BAN * weight_BAN).sum(),
        l1=(l1_BAN * weight_BAN).sum(),
        confidence=confidence,
        weight=weight_BAN.sum(),
        survives_N=_mean(survives_BAN, blocks.supervised_BAN),
        length=_length(survives_BAN, blocks.supervised_BAN),
    )


def _mean(values_BAN: Tensor, among_BAN: Tensor) -> Tensor:
    """Mean (N,) over the blocks that count."""
    return (values_BAN * among_BAN).sum((0, 1)) / (among_BAN.sum((0, 1)) + SMALL)


def _length(survives_BAN: Tensor, among_BAN: Tensor) -> Tensor:
    """1 + expected accepted tokens, over blocks with any label."""
    accepted_BA = (survives_BAN * among_BAN).cumprod(-1).sum(-1)
    return 1 + accepted_BA.sum() / among_BAN[..., 0].sum().clamp(min=1)


def unrolled_losses(
    logits: Sequence[Tensor], target_BSV: Tensor, counts_BS: Tensor
) -> list[Tensor]:
    """Soft cross-entropy of EAGLE-3's steps, each divided by B x S.

    `target` are the target's logits after every position, `counts` the columns of step 0 that
    count; both move to the left from step to step.
    """
    found = []
    for step, own_BSV in enumerate(logits):
        law_BSV = shifted(target_BSV.float(), step + 1).softmax(-1)
        ce_BS = -(law_BSV * own_BSV.float().log_softmax(-1)).sum(-1)
        found.append((ce_BS * shifted(counts_BS, step)).sum() / counts_BS.numel())
    return found


def decayed(steps: Sequence[Tensor]) -> Tensor:
    """The sum of the steps' losses, each counting 0.8 of the one before."""
    return torch.stack([UNROLL_DECAY**step * loss for step, loss in enumerate(steps)]).sum()
