"""GELU and its approximations; s is the sigmoid. Of F16 and BF16 too (Op.halves).

gelu         x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), Hendrycks and Gimpel, arXiv:1606.08415
gelu_quick   x · s(1.702 x)
gelu_erf     x · Φ(x), Φ the normal distribution
"""

import math

import numpy as np

from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import sigmoid32
from pyggml.ops.activation.activation import back_op, sigmoid_ref, silu_back
from pyggml.ops.arithmetic.arith import scale
from pyggml.ops.arithmetic.unary import draws, unary_op
from pyggml.ops.strips import strips

_ONE, _HALF, _THREE = np.float32(1), np.float32(0.5), np.float32(3)
_QUICK = np.float32(1.702)
_CUBE = np.float32(0.044715)
_TWICE = np.float32(2 * math.sqrt(2 / math.pi))  # 1 + tanh(u) = 2 · s(2u), without cancellation
_MINUS_ROOT_HALF = np.float32(-math.sqrt(0.5))
_DENSITY = np.float32(1 / math.sqrt(2 * math.pi))


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), F32 (ggml's unary GELU)."""
    return GELU(x)


def gelu_back(x: Tensor, dy: Tensor) -> Tensor:
    """d(loss)/dx of gelu, given dy = d(loss)/dy; all of one shape."""
    return GELU_BACK(x, dy)


@parallel
def _gelu(y, x):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            v = x[r, c]
            y[r, c] = v * sigmoid32(_TWICE * v * (_ONE + _CUBE * v * v))


def _gelu_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _gelu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · gelu'(x)"""
    return (gelu_back(node.src[0], dy),)


@parallel
def _gelu_back(dx, x, dy):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            v = x[r, c]
            s = sigmoid32(_TWICE * v * (_ONE + _CUBE * v * v))
            inner = _TWICE * (_ONE + _THREE * _CUBE * v * v)
            dx[r, c] = dy[r, c] * s * (_ONE + v * (_ONE - s) * inner)


def _gelu_back_ref(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    c = math.sqrt(2 / math.pi)
    t = np.tanh(c * (x + 0.044715 * x**3))
    return np.asarray(dy * 0.5 * (1 + t + x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)))


GELU = unary_op("gelu", GGMLUnaryOp.GELU, _gelu, _gelu_ref, _gelu_grad, draws(0, 4), strips)
GELU_BACK = back_op("gelu_back", GGMLOp.CUSTOM, _gelu_back, _gelu_back_ref, draws(0, 4), strips)


def gelu_quick(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x), F32 (ggml's unary GELU_QUICK)."""
    return GELU_QUICK(x)


@kernel
def _gelu_quick(y, x):
    for i in range(x.size):
        y[i] = x[i] * sigmoid32(_QUICK * x[i])


def _gelu_quick_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * sigmoid_ref(1.702 * x))


def _gelu_quick_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · silu'(1.702 x)

    This holds since y = silu(z) / 1.702 with z = 1.702 x.
    """
    return (silu_back(scale(node.src[0], float(_QUICK)), dy),)


GELU_QUICK = unary_op(
    "gelu_quick",
    GGMLUnaryOp.GELU_QUICK,
    _gelu_quick,
    _gelu_quick_ref,
    _gelu_quick_grad,
    draws(0, 4),
)


def gelu_erf(x: Tensor) -> Tensor:
    """x · Φ(x) with the normal distribution's Φ, F32 (ggml's unary GELU_ERF)."""
    return GELU_ERF(x)


@kernel
def _phi32(x):
    """Φ(x) = erfc(−x / √2) / 2; 1 + erf would lose all digits for x far below 0."""
    return _HALF * np.float32(math.erfc(x * _MINUS_ROOT_HALF))


@kernel
def _gelu_erf(y, x):
    for i in range(x.size):
        y[i] = x[i] * _phi32(x[i])


def _phi(x: np.ndarray) -> np.ndarray:
    """Φ(x) = erfc(−x / √2) / 2."""
    erfc = np.vectorize(math.erfc, otypes=[float])
    return np.asarray(0.5 * erfc(-x * math.sqrt(0.5)))


def _gelu_erf_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * _phi(x))


def _gelu_erf_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (Φ(x) + x · φ(x))"""
    return (GELU_ERF_BACK(node.src[0], dy),)


@kernel
def _gelu_erf_back(dx, x, dy):
    for i in range(x.size):
        v = x[i]
        dx[i] = dy[i] * (_phi32(v) + v * _DENSITY * np.exp(-_HALF * v * v))


def _gelu_erf_back_ref(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return np.asarray(dy * (_phi(x) + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)))


GELU_ERF = unary_op(
    "gelu_erf", GGMLUnaryOp.GELU_ERF, _gelu_erf, _gelu_erf_ref, _gelu_erf_grad, draws(0, 4)
)
GELU_ERF_BACK = back_op(
    "gelu_erf_back", GGMLOp.CUSTOM, _gelu_erf_back, _gelu_erf_back_ref, draws(0, 4)
)
