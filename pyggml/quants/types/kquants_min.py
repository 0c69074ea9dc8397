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
best s and m are rounded, by importance fitted as well, then every q is chosen again. The error of a
fit is a sum of squares; without importance, in Q2_K, of absolute values.
"""

from typing import Any

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import Quant
from pyggml.quants.bits import nearest_int, put_f16, two_bit_planes
from pyggml.quants.layout import Block
from pyggml.quants.packers.fits import Given, fit_above, fit_from, total, weights_of

_ZERO = np.float32(0)


@exact
def _count_alone(w, x):
    """w = |x| plus the root of the mean of x² over each sub-block of 32."""
    for b in range(x.shape[0]):
        for start in range(0, 256, 32):
            squares = _ZERO
            for j in range(start, start + 32):
                squares += x[b, j] * x[b, j]
            root = np.sqrt(squares / np.float32(32))
            for j in range(start, start + 32):
                w[b, j] = root + abs(x[b, j])


@exact
def _round_scales(s, values, s_max):
    """s = round(s_max·values/largest), 0 to s_max; returns the largest by s_max."""
    largest = _ZERO
    for v in values:
        largest = max(largest, v)
    per_step = np.float32(s_max) / largest if largest > _ZERO else _ZERO
    for i in range(values.size):
        s[i] = min(s_max, nearest_int(per_step * values[i]) & 255)
    return largest / np.float32(s_max)


@exact
def _choose(q, s, m, dst, src, weights, way):
    """Write d and dmin of each block to dst, its levels to q (n_blocks, n_sub, size), s and m to s,
    m (n_blocks, n_sub), all uint8. way: the largest level and s, where d is, the trials of a fit,
    whether its error is squared, whether scales are fitted too."""
    q_max, s_max, d_at, trials, squared, by_importance = way
    n_sub, size = q.shape[1], q.shape[2]
    trial, fitted = np.empty(size, np.uint8), np.empty((3, n_sub), np.float32)
    scales, minima, counts = fitted[0], fitted[1], fitted[2]
    for b in range(src.shape[0]):
        for i in range(n_sub):
            x, w = src[b, size * i : size * i + size], weights[b, size * i : size * i + size]
            scales[i], minima[i] = fit_from(q[b, i], x, w, trial, q_max, trials, squared)
            counts[i] = total(w)
        if by_importance:
            d = fit_above(s[b], scales, counts, s_max)
            dmin = fit_above(m[b], minima, counts, s_max)
        else:
            d = _round_scales(s[b], scales, s_max)
            dmin = _round_scales(m[b], minima, s_max)
        d, dmin = put_f16(dst, b, d_at, d), put_f16(dst, b, d_at + 2, dmin)
        for i in range(n_sub):
            scale, below = d * np.float32(s[b, i]), dmin * np.float32(m[b, i])
            if scale != _ZERO:
                for j in range(size):
                    level = nearest_int((src[b, size * i + j] + below) / scale)
                    q[b, i, j] = max(0, min(q_max, level))


_WEIGHED = (-0.9, 0.05, 36)  # the trials of a fit by importance


def _choose_levels(
    dst: np.ndarray, src: np.ndarray, weights: np.ndarray, n_sub: int, *way: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Levels of sub-blocks, and their s and m; d and dmin are written."""
    s, m = (np.empty((len(src), n_sub), np.uint8) for _ in range(2))
    q = np.empty((len(src), n_sub, 256 // n_sub), np.uint8)
    _choose(q, s, m, dst, src, weights, way)
    return q, s, m


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


def _pack_eight(
    dst: np.ndarray, src: np.ndarray, importance: Given, q_max: int, trials: tuple
) -> np.ndarray:
    """Write all but the fifth bits; returns the levels."""
    if importance is None:
        weights = np.empty_like(src)
        _count_alone(weights, src)
    else:
        weights, trials = weights_of(src, importance, 2), _WEIGHED
    q, s, m = _choose_levels(
        dst, src, weights, 8, q_max, 63, 0, trials, True, importance is not None
    )
    dst[:, 4:8] = s[:, :4] | s[:, 4:] >> 4 << 6
    dst[:, 8:12] = m[:, :4] | m[:, 4:] >> 4 << 6
    dst[:, 12:16] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    low = q & 15
    dst[:, -128:] = (low[:, 0::2] | low[:, 1::2] << 4).reshape(-1, 128)
    return q


def pack_q4_k(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    _pack_eight(dst, src, importance, 15, (-1.0, 0.1, 20))


Q4_K = Quant(dtype=DTYPES["Q4_K"], decode=_decode_q4_k, pack=pack_q4_k, fit=pack_q4_k)


def _decode_q5_k(block: Block) -> None:
    scales = _decode_scales(block)
    fifth = block.bytes(16)
    for i in range(8):
        q = block.bits(block.bytes(48 + i // 2 * 32), i % 2 * 4, 4)
        q = block.either(q, block.bits(fifth, i, 1, to=4))
        block.add(block.lane(scales, i), q, 32 * i)


def pack_q5_k(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    q = _pack_eight(dst, src, importance, 31, (-0.5, 0.1, 15))
    dst[:, 16:48] = np.packbits(q >> 4, axis=1, bitorder="little")[:, 0]


Q5_K = Quant(dtype=DTYPES["Q5_K"], decode=_decode_q5_k, pack=pack_q5_k, fit=pack_q5_k)


def _decode_q2_k(block: Block) -> None:
    both = block.bytes(0, 16)
    s, m = (block.floats(block.bits(both, first, 4)) for first in (0, 4))
    scales = block.times(s, block.f16(80))
    block.add_minima(block.times(m, block.negative(block.f16(82))))
    for i in range(8):
        q = block.bits(block.bytes(16 + i // 4 * 32), 2 * (i % 4), 2)
        block.add_two((block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)), q, 32 * i, 3)


def pack_q2_k(
    dst: np.ndarray, src: np.ndarray, importance: Given = None, _means: Given = None
) -> None:
    if importance is None:
        weights, trials = abs(src), (-0.5, 0.1, 15)
    else:
        weights, trials = weights_of(src, importance, 1), _WEIGHED
    by_importance = importance is not None
    q, s, m = _choose_levels(dst, src, weights, 16, 3, 15, 80, trials, by_importance, by_importance)
    dst[:, :16] = s | m << 4
    dst[:, 16:80] = two_bit_planes(q)


Q2_K = Quant(dtype=DTYPES["Q2_K"], decode=_decode_q2_k, pack=pack_q2_k, fit=pack_q2_k)
