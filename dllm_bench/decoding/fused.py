"""What `numerics.look` needs of every row of logits, in one read: for CUDA devices, by Triton.

Maximum, its index, sum of exp(x - max) and sum of exp(x - max) (x - max). torch's own passes make a
float32 copy of the logits and go over it several times; `kernels` reads them as they are, once.
Triton comes with CUDA builds of torch; where it is absent, cannot start or computes something else
than torch does, `available` says no.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPAN = 8192  # logits of a part of a row, which is one program's
WARPS = 8  # of 32 threads with 32 logits each: 64 registers on an H200, nothing spilled


def available(logits: Tensor) -> bool:
    """Whether `row_statistics` can take these logits: where they lie, their dtype, Triton."""
    return logits.is_cuda and logits.dtype in DTYPES and works()


@cache
def works(device: str = "cuda") -> bool:
    """Whether the kernels run on the device and find what torch finds, tried once on two rows."""
    try:
        probe_NV = torch.linspace(-9, 9, 2 * (SPAN + 5), device=device).view(2, -1)
        best_N, index_N, sum_N, weighted_N = row_statistics(probe_NV, entropy=True)
        below_NV = probe_NV - best_N[:, None]
        mass_NV = below_NV.exp()
        assert weighted_N is not None  # asked for
        torch.testing.assert_close(index_N, probe_NV.argmax(-1))
        torch.testing.assert_close(best_N, probe_NV.amax(-1), rtol=0, atol=0)
        torch.testing.assert_close(sum_N, mass_NV.sum(-1))
        torch.testing.assert_close(weighted_N, (mass_NV * below_NV).sum(-1))
    except Exception as error:
        warnings.warn(f"Logits are read in several passes: Triton fails ({error}).", stacklevel=3)
        return False
    return True


def row_statistics(
    logits_NV: Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """best_N, index_N (int64, the first of equal ones), sum_N; weighted_N where `entropy` asks.

    A token at -inf has no part in the sums. A row that holds a nan has nan for its sums, a row of
    -inf alone 0. A row's numbers are the same bits whatever rows stand beside it.
    """
    from dllm_bench.decoding import kernels

    if logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.contiguous()
    rows, length = logits_NV.shape
    parts = -(-length // SPAN)
    part_4NP = logits_NV.new_empty((4, rows, parts), dtype=torch.float32)
    found_4N = logits_NV.new_empty((4, rows), dtype=torch.float32)
    with torch.cuda.device_of(logits_NV):  # Triton starts on the current device
        arguments = (logits_NV, logits_NV.stride(0), length, part_4NP, parts, SPAN)
        kernels.of_parts[(rows * parts,)](*arguments, entropy, num_warps=WARPS)
        kernels.of_rows[(rows,)](part_4NP, found_4N, parts, entropy, num_warps=1)
    best_N, index_N, sum_N, weighted_N = found_4N
    return best_N, index_N.long(), sum_N, weighted_N if entropy else None
