"""Floats of 4 bits (E2M1) with scales of 8 bits:  x = d·q.

q is twice the E2M1 number, so that it is whole: 0, 1, 2, 3, 4, 6, 8, 12 for nibbles 0 to 7, and
their negatives for 8 to 15. d is half the scale.

MXFP4   17 bytes for 32: e, 16 bytes; byte j holds weight j (low 4 bits) and j+16 (high); the scale
        is 2^(e−127) (OCP Microscaling Formats 1.0, E8M0)
NVFP4   36 bytes for 64: 4 scales with 4 exponent and 3 fraction bits (bias 7, no sign; 0x7F is 0),
        32 bytes; 8 of them for each sub-block of 16, byte j holding weight j and j+8
"""

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import exact
from pyggml.quants.base import BY_LARGEST, Quant
from pyggml.quants.bits import extreme, truncate
from pyggml.quants.layout import Block

# q of each nibble.
_TABLE = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]


@exact
def _value(nibble):
    """q of a nibble (int32), in arithmetic: LLVM vectorises it, but not a look-up in a table.

    Steps between magnitudes are 1 up to 4, then 2, then 4.
    """
    m = nibble & np.int32(7)
    twice = max(m - np.int32(4), np.int32(0))
    q = m + twice + max(m - np.int32(6), np.int32(0)) * np.int32(2)
    return -q if nibble & np.int32(8) else q


@exact
def _nearest(v, d):
    """The nibble whose d·q is nearest to v; the first of equals."""
    best, least = np.int32(0), abs(v)
    for i in range(1, 16):
        error = abs(np.float32(_value(np.int32(i))) * d - v)
        if error < least:
            best, least = np.int32(i), error
    return best


@exact
def _half_power(e):
    """2^(e−128) for e from 0 to 255; the lowest two are subnormal."""
    if e < 2:
        return np.uint32(np.uint32(0x00200000) << np.uint32(e)).view(np.float32)
    return np.uint32(np.uint32(e - 1) << np.uint32(23)).view(np.float32)


def _decode_mxfp4(block: Block) -> None:
    block.add(block.half_e8m0(0), block.lookup(block.nibbles(1), _TABLE))


@exact
def _pack_mxfp4(dst, src):
    for b in range(src.shape[0]):
        largest = abs(extreme(src[b]))
        e = np.int32(0)
        if largest > 0:
            # In float64 and rounded: log2f of libm, which rounds up just below a power of two.
            # Below 2⁻¹²⁵ the byte wraps around, and all levels become 0.
            power = np.floor(np.float32(np.log2(np.float64(largest))))
            e = (np.int32(power) + np.int32(125)) & np.int32(255)
        d = _half_power(e)
        dst[b, 0] = np.uint8(e)
        for j in range(16):
            first, second = _nearest(src[b, j], d), _nearest(src[b, 16 + j], d)
            dst[b, 1 + j] = np.uint8(first | (second << 4))


MXFP4 = Quant(dtype=DTYPES["MXFP4"], decode=_decode_mxfp4, pack=_pack_mxfp4, fit=BY_LARGEST)


@exact
def _half_scale(s):
    """Half the value of an NVFP4 scale (int32)."""
    exponent, fraction = (s >> 3) & 15, np.float32(s & 7)
    if s == 0x7F:
        return np.float32(0)
    if exponent == 0:
        return fraction * np.float32(2.0**-10)
    power = np.uint32(np.uint32(exponent - 8 + 127) << np.uint32(23)).view(np.float32)
    return (np.float32(1) + fraction * np.float32(0.125)) * power


@exact
def _scale_bits(v):
    """The NVFP4 scale nearest to v ≥ 0; ties away from zero, 448 for v above 248, as in ggml."""
    v = np.float32(min(v, np.float32(448)))
    bits = v.view(np.uint32)
    exponent = np.int32(bits >> np.uint32(23)) - np.int32(120)
    if exponent <= 0:
        return min(truncate(v * np.float32(512) + np.float32(0.5)), np.int32(7))
    rounded = (bits + np.uint32(1 << 19)) >> np.uint32(20)  # exponent and 3 bits of the fraction
    scale = np.int32(rounded) - np.int32(120 << 3)
    return scale if scale < 15 << 3 else np.int32(0x7E)


def _decode_nvfp4(block: Block) -> None:
    bits = block.bits(block.except_for(block.fields(0, 4, 8), 0x7F), 0, 7, to=7)  # as a float16
    scales = block.times(block.half(bits), block.constant(2.0**7))
    for i in range(2):
        nibbles = block.join(*(block.nibbles(4 + 16 * i + 8 * n, 8) for n in range(2)))
        both = block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)
        block.add_two(both, block.lookup(nibbles, _TABLE), 32 * i, 12)


@exact
def _pack_nvfp4(dst, src):
    for b in range(src.shape[0]):
        for i in range(4):
            x = src[b, 16 * i : 16 * i + 16]
            scale = _scale_bits(np.float32(abs(extreme(x)) / np.float32(6)))
            d = _half_scale(scale)
            dst[b, i] = np.uint8(scale)
            for j in range(8):
                first, second = _nearest(x[j], d), _nearest(x[8 + j], d)
                dst[b, 4 + 8 * i + j] = np.uint8(first | (second << 4))


NVFP4 = Quant(
    dtype=DTYPES["NVFP4"],
    decode=_decode_nvfp4,
    pack=_pack_nvfp4,
    fit=BY_LARGEST,
    limit=448.0 * 6.0,
    direct=False,
)
