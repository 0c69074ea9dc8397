"""Formulas of one number that several families use, float32."""

import math

import numpy as np

from pyggml.backends.cuda.code import ptx
from pyggml.backends.cuda.code.jit import device

ZERO, HALF, ONE, TWO, THREE = (np.float32(v) for v in (0, 0.5, 1, 2, 3))
QUICK = np.float32(1.702)
LOG2_E = np.float32(math.log2(math.e))
_CUBE = np.float32(0.044715)
_TWICE = np.float32(2 * math.sqrt(2 / math.pi))  # 1 + tanh(u) = 2 · s(2u), without cancellation
_MINUS_ROOT_HALF = np.float32(-math.sqrt(0.5))
_DENSITY = np.float32(1 / math.sqrt(2 * math.pi))


@device
def short_exp(x):
    """eˣ in two instructions. Its relative error is at most 2⁻²² + |x| · 2⁻²³."""
    return ptx.power_of_two(x * LOG2_E)


@device
def sigmoid(x):
    return ONE / (ONE + math.exp(-x))


@device
def relu(x):
    return max(x, ZERO)


@device
def silu(x):
    return x * sigmoid(x)


@device
def silu_slope(x):
    s = sigmoid(x)
    return s * (ONE + x * (ONE - s))


@device
def gelu(x):
    return x * sigmoid(_TWICE * x * (ONE + _CUBE * x * x))


@device
def gelu_slope(x):
    s = sigmoid(_TWICE * x * (ONE + _CUBE * x * x))
    inner = _TWICE * (ONE + THREE * _CUBE * x * x)
    return s * (ONE + x * (ONE - s) * inner)


@device
def gelu_quick(x):
    return x * sigmoid(QUICK * x)


@device
def normal(x):
    """Φ(x) = erfc(−x / √2) / 2; 1 + erf would lose all digits for x far below 0."""
    return HALF * math.erfc(x * _MINUS_ROOT_HALF)


@device
def gelu_erf(x):
    return x * normal(x)


@device
def gelu_erf_slope(x):
    return normal(x) + x * _DENSITY * math.exp(-HALF * x * x)
