"""`Scores`: what a model proposes at the positions of a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """What the model proposes at every window position, committed ones where a piece reads them."""

    ids_KW: Tensor  # candidate token, int64
    probability_KW: Tensor  # of the candidate; thresholds compare it
    confidence_KW: Tensor  # the larger, the earlier committed: probability, margin, -entropy ...
    raw_KW: Tensor | None = None  # confidence before evidence of earlier steps was added, if kept
    neg_entropy_KW: Tensor | None = None  # sum of p ln p in nats, if the score gives it
    answer_gap_K: Tensor | None = None  # mean difference of the two largest logits in the answer
    divergence_KWH: Tensor | None = None  # KL from the forward before in nats, of the last H
    # forwards, newest last, if the score gives it

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are present, by the name of their field."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def map(self, function: Callable[[Tensor], Tensor]) -> Scores:
        """Scores of `function` of every tensor that is present."""
        return replace(self, **{name: function(value) for name, value in self.tensors().items()})

    def pick(self, j: Tensor) -> Scores:
        """The scores of branch `j` (0-d or 1-element int64 tensor) alone."""
        return self.map(lambda values: values.index_select(0, j.reshape(1)))
