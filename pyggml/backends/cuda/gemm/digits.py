"""Rows of A as whole numbers of two digits, in the shared memory of a block.

Of each group of 32 numbers, x = d · (256·high + low): d is the greatest |x| by 32639, both digits
are signed bytes. So x is known to 2⁻¹⁶ of its group's greatest, finer than bfloat16, and a product
with bytes is four instructions for eight weights (dp4a).

A group takes 64 bytes: for each of four lanes q, the words of high and low digits of its numbers
4q … and 16 + 4q …. Then come all d, each with a quarter of the group's sum, for what a type adds to
all weights of a group. Eight groups are followed by one's room, which spreads them over the banks.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pyggml.backends.cuda import byte_ptx, ptx
from pyggml.backends.cuda.blocks import block_sum
from pyggml.backends.cuda.driver import cuda, device
from pyggml.backends.cuda.formulas import ONE, ZERO
from pyggml.backends.cuda.warp import ALL
from pyggml.quants.layout import GROUP
from pyggml.sizes import round_up

GROUP_BYTES, FACTOR_BYTES = 64, 8
EIGHT = 8 * GROUP_BYTES + GROUP_BYTES  # bytes of eight groups
EIGHT_FACTORS = 8 * FACTOR_BYTES + FACTOR_BYTES

_LARGEST = np.float32(127 * 256 + 127)
_HALF, _QUARTER = np.float32(0.5), np.float32(0.25)


class Room(NamedTuple):
    """Bytes of a row: of its digits, and of its factors."""

    digits: int
    factors: int


def room_of(k: int) -> Room:
    """Of k numbers."""
    eights = -(-k // (8 * GROUP))
    return Room(eights * EIGHT, round_up(eights * EIGHT_FACTORS, 16))  # 16: what a copy brings


@device
def _greatest_of_lanes(x):
    x = max(x, cuda.shfl_xor_sync(ALL, x, 1))
    return max(x, cuda.shfl_xor_sync(ALL, x, 2))


@device
def _sum_of_lanes(x):
    x += cuda.shfl_xor_sync(ALL, x, 1)
    return x + cuda.shfl_xor_sync(ALL, x, 2)


@device
def _rounded(x):
    return np.int32(math.floor(x + _HALF))


@device
def _digits(a, b, c, d, per_step):
    """The words of the high and the low digits of four numbers."""
    first, second = _rounded(a * per_step), _rounded(b * per_step)
    third, fourth = _rounded(c * per_step), _rounded(d * per_step)
    two, four = np.uint32(0x40), np.uint32(0x5410)
    low = byte_ptx.pick_bytes(
        byte_ptx.pick_bytes(np.uint32(first), np.uint32(second), two),
        byte_ptx.pick_bytes(np.uint32(third), np.uint32(fourth), two),
        four,
    )
    up, two = np.int32(128), np.uint32(0x51)  # a low digit below 0 takes one from the high digit
    high = byte_ptx.pick_bytes(
        byte_ptx.pick_bytes(np.uint32(first + up), np.uint32(second + up), two),
        byte_ptx.pick_bytes(np.uint32(third + up), np.uint32(fourth + up), two),
        four,
    )
    return high, low


@device
def _greatest(a, b, c, d):
    return max(max(abs(a), abs(b)), max(abs(c), abs(d)))


@device
def _put_digits(memory, to, factors, group, q, a, b, c, d, e, f, g, h):
    """Write a lane's share of a group: numbers 4q … and 16 + 4q …; to, factors: where the row's
    digits and factors begin. All lanes of a warp call it."""
    greatest = _greatest_of_lanes(max(_greatest(a, b, c, d), _greatest(e, f, g, h)))
    total = _sum_of_lanes((a + b + c + d) + (e + f + g + h))
    per_step = _LARGEST / greatest if greatest > ZERO else ZERO
    high, low = _digits(a, b, c, d, per_step)
    high_too, low_too = _digits(e, f, g, h, per_step)
    at = to + group * GROUP_BYTES + (group >> 3) * GROUP_BYTES + 16 * q
    byte_ptx.put_shared_words(memory, at, high, low, high_too, low_too)
    if q == 0:
        at = factors + group * FACTOR_BYTES + (group >> 3) * FACTOR_BYTES
        step = greatest / _LARGEST + (total - total)  # NaN where a number is none
        byte_ptx.put_shared_pair(memory, at, ptx.bits_of(step), ptx.bits_of(total * _QUARTER))


# -- all rows ------------------------------------------------------------------------------------


@device
def _rate(a, at, k, eps, parts):
    """1 over the root of the mean square of a row of A."""
    total = ZERO
    for i in range(at + cuda.threadIdx.x, at + k, cuda.blockDim.x):
        total += a[i] * a[i]
    return ONE / math.sqrt(block_sum(total, parts) / np.float32(k) + eps)


@cache
def rounder(rows: int, has_norm: bool) -> Any:
    """round_a(memory, parts, a, k, room, norm): all rows of A as digits, by the threads of a block.

    parts: float32 (THREADS,) in shared memory
    norm: (weights, eps, out, is_kept): A is rms_norm(a) · weights, and goes to `out` if it is kept
    """

    @device
    def value(a, i, j, rate, norm):
        """Number i of A, the j-th of its row."""
        if has_norm:
            y = a[i] * rate * norm[0][j]
            if norm[3] and cuda.blockIdx.x == 0:
                norm[2][i] = y
            return y
        return a[i]

    @device
    def round_a(memory, parts, a, k, room, norm):
        n_groups, q = k // GROUP, cuda.threadIdx.x & 3
        for t in range(rows):
            rate = _rate(a, t * k, k, norm[1], parts) if has_norm else ONE
            to, factors = t * room.digits, rows * room.digits + t * room.factors
            for first in range(cuda.threadIdx.x >> 5 << 3, n_groups, cuda.blockDim.x >> 2):
                # Lanes beyond the last group go along: they write it once more.
                group = min(first + ((cuda.threadIdx.x & 31) >> 2), n_groups - 1)
                j = group * GROUP + 4 * q
                i = t * k + j
                _put_digits(
                    memory, to, factors, group, q,
                    value(a, i, j, rate, norm), value(a, i + 1, j + 1, rate, norm),
                    value(a, i + 2, j + 2, rate, norm), value(a, i + 3, j + 3, rate, norm),
                    value(a, i + 16, j + 16, rate, norm), value(a, i + 17, j + 17, rate, norm),
                    value(a, i + 18, j + 18, rate, norm), value(a, i + 19, j + 19, rate, norm),
                )  # fmt: skip

    return round_a
