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
the `gguf` package, at the first use of a type.

Of a shifted point the table has eighths, behind the points shifted up those shifted down: so the
weights of IQ1 are whole numbers too. Every product of scales and q is exact in float32.
"""

from functools import partial
from typing import Any

import numpy as np

from pyggml.graph.dtypes import DTYPES
from pyggml.quants.base import F16_LIMIT, NoPack, Pack, PackWeighted, Quant
from pyggml.quants.layout import EVEN_SIGNS, Block, ByteTable, Decoder
from pyggml.quants.packers.grid_points import numbers_of
from pyggml.quants.packers.grid_signed import (
    pack_iq2_s,
    pack_iq2_xs,
    pack_iq2_xxs,
    pack_iq3_s,
    pack_iq3_xxs,
)
from pyggml.quants.packers.grid_ternary import pack_iq1_m, pack_iq1_s

_IQ2_XXS, _IQ2_XS, _IQ2_S = (
    ByteTable(8, partial(numbers_of, name)) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S")
)
_IQ3_XXS, _IQ3_S = (ByteTable(4, partial(numbers_of, name)) for name in ("IQ3_XXS", "IQ3_S"))


def _shifted_points() -> np.ndarray:
    """The points of IQ1_S and IQ1_M, in eighths, shifted up by one, then down."""
    points = 8 * numbers_of("IQ1_S")
    return np.concatenate([points + 1, points - 1])


_IQ1 = ByteTable(8, _shifted_points)

# The scale is at most eight times the largest weight, and d an 15th of it.
_IQ1_LIMIT = 100000.0
_NO_PACK = NoPack("its points are chosen by the importance of columns, of which none is given")


def _scales(block: Block, s: Any, d: Any, factor: float) -> Any:
    """factor · d · (2s + 1) for ints s below 16."""
    odd = block.minus(block.bits(s, 0, 4, to=1), -1)
    return block.times(block.times(block.floats(odd), d), block.constant(factor))


def _two_of(block: Block, scales: Any, i: int) -> tuple[Any, Any]:
    return block.lane(scales, 2 * i), block.lane(scales, 2 * i + 1)


def _decode_iq2_xxs(block: Block) -> None:
    d = block.f16(0)
    for i in range(8):
        word = 6 + 8 * i
        q = block.points(block.fields(2 + 8 * i, 4, 8), _IQ2_XXS)
        q = block.negate(q, block.points(block.fields(word, 4, 7, 4), EVEN_SIGNS))
        block.add(_scales(block, block.lane(block.fields(word, 4, 7), 4), d, 0.125), q, 32 * i)


def _decode_iq2_xs(block: Block) -> None:
    scales = _scales(block, block.fields(66, 8, 4), block.f16(0), 0.125)
    for i in range(8):
        words = block.fields(2 + 8 * i, 8, 16)
        q = block.points(block.bits(words, 0, 9), _IQ2_XS)
        q = block.negate(q, block.points(block.bits(words, 9, 7), EVEN_SIGNS))
        block.add_two(_two_of(block, scales, i), q, 32 * i, 43)


def _decode_iq2_s(block: Block) -> None:
    scales = _scales(block, block.fields(74, 8, 4), block.f16(0), 0.125)
    for i in range(8):
        top = block.bits(block.fields(66 + i, 1, 2), 0, 2, to=8)
        q = block.points(block.either(block.fields(2 + 4 * i, 4, 8), top), _IQ2_S)
        q = block.negate(q, block.flags(34 + 4 * i, 255))
        block.add_two(_two_of(block, scales, i), q, 32 * i, 43)


def _decode_iq3_xxs(block: Block) -> None:
    d = block.f16(0)
    for i in range(8):
        word = 66 + 4 * i
        q = block.points(block.fields(2 + 8 * i, 8, 8), _IQ3_XXS)
        q = block.negate(q, block.points(block.fields(word, 4, 7, 4), EVEN_SIGNS))
        block.add(_scales(block, block.lane(block.fields(word, 4, 7), 4), d, 0.25), q, 32 * i)


def _decode_iq3_s(block: Block) -> None:
    scales = _scales(block, block.fields(106, 4, 4), block.f16(0), 1.0)
    for i in range(8):
        top = block.bits(block.fields(66 + i, 1, 1), 0, 1, to=8)
        q = block.points(block.either(block.fields(2 + 8 * i, 8, 8), top), _IQ3_S)
        q = block.negate(q, block.flags(74 + 4 * i, 255))
        block.add(block.lane(scales, i), q, 32 * i)


def _decode_iq1_s(block: Block) -> None:
    d = block.f16(0)
    for i in range(8):
        word = block.fields(34 + 2 * i, 2, 3)  # four of top bits, s, whether they are shifted down
        top = block.bits(block.fields(34 + 2 * i, 2, 3, 4), 0, 3, to=8)
        index = block.either(top, block.bits(block.lane(word, 5), 0, 1, to=11))
        index = block.either(index, block.fields(2 + 4 * i, 4, 8))
        scale = _scales(block, block.lane(word, 4), d, 0.125)
        block.add(scale, block.points(index, _IQ1), 32 * i)


def _decode_iq1_m(block: Block) -> None:
    words = block.fields(48, 8, 16)
    a, b, c, d = (block.bits(block.lane(words, i), 12, 4, to=4 * i) for i in range(4))
    whole = block.half(block.either(block.either(a, b), block.either(c, d)))
    for i in range(8):
        extra = block.bits(block.fields(32 + 2 * i, 2, 4), 0, 4, to=8)
        q = block.points(block.either(block.fields(4 * i, 4, 8), extra), _IQ1)
        word, first = block.lane(words, i // 2), 6 * (i % 2)
        s, t = (block.bits(word, at, 3) for at in (first, first + 3))
        scales = _scales(block, s, whole, 0.125), _scales(block, t, whole, 0.125)
        block.add_two(scales, q, 32 * i, 9)


def _declare(
    name: str, decode: Decoder, pack: Pack | NoPack, fit: PackWeighted, limit: float = F16_LIMIT
) -> Quant:
    return Quant(dtype=DTYPES[name], decode=decode, pack=pack, fit=fit, limit=limit, direct=False)


IQ2_XXS = _declare("IQ2_XXS", _decode_iq2_xxs, _NO_PACK, pack_iq2_xxs)
IQ2_XS = _declare("IQ2_XS", _decode_iq2_xs, _NO_PACK, pack_iq2_xs)
IQ2_S = _declare("IQ2_S", _decode_iq2_s, pack_iq2_s, pack_iq2_s)
IQ3_XXS = _declare("IQ3_XXS", _decode_iq3_xxs, pack_iq3_xxs, pack_iq3_xxs)
IQ3_S = _declare("IQ3_S", _decode_iq3_s, pack_iq3_s, pack_iq3_s)
IQ1_S = _declare("IQ1_S", _decode_iq1_s, _NO_PACK, pack_iq1_s, _IQ1_LIMIT)
IQ1_M = _declare("IQ1_M", _decode_iq1_m, pack_iq1_m, pack_iq1_m, _IQ1_LIMIT)
