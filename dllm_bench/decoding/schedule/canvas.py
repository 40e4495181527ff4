"""Block bookkeeping shared by the schedules: how much of each block is decoded, and the window.

Blocks are prompt-relative: block n covers positions [P + nB, P + (n+1)B).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dllm_bench.core.protocols import Window
from dllm_bench.core.request import DllmBenchError
from dllm_bench.core.state import DecodeState


def decoded_per_block(branches: DecodeState, block: int) -> Tensor:
    """Decoded positions of every generation block, int64 (K, N)."""
    new = branches.length - branches.prompt_len
    if new % block:
        raise DllmBenchError(
            f"A block of {block} does not divide the generation length {new}; "
            f"set max_new_tokens to a multiple of {block}."
        )
    masked_KN = branches.masked_KL[:, branches.prompt_len :].unflatten(1, (-1, block)).sum(-1)
    return block - masked_KN


def leading(flags_KN: Tensor) -> Tensor:
    """Number of leading True values per row, int64 (K,)."""
    return flags_KN.long().cumprod(dim=1).sum(dim=1)


def survey(branches: DecodeState, decoded_KN: Tensor, open_K: Tensor, block: int) -> Tensor:
    """`Schedule.survey` for `open_K` open blocks per branch."""
    index_N = torch.arange(decoded_KN.shape[1], device=open_K.device)
    left_K = ((block - decoded_KN) * (index_N < open_K[:, None])).sum(1)
    done_K = leading(decoded_KN == block)
    prompt = branches.prompt_len
    return torch.stack([left_K, prompt + done_K * block, prompt + open_K * block], dim=1)


def open_window(
    branches: DecodeState,
    survey_K3: Tensor,
    rows: list[list[int]],
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
        eligible_KW=eligible_KW,
        must_KN=eligible_KW.unflatten(1, (-1, block)).any(-1),
        visible_K=open_end_K1[:, 0] if hides else None,
    )
