"""What `numerics.read_logits` needs of every row of logits, in one read: on CUDA, by Triton.

Maximum, its index, sum of exp(x - max) and sum of exp(x - max) (x - max). torch's own passes make a
float32 copy of the logits and read it several times; the kernels of `kernels` read the logits once,
as they are. Triton comes with CUDA builds of torch. Where it is absent, cannot start or computes
something else than torch does, `available` returns False.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPAN = 8192  # logits of one part of a row, which one program reads
WARPS = 8  # of 32 threads with 32 logits each: 64 registers on an H200, nothing spilled


def available(logits: Tensor) -> bool:
    """Whether `row_statistics` can take these logits: by their device and dtype, and by Triton."""
    return logits.is_cuda and logits.dtype in DTYPES and works()


@cache
def works(device: str = "cuda") -> bool:
    """Whether the kernels run on the device and agree with torch; tried once, on two rows."""
    try:
        probe_RV = torch.linspace(-9, 9, 2 * (SPAN + 5), device=device).view(2, -1)
        best_R, index_R, sum_R, weighted_R = row_statistics(probe_RV, entropy=True)
        below_RV = probe_RV - best_R[:, None]
        mass_RV = below_RV.exp()
        assert weighted_R is not None  # because of entropy=True
        torch.testing.assert_close(index_R, probe_RV.argmax(-1))
        torch.testing.assert_close(best_R, probe_RV.amax(-1), rtol=0, atol=0)
        torch.testing.assert_close(sum_R, mass_RV.sum(-1))
        torch.testing.assert_close(weighted_R, (mass_RV * below_RV).sum(-1))
    except Exception as error:
        warnings.warn(f"Logits are read in several passes: Triton fails ({error}).", stacklevel=3)
        return False
    return True


def row_statistics(
    logits_RV: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """best_R, index_R (int64, the first of equal ones), sum_R; weighted_R if `entropy`.

    A token at -inf adds nothing to the sums. The sums of a row with a nan are nan, those of a row
    of -inf only are 0. A row's numbers are the same bits whatever the other rows are.
    """
    from dllm_bench.decoding import kernels

    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    rows, length = logits_RV.shape
    parts = -(-length // SPAN)
    part_4RX = logits_RV.new_empty((4, rows, parts), dtype=torch.float32)
    row_4R = logits_RV.new_empty((4, rows), dtype=torch.float32)
    with torch.cuda.device_of(logits_RV):  # Triton starts on the current device
        arguments = (logits_RV, logits_RV.stride(0), length, part_4RX, parts, SPAN)
        kernels.of_parts[(rows * parts,)](*arguments, entropy, num_warps=WARPS)
        kernels.of_rows[(rows,)](part_4RX, row_4R, parts, entropy, num_warps=1)
    best_R, index_R, sum_R, weighted_R = row_4R
    return best_R, index_R.long(), sum_R, weighted_R if entropy else None
