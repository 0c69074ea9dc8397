"""Piecewise linear stand-ins for sigmoid and silu (Howard et al., arXiv:1905.02244).

hardsigmoid  clamp((x + 3) / 6, 0, 1)        hardswish  x · hardsigmoid(x)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyggml.graph.ggml_enums import GGMLUnaryOp
from pyggml.graph.op import Sample
from pyggml.graph.tensor import Tensor
from pyggml.jit import kernel
from pyggml.ops.arithmetic.arith import add, mul, scale
from pyggml.ops.arithmetic.unary import draws, step, unary_op

_ZERO, _ONE, _THREE = np.float32(0), np.float32(1), np.float32(3)
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


def _slope(x: Tensor) -> Tensor:
    """1/6 between the kinks at -3 and 3, else 0."""
    return scale(mul(step(scale(x, 1.0, 3.0)), step(scale(x, -1.0, 3.0))), 1 / 6)


def _hardsigmoid_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy / 6 where -3 < x < 3, else 0"""
    return (mul(dy, _slope(node.src[0])),)


def _hardswish_grad(node: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """dx = dy · (hardsigmoid(x) + x · hardsigmoid'(x))"""
    (x,) = node.src
    return (mul(dy, add(hardsigmoid(x), mul(x, _slope(x)))),)


def _samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Between the kinks, and beyond them."""
    yield from draws(0.0, 2.8)(rng)
    yield from draws(3.2, 5.0)(rng)


HARDSIGMOID = unary_op(
    "hardsigmoid",
    GGMLUnaryOp.HARDSIGMOID,
    _hardsigmoid,
    _hardsigmoid_ref,
    _hardsigmoid_grad,
    _samples,
)
HARDSWISH = unary_op(
    "hardswish", GGMLUnaryOp.HARDSWISH, _hardswish, _hardswish_ref, _hardswish_grad, _samples
)
