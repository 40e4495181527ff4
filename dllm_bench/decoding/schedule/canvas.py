"""Block bookkeeping shared by the schedules: how many masks each block has left, and the window.

Block n covers positions [origin + nB, origin + (n+1)B), the last one may be short. With the origin
at the prompt's end blocks are prompt-relative (LLaDA); with the origin at 0 they are absolute and
the first one to decode may overlap the prompt (dInfer, block diffusion).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.core.protocols import Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import MASKED, DecodeState


def check_divides(block: int, new: int) -> None:
    """Prompt-relative blocks fill the generation without rest."""
    if new % block:
        raise DllmBenchError(
            f"A block of {block} does not divide the generation length {new}; "
            f"set max_new_tokens to a multiple of {block}."
        )


def masks_per_block(branches: DecodeState, origin: int, block: int) -> Tensor:
    """Positions still to be decoded in every block from `origin` on, int64 (K, N)."""
    return per_block(branches.masked_KL, origin, block)


def decoded_per_block(branches: DecodeState, origin: int, block: int) -> Tensor:
    """Positions decoded by this request in every block from `origin` on, int64 (K, N)."""
    return per_block(branches.born_KL > MASKED, origin, block)


def per_block(flags_KL: Tensor, origin: int, block: int) -> Tensor:
    """True values in every block from `origin` on, int64 (K, N)."""
    flags_KG = flags_KL[:, origin:]
    short = -flags_KG.shape[1] % block
    if short:
        flags_KG = torch.nn.functional.pad(flags_KG, (0, short))
    return flags_KG.unflatten(1, (-1, block)).sum(-1)


def leading(flags_KN: Tensor) -> Tensor:
    """Number of leading True values per row, int64 (K,)."""
    return flags_KN.long().cumprod(dim=1).sum(dim=1)


def survey(masks_KN: Tensor, done_K: Tensor, open_K: Tensor, origin: int, block: int) -> Tensor:
    """`Schedule.survey` for `open_K` open blocks per branch, the first `done_K` finished."""
    index_N = torch.arange(masks_KN.shape[1], device=open_K.device)
    left_K = (masks_KN * (index_N < open_K[:, None])).sum(1)
    return torch.stack([left_K, origin + done_K * block, origin + open_K * block], dim=1)


def open_window(
    branches: DecodeState,
    survey_K3: Tensor,
    rows: list[list[int]],
    origin: int,
    block: int,
    sees_future: bool,
) -> Window:
    """From the base's first unfinished block to the last block open in any branch.

    Every block with an open mask has to progress; a schedule may narrow `must_KN`.
    """
    ends = [row[2] for row in rows]
    start, stop = rows[-1][1], max(ends)
    open_end_K1 = survey_K3[:, 2:]
    position_W = torch.arange(start, stop, device=survey_K3.device)
    eligible_KW = branches.masked_KL[:, start:stop] & (position_W < open_end_K1)
    hides = not sees_future and min(ends) < stop
    return Window(
        start=start,
        stop=stop,
        visible=branches.length if sees_future else stop,
        retired=start,
        block=block,
        origin=origin,
        eligible_KW=eligible_KW,
        must_KN=per_block(eligible_KW, 0, block) > 0,
        visible_K=open_end_K1[:, 0] if hides else None,
        masks=sum(row[0] for row in rows),
    )
