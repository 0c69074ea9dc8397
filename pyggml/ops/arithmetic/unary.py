"""Functions of one number: powers, exponentials, sine and cosine, signs and steps.

sqr x²   sqrt   log   exp   expm1 e^x - 1   sin   cos   abs
sgn -1, 0 or 1   step 1 where x > 0, else 0   clamp(x, low, high)
floor   ceil   round (halves away from 0)   trunc (towards 0)

F16 and BF16 are computed as F32, and the result is of x's type (Op.halves).
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.call import Call
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import NO_SETTINGS, GradRule, Memory, NoGrad, Op, Refused, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.jit.simd import exp32
from pyggml.kernels.kernel import Site, cpu_kernel, flat
from pyggml.ops.arithmetic.arith import div, mul, neg, scale
from pyggml.ops.expect import NAN, expect_type

Layout = Callable[[Callable[..., None]], Callable[[Site], Call]]
Samples = Callable[[np.random.Generator], Iterator[Sample]]


def unary_op(
    name: str,
    ggml: GGMLOp | GGMLUnaryOp,
    code: Callable[..., None],
    ref: Callable[..., np.ndarray],
    grad: GradRule | NoGrad,
    samples: Samples,
    arrays: Layout = flat,
    refuses: Refused = NO_SETTINGS,
    check: Callable[..., None] = lambda name, **_: None,
) -> Op:
    """Declare y_i = f(x_i; params), F32; code(y, x, *params) gets arrays as `arrays` says.

    check(name, **params) raises ShapeError for the values in `refuses`.
    """

    def spec(x: Tensor, **params: Any) -> Spec:
        expect_type(name, "x", x)
        check(name, **params)
        return Spec(x.shape)

    new = op(
        name=name,
        ggml=ggml,
        spec=spec,
        ref=ref,
        grad=grad,
        samples=samples,
        refuses=refuses,
        memory=Memory.INPLACE,
        halves=True,
    )
    cpu_kernel(new, arrays(code))
    return new


def draws(least: float, most: float, /, signed: bool = True, **params: Any) -> Samples:
    """Samples with magnitudes from least to most; least > 0 keeps them off a kink at 0."""

    def samples(rng: np.random.Generator) -> Iterator[Sample]:
        for shape in [(1, 1), (3, 8), (2, 3, 5), (67,)]:
            sign = rng.choice([-1.0, 1.0], shape) if signed else 1.0
            yield Sample((rng.uniform(least, most, shape) * sign,), params)

    return samples


_FLAT = NoGrad("the function is constant between its jumps")

# -- powers, exponentials, sine and cosine ------------------------------------------------------


def sqr(x: Tensor) -> Tensor:
    """x², F32 (ggml's SQR)."""
    return SQR(x)


@kernel
def _sqr(y, x):
    for i in range(x.size):
        y[i] = x[i] * x[i]


def _sqr_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = 2x · dy"""
    return (scale(mul(dy, node.src[0]), 2.0),)


SQR = unary_op("sqr", GGMLOp.SQR, _sqr, np.square, _sqr_grad, draws(0, 2))


def sqrt(x: Tensor) -> Tensor:
    """√x, F32 (ggml's SQRT)."""
    return SQRT(x)


@kernel
def _sqrt(y, x):
    for i in range(x.size):
        y[i] = np.sqrt(x[i])


def _sqrt_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy / 2y"""
    return (div(scale(dy, 0.5), node),)


SQRT = unary_op("sqrt", GGMLOp.SQRT, _sqrt, np.sqrt, _sqrt_grad, draws(0.2, 3, signed=False))


def log(x: Tensor) -> Tensor:
    """The natural logarithm, F32 (ggml's LOG)."""
    return LOG(x)


@kernel
def _log(y, x):
    for i in range(x.size):
        y[i] = np.log(x[i])


def _log_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy / x"""
    return (div(dy, node.src[0]),)


LOG = unary_op("log", GGMLOp.LOG, _log, np.log, _log_grad, draws(0.2, 3, signed=False))


def exp(x: Tensor) -> Tensor:
    """e^x, F32 (ggml's unary EXP)."""
    return EXP(x)


_REACH, _E = np.float32(88.37), np.float32(math.e)  # where exp32 ends


@kernel
def _exp(y, x):
    """From 88.37 to 88.72, where a float32 ends too, e^x = e · e^(x − 1)."""
    n_far = 0
    for i in range(x.size):
        n_far += x[i] > _REACH
    if n_far == 0:
        for i in range(x.size):
            y[i] = exp32(x[i])
        return
    for i in range(x.size):
        far = x[i] > _REACH
        z = exp32(x[i] - np.float32(1) if far else x[i])
        y[i] = z * _E if far else z


def _exp_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · y"""
    return (mul(dy, node),)


EXP = unary_op("exp", GGMLUnaryOp.EXP, _exp, np.exp, _exp_grad, draws(0, 4))


def expm1(x: Tensor) -> Tensor:
    """e^x - 1, F32, exact near 0 (ggml's unary EXPM1)."""
    return EXPM1(x)


@kernel
def _expm1(y, x):
    for i in range(x.size):
        y[i] = np.expm1(x[i])


def _expm1_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (y + 1)"""
    return (mul(dy, scale(node, 1.0, 1.0)),)


EXPM1 = unary_op("expm1", GGMLUnaryOp.EXPM1, _expm1, np.expm1, _expm1_grad, draws(0, 2))


def sin(x: Tensor) -> Tensor:
    """sin x, F32, x in radians (ggml's SIN)."""
    return SIN(x)


@kernel
def _sin(y, x):
    for i in range(x.size):
        y[i] = np.sin(x[i])


def _sin_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · cos x"""
    return (mul(dy, cos(node.src[0])),)


SIN = unary_op("sin", GGMLOp.SIN, _sin, np.sin, _sin_grad, draws(0, 4))


def cos(x: Tensor) -> Tensor:
    """cos x, F32, x in radians (ggml's COS)."""
    return COS(x)


@kernel
def _cos(y, x):
    for i in range(x.size):
        y[i] = np.cos(x[i])


def _cos_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = -dy · sin x"""
    return (neg(mul(dy, sin(node.src[0]))),)


COS = unary_op("cos", GGMLOp.COS, _cos, np.cos, _cos_grad, draws(0, 4))

# -- signs and steps ----------------------------------------------------------------------------


def abs_(x: Tensor) -> Tensor:
    """|x|, F32 (ggml's unary ABS)."""
    return ABS(x)


@kernel
def _abs(y, x):
    for i in range(x.size):
        y[i] = abs(x[i])


def _abs_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · sgn x"""
    return (mul(dy, sgn(node.src[0])),)


ABS = unary_op("abs", GGMLUnaryOp.ABS, _abs, np.abs, _abs_grad, draws(0.1, 2))


def sgn(x: Tensor) -> Tensor:
    """-1, 0 or 1, F32 (ggml's unary SGN)."""
    return SGN(x)


@kernel
def _sgn(y, x):
    for i in range(x.size):
        y[i] = np.float32(x[i] > 0) - np.float32(x[i] < 0)


SGN = unary_op("sgn", GGMLUnaryOp.SGN, _sgn, np.sign, _FLAT, draws(0, 2))


def step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0, F32 (ggml's unary STEP)."""
    return STEP(x)


@kernel
def _step(y, x):
    for i in range(x.size):
        y[i] = np.float32(x[i] > 0)


def _step_ref(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, 1.0, 0.0)


STEP = unary_op("step", GGMLUnaryOp.STEP, _step, _step_ref, _FLAT, draws(0, 2))


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """x limited to [low, high], F32; either bound may be infinite (ggml's CLAMP).

    Raises ShapeError if low is above high.
    """
    return CLAMP(x, low=float(low), high=float(high))


def _check_bounds(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ShapeError(f"{name}: low is {low} and high {high}, wanted low <= high")


@kernel
def _clamp(y, x, low, high):
    for i in range(x.size):
        y[i] = min(max(x[i], low), high)


def _clamp_ref(x: np.ndarray, low: float, high: float) -> np.ndarray:
    return np.asarray(np.clip(x, low, high))


def _clamp_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy where low < x < high, else 0"""
    (x,) = node.src
    above = step(scale(x, 1.0, -node.params["low"]))
    below = step(scale(x, -1.0, node.params["high"]))
    return (mul(mul(dy, above), below),)


def _clamp_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from draws(0.1, 2.0, low=-3.0, high=0.05)(rng)
    yield from draws(0.1, 2.0, low=0.0, high=float("inf"))(rng)


CLAMP = unary_op(
    "clamp",
    GGMLOp.CLAMP,
    _clamp,
    _clamp_ref,
    _clamp_grad,
    _clamp_samples,
    refuses={"low": (0.1, NAN), "high": (-4.0, NAN)},
    check=_check_bounds,
)

# -- whole numbers ------------------------------------------------------------------------------


def floor(x: Tensor) -> Tensor:
    """The whole number at or below x, F32 (ggml's unary FLOOR)."""
    return FLOOR(x)


@kernel
def _floor(y, x):
    for i in range(x.size):
        y[i] = np.floor(x[i])


FLOOR = unary_op("floor", GGMLUnaryOp.FLOOR, _floor, np.floor, _FLAT, draws(0, 5))


def ceil(x: Tensor) -> Tensor:
    """The whole number at or above x, F32 (ggml's unary CEIL)."""
    return CEIL(x)


@kernel
def _ceil(y, x):
    for i in range(x.size):
        y[i] = np.ceil(x[i])


CEIL = unary_op("ceil", GGMLUnaryOp.CEIL, _ceil, np.ceil, _FLAT, draws(0, 5))


def round_(x: Tensor) -> Tensor:
    """The nearest whole number, halves away from 0 as C's roundf, F32 (ggml's unary ROUND)."""
    return ROUND(x)


@kernel
def _round(y, x):
    for i in range(x.size):
        whole = np.trunc(x[i])
        part = x[i] - whole
        y[i] = whole + np.float32(part >= 0.5) - np.float32(part <= -0.5)


def _round_ref(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.sign(x) * np.floor(np.abs(x) + 0.5))


ROUND = unary_op("round", GGMLUnaryOp.ROUND, _round, _round_ref, _FLAT, draws(0, 5))


def trunc(x: Tensor) -> Tensor:
    """x rounded towards 0, F32 (ggml's unary TRUNC)."""
    return TRUNC(x)


@kernel
def _trunc(y, x):
    for i in range(x.size):
        y[i] = np.trunc(x[i])


TRUNC = unary_op("trunc", GGMLUnaryOp.TRUNC, _trunc, np.trunc, _FLAT, draws(0, 5))
