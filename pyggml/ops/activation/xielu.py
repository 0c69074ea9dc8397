"""The expanded integral of ELU (arXiv:2411.13010), as Apertus has it.

xielu        a_p·x² + beta·x  where x > 0,  else  a_n·(e^min(x, eps) − 1 − x) + beta·x
xielu_back   dy · (slope + beta); slope = 2·a_p·x  where x > 0,  a_n·(e^x − 1)  where x < eps,
             else −a_n
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pyggml.errors import ShapeError
from pyggml.graph.ggml_enums import GGMLOp, GGMLUnaryOp
from pyggml.graph.op import Memory, NoGrad, Sample, Spec, op
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.kernels.kernel import cpu_kernel, flat
from pyggml.ops.arithmetic.unary import draws, unary_op
from pyggml.ops.expect import NAN, expect, expect_type

_ZERO, _TWO = np.float32(0), np.float32(2)
_SAMPLE: dict[str, Any] = {"a_n": 1.3, "a_p": 0.8, "beta": 0.5, "eps": -1e-6}


def xielu(
    x: Tensor, alpha_n: float, alpha_p: float, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """xIELU with a_p = softplus(alpha_p), a_n = beta + softplus(alpha_n), F32 (ggml's XIELU).

    The alphas are constants, as in ggml. Raises ShapeError if eps is above 0.
    """
    a_n, a_p = beta + _softplus(alpha_n), _softplus(alpha_p)
    return XIELU(x, a_n=a_n, a_p=a_p, beta=float(beta), eps=float(eps))


_REFUSES = {"a_n": (), "a_p": (), "beta": (), "eps": (0.1, NAN)}


def _check_eps(name: str, eps: float, **_: float) -> None:
    if not eps <= 0:
        raise ShapeError(f"{name}: eps is {eps}, wanted 0 or less")


def _softplus(x: float) -> float:
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
    draws(0.05, 3, **_SAMPLE),
    refuses=_REFUSES,
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


def _xielu_back_spec(x: Tensor, dy: Tensor, **params: float) -> Spec:
    expect_type("xielu_back", "x", x)
    expect("xielu_back", "dy", dy, x.shape)
    _check_eps("xielu_back", **params)
    return Spec(x.shape)


def _xielu_back_samples(rng: np.random.Generator) -> Iterator[Sample]:
    for s in draws(0.05, 3, **_SAMPLE)(rng):
        yield Sample((*s.arrays, rng.standard_normal(s.arrays[0].shape)), s.params)


XIELU_BACK = op(
    name="xielu_back",
    ggml=GGMLOp.CUSTOM,
    spec=_xielu_back_spec,
    ref=_xielu_back_ref,
    grad=NoGrad("second derivatives are out of scope"),
    samples=_xielu_back_samples,
    refuses=_REFUSES,
    memory=Memory.INPLACE,
)
cpu_kernel(XIELU_BACK, flat(_xielu_back))
