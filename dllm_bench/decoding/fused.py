"""What `numerics` needs of every row of logits, in as few reads as can be: on CUDA, by Triton.

Maximum, its index, sum of exp(x - max) and entropy take one read, the entropy in its published form
one more, a cut at top-p the number of bits over four and three more. torch's
own passes make a float32 copy of the logits and read it several times, or sort it; the kernels of
`kernels` read the logits as they are. Triton comes with CUDA builds of torch. Where it is absent,
cannot start or computes something else than torch does, `available` returns False. It is tried once
for each pair of dtypes, by the first request that needs it, which in a run is one that warms up.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor

from dllm_bench.core.errors import passes_check

Statistics = tuple[Tensor, Tensor, Tensor, Tensor | None]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SPAN = 8192  # logits of one part of a row, which one program reads
SEARCHED = 1024  # logits that a search compares with 16 bounds at a time
WARPS = 8  # of 32 threads with 32 logits each: 64 registers on an H200, nothing spilled


def available(logits: Tensor, to: torch.dtype | None = None) -> bool:
    """Return whether the kernels accept these logits: their device and dtype, and Triton's state.

    to: what logits are rounded to first, their own dtype if None.
    """
    return logits.is_cuda and logits.dtype in DTYPES and works(logits.dtype, to, str(logits.device))


@cache
def works(dtype: torch.dtype, to: torch.dtype | None = None, device: str = "cuda") -> bool:
    """Return whether the kernels run on logits of `dtype` rounded to `to`, and agree with torch.

    Tried once, on two rows.
    """
    compare = partial(compare_kernels, device, dtype, to or dtype)
    return passes_check(compare, "Triton", f"Logits in {dtype} are read in several passes")


def compare_kernels(device: str, dtype: torch.dtype, to: torch.dtype) -> None:
    """Raise an error unless every kernel gives what torch's passes give, on two rows."""
    probe_RV = torch.linspace(-9, 9, 2 * (SPAN + 5), device=device).view(2, -1).to(dtype)
    law_RV, digit = probe_RV.to(to).double(), max(4 * torch.finfo(to).eps, 1e-5)
    below_RV = law_RV - law_RV.amax(-1, keepdim=True)
    mass_RV, share_RV = below_RV.exp(), law_RV.softmax(-1).to(to)
    best_R, index_R, sum_R, entropy_R = row_statistics(probe_RV, True, to)
    assert entropy_R is not None  # because it was asked for
    published_R = neg_entropy(probe_RV, best_R, sum_R, to, 0.5)
    for found_R, law_R, rtol, atol in (
        (best_R, law_RV.amax(-1), 0, 0),
        (index_R, (below_RV == 0).cumsum(-1).eq(0).sum(-1), 0, 0),
        (sum_R, mass_RV.sum(-1), 1e-5, 0),
        (entropy_R, -torch.special.entr(law_RV.softmax(-1)).sum(-1), 1e-5, 1e-5),
        (published_R, (share_RV * (share_RV + 0.5).log()).double().sum(-1), digit, digit),
    ):
        torch.testing.assert_close(found_R.double(), law_R.double(), rtol=rtol, atol=atol)
    if dtype != torch.float64:
        kept_R = (keep_top_p(probe_RV, 0.5) > -torch.inf).sum(-1)
        above_RV = probe_RV.double().softmax(-1).sort(descending=True).values.cumsum(-1)
        torch.testing.assert_close(kept_R, (above_RV <= 0.5).sum(-1) + 1, rtol=0, atol=1)


