"""The Triton kernels of `fused`: statistics of parts of rows, then of rows from their parts.

A part is what one program holds in registers, so no loop rescales anything. With one program per
row, 32 rows of 152,064 tokens would leave 100 of an H200's 132 multiprocessors idle and keep the
others busy for 14 us (20 instructions a token). With 19 parts a row, all share 4 us of work and
2 us of reading 9.7 MB, and the second kernel reads 76 numbers a row. This module imports Triton:
only `fused` imports it, and only when it is called.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(
    best_P: tl.tensor, index_P: tl.tensor, sum_P: tl.tensor, weighted_P: tl.tensor
) -> tl.tuple:
    """Statistics of P parts combined. A token is a part as well: its logit, its id, 1 and 0."""
    best = tl.max(best_P, 0)
    index = tl.min(tl.where(best_P < best, 2**31 - 1, index_P), 0)
    below_P = best_P - tl.where(best == float("-inf"), 0.0, best)
    mass_P = tl.exp(below_P)
    weighted_P = tl.where(mass_P > 0, mass_P * (weighted_P + below_P * sum_P), 0.0)
    return best, index, tl.sum(mass_P * sum_P, 0), tl.sum(weighted_P, 0)


@triton.jit
def store(to: tl.tensor, apart: tl.tensor, values: tl.tuple, ENTROPY: tl.constexpr) -> None:
    """Write statistics as float32 (exact for ids below 2^24), `apart` elements from each other."""
    tl.store(to, values[0])
    tl.store(to + apart, values[1].to(tl.float32))
    tl.store(to + 2 * apart, values[2])
    if ENTROPY:
        tl.store(to + 3 * apart, values[3])


@triton.jit
def of_parts(
    logits_RV: tl.tensor,
    stride: tl.tensor,
    length: tl.tensor,
    part_4RX: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """Statistics of parts: one program per part of a row."""
    program = tl.program_id(0)
    row = logits_RV + (program // PARTS).to(tl.int64) * stride
    at_S = program % PARTS * SPAN + tl.arange(0, SPAN)
    logit_S = tl.load(row + at_S, mask=at_S < length, other=float("-inf")).to(tl.float32)
    values = joined(logit_S, at_S, 1.0, 0.0)
    store(part_4RX + program, tl.num_programs(0), values, ENTROPY)


@triton.jit
def of_rows(
    part_4RX: tl.tensor,
    row_4R: tl.tensor,
    PARTS: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """Statistics of rows: one program per row; P is PARTS rounded up to a power of two."""
    row, apart = tl.program_id(0), tl.num_programs(0) * PARTS
    lane_P = tl.arange(0, triton.next_power_of_2(PARTS))
    at_P, there_P = part_4RX + row * PARTS + lane_P, lane_P < PARTS
    best_P = tl.load(at_P, mask=there_P, other=float("-inf"))
    index_P = tl.load(at_P + apart, mask=there_P, other=float("inf"))
    sum_P = tl.load(at_P + 2 * apart, mask=there_P, other=0.0)
    weighted_P = tl.load(at_P + 3 * apart, mask=there_P & ENTROPY, other=0.0)
    values = joined(best_P, index_P, sum_P, weighted_P)
    store(row_4R + row, tl.num_programs(0), values, ENTROPY)
