"""The Triton kernels of `fused`: statistics of parts of rows, then of rows from their parts; the
published entropy of parts; and the cut at top-p, a digit of its bound a launch.

A part is what one program holds in registers, so no loop rescales anything. With one program per
row, 32 rows of 152,064 tokens would leave 100 of an H200's 132 multiprocessors idle and keep the
others busy for 14 us (20 instructions a token). With 19 parts a row, all share 4 us of work and
2 us of reading 9.7 MB, and the second kernel reads 76 numbers a row. This module imports Triton:
only `fused` imports it, and only when it is called. Triton compiles a kernel anew for an integer
that is 1 or a multiple of 16. Here integers are the vocabulary and the stride of rows, the same in
all of a run; that they are multiples of 16 makes wide reads.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(
    best_P: tl.tensor, index_P: tl.tensor, sum_P: tl.tensor, weighted_P: tl.tensor
) -> tl.tuple:
    """Return statistics of P parts combined. A token is a part as well: its logit, its id, 1 and
    0."""
    best = tl.max(best_P, 0)
    index = tl.min(tl.where(best_P < best, 2**31 - 1, index_P), 0)
    below_P = best_P - tl.where(best == float("-inf"), 0.0, best)
    mass_P = tl.exp(below_P)
    weighted_P = tl.where(mass_P > 0, mass_P * (weighted_P + below_P * sum_P), 0.0)
    return best, index, tl.sum(mass_P * sum_P, 0), tl.sum(weighted_P, 0)


@triton.jit
def store(to: tl.tensor, apart: tl.tensor, values: tl.tuple, ENTROPY: tl.constexpr) -> None:
    """Write statistics as floats (exact for ids below 2^24), `apart` elements from each other."""
    tl.store(to, values[0])
    tl.store(to + apart, values[1].to(to.dtype.element_ty))
    tl.store(to + 2 * apart, values[2])
    if ENTROPY:
        tl.store(to + 3 * apart, values[3])


@triton.jit
def rounded(value_S: tl.tensor, TO: tl.constexpr) -> tl.tensor:
    """Return numbers in their own type, rounded to TO."""
    if tl.bfloat16 == TO:  # by hand, since Triton's interpreter cuts off
        bits_S = value_S.to(tl.int32, bitcast=True)
        bits_S = (bits_S + 0x7FFF + ((bits_S >> 16) & 1)) & -0x10000
        return bits_S.to(tl.float32, bitcast=True)
    return value_S.to(TO).to(value_S.dtype)


@triton.jit
def part_of(rows: tl.tuple, row: tl.tensor, at_S: tl.tensor, TO: tl.constexpr) -> tl.tensor:
    """Return logits of a row at some tokens rounded to TO, float32 or longer; -inf after its end.

    rows: logits (R, V), numbers between the beginnings of two rows, and V.
    """
    logits_V = rows[0] + row.to(tl.int64) * rows[1]
    logit_S = tl.load(logits_V + at_S, mask=at_S < rows[2], other=float("-inf"))
    return rounded(logit_S.to(tl.float64 if TO.primitive_bitwidth > 32 else tl.float32), TO)


@triton.jit
def of_parts(
    rows: tl.tuple,
    part_4RX: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    TO: tl.constexpr,
    ENTROPY: tl.constexpr,
) -> None:
    """Compute statistics of parts, of logits rounded to TO: one program per part of a row."""
    program = tl.program_id(0)
    at_S = program % PARTS * SPAN + tl.arange(0, SPAN)
    logit_S = part_of(rows, program // PARTS, at_S, TO)
    values = joined(logit_S, at_S, 1.0, 0.0)
    store(part_4RX + program, tl.num_programs(0), values, ENTROPY)


@triton.jit
def of_rows(
    part_4RX: tl.tensor, of_row: tl.tuple, PARTS: tl.constexpr, ENTROPY: tl.constexpr
) -> None:
    """Compute statistics of rows from those of their parts: one program per row.

    The sum of p ln p replaces the weighted sums; the index is also stored as an integer. P is PARTS
    rounded up to a power of two.

    of_row: statistics (4, R) and index (R,), int64.
    """
    row, apart = tl.program_id(0), tl.num_programs(0) * PARTS
    lane_P = tl.arange(0, triton.next_power_of_2(PARTS))
    at_P, there_P = part_4RX + row * PARTS + lane_P, lane_P < PARTS
    best_P = tl.load(at_P, mask=there_P, other=float("-inf"))
    index_P = tl.load(at_P + apart, mask=there_P, other=float("inf"))
    sum_P = tl.load(at_P + 2 * apart, mask=there_P, other=0.0)
    weighted_P = tl.load(at_P + 3 * apart, mask=there_P & ENTROPY, other=0.0)
    best, index, mass, weighted = joined(best_P, index_P, sum_P, weighted_P)
    values = (best, index, mass, weighted / mass - tl.log(mass))
    store(of_row[0] + row, tl.num_programs(0), values, ENTROPY)
    tl.store(of_row[1] + row, index.to(tl.int64))


@triton.jit
def entropy_of_parts(
    rows: tl.tuple,
    best_R: tl.tensor,
    sum_R: tl.tensor,
    part_RX: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    TO: tl.constexpr,
    EPS: tl.constexpr,
) -> None:
    """Sum p ln(p + EPS) over parts, rounding every step to TO as torch does."""
    program = tl.program_id(0)
    row, at_S = program // PARTS, program % PARTS * SPAN + tl.arange(0, SPAN)
    mass_S = tl.exp(part_of(rows, row, at_S, TO) - tl.load(best_R + row))
    probability_S = rounded(mass_S / tl.load(sum_R + row), TO)
    raised_S = rounded(probability_S + EPS, TO)
    log_S = rounded(tl.log(tl.where(raised_S > 0, raised_S, 1.0)), TO)
    term_S = tl.where(at_S < rows[2], rounded(probability_S * log_S, TO), 0.0)
    tl.store(part_RX + program, tl.sum(term_S, 0))


@triton.jit
def key_of(value_S: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Return integers of BITS bits in the order of float32 numbers that need no more; -0 is 0."""
    key_S = tl.where(value_S == 0, 0.0, value_S).to(tl.int32, bitcast=True)
    return tl.where(key_S < 0, key_S ^ 0x7FFFFFFF, key_S) >> (32 - BITS)


