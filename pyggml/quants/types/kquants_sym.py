"""Super-blocks of 256 weights in 16 sub-blocks of 16, without minima:  x = d·s·q.

d, a float16, is the super-block's scale; s is a sub-block's, an int8, in Q3_K 6 bits of s+32.

Q6_K   210 bytes: 128 bytes of low 4 bits of q+32, 64 bytes of high 2 bits, 16 × s, d. Each half of
       128 weights has 64 + 32 bytes: weight 32k+j has its low bits in byte 32·(k mod 2)+j, in the
       low 4 bits if k < 2, else in the high; its high bits are bits 2k and 2k+1 of byte j
Q3_K   110 bytes: 32 bytes of top bits of q+4 (bit k of byte j: weight 32k+j), 64 bytes of low 2
       bits as Q2_K's, 12 bytes of s, d. s of sub-block i has its low 4 bits in byte i mod 8, in the
       low half if i < 8; its high 2 are bits 2·(i div 4) and one more of byte 8 + i mod 4

Packing as in ggml. Each sub-block is fitted by least squares, weighted by x² or by importance, for
19 trial scales; the scales are rounded, then every q is chosen again. Without importance Q3_K has
one trial, and levels change one by one as long as the fit improves.
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import Quant
from pyggml.quants.bits import clear, extreme, nearest_int, put_f16, two_bit_planes
from pyggml.quants.layout import Block
from pyggml.quants.packers.fits import Given, clip, fit_levels, round_levels, total, weights_of

_ZERO = np.float32(0)
_TINY = np.float32(1e-15)  # ggml's GROUP_MAX_EPS: a sub-block below it counts as zero


def _decode_q6_k(block: Block) -> None:
    scales = block.times(block.floats(block.bytes(192, 16)), block.f16(208))
    for i in range(8):  # groups of 32 weights; 64 + 32 bytes have four groups
        half, k = divmod(i, 4)
        low = block.bits(block.bytes(64 * half + k % 2 * 32), k // 2 * 4, 4)
        high = block.bits(block.bytes(128 + 32 * half), 2 * k, 2, to=4)
        both = block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)
        block.add_two(both, block.minus(block.either(low, high), 32), 32 * i, 32)


@exact
def _choose_levels(q, dst, src, weights):
    """Write s and d of each block to dst, its levels q + 32 to q, uint8 (n_blocks, 16, 16).

    A block without weights beyond ±1e-15 becomes zero bytes.
    """
    trial, scales = np.empty(16, np.uint8), np.empty(16, np.float32)
    for b in range(src.shape[0]):
        for i in range(16):
            part = slice(16 * i, 16 * i + 16)
            scales[i] = fit_levels(q[b, i], src[b, part], weights[b, part], trial, 32)
        if abs(extreme(scales)) < _TINY:
            clear(dst[b])
            for i in range(16):
                clear(q[b, i])
            continue
        per_step = np.float32(-128) / extreme(scales)
        d = put_f16(dst, b, 208, np.float32(1) / per_step)
        for i in range(16):
            s = min(127, nearest_int(per_step * scales[i]))
            dst[b, 192 + i] = np.uint8(s & 255)
            _round_again(q[b, i], src[b, 16 * i : 16 * i + 16], d * np.float32(s), 32)


@exact
def _round_again(q, x, scale, zero):
    """The levels for a scale that is rounded itself; those of no scale stay."""
    if scale != _ZERO:
        for j in range(16):
            q[j] = zero + clip(x[j] / scale, zero)


def pack_q6_k(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    q = np.empty((len(src), 16, 16), np.uint8)
    _choose_levels(q, dst, src, src * src if importance is None else importance)
    rows = q.reshape(-1, 2, 4, 32)  # two halves of four rows of 32 weights
    low, top = rows & 15, rows >> 4
    dst[:, :128] = (low[:, :, :2] | low[:, :, 2:] << 4).reshape(-1, 128)
    dst[:, 128:192] = two_bit_planes(top)


Q6_K = Quant(dtype=DTYPES["Q6_K"], decode=_decode_q6_k, pack=pack_q6_k, fit=pack_q6_k)


def _decode_q3_k(block: Block) -> None:
    top = block.bytes(104, 4)
    first, second, third, fourth = (block.bits(top, 2 * i, 2, to=4) for i in range(4))
    high = block.join(block.join(first, second), block.join(third, fourth))
    s = block.minus(block.either(block.nibbles(96, 8), high), 32)
    scales = block.times(block.floats(s), block.f16(108))
    third_bits = block.bytes(0)
    for i in range(8):
        q = block.bits(block.bytes(32 + i // 4 * 32), 2 * (i % 4), 2)
        q = block.minus(block.either(q, block.bits(third_bits, i, 1, to=2)), 4)
        block.add_two((block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)), q, 32 * i, 4)


@exact
def _improve(q, x, w, sum_xq, sum_q2):
    """Replace each level q + 4 by the best one for the other levels; returns the new sums, and
    whether a level has changed."""
    changed = False
    for j in range(16):
        level = np.float32(np.int32(q[j]) - np.int32(4))
        rest_xq = sum_xq - w[j] * x[j] * level
        if rest_xq > _ZERO:
            rest_q2 = sum_q2 - w[j] * level * level
            new = clip(x[j] * rest_q2 / rest_xq, 4)
            if new + 4 != np.int32(q[j]):
                level = np.float32(new)
                rest_xq += w[j] * x[j] * level
                rest_q2 += w[j] * level * level
                better = rest_xq * rest_xq * sum_q2 > sum_xq * sum_xq * rest_q2
                if rest_q2 > _ZERO and better:
                    q[j] = new + 4
                    sum_xq, sum_q2, changed = rest_xq, rest_q2, True
    return sum_xq, sum_q2, changed


@exact
def _fit_by_steps(q, x, w):
    """The scale of x ≈ scale·(q − 4), 16 weights; q is written."""
    peak = extreme(x)
    if abs(peak) < _TINY:
        clear(q)
        return _ZERO
    sum_xq, sum_q2 = round_levels(q, x, w, np.float32(-4) / peak, 4)
    for _ in range(5):
        sum_xq, sum_q2, changed = _improve(q, x, w, sum_xq, sum_q2)
        if not changed:
            break
    return sum_xq / sum_q2 if sum_q2 > _ZERO else _ZERO


@exact
def _round_scales(s, scales):
    """s + 32 of 16 scales, and d."""
    peak = extreme(scales)
    if peak == _ZERO:
        clear(s)
        return _ZERO
    per_step = np.float32(-32) / peak
    for i in range(16):
        byte = nearest_int(per_step * scales[i]) & 255  # as C's int8
        s[i] = max(-32, min(31, byte - 256 if byte > 127 else byte)) + 32
    return np.float32(1) / per_step


@exact
def _choose_three_bits(q, s, dst, src, weights, by_importance):
    """Write d of each block, its levels q + 4 to q, uint8 (n_blocks, 16, 16), and s + 32 to s."""
    trial = np.empty(16, np.uint8)
    scales, counts = np.empty(16, np.float32), np.empty(16, np.float32)
    for b in range(src.shape[0]):
        for i in range(16):
            x, w = src[b, 16 * i : 16 * i + 16], weights[b, 16 * i : 16 * i + 16]
            if by_importance:
                scales[i] = fit_levels(q[b, i], x, w, trial, 4)
                counts[i] = total(w)
            else:
                scales[i] = _fit_by_steps(q[b, i], x, w)
        if by_importance:
            d = put_f16(dst, b, 108, fit_levels(s[b], scales, counts, trial, 32))
        else:
            d = put_f16(dst, b, 108, _round_scales(s[b], scales))
        for i in range(16):
            scale = d * np.float32(np.int32(s[b, i]) - np.int32(32))
            _round_again(q[b, i], src[b, 16 * i : 16 * i + 16], scale, 4)


def pack_q3_k(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    q, s = np.empty((len(src), 16, 16), np.uint8), np.empty((len(src), 16), np.uint8)
    weights = src * src if importance is None else weights_of(src, importance, 2)
    _choose_three_bits(q, s, dst, src, weights, importance is not None)
    dst[:, :32] = np.packbits(q.reshape(-1, 8, 32) >> 2, axis=1, bitorder="little")[:, 0]
    dst[:, 32:96] = two_bit_planes(q)
    low, high = s & 15, s >> 4
    dst[:, 96:104] = low[:, :8] | low[:, 8:] << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    dst[:, 104:108] = np.bitwise_or.reduce(high.reshape(-1, 4, 4) << shifts, axis=1)


Q3_K = Quant(dtype=DTYPES["Q3_K"], decode=_decode_q3_k, pack=pack_q3_k, fit=pack_q3_k)
