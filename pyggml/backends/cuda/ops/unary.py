"""Functions of one number, and gradients of activations: see ops/arithmetic, ops/activation."""

import math

import numpy as np

from pyggml.backends.cuda.code import formulas as f
from pyggml.backends.cuda.code.formulas import ONE, TWO, ZERO, sigmoid
from pyggml.backends.cuda.code.jit import device
from pyggml.backends.cuda.ops.elementwise import of_one, of_two
from pyggml.backends.cuda.runtime.table import declare

_HALF, _THREE, _SIXTH = np.float32(0.5), np.float32(3), np.float32(1 / 6)


@device
def _sqr(x):
    return x * x


@device
def _sqrt(x):
    return math.sqrt(x)


@device
def _log(x):
    return math.log(x)


@device
def _exp(x):
    return math.exp(x)


@device
def _expm1(x):
    return math.expm1(x)


@device
def _sin(x):
    return math.sin(x)


@device
def _cos(x):
    return math.cos(x)


@device
def _abs(x):
    return abs(x)


@device
def _sgn(x):
    return np.float32(x > ZERO) - np.float32(x < ZERO)


@device
def _step(x):
    return np.float32(x > ZERO)


@device
def _clamp(x, low, high):
    return min(max(x, low), high)


@device
def _floor(x):
    return np.float32(math.floor(x))


@device
def _ceil(x):
    return np.float32(math.ceil(x))


@device
def _trunc(x):
    return math.copysign(np.float32(math.floor(abs(x))), x)


@device
def _round(x):
    whole = np.float32(math.floor(abs(x)))
    return math.copysign(whole + np.float32(abs(x) - whole >= _HALF), x)


@device
def _scale(x, s, b):
    return s * x + b


@device
def _neg(x):
    return -x


@device
def _leaky_relu(x, slope):
    return x if x > ZERO else slope * x


@device
def _tanh(x):
    return math.tanh(x)


@device
def _softplus(x):
    return max(x, ZERO) + math.log1p(math.exp(-abs(x)))


@device
def _elu(x):
    return x if x > ZERO else math.expm1(x)


@device
def _hardsigmoid(x):
    return min(max((x + _THREE) * _SIXTH, ZERO), ONE)


@device
def _hardswish(x):
    return x * _hardsigmoid(x)


@device
def _xielu(x, a_n, a_p, beta, eps):
    if x > ZERO:
        return a_p * x * x + beta * x
    return a_n * (math.expm1(min(x, eps)) - x) + beta * x


@device
def _silu_back(x, dy):
    return dy * f.silu_slope(x)


@device
def _gelu_back(x, dy):
    return dy * f.gelu_slope(x)


@device
def _gelu_erf_back(x, dy):
    return dy * f.gelu_erf_slope(x)


@device
def _xielu_back(x, dy, a_n, a_p, beta, eps):
    left = a_n * math.expm1(x) if x < eps else -a_n
    slope = TWO * a_p * x if x > ZERO else left
    return dy * (slope + beta)


for _name, _formula in {
    "sqr": _sqr,
    "sqrt": _sqrt,
    "log": _log,
    "exp": _exp,
    "expm1": _expm1,
    "sin": _sin,
    "cos": _cos,
    "abs": _abs,
    "sgn": _sgn,
    "step": _step,
    "clamp": _clamp,
    "floor": _floor,
    "ceil": _ceil,
    "trunc": _trunc,
    "round": _round,
    "scale": _scale,
    "neg": _neg,
    "relu": f.relu,
    "leaky_relu": _leaky_relu,
    "sigmoid": sigmoid,
    "tanh": _tanh,
    "silu": f.silu,
    "softplus": _softplus,
    "elu": _elu,
    "gelu": f.gelu,
    "gelu_quick": f.gelu_quick,
    "gelu_erf": f.gelu_erf,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "xielu": _xielu,
}.items():
    declare(_name, of_one(_formula))

for _name, _formula in {
    "silu_back": _silu_back,
    "gelu_back": _gelu_back,
    "gelu_erf_back": _gelu_erf_back,
    "xielu_back": _xielu_back,
}.items():
    declare(_name, of_two(_formula))
