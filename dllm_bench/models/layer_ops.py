"""Rotary embedding, SwiGLU and the join of two attentions, in few launches: torch, or Triton.

torch's passes run anywhere. On a CUDA device each is one kernel of `kernels`, where Triton works;
norms need none, because torch's own is one launch there.

Shapes: P sequences, F rows (positions) of each, A heads of queries, G heads of keys and values, E
head size, X = A + 2 G.
"""

from __future__ import annotations

from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from dllm_bench.core.errors import passes_check

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of each position's angles, (1, F, E) each; both halves of E are equal."""
Heads = tuple[int, int, int]
"""Number of heads of queries, and of keys and values, and their size."""
FEW: Heads = (6, 2, 8)  # with which `compare_kernels` compares
BLOCK = 1024  # numbers that a program of `swiglu` writes
LANES, ROWS, KEYS = 64, 32, 64  # of `attend_parts`: heads times rows, rows, keys at a time
PROGRAMS = 264  # of `attend_parts`: two for each multiprocessor of an H200
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # the kernels compute in float32


def has_kernels(values: Tensor, heads: Heads = FEW) -> bool:
    """Return whether Triton's kernels can take these values: by their device and dtype, and by
    Triton."""
    fits = values.is_cuda and values.dtype in DTYPES
    return fits and kernels_work(values.dtype, heads, str(values.device))


@cache
def kernels_work(dtype: torch.dtype, heads: Heads, device: str) -> bool:
    """Return whether the kernels run on values of `dtype`, `windows_kernel` with these heads, and
    agree with torch; tried once."""
    compare = partial(compare_kernels, device, dtype, heads)
    return passes_check(compare, "Triton", f"Layers in {dtype} start more launches")


def compare_kernels(device: str, dtype: torch.dtype, heads: Heads = FEW) -> None:
    """Raise an error unless every kernel gives what torch's passes give in float32, on a few rows
    of `dtype`, but for rounding.
    """
    numbers = torch.linspace(-2, 2, 3 * 8 * 16, device=device).to(dtype)
    gate_up_NI = numbers.view(3, 128)
    _compare(swiglu_kernel(gate_up_NI), _swiglu(*gate_up_NI.float().chunk(2, -1)))
    # `join`: three windows of 2 rows, 4 heads of 16
    old_1NAE, own_BFAE = numbers.view(1, 6, 4, 16), numbers.flip(0).view(3, 2, 4, 16)
    old_1AN, own_BAF = numbers[:24].view(1, 4, 6).float(), numbers[-24:].view(3, 4, 2).float()
    expected = _join(old_1NAE.float(), old_1AN, own_BFAE.float(), own_BAF)
    _compare(join_kernel(old_1NAE, old_1AN, own_BFAE, own_BAF), expected)
    _compare_windows(numbers, heads)
    heads_1NAE, angles_1NE = numbers.view(1, 3, 8, 16), numbers[:24].view(1, 3, 8).repeat(1, 1, 2)
    rotation = (angles_1NE.cos(), angles_1NE.sin())
    for weight in (None, numbers[:96].view(6, 16)):
        query_key = heads_1NAE[:, :, :6].float()
        normed = query_key if weight is None else normed_heads(query_key, weight.float(), 1e-6)
        expected = rotated(normed, (rotation[0].float(), rotation[1].float()))
        keys, values = (numbers.new_empty(1, 2, 3, 16) for _ in range(2))
        query = rotate_kernel(heads_1NAE.clone(), rotation, (keys, values), weight, 1e-6)
        _compare(query, expected[:, :, :4])
        _compare(keys, expected[:, :, 4:].transpose(1, 2))
        _compare(values, heads_1NAE[:, :, 6:].transpose(1, 2).float())


def _compare(found: Tensor, expected: Tensor, atol: float = 0) -> None:
    """Raise an error where a kernel's result is not `expected`, rounded to its dtype."""
    digit = max(torch.finfo(found.dtype).eps, 1e-6)
    torch.testing.assert_close(found.float(), expected, rtol=2 * digit, atol=max(atol, 1e-5))


