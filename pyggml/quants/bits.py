"""Common to several types: float16 and bfloat16 as bit patterns, and ggml's rounding.

f16     float16: 1 sign, 5 exponent (bias 15), 10 fraction bits
bf16    bfloat16: the upper 16 bits of a float
float   float32: 1 sign, 8 exponent (bias 127), 23 fraction bits

Kernels of other files inline these functions, so SHARED of pyggml/jit/cache.py has this file.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from pyggml.jit import JIT, exact, instruction, types


def _hide(builder: Any, n: Any) -> Any:
    """n through an empty line of assembly, which LLVM cannot see through."""
    kind = ir.FunctionType(n.type, [n.type])
    return builder.asm(kind, "", "=r,0", [n], side_effect=False)


# n, hidden from the compiler. LLVM unrolls a loop over a constant 32 before it vectorises, and then
# cannot; `range(lanes(32))` becomes vector code (with 4 bits: 3 instead of 0.6 G weights/s).
lanes: Any = instruction(types.intp(types.intp))(_hide) if JIT else int


@exact
def f16_to_float(h):
    """float16 with bits h (uint16) → float; exact, with NaN payloads. Compiles without branches."""
    u = np.uint32(h)
    sign = np.uint32((u & np.uint32(0x8000)) << np.uint32(16))
    m = np.uint32((u & np.uint32(0x7FFF)) << np.uint32(13))
    normal = np.uint32(m + np.uint32(0x38000000))  # exponent bias 127 − 15
    # Subnormal: write the fraction behind 2⁻¹⁴ and subtract 2⁻¹⁴; no float is ever subnormal here.
    raised = np.uint32(m + np.uint32(0x38800000)).view(np.float32)
    bits = normal
    if m < np.uint32(0x00800000):
        bits = np.float32(raised - np.float32(2.0**-14)).view(np.uint32)
    if m >= np.uint32(0x0F800000):  # infinity and NaN: the exponent goes from 31 to 255
        bits = np.uint32(normal + np.uint32(0x38000000))
    return np.uint32(bits | sign).view(np.float32)


@exact
def bf16_to_float(h):
    """bfloat16 with bits h (uint16) → float; exact."""
    return np.uint32(np.uint32(h) << np.uint32(16)).view(np.float32)


@exact
def float_to_bf16(f):
    """float → the bits (uint16) of the nearest bfloat16, ties to even; NaN stays NaN."""
    u = np.float32(f).view(np.uint32)
    if u & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
        return np.uint16((u >> np.uint32(16)) | np.uint32(64))
    odd = (u >> np.uint32(16)) & np.uint32(1)
    return np.uint16((u + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@exact
def float_to_f16(f):
    """float → the bits (uint16) of the nearest float16, ties to even; infinity from 65520 on."""
    u = np.float32(f).view(np.uint32)
    sign = (u >> np.uint32(16)) & np.uint32(0x8000)
    m = np.uint32(u & np.uint32(0x7FFFFFFF))
    if m > np.uint32(0x7F800000):
        h = np.uint32(0x7E00)
    elif m >= np.uint32(0x477FF000):  # 65520
        h = np.uint32(0x7C00)
    elif m < np.uint32(0x38800000):  # below 2⁻¹⁴: one unit of 0.5's fraction is the last bit, 2⁻²⁴
        shifted = np.float32(m.view(np.float32) + np.float32(0.5))
        h = np.uint32(shifted.view(np.uint32) - np.uint32(0x3F000000))
    else:
        odd = (m >> np.uint32(13)) & np.uint32(1)
        h = np.uint32(m - np.uint32(0x38000000) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    return np.uint16(sign | h)


@exact
def put_f16(x, b, i, f):
    """Write f as a little-endian float16 to bytes i and i + 1 of block b; returns its value."""
    h = float_to_f16(f)
    x[b, i] = h & np.uint16(255)
    x[b, i + 1] = h >> np.uint16(8)
    return f16_to_float(h)


@exact
def nearest_int(f):
    """f rounded to an integer, ties to even, as in ggml: by adding 1.5·2²³.

    Beyond ±2²² the result is ggml's too, the low bits of the sum: degenerate blocks get equal
    bytes.
    """
    u = np.float32(np.float32(f) + np.float32(12582912.0)).view(np.int32)
    return (u & np.int32(0x007FFFFF)) - np.int32(0x00400000)


@exact
def truncate(f):
    """f truncated to an integer; 0 for |f| ≥ 2²⁴ and NaN (from scales too small to invert)."""
    if abs(f) < np.float32(16777216.0):
        return np.int32(f)
    return np.int32(0)


@exact
def round_away(v):
    """v rounded to an integer, ties away from zero, as C's roundf; 0 if |v| ≥ 2²⁴ or v is NaN."""
    q = truncate(v)
    if np.float32(0.5) <= abs(v - np.float32(q)) < np.float32(np.inf):
        return q + np.int32(1) if v > 0 else q - np.int32(1)
    return q


@exact
def inverse(d):
    """1/d, or 0 for 0."""
    return np.float32(1) / d if d != 0 else np.float32(0)


@exact
def extreme(x):
    """The element of x (n,) with the largest magnitude, signed; the first of equals."""
    farthest = np.float32(0)
    for v in x:
        if abs(v) > abs(farthest):
            farthest = v
    return farthest


def two_bit_planes(q: np.ndarray) -> np.ndarray:
    """The low 2 bits of q of 256 weights, (n_blocks, …), as bytes (n_blocks, 64).

    In each half of 128 weights, bits 2k and 2k + 1 of byte j belong to weight 32k + j.
    """
    rows = q.reshape(-1, 2, 4, 32) & 3
    shift = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(rows << shift, axis=2).reshape(-1, 64)


@exact
def clear(out):
    """out[:] = 0 for out (n,); compiles in a fifth of the time."""
    for i in range(out.size):
        out[i] = 0


@exact
def copy(out, x):
    """out[:] = x, both (n,)."""
    for i in range(out.size):
        out[i] = x[i]
