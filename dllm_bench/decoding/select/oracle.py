"""Learn2PD's oracle, "extremely greedy parallel" (arXiv 2509.25188, §3.1.3, Algorithm 1).

Commits every masked position whose candidate is the token of a reference known beforehand: what a
filter could reach at best. The reference is the request's own, or what `reference` decodes before
the clock starts (in the paper the model's answer, one token per forward). Algorithm 1 does not end
where no candidate is right; then the reference itself is written.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Decoder, Scores, Select
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import REFERENCE, DecodeState
from dllm_bench.registry import register

Stall = Literal["token", "block"]


@register("select.oracle")
@dataclass(frozen=True)
class Oracle(Select):
    """stall, where no candidate is right: "token" writes the reference at the surest position;
    "block" writes the whole block (the authors' code, which first spends a forward that changes
    nothing). Where the reference is too short the surest candidate counts, one per forward.
    """

    reference: Decoder | None = None
    stall: Stall = "token"

    def __post_init__(self) -> None:
        if self.stall not in get_args(Stall):
            raise DllmBenchError(
                f"Oracle has stall {self.stall!r}; choose one of {', '.join(get_args(Stall))}."
            )

    @property
    def needs(self) -> frozenset[tuple[str, str]]:  # type: ignore[override]
        """The blocks of the reference, so that both decode under one plan."""
        gives = getattr(getattr(self.reference, "schedule", None), "gives", ())
        return frozenset(("schedule", size) for size in gives if size.startswith("blocks of "))

    def prepare(self, model: Denoiser, request: Request) -> Request:
        if request.reference is not None:
            return request
        if self.reference is None:
            raise DllmBenchError(
                f"Request {request.id!r} brings no reference and the oracle has no decoder to make "
                "one; set decoder.select.reference."
            )
        return replace(request, reference=self.reference.generate(model, request).ids)

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        return scores.ids_KW == window.of(state.memo[REFERENCE])

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        where_KW, ids_KW = super().on_stall(scores, window, state)
        reference_KW = window.of(state.memo[REFERENCE])
        known_KW = reference_KW != state.special.mask
        if self.stall == "block":
            where_KW = where_KW | (known_KW & window.eligible_KW)
        return where_KW, ids_KW.where(~known_KW, reference_KW)
