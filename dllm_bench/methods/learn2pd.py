"""Learn2PD with EoTP (arXiv 2509.25188): a trained filter, its oracle, end-of-text prediction."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dllm_bench.core.blocks import Window
from dllm_bench.core.contracts import Reads, Round, Scores, Select, Stop
from dllm_bench.core.declared import Probability
from dllm_bench.core.decoder import FIXED_CANVAS, BlockLength, Condition, Decoder, Needs, needing
from dllm_bench.core.denoiser import Denoiser
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.request import Request
from dllm_bench.core.state import MASKED, DecodeState, MemoKey
from dllm_bench.core.transfer import only
from dllm_bench.decoding.numerics import top1
from dllm_bench.models.filters import LearnedFilter
from dllm_bench.registry import register

ACCEPTED = MemoKey[Tensor]("filter.accepted")  # positions accepted in the last forward, (K, W)
LOGITS = MemoKey[Tensor]("filter.logits")  # output of the head in the last forward, (K, W)


@register("select.filter")
@dataclass(frozen=True)
class Filter(Select):
    """Learn2PD's learned filter (arXiv 2509.25188, §3.2, Algorithm 2): a small network decides.

    It reads the confidences of a whole block, including committed positions, and predicts for every
    position the probability that its candidate is final; masked positions above `tau` are
    committed. The authors' code also commits the most confident positions of the step (`union` of
    filter and topk) and therefore never stalls. Used alone, the filter commits its position of
    largest output if a block must progress and would commit nothing.
    """

    head: LearnedFilter
    tau: Probability = 0.96
    decoded: Literal["model", "one"] = "model"  # what the head reads at committed positions: the
    # model's own confidence there (the authors' code) or 1
    stall: Literal["filter", "confidence"] = "filter"  # ranking of positions if the filter accepts
    # none

    @property
    def needs(self) -> Needs:
        """Blocks of the length the head was trained for, and the rows it reads."""
        reads = Condition.FED_WINDOW if self.reads_rows == "window" else ()
        return needing({"schedule": BlockLength(self.head.block), "cache": reads})

    @property
    def reads_rows(self) -> Reads:
        """Also committed positions, unless it reads 1 there."""
        return "window" if self.decoded == "model" else "masked"

    def __call__(self, scores: Scores, window: Window, state: DecodeState) -> Tensor:
        input_KW = scores.probability_KW.float()
        if self.decoded == "one":
            input_KW = input_KW.masked_fill(~window.of(state.masked_KL), 1.0)
        logits_KW = window.flat(self.head(window.blocks(input_KW, fill=1.0)))
        accepted_KW = (logits_KW.sigmoid() > self.tau) & window.eligible_KW
        state.memo[LOGITS], state.memo[ACCEPTED] = logits_KW, accepted_KW
        return accepted_KW

    def on_stall(self, scores: Scores, window: Window, state: DecodeState) -> tuple[Tensor, Tensor]:
        """Return the position with the largest output; of equal ones the more confident."""
        if self.stall == "filter":
            logits_KNP = window.blocks(only(state.memo[LOGITS], window.eligible_KW), -torch.inf)
            best_KW = window.flat(logits_KNP == logits_KNP.amax(-1, keepdim=True))
            ranking_KW = only(scores.confidence_KW, best_KW)
            scores = Scores(scores.ids_KW, scores.probability_KW, ranking_KW)
        return super().on_stall(scores, window, state)


@register("select.oracle")
@dataclass(frozen=True)
class Oracle(Select):
    """Commits the positions whose candidate is right.

    After the end of a reference that is too short, it commits the most confident candidate, one per
    forward.

    Learn2PD's oracle, "extremely greedy parallel" (arXiv 2509.25188, §3.1.3, Algorithm 1).

    Commits every masked position whose candidate equals the token of a known reference: the upper
    limit for a filter. The reference is the request's own, or the text that the decoder `reference`
    generates before the clock starts (in the paper the model's answer at one token per forward).
    Algorithm 1 does not terminate if no candidate is right; here reference tokens are written in
    that case.
    """

    reference: Decoder | None = None  # generates the reference of requests that have none
    stall: Literal["token", "block"] = "token"  # reference tokens written if no candidate is right:
    # at the most confident position, or the whole "block" (the authors' code, which first spends a
    # forward that changes nothing)

    @property
    def needs(self) -> Needs:
        """The block length of the reference, so that both decode the same blocks."""
        block = self.reference.summary().block if self.reference is not None else None
        return needing(FIXED_CANVAS, {"schedule": BlockLength(block) if block else ()})

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


AHEAD_IDS = MemoKey[Tensor]("eotp.ahead_ids")  # candidates after the window, int64 (K, X)
AHEAD_PROBABILITY = MemoKey[Tensor]("eotp.ahead_probability")  # their probabilities, (K, X)


@register("stop.eotp")
@dataclass(frozen=True)
class EndOfTextPrediction(Stop):
    """Cuts the canvas after a predicted end token; without a filter, after the most probable one.

    End-of-text prediction as Learn2PD's authors coded it: cut the canvas where the text will end.

    After every forward, the rule considers the fed masked positions whose candidate is the end
    token. The first one accepted by a learned filter ends the canvas, or else the most probable
    one. This happens before the token is committed, so later forwards see a shorter canvas. The
    authors' loops with a cache consider only the open block (`ahead` off). The paper's own rule
    (Algorithm 3, Fig. 6: halt after a decoded block with an end token) is `Eos("block",
    turn_end=False)`.
    """

    ahead: bool = True  # whether positions after the open block count too
    needs = needing(FIXED_CANVAS)

    @property
    def reads_rows(self) -> Reads:
        """Also rows fed after the open block, if those count."""
        return "fed" if self.ahead else "masked"

    def on_scores(self, round: Round) -> None:
        """Remember the candidates after the window."""
        if self.ahead:
            memo = round.state.memo
            memo[AHEAD_IDS], memo[AHEAD_PROBABILITY] = top1(round.ahead_KXV)

    def on_commit(self, round: Round) -> None:
        state, window = round.state, round.window
        ids_A, probability_A = round.scores.ids_KW[0], round.scores.probability_KW[0]
        if self.ahead:
            ids_A = torch.cat([ids_A, state.memo[AHEAD_IDS][0]])
            probability_A = torch.cat([probability_A, state.memo[AHEAD_PROBABILITY][0]])
        # masked before the commit, with the end token as the candidate
        born_A = state.born_KL[0, window.start : window.start + len(ids_A)]
        ends_A = (born_A == MASKED) | (born_A == state.forwards)
        ends_A &= ids_A == state.special.eos
        accepted_A = torch.zeros_like(ends_A)
        if ACCEPTED in state.memo:
            accepted_A[: window.width] = state.memo[ACCEPTED][0] & ends_A[: window.width]
        first = accepted_A.long().argmax()
        best = probability_A.masked_fill(~ends_A, -1.0).argmax()
        last = window.start + torch.where(accepted_A.any(), first, best)
        round.cut(torch.where(ends_A.any(), last + 1, state.length))