@triton.jit
def least_of(
    search: tl.tuple, digit: tl.tensor, PARTS: tl.constexpr, BITS: tl.constexpr
) -> tl.tensor:
    """Return and write the first digits, those before `digit`, of the key that is searched: the
    largest one for which the probabilities at or above it, in this program's row, sum to more than
    top_p. Every part of a row writes the same.

    search: best_R, sum_R, top_p; least_DR and mass_DXJ, which digit after digit fills.
    """
    _, sum_R, top_p, least_DR, mass_DXJ = search
    rows, row = tl.num_programs(0) // PARTS, tl.program_id(0) // PARTS
    part_P1 = tl.arange(0, triton.next_power_of_2(PARTS))[:, None]
    last, parts = (digit - 1) * rows + row, tl.where(digit > 0, PARTS, 0)  # 0: nothing to read yet
    at_PJ = (last * PARTS + part_P1) * 16 + tl.arange(0, 16)[None, :]
    mass_PJ = tl.load(mass_DXJ + at_PJ, mask=part_P1 < parts, other=0.0)
    least = tl.load(least_DR + last, mask=digit > 0, other=-(2 ** (BITS - 1)))
    reached = tl.sum((tl.sum(mass_PJ, 0) > top_p * tl.load(sum_R + row)).to(tl.int32), 0)
    least += tl.maximum(reached - 1, 0) << (BITS - 4 * tl.maximum(digit, 1))
    tl.store(least_DR + digit * rows + row, least)
    return least


