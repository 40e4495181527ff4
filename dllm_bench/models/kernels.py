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


@triton.jit
def over_keys(
    query_ME: tl.tensor, places: tl.tuple, span: tl.tuple, scale: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Return three things of M queries over a span of keys: sums of values weighted by exp(score -
    largest score), (M, E); sums of those weights, (M,); and the largest scores, (M,).

    Keys and values that the mask hides from every query are not read.

    places: pointers to keys and values, to the mask of each query (M,), and the stride of keys.
    span: first key and end. SHAPE: as in `attend_parts`.
    """
    WIDTH: tl.constexpr = SHAPE[3]
    KEYS: tl.constexpr = SHAPE[6]
    keys, values, mask_M, apart = places
    lane_E = tl.arange(0, query_ME.shape[1])
    best_M = tl.full((query_ME.shape[0],), -float("inf"), tl.float32)
    sum_M, attended_ME = tl.zeros_like(best_M), tl.zeros(query_ME.shape, tl.float32)
    for place in range(span[0], span[1], KEYS):
        at_N = place + tl.arange(0, KEYS)
        there_N, hidden_at = at_N < span[1], mask_M[:, None] + at_N[None, :]
        hidden_MN = tl.load(hidden_at, mask=there_N[None, :], other=-float("inf")).to(tl.float32)
        if tl.max(hidden_MN) >= 0:
            at_NE = at_N[:, None].to(tl.int64) * apart + lane_E[None, :]
            there_NE = there_N[:, None] & (lane_E < WIDTH)[None, :]
            key_NE = tl.load(keys + at_NE, mask=there_NE, other=0.0)
            value_NE = tl.load(values + at_NE, mask=there_NE, other=0.0)
            score_MN = tl.dot(query_ME, key_NE.T, input_precision="ieee") * scale + hidden_MN
            better_M = tl.maximum(best_M, tl.max(score_MN, 1))
            kept_M, weight_MN = tl.exp(best_M - better_M), tl.exp(score_MN - better_M[:, None])
            new_ME = tl.dot(weight_MN.to(value_NE.dtype), value_NE, input_precision="ieee")
            attended_ME = attended_ME * kept_M[:, None] + new_ME
            sum_M, best_M = sum_M * kept_M + tl.sum(weight_MN, 1), better_M
    return attended_ME, sum_M, best_M


@triton.jit
def attend_parts(
    query: tl.tensor,
    own: tl.tuple,
    cached: tl.tuple,
    found: tl.tuple,
    strides: tl.tuple,
    sizes: tl.tuple,
    scale: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Attend to one part of the keys: one program per part, group of heads and block of rows.

    All query heads that share a head of K/V are in one program, which reads it once. The last part
    is the rows' own window, the others are pieces of the store.

    own: keys and values (B, G, F, E) of B windows and the mask (B, F, F). cached: keys and values
    (G, C, E) and the mask (C,). found: attention (X, B * F, A, E) by X parts, and the logs of the
    sums of its exponentials (X, B * F, A), float32. strides: of windows, heads and rows of queries
    (B, A, F, E) and of `own`; of groups and rows of `cached`. sizes: F, C, and positions of a
    piece. SHAPE: X, G, query heads of a group, E, lanes for E, rows of a block, keys at a time.
    """
    PARTS: tl.constexpr = SHAPE[0]
    GROUPS: tl.constexpr = SHAPE[1]
    HEADS: tl.constexpr = SHAPE[2]
    WIDTH: tl.constexpr = SHAPE[3]
    ROWS: tl.constexpr = SHAPE[5]
    LANES: tl.constexpr = triton.next_power_of_2(HEADS)
    program, window = tl.program_id(0), sizes[0]
    part, group = program % PARTS, program // PARTS % GROUPS
    row = program // (PARTS * GROUPS) * ROWS
    lane_M, lane_E = tl.arange(0, ROWS * LANES), tl.arange(0, SHAPE[4])
    branch, row_M = (row // window).to(tl.int64), row % window + lane_M // LANES
    head_M, there_M = group * HEADS + lane_M % LANES, lane_M % LANES < HEADS
    at_M = branch * strides[0] + head_M * strides[1] + row_M * strides[2]
    there_ME = there_M[:, None] & (lane_E < WIDTH)[None, :]
    query_ME = tl.load(query + at_M[:, None] + lane_E[None, :], mask=there_ME, other=0.0)
    is_own, start = part == PARTS - 1, part * sizes[2]
    last = tl.where(is_own, window, tl.minimum(start + sizes[2], sizes[1]))
    span, apart = (tl.where(is_own, 0, start), last), tl.where(is_own, strides[5], strides[7])
    if is_own:
        at = branch * strides[3] + group * strides[4]
        keys, values, mask_M = own[0] + at, own[1] + at, own[2] + (branch * window + row_M) * window
    else:
        at = group.to(tl.int64) * strides[6]
        keys, values, mask_M = cached[0] + at, cached[1] + at, cached[2] + 0 * row_M
    places = (keys, values, mask_M, apart)
    values_ME, sum_M, best_M = over_keys(query_ME, places, span, scale, SHAPE)
    sum_M = tl.where(sum_M > 0, sum_M, 1.0)
    rows = tl.num_programs(0) // (PARTS * GROUPS) * ROWS
    to_M = ((part * rows + row + lane_M // LANES) * GROUPS + group) * HEADS + lane_M % LANES
    tl.store(found[1] + to_M, best_M + tl.log(sum_M), mask=there_M)
    to_ME = to_M[:, None].to(tl.int64) * WIDTH + lane_E[None, :]
    tl.store(found[0] + to_ME, values_ME / sum_M[:, None], mask=there_ME)


@triton.jit
def join_parts(out: tl.tensor, found: tl.tuple, SHAPE: tl.constexpr) -> None:
    """Join the attention of `attend_parts`: one program per head of a row. SHAPE: X, E."""
    PARTS: tl.constexpr = SHAPE[0]
    WIDTH: tl.constexpr = SHAPE[1]
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane_X = tl.arange(0, triton.next_power_of_2(PARTS))
    lane_E = tl.arange(0, triton.next_power_of_2(WIDTH))
    there_X, there_E = lane_X < PARTS, lane_E < WIDTH
    at_X = lane_X * programs + program
    mass_X = tl.load(found[1] + at_X, mask=there_X, other=-float("inf"))
    share_X = tl.exp(mass_X - tl.max(mass_X, 0))
    at_XE = at_X[:, None].to(tl.int64) * WIDTH + lane_E[None, :]
    there_XE = there_X[:, None] & there_E[None, :]
    part_XE = tl.load(found[0] + at_XE, mask=there_XE, other=0.0).to(tl.float32)
    joined_E = tl.sum(part_XE * share_X[:, None], 0) / tl.sum(share_X, 0)
    to_E = out + program.to(tl.int64) * WIDTH + lane_E
    tl.store(to_E, joined_E.to(out.dtype.element_ty), mask=there_E)
