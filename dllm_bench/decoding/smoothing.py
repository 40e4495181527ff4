"""dInfer's iteration smoothing: a mask is fed together with what the model last expected there.

After a forward, each row whose logits were computed remembers w * sum_v p(v) E[v], the mean
embedding of its distribution p, weighted by w = min(0.15 + 0.02 i, most) in forward i of the
request. The next forward that feeds the position adds it to the embedding of the mask token, as
long as the position is masked. dInfer (`IterationSmooth`, cont_weight 0.3) also lets the threshold
fall from 1: `decoder.select.fall=0.02`. Its unrolled forwards over a full block count in i; here
none are made.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from dllm_bench.core.contracts import Cache, Schedule
from dllm_bench.core.decoder import Condition
from dllm_bench.core.denoiser import Denoiser, ForwardPlan
from dllm_bench.core.errors import DllmBenchError
from dllm_bench.core.round import Round
from dllm_bench.core.state import DecodeState, MemoKey

FIRST, GROWTH = 0.15, 0.02  # dInfer's cont_weight_init and cont_weight_growth, which no script sets

EXPECTED = MemoKey[Tensor]("smoothing.expected")  # weighted mean embeddings, 0 at first, (K, L, H)


def check_smoothing(most: float, guidance: float, cache: Cache, schedule: Schedule) -> None:
    """Refuse negative weights, guidance, caches that leave out positions of the window, and
    schedules that move positions.
    """
    if not 0 <= most < float("inf"):
        raise DllmBenchError(f"smoothing is {most}; give a weight of 0 (none) or more.")
    if most > 0 and guidance > 0:
        raise DllmBenchError(
            f"smoothing {most} and guidance {guidance}: what is expected with the prompt would be "
            "fed without it too; set one of them to 0."
        )
    if most > 0 and Condition.FIXED_CANVAS not in schedule.gives:
        raise DllmBenchError(
            f"smoothing {most} remembers embeddings by position and needs a schedule with "
            f"{Condition.FIXED_CANVAS}, which {type(schedule).__name__} does not give; choose "
            "another schedule or smoothing 0."
        )
    if most > 0 and Condition.FED_WINDOW not in cache.gives:
        raise DllmBenchError(
            f"smoothing {most} needs a cache with {Condition.FED_WINDOW}, which "
            f"{type(cache).__name__} does not give; choose another cache or smoothing 0."
        )


def with_expected(plan: ForwardPlan, branches: DecodeState) -> ForwardPlan:
    """The plan that adds what is remembered to the embeddings of masked positions."""
    expected_KLH = branches.memo.get(EXPECTED)
    if expected_KLH is None:
        return plan
    open_KL = branches.masked_KL & (branches.tokens_KL == branches.special.mask)
    added_KLH = expected_KLH[:, : branches.length] * open_KL[..., None]
    if plan.sets is not None:
        return replace(plan, added_KFH=added_KLH.index_select(1, plan.sets.feed_F))
    added_KFH = added_KLH[:, slice(*plan.feed)]
    return replace(plan, added_KFH=pad(added_KFH, (0, 0, 0, plan.fed - added_KFH.shape[1])))


def remember_expected(model: Denoiser, round: Round, most: float) -> None:
    """Remember the weighted mean embeddings of the rows that were computed."""
    branches = round.state
    weight = min(FIRST + GROWTH * branches.forwards, most)
    mean_KRH = weight * model.mean_embeddings(round.rows_KRV)
    known_KLH = branches.memo.get(EXPECTED)
    if known_KLH is None:
        known_KLH = mean_KRH.new_zeros(branches.branches, branches.length, mean_KRH.shape[2])
    expected_KLH = known_KLH.clone()
    expected_KLH[:, slice(*round.plan.rows)] = mean_KRH
    branches.memo[EXPECTED] = expected_KLH
