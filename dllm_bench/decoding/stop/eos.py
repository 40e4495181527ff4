"""Stop at the end of the text.

scope "block": once an end token is committed no further block opens, open blocks are decoded to
their end (D2F, LoPA). scope "token": also finish as soon as an end token is committed and
everything before it is decoded (CreditDecoding's early stop). The rule of Learn2PD's paper for
end-of-text prediction is "block" without the end of a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from dllm_bench.core.contracts import Stop, StopFlags
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register

Scope = Literal["block", "token"]


@register("stop.eos")
@dataclass(frozen=True)
class Eos(Stop):
    """See the file header for `scope`; turn_end: the end of a chat turn counts as well."""

    scope: Scope = "block"
    turn_end: bool = True

    def __post_init__(self) -> None:
        if self.scope not in get_args(Scope):
            raise DllmBenchError(
                f"Eos scope is {self.scope!r}; choose one of {', '.join(get_args(Scope))}."
            )

    def _ends(self, branches: DecodeState) -> Tensor:
        """True where a generated position holds an end token, bool (K, G)."""
        generated_KG = branches.tokens_KL[:, branches.prompt_len :]
        found_KG = generated_KG == branches.special.eos
        for end in branches.special.ends[1:] if self.turn_end else ():
            found_KG = found_KG | (generated_KG == end)
        return found_KG

    def ended(self, branches: DecodeState) -> StopFlags:
        found_KG = self._ends(branches)
        closed_K = found_KG.any(dim=1)
        if self.scope == "block":
            return StopFlags(closed_K)
        masked_KG = branches.masked_KL[:, branches.prompt_len :]
        first_K1 = (found_KG | masked_KG).view(torch.uint8).argmax(1, keepdim=True)
        return StopFlags(closed_K, found_KG.gather(1, first_K1)[:, 0])
