"""Learn2PD's oracle, "extremely greedy parallel" (arXiv 2509.25188, §3.1.3, Algorithm 1).

Commits every masked position whose candidate equals the token of a reference that is known
beforehand: the best that a filter could do. The reference is the request's own, or what the decoder
`reference` generates before the clock starts (in the paper the model's answer, one token per
forward). Algorithm 1 does not end if no candidate is right; here the reference is written then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.choices import check_choice
from dllm_bench.core.contracts import Scores, Select
from dllm_bench.core.decoder import BlockLength, ComposedDecoder, Decoder, Need
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import DecodeState
from dllm_bench.registry import register

Stall = Literal["token", "block"]


@register("select.oracle")
@dataclass(frozen=True)
class Oracle(Select):
    """Commits the positions whose candidate is right.

    Behind the end of a reference that is too short, it commits the most confident candidate, one
    per forward.
    """

    reference: Decoder | None = None  # generates the reference of requests that have none
    stall: Stall = "token"  # what is written of the reference if no candidate is right: the most
    # confident position, or the whole "block" (the authors' code, which first spends a forward that
    # changes nothing)
    by_position: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice(self, "stall", self.stall, Stall)

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        """The block length of the reference, so that both decode the same blocks."""
        if not isinstance(self.reference, ComposedDecoder):
            return frozenset()
        block = self.reference.summary().block
        return frozenset({Need("schedule", BlockLength(block))} if block else ())

    def prepare(self, model: Denoiser, request: Request) -> Request:
        if request.reference is not None:
            return request
        if self.reference is None:
            raise DllmBenchError(
                f"Request {request.id!r} has no reference and the oracle has no decoder to make "
                "one; set decoder.select.reference."
            )
        return replace(request, reference=self.reference.generate(model, request).ids)

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        assert state.reference_KL is not None  # by `prepare`
        return scores.ids_KW == window.of(state.reference_KL)

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        assert state.reference_KL is not None
        reference_KW = window.of(state.reference_KL)
        known_KW = reference_KW != state.special.mask
        if self.stall == "block":
            where_KW = where_KW | (known_KW & window.eligible_KW)
        return where_KW, ids_KW.where(~known_KW, reference_KW)
