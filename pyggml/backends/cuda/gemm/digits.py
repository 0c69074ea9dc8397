"""Rows of A as whole numbers of two digits, in the shared memory of a block.

Of each group of 32 numbers, x = d · (256·high + low): d is the greatest |x| by 32639, both digits
are signed bytes. So x is known to 2⁻¹⁶ of its group's greatest, finer than bfloat16, and a product
with bytes is four instructions for eight weights (dp4a).

A group takes 64 bytes: for each q below 4, the words of high and low digits of its numbers 4q … and
16 + 4q …. Then come all d, each with its group's sum, for what a type adds to all weights of a
group. If a type of a launch adds something to each half of a group, the sums of both halves follow,
in steps of d: whole numbers. A unit's groups (packed.py) are followed by room that spreads the
units over the banks.

Where A is normalised, the digits are those of a · w; the rate of a row multiplies its results.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda.code import byte_ptx, ptx
from pyggml.backends.cuda.code.formulas import ONE, ZERO
from pyggml.backends.cuda.code.fours import load_four
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.warp import quad_max, quad_sum, warp_sum
from pyggml.backends.cuda.runtime.driver import cuda
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

GROUP_BYTES = 64
_GROUP_BITS = GROUP.bit_length() - 1  # to divide a signed number takes more instructions
_PAD = 16  # after the digits of a unit: its eight lanes then read all banks at once

_STEP = np.float32(1 / (127 * 256 + 127))
_WHOLE = np.float32(3 << 22)  # float32 near it are the whole numbers
_LEAST = np.float32(1e-30)  # the digits of a group whose numbers are all smaller are 0


class DigitLayout(NamedTuple):
    """Bytes of shared memory: of a row's digits, of a row's factors, before the sums of squares."""

    digits: int
    factors: int
    squares: int


def unit_digits(n_groups: int) -> int:
    """Bytes from the digits of a unit to those of the next."""
    return n_groups * GROUP_BYTES + _PAD


def factor_bytes(has_halves: bool) -> int:
    """Of d and the sum of a group, and with `has_halves` the sums of its halves."""
    return 16 if has_halves else 8


def unit_factors(n_groups: int, has_halves: bool) -> int:
    """Bytes from the factors of a unit to those of the next."""
    return (n_groups + 1) * factor_bytes(has_halves)


def layout_of(rows: int, k: int, n_groups: int, has_halves: bool) -> DigitLayout:
    """Of rows of k numbers, in units of so many groups."""
    n_units = k // (GROUP * n_groups)
    row = n_units * unit_digits(n_groups)
    factors = round_up(n_units * unit_factors(n_groups, has_halves), 16)
    return DigitLayout(row, factors, rows * (row + factors))


@device
def _whole(x, per_step):
    """The bits of a number near _WHOLE: the low 16 are those of the whole number nearest to
    x · per_step."""
    return ptx.bits_of(x * per_step + _WHOLE)


@device
def _wholes(four, per_step):
    return (
        _whole(four[0], per_step), _whole(four[1], per_step),
        _whole(four[2], per_step), _whole(four[3], per_step),
    )  # fmt: skip


@device
def _sum_of_wholes(wholes):
    """The sum of four whole numbers, of their bits as `_wholes` has them: exact."""
    a, b = ptx.as_float(wholes[0]) - _WHOLE, ptx.as_float(wholes[1]) - _WHOLE
    c, d = ptx.as_float(wholes[2]) - _WHOLE, ptx.as_float(wholes[3]) - _WHOLE
    return (a + b) + (c + d)


@device
def _digits(wholes):
    """The words of the high and the low digits of four numbers."""
    first, second, third, fourth = wholes
    lows, highs, both = np.uint32(0x40), np.uint32(0x51), np.uint32(0x5410)
    low = byte_ptx.pick_bytes(
        byte_ptx.pick_bytes(first, second, lows), byte_ptx.pick_bytes(third, fourth, lows), both
    )
    up = np.uint32(128)  # a low digit below 0 takes one from the high digit
    high = byte_ptx.pick_bytes(
        byte_ptx.pick_bytes(first + up, second + up, highs),
        byte_ptx.pick_bytes(third + up, fourth + up, highs),
        both,
    )
    return high, low


@device
def _greatest(four):
    return max(max(abs(four[0]), abs(four[1])), max(abs(four[2]), abs(four[3])))


@device
def _sum(four):
    return (four[0] + four[1]) + (four[2] + four[3])


@device
def squares(four):
    a, b, c, d = four
    return (a * a + b * b) + (c * c + d * d)


@device
def times(four, other):
    return four[0] * other[0], four[1] * other[1], four[2] * other[2], four[3] * other[3]


@device
def _put_pair(memory, at, step, total, first, second):
    byte_ptx.put_shared_pair(memory, at, ptx.bits_of(step), ptx.bits_of(total))


@device
def _put_with_halves(memory, at, step, total, first, second):
    byte_ptx.put_shared_words(
        memory, at, ptx.bits_of(step), ptx.bits_of(total), ptx.bits_of(first), ptx.bits_of(second)
    )


@cache
def _digit_putter(has_halves: bool) -> Any:
    """What writes a lane's share of a group: numbers 4q … and 16 + 4q …. All lanes of a warp call
    it."""
    put_factors = _put_with_halves if has_halves else _put_pair

    @device
    def put_digits(memory, at, factor_at, q, first, second):
        greatest = quad_max(max(_greatest(first), _greatest(second)))
        total = quad_sum(_sum(first) + _sum(second))
        step = greatest * _STEP
        per_step = ptx.reciprocal(step) if greatest > _LEAST else ZERO
        wholes, wholes_too = _wholes(first, per_step), _wholes(second, per_step)
        high, low = _digits(wholes)
        high_too, low_too = _digits(wholes_too)
        byte_ptx.put_shared_words(memory, at + 16 * q, high, low, high_too, low_too)
        half = half_too = ZERO
        if has_halves:
            half, half_too = quad_sum(_sum_of_wholes(wholes)), quad_sum(_sum_of_wholes(wholes_too))
        if q == 0:
            step += total - total  # NaN where the sum is not finite
            put_factors(memory, factor_at, step, total, half, half_too)

    return put_digits


# -- all rows ------------------------------------------------------------------------------------


@device
def one_by_one(x, i):
    return x[i], x[i + 1], x[i + 2], x[i + 3]


@cache
def rounder(rows: int, n_groups: int, has_norm: bool, vectorized: bool, has_halves: bool) -> Any:
    """round_a(memory, floats, a, k, layout, norm): all rows of A as digits, by a block's threads.

    n_groups: of a unit; vectorized: whether A, and a norm's weights, lie as load_four wants them
    memory, floats: shared memory by words and by float32, to which the warps' sums of squares go
    norm: (weights, eps, out, is_read): A is rms_norm(a) · weights, up to the rate of each row
    """
    load, put_digits = load_four if vectorized else one_by_one, _digit_putter(has_halves)
    digits_apart, factors_apart = unit_digits(n_groups), unit_factors(n_groups, has_halves)
    group_factors, unit_bits = factor_bytes(has_halves), n_groups.bit_length() - 1

    @device
    def round_a(memory, floats, a, k, layout, norm):
        all_groups, warp, n_warps = k >> _GROUP_BITS, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
        lane, q = cuda.threadIdx.x & 31, cuda.threadIdx.x & 3
        for t in range(rows):
            total = ZERO
            start = 8 * warp
            while start < all_groups:  # a range would begin with a division
                # Lanes beyond the last group go along: they write it once more.
                own = start + (lane >> 2)
                group = min(own, all_groups - 1)
                i = group * GROUP + 4 * q
                first, second = load(a, t * k + i), load(a, t * k + i + 16)
                if has_norm:
                    total += squares(first) + squares(second) if own == group else ZERO
                    first = times(first, load(norm[0], i))
                    second = times(second, load(norm[0], i + 16))
                unit, of_unit = group >> unit_bits, group & (n_groups - 1)
                at = t * layout.digits + unit * digits_apart + of_unit * GROUP_BYTES
                factor_at = rows * layout.digits + t * layout.factors
                factor_at += unit * factors_apart + of_unit * group_factors
                put_digits(memory, at, factor_at, q, first, second)
                start += 8 * n_warps
            if has_norm:
                total = warp_sum(total)
                if lane == 0:
                    floats[(layout.squares >> 2) + t * n_warps + warp] = total

    return round_a


@cache
def rater(has_norm: bool) -> Any:
    """rate(floats, t, k, layout, norm): what multiplies the results of row t: 1 over the root of
    its mean square. All threads have rounded A before; all lanes of a warp call it."""

    @device
    def rate(floats, t, k, layout, norm):
        if not has_norm:
            return ONE
        lane, n_warps = cuda.threadIdx.x & 31, cuda.blockDim.x >> 5
        at = (layout.squares >> 2) + t * n_warps + min(lane, n_warps - 1)
        total = warp_sum(byte_ptx.shared_float(floats, at) if lane < n_warps else ZERO)
        return ptx.inverse_root(total * ptx.reciprocal(np.float32(k)) + norm[1])

    return rate
