"""Activation functions, s(x) = 1 / (1 + e^-x) the sigmoid; of F16 and BF16 too (Op.halves).

relu         max(x, 0)                leaky_relu   x, or slope · x below 0
sigmoid      s(x)                     tanh
silu         x · s(x)
gelu         x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), Hendrycks and Gimpel, arXiv:1606.08415
gelu_quick   x · s(1.702 x)           gelu_erf     x · Φ(x), Φ the normal distribution
softplus     log(1 + e^x)             elu          x, or e^x - 1 below 0
hardsigmoid  clamp((x + 3) / 6, 0, 1), Howard et al., arXiv:1905.02244
hardswish    x · hardsigmoid(x)
xielu        a_p·x² + beta·x  where x > 0,  else  a_n·(e^min(x, eps) − 1 − x) + beta·x;
             the expanded integral of ELU, arXiv:2411.13010, as Apertus has it

Their formulas are in pyggml/ops/formulas.py; the gradient of each is an op, NAME_back.
"""

import math
from collections.abc import Iterator

import numpy as np

from pyggml.errors import ShapeError
from pyggml.formulas import expression as f
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import OPS, Sample
from pyggml.graph.tensor import Tensor
from pyggml.ops import formulas
from pyggml.ops.by_formula import draws, formula_op
from pyggml.ops.expect import NAN


def relu(x: Tensor) -> Tensor:
    """max(x, 0), F32 (ggml's unary RELU)."""
    return RELU(x)


RELU = formula_op(formulas.relu, GGMLUnaryOp.RELU, draws(0.1, 2))


def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """x, or slope · x where x < 0, F32 (ggml's LEAKY_RELU)."""
    return LEAKY_RELU(x, slope=float(slope))


LEAKY_RELU = formula_op(
    formulas.leaky_relu, GGMLOp.LEAKY_RELU, draws(0.1, 2, slope=0.2), {"slope": ()}
)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), F32 (ggml's unary SIGMOID)."""
    return SIGMOID(x)


SIGMOID = formula_op(f.sigmoid, GGMLUnaryOp.SIGMOID, draws(0, 6))


def tanh(x: Tensor) -> Tensor:
    """tanh x, F32 (ggml's unary TANH)."""
    return TANH(x)


TANH = formula_op(f.tanh, GGMLUnaryOp.TANH, draws(0, 4))


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), F32 (ggml's unary SILU)."""
    return SILU(x)


def silu_back(x: Tensor, dy: Tensor) -> Tensor:
    """d(loss)/dx of silu, given dy = d(loss)/dy; all of one shape (ggml's SILU_BACK)."""
    return OPS["silu_back"](x, dy)


SILU = formula_op(formulas.silu, GGMLUnaryOp.SILU, draws(0, 6), back=GGMLOp.SILU_BACK)


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), F32 (ggml's unary GELU)."""
    return GELU(x)


def gelu_back(x: Tensor, dy: Tensor) -> Tensor:
    """d(loss)/dx of gelu, given dy = d(loss)/dy; all of one shape."""
    return OPS["gelu_back"](x, dy)


GELU = formula_op(formulas.gelu, GGMLUnaryOp.GELU, draws(0, 4))


def gelu_quick(x: Tensor) -> Tensor:
    """x · sigmoid(1.702 x), F32 (ggml's unary GELU_QUICK)."""
    return GELU_QUICK(x)


GELU_QUICK = formula_op(formulas.gelu_quick, GGMLUnaryOp.GELU_QUICK, draws(0, 4))


def gelu_erf(x: Tensor) -> Tensor:
    """x · Φ(x) with the normal distribution's Φ, F32 (ggml's unary GELU_ERF)."""
    return GELU_ERF(x)


GELU_ERF = formula_op(formulas.gelu_erf, GGMLUnaryOp.GELU_ERF, draws(0, 4))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), F32, without overflow (ggml's unary SOFTPLUS)."""
    return SOFTPLUS(x)


SOFTPLUS = formula_op(f.softplus, GGMLUnaryOp.SOFTPLUS, draws(0, 6))


def elu(x: Tensor) -> Tensor:
    """x, or e^x - 1 where x < 0, F32 (ggml's unary ELU)."""
    return ELU(x)


ELU = formula_op(formulas.elu, GGMLUnaryOp.ELU, draws(0.1, 3))


def xielu(
    x: Tensor, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """xIELU with a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n), F32 (ggml's XIELU).

    The alphas are constants, as in ggml. An eps above 0 counts as 0. Raises ShapeError if it is no
    number.
    """
    beta = float(beta)
    a_n, a_p = (float(SOFTPLUS.ref(np.float64(alpha))) for alpha in (alpha_n, alpha_p))
    return XIELU(x, a_n=beta + a_n, a_p=a_p, beta=beta, eps=float(eps))


def _check_eps(name: str, eps: float, **_: float) -> None:
    if math.isnan(eps):
        raise ShapeError(f"{name}: eps is {eps}, wanted a number")


XIELU = formula_op(
    formulas.xielu,
    GGMLUnaryOp.XIELU,
    draws(0.05, 3, a_n=1.3, a_p=0.8, beta=0.5, eps=-1e-6),
    {"a_n": (), "a_p": (), "beta": (), "eps": (NAN,)},
    _check_eps,
)


def hardsigmoid(x: Tensor) -> Tensor:
    """clamp((x + 3) / 6, 0, 1), F32 (ggml's unary HARDSIGMOID)."""
    return HARDSIGMOID(x)


def hardswish(x: Tensor) -> Tensor:
    """x · hardsigmoid(x), F32 (ggml's unary HARDSWISH)."""
    return HARDSWISH(x)


def _around_kinks(rng: np.random.Generator) -> Iterator[Sample]:
    """Between the kinks, and beyond them."""
    yield from draws(0.0, 2.8)(rng)
    yield from draws(3.2, 5.0)(rng)


HARDSIGMOID = formula_op(formulas.hardsigmoid, GGMLUnaryOp.HARDSIGMOID, _around_kinks)
HARDSWISH = formula_op(formulas.hardswish, GGMLUnaryOp.HARDSWISH, _around_kinks)
