"""Float32 functions in plain arithmetic. LLVM compiles loops over them to vector code.

exp32(x)      e^x, at most 5 ulp; 0 below -87.3, inf above 88.37, NaN kept
whole_exp32(x)  the same, inf above 88.72
expm1_32(x)   e^x - 1, at most 5 ulp
sigmoid32(x)  1 / (1 + e^-x), at most 6 ulp; 0 below -88.37
tanh32(x)     1 - 2 / (1 + e^2x), odd, with the series x - x³/3 + … near 0
softplus32(x) log(1 + e^x), at most 5 ulp
erfc32(x)     1 - erf x, at most 7 ulp; 0 above 9.3
row_max(x)    the largest of one or more numbers, by way of their keys
dot(a, b)     Σ a_i b_i over the elements of a, in lanes; b may have more
fill(a, v)    every element of a = v
"""

import numpy as np

from pyggml.jit import kernel

__all__ = [
    "dot", "erfc32", "exp32", "expm1_32", "fill", "key_of", "of_key", "plus", "row_max",
    "sigmoid32", "softplus32", "tanh32", "whole_exp32",
]  # fmt: skip

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits, so that n · _LN2_HIGH is exact (Cody and Waite)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.3)
_HIGHEST, _END = np.float32(88.37), np.float32(88.72284)  # of exp32, of float32
_ONE = np.float32(1)
_E = np.float32(2.718281828)
_TWO = np.float32(2)
LEAST_KEY = np.int32(-0x80000000)
_ZERO, _HALF = np.float32(0), np.float32(0.5)
# Minimax polynomial of (e^r - 1 - r) / r² on |r| <= ln(2)/2 (coefficients as in Cephes' expf).
_C5, _C4, _C3 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_C2, _C1, _C0 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)

# Taylor coefficients of tanh(x) / x in x².
_T1, _T2, _T3, _T4 = (np.float32(t) for t in (-1 / 3, 2 / 15, -17 / 315, 62 / 2835))


# log(1 + e) = s · (2 + 2/3 s² + …) of s = e / (2 + e) <= 1/3, fitted to 4e-9.
_L0, _L1, _L2, _L3, _L4 = (
    np.float32(c) for c in (2, 0.6666632, 0.40024651, 0.27964345, 0.28161454)
)
# erfc(z) · e^z² / t of t = 1 / (1 + z/2), fitted to 2e-8 for z from 0 to 9.4; highest power first.
_E9, _E8, _E7, _E6, _E5 = (
    np.float32(c) for c in (0.01543665, -0.13981519, 0.46643508, -0.71796747, 0.4592902)
)
_E4, _E3, _E2, _E1, _E0 = (
    np.float32(c) for c in (-0.11765248, 0.23183222, 0.23738562, 0.2829975, 0.28205786)
)
_ERFC_END, _UPPER_BITS = np.float32(10), np.uint32(0xFFFFF000)
_THIRD, _QUARTER = np.float32(1 / 3), np.float32(0.25)


@kernel
def _parts(inside):
    """(e^r - 1, n) of x = n · ln 2 + r, |r| <= ln(2)/2."""
    n = np.floor(inside * _LOG2_E + _HALF)
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    return p * r * r + r, np.int32(n)


@kernel
def _power_of_two(n):
    return np.uint32((n + np.int32(127)) << np.int32(23)).view(np.float32)


@kernel
def _power(inside):
    """e^x of x from _LOWEST to _HIGHEST."""
    less, n = _parts(inside)
    return (less + _ONE) * _power_of_two(n)


@kernel
def exp32(x):
    y = _power(min(max(x, _LOWEST), _HIGHEST))
    y = np.float32(0) if x < _LOWEST else y
    y = np.float32(np.inf) if x > _HIGHEST else y
    return x if x != x else y


@kernel
def whole_exp32(x):
    far = x > _HIGHEST
    y = exp32(x - _ONE if far else x)
    return y * _E if far else y


@kernel
def expm1_32(x):
    less, n = _parts(min(max(x, _LOWEST), _END))
    half = _power_of_two(n - np.int32(1))
    y = _TWO * (less * half + (half - _HALF))
    return np.float32(np.inf) if x > _END else y


@kernel
def sigmoid32(x):
    y = _ONE / (_ONE + _power(min(max(-x, _LOWEST), _HIGHEST)))
    return _ZERO if x < -_HIGHEST else y


@kernel
def softplus32(x):
    e = exp32(-abs(x))
    s = e / (_TWO + e)
    q = s * s
    series = (((_L4 * q + _L3) * q + _L2) * q + _L1) * q + _L0
    return max(x, _ZERO) + s * series


@kernel
def erfc32(x):
    """e^-z² is made of z's upper bits, whose square is exact, and a series of the rest."""
    z = min(abs(x), _ERFC_END)
    t = _ONE / (_ONE + _HALF * z)
    q = ((((_E9 * t + _E8) * t + _E7) * t + _E6) * t + _E5) * t + _E4
    q = (((q * t + _E3) * t + _E2) * t + _E1) * t + _E0
    upper = np.uint32(np.float32(z).view(np.uint32) & _UPPER_BITS).view(np.float32)
    d = (upper - z) * (z + upper)
    rest = _ONE + d * (_ONE + d * _HALF * (_ONE + d * _THIRD * (_ONE + d * _QUARTER)))
    tail = t * q * exp32(-upper * upper) * rest
    return _TWO - tail if x < _ZERO else tail


@kernel
def tanh32(x):
    s = x * x
    near = x * (_ONE + s * (_T1 + s * (_T2 + s * (_T3 + s * _T4))))
    far = _ONE - _TWO / (_ONE + exp32(_TWO * x))
    return near if s < np.float32(0.1) else far


@kernel
def plus(total, x):
    """total + x, in lanes where a loop adds up."""
    return total + x


@kernel
def key_of(x):
    """An integer of the same order as the float: LLVM vectorises the maximum of integers, not of
    floats."""
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@kernel
def of_key(key):
    """The float with this key."""
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


@kernel
def row_max(x):
    key = LEAST_KEY
    for j in range(x.size):
        key = max(key, key_of(x[j]))
    return of_key(key)


@kernel
def dot(a, b):
    total = np.float32(0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@kernel
def fill(a, value):
    for i in range(a.shape[0]):
        a[i] = value
