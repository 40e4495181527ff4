"""What `numerics` needs of every row of logits, in as few reads as can be: on CUDA, by Triton.

Maximum, its index, sum of exp(x - max) and sum of exp(x - max) (x - max) take one read, the entropy
in its published form one more, a cut at top-p the number of bits over four and three more. torch's
own passes make a float32 copy of the logits and read it several times, or sort it; the kernels of
`kernels` read the logits as they are. Triton comes with CUDA builds of torch. Where it is absent,
cannot start or computes something else than torch does, `available` returns False.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPAN = 8192  # logits of one part of a row, which one program reads
SEARCHED = 1024  # logits that a search compares with 16 bounds at a time
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
        entropy_R = neg_entropy(probe_RV, best_R, sum_R, torch.float32, 0.5)
        share_RV = probe_RV.softmax(-1)
        torch.testing.assert_close(entropy_R, (share_RV * (share_RV + 0.5).log()).sum(-1))
        kept_R = (keep_top_p(probe_RV, 0.5) > -torch.inf).sum(-1)
        law_R = (share_RV.sort(descending=True).values.cumsum(-1) <= 0.5).sum(-1) + 1
        torch.testing.assert_close(kept_R, law_R, rtol=0, atol=1)
    except Exception as error:
        warnings.warn(f"Logits are read in several passes: Triton fails ({error}).", stacklevel=3)
        return False
    return True


def row_statistics(
    logits_RV: Tensor, entropy: bool, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """best_R, index_R (int64, the first of equal ones), sum_R; weighted_R if `entropy`.

    dtype: what logits are rounded to first, their own if None; sums are float64 if it is, else
    float32. A token at -inf adds nothing to the sums. The sums of a row with a nan are nan, those
    of a row of -inf only are 0. A row's numbers are the same bits whatever the other rows are.
    """
    from dllm_bench.decoding import kernels

    to = getattr(kernels.tl, str(dtype or logits_RV.dtype)[6:])
    rows, parts, logits = _rows(logits_RV)
    wide = torch.promote_types(dtype or logits_RV.dtype, torch.float32)
    part_4RX = logits_RV.new_empty((4, rows, parts), dtype=wide)
    row_4R = logits_RV.new_empty((4, rows), dtype=wide)
    with torch.cuda.device_of(logits_RV):  # Triton starts on the current device
        arguments = (logits, part_4RX, parts, SPAN, to, entropy)
        kernels.of_parts[(rows * parts,)](*arguments, num_warps=WARPS)
        kernels.of_rows[(rows,)](part_4RX, row_4R, parts, entropy, num_warps=1)
    best_R, index_R, sum_R, weighted_R = row_4R
    return best_R, index_R.long(), sum_R, weighted_R if entropy else None


def neg_entropy(
    logits_RV: Tensor, best_R: Tensor, sum_R: Tensor, dtype: torch.dtype, eps: float
) -> Tensor:
    """Sum of p ln(p + eps) over each row, in nats, every step rounded to `dtype`: (R,) of it.

    best_R, sum_R: what `row_statistics` found for the dtype.
    """
    from dllm_bench.decoding import kernels

    rows, parts, logits = _rows(logits_RV)
    part_RX = best_R.new_empty((rows, parts))
    with torch.cuda.device_of(logits_RV):
        arguments = (logits, best_R, sum_R, part_RX, parts, SPAN)
        kernels.entropy_of_parts[(rows * parts,)](
            *arguments, getattr(kernels.tl, str(dtype)[6:]), eps, num_warps=WARPS
        )
    return part_RX.sum(-1).to(dtype)


def keep_top_p(logits_RV: Tensor, top_p: float) -> Tensor:
    """`numerics.keep_top_p` of rows of float32 or shorter, by a search for the least token kept."""
    from dllm_bench.decoding import kernels

    best_R, _, sum_R, _ = row_statistics(logits_RV, entropy=False)
    rows, _, logits = _rows(logits_RV)
    kept_RV = torch.empty(logits_RV.shape, dtype=logits_RV.dtype, device=logits_RV.device)
    bits = 16 if logits_RV.dtype == torch.bfloat16 else 32  # of the integers in their order
    with torch.cuda.device_of(logits_RV):
        arguments = (logits, best_R, sum_R, kept_RV, top_p, SEARCHED, bits)
        kernels.keep_top_p[(rows,)](*arguments, num_warps=WARPS)
    return kept_RV


def _rows(logits_RV: Tensor) -> tuple[int, int, tuple[Tensor, int, int]]:
    """Number of rows, parts of a row, and the kernels' `rows`."""
    rows, length = logits_RV.shape
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    return rows, -(-length // SPAN), (logits_RV, logits_RV.stride(0), length)
