"""Super-blocks of 256 weights in 16 sub-blocks of 16, without minima:  x = d·s·q.

d, a float16, is the super-block's scale; s is a sub-block's, an int8, in Q3_K 6 bits of s+32.

Q6_K   210 bytes: 128 bytes of low 4 bits of q+32, 64 bytes of high 2 bits, 16 × s, d. Each half of
       128 weights has 64 + 32 bytes: weight 32k+j has its low bits in byte 32·(k mod 2)+j, in the
       low 4 bits if k < 2, else in the high; its high bits are bits 2k and 2k+1 of byte j
Q3_K   110 bytes: 32 bytes of top bits of q+4 (bit k of byte j: weight 32k+j), 64 bytes of low 2
       bits as Q2_K's, 12 bytes of s, d. s of sub-block i has its low 4 bits in byte i mod 8, in the
       low half if i < 8; its high 2 are bits 2·(i div 4) and one more of byte 8 + i mod 4

Packing as in ggml. Q6_K: each sub-block is fitted by least squares, weighted by x², for 19 trial
scales; the best scales are rounded to 8 bits, then every q is chosen again. Q3_K: the levels of a
sub-block are changed one by one as long as the fit improves.
"""

from __future__ import annotations

import numpy as np

from pyggml._jit import block_code, carray, exact
from pyggml.dtypes import DTYPES
from pyggml.quants.base import F16_LIMIT, Quant
from pyggml.quants.bits import (
    clear,
    copy,
    extreme,
    f16_at,
    lanes,
    nearest_int,
    put_f16,
    two_bit_planes,
)
from pyggml.quants.layout import Block

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero


@exact
def _clip(v, half):
    """v rounded to an integer, clipped to −half … half − 1."""
    return max(-half, min(half - 1, nearest_int(v)))


@exact
def _round_levels(q, x, inverse, half):
    """q = half + round(x·inverse), clipped to 0 … 2·half − 1."""
    for j in range(x.size):
        q[j] = half + _clip(inverse * x[j], half)


@exact
def _least_squares(x, q, half):
    """Σ w·x·(q − half) and Σ w·(q − half)², w = x²."""
    sum_xq = sum_q2 = _ZERO
    for j in range(x.size):
        level = np.float32(np.int32(q[j]) - np.int32(half))
        weight = x[j] * x[j]
        sum_xq += weight * x[j] * level
        sum_q2 += weight * level * level
    return sum_xq, sum_q2


