"""Activation functions, s(x) = 1 / (1 + e^-x) the sigmoid; of F16 and BF16 too (Op.halves).

relu         max(x, 0)                leaky_relu   x, or slope · x below 0
sigmoid      s(x)                     tanh
silu         x · s(x)                 silu_back    dy · s · (1 + x · (1 - s))
softplus     log(1 + e^x)             elu          x, or e^x - 1 below 0
hardsigmoid  clamp((x + 3) / 6, 0, 1), Howard et al., arXiv:1905.02244
hardswish    x · hardsigmoid(x)
xielu        a_p·x² + beta·x  where x > 0,  else  a_n·(e^min(x, eps) − 1 − x) + beta·x;
             the expanded integral of ELU, arXiv:2411.13010, as Apertus has it
xielu_back   dy · (slope + beta); slope = 2·a_p·x  where x > 0,  a_n·(e^x − 1)  where x < eps,
             else −a_n
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import NO_SETTINGS, Memory, NoGrad, Op, Refused, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel, parallel, prange
from pyggml.jit.simd import sigmoid32, tanh32
from pyggml.kernels.kernel import cpu_kernel, flat
from pyggml.ops.arithmetic.arith import add, mul, scale, sub
from pyggml.ops.arithmetic.unary import Layout, Samples, clamp, draws, exp, sqr, step, unary_op
from pyggml.ops.expect import NAN, expect, expect_type
from pyggml.ops.strips import strips

Reference = Callable[..., np.ndarray]

_ONE, _HALF, _THREE = np.float32(1), np.float32(0.5), np.float32(3)


def back_op(
    name: str,
    ggml: GGMLOp,
    code: Callable[..., None],
    ref: Reference,
    samples: Samples,
    arrays: Layout = flat,
    refuses: Refused = NO_SETTINGS,
    check: Callable[..., None] = lambda name, **_: None,
) -> Op:
    """Declare dx_i = f(x_i, dy_i), F32; code(dx, x, dy, *params) gets arrays as `arrays` says.

    check(name, **params) raises ShapeError for the values in `refuses`.
    """

    def spec(x: Tensor, dy: Tensor, **params: float) -> Spec:
        expect_type(name, "x", x)
        expect(name, "dy", dy, x.shape)
        check(name, **params)
        return Spec(x.shape)

    def with_dy(rng: np.random.Generator) -> Iterator[Sample]:
        for s in samples(rng):
            yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)

    new = op(
        name=name,
        ggml=ggml,
        spec=spec,
        ref=ref,
        grad=NoGrad("second derivatives are out of scope"),
        samples=with_dy,
        refuses=refuses,
        memory=Memory.INPLACE,
    )
    cpu_kernel(new, arrays(code))
    return new


def sigmoid_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


# -- relu, leaky_relu ---------------------------------------------------------------------------


def relu(x: Tensor) -> Tensor:
    """max(x, 0), F32 (ggml's unary RELU)."""
    return RELU(x)


@kernel
def _relu(y, x):
    for i in range(x.size):
        y[i] = max(x[i], np.float32(0))


def _relu_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x, 0))


