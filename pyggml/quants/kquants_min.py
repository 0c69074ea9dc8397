"""Super-blocks of 256 weights in sub-blocks with scale and minimum:  x = d·s·q − dmin·m.

d and dmin are the super-block's, float16. s and m are a sub-block's, whole numbers: of 6 bits for 8
sub-blocks of 32; in Q2_K, of 4 bits for 16 sub-blocks of 16.

Q2_K   84 bytes: 16 bytes of s (low 4 bits) and m, 64 bytes of q, d, dmin; in each half of 128
       weights bits 2k and 2k+1 of byte j belong to weight 32k+j
Q4_K   144 bytes: d, dmin, 12 bytes of s and m, 128 bytes of q; byte j of 32-byte group i holds
       weight 64i+j (low 4 bits) and 64i+32+j (high)
Q5_K   176 bytes: d, dmin, 12 bytes of s and m, 32 bytes of fifth bits (bit k of byte j: weight
       32k+j), 128 bytes as Q4_K's

In Q4_K and Q5_K s and m of sub-blocks 0 to 3 are the low 6 bits of bytes 0 to 3 and 4 to 7; those
of 4 to 7 have their low 4 bits in the two halves of bytes 8 to 11 and their high 2 bits on top of
bytes 0 to 7.

Packing as in ggml: each sub-block is fitted by weighted least squares for several trial scales; the
best s and m are rounded, then every q is chosen again. The error of a fit is a sum of absolute
values in Q2_K, of squares in the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyggml._jit import block_code, carray, exact
from pyggml.dtypes import DTYPES
from pyggml.quants.base import F16_LIMIT, Quant
from pyggml.quants.bits import (
    clear,
    copy,
    f16_at,
    lanes,
    nearest_int,
    put_f16,
    two_bit_planes,
)
from pyggml.quants.layout import Block

_ZERO = np.float32(0)


@exact
def _scale_at(x, b, i):
    """s of sub-block i."""
    if i < 4:
        return np.int32(x[b, 4 + i] & 63)
    return np.int32((x[b, 8 + i] & 15) | ((x[b, i] >> 6) << 4))


@exact
def _min_at(x, b, i):
    """m of sub-block i."""
    if i < 4:
        return np.int32(x[b, 8 + i] & 63)
    return np.int32((x[b, 8 + i] >> 4) | ((x[b, 4 + i] >> 6) << 4))


@exact
def _put_scales(x, b, s, m):
    """Write the eight s and m, all 0 to 63."""
    for i in range(4):
        x[b, 4 + i] = np.uint8(s[i] | ((s[4 + i] >> 4) << 6))
        x[b, 8 + i] = np.uint8(m[i] | ((m[4 + i] >> 4) << 6))
        x[b, 12 + i] = np.uint8((s[4 + i] & 15) | ((m[4 + i] & 15) << 4))


@exact
def _fit_weights(weights, x):
    """Importance of each weight: its magnitude plus the root mean square of all."""
    total = _ZERO
    for v in x:
        total += v * v
    rms = np.sqrt(total / np.float32(x.size))
    for j in range(x.size):
        weights[j] = rms + abs(x[j])


@exact
def _error(x, weights, q, scale, minimum, squared):
    """Weighted squared or absolute error of x ≈ scale·q + minimum."""
    total = _ZERO
    for j in range(x.size):
        diff = scale * np.float32(q[j]) + minimum - x[j]
        total += weights[j] * (diff * diff if squared else abs(diff))
    return total


@exact
def _round_levels(q, x, inverse, minimum, q_max):
    """q = round((x − minimum)·inverse), clipped to 0 … q_max."""
    for j in range(x.size):
        q[j] = max(0, min(q_max, nearest_int(inverse * (x[j] - minimum))))


@exact
def _least_squares(x, weights, q, sum_w, sum_x):
    """(scale, minimum ≤ 0) with the least squared error for these q, and whether it is unique."""
    sum_q = sum_q2 = sum_xq = _ZERO
    for j in range(x.size):
        level = np.float32(q[j])
        sum_q += weights[j] * level
        sum_q2 += weights[j] * level * level
        sum_xq += weights[j] * level * x[j]
    determinant = sum_w * sum_q2 - sum_q * sum_q
    if not determinant > _ZERO:
        return _ZERO, _ZERO, False
    scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
    minimum = (sum_q2 * sum_x - sum_q * sum_xq) / determinant
    if minimum > _ZERO:
        return sum_xq / sum_q2, _ZERO, True
    return scale, minimum, True


@exact
def _fit(x, weights, q, trial, q_max, first, n_steps, squared):
    """The best (scale, −minimum) of x ≈ scale·q + minimum, minimum ≤ 0; q is written, trial is
    scratch.

    The first trial divides the range of x into q_max levels; the others divide it into
    q_max + first + 0.1·step, for step = 0 … n_steps.
    """
    minimum = maximum = x[0]
    sum_w = weights[0]
    sum_x = weights[0] * x[0]
    for j in range(1, x.size):
        minimum = min(minimum, x[j])
        maximum = max(maximum, x[j])
        sum_w += weights[j]
        sum_x += weights[j] * x[j]
    minimum = min(minimum, _ZERO)
    if maximum == minimum:
        clear(q)
        return _ZERO, -minimum
    inverse = np.float32(q_max) / (maximum - minimum)
    scale = np.float32(1) / inverse
    _round_levels(q, x, inverse, minimum, q_max)
    best = _error(x, weights, q, scale, minimum, squared)
    for step in range(n_steps + 1):
        levels = np.float32(first) + np.float32(0.1) * np.float32(step) + np.float32(q_max)
        _round_levels(trial, x, levels / (maximum - minimum), minimum, q_max)
        try_scale, try_minimum, found = _least_squares(x, weights, trial, sum_w, sum_x)
        if found:
            error = _error(x, weights, trial, try_scale, try_minimum, squared)
            if error < best:
                best, scale, minimum = error, try_scale, try_minimum
                copy(q, trial)
    return scale, -minimum


@exact
def _to_six_bits(out, values, largest):
    """out = round(63·values/largest), 0 to 63."""
    inverse = np.float32(63) / largest if largest > _ZERO else _ZERO
    for i in range(values.size):
        out[i] = min(63, nearest_int(inverse * values[i]) & 255)


@exact
def _pack_scales(dst, b, scales, minima):
    """Write d, dmin and the sub-blocks' s and m; returns d and dmin, rounded to float16."""
    largest_scale = largest_minimum = _ZERO
    for i in range(8):
        largest_scale = max(largest_scale, scales[i])
        largest_minimum = max(largest_minimum, minima[i])
    six = np.empty((2, 8), np.int32)
    _to_six_bits(six[0], scales, largest_scale)
    _to_six_bits(six[1], minima, largest_minimum)
    _put_scales(dst, b, six[0], six[1])
    d = put_f16(dst, b, 0, largest_scale / np.float32(63))
    dmin = put_f16(dst, b, 2, largest_minimum / np.float32(63))
    return d, dmin


