"""One or two bits a weight and a scale d, a float16:  x = d·q with two to four values of q.

Q1_0    18 bytes for 128: d, bit j: weight j is d (1) or −d (0)
Q2_0    18 bytes for 64: d, bits 2j and 2j+1: q+1 of weight j, q from −1 to 2
TQ2_0   66 bytes for 256: 64 bytes of q+1, d; q from −1 to 1; in each half of 128 weights bits 2k
        and 2k+1 of byte j belong to weight 32k+j
TQ1_0   54 bytes for 256: groups of 32, 16 and 4 bytes with digits q+1 in base 3, d; byte j of a
        group of n bytes holds its weights j, n+j, 2n+j, … (five, in the last group four), the most
        significant first, as a fraction: ⌈digits · 256 / 243⌉, so that each multiplication by 3
        carries the next digit out
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import BY_LARGEST, Quant
from pyggml.quants.bits import clear, extreme, inverse, put_f16, round_away
from pyggml.quants.layout import Block

_INFINITY = np.float32(np.inf)


def _decode_q1_0(block: Block) -> None:
    for i in range(4):
        block.add(block.f16(0), block.minus(block.flags(2 + 4 * i, 2), 1), 32 * i)


@exact
def _pack_q1_0(dst, src):
    for b in range(src.shape[0]):
        total = np.float32(0)
        clear(dst[b])
        for j in range(128):
            total += abs(src[b, j])
            if src[b, j] >= 0:
                dst[b, 2 + j // 8] |= np.uint8(1 << (j % 8))
        put_f16(dst, b, 0, total / np.float32(128))


Q1_0 = Quant(
    dtype=DTYPES["Q1_0"],
    decode=_decode_q1_0,
    pack=_pack_q1_0,
    fit=BY_LARGEST,
    limit=65504.0,
    direct=False,
)


def _decode_q2_0(block: Block) -> None:
    for i in range(2):
        block.add(block.f16(0), block.minus(block.pairs(2 + 8 * i), 1), 32 * i)


@exact
def _pack_q2_0(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b]))
        per_level = inverse(d)
        clear(dst[b])
        put_f16(dst, b, 0, d)
        for j in range(64):
            v = src[b, j] * per_level
            # As C's conversion: if 1/d has overflowed, v is not finite and q is the lowest level.
            q = round_away(v) + np.int32(1) if abs(v) < _INFINITY else np.int32(0)
            dst[b, 2 + j // 4] |= np.uint8(max(0, min(3, q)) << (2 * (j % 4)))


Q2_0 = Quant(
    dtype=DTYPES["Q2_0"], decode=_decode_q2_0, pack=_pack_q2_0, fit=BY_LARGEST, direct=False
)


def _decode_tq2_0(block: Block) -> None:
    for i in range(8):
        q = block.bits(block.bytes(i // 4 * 32), 2 * (i % 4), 2)
        block.add(block.f16(64), block.minus(q, 1), 32 * i)


@exact
def _pack_tq2_0(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b]))
        per_level = inverse(d)
        clear(dst[b])
        put_f16(dst, b, 64, d)
        for j in range(256):
            q = (round_away(src[b, j] * per_level) + np.int32(1)) & np.int32(3)
            dst[b, 32 * (j // 128) + j % 32] |= np.uint8(q << (2 * (j % 128 // 32)))


TQ2_0 = Quant(
    dtype=DTYPES["TQ2_0"], decode=_decode_tq2_0, pack=_pack_tq2_0, fit=BY_LARGEST, direct=False
)


@exact
def _group(i):
    """Group i of a TQ1_0 block: first byte, first weight, number of bytes, digits in a byte."""
    if i == 0:
        return 0, 0, 32, 5
    if i == 1:
        return 32, 160, 16, 5
    return 48, 240, 4, 4


def _decode_tq1_0(block: Block) -> None:
    first, second, third = block.bytes(0), block.bytes(32, 16), block.bytes(48, 4)
    halves = [block.digits(second, i) for i in range(5)]
    a, b, c, d = (block.digits(third, i) for i in range(4))
    halves.append(block.join(block.join(a, b), block.join(c, d)))
    groups = [block.digits(first, i) for i in range(5)]
    groups += [block.join(*halves[i : i + 2]) for i in (0, 2, 4)]
    for i, digits in enumerate(groups):
        block.add(block.f16(52), block.minus(digits, 1), 32 * i)


@exact
def _pack_tq1_0(dst, src):
    for b in range(src.shape[0]):
        d = abs(extreme(src[b]))
        per_level = inverse(d)
        put_f16(dst, b, 52, d)
        for i in range(3):
            to, of, size, n_digits = _group(i)
            for j in range(size):
                digits = np.int32(0)
                for k in range(n_digits):
                    q = round_away(src[b, of + size * k + j] * per_level)
                    digits = digits * np.int32(3) + q + np.int32(1)
                digits *= np.int32(3) if n_digits == 4 else np.int32(1)
                dst[b, to + j] = np.uint8((digits * np.int32(256) + np.int32(242)) // np.int32(243))


TQ1_0 = Quant(
    dtype=DTYPES["TQ1_0"], decode=_decode_tq1_0, pack=_pack_tq1_0, fit=BY_LARGEST, direct=False
)