def _compare_windows(numbers: Tensor, heads: Heads) -> None:
    """Run `compare_kernels` on `windows_kernel`: two windows of 32 rows, 6 heads over 2 of 8.

    Heads of another size are tried for the memory that they take.
    """
    zeros_1AFE = numbers.new_zeros(1, heads[0], ROWS, heads[2])
    own_1GFE, mask_FF = zeros_1AFE[:, : heads[1]], numbers.new_zeros(ROWS, ROWS)
    windows_kernel(zeros_1AFE, (own_1GFE, own_1GFE, mask_FF), (own_1GFE, own_1GFE, mask_FF[0]))
    query_BAFE = numbers.repeat(8).view(2, 6, 32, 8).cos()
    own_2BGFE = numbers.repeat(6)[: 2 * 2 * 2 * 32 * 8].view(2, 2, 2, 32, 8).sin()
    store_21GCE = numbers.repeat(14)[: 2 * 2 * 160 * 8].view(2, 1, 2, 160, 8).cos()
    own_B1FF, store_C = numbers.new_zeros(2, 1, 32, 32), numbers.new_zeros(160)
    own_B1FF[:, :, :, 20:] = store_C[40:70] = -30_000.0
    own_2BAFE = own_2BGFE.float().repeat_interleave(3, 2)
    stored_2BACE = store_21GCE.float().repeat_interleave(3, 2).expand(-1, 2, -1, -1, -1)
    both_2BAXE = torch.cat([stored_2BACE, own_2BAFE], 3)
    both_B1FX = torch.cat([store_C.expand(2, 1, 32, -1), own_B1FF], 3)
    for cached, (keys, values), mask in (
        ((*store_21GCE, store_C), both_2BAXE, both_B1FX),
        (None, own_2BAFE, own_B1FF),
    ):
        scores_BAFX = query_BAFE.float() @ keys.mT * 8**-0.5 + mask
        expected = (scores_BAFX.softmax(-1) @ values).transpose(1, 2)
        found = windows_kernel(query_BAFE, (*own_2BGFE, own_B1FF), cached)
        _compare(found, expected, 2 * torch.finfo(found.dtype).eps)


def start(name: str, programs: int, *arguments: Any, warps: int = 4) -> None:
    """Start a kernel of `kernels` with that many programs, on the device of its first argument."""
    from dllm_bench.models import kernels

    with torch.cuda.device_of(arguments[0]):  # Triton starts on the current device
        getattr(kernels, name)[(programs,)](*arguments, num_warps=warps)


def swiglu(gate_up: tuple[Tensor, ...]) -> Tensor:
    """Return SiLU(gate) * up of (..., I) each, or of one tensor [gate | up], (..., 2 I)."""
    if len(gate_up) == 2:
        return _swiglu(*gate_up)
    (both,) = gate_up
    return swiglu_kernel(both) if has_kernels(both) else _swiglu(*both.chunk(2, -1))


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate).mul_(up)


