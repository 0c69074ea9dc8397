"""The weights of types without a decoder: formulas of one weight, by type.

The layouts stand in pyggml.quants (`few_bits`, `fp4`, `iq_grids`, `kquants_min`, `kquants_sym`).
Tests hold each of these against the CPU's unpacker, bit for bit. The grids of IQ1 to IQ3 are read
from the `gguf` package when a type is first met, as they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.code.ptx import as_float, load_half, load_short


def _device(make: Callable[[], Any]) -> Callable[[], Any]:
    """A factory of a function as a factory of a device function."""
    return lambda: device(make())


def _q8_1() -> Any:
    def weight(raw, at, j):
        q = (np.int32(raw[at + 4 + j]) ^ 128) - 128
        return load_half(raw, at) * np.float32(q)

    return weight


def _q2_k() -> Any:
    def weight(raw, at, j):
        s = np.int32(raw[at + j // 16])
        q = (np.int32(raw[at + 16 + 32 * (j // 128) + j % 32]) >> (2 * (j % 128 // 32))) & 3
        scale = load_half(raw, at + 80) * np.float32(s & 15)
        return scale * np.float32(q) - load_half(raw, at + 82) * np.float32(s >> 4)

    return weight


def _q3_k() -> Any:
    def weight(raw, at, j):
        i = j // 16
        low = (np.int32(raw[at + 96 + i % 8]) >> (4 * (i // 8))) & 15
        high = (np.int32(raw[at + 104 + i % 4]) >> (2 * (i // 4))) & 3
        q = (np.int32(raw[at + 32 + 32 * (j // 128) + j % 32]) >> (2 * (j % 128 // 32))) & 3
        q += ((np.int32(raw[at + j % 32]) >> (j // 32)) & 1) << 2
        scale = load_half(raw, at + 108) * np.float32((low | (high << 4)) - 32)
        return scale * np.float32(q - 4)

    return weight


def _q1_0() -> Any:
    def weight(raw, at, j):
        d = load_half(raw, at)
        return d if (np.int32(raw[at + 2 + j // 8]) >> (j % 8)) & 1 else -d

    return weight


def _q2_0() -> Any:
    def weight(raw, at, j):
        q = (np.int32(raw[at + 2 + j // 4]) >> (2 * (j % 4))) & 3
        return load_half(raw, at) * np.float32(q - 1)

    return weight


def _tq2_0() -> Any:
    def weight(raw, at, j):
        q = (np.int32(raw[at + 32 * (j // 128) + j % 32]) >> (2 * (j % 128 // 32))) & 3
        return load_half(raw, at + 64) * np.float32(q - 1)

    return weight


def _tq1_0() -> Any:
    def weight(raw, at, j):
        if j < 160:
            byte, digit = j % 32, j // 32
        elif j < 240:
            byte, digit = 32 + (j - 160) % 16, (j - 160) // 16
        else:
            byte, digit = 48 + (j - 240) % 4, (j - 240) // 4
        fraction = np.int32(raw[at + byte])
        for _ in range(digit):
            fraction = (fraction * 3) & 255
        return load_half(raw, at + 52) * np.float32(((fraction * 3) >> 8) - 1)

    return weight


def _nvfp4() -> Any:
    def weight(raw, at, j):
        s = np.int32(raw[at + j // 16])
        exponent, fraction = (s >> 3) & 15, np.float32(s & 7)
        if s == 0x7F:
            d = np.float32(0)
        elif exponent == 0:
            d = fraction * np.float32(2.0**-10)
        else:
            power = as_float(np.uint32(exponent - 8 + 127) << np.uint32(23))
            d = (np.float32(1) + fraction * np.float32(0.125)) * power
        nibble = np.int32(raw[at + 4 + 8 * (j // 16) + j % 8])
        nibble = (nibble >> (4 * (j % 16 // 8))) & 15
        m = nibble & 7  # steps between magnitudes are 1 up to 4, then 2, then 4
        q = m + max(m - 4, 0) + 2 * max(m - 6, 0)
        return d * np.float32(-q if nibble & 8 else q)

    return weight


# -- groups of 8 (or 4) weights as an index into a grid of points --------------------------------


def _points(name: str) -> np.ndarray:
    """The grid of a type: (points, 8 or 4) int8."""
    from gguf import quants

    source = getattr(quants, name)
    source.init_grid()
    width = 4 if name.startswith("IQ3") else 8
    return np.asarray(source.grid).reshape(-1, width).astype(np.int8)


@device
def _sign(bits, j):
    """−1 where bit j is 1, else 1."""
    return np.float32(1 - 2 * ((bits >> j) & 1))


@device
def _even_sign(bits, j):
    """As `_sign`; seven bits, and an eighth that makes the number of ones even."""
    parity = bits ^ (bits >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return _sign(bits | ((parity & 1) << 7), j)


@device
def _word(raw, at):
    """The uint16 at `at`, in int32."""
    return np.int32(load_short(raw, at))


@device
def _half_step(s):
    return np.float32(0.5) + np.float32(s)


def _iq2_xxs() -> Any:
    points = _points("IQ2_XXS")

    def weight(raw, at, j):
        i, k = j // 32, j // 8 % 4
        low, high = _word(raw, at + 6 + 8 * i), _word(raw, at + 8 + 8 * i)
        word = np.int64(low) | (np.int64(high) << 16)
        scale = load_half(raw, at) * _half_step(high >> 12) * np.float32(0.25)
        sign = _even_sign(np.int32((word >> (7 * k)) & 127), j % 8)
        return scale * np.float32(points[raw[at + 2 + 8 * i + k], j % 8]) * sign

    return weight


def _iq2_xs() -> Any:
    points = _points("IQ2_XS")

    def weight(raw, at, j):
        i = j // 8
        word = _word(raw, at + 2 + 2 * i)
        s = (np.int32(raw[at + 66 + i // 4]) >> (4 * (i // 2 % 2))) & 15
        scale = load_half(raw, at) * _half_step(s) * np.float32(0.25)
        return scale * np.float32(points[word & 511, j % 8]) * _even_sign(word >> 9, j % 8)

    return weight


def _iq2_s() -> Any:
    points = _points("IQ2_S")

    def weight(raw, at, j):
        i = j // 8
        top = (np.int32(raw[at + 66 + i // 4]) >> (2 * (i % 4))) & 3
        s = (np.int32(raw[at + 74 + i // 4]) >> (4 * (i // 2 % 2))) & 15
        scale = load_half(raw, at) * _half_step(s) * np.float32(0.25)
        point = points[np.int32(raw[at + 2 + i]) | (top << 8), j % 8]
        return scale * np.float32(point) * _sign(np.int32(raw[at + 34 + i]), j % 8)

    return weight


def _iq3_xxs() -> Any:
    points = _points("IQ3_XXS")

    def weight(raw, at, j):
        i, k = j // 32, j // 8 % 4
        low, high = _word(raw, at + 66 + 4 * i), _word(raw, at + 68 + 4 * i)
        word = np.int64(low) | (np.int64(high) << 16)
        scale = load_half(raw, at) * _half_step(high >> 12) * np.float32(0.5)
        sign = _even_sign(np.int32((word >> (7 * k)) & 127), j % 8)
        return scale * np.float32(points[raw[at + 2 + j // 4], j % 4]) * sign

    return weight


def _iq3_s() -> Any:
    points = _points("IQ3_S")

    def weight(raw, at, j):
        i, half = j // 8, j // 4 % 2
        top = (np.int32(raw[at + 66 + i // 4]) >> (2 * (i % 4) + half)) & 1
        s = (np.int32(raw[at + 106 + i // 8]) >> (4 * (i // 4 % 2))) & 15
        point = points[np.int32(raw[at + 2 + j // 4]) | (top << 8), j % 4]
        scale = load_half(raw, at) * np.float32(2 * s + 1)
        return scale * np.float32(point) * _sign(np.int32(raw[at + 74 + i]), j % 8)

    return weight


def _iq1_s() -> Any:
    points = _points("IQ1_S")

    def weight(raw, at, j):
        i = j // 8
        word = _word(raw, at + 34 + 2 * (i // 4))
        top = (word >> (3 * (i % 4))) & 7
        point = points[np.int32(raw[at + 2 + i]) | (top << 8), j % 8]
        shift = np.float32(-0.125) if word >> 15 else np.float32(0.125)
        scale = load_half(raw, at) * np.float32(2 * ((word >> 12) & 7) + 1)
        return scale * (np.float32(point) + shift)

    return weight


def _iq1_m() -> Any:
    points = _points("IQ1_S")

    def weight(raw, at, j):
        i = j // 8
        extra = np.int32(raw[at + 32 + i // 2]) >> (4 * (i % 2))
        point = points[np.int32(raw[at + i]) | ((extra & 7) << 8), j % 8]
        shift = np.float32(-0.125) if extra & 8 else np.float32(0.125)
        s = (_word(raw, at + 48 + 2 * (i // 8)) >> (3 * (i % 8 // 2))) & 7
        return _scattered_half(raw, at + 48) * np.float32(2 * s + 1) * (np.float32(point) + shift)

    return weight


@device
def _scattered_half(raw, at):
    """The float16 whose four nibbles, lowest first, are the top ones of four words."""
    bits = np.int32(0)
    for i in range(4):
        bits |= (_word(raw, at + 2 * i) >> 12) << (4 * i)
    magnitude = bits & 0x7FFF
    if magnitude < 0x0400:  # subnormal
        value = np.float32(magnitude) * np.float32(2.0**-24)
    elif magnitude >= 0x7C00:  # infinity, NaN
        value = as_float(np.uint32((magnitude << 13) + 0x70000000))
    else:
        value = as_float(np.uint32((magnitude << 13) + 0x38000000))
    return -value if bits & 0x8000 else value


RARE: dict[str, Callable[[], Any]] = {
    name: _device(make)
    for name, make in {
        "Q8_1": _q8_1,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q1_0": _q1_0,
        "Q2_0": _q2_0,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
        "NVFP4": _nvfp4,
        "IQ2_XXS": _iq2_xxs,
        "IQ2_XS": _iq2_xs,
        "IQ2_S": _iq2_s,
        "IQ3_XXS": _iq3_xxs,
        "IQ3_S": _iq3_s,
        "IQ1_S": _iq1_s,
        "IQ1_M": _iq1_m,
    }.items()
}
