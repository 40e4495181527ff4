"""The Triton kernels of `layer_ops`.

This module imports Triton: only `layer_ops` imports it, and only when it starts a kernel.

Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, unless it is named in
`do_not_specialize`, which holds for integers alone and not for those in a tuple. So a number of
rows, which depends on the prompt, is a separate argument and named there. Widths and strides are
not named: they are constant in a run, and as multiples of 16 they allow wide reads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(
    gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, PARTS: tl.constexpr, SPAN: tl.constexpr
) -> None:
    """Compute SiLU(gate) * up: one program per part of a row."""
    program = tl.program_id(0)
    row = (program // PARTS).to(tl.int64)
    at_S = program % PARTS * SPAN + tl.arange(0, SPAN)
    there_S = at_S < width
    gate_S = tl.load(gate_up + 2 * row * width + at_S, mask=there_S).to(tl.float32)
    up_S = tl.load(gate_up + (2 * row + 1) * width + at_S, mask=there_S).to(tl.float32)
    value_S = gate_S / (1 + tl.exp(-gate_S)) * up_S
    tl.store(out + row * width + at_S, value_S.to(out.dtype.element_ty), mask=there_S)


@triton.jit(do_not_specialize=["rows"])
def rotate(
    head: tl.tensor,
    slots: tl.tuple,
    rotation: tl.tuple,
    weight: tl.tensor,
    rows: tl.tensor,
    strides: tl.tuple,
    eps: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Normalise and rotate a head of queries or keys, or copy one of values.

    One program per head of a row. Keys and values go to their slots.

    weight: of the norm, or None. rows: positions of a sequence. strides: elements between
    sequences, heads and rows of the slots. SHAPE: heads of all kinds, heads of keys, head size.
    """
    HEADS: tl.constexpr = SHAPE[0]
    GROUPS: tl.constexpr = SHAPE[1]
    WIDTH: tl.constexpr = SHAPE[2]
    program = tl.program_id(0)
    row, index = program // HEADS, program % HEADS
    position = row % rows
    lane_H = tl.arange(0, triton.next_power_of_2(WIDTH // 2))
    there_H = lane_H < WIDTH // 2
    to = head + program.to(tl.int64) * WIDTH
    low_H = tl.load(to + lane_H, mask=there_H).to(tl.float32)
    high_H = tl.load(to + WIDTH // 2 + lane_H, mask=there_H).to(tl.float32)
    group = index - (HEADS - 2 * GROUPS)
    place = (row // rows).to(tl.int64) * strides[0] + position.to(tl.int64) * strides[2]
    if group >= GROUPS:
        to = slots[1] + place + (group - GROUPS).to(tl.int64) * strides[1]
    else:
        if group >= 0:
            to = slots[0] + place + group.to(tl.int64) * strides[1]
        if weight is not None:
            low_H, high_H = normed(low_H, high_H, weight + index * WIDTH, eps, there_H, WIDTH)
        cos_H = tl.load(rotation[0] + position * WIDTH + lane_H, mask=there_H).to(tl.float32)
        sin_H = tl.load(rotation[1] + position * WIDTH + lane_H, mask=there_H).to(tl.float32)
        low_H, high_H = low_H * cos_H - high_H * sin_H, high_H * cos_H + low_H * sin_H
    tl.store(to + lane_H, low_H.to(to.dtype.element_ty), mask=there_H)
    tl.store(to + WIDTH // 2 + lane_H, high_H.to(to.dtype.element_ty), mask=there_H)


@triton.jit
def normed(
    low_H: tl.tensor,
    high_H: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    there_H: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tuple:
    """Return RMSNorm of a head, given in halves that are 0 where nothing is there."""
    lane_H = tl.arange(0, triton.next_power_of_2(WIDTH // 2))
    squares_H = tl.where(there_H, low_H * low_H + high_H * high_H, 0.0)
    scale = 1 / tl.sqrt(tl.sum(squares_H, 0) / WIDTH + eps)
    low_weight_H = tl.load(weight + lane_H, mask=there_H).to(tl.float32)
    high_weight_H = tl.load(weight + WIDTH // 2 + lane_H, mask=there_H).to(tl.float32)
    return low_H * scale * low_weight_H, high_H * scale * high_weight_H


@triton.jit(do_not_specialize=["rows", "windowed"])
def join(
    old: tl.tensor,
    old_mass: tl.tensor,
    own: tl.tensor,
    own_mass: tl.tensor,
    out: tl.tensor,
    rows: tl.tensor,
    windowed: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Join two attentions: one program per head of a row. SHAPE: heads, head size."""
    HEADS: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = SHAPE[1]
    program = tl.program_id(0)
    row, head = program // HEADS, program % HEADS
    window, within = row // windowed, row % windowed
    below = tl.load(own_mass + (window * HEADS + head) * windowed + within)
    below -= tl.load(old_mass + head * rows + row)
    share = 1 / (1 + tl.exp(below))
    lane_E = tl.arange(0, triton.next_power_of_2(WIDTH))
    there_E, at_E = lane_E < WIDTH, program.to(tl.int64) * WIDTH + lane_E
    old_E = tl.load(old + at_E, mask=there_E).to(tl.float32)
    own_E = tl.load(own + at_E, mask=there_E).to(tl.float32)
    joined_E = own_E + share * (old_E - own_E)
    tl.store(out + at_E, joined_E.to(out.dtype.element_ty), mask=there_E)
