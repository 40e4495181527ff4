"""Switches of the masked decoder that change the inputs of its forwards: guidance and smoothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.contracts import MaskedPiece, Round
from dllm_bench.core.decoder import FIXED_CANVAS, Condition, needing
from dllm_bench.core.denoiser import ForwardPlan
from dllm_bench.core.state import PROMPT, MemoKey
from dllm_bench.decoding.batching import Steps, run_forward


@dataclass(frozen=True)
class Guidance(MaskedPiece):
    """Classifier-free guidance (LLaDA §2.4): each forward sees the canvas with and without the
    prompt.

    logits = u + (scale + 1) (c - u), with c from the prompt and u from a prompt of only masks. Both
    come from one forward with twice as many branches. The forward has to feed the whole canvas,
    because cached keys and values would belong to the prompt of c.
    """

    scale: float
    reads_rows = "window"
    needs = needing({"cache": Condition.WHOLE_CANVAS})

    def __str__(self) -> str:
        return str(self.scale)


def guided_forward(round: Round, scale: float) -> Steps[Tensor]:
    """Run the planned forward; return its logits (K, R, V), guided if `scale` is above 0."""
    branches, plan, kv = round.state, round.plan, round.kv
    if scale == 0:
        return (yield from run_forward(branches.tokens_KL, plan, kv))
    masked_KL = branches.tokens_KL.masked_fill(branches.born_KL == PROMPT, branches.special.mask)
    if plan.visible_K is not None:
        plan = replace(plan, visible_K=plan.visible_K.repeat(2))
    if plan.added_KFH is not None:
        plan = replace(plan, added_KFH=plan.added_KFH.repeat(2, 1, 1))
    both_XRV = yield from run_forward(torch.cat([branches.tokens_KL, masked_KL]), plan, kv)
    conditional_KRV, unconditional_KRV = both_XRV.chunk(2)
    return unconditional_KRV + (scale + 1) * (conditional_KRV - unconditional_KRV)


def with_added(plan: ForwardPlan, added_KLH: Tensor) -> ForwardPlan:
    """Return the plan that also adds this to the embeddings of the canvas positions it feeds."""
    if plan.sets is not None:
        added_KFH = added_KLH.index_select(1, plan.sets.feed_F)
    else:
        added_KFH = added_KLH[:, slice(*plan.feed)]
        added_KFH = pad(added_KFH, (0, 0, 0, plan.fed - added_KFH.shape[1]))
    if plan.added_KFH is not None:
        added_KFH = plan.added_KFH + added_KFH
    return replace(plan, added_KFH=added_KFH)


FIRST, RISE = 0.15, 0.02  # dInfer's cont_weight_init and cont_weight_growth, which no script sets

EXPECTED = MemoKey[Tensor]("smoothing.expected")  # weighted mean embeddings, 0 at first, (K, L, H)


@dataclass(frozen=True)
class Smoothing(MaskedPiece):
    """dInfer's iteration smoothing: a mask is fed together with the model's last prediction at its
    position.

    After a forward, each row whose logits were computed remembers w * sum_v p(v) E[v], the mean
    embedding of its distribution p, weighted by w = min(0.15 + 0.02 i, most) in forward i of the
    request. The next forward that feeds the position adds it to the embedding of the mask token, as
    long as the position is masked. dInfer (`IterationSmooth`, cont_weight 0.3) also lowers the
    threshold from 1 step by step: `decoder.select.fall=0.02`. In dInfer, unrolled forwards over a
    full block count in i; here there are none.
    """

    most: float  # the largest weight
    reads_rows = "fed"
    # unguided, because a prediction made with the prompt would also be fed without it
    needs = needing(FIXED_CANVAS, {"cache": Condition.FED_WINDOW, "guidance": Condition.UNGUIDED})

    def __str__(self) -> str:
        return str(self.most)

    def on_plan(self, round: Round) -> None:
        """Add the remembered embeddings at masked positions."""
        branches = round.state
        expected_KLH = branches.memo.get(EXPECTED)
        if expected_KLH is None:
            return
        open_KL = branches.masked_KL & (branches.tokens_KL == branches.special.mask)
        round.plan = with_added(round.plan, expected_KLH[:, : branches.length] * open_KL[..., None])

    def on_scores(self, round: Round) -> None:
        """Remember the weighted mean embeddings of the rows that were computed."""
        branches = round.state
        weight = min(FIRST + RISE * branches.forwards, self.most)
        mean_KRH = weight * round.model.mean_embeddings(round.rows_KRV)
        known_KLH = branches.memo.get(EXPECTED)
        if known_KLH is None:
            known_KLH = mean_KRH.new_zeros(branches.branches, branches.length, mean_KRH.shape[2])
        expected_KLH = known_KLH.clone()
        expected_KLH[:, slice(*round.plan.rows)] = mean_KRH
        branches.memo[EXPECTED] = expected_KLH
