"""Float32 functions in plain arithmetic. LLVM compiles loops over them to vector code.

exp32(x)      e^x, at most 2 ulp; 0 below -87.3, inf above 88.37, NaN kept
sigmoid32(x)  1 / (1 + e^-x)
tanh32(x)     1 - 2 / (1 + e^2x), odd, with the series x - x³/3 + … near 0
row_max(x)    the largest of one or more numbers
dot(a, b)     Σ a_i b_i over the elements of a, in lanes; b may have more
fill(a, v)    every element of a = v
"""

import numpy as np

from pyggml.jit import kernel

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)  # 9 bits, so that n · _LN2_HIGH is exact (Cody and Waite)
_LN2_LOW = np.float32(-2.12194440e-4)
_LOWEST = np.float32(-87.3)
_HIGHEST = np.float32(88.37)
_ONE = np.float32(1)
_TWO = np.float32(2)
_HALF = np.float32(0.5)
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


@kernel
def exp32(x):
    inside = min(max(x, _LOWEST), _HIGHEST)
    n = np.floor(inside * _LOG2_E + _HALF)
    r = inside - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    power = np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)  # 2^n
    y = (p * r * r + r + _ONE) * power
    y = np.float32(0) if x < _LOWEST else y
    y = np.float32(np.inf) if x > _HIGHEST else y
    return x if x != x else y


@kernel
def sigmoid32(x):
    return _ONE / (_ONE + exp32(-x))


@kernel
def tanh32(x):
    s = x * x
    near = x * (_ONE + s * (_T1 + s * (_T2 + s * (_T3 + s * _T4))))
    far = _ONE - _TWO / (_ONE + exp32(_TWO * x))
    return near if s < np.float32(0.1) else far


@kernel
def row_max(x):
    """Compares integers of the same order as the floats: LLVM vectorises the maximum of integers,
    not of floats."""
    bits = x.view(np.int32)
    key = np.int32(-0x80000000)
    for j in range(bits.size):
        key = max(key, bits[j] ^ ((bits[j] >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)


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