@triton.jit(do_not_specialize=["digit"])
def mass_of_parts(
    rows: tl.tuple,
    search: tl.tuple,
    digit: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    SEARCHED: tl.constexpr,
) -> None:
    """Sum the mass of a part's tokens at or above each value of a digit: one program per part."""
    best_R, _, _, _, mass_DXJ = search
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = program // PARTS
    best, least = tl.load(best_R + row), least_of(search, digit, PARTS, BITS)
    bound_J = least + (tl.arange(0, 16) << (BITS - 4 - 4 * digit))
    mass_SJ = tl.zeros((SEARCHED, 16), tl.float32)  # summed once, at the end
    for start in range(0, SPAN, SEARCHED):
        at_S = program % PARTS * SPAN + start + tl.arange(0, SEARCHED)
        logit_S = part_of(rows, row, at_S, tl.float32)
        reaches_SJ = key_of(logit_S, BITS)[:, None] >= bound_J[None, :]
        mass_SJ += tl.where(reaches_SJ, tl.exp(logit_S - best)[:, None], 0.0)
    at_J = (digit * programs + program) * 16 + tl.arange(0, 16)
    tl.store(mass_DXJ + at_J, tl.sum(mass_SJ, 0))


@triton.jit(do_not_specialize=["digits"])
def equals_of_parts(
    rows: tl.tuple,
    search: tl.tuple,
    equal_3X: tl.tensor,
    digits: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Sum a part's mass above the least key kept; find the mass of an equal token; count those."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    row = program // PARTS
    best, least = tl.load(search[0] + row), least_of(search, digits, PARTS, BITS)
    at_S = program % PARTS * SPAN + tl.arange(0, SPAN)
    logit_S = part_of(rows, row, at_S, tl.float32)
    mass_S, key_S = tl.exp(logit_S - best), key_of(logit_S, BITS)
    tl.store(equal_3X + program, tl.sum(tl.where(key_S > least, mass_S, 0.0), 0))
    each = tl.max(tl.where(key_S == least, mass_S, 0.0), 0)
    tl.store(equal_3X + programs + program, each)
    tl.store(equal_3X + 2 * programs + program, tl.sum((key_S == least).to(tl.float32), 0))


@triton.jit(do_not_specialize=["digits"])
def cut_parts(
    rows: tl.tuple,
    search: tl.tuple,
    equal_3X: tl.tensor,
    kept_RV: tl.tensor,
    digits: tl.tensor,
    PARTS: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """Write the logits of a part that are kept: those above the least key, and as many equal to
    it, counted from the start of the row, as the mass asks for.
    """
    program, programs, length = tl.program_id(0), tl.num_programs(0), rows[2]
    part_P = tl.arange(0, triton.next_power_of_2(PARTS))
    row, part = program // PARTS, program % PARTS
    _, sum_R, top_p, least_DR, _ = search
    at_P, there_P = equal_3X + row * PARTS + part_P, part_P < PARTS
    above = tl.sum(tl.load(at_P, mask=there_P, other=0.0), 0)
    each = tl.max(tl.load(at_P + programs, mask=there_P, other=0.0), 0)
    before = tl.sum(tl.load(at_P + 2 * programs, mask=part_P < part, other=0.0), 0)
    several = tl.where(each > 0, (top_p * tl.load(sum_R + row) - above) / each, length)
    room = tl.minimum(tl.maximum(several, 0), length).to(tl.int32) + 1 - before.to(tl.int32)
    at_S = part * SPAN + tl.arange(0, SPAN)
    logit_S = part_of(rows, row, at_S, tl.float32)
    key_S, least = key_of(logit_S, BITS), tl.load(least_DR + digits * (programs // PARTS) + row)
    equal_S = (key_S == least).to(tl.int32)
    stays_S = (key_S > least) | ((equal_S > 0) & (tl.cumsum(equal_S, 0) <= room))
    kept_S = tl.where(stays_S, logit_S, float("-inf")).to(kept_RV.dtype.element_ty)
    tl.store(kept_RV + row.to(tl.int64) * length + at_S, kept_S, mask=at_S < length)