def row_statistics(
    logits_RV: Tensor, entropy: bool, dtype: torch.dtype | None = None
) -> Statistics:
    """Return best_R, index_R (int64, the first of equal ones), sum_R; sum of p ln p if `entropy`.

    dtype: what logits are rounded to first, their own if None; sums are float64 if it is, else
    float32. A token at -inf adds nothing to the sums. The sums of a row with a nan are nan, those
    of a row of -inf only are 0. A row's numbers are the same bits whatever the other rows are.
    """
    from dllm_bench.decoding import kernels

    to = getattr(kernels.tl, str(dtype or logits_RV.dtype)[6:])
    rows, parts, logits = _rows(logits_RV)
    wide = torch.promote_types(dtype or logits_RV.dtype, torch.float32)
    part_4RX = logits_RV.new_empty((4, rows, parts), dtype=wide)
    row_4R, index_R = part_4RX.new_empty((4, rows)), logits_RV.new_empty(rows, dtype=torch.long)
    with torch.cuda.device_of(logits_RV):  # Triton starts on the current device
        arguments = (logits, part_4RX, parts, SPAN, to, entropy)
        kernels.of_parts[(rows * parts,)](*arguments, num_warps=WARPS)
        kernels.of_rows[(rows,)](part_4RX, (row_4R, index_R), parts, entropy, num_warps=1)
    best_R, _, sum_R, entropy_R = row_4R
    return best_R, index_R, sum_R, entropy_R if entropy else None


def neg_entropy(
    logits_RV: Tensor, best_R: Tensor, sum_R: Tensor, dtype: torch.dtype, eps: float
) -> Tensor:
    """Return the sum (R,) of p ln(p + eps) over each row, in nats, every step rounded to `dtype`.

    best_R, sum_R: what `row_statistics` found for the dtype.
    """
    from dllm_bench.decoding import kernels

    rows, parts, logits = _rows(logits_RV)
    part_RX, to = best_R.new_empty((rows, parts)), getattr(kernels.tl, str(dtype)[6:])
    with torch.cuda.device_of(logits_RV):
        arguments = (logits, best_R, sum_R, part_RX, parts, SPAN, to, eps)
        kernels.entropy_of_parts[(rows * parts,)](*arguments, num_warps=WARPS)
    return part_RX.sum(-1).to(dtype)


def keep_top_p(logits_RV: Tensor, top_p: float) -> Tensor:
    """Apply `numerics.keep_top_p` to rows of float32 or shorter: search for the least token kept.

    It is the largest whose equals and betters sum to more than `top_p`. Each launch finds four bits
    of its key from the sums over the parts that the one before wrote; of equals the lowest ids
    stay.
    """
    from dllm_bench.decoding import kernels

    best_R, _, sum_R, _ = row_statistics(logits_RV, entropy=False)
    rows, parts, logits = _rows(logits_RV)
    bits = 16 if logits_RV.dtype == torch.bfloat16 else 32  # of the integers in their order
    digits, programs = bits // 4, (rows * parts,)
    mass_DXJ = best_R.new_empty((digits, *programs, 16))
    least_DR = best_R.new_empty((digits + 1, rows), dtype=torch.int32)
    equal_3X = best_R.new_empty((3, *programs))
    kept_RV = torch.empty(logits_RV.shape, dtype=logits_RV.dtype, device=logits_RV.device)
    search, sizes = (best_R, sum_R, top_p, least_DR, mass_DXJ), (parts, SPAN, bits)
    with torch.cuda.device_of(logits_RV):
        for digit in range(digits):
            found = (search, digit, *sizes, SEARCHED)
            kernels.mass_of_parts[programs](logits, *found, num_warps=WARPS)
        kernels.equals_of_parts[programs](logits, search, equal_3X, digits, *sizes, num_warps=WARPS)
        cut = (search, equal_3X, kept_RV, digits, *sizes)
        kernels.cut_parts[programs](logits, *cut, num_warps=WARPS)
    return kept_RV


def _rows(logits_RV: Tensor) -> tuple[int, int, tuple[Tensor, int, int]]:
    """Return the number of rows, the number of parts of a row, and the kernels' argument `rows`."""
    rows, length = logits_RV.shape
    if logits_RV.stride(-1) != 1:
        logits_RV = logits_RV.contiguous()
    return rows, -(-length // SPAN), (logits_RV, logits_RV.stride(0), length)
