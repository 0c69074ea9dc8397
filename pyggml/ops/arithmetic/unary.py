"""Functions of one number: powers, exponentials, sine and cosine, signs and steps.

sqr x²   sqrt   log   exp   expm1 e^x - 1   sin   cos   abs
sgn -1, 0 or 1   step 1 where x > 0, else 0   clamp(x, low, high)
floor   ceil   round (halves away from 0)   trunc (towards 0)

F16 and BF16 are computed as F32, and the result is of x's type (Op.halves).
"""

from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas import expression as f
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import Sample
from pyggml.graph.tensor import Tensor
from pyggml.ops import formulas
from pyggml.ops.by_formula import draws, formula_op
from pyggml.ops.expect import NAN

# -- powers, exponentials, sine and cosine ------------------------------------------------------


def sqr(x: Tensor) -> Tensor:
    """x², F32 (ggml's SQR)."""
    return SQR(x)


SQR = formula_op(formulas.sqr, GGMLOp.SQR, draws(0, 2))


def sqrt(x: Tensor) -> Tensor:
    """√x, F32 (ggml's SQRT)."""
    return SQRT(x)


SQRT = formula_op(f.sqrt, GGMLOp.SQRT, draws(0.2, 3, signed=False))


def log(x: Tensor) -> Tensor:
    """The natural logarithm, F32 (ggml's LOG)."""
    return LOG(x)


LOG = formula_op(f.log, GGMLOp.LOG, draws(0.2, 3, signed=False))


def exp(x: Tensor) -> Tensor:
    """e^x, F32 (ggml's unary EXP)."""
    return EXP(x)


EXP = formula_op(f.exp, GGMLUnaryOp.EXP, draws(0, 4))


def expm1(x: Tensor) -> Tensor:
    """e^x - 1, F32, exact near 0 (ggml's unary EXPM1)."""
    return EXPM1(x)


EXPM1 = formula_op(f.expm1, GGMLUnaryOp.EXPM1, draws(0, 2))


def sin(x: Tensor) -> Tensor:
    """sin x, F32, x in radians (ggml's SIN)."""
    return SIN(x)


SIN = formula_op(f.sin, GGMLOp.SIN, draws(0, 4))


def cos(x: Tensor) -> Tensor:
    """cos x, F32, x in radians (ggml's COS)."""
    return COS(x)


COS = formula_op(f.cos, GGMLOp.COS, draws(0, 4))

# -- signs and steps ----------------------------------------------------------------------------


def abs_(x: Tensor) -> Tensor:
    """|x|, F32 (ggml's unary ABS)."""
    return ABS(x)


ABS = formula_op(f.abs_, GGMLUnaryOp.ABS, draws(0.1, 2))


def sgn(x: Tensor) -> Tensor:
    """-1, 0 or 1, F32 (ggml's unary SGN)."""
    return SGN(x)


SGN = formula_op(f.sgn, GGMLUnaryOp.SGN, draws(0, 2))


def step(x: Tensor) -> Tensor:
    """1 where x > 0, else 0, F32 (ggml's unary STEP)."""
    return STEP(x)


STEP = formula_op(formulas.step, GGMLUnaryOp.STEP, draws(0, 2))


def clamp(x: Tensor, low: float, high: float) -> Tensor:
    """x limited to [low, high], F32; either bound may be infinite (ggml's CLAMP).

    Raises ShapeError if low is above high.
    """
    return CLAMP(x, low=float(low), high=float(high))


def _check_bounds(name: str, low: float, high: float) -> None:
    if not low <= high:
        raise ShapeError(f"{name}: low is {low} and high {high}, wanted low <= high")


def _clamp_samples(rng: np.random.Generator) -> Iterator[Sample]:
    yield from draws(0.1, 2.0, low=-3.0, high=0.05)(rng)
    yield from draws(0.1, 2.0, low=0.0, high=float("inf"))(rng)


CLAMP = formula_op(
    formulas.clamp,
    GGMLOp.CLAMP,
    _clamp_samples,
    {"low": (0.1, NAN), "high": (-4.0, NAN)},
    _check_bounds,
)

# -- whole numbers ------------------------------------------------------------------------------


def floor(x: Tensor) -> Tensor:
    """The whole number at or below x, F32 (ggml's unary FLOOR)."""
    return FLOOR(x)


FLOOR = formula_op(f.floor, GGMLUnaryOp.FLOOR, draws(0, 5))


def ceil(x: Tensor) -> Tensor:
    """The whole number at or above x, F32 (ggml's unary CEIL)."""
    return CEIL(x)


CEIL = formula_op(f.ceil, GGMLUnaryOp.CEIL, draws(0, 5))


def round_(x: Tensor) -> Tensor:
    """The nearest whole number, halves away from 0 as C's roundf, F32 (ggml's unary ROUND)."""
    return ROUND(x)


ROUND = formula_op(formulas.round_, GGMLUnaryOp.ROUND, draws(0, 5))


def trunc(x: Tensor) -> Tensor:
    """x rounded towards 0, F32 (ggml's unary TRUNC)."""
    return TRUNC(x)


TRUNC = formula_op(f.trunc, GGMLUnaryOp.TRUNC, draws(0, 5))
