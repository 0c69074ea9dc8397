"""Functions of one number, and gradients of activations: see ops/arithmetic, ops/activation."""

import math
from collections.abc import Callable

import numpy as np

from pyggml.backends.cuda.code import formulas as f
from pyggml.backends.cuda.code.formulas import ONE, TWO, ZERO
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.ops.elementwise import of_one, of_two
from pyggml.backends.cuda.runtime.table import declare

_HALF, _THREE, _SIXTH = np.float32(0.5), np.float32(3), np.float32(1 / 6)


@device
def _round(x):
    whole = np.float32(math.floor(abs(x)))
    return math.copysign(whole + np.float32(abs(x) - whole >= _HALF), x)


@device
def _hardsigmoid(x):
    return min(max((x + _THREE) * _SIXTH, ZERO), ONE)


@device
def _xielu(x, a_n, a_p, beta, eps):
    if x > ZERO:
        return a_p * x * x + beta * x
    return a_n * (math.expm1(min(x, eps)) - x) + beta * x


@device
def _silu_back(x, dy):
    return dy * f.silu_slope(x)


@device
def _xielu_back(x, dy, a_n, a_p, beta, eps):
    left = a_n * math.expm1(x) if x < eps else -a_n
    slope = TWO * a_p * x if x > ZERO else left
    return dy * (slope + beta)


_OF_ONE: dict[str, Callable] = {
    "sqr": lambda x: x * x,
    "sqrt": lambda x: math.sqrt(x),
    "log": lambda x: math.log(x),
    "exp": lambda x: math.exp(x),
    "expm1": lambda x: math.expm1(x),
    "sin": lambda x: math.sin(x),
    "cos": lambda x: math.cos(x),
    "abs": lambda x: abs(x),
    "sgn": lambda x: np.float32(x > ZERO) - np.float32(x < ZERO),
    "step": lambda x: np.float32(x > ZERO),
    "clamp": lambda x, low, high: min(max(x, low), high),
    "floor": lambda x: np.float32(math.floor(x)),
    "ceil": lambda x: np.float32(math.ceil(x)),
    "trunc": lambda x: math.copysign(np.float32(math.floor(abs(x))), x),
    "round": _round,
    "scale": lambda x, s, b: s * x + b,
    "neg": lambda x: -x,
    "relu": f.relu,
    "leaky_relu": lambda x, slope: x if x > ZERO else slope * x,
    "sigmoid": f.sigmoid,
    "tanh": lambda x: math.tanh(x),
    "silu": f.silu,
    "softplus": lambda x: max(x, ZERO) + math.log1p(math.exp(-abs(x))),
    "elu": lambda x: x if x > ZERO else math.expm1(x),
    "gelu": f.gelu,
    "gelu_quick": f.gelu_quick,
    "gelu_erf": f.gelu_erf,
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda x: x * _hardsigmoid(x),
    "xielu": _xielu,
}
_OF_TWO: dict[str, Callable] = {
    "silu_back": _silu_back,
    "gelu_back": lambda x, dy: dy * f.gelu_slope(x),
    "gelu_erf_back": lambda x, dy: dy * f.gelu_erf_slope(x),
    "xielu_back": _xielu_back,
}
for _name, _formula in _OF_ONE.items():
    declare(_name, of_one(_formula))
for _name, _formula in _OF_TWO.items():
    declare(_name, of_two(_formula))