@exact
def _fit(q, x, trial, half):
    """The best scale of x ≈ scale·(q − half); q is written, trial is scratch."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        clear(q)
        return _ZERO
    _round_levels(q, x, np.float32(-half) / peak, half)
    sum_xq, sum_q2 = _least_squares(x, q, half)
    scale = sum_xq / sum_q2 if sum_q2 != _ZERO else _ZERO
    best = scale * sum_xq
    for step in range(-9, 10):
        if step == 0:
            continue
        levels = np.float32(half) + np.float32(0.1) * np.float32(step)
        _round_levels(trial, x, -levels / peak, half)
        sum_xq, sum_q2 = _least_squares(x, trial, half)
        if sum_q2 > _ZERO and sum_xq * sum_xq > best * sum_q2:
            copy(q, trial)
            scale = sum_xq / sum_q2
            best = scale * sum_xq
    return scale


@exact
def _pack_scales(dst, b, start, d_at, scales):
    """Write the 16 s and d of block b; returns d, rounded to float16."""
    inverse = np.float32(-128) / extreme(scales)
    for i in range(16):
        dst[b, start + i] = np.uint8(min(127, nearest_int(inverse * scales[i])) & 255)
    return put_f16(dst, b, d_at, np.float32(1) / inverse)


def _decode_q6_k(block: Block) -> None:
    scales = block.times(block.floats(block.bytes(192, 16)), block.f16(208))
    for i in range(8):  # groups of 32 weights; 64 + 32 bytes have four groups
        half, k = divmod(i, 4)
        low = block.bits(block.bytes(64 * half + k % 2 * 32), k // 2 * 4, 4)
        high = block.bits(block.bytes(128 + 32 * half), 2 * k, 2, to=4)
        both = block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)
        block.add_two(both, block.minus(block.either(low, high), 32), 32 * i)


@exact
def _choose_levels(q, dst, src, half, scales_at, d_at):
    """Write s and d of each block to dst, its levels to q, uint8 (n_blocks, 16, 16).

    Levels are 0 … 2·half − 1. A block without weights beyond ±1e-15 becomes zero bytes.
    """
    scales = np.empty(16, np.float32)
    trial = np.empty(16, np.uint8)
    for b in range(src.shape[0]):
        for i in range(16):
            scales[i] = _fit(q[b, i], src[b, 16 * i : 16 * i + 16], trial, half)
        if abs(extreme(scales)) < _TINY:
            clear(dst[b])
            for i in range(16):
                clear(q[b, i])
            continue
        d = _pack_scales(dst, b, scales_at, d_at, scales)
        for i in range(16):
            s = np.int32(dst[b, scales_at + i])
            scale = d * np.float32(s - 256 if s > 127 else s)
            if scale != _ZERO:
                x = src[b, 16 * i : 16 * i + 16]
                for j in range(16):
                    q[b, i, j] = half + _clip(x[j] / scale, half)


def _pack_q6_k(dst: np.ndarray, src: np.ndarray) -> None:
    q = np.empty((len(src), 16, 16), np.uint8)
    _choose_levels(q, dst, src, 32, 192, 208)
    rows = q.reshape(-1, 2, 4, 32)  # two halves of four rows of 32 weights
    low, top = rows & 15, rows >> 4
    dst[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    dst[:, 128:192] = two_bit_planes(top)


Q6_K = Quant(dtype=DTYPES["Q6_K"], decode=_decode_q6_k, pack=_pack_q6_k, limit=F16_LIMIT)


@exact
def _three_bit_scale(x, b, i):
    """s of sub-block i of Q3_K."""
    low = np.int32(x[b, 96 + i % 8]) >> np.int32(4 * (i // 8))
    high = np.int32(x[b, 104 + i % 4]) >> np.int32(2 * (i // 4))
    return ((low & np.int32(15)) | ((high & np.int32(3)) << np.int32(4))) - np.int32(32)


@block_code
def _unpack_q3_k(dst, src, n_blocks):
    x = carray(src, (n_blocks, 110))
    y = carray(dst, (n_blocks, 256))
    n = lanes(16)
    for b in range(n_blocks):
        d = f16_at(x, b, 108)
        for i in range(16):
            scale = d * np.float32(_three_bit_scale(x, b, i))
            of, shift = 32 + 32 * (i // 8) + 16 * (i % 2), np.int32(2 * (i % 8 // 2))
            top, plane = 16 * (i % 2), np.int32(i // 2)
            for j in range(n):
                q = (np.int32(x[b, of + j]) >> shift) & np.int32(3)
                q += ((np.int32(x[b, top + j]) >> plane) & np.int32(1)) << np.int32(2)
                y[b, 16 * i + j] = scale * np.float32(q - np.int32(4))


@exact
def _improve(q, x, sum_xq, sum_q2):
    """Replace each level q + 4 by the best one for the other levels; returns the new sums, and
    whether a level has changed."""
    changed = False
    for j in range(16):
        weight = x[j] * x[j]
        level = np.float32(np.int32(q[j]) - np.int32(4))
        rest_xq = sum_xq - weight * x[j] * level
        if rest_xq > _ZERO:
            rest_q2 = sum_q2 - weight * level * level
            new = _clip(x[j] * rest_q2 / rest_xq, 4)
            if new + 4 != np.int32(q[j]):
                level = np.float32(new)
                rest_xq += weight * x[j] * level
                rest_q2 += weight * level * level
                better = rest_xq * rest_xq * sum_q2 > sum_xq * sum_xq * rest_q2
                if rest_q2 > _ZERO and better:
                    q[j] = new + 4
                    sum_xq, sum_q2, changed = rest_xq, rest_q2, True
    return sum_xq, sum_q2, changed


@exact
def _fit_by_steps(q, x):
    """The scale of x ≈ scale·(q − 4), 16 weights; q is written."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        clear(q)
        return _ZERO
    _round_levels(q, x, np.float32(-4) / peak, 4)
    sum_xq, sum_q2 = _least_squares(x, q, 4)
    for _ in range(5):
        sum_xq, sum_q2, changed = _improve(q, x, sum_xq, sum_q2)
        if not changed:
            break
    return sum_xq / sum_q2 if sum_q2 > _ZERO else _ZERO


@exact
def _put_three_bit_scales(dst, b, scales):
    """Write the 16 s and d to a Q3_K block of zeros; returns d, rounded to float16."""
    peak = extreme(scales)
    if peak == _ZERO:
        return _ZERO
    inverse = np.float32(-32) / peak
    for i in range(16):
        byte = nearest_int(inverse * scales[i]) & 255  # as C's int8
        s = max(-32, min(31, byte - 256 if byte > 127 else byte)) + 32
        dst[b, 96 + i % 8] |= np.uint8((s & 15) << (4 * (i // 8)))
        dst[b, 104 + i % 4] |= np.uint8((s >> 4) << (2 * (i // 4)))
    return put_f16(dst, b, 108, np.float32(1) / inverse)


@exact
def _choose_three_bits(q, dst, src):
    """Write s and d of each block to dst, its levels q + 4 to q, uint8 (n_blocks, 16, 16)."""
    scales = np.empty(16, np.float32)
    for b in range(src.shape[0]):
        for i in range(16):
            scales[i] = _fit_by_steps(q[b, i], src[b, 16 * i : 16 * i + 16])
        clear(dst[b])
        d = _put_three_bit_scales(dst, b, scales)
        for i in range(16):
            scale = d * np.float32(_three_bit_scale(dst, b, i))
            if scale != _ZERO:
                x = src[b, 16 * i : 16 * i + 16]
                for j in range(16):
                    q[b, i, j] = 4 + _clip(x[j] / scale, 4)


def _pack_q3_k(dst: np.ndarray, src: np.ndarray) -> None:
    q = np.empty((len(src), 16, 16), np.uint8)
    _choose_three_bits(q, dst, src)
    planes = q.reshape(-1, 8, 32) >> 2
    dst[:, :32] = np.packbits(planes, axis=1, bitorder="little")[:, 0]
    dst[:, 32:96] = two_bit_planes(q)


Q3_K = Quant(dtype=DTYPES["Q3_K"], decode=_unpack_q3_k, pack=_pack_q3_k, limit=F16_LIMIT)