@exact
def _choose_levels(q, dst, src, q_max, first, n_steps):
    """Write d, dmin, s and m of each block to dst and its levels to q, uint8 (n_blocks, 8, 32)."""
    scales = np.empty(8, np.float32)
    minima = np.empty(8, np.float32)
    weights = np.empty(32, np.float32)
    trial = np.empty(32, np.uint8)
    for b in range(src.shape[0]):
        for i in range(8):
            x = src[b, 32 * i : 32 * i + 32]
            _fit_weights(weights, x)
            scales[i], minima[i] = _fit(x, weights, q[b, i], trial, q_max, first, n_steps, True)
        d, dmin = _pack_scales(dst, b, scales, minima)
        for i in range(8):
            scale = d * np.float32(_scale_at(dst, b, i))
            minimum = dmin * np.float32(_min_at(dst, b, i))
            if scale != _ZERO:
                x = src[b, 32 * i : 32 * i + 32]
                for j in range(32):
                    q[b, i, j] = max(0, min(q_max, nearest_int((x[j] + minimum) / scale)))


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Low 4 bits of levels (n_blocks, 8, 32), two sub-blocks per 32 bytes: (n_blocks, 128)."""
    low = q & 15
    return (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)


def _decode_scales(block: Block) -> Any:
    """Add the minima −dmin·m of 8 sub-blocks; returns their scales d·s."""
    first, second, third = (block.bytes(4 + 4 * i, 4) for i in range(3))

    def six_bits(lower: Any, four: Any) -> Any:
        upper = block.either(four, block.bits(lower, 6, 2, to=4))
        return block.floats(block.join(block.bits(lower, 0, 6), upper))

    s = six_bits(first, block.bits(third, 0, 4))
    m = six_bits(second, block.bits(third, 4, 4))
    scales = block.times(s, block.f16(0))
    block.add_minima(block.times(m, block.negative(block.f16(2))))
    return scales


def _decode_q4_k(block: Block) -> None:
    scales = _decode_scales(block)
    for i in range(8):
        q = block.bits(block.bytes(16 + i // 2 * 32), i % 2 * 4, 4)
        block.add(block.lane(scales, i), q, 32 * i)


def _pack_q4_k(dst: np.ndarray, src: np.ndarray) -> None:
    q = np.empty((len(src), 8, 32), np.uint8)
    _choose_levels(q, dst, src, 15, -1.0, 20)
    dst[:, 16:] = _nibbles(q)


Q4_K = Quant(dtype=DTYPES["Q4_K"], decode=_decode_q4_k, pack=_pack_q4_k, limit=F16_LIMIT)


def _decode_q5_k(block: Block) -> None:
    scales = _decode_scales(block)
    fifth = block.bytes(16)
    for i in range(8):
        q = block.bits(block.bytes(48 + i // 2 * 32), i % 2 * 4, 4)
        q = block.either(q, block.bits(fifth, i, 1, to=4))
        block.add(block.lane(scales, i), q, 32 * i)


def _pack_q5_k(dst: np.ndarray, src: np.ndarray) -> None:
    q = np.empty((len(src), 8, 32), np.uint8)
    _choose_levels(q, dst, src, 31, -0.5, 15)
    dst[:, 16:48] = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0]
    dst[:, 48:] = _nibbles(q)


Q5_K = Quant(dtype=DTYPES["Q5_K"], decode=_decode_q5_k, pack=_pack_q5_k, limit=F16_LIMIT)


@block_code
def _unpack_q2_k(dst, src, n_blocks):
    x = carray(src, (n_blocks, 84))
    y = carray(dst, (n_blocks, 256))
    n = lanes(16)
    for b in range(n_blocks):
        d, dmin = f16_at(x, b, 80), f16_at(x, b, 82)
        for i in range(16):
            s = np.int32(x[b, i])
            scale = d * np.float32(s & np.int32(15))
            minimum = dmin * np.float32(s >> np.int32(4))
            of, shift = 16 + 32 * (i // 8) + 16 * (i % 2), np.int32(2 * (i % 8 // 2))
            for j in range(n):
                q = (np.int32(x[b, of + j]) >> shift) & np.int32(3)
                y[b, 16 * i + j] = scale * np.float32(q) - minimum


@exact
def _put_four_bits(dst, b, values, shift):
    """Put round(15·values/largest) at bit `shift` of bytes 0 to 15; returns largest/15."""
    largest = _ZERO
    for v in values:
        largest = max(largest, v)
    if largest > _ZERO:
        inverse = np.float32(15) / largest
        for i in range(16):
            dst[b, i] |= np.uint8((nearest_int(inverse * values[i]) << shift) & 255)
    return largest / np.float32(15)


@exact
def _choose_two_bits(q, dst, src):
    """Write s, m, d and dmin of each block to dst and its levels to q, uint8 (n_blocks, 16, 16)."""
    scales, minima = np.empty(16, np.float32), np.empty(16, np.float32)
    weights, trial = np.empty(16, np.float32), np.empty(16, np.uint8)
    for b in range(src.shape[0]):
        for i in range(16):
            x = src[b, 16 * i : 16 * i + 16]
            for j in range(16):
                weights[j] = abs(x[j])
            scales[i], minima[i] = _fit(x, weights, q[b, i], trial, 3, -0.5, 15, False)
        clear(dst[b])
        d = put_f16(dst, b, 80, _put_four_bits(dst, b, scales, 0))
        dmin = put_f16(dst, b, 82, _put_four_bits(dst, b, minima, 4))
        for i in range(16):
            scale = d * np.float32(dst[b, i] & 15)
            minimum = dmin * np.float32(dst[b, i] >> 4)
            if scale != _ZERO:
                for j in range(16):
                    level = nearest_int((src[b, 16 * i + j] + minimum) / scale)
                    q[b, i, j] = max(0, min(3, level))


def _pack_q2_k(dst: np.ndarray, src: np.ndarray) -> None:
    q = np.empty((len(src), 16, 16), np.uint8)
    _choose_two_bits(q, dst, src)
    dst[:, 16:80] = two_bit_planes(q)


Q2_K = Quant(dtype=DTYPES["Q2_K"], decode=_unpack_q2_k, pack=_pack_q2_k, limit=F16_LIMIT)
