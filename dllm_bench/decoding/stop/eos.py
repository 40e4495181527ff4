"""Stop at a committed end token.

Scope "block": once an end token is committed, no further block opens; open blocks are decoded to
their end (D2F, LoPA). Scope "token": also finish as soon as an end token and everything before it
is committed (CreditDecoding's early stop). Scope "write": finish in a forward that writes an end
token if everything before the first one is committed, and go on to the next block otherwise
(diffusers' block refinement of LLaDA2.1). The rule of Learn2PD's paper for end-of-text prediction
is "block" without the end of a turn.

Two released loops look for end tokens in the prompt as well (`prompt`): with one there, ReMDM's
decodes the first block alone, and diffusers' block refinement never stops early.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Stop, StopFlags
from dllm_bench.core.decoder import BlockLength, Condition
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import DEFAULT_LEFT_OUT, register

Scope = Literal["block", "token", "write"]


@register("stop.eos")
@dataclass(frozen=True)
class Eos(Stop):
    """Closes a branch that has committed an end token, or finishes it."""

    scope: Scope = "block"  # see the head of this file
    turn_end: bool = True  # whether the end of a chat turn counts as well
    prompt: bool = field(default=False, metadata=DEFAULT_LEFT_OUT)  # see the head of this file
    stops_on_end_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "scope", self.scope, Scope)
        if self.prompt and self.scope == "token":
            raise DllmBenchError(
                'Eos has prompt true and scope "token", under which an end token of the prompt '
                'would end a request at once; set scope to "block" or "write".'
            )

    @property
    def gives(self) -> frozenset[Condition | BlockLength]:  # type: ignore[override]
        """That decoding ends at the end of text, and at no other end token."""
        at_token = self.scope == "token" and not self.turn_end
        return frozenset({Condition.END_OF_TEXT} if at_token else ())

    def _ends(self, branches: DecodeState, start: int, stop: int | None = None) -> Tensor:
        """True where a position from `start` to `stop` holds an end token, bool (K, X).

        Those that a schedule puts behind the text do not count.
        """
        tokens_KX = branches.tokens_KL[:, start:stop]
        ends_KX = tokens_KX == branches.special.eos
        for end in branches.special.ends[1:] if self.turn_end else ():
            ends_KX = ends_KX | (tokens_KX == end)
        if branches.ends_given and start:
            ends_KX = ends_KX & (branches.born_KL[:, start:stop] >= 0)
        return ends_KX

    def ended(self, branches: DecodeState) -> StopFlags:
        start = branches.prompt_len
        ends_KG = self._ends(branches, start)
        closed_K = ends_KG.any(dim=1)
        given_K = self._ends(branches, 0, start).any(dim=1) if self.prompt else None
        if self.scope == "block":
            if given_K is not None:
                begun_K = (branches.born_KL[:, start:] >= 0).any(dim=1)
                closed_K = closed_K | (given_K & begun_K)
            return StopFlags(closed_K)
        masked_KG = branches.masked_KL[:, start:]
        first_K1 = (ends_KG | masked_KG).view(torch.uint8).argmax(1, keepdim=True)
        finished_K = ends_KG.gather(1, first_K1)[:, 0]
        if self.scope == "token":
            return StopFlags(closed_K, finished_K)
        if given_K is not None:
            finished_K = finished_K & ~given_K
        born_KG = branches.born_KL[:, start:]
        written_K = (ends_KG & (born_KG == branches.forwards - 1)).any(1)
        return StopFlags(finished_K=finished_K & written_K)