def swiglu_kernel(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` of [gate | up], (..., 2 I) and contiguous, by Triton."""
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    parts = -(-width // BLOCK)
    start("swiglu", out.numel() // width * parts, gate_up, out, width, parts, BLOCK)
    return out


def normed_heads(heads: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of each head, (..., A, E); the weight is (E,) or (A, E)."""
    return rms_norm(heads, heads.shape[-1:], eps=eps).mul_(weight)


def rotated(heads_PNAE: Tensor, rotation: Rotation) -> Tensor:
    """Return the heads turned by their positions' angles: of each pair, one is in either half of
    E."""
    cos_1N1E, signed_1N1E = _signed(*rotation)
    swapped_PNAE = heads_PNAE.roll(heads_PNAE.shape[-1] // 2, -1)
    return (heads_PNAE * cos_1N1E).addcmul_(swapped_PNAE, signed_1N1E)


@lru_cache(maxsize=4)
def _signed(cos_1NE: Tensor, sin_1NE: Tensor) -> Rotation:
    """Return cosine and sine for all heads, (1, N, 1, E), the sine negative in the first half of E.

    Cached once for all layers: tensors are equal as keys if they are the same.
    """
    first, second = sin_1NE.chunk(2, -1)
    return cos_1NE.unsqueeze(2), torch.cat([-first, second], -1).unsqueeze(2)


def rotate_kernel(
    heads_PFXE: Tensor,
    rotation: Rotation,
    slots: tuple[Tensor, Tensor],
    weight_QE: Tensor | None,
    eps: float,
) -> Tensor:
    """Return turned queries (P, F, A, E), by Triton, in place of those in `heads`: [queries | keys
    | values] of A + 2 G heads, contiguous. Turned keys and values are written to the slots, whose
    strides are equal.

    weight: of the RMSNorm of query and key heads, (A + G, E); None: without one.
    """
    sequences, rows, heads, width = heads_PFXE.shape
    groups = slots[0].shape[1]
    shape = (heads, groups, width)
    arguments = (heads_PFXE, slots, rotation, weight_QE, rows, slots[0].stride()[:3], eps, shape)
    start("rotate", sequences * rows * heads, *arguments, warps=1)
    return heads_PFXE[:, :, : heads - 2 * groups]


def join(old_1NAE: Tensor, old_1AN: Tensor, own_BFAE: Tensor, own_BAF: Tensor) -> Tensor:
    """Return attention (1, N, A, E) over two sets of keys, of N = B * F rows, from that over either
    and the logs of the sums of their exponentials."""
    if has_kernels(old_1NAE):
        return join_kernel(old_1NAE, old_1AN, own_BFAE, own_BAF)
    return _join(old_1NAE, old_1AN, own_BFAE, own_BAF)


def _join(old_1NAE: Tensor, old_1AN: Tensor, own_BFAE: Tensor, own_BAF: Tensor) -> Tensor:
    windows = own_BFAE.shape[:2]
    difference_ABF = old_1AN[0].unflatten(1, windows) - own_BAF.transpose(0, 1)
    share_BFA1 = difference_ABF.sigmoid().permute(1, 2, 0)[..., None].to(own_BFAE.dtype)
    return own_BFAE.lerp(old_1NAE[0].unflatten(0, windows), share_BFA1).flatten(0, 1)[None]


def join_kernel(old_1NAE: Tensor, old_1AN: Tensor, own_BFAE: Tensor, own_BAF: Tensor) -> Tensor:
    """Compute `join` by Triton."""
    old_1NAE, own_BFAE = old_1NAE.contiguous(), own_BFAE.contiguous()
    (_, rows, heads, width), window = old_1NAE.shape, own_BFAE.shape[1]
    out_1NAE = torch.empty_like(old_1NAE)
    arguments = (old_1NAE, old_1AN.contiguous(), own_BFAE, own_BAF.contiguous(), out_1NAE)
    start("join", rows * heads, *arguments, rows, window, (heads, width), warps=1)
    return out_1NAE


def windows_kernel(
    query_BAFE: Tensor,
    own: tuple[Tensor, Tensor, Tensor],
    cached: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Return attention (B, F, A, E) of B windows, each over itself and all over one store, by
    Triton.

    own: keys and values, (B, G, F, E) of equal strides, and a mask (B, 1, F, F). cached: keys and
    values, (1, G, C, E) of equal strides, and a mask (C,). Masks are added, and finite. F is a
    multiple of `ROWS`.
    """
    (windows, heads, window, width), groups = query_BAFE.shape, own[0].shape[1]
    lanes = 1 << (heads // groups - 1).bit_length()
    rows = max(1, min(ROWS, LANES // lanes))
    blocks = windows * window // rows * groups
    length = 0 if cached is None else len(cached[2])
    wanted = max(1, min(-(-length // KEYS), PROGRAMS // blocks))
    piece = -(-length // (wanted * KEYS)) * KEYS
    parts = 1 + (-(-length // piece) if length else 0)
    found_XNAE = query_BAFE.new_empty((parts, windows * window, heads, width), dtype=torch.float32)
    found = (found_XNAE, found_XNAE.new_empty(found_XNAE.shape[:3]))
    store = own if cached is None else cached
    strides = (*query_BAFE.stride()[:3], *own[0].stride()[:3], *store[0].stride()[1:3])
    lanes_E = max(16, 1 << (width - 1).bit_length())  # a product's least
    shape = (parts, groups, heads // groups, width, lanes_E, rows, KEYS)
    sizes, scale = (window, length, piece), width**-0.5
    arguments = (query_BAFE, own, store, found, strides, sizes, scale, shape)
    start("attend_parts", blocks * parts, *arguments)
    out_BFAE = query_BAFE.new_empty((windows, window, heads, width))
    start("join_parts", windows * window * heads, out_BFAE, found, (parts, width), warps=1)
    return out_BFAE