def _relu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy where x > 0, else 0"""
    return (mul(dy, step(node.src[0])),)


RELU = unary_op("relu", GGMLUnaryOp.RELU, _relu, _relu_ref, _relu_grad, draws(0.1, 2))


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """x, or slope · x where x < 0, F32 (ggml's LEAKY_RELU)."""
    return LEAKY_RELU(x, slope=float(slope))


@kernel
def _leaky_relu(y, x, slope):
    for i in range(x.size):
        y[i] = x[i] if x[i] > 0 else slope * x[i]


def _leaky_relu_ref(x: np.ndarray, slope: float) -> np.ndarray:
    return np.where(x > 0, x, slope * x)


def _leaky_relu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy where x > 0, else slope · dy"""
    slope = node.params["slope"]
    return (mul(dy, scale(step(node.src[0]), 1.0 - slope, slope)),)


LEAKY_RELU = unary_op(
    "leaky_relu",
    GGMLOp.LEAKY_RELU,
    _leaky_relu,
    _leaky_relu_ref,
    _leaky_relu_grad,
    draws(0.1, 2, slope=0.2),
    refuses={"slope": ()},
)

# -- sigmoid, tanh ------------------------------------------------------------------------------


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), F32 (ggml's unary SIGMOID)."""
    return SIGMOID(x)


@parallel
def _sigmoid(y, x):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = sigmoid32(x[r, c])


def _sigmoid_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (y - y²)"""
    return (mul(dy, sub(node, sqr(node))),)


SIGMOID = unary_op(
    "sigmoid", GGMLUnaryOp.SIGMOID, _sigmoid, sigmoid_ref, _sigmoid_grad, draws(0, 6), strips
)


def tanh(x: Tensor) -> Tensor:
    """tanh x, F32 (ggml's unary TANH)."""
    return TANH(x)


@parallel
def _tanh(y, x):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = tanh32(x[r, c])


def _tanh_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (1 - y²)"""
    return (mul(dy, scale(sqr(node), -1.0, 1.0)),)


TANH = unary_op("tanh", GGMLUnaryOp.TANH, _tanh, np.tanh, _tanh_grad, draws(0, 4), strips)

# -- silu ---------------------------------------------------------------------------------------


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), F32 (ggml's unary SILU)."""
    return SILU(x)


def silu_back(x: Tensor, dy: Tensor) -> Tensor:
    """d(loss)/dx of silu, given dy = d(loss)/dy; all of one shape (ggml's SILU_BACK)."""
    return SILU_BACK(x, dy)


@parallel
def _silu(y, x):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            y[r, c] = x[r, c] * sigmoid32(x[r, c])


def _silu_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(x * sigmoid_ref(x))


def _silu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · σ(x) · (1 + x · (1 - σ(x)))"""
    return (silu_back(node.src[0], dy),)


@parallel
def _silu_back(dx, x, dy):
    for r in prange(x.shape[0]):
        for c in range(x.shape[1]):
            s = sigmoid32(x[r, c])
            dx[r, c] = dy[r, c] * s * (_ONE + x[r, c] * (_ONE - s))


def _silu_back_ref(x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    return np.asarray(dy * sigmoid_ref(x) * (1 + x * (1 - sigmoid_ref(x))))


SILU = unary_op("silu", GGMLUnaryOp.SILU, _silu, _silu_ref, _silu_grad, draws(0, 6), strips)
SILU_BACK = back_op("silu_back", GGMLOp.SILU_BACK, _silu_back, _silu_back_ref, draws(0, 6), strips)

# -- softplus, elu ------------------------------------------------------------------------------


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), F32, without overflow (ggml's unary SOFTPLUS)."""
    return SOFTPLUS(x)


@kernel
def _softplus(y, x):
    for i in range(x.size):
        y[i] = max(x[i], np.float32(0)) + np.log1p(np.exp(-abs(x[i])))


def _softplus_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp(0, x))


def _softplus_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · σ(x)"""
    return (mul(dy, sigmoid(node.src[0])),)


SOFTPLUS = unary_op(
    "softplus", GGMLUnaryOp.SOFTPLUS, _softplus, _softplus_ref, _softplus_grad, draws(0, 6)
)


def elu(x: Tensor) -> Tensor:
    """x, or e^x - 1 where x < 0, F32 (ggml's unary ELU)."""
    return ELU(x)


@kernel
def _elu(y, x):
    for i in range(x.size):
        y[i] = x[i] if x[i] > 0 else np.expm1(x[i])


def _elu_ref(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _elu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · e^min(x, 0)"""
    return (mul(dy, exp(clamp(node.src[0], -math.inf, 0.0))),)


ELU = unary_op("elu", GGMLUnaryOp.ELU, _elu, _elu_ref, _elu_grad, draws(0.1, 3))

# -- xielu ----------------------------------------------------------------------------------------


_ZERO, _TWO = np.float32(0), np.float32(2)
_XIELU_SAMPLE: dict[str, Any] = {"a_n": 1.3, "a_p": 0.8, "beta": 0.5, "eps": -1e-6}


def xielu(
    x: Tensor, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """xIELU with a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n), F32 (ggml's XIELU).

    The alphas are constants, as in ggml. An eps above 0 counts as 0. Raises ShapeError if it is no
    number.
    """
    beta = float(beta)
    a_n, a_p = beta + _log1p_exp(alpha_n), _log1p_exp(alpha_p)
    return XIELU(x, a_n=a_n, a_p=a_p, beta=beta, eps=float(eps))


_XIELU_REFUSES = {"a_n": (), "a_p": (), "beta": (), "eps": (NAN,)}


def _check_eps(name: str, eps: float, **_: float) -> None:
    if math.isnan(eps):
        raise ShapeError(f"{name}: eps is {eps}, wanted a number")


def _log1p_exp(x: float) -> float:
    x = float(x)
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


@kernel
def _xielu(y, x, a_n, a_p, beta, eps):
    for i in range(x.size):
        if x[i] > _ZERO:
            y[i] = a_p * x[i] * x[i] + beta * x[i]
        else:
            y[i] = a_n * (np.expm1(min(x[i], eps)) - x[i]) + beta * x[i]


def _xielu_ref(x: np.ndarray, a_n: float, a_p: float, beta: float, eps: float) -> np.ndarray:
    left = a_n * (np.expm1(np.minimum(x, eps)) - x)
    return np.where(x > 0, a_p * x * x, left) + beta * x


def _xielu_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · xielu'(x)"""
    return (XIELU_BACK(node.src[0], dy, **node.params),)


XIELU = unary_op(
    "xielu",
    GGMLUnaryOp.XIELU,
    _xielu,
    _xielu_ref,
    _xielu_grad,
    draws(0.05, 3, **_XIELU_SAMPLE),
    refuses=_XIELU_REFUSES,
    check=_check_eps,
)


@kernel
def _xielu_back(dx, x, dy, a_n, a_p, beta, eps):
    for i in range(x.size):
        left = a_n * np.expm1(x[i]) if x[i] < eps else -a_n
        slope = _TWO * a_p * x[i] if x[i] > _ZERO else left
        dx[i] = dy[i] * (slope + beta)


def _xielu_back_ref(
    x: np.ndarray, dy: np.ndarray, a_n: float, a_p: float, beta: float, eps: float
) -> np.ndarray:
    left = a_n * (np.where(x < eps, np.exp(np.minimum(x, 0)), 0) - 1)
    return np.asarray(dy * (np.where(x > 0, 2 * a_p * x, left) + beta))


XIELU_BACK = back_op(
    "xielu_back",
    GGMLOp.CUSTOM,
    _xielu_back,
    _xielu_back_ref,
    draws(0.05, 3, **_XIELU_SAMPLE),
    refuses=_XIELU_REFUSES,
    check=_check_eps,
)

# -- hardsigmoid, hardswish -----------------------------------------------------------------------


_SIXTH = np.float32(1 / 6)


def hardsigmoid(x: Tensor) -> Tensor:
    """clamp((x + 3) / 6, 0, 1), F32 (ggml's unary HARDSIGMOID)."""
    return HARDSIGMOID(x)


def hardswish(x: Tensor) -> Tensor:
    """x · hardsigmoid(x), F32 (ggml's unary HARDSWISH)."""
    return HARDSWISH(x)


@kernel
def _gate(x):
    return min(max((x + _THREE) * _SIXTH, _ZERO), _ONE)


@kernel
def _hardsigmoid(y, x):
    for i in range(x.size):
        y[i] = _gate(x[i])


@kernel
def _hardswish(y, x):
    for i in range(x.size):
        y[i] = x[i] * _gate(x[i])


def _hardsigmoid_ref(x: np.ndarray) -> np.ndarray:
    return np.clip((x + 3) / 6, 0, 1)


def _hardswish_ref(x: np.ndarray) -> np.ndarray:
    return x * np.clip((x + 3) / 6, 0, 1)


def _gate_slope(x: Tensor) -> Tensor:
    """1/6 between the kinks at -3 and 3, else 0."""
    return scale(mul(step(scale(x, 1.0, 3.0)), step(scale(x, -1.0, 3.0))), 1 / 6)


def _hardsigmoid_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy / 6 where -3 < x < 3, else 0"""
    return (mul(dy, _gate_slope(node.src[0])),)


def _hardswish_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (hardsigmoid(x) + x · hardsigmoid'(x))"""
    (x,) = node.src
    return (mul(dy, add(hardsigmoid(x), mul(x, _gate_slope(x)))),)


def _around_kinks(rng: np.random.Generator) -> Iterator[Sample]:
    """Between the kinks, and beyond them."""
    yield from draws(0.0, 2.8)(rng)
    yield from draws(3.2, 5.0)(rng)


HARDSIGMOID = unary_op(
    "hardsigmoid",
    GGMLUnaryOp.HARDSIGMOID,
    _hardsigmoid,
    _hardsigmoid_ref,
    _hardsigmoid_grad,
    _around_kinks,
)
HARDSWISH = unary_op(
    "hardswish", GGMLUnaryOp.HARDSWISH, _hardswish, _hardswish_ref, _hardswish_grad, _around_kinks
)
