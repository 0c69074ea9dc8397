"""Groups of 8 (or 4) weights as an index into a grid of points:  x = d·s·point, with signs.

d is the scale of 256 weights, a float16; s that of a sub-block of 32 or 16, a whole number plus ½.

IQ2_XXS   66 bytes: d, 8 × (4 indices of 8 bits, uint32 of 4 × 7 bits of signs and 4 of s)
IQ2_XS    74 bytes: d, 32 × uint16 of 9 bits of index and 7 of signs, 8 bytes of two s
IQ2_S     82 bytes: d, 32 bytes of indices, 32 of signs, 8 of four times two top bits of indices,
          8 of two s
IQ3_XXS   98 bytes: d, 64 indices of 8 bits, for 4 weights each, 8 × uint32 as IQ2_XXS's
IQ3_S     110 bytes: d, 64 bytes of indices, 8 of their top bits, 32 of signs, 4 of two s
IQ1_S     50 bytes: d, 32 bytes of indices, 8 × uint16 of 4 × 3 top bits of indices, 3 bits of s,
          1 for the sign of a shift by 1/8
IQ1_M     56 bytes: 32 bytes of indices, 16 of two times 3 top bits and a shift's sign, 4 × uint16
          of 4 × 3 bits of s; their top 4 bits together are d

Seven bits give eight signs: the eighth makes the number of minus signs even. The grids come from
the `gguf` package, at the first use of a type. Every product here is exact in float32.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.jit import block_code, carray, exact
from pyggml.quants.base import F16_LIMIT, NoPack, Quant
from pyggml.quants.bits import f16_at, f16_to_float
from pyggml.quants.packers.grid_signed import pack_iq2_s, pack_iq3_s, pack_iq3_xxs
from pyggml.quants.packers.grid_ternary import pack_iq1_m

# Zeros until `_load`; constants in kernels.
_IQ2_XXS = np.zeros((256, 8), np.float32)
_IQ2_XS = np.zeros((512, 8), np.float32)
_IQ2_S = np.zeros((1024, 8), np.float32)
_IQ3_XXS = np.zeros((256, 4), np.float32)
_IQ3_S = np.zeros((512, 4), np.float32)
_IQ1_S = np.zeros((2048, 8), np.float32)

# _SIGNS[i, j] is −1 if bit j of i is 1, else 1; _EVEN_SIGNS has seven bits and their parity as the
# eighth. LLVM vectorises a product with a row of a table, but not a selection by bits.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SIGNS = 1 - 2 * _BITS.astype(np.float32)
_ODD = _BITS[:128].sum(axis=1, dtype=np.int64) % 2
_EVEN_SIGNS = _SIGNS[np.arange(128) | (_ODD << 7)]

_HALF, _QUARTER, _EIGHTH = np.float32(0.5), np.float32(0.25), np.float32(0.125)
# The scale is at most eight times the largest weight, and d an 15th of it.
_IQ1_LIMIT = 100000.0
_NO_PACK = NoPack("its points are chosen by the importance of columns, of which none is given")


@cache
def _load() -> None:
    """Fill the grids."""
    from gguf import quants

    tables = {
        quants.IQ2_XXS: _IQ2_XXS,
        quants.IQ2_XS: _IQ2_XS,
        quants.IQ2_S: _IQ2_S,
        quants.IQ3_XXS: _IQ3_XXS,
        quants.IQ3_S: _IQ3_S,
        quants.IQ1_S: _IQ1_S,
    }
    for source, table in tables.items():
        source.init_grid()
        table[:] = source.grid.reshape(table.shape)


@exact
def _word16(x, b, i):
    """The uint16 in bytes i and i + 1 of block b."""
    return np.uint32(x[b, i]) | (np.uint32(x[b, i + 1]) << np.uint32(8))


@exact
def _word32(x, b, i):
    """The uint32 in bytes i to i + 3 of block b."""
    return _word16(x, b, i) | (_word16(x, b, i + 2) << np.uint32(16))


@exact
def _nibble(byte, i):
    """The low (i = 0) or high (i = 1) 4 bits."""
    return np.float32((np.uint32(byte) >> np.uint32(4 * i)) & np.uint32(15))


@exact
def _write(y, b, start, scale, point, signs):
    """y[b, start …] = scale · point · signs, 8 of each."""
    out = y[b, start : start + 8]
    for j in range(8):
        out[j] = scale * point[j] * signs[j]


@exact
def _write_two(y, b, start, scale, first, second, signs):
    """As `_write`, with two points of 4."""
    out = y[b, start : start + 8]
    for j in range(4):
        out[j] = scale * first[j] * signs[j]
        out[4 + j] = scale * second[j] * signs[4 + j]


@block_code(ready=_load)
def _unpack_iq2_xxs(dst, src, n_blocks):
    x = carray(src, (n_blocks, 66))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(8):
            word = _word32(x, b, 6 + 8 * i)
            scale = d * (_HALF + np.float32(word >> np.uint32(28))) * _QUARTER
            for k in range(4):
                signs = _EVEN_SIGNS[(word >> np.uint32(7 * k)) & np.uint32(127)]
                _write(y, b, 32 * i + 8 * k, scale, _IQ2_XXS[x[b, 2 + 8 * i + k]], signs)


@block_code(ready=_load)
def _unpack_iq2_xs(dst, src, n_blocks):
    x = carray(src, (n_blocks, 74))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(32):
            word = _word16(x, b, 2 + 2 * i)
            scale = d * (_HALF + _nibble(x[b, 66 + i // 4], i // 2 % 2)) * _QUARTER
            signs = _EVEN_SIGNS[word >> np.uint32(9)]
            _write(y, b, 8 * i, scale, _IQ2_XS[word & np.uint32(511)], signs)


@block_code(ready=_load)
def _unpack_iq2_s(dst, src, n_blocks):
    x = carray(src, (n_blocks, 82))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(32):
            top = (np.uint32(x[b, 66 + i // 4]) >> np.uint32(2 * (i % 4))) & np.uint32(3)
            point = _IQ2_S[np.uint32(x[b, 2 + i]) | (top << np.uint32(8))]
            scale = d * (_HALF + _nibble(x[b, 74 + i // 4], i // 2 % 2)) * _QUARTER
            _write(y, b, 8 * i, scale, point, _SIGNS[x[b, 34 + i]])


@block_code(ready=_load)
def _unpack_iq3_xxs(dst, src, n_blocks):
    x = carray(src, (n_blocks, 98))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(8):
            word = _word32(x, b, 66 + 4 * i)
            scale = d * (_HALF + np.float32(word >> np.uint32(28))) * _HALF
            for k in range(4):
                signs = _EVEN_SIGNS[(word >> np.uint32(7 * k)) & np.uint32(127)]
                at = 2 + 8 * i + 2 * k
                first, second = _IQ3_XXS[x[b, at]], _IQ3_XXS[x[b, at + 1]]
                _write_two(y, b, 32 * i + 8 * k, scale, first, second, signs)


@block_code(ready=_load)
def _unpack_iq3_s(dst, src, n_blocks):
    x = carray(src, (n_blocks, 110))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(32):
            top = np.uint32(x[b, 66 + i // 4]) >> np.uint32(2 * (i % 4))
            first = _IQ3_S[np.uint32(x[b, 2 + 2 * i]) | ((top & np.uint32(1)) << np.uint32(8))]
            second = _IQ3_S[np.uint32(x[b, 3 + 2 * i]) | ((top & np.uint32(2)) << np.uint32(7))]
            s = _nibble(x[b, 106 + i // 8], i // 4 % 2)
            scale = d * (s + s + np.float32(1))
            _write_two(y, b, 8 * i, scale, first, second, _SIGNS[x[b, 74 + i]])


@exact
def _write_shifted(y, b, start, scale, point, minus):
    """y[b, start …] = scale · (point ± 1/8), 8 of each."""
    shift = -_EIGHTH if minus else _EIGHTH
    out = y[b, start : start + 8]
    for j in range(8):
        out[j] = scale * (point[j] + shift)


@block_code(ready=_load)
def _unpack_iq1_s(dst, src, n_blocks):
    x = carray(src, (n_blocks, 50))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        d = f16_at(x, b, 0)
        for i in range(32):
            word = _word16(x, b, 34 + 2 * (i // 4))
            top = (word >> np.uint32(3 * (i % 4))) & np.uint32(7)
            point = _IQ1_S[np.uint32(x[b, 2 + i]) | (top << np.uint32(8))]
            s = np.float32((word >> np.uint32(12)) & np.uint32(7))
            minus = word >> np.uint32(15)
            _write_shifted(y, b, 8 * i, d * (s + s + np.float32(1)), point, minus)


@block_code(ready=_load)
def _unpack_iq1_m(dst, src, n_blocks):
    x = carray(src, (n_blocks, 56))
    y = carray(dst, (n_blocks, 256))
    for b in range(n_blocks):
        bits = np.uint32(0)
        for i in range(4):
            bits |= (_word16(x, b, 48 + 2 * i) >> np.uint32(12)) << np.uint32(4 * i)
        d = f16_to_float(bits)
        for i in range(32):
            extra = np.uint32(x[b, 32 + i // 2]) >> np.uint32(4 * (i % 2))
            point = _IQ1_S[np.uint32(x[b, i]) | ((extra & np.uint32(7)) << np.uint32(8))]
            word = _word16(x, b, 48 + 2 * (i // 8))
            s = np.float32((word >> np.uint32(3 * (i % 8 // 2))) & np.uint32(7))
            minus = extra & np.uint32(8)
            _write_shifted(y, b, 8 * i, d * (s + s + np.float32(1)), point, minus)


IQ2_XXS = Quant(dtype=DTYPES["IQ2_XXS"], decode=_unpack_iq2_xxs, pack=_NO_PACK, limit=F16_LIMIT)
IQ2_XS = Quant(dtype=DTYPES["IQ2_XS"], decode=_unpack_iq2_xs, pack=_NO_PACK, limit=F16_LIMIT)
IQ2_S = Quant(dtype=DTYPES["IQ2_S"], decode=_unpack_iq2_s, pack=pack_iq2_s, limit=F16_LIMIT)
IQ3_XXS = Quant(dtype=DTYPES["IQ3_XXS"], decode=_unpack_iq3_xxs, pack=pack_iq3_xxs, limit=F16_LIMIT)
IQ3_S = Quant(dtype=DTYPES["IQ3_S"], decode=_unpack_iq3_s, pack=pack_iq3_s, limit=F16_LIMIT)
IQ1_S = Quant(dtype=DTYPES["IQ1_S"], decode=_unpack_iq1_s, pack=_NO_PACK, limit=_IQ1_LIMIT)
IQ1_M = Quant(dtype=DTYPES["IQ1_M"], decode=_unpack_iq1_m, pack=pack_iq1_m, limit=_IQ1_LIMIT)
